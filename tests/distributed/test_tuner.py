"""The tuner on two real ranks without GPUs: a file that cannot be used, candidates that fail, ranks that disagree."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux.comm import links
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.comm.links import Link
from megatron_flux.ops import shipped_plans, timing
from megatron_flux.ops.backend import BackendPlan, Plan
from megatron_flux.ops.backends.fused import FusedBackend
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.backends.tuned import TunedBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.fp8_operand import Fp8Pair, quantized
from megatron_flux.ops.kernel_config import KernelConfig
from megatron_flux.ops.shipped_plans import Entry as Shipped
from megatron_flux.ops.shipped_plans import Shape
from megatron_flux.ops.tuner import cache as tuner_cache
from megatron_flux.ops.tuner import measure
from megatron_flux.ops.tuner.cache import Entry
from megatron_flux.ops.tuner.keys import key_of
from megatron_flux.ops.tuner.measure import Backends
from tests.distributed.pool import RankError, WorkerPool, on_ranks
from tests.distributed.twins import NEEDS_TRITON

SHAPE = (8, 6, 4)
PLANS = (KernelConfig(), KernelConfig(reducers=7))


class Fused(ReferenceBackend):
    """Right results by stock's way, under a plan; fails with plans that a rank is told to fail with."""

    def __init__(self, failing: dict[int, tuple[KernelConfig, ...]]) -> None:
        self._failing = failing.get(dist.get_rank(), ())
        self._alone = bool(failing)  # as a kernel that is enqueued: it does not hold up the host

    def plan(self, call: OperatorCall, config: Any = None) -> Plan:
        return BackendPlan(self, call, config=config)

    def gemm_reduce_scatter(self, call: OperatorCall, config: Any = None) -> Pending:
        if config in self._failing:
            raise MemoryError("no room for the tiles")
        return Pending(call.x) if self._alone else super().gemm_reduce_scatter(call)

    def renew(self, group: dist.ProcessGroup) -> None:
        """Nothing here is ever broken off."""


def candidates(*_: Any, promoted: bool | None) -> list[KernelConfig]:
    return list(PLANS) if promoted is None else [PLANS[promoted]]


class Said(logging.Handler):
    """Handler that collects the package's log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def without_gpus(cache: Path) -> Iterator[list[str]]:
    """``fused`` with the last plan is the fastest; yields what is logged."""

    def timed(ways: dict[str, Any], group: Any, *_: Any) -> dict[str, list[float]]:
        for way in ways.values():
            way()
        return {name: [1.0 / place] for place, name in enumerate(ways, 1)}

    said = Said()
    logger = logging.getLogger("megatron_flux")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_FLUX_TUNE_CACHE", str(cache))
        patch.setattr(links, "probe", lambda *_: Link("nvlink", ""))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(measure, "candidates", candidates)
        patch.setattr(timing, "interleaved", timed)
        patch.setattr(timing, "sustained", lambda ways, ms, *_: {name: ms[name] for name in ways})
        logger.addHandler(said)
        try:
            yield said.lines
        finally:
            logger.removeHandler(said)


def the_call() -> OperatorCall:
    m, n, k = SHAPE
    return OperatorCall("gemm_reduce_scatter", torch.ones(m, k), torch.ones(n, k), dist.group.WORLD)


def tune_once(cache: Path, failing: dict[int, tuple[KernelConfig, ...]]) -> tuple[Entry, list[str], list[float]]:
    """The entry for one call, what was logged, and that call's result."""
    with without_gpus(cache) as said:
        tuned = TunedBackend(Backends(ReferenceBackend(), Fused(failing)))  # type: ignore[arg-type]
        for _ in range(2):  # the second call of another tuner's life: what is wrong is said once
            state_of(dist.group.WORLD).tuned.clear()
            y = the_call().run(tuned).wait()
        (entry,) = tuned.tuner.decisions(dist.group.WORLD).entries.values()
    return entry, said, y.flatten().tolist()


def tune_fp8(cache: Path) -> list[tuple[str, str]]:
    """Keys and choices of one shape in three ways of FP8, and of the first once more."""
    group, (m, n, k) = dist.group.WORLD, SHAPE
    x, weight = (quantized(torch.ones(rows, k), "tensor") for rows in (m, n))
    blocks = Fp8Pair(quantized(torch.ones(m, k), "1x128"), quantized(torch.ones(n, k), "128x128"))
    with without_gpus(cache):
        tuned = TunedBackend(Backends(ReferenceBackend(), Fused({})))  # type: ignore[arg-type]
        state_of(group).tuned.clear()
        for pair in (Fp8Pair(x, weight), Fp8Pair(x, weight, split=True), blocks, Fp8Pair(x, weight)):
            made = OperatorCall("gemm_reduce_scatter", pair.x.numbers, pair.weight.numbers, group, fp8=pair)
            y = made.run(tuned).wait()
            assert y.eq(2 * k).all()
        entries = tuned.tuner.decisions(group).entries
        assert all(set(entry.ms) == {"reference", entry.label} for entry in entries.values())
        return [(key, entry.label) for key, entry in entries.items()]


