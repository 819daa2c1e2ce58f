"""Operator calls as they are watched: counted and timed on real ranks."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.comm.collectives import Pending
from megatron_flux.layers import column_parallel_linear, row_parallel_linear
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.fp8_operand import Fp8Kind, random_pair
from megatron_flux.telemetry import call_sampler
from megatron_flux.telemetry.call_sampler import NO_OVERLAP, Sampler
from tests import documented
from tests.distributed.pool import on_ranks

DELAY = 0.05


def step(rows: int = 4) -> None:
    """Forward and backward of a column and a row layer."""
    group = dist.group.WORLD
    x = torch.randn(rows, 1, 8, requires_grad=True)
    hidden = column_parallel_linear(x, torch.nn.Parameter(torch.randn(6, 8)), None, group, backend="slow")
    row_parallel_linear(hidden, torch.nn.Parameter(torch.randn(8, 6)), group, backend="slow").sum().backward()


class Slow(ReferenceBackend):
    """Takes known times: in the call, and in the wait of what was started asynchronously."""

    name, automatic = "slow", False

    def all_gather_gemm(self, call: OperatorCall) -> Any:
        time.sleep(DELAY)
        return super().all_gather_gemm(call)

    def all_gather(self, call: OperatorCall) -> Pending:
        pending = super().all_gather(call)

        def wait() -> None:
            time.sleep(2 * DELAY)
            pending.wait()

        return Pending(pending._tensor, wait)


def register() -> None:
    if "slow" not in ops.backend_names():
        ops.register_backend(Slow())


@on_ranks("world2")
def test_one_step_in_two_is_timed() -> None:
    register()
    sampler = Sampler(2)
    seen = []
    before = torch.get_rng_state()
    for iteration in (1, 2, 3):
        with sampler.step(iteration):
            step()
        torch.set_rng_state(before)
        seen.append(sampler.result())
        assert torch.equal(torch.get_rng_state(), before), "measuring drew training's random numbers"
    assert [values is not None for values in seen] == [False, True, False]
    values = seen[1]
    calls = {(row["operator"], row["transposed"], row["n"], row["k"]): row for row in values["flux/calls"]}
    # Forward of the column, dgrad of the row layer; forward of the row, dgrad of the column; x again for wgrad.
    assert set(calls) == {
        ("all_gather_gemm", False, 6, 8),
        ("all_gather_gemm", True, 6, 8),
        ("gemm_reduce_scatter", False, 8, 6),
        ("gemm_reduce_scatter", True, 8, 6),
        ("all_gather", False, 0, 8),
    }
    for row in calls.values():
        assert set(row) == documented.fields("calls").keys()
        assert (row["calls"], row["m"], row["tp"]) == (1, 8, 2)
        assert (row["backend"], row["source"], row["dtype"]) == ("slow", "measured", "float32")
        assert row["gemm_ms"] >= 0 < row["serial_ms"]
        assert (row["sm_clock_mhz"], row["exposed_ms"], row["withheld"]) == (None, None, NO_OVERLAP)
    taken = values["flux/operator_time_ms"]
    assert taken["all_gather_gemm"] >= 2 * DELAY * 1e3  # two calls
    assert taken["all_gather"] >= 2 * DELAY * 1e3  # one wait
    assert set(values["flux/e_overlap"].values()) == {None}


@pytest.mark.parametrize("in_blocks", [False, True])
@on_ranks("world2")
def test_calls_on_fp8_operands_are_measured_on_such(in_blocks: bool) -> None:
    """Random numbers in FP8 do not come from torch's generators, and a GEMM in bf16 is another one."""
    sampler, group = Sampler(1), dist.group.WORLD
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    forward = Fp8Kind(e4m3, e4m3, "1x128" if in_blocks else "tensor", torch.bfloat16, in_blocks)
    dgrad = forward if in_blocks else forward._replace(x=e5m2, promoted=True)
    with sampler.step(1):
        for operator, kind in {
            "all_gather_gemm": forward,
            "gemm_reduce_scatter": dgrad,
            "gemm_all_reduce": forward,
        }.items():
            pair = random_pair(256, 384, 128, kind, torch.device("cpu"))
            getattr(ops, operator)(pair.x, pair.weight, group, split_accumulator=pair.split, backend="reference")
    values = sampler.result()
    plain = f"e4m3fn x e4m3fn by {'blocks' if in_blocks else 'tensor'}, to bfloat16"
    of_dgrad = plain if in_blocks else "e5m2 x e4m3fn by tensor, split, to bfloat16"
    assert {row["operator"]: (row["dtype"], row["m"], row["n"], row["k"]) for row in values["flux/calls"]} == {
        "all_gather_gemm": (plain, 512, 384, 128),
        "gemm_reduce_scatter": (of_dgrad, 256, 384, 128),
        "gemm_all_reduce": (plain, 256, 384, 128),
    }
    assert all(row["gemm_ms"] > 0 and row["serial_ms"] > 0 for row in values["flux/calls"])


@on_ranks("world2")
def test_memory_that_one_rank_lacks_is_said_on_all() -> None:
    register()
    sampler = Sampler(1)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(call_sampler, "_operands", lambda call: None)
        with sampler.step(1):
            step()
        values = sampler.result()
    assert {row["source"] for row in values["flux/calls"]} == {"not measured: no memory for the operands on some rank"}
