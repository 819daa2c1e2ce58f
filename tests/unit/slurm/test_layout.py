"""Layouts checked in this process: a layer of each stage, fallbacks and shapes that do not divide."""

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_flux.errors import FluxError
from megatron_flux.patch.linears import LinearPatch
from megatron_flux.slurm.job import Job, Resolved, resolve
from megatron_flux.slurm.layout import check
from megatron_flux.slurm.profile import Profile


def job(name: str = "gpt3-175b", profile: str = "nvlink-h100", **given: Any) -> Resolved:
    return resolve(Job.load(name, given), Profile.load(profile), "flux")


def small(**given: Any) -> Resolved:
    """TP 2 x PP 2 x DP 2 on a node of eight."""
    return job("tiny", **{"nodes": 1, "tp": 2, "pp": 2, **given})


def test_every_stage_of_128_ranks_is_built_and_runs_flux() -> None:
    from megatron.core import parallel_state

    import megatron_flux

    before = megatron_flux.report()["calls"]
    first, link, *stages, memory, last = check(job())
    assert first == "128 ranks on 16 node(s): tp 8 x pp 8 x dp 2"
    assert link == "link of tensor-parallel groups: nvlink"
    # QKV, proj, FC1, FC2, and the output layer
    inner, outer = "output 256 x 1 x 12288, 4 linears", "output 1 x 2048 x 6400, 5 linears"
    assert stages == [
        f"stage {number}: 12 layers, {outer if number == 7 else inner} of one layer run flux" for number in range(8)
    ]
    assert memory.endswith(" GiB a GPU for weights, gradients and optimizer state, without activations")
    assert last == "every stage fits"
    # Forward and dgrad of a row-parallel linear are one call each, and so of a column-parallel one.
    linears = 8 * 4 + 1
    expected = {"all_gather_gemm": linears, "gemm_reduce_scatter": linears, "all_gather": 8 * 2 + 1}
    after = {
        name.removesuffix("/reference"): n - before.get(name, 0) for name, n in megatron_flux.report()["calls"].items()
    }
    assert {name: n for name, n in after.items() if n} == expected
    assert not dist.is_initialized()
    assert not parallel_state.is_initialized()
    assert not megatron_flux.is_patched()


def test_a_stage_that_megatron_cannot_build_is_named() -> None:
    good = small()
    shape = good.run.shape.model_copy(update={"ffn_hidden_size": 511})
    bad = replace(good, run=good.run.model_copy(update={"shape": shape}))
    with pytest.raises(FluxError, match=r"rank 0, pipeline stage 0: AssertionError: 511 is not divisible by 2"):
        check(bad)
    assert not dist.is_initialized()


def test_a_layer_that_would_run_stock_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearPatch, "why_stock_common", lambda self, layer, x, weight: "made up")
    with pytest.raises(FluxError, match=r"rank 0, pipeline stage 0: FallbackError: .* cannot run flux: made up"):
        check(small())
