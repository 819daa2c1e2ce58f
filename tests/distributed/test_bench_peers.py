"""``bench peers`` on two real ranks without GPUs: stock over gloo, flux, and arms that go wrong."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux.bench import harness, peers, tables
from megatron_flux.bench.arms import ARMS, Arm, Ways
from megatron_flux.bench.calls import Operands, stock
from megatron_flux.bench.options import PeersRun
from tests.distributed.pool import WorkerPool

FIELDS = {"device", "op", "model", "m", "n", "k", "dtype", "arm", "ms", "error", "version", "queues"}
Bend = Callable[[int, Callable[[], torch.Tensor]], torch.Tensor]


def bench(out: Path, *more: Arm, **changes: Any) -> tuple[dict[str, Any], list[str]]:
    """Run tiny's reduce-scatter, with ``more`` arms."""
    said: list[str] = []
    how = {"op": ["gemm_reduce_scatter"], "model": ["tiny"], "m": [16], "dtype": ["bf16"], "rounds": 2, "burst": 2}
    names = ["nccl", *(arm.name for arm in more), "flux"]
    with pytest.MonkeyPatch.context() as patch:
        for arm in more:
            patch.setitem(ARMS, arm.name, arm)
        wanted = PeersRun(tp=2, device="cpu", out=out, **{**how, "arms": names, **changes})
        return peers.run(wanted, dist.distributed_c10d._get_default_group(), said.append), said


def bent(name: str, bend: Bend, settings: tuple[str, ...] = ("",)) -> Arm:
    """An arm whose call is stock's, but for what ``bend`` makes of it; it gets the number of the call."""

    @contextmanager
    def ways(inputs: Operands) -> Iterator[Ways]:
        calls = dict.fromkeys(settings, 0)
        right = stock(inputs)["serial"]

        def call(setting: str) -> torch.Tensor:
            calls[setting] += 1
            return bend(calls[setting], right) if setting == settings[0] else right()

        yield {setting: lambda setting=setting: call(setting) for setting in settings}  # type: ignore[misc]

    return Arm(name, ways, cpu=True)


def all_arms(out: Path) -> tuple[dict[str, Any], list[str]]:
    every = ["all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"]
    return bench(out, op=every, dtype=["bf16", "fp8"], arms=list(ARMS))


def test_rows_and_reasons(world2: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (summary, said), (other, silent) = world2.run(all_arms, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert ([row["arm"] for row in other["rows"]], silent) == ([row["arm"] for row in summary["rows"]], [])
    rows, skipped = summary["rows"], summary["skipped"]
    assert [row["arm"] for row in rows] == ["gloo", "flux"] * 6
    assert all(set(row) == FIELDS and row["ms"] > 0 and row["error"] < 5e-3 for row in rows)
    assert {one["arm"] for one in skipped} == set(ARMS) - {"nccl", "flux"}
    assert {one["reason"] for one in skipped} == {"it needs GPUs"}
    assert len(said) == 1 + 6
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [(line["arm"], line["setting"], len(line["step_ms"])) for line in lines[:2]] == [
        ("gloo", "", 2),
        ("flux", "", 2),
    ]
    tables.show_peers(summary)
    assert "te_userbuffers did not run 6 call(s): it needs GPUs" in capsys.readouterr().out


def zero_a_row(_: int, right: Callable[[], torch.Tensor]) -> torch.Tensor:
    y = right().clone()
    if dist.get_rank() == 1:
        y[3] = 0
    return y


def nan(_: int, right: Callable[[], torch.Tensor]) -> torch.Tensor:
    y = right().clone()
    if dist.get_rank() == 1:
        y[3, 5] = math.nan
    return y


def never_timed(number: int, right: Callable[[], torch.Tensor]) -> torch.Tensor:
    assert number <= harness.WARMUP_STEPS
    return zero_a_row(number, right)


def raising(at: int) -> Bend:
    def bend(number: int, right: Callable[[], torch.Tensor]) -> torch.Tensor:
        y = right()
        if number == at and dist.get_rank() == 1:
            raise RuntimeError(f"no memory\nin call {number}")
        return y

    return bend


@contextmanager
def cannot_open(_: Operands) -> Iterator[Ways]:
    if dist.get_rank() == 1:
        raise RuntimeError("no such symbol")
    yield {"": lambda: torch.zeros(1)}


def arms_that_go_wrong(out: Path) -> tuple[dict[str, Any], list[str]]:
    wrong = bent("zeroed", never_timed), bent("nan", nan)
    raises = Arm("unopened", cannot_open, cpu=True), bent("first", raising(1)), bent("third", raising(3))
    return bench(out, *wrong, *raises, bent("half", zero_a_row, ("wrong", "right")))


def test_arms_that_go_wrong(world2: WorkerPool, tmp_path: Path) -> None:
    """A wrong one is reported and not timed, one that raises on a rank is dropped on all, a right setting is timed."""
    (summary, said), (other, _) = world2.run(arms_that_go_wrong, tmp_path)
    assert (other["rows"], other["skipped"]) == (summary["rows"], summary["skipped"])
    found = {row["arm"]: (row["ms"] is not None, row["error"]) for row in summary["rows"]}
    assert (found["zeroed"], found["nan"]) == ((False, 1.0), (False, None))
    assert "zeroed: its result is WRONG and not timed: error 1" in said
    assert {one["arm"]: one["reason"] for one in summary["skipped"]} == {
        "unopened": "rank 1: RuntimeError: no such symbol",
        "first": "rank 1: RuntimeError: no memory in call 1",
        "third": "rank 1: RuntimeError: no memory in call 3",
    }
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert {line["arm"]: line["setting"] for line in lines} == {"gloo": "", "flux": "", "half": "right"}
    assert all(found[line["arm"]][0] for line in lines)