def test_fp8_is_decided_by_how_it_is_scaled_and_added_up(world2: WorkerPool, tmp_path: Path) -> None:
    found, other = world2.run(tune_fp8, tmp_path / "tuned.json", timeout=30)
    assert found == other
    assert [name for _, name in found] == ["fused default", "fused reducers=7", "fused reducers=7"]
    assert [key.split("4 e4m3fn")[1].split("[n,k]")[0].strip() for key, _ in found] == [
        "x e4m3fn by tensor, to bfloat16", "x e4m3fn by tensor, split, to bfloat16", "x e4m3fn by blocks, to bfloat16",
    ]  # fmt: skip


@NEEDS_TRITON
@on_ranks("world2")
def test_sums_of_fp8_are_tuned_by_themselves_and_beside_wgrad(tmp_path: Path) -> None:
    """Operators as keys have them, and whether a candidate has the own GEMM, which takes no FP8."""
    group, (m, n, k) = dist.group.WORLD, SHAPE
    pair = Fp8Pair(quantized(torch.ones(m, k), "tensor"), quantized(torch.ones(n, k), "tensor"))
    made = OperatorCall("gemm_all_reduce", pair.x.numbers, pair.weight.numbers, group, fp8=pair)
    with without_gpus(tmp_path / "tuned.json"):
        fused: Any = FusedBackend("twin", twin=True)
        tuned = TunedBackend(Backends(ReferenceBackend(), fused))
        state_of(group).tuned.clear()
        for beside in (False, True):
            for _ in range(2):
                assert made._replace(async_op=beside).run(tuned).wait().eq(2 * k).all()
        entries = tuned.tuner.decisions(group).entries
        found = [(key.split(" m=")[0], "own_gemm" in str(entry.ms)) for key, entry in entries.items()]
        assert found == [("gemm_all_reduce", False), ("gemm_all_reduce beside wgrad", False)]


@pytest.mark.parametrize(
    ("operator", "shape"),
    [("all_gather_gemm", [16, 3, 6]), ("gemm_reduce_scatter", [4, 3, 6]), ("gemm_all_reduce", [8, 3, 6])],
)
@on_ranks("world2")
def test_operands_of_three_dimensions_are_tuned(tmp_path: Path, operator: str, shape: list[int]) -> None:
    cache = tmp_path / "tuned.json"
    group, (m, n, k) = dist.group.WORLD, SHAPE
    made = OperatorCall(operator, torch.ones(m, 3, k), torch.ones(n, k), group)
    gathered = operator == "all_gather_gemm"
    with without_gpus(cache):
        tuned = TunedBackend(Backends(ReferenceBackend(), Fused({})))  # type: ignore[arg-type]
        state_of(group).tuned.clear()
        found = made.run(tuned)
        y = found[0] if gathered else found.wait()
        (entry,) = tuned.tuner.decisions(group).entries.values()
    measured, found, right = len(entry.ms), list(y.shape), bool(y.eq(k if gathered else 2 * k).all())
    assert measured >= 1
    assert found == shape
    assert right


