"""All random state that training draws from, as one value: saved in checkpoints, exchanged between two arms."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from megatron_flux.errors import UserError


def seed_everything(seed: int, cuda_graph_impl: str = "none") -> None:
    """Seed as Megatron does: pipeline stages differ, tensor-parallel ranks share all but Megatron's tracker.

    For CUDA graphs the tracker holds generators, which graphs advance as they are replayed.
    """
    from megatron.core import parallel_state, tensor_parallel

    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    if cuda_graph_impl == "none":
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    else:
        tensor_parallel.model_parallel_cuda_manual_seed(
            seed,
            te_rng_tracker=cuda_graph_impl == "transformer_engine",
            use_cudagraphable_rng=True,
            force_reset_rng=True,
        )
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """The state now. Tensors and plain values only."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    numpy_state = np.random.get_state(legacy=False)["state"]
    return {
        "python": random.getstate(),
        "numpy": {"key": torch.from_numpy(numpy_state["key"].astype(np.int64)), "pos": int(numpy_state["pos"])},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": {name: _value(state) for name, state in get_cuda_rng_tracker().get_states().items()},
    }


def _value(state: torch.Tensor | torch.Generator) -> torch.Tensor:
    return state.get_state() if isinstance(state, torch.Generator) else state.clone()


def set_random_state(state: dict[str, Any]) -> None:
    """Go back to a state of :func:`random_state`.

    Raises:
        UserError: it is of other trackers than those whose generators CUDA graphs know.
    """
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    key = state["numpy"]["key"].cpu().numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, state["numpy"]["pos"], 0, 0.0))
    torch.set_rng_state(state["torch"].cpu())
    torch.cuda.set_rng_state(state["cuda"].cpu())
    tracker = get_cuda_rng_tracker()
    values = {name: s.cpu() for name, s in state["tracker"].items()}
    generators = {name: s for name, s in tracker.get_states().items() if isinstance(s, torch.Generator)}
    if generators and generators.keys() != values.keys():
        raise UserError(
            f"the random state is of the trackers {sorted(values)}, this run has {sorted(generators)}; resume with the "
            "parallelism and --cuda-graph-impl it was saved with"
        )
    for name, generator in generators.items():
        generator.set_state(values.pop(name))  # itself: graphs know it
    if not generators:
        tracker.set_states(values)
