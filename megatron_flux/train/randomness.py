"""All random state that training draws from, as one value: saved in checkpoints, exchanged between two arms."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed as Megatron does: pipeline stages differ, tensor-parallel ranks share all but Megatron's tracker."""
    from megatron.core import parallel_state, tensor_parallel

    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
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
        "tracker": {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()},
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Go back to a state of :func:`random_state`."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    key = state["numpy"]["key"].cpu().numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, state["numpy"]["pos"], 0, 0.0))
    torch.set_rng_state(state["torch"].cpu())
    torch.cuda.set_rng_state(state["cuda"].cpu())
    get_cuda_rng_tracker().set_states({name: s.cpu() for name, s in state["tracker"].items()})
