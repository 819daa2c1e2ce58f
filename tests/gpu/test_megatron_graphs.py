"""Training with Megatron's own CUDA graphs: flux is captured, replayed, and the curves stay those without graphs.

Two layers of both specs, two micro-batches a step (a graph that replaced what the first one added to ``main_grad``
would show in the gradient norm), in this project's training loop, which drives megatron-core's schedules and helper.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux.config import FluxConfig
from tests.distributed.megatron_world import flux, megatron
from tests.distributed.pool import WorkerPool
from tests.gpu.conftest import NEEDS_TE

pytestmark = [pytest.mark.gpus(2), NEEDS_TE]

LAYERS, STEPS, MICRO_BATCHES = 2, 8, 2
IN_GRAPHS = {"all_gather_gemm": 4 * LAYERS, "gemm_reduce_scatter": 4 * LAYERS, "all_gather": 2 * LAYERS}
"""Calls that one graph per layer and direction holds: forward and dgrad of four linears, x of two for their wgrad."""

BESIDE = {"all_gather_gemm": MICRO_BATCHES, "gemm_reduce_scatter": MICRO_BATCHES, "all_gather": MICRO_BATCHES}
"""Calls of a step that are in no graph: the output layer's."""

LOSS, NORM = 1e-2, 1e-1
"""Relative differences: the embedding's gradient is added in no fixed order."""


class Counting:
    """Sequences in which each token is the one before plus one: quick to learn."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        text = (torch.arange(self._length + 1) + 7 * i) % 61
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": torch.ones(self._length),
            "position_ids": torch.arange(self._length),
        }


def run_config(spec: str, graphs: str, backend: str = "fused", fp8: Any = None) -> Any:
    from megatron_flux.train.config import resolve
    from megatron_flux.train.options import TrainOptions

    options = TrainOptions(
        transformer_impl=spec,
        cuda_graph_impl=graphs,
        fp8=fp8,
        num_layers=LAYERS,
        micro_batch_size=2,
        global_batch_size=2 * MICRO_BATCHES,
        backend=backend,
        gradient_accumulation_fusion=True,
        lr=1e-4,  # at five times that, last bits that differ grow to 2 % of the loss in FP8
        hidden_size=1024,
        ffn_hidden_size=4096,
        num_attention_heads=8,
        seq_length=512,
    )
    return resolve(options, world_size=dist.get_world_size(), device="cuda", out=Path("unused"))


def calls() -> Counter[str]:
    """Operator calls so far, of all backends."""
    from megatron_flux import ops

    found: Counter[str] = Counter()
    for (operator, _), n in ops.stats.calls.items():
        found[operator] += n
    return found


class Captured:
    """Counts the operators' calls that become part of a graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from megatron_flux.ops import operators

        self.calls: Counter[str] = Counter()
        run = operators._run

        def counted(call: Any, backend: str) -> Any:
            if torch.cuda.is_current_stream_capturing():
                self.calls[call.operator] += 1
            return run(call, backend)

        monkeypatch.setattr(operators, "_run", counted)


def rank_train(
    spec: str, graphs: str, patched: bool, te_default: bool = False, backend: str = "fused", fp8: str | None = None
) -> dict[str, Any]:
    """Losses and gradient norms by step, and what flux and the graphs did; ``chunked`` goes over host memory.

    ``te_default``: without what training sets for TransformerEngine's graphs, as in a script of somebody's own.
    """
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    from contextlib import nullcontext

    from megatron_flux import ops
    from megatron_flux.ops import cuda_graphs as capture
    from megatron_flux.train.shims import gradient_accumulation_fusion
    from megatron_flux.train.trainer import Trainer

    losses, norms, last = [], [], {}
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        megatron(tp=dist.get_world_size()),
        gradient_accumulation_fusion(),
    ):
        config = run_config(spec, graphs, backend, fp8)
        captured = Captured(monkeypatch)
        link = "host" if backend == "chunked" else None
        device = torch.device("cuda", torch.cuda.current_device())
        flux_config = FluxConfig(backend=config.backend, link=link, strict=True, fp8=fp8 is not None)
        with flux(flux_config) if patched else nullcontext() as seen:
            trainer = Trainer(config, Counting(config.shape.seq_length), device)
            if te_default:
                for module in trainer.model.modules():
                    if hasattr(module, "disable_parameter_transpose_cache"):
                        module.disable_parameter_transpose_cache = False
            with trainer.active():
                for _ in range(STEPS):
                    before = calls()
                    micro_batches, norm, _ = trainer.advance()
                    total, tokens = sum(loss["lm loss"].double() for loss in micro_batches).tolist()
                    losses.append(total / tokens)
                    norms.append(norm)
                    last = dict(calls() - before)
            mode = capture.capturing(torch.ones(1))
            made = graphs_of(trainer, graphs)
            trainer.close()
        found = {"losses": losses, "norms": norms, "last": last, "captured": dict(captured.calls), "mode": mode}
        found |= {"graphs": made, "mode_after": capture.capturing(torch.ones(1))}
        found |= {"seen": seen.as_dict() if patched else None}
        if graphs == "local":
            from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

            delete_cuda_graphs()
        ops.stats.reset()
        return found


