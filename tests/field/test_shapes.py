"""Shapes that change, that are small and that nobody has tuned for: real layers of megatron-core on real ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FluxConfig
from megatron_flux.comm.group_state import state_of
from megatron_flux.ops import stats, timing
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.backends.tuned import TunedBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.tuner import cache as cache_module
from megatron_flux.ops.tuner import tuner
from megatron_flux.ops.tuner.measure import Backends
from tests.distributed.megatron_world import gpt_model
from tests.distributed.pool import WorkerPool
from tests.distributed.test_tuner import PLANS, Fused, without_gpus
from tests.field.same import both, fused_kernels, over_host_memory

pytestmark = pytest.mark.distributed

CHUNKED = FluxConfig(backend="chunked", strict=True, keep_gathered=False)
NEW_EVERY_STEP: list[tuple[int, ...]] = [(3, 5), (16,), (1, 1), (7, 2, 1), (4,)]


def packed_sequences() -> dict[str, Any]:
    # Megatron wants the dispatcher of a model without experts, too.
    options = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    with over_host_memory():
        return both(lambda: gpt_model("gpt3", **options), NEW_EVERY_STEP, CHUNKED, tolerance=1e-5, tp=2)


def test_another_number_of_tokens_in_every_step(world2: WorkerPool) -> None:
    """NVIDIA/Megatron-LM#1238, NVIDIA/TransformerEngine#1303: userbuffers want one constant sequence length."""
    for seen in world2.run(packed_sequences):
        n = len(NEW_EVERY_STEP)
        assert seen["calls"] == {
            "all_gather_gemm/chunked": 9 * n, "gemm_reduce_scatter/chunked": 9 * n, "all_gather/chunked": 5 * n
        }  # fmt: skip
        assert seen["fallbacks"] == {}


def fused_packed_sequences() -> dict[str, Any]:
    def build() -> Any:
        return gpt_model("llama", num_layers=1, params_dtype=torch.bfloat16, bf16=True).bfloat16()

    with fused_kernels() as config:  # they add in fp32, stock's collectives in bf16
        return both(build, [(3, 5), (1, 1)], config, tolerance=2**-5, tp=2)["calls"]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_fused_kernels_take_few_and_changing_tokens(world2: WorkerPool) -> None:
    """bytedance/flux#43, #111: at m = 64 slower than torch, or refused; here down to one row a rank."""
    for calls in world2.run(fused_packed_sequences):
        assert calls == {"all_gather_gemm/twin": 10, "gemm_reduce_scatter/twin": 10, "all_gather/twin": 6}


def one_token_a_rank() -> dict[str, Any]:
    with over_host_memory():
        return both(lambda: gpt_model("llama"), [(2,), (1, 1)], CHUNKED, tolerance=1e-5, tp=2)


def test_one_token_a_rank(world2: WorkerPool) -> None:
    """bytedance/flux#111, pytorch/pytorch#179770: small m; the tuner takes stock where that is faster (tests/gpu)."""
    for seen in world2.run(one_token_a_rank):
        assert seen["calls"]["all_gather_gemm/chunked"] == 2 * 9
        assert seen["fallbacks"] == {}


