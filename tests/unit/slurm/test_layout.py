"""Every rank of the 128-GPU layout in this process: groups, places and shapes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_flux.cli import main as cli
from megatron_flux.errors import FluxError, UserError
from megatron_flux.patch.linears import LinearPatch
from megatron_flux.slurm import layout
from megatron_flux.slurm.job import Job, Resolved, resolve
from megatron_flux.slurm.layout import check, problems
from megatron_flux.slurm.profile import Profile


def job(name: str = "gpt3-175b", profile: str = "nvlink-h100", **given: Any) -> Resolved:
    return resolve(Job.load(name, given), Profile.load(profile), "flux")


def small(**given: Any) -> Resolved:
    """TP 2 x PP 2 x DP 2 on a node of eight."""
    return job("tiny", **{"nodes": 1, "tp": 2, "pp": 2, **given})


@pytest.fixture(scope="module")
def paper() -> dict[str, Any]:
    """TP 8 x PP 8 x DP 2, FLUX's layout."""
    return check(job())


def test_all_128_ranks_are_where_they_belong(paper: dict[str, Any]) -> None:
    assert paper["problems"] == []
    assert [view["rank"] for view in paper["ranks"]] == list(range(128))
    for view in paper["ranks"]:
        # tp runs fastest, then dp, then pp.
        tp, dp, pp = view["rank"] % 8, view["rank"] // 8 % 2, view["rank"] // 16
        assert view["places"] == {"tp": tp, "dp": dp, "pp": pp}
        assert view["groups"]["tp"] == tuple(range(view["rank"] - tp, view["rank"] - tp + 8))
        assert view["groups"]["dp"] == (pp * 16 + tp, pp * 16 + 8 + tp)
        assert view["groups"]["pp"] == tuple(range(dp * 8 + tp, 128, 16))
        assert (view["node"], view["link"]) == (view["rank"] // 8, "nvlink")


def test_every_stage_is_built_and_runs_flux(paper: dict[str, Any]) -> None:
    assert [found["stage"] for found in paper["stages"]] == list(range(8))
    for found in paper["stages"]:
        last = found["stage"] == 7
        assert found["layers"] == 12
        assert found["flux_layers"] == (5 if last else 4)  # QKV, proj, FC1, FC2, and the output layer
        micro = found["output"][0 if last else 1]
        assert found["output"] == ((micro, 2048, 51200 // 8) if last else (2048 // 8, micro, 12288))
        # Forward and dgrad of a row-parallel linear are one call each, and so of a column-parallel one.
        gathers = {"all_gather_gemm/reference": 5 if last else 4, "gemm_reduce_scatter/reference": 5 if last else 4}
        assert found["calls"] == {**gathers, "all_gather/reference": 3 if last else 2}


def test_the_process_is_left_as_it_was(paper: dict[str, Any]) -> None:
    from megatron.core import parallel_state

    import megatron_flux

    assert not dist.is_initialized()
    assert not parallel_state.is_initialized()
    assert not megatron_flux.is_patched()


def test_a_group_over_nodes_has_no_link() -> None:
    found = check(job(tp=16))
    assert found["problems"] == []
    assert {view["link"] for view in found["ranks"]} == {"none"}


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["slurm", "check", "--profile", "nvlink-h100", "--job", "tiny", "--nodes", "1"]
    for more, last in (([], "every rank fits"), (["--json"], "}")):
        monkeypatch.setattr("sys.argv", ["megatron-flux", *words, *more])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0
        said = capsys.readouterr().out
        assert said.splitlines()[-1] == last
    assert json.loads(said)["memory_gib"] > 0


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


def test_ranks_that_disagree_are_found() -> None:
    chosen = small()
    good = check(chosen)["ranks"]
    assert problems(chosen, good) == []
    wrong = list(good)
    wrong[3] = dict(good[3], groups={**good[3]["groups"], "tp": (1, 3)})
    found = problems(chosen, wrong)
    assert "rank 3, tp group [1, 3]: rank 1 is in [0, 1]" in found
    assert "rank 2, tp group [2, 3]: rank 3 is in [1, 3]" in found
    assert "the tp groups do not cover every rank once" in found
    wrong[3] = dict(good[3], places={**good[3]["places"], "pp": 1})
    assert any(
        line.startswith("rank 3, pp group") and "not the rank itself" in line for line in problems(chosen, wrong)
    )
    assert "8 ranks have 7 different places in tp x pp x dp" in problems(chosen, wrong)
    wrong[3] = dict(good[3], groups={**good[3]["groups"], "dp": (1,)}, link="none")
    assert {"rank 3, dp group [1]: 1 ranks, not 2", "rank 3, tp group [2, 3]: on more than one node"} <= set(
        problems(chosen, wrong)
    )


def test_more_ranks_than_can_be_visited_are_refused() -> None:
    with pytest.raises(UserError, match="up to 1024, and the job has 2048; lower --nodes"):
        check(job(nodes=256))


def test_a_process_with_groups_is_refused() -> None:
    with layout._world(0, small().run), pytest.raises(UserError, match="has process groups already"):
        check(small())