def key_of_the_call() -> str:
    """Return the key in the rank's environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "probe", lambda *_: Link("nvlink", ""))
        return key_of(the_call(), captured=False)


def damage(what: str, folder: Path, key: str) -> Path:
    """The path of a cache that cannot be used."""
    path = folder / "tuned.json"
    kept = Entry(backend="fused", plan=PLANS[0], ms={"reference": 1.0}).to_json()
    if what == "folder that cannot be made":
        path.write_text("")
        return path / "below" / "tuned.json"
    if what == "folder in its place":
        path.mkdir()
    elif what == "truncated":
        path.write_text(json.dumps({key: kept})[:-9])
    elif what == "no object":
        path.write_text("[]")
    else:
        plan = {**kept["plan"], **({"wings": 2} if what == "unknown field" else {"bm": "wide"})}
        entry = "fused" if what == "entry of a wrong type" else {**kept, "plan": plan}
        path.write_text(json.dumps({key: entry}))
    return path


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("folder that cannot be made", "cannot be kept in"),
        ("folder in its place", "cannot be read"),
        ("truncated", "delete it to tune again"),
        ("no object", "delete it to tune again"),
        ("unknown field", "wings"),
        ("field of a wrong type", "bm Input should be a valid integer, not 'wide'"),
        ("entry of a wrong type", "should be a valid dictionary"),
    ],
)
def test_a_file_that_cannot_be_used_is_said_once_and_tuning_goes_on(
    world2: WorkerPool, tmp_path: Path, what: str, words: str
) -> None:
    path = damage(what, tmp_path, world2.run(key_of_the_call)[0])
    before = path.read_text() if path.is_file() else None
    (entry, said, y), (other, silent, z) = world2.run(tune_once, path, {}, timeout=30)
    assert entry == other
    assert (entry.backend, entry.plan) == ("fused", PLANS[1])
    assert y == z == [float(2 * SHAPE[2])] * (SHAPE[0] // 2 * SHAPE[1])
    assert silent == []
    told = [line for line in said if words in line]
    assert len(told) == 1, said
    assert str(path) in told[0]
    if "of a wrong type" in what or "field" in what:
        ((_, kept),) = json.loads(path.read_text()).items()
        assert kept == entry.to_json(), "an entry that cannot be used makes way for one that can"
    else:
        assert (path.read_text() if path.is_file() else None) == before, "what is damaged is left to its owner"


def test_an_error_that_nobody_foresaw_is_raised_on_all_ranks(world2: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(RankError) as raised:
        world2.run(tune_with_a_broken_reader, tmp_path / "tuned.json", timeout=30)
    words = str(raised.value)
    assert words.count("gemm_reduce_scatter m=8 n=6 k=4 failed (tp rank 0: KeyError: 'lost')") == 2, words


def tune_with_a_broken_reader(cache: Path) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("lost")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner_cache, "find", broken)
        tune_once(cache, {})


def tune_with_own_wishes(cache: Path) -> list[str]:
    """The fused plans that are tried where the first rank wants the short list, the second one the full one."""
    tried: list[str] = []
    original = measure._can_run

    def recorded(call: OperatorCall, name: str, *more: Any) -> bool:
        tried.append(name)
        return original(call, name, *more)

    found = (Shipped(Shape("gemm_reduce_scatter", "[n,k]", 2, *SHAPE), KernelConfig(reducers=8), 0.5, "run"),)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_FLUX_TUNE", ("short", "full")[dist.get_rank()])
        patch.setattr(measure, "_gpu", lambda call: "NVIDIA H200")
        patch.setattr(shipped_plans, "entries", lambda: found)
        patch.setattr(measure, "_can_run", recorded)
        tune_once(cache, {})
    return tried


def test_the_first_ranks_list_holds_for_all(world2: WorkerPool, tmp_path: Path) -> None:
    tried = world2.run(tune_with_own_wishes, tmp_path / "tuned.json", timeout=30)
    assert tried == [["fused reducers=8", "fused default"]] * 2


@on_ranks("world2")
def test_the_first_ranks_file_holds_for_all(tmp_path: Path) -> None:
    """The first rank's file has a plan, the second's ``reference``, or there is none."""
    rank, file = dist.get_rank(), tmp_path / f"{dist.get_rank()}.json"
    fused, stock = Entry(backend="fused", plan=PLANS[1], ms={"fused": 1.0}), Entry(backend="reference", ms={"a": 1.0})
    state_of(dist.group.WORLD).tuned.clear()
    with without_gpus(file), pytest.MonkeyPatch.context() as patch:
        # Without an entry the first rank runs reference. The other would measure, and wait for it.
        patch.setenv("MEGATRON_FLUX_TUNE_SECONDS", ("0", "30")[rank])
        tuned = TunedBackend(Backends(ReferenceBackend(), Fused({})))  # type: ignore[arg-type]
        calls = []
        for m, *kept in ((8, fused, stock), (16, fused, None), (24, None, fused)):
            calls.append(OperatorCall("gemm_reduce_scatter", torch.ones(m, 4), torch.ones(6, 4), dist.group.WORLD))
            if kept[rank] is not None:
                tuner_cache.store(file, key_of(calls[-1], captured=False), kept[rank])
        dist.barrier()
        for call in calls:
            call.run(tuned).wait()
        found = [(entry.backend, entry.plan) for entry in tuned.tuner.decisions(dist.group.WORLD).entries.values()]
    assert found == [*2 * [("fused", PLANS[1])], ("reference", None)]


def test_a_candidate_that_fails_everywhere_is_dropped(world2: WorkerPool, tmp_path: Path) -> None:
    failing = {0: (PLANS[1],), 1: (PLANS[1],)}
    (entry, said, _), (other, silent, _) = world2.run(tune_once, tmp_path / "tuned.json", failing, timeout=30)
    assert entry == other
    assert (entry.backend, entry.plan) == ("fused", PLANS[0])
    assert set(entry.ms) == {"reference", "fused default"}
    assert silent == []
    (line,) = said
    for part in ("gemm_reduce_scatter m=8 n=6 k=4", "fused reducers=7", "MemoryError: no room for the tiles"):
        assert part in line


def test_all_candidates_fail_everywhere(world2: WorkerPool, tmp_path: Path) -> None:
    failing = {0: PLANS, 1: PLANS}
    (entry, said, _), (other, _, _) = world2.run(tune_once, tmp_path / "tuned.json", failing, timeout=30)
    assert entry == other
    assert (entry.backend, set(entry.ms)) == ("reference", {"reference"})
    assert len(said) == 2


def test_a_candidate_that_fails_on_one_rank_is_an_error_on_all(world2: WorkerPool, tmp_path: Path) -> None:
    """The slab is out of step then: nothing fused can follow on it."""
    with pytest.raises(RankError) as raised:
        world2.run(tune_once, tmp_path / "tuned.json", {1: (PLANS[1],)}, timeout=30)
    words = str(raised.value)
    for part in ("fused reducers=7", "rank 1: MemoryError: no room for the tiles", "not on the others"):
        assert words.count(part) >= 2, words
    assert not (tmp_path / "tuned.json").exists()