def tuned_calls(cache: Path, seconds: str, rows: list[int]) -> tuple[list[str], list[str], list[str], dict[str, int]]:
    """Backends that ran, as their answers say, what was measured, what was logged, and why calls were stock's."""
    group, ran, measured = dist.group.WORLD, [], []
    weight = torch.ones(6, 4)
    stats.reset()
    cache_module.log_once.cache_clear()
    with without_gpus(cache) as said, mock.patch.dict("os.environ", MEGATRON_FLUX_TUNE_SECONDS=seconds):
        tuned = TunedBackend(Backends(ReferenceBackend(), Fused({})))  # type: ignore[arg-type]
        for m in rows:
            x = torch.full((m, 4), float(m + group.rank()))
            y = OperatorCall("gemm_reduce_scatter", x, weight, group).run(tuned).wait()
            assert torch.equal(y, torch.full((m // 2, 6), 4.0 * (2 * m + 1)))
        for key, entry in tuned.tuner.decisions(group).entries.items():
            ran.append(entry.backend)
            measured += [key] if entry.ms else []
        state_of(group).tuned.clear()
    return ran, measured, said, dict(stats.degraded)


def tuned_by_size(cache: Path) -> tuple[list[str], dict[str, int]]:
    """What runs calls of few rows and of many, where a fused kernel gains with many alone."""

    def timed(ways: dict[str, Any], *_: Any) -> dict[str, list[float]]:
        found = {name: [1.0 if name == "reference" else now[0]] for name in ways}
        for way in ways.values():
            way()
        return found

    group, weight, now = dist.group.WORLD, torch.ones(6, 4), [0.0]
    stats.reset()
    with without_gpus(cache), mock.patch.object(timing, "interleaved", timed):
        tuned = TunedBackend(Backends(ReferenceBackend(), Fused({})))  # type: ignore[arg-type]
        for m, ms in ((2, 1.3), (4, 0.995), (64, 0.8)):  # the second is about as fast, which is no reason
            now[0] = ms
            x = torch.full((m, 4), float(m + group.rank()))
            y = OperatorCall("gemm_reduce_scatter", x, weight, group).run(tuned).wait()
            assert torch.equal(y, torch.full((m // 2, 6), 4.0 * (2 * m + 1)))
        ran = [entry.backend for entry in tuned.tuner.decisions(group).entries.values()]
        state_of(group).tuned.clear()
    return ran, dict(stats.degraded)


def test_where_few_rows_gain_nothing_stock_is_what_was_measured_to_be_faster(
    world2: WorkerPool, tmp_path: Path
) -> None:
    """bytedance/flux#43, #111: at m = 64 slower than torch. A choice, and no fallback: nothing is counted as one."""
    for found in world2.run(tuned_by_size, tmp_path / "tuned.json"):
        assert found == (["reference", "reference", "fused"], {})


def test_a_shape_that_nobody_has_tuned_is_measured_when_it_comes(world2: WorkerPool, tmp_path: Path) -> None:
    """bytedance/flux#14, #165, #166, #180: "unregistered op", a list of shapes and GPUs that others have tuned for."""
    found = world2.run(tuned_calls, tmp_path / "tuned.json", "30", [8, 22, 8])
    for ran, measured, _, degraded in found:
        assert (ran, len(measured), degraded) == (["fused"] * 2, 2, {})


def test_ever_new_shapes_do_not_tune_for_ever(world2: WorkerPool, tmp_path: Path) -> None:
    """NVIDIA/TransformerEngine#1303: with packed sequences every step has its own m."""
    rows = [2 * n for n in range(1, 2 * tuner.MOST_M)]
    found = world2.run(tuned_calls, tmp_path / "tuned.json", "30", rows)
    for rank, (ran, measured, said, degraded) in enumerate(found):
        assert (ran, len(measured), degraded) == (["fused"] * len(rows), tuner.MOST_M, {})
        nearest = [line for line in said if "comes with ever new m: 8 were measured, others run as the nearest" in line]
        assert len(nearest) == (rank == 0)
    assert PLANS  # what Fused was measured with


def test_a_shape_that_may_not_be_measured_runs_stock_by_name(world2: WorkerPool, tmp_path: Path) -> None:
    """bytedance/flux#14: a shape without a tuned kernel; named in the log once and counted in the report."""
    found = world2.run(tuned_calls, tmp_path / "tuned.json", "0", [8, 22, 8])
    for rank, (ran, measured, said, degraded) in enumerate(found):
        assert (ran, measured) == (["reference"] * 2, [])
        assert degraded == {"reference instead of tuned: the call was not measured": 3}
        assert sum("MEGATRON_FLUX_TUNE_SECONDS is 0: calls without a kept plan" in line for line in said) == (rank == 0)