def graphs_of(trainer: Any, graphs: str) -> list[bool]:
    """Return for every layer's graphs whether they are there."""
    if graphs == "local":
        runners = trainer._graphs.runners()
        return [bool(r.cudagraph_created and r.fwd_graph is not None and r.bwd_graph is not None) for r in runners]
    if graphs == "transformer_engine":
        # One for all micro-batches. The block has such a list too, which stays empty.
        return [len(made) == 1 for layer in trainer.model.modules() if (made := vars(layer).get("cuda_graphs"))]
    return []


_eager: dict[str, dict[str, Any]] = {}


def eager(ranks: WorkerPool, spec: str) -> dict[str, Any]:
    """Return flux's results without graphs, checked against stock."""
    if spec not in _eager:
        stock = ranks.run(rank_train, spec, "none", False)[0]
        ours = ranks.run(rank_train, spec, "none", True)[0]
        require_close("flux without graphs", ours, "stock", stock)
        assert ours["losses"][-1] < ours["losses"][0] - 0.5, f"the loss does not fall: {ours['losses']}"
        assert ours["mode"] is False, "captured mode without graphs"
        _eager[spec] = ours
    return _eager[spec]


def apart(what: str, found: dict[str, Any], expected: dict[str, Any]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found[what], expected[what], strict=True))


def require_close(
    name: str, found: dict[str, Any], other: str, expected: dict[str, Any], *, stocks: Any = None
) -> None:
    """``stocks``: two curves of stock; what lies between them is allowed twice."""
    for what, least in (("losses", LOSS), ("norms", NORM)):
        tolerance = least if stocks is None else max(least, 2 * apart(what, *stocks))
        pairs, worst = list(zip(found[what], expected[what], strict=True)), apart(what, found, expected)
        assert worst <= tolerance, (
            f"{what} of {name} and of {other} differ by {worst:.1e} (allowed {tolerance:.0e}): "
            + ", ".join(f"{a:.5f}/{b:.5f}" for a, b in pairs)
        )


def require_replayed(rank: int, found: dict[str, Any], in_graphs: dict[str, int]) -> None:
    about = f"rank {rank}: {found}"
    assert found["graphs"] == [True] * LAYERS, f"not one pair of graphs per layer, {about}"
    assert found["captured"] == in_graphs, f"other calls captured than {in_graphs}, {about}"
    assert found["last"] == BESIDE, f"other calls in the last step than the output layer's, {about}"
    assert (found["seen"]["active_layers"], found["seen"]["fallbacks"]) == (4 * LAYERS + 1, {}), about


@pytest.mark.parametrize("graphs", ["transformer_engine", "local"])
@pytest.mark.parametrize(
    ("spec", "backend"), [("transformer_engine", "fused"), ("local", "fused"), ("transformer_engine", "chunked")]
)
def test_flux_is_replayed_and_the_curve_stays(ranks: WorkerPool, spec: str, backend: str, graphs: str) -> None:
    expected = eager(ranks, spec)
    te_default = graphs == "transformer_engine"
    for rank, found in enumerate(ranks.run(rank_train, spec, graphs, True, te_default, backend)):
        require_replayed(rank, found, IN_GRAPHS)
        assert all(name.endswith(f"/{backend}") for name in found["seen"]["calls"]), found
        assert (found["mode"], found["mode_after"]) == (True, False), "captured mode"
        require_close(f"flux in graphs (rank {rank})", found, "flux without", expected)


@pytest.mark.parametrize("graphs", ["transformer_engine", "local"])
@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
def test_fp8_is_replayed_and_the_curve_is_stocks(ranks: WorkerPool, recipe: str, graphs: str) -> None:
    """Two micro-batches a step: the flag of the cached weight and, delayed, amaxes and scales would show.

    What capturing leaves of delayed amaxes is stock's: flux in graphs may be away from flux without by as much as stock
    is from stock, twice.
    """
    from transformer_engine.pytorch import quantization

    check = "check_fp8_block_scaling_support" if recipe == "blockwise" else "check_fp8_support"
    able, why = getattr(quantization, check)()
    if not able:
        pytest.skip(why)
    te = "transformer_engine"
    eager = ranks.run(rank_train, te, "none", True, False, "fused", recipe)[0]
    stock = ranks.run(rank_train, te, graphs, False, False, "fused", recipe)[0]
    stocks = stock, ranks.run(rank_train, te, "none", False, False, "fused", recipe)[0]
    # Blocks: dy is gathered by rows as well, and each gather is one of numbers and one of scales.
    in_graphs = {**IN_GRAPHS, "all_gather": (8 if recipe == "blockwise" else 2) * LAYERS}
    for rank, found in enumerate(ranks.run(rank_train, te, graphs, True, False, "fused", recipe)):
        require_replayed(rank, found, in_graphs)
        others = {name for name in found["seen"]["calls"] if not name.endswith("/fused")}
        assert others <= ({"all_gather/reference"} if recipe == "blockwise" else set()), f"beside scales: {others}"
        require_close(f"flux in graphs (rank {rank})", found, "stock in graphs", stock)
        require_close(f"flux in graphs (rank {rank})", found, "flux without", eager, stocks=stocks)
    require_close("flux without graphs", eager, "stock without", stocks[1])
    assert eager["losses"][-1] < eager["losses"][0] - 0.5, f"the loss does not fall: {eager['losses']}"
