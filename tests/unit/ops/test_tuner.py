"""Decisions of the tuner: from its file, from another m, from a measurement. Clock and backends are replaced.

On real ranks: tests/distributed/test_tuner.py; on GPUs: tests/gpu/checks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_flux.ops.tuner.ways import beside_wgrad

from megatron_flux.comm import links, transports
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import MOST_ENTRIES, state_of
from megatron_flux.comm.links import Link
from megatron_flux.errors import UserError
from megatron_flux.log_once import log_once
from megatron_flux.ops import shipped_plans, timing
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.backends import chunked
from megatron_flux.ops.backends.tuned import TunedBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.ops.fp8_operand import Fp8Pair, quantized
from megatron_flux.ops.kernel_config import KernelConfig
from megatron_flux.ops.shipped_plans import Entry as Shipped
from megatron_flux.ops.shipped_plans import Shape
from megatron_flux.ops.tuner import cache, keys, measure
from megatron_flux.ops.tuner import tuner as module
from megatron_flux.ops.tuner.cache import Entry
from megatron_flux.ops.tuner.candidates import Backends
from megatron_flux.ops.tuner.keys import key_of
from megatron_flux.settings import WIRES
from tests.unit.groups import group_of

pytest.importorskip("triton")

GROUP = group_of(2)
X, W = torch.zeros(8, 4), torch.zeros(6, 4)
STOCK = ("reference", None)


class Recorder:
    """A backend that notes its name, and the plan or number of pieces of each call."""

    def __init__(self, name: str, log: list[Any], wire: str = "exact") -> None:
        self.name, self.log, self.wire, self.reason = name, log, wire, None

    def plan(self, call: OperatorCall, config: Any = None, pieces: Any = None) -> Any:
        def run(call: OperatorCall) -> Any:
            self.log.append((self.name, config or pieces))
            return (call.x, call.x) if call.operator == "all_gather_gemm" else Pending(call.x)

        return SimpleNamespace(run=run, degraded=())

    def why_not(self, *_: Any) -> str | None:
        return self.reason

    untested = why_not

    def renew(self, group: Any) -> None: ...


class Tuned(TunedBackend):
    """On recorders."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        wires = {"chunked" if wire == "exact" else f"chunked_{wire}": wire for wire in WIRES}
        parts: Any = (
            *(Recorder(name, self.log) for name in ("reference", "fused")),
            {name: Recorder(name, self.log, wire) for name, wire in wires.items()},
        )
        super().__init__(Backends(*parts))

    def __call__(self, operator: str = "gemm_reduce_scatter", x: torch.Tensor = X, w: Any = W, **how: Any) -> Any:
        """Return the name of what runs such a call."""
        OperatorCall(operator, x, w.to(x.dtype) if w is not None else None, GROUP, **how).run(self)
        return self.log[-1]

    def forget(self) -> None:
        """Begin as another process."""
        state_of(GROUP).tuned.pop(self.tuner, None)


@pytest.fixture
def tuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tuned]:
    monkeypatch.setenv("MEGATRON_FLUX_TUNE_CACHE", str(tmp_path / "tuned.json"))
    monkeypatch.setenv("MEGATRON_FLUX_TUNE_SECONDS", "0")
    monkeypatch.setattr(links, "probe", lambda group, device: Link("nvlink", ""))
    monkeypatch.setattr(module.agreement, "of_all_ranks", lambda mine, group, about: [mine])
    monkeypatch.setattr(
        module.agreement, "failures", lambda group, about, mine: {} if mine is None else {0: mine, 1: mine}
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    made = Tuned()
    yield made
    made.forget()


def keep(backend: str = "fused", plan: KernelConfig | None = None, *, captured: bool = False) -> None:
    key = key_of(OperatorCall("gemm_reduce_scatter", X, W, GROUP), captured=captured)
    cache.store(cache.cache_path(), key, Entry(backend=backend, plan=plan, ms={backend: 1.0}))  # type: ignore[arg-type]


def kept() -> Entry:
    ((key, data),) = cache.load(cache.cache_path()).items()
    return cache.parse(key, data)


# Looking up


def test_nothing_kept_and_no_time_to_measure_is_stock_counted(tuner: Tuned) -> None:
    assert tuner() == STOCK
    plan = tuner.plan(OperatorCall("gemm_reduce_scatter", X, W, GROUP))
    assert plan.degraded == ("reference instead of tuned: the call was not measured",)


def test_a_kept_plan_holds_and_the_file_is_read_once(tuner: Tuned) -> None:
    keep(plan=KernelConfig(reducers=7))
    assert tuner() == ("fused", KernelConfig(reducers=7))
    cache.cache_path().unlink()
    assert tuner() == ("fused", KernelConfig(reducers=7))
    tuner.forget()
    keep("reference")
    assert tuner() == STOCK


def test_a_kept_plan_that_the_call_cannot_run_is_not_taken(tuner: Tuned) -> None:
    keep(plan=KernelConfig(ws=True, band=1000))  # of the four rows that a rank has
    assert tuner() == STOCK


def test_capture_measures_nothing_and_remembers_nothing(
    tuner: Tuned, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep(plan=KernelConfig())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tuner() == STOCK
    assert "gemm_reduce_scatter m=8 n=6 k=4 was never run before this CUDA graph's capture" in caplog.text
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert tuner() == ("fused", KernelConfig())


def test_calls_that_will_be_captured_take_their_own_entry_or_that_of_eager_ones(tuner: Tuned) -> None:
    eager, captured = KernelConfig(reducers=7), KernelConfig(reducers=3)
    keep(plan=eager)
    with captured_calls():
        assert tuner() == ("fused", eager)
    cache.cache_path().unlink()
    tuner.forget()
    keep(plan=captured, captured=True)
    assert tuner() == STOCK
    tuner.forget()
    keep(plan=eager)
    with captured_calls():
        assert tuner() == ("fused", captured)
    assert tuner() == ("fused", eager)


# Other values of m


def plans_of_other_m(tuner: Tuned, **plans: KernelConfig) -> None:
    measured = tuner.tuner._measured(OperatorCall("gemm_reduce_scatter", X, W, GROUP))
    measured |= {int(m[1:]): Entry(backend="fused", plan=plan, ms={"fused": 1.0}) for m, plan in plans.items()}


def test_a_plan_of_another_m_runs_only_where_it_is_legal(tuner: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_M", 2)
    small, large = KernelConfig(reducers=3), KernelConfig(reducers=7)
    legal: tuple[Callable[..., bool], ...] = (lambda *_: True, lambda op, plan, *_: plan == large, lambda *_: False)
    for fits, ran in zip(legal, (("fused", small), ("fused", large), STOCK), strict=True):
        plans_of_other_m(tuner, m6=small, m64=large)
        monkeypatch.setattr(module, "fits", fits)
        assert tuner() == ran
        tuner.forget()


def test_what_is_asked_for_ahead_is_measured_whatever_was(tuner: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def measure(call: OperatorCall, backends: Backends) -> Entry:
        measured.append(call.m)
        return Entry(backend="reference", ms={"reference": 1.0})

    monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(module, "MOST_M", 2)
    for rows in (8, 16, 24):
        tuner.decide(OperatorCall("gemm_reduce_scatter", torch.zeros(rows, 4), W, GROUP))
    tuner(x=torch.zeros(32, 4))
    assert measured == [8, 16, 24], "and what a training asks for is not, with so many known"


def test_the_file_is_read_once_however_many_m_come(tuner: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ever other m cost neither a file's reading nor a word between ranks, and memory stays bounded."""
    asked: list[str] = []
    monkeypatch.setattr(module.agreement, "of_all_ranks", lambda mine, group, about: asked.append(about) or [mine])
    monkeypatch.setattr(module, "measure", lambda call, backends: Entry(backend="reference", ms={"reference": 1.0}))
    keep(plan=KernelConfig(reducers=7))
    for rows in range(2, 1400, 2):
        assert tuner(x=torch.zeros(rows, 4)) == (("fused", KernelConfig(reducers=7)) if rows == len(X) else STOCK)
    assert len([about for about in asked if about.startswith("plans kept")]) == 1
    assert len(asked) <= 1 + 2 * module.MOST_M, "of each m that was measured, that it is kept"
    assert len(tuner.tuner.decisions(GROUP).entries) <= MOST_ENTRIES


OWN, ONE, TWO = AllReduceConfig(own_gemm=True), AllReduceConfig(), AllReduceConfig(shots=2)


class Decoding:
    """Decode steps, in whose measurements ``fastest`` wins; ``measured`` are the rows that were."""

    def __init__(self, tuner: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tuner, self.fastest, self.measured = tuner, None, list[int]()
        monkeypatch.setattr(module, "measure", self._measure)

    def _measure(self, call: OperatorCall, backends: Backends) -> Entry:
        self.measured.append(call.m)
        backend: Any = "reference" if self.fastest is None else "fused"
        return Entry(backend=backend, plan=self.fastest, ms={backend: 1.0})

    def step(self, m: int, **how: Any) -> Any:
        """Return the name of what runs a step of ``m`` rows."""
        name, config = self.tuner("gemm_all_reduce", torch.zeros(m, 4), torch.zeros(64, 4), **how)
        return config or name

    def tune(self, plans: dict[int, AllReduceConfig | None]) -> None:
        """Tune as tune_model() does."""
        for m, self.fastest in plans.items():
            self.tuner.decide(OperatorCall("gemm_all_reduce", torch.zeros(m, 4), torch.zeros(64, 4), GROUP))


@pytest.fixture
def decoding(tuner: Tuned, monkeypatch: pytest.MonkeyPatch) -> Decoding:
    return Decoding(tuner, monkeypatch)


def test_a_decode_step_whose_rows_change_runs_the_nearest_plan_and_stock_beside_stock(decoding: Decoding) -> None:
    """After m = 1, 2, 4, ... were tuned no step from 1 to 1024 rows waits for a measurement."""
    plans = {1: OWN, 2: OWN, 4: OWN, 8: OWN, 16: OWN, 32: ONE, 64: ONE, 128: TWO, 256: None, 512: None}
    decoding.tune(plans)
    assert decoding.measured == list(plans), "each of them itself, although another is near, and more than eight"
    for m in range(1, 513):
        ran = decoding.step(m)
        if m in plans:
            assert ran == (plans[m] or "reference"), m
        elif m > 128:
            assert ran == "reference", f"{m}: stock won at 256, and may have"
        else:
            below = 1 << (m.bit_length() - 1)
            assert ran in (plans[below], plans[2 * below]), m
            if m * m < below * 2 * below and m > 1:
                assert ran == plans[below], m
    assert (decoding.step(20), decoding.step(24), decoding.step(700)) == (OWN, ONE, "reference")
    assert decoding.measured == list(plans)


def test_what_the_file_has_of_other_rows_is_enough(decoding: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding.tune({8: OWN, 16: None, 64: ONE})
    decoding.tuner.forget()
    read: list[str] = []
    stock = cache.find
    monkeypatch.setattr(cache, "find", lambda keys, *a, **k: read.append(keys[0]) or stock(keys, *a, **k))
    assert [decoding.step(m) for m in (5, 8, 9, 17, 40, 100)] == [OWN, OWN, "reference", "reference", ONE, ONE]
    assert len(read) == 1, "read once for all rows"
    assert decoding.measured == [8, 16, 64]
    with captured_calls():  # other entries
        decoding.fastest = TWO
        assert decoding.step(9) == TWO
    for m in (10, 11):  # beside a wgrad: of a training, whose rows stay
        decoding.step(m, async_op=True)
    assert decoding.measured == [8, 16, 64, 9, 10, 11]


def test_rows_with_no_entry_near_or_whose_plan_they_cannot_run_are_measured(decoding: Decoding) -> None:
    decoding.fastest = ONE
    assert {decoding.step(m) for m in (40, 20, 80, 21, 79, 10, 9)} == {ONE}
    assert decoding.measured == [40, 10]
    decoding.tune({300: OWN})
    decoding.fastest = TWO
    assert decoding.step(301) == TWO, "the own GEMM ends at 64 rows"


# Measuring


@pytest.fixture
def timed(tuner: Tuned, monkeypatch: pytest.MonkeyPatch) -> Tuned:
    """Candidates that come last are the fastest, in bursts and by themselves."""
    monkeypatch.setenv("MEGATRON_FLUX_TUNE_SECONDS", "30")
    monkeypatch.setattr(timing, "interleaved", lambda ways, *_: {name: [1.0 / i] for i, name in enumerate(ways, 1)})
    monkeypatch.setattr(timing, "all_agree", lambda mine, *_: mine)
    monkeypatch.setattr(timing, "sustained", lambda ways, ms, *_: {name: ms[name] for name in ways})
    monkeypatch.setattr(measure, "gemm_only", lambda call: None)
    return tuner


@pytest.mark.parametrize(
    ("ms", "expected"),
    [
        ({"reference": 2.0, "a": 1.0, "b": 1.07, "c": 1.09}, ["a", "b"]),
        ({"reference": 1.0, "a": 0.995}, ["reference", "a"]),  # within the margin it is reference that counts
        ({"reference": 2.0}, ["reference"]),
        ({"reference": 1.005, **dict.fromkeys("abcdefgh", 1.0)}, ["reference", "a", "b", "c", "d", "e"]),
    ],
)
def test_finalists(ms: dict[str, float], expected: list[str]) -> None:
    assert measure.finalists(ms) == expected


@pytest.mark.parametrize(("sustained", "wins"), [((1.2, 1.1), True), ((1.1, 1.2), False), ((1.1, 1.095), False)])
def test_the_fastest_by_itself_is_taken_if_it_wins_by_1_percent(
    timed: Tuned, monkeypatch: pytest.MonkeyPatch, sustained: tuple[float, float], wins: bool
) -> None:
    names = ("reference", "fused default")
    monkeypatch.setattr(measure, "candidates", lambda *_, promoted: [KernelConfig()])
    monkeypatch.setattr(timing, "interleaved", lambda ways, *_: {names[0]: [1.0], names[1]: [1.01]})
    monkeypatch.setattr(timing, "sustained", lambda ways, *_: dict(zip(ways, sustained, strict=True)))
    assert timed() == (("fused", KernelConfig()) if wins else STOCK)
    assert kept().sustained_ms == dict(zip(names, sustained, strict=True))


def test_no_time_is_left_to_run_candidates_by_themselves(timed: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter([True, True, False])  # is the GEMM alone measured, is a plan tried, are the finalists
    monkeypatch.setattr(measure, "candidates", lambda *_, promoted: [KernelConfig()])
    monkeypatch.setattr(timing, "interleaved", lambda ways, *_: {"reference": [1.0], "fused default": [0.98]})
    monkeypatch.setattr(timing, "all_agree", lambda *_: next(left))
    monkeypatch.setattr(measure, "gemm_only", lambda call: lambda: None)
    assert timed() == ("fused", KernelConfig())
    assert kept().sustained_ms == {}


def test_each_way_runs_by_itself_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int, int]] = []

    def burst(call: Any, count: int, group: Any, device: Any, warm: int = 1) -> float:
        made.append((call(), count, warm))
        return float(len(made))

    monkeypatch.setattr(timing, "burst", burst)
    ways = {"slow": lambda: "slow", "quick": lambda: "quick"}
    found = timing.sustained(ways, {"slow": 100.0, "quick": 0.5}, GROUP, torch.device("cpu"))
    slow, quick = ("slow", 3, 2), ("quick", 600, 500)
    assert made == [slow, quick, quick, slow]
    assert found == {"slow": (1 + 4) / 2, "quick": (2 + 3) / 2}


# Plans that ship with the package


FULL = [KernelConfig(reducers=count) for count in (4, 5, 6)]
SHAPE = Shape("gemm_reduce_scatter", "[n,k]", 2, 8, 6, 4)


@pytest.fixture
def on_h200(timed: Tuned, monkeypatch: pytest.MonkeyPatch) -> list[Shipped]:
    """Ship plans for the GPU: of shapes farther and farther away."""
    known = [Shipped(SHAPE._replace(m=m), KernelConfig(reducers=m), 0.5, "run") for m in (64, 32, 16)]
    monkeypatch.setattr(measure, "_gpu", lambda call: "NVIDIA H200")
    monkeypatch.setattr(shipped_plans, "entries", lambda: tuple(known))
    monkeypatch.setattr(measure, "candidates", lambda *_, promoted: FULL)
    return known


def test_the_nearest_plans_and_the_first_candidate_are_measured(
    timed: Tuned, on_h200: list[Shipped], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert timed() == ("fused", FULL[0])
    assert (kept().list, list(kept().ms)) == (
        "short",
        ["fused default", "fused reducers=16", "fused reducers=32", "reference"],
    )
    timed.forget()
    monkeypatch.setattr(shipped_plans, "entries", lambda: 1 / 0)
    assert timed() == ("fused", FULL[0]), "a kept entry is taken"
    timed.forget()
    monkeypatch.setenv("MEGATRON_FLUX_TUNE", "full")
    assert timed() == ("fused", FULL[-1]), "but not where all are to be measured"
    assert (kept().list, len(kept().ms)) == ("full", 4)
    timed.forget()
    monkeypatch.delenv("MEGATRON_FLUX_TUNE")
    assert timed() == ("fused", FULL[-1]), "an entry of a full list holds for both"


@pytest.mark.parametrize(
    ("gpu", "listed"),
    [("NVIDIA H100 80GB HBM3", "short"), ("", "full"), ("NVIDIA GH200 480GB", "full"), ("NVIDIA A100-SXM4", "full")],
)
def test_where_no_plans_ship_all_candidates_are_measured(
    timed: Tuned, on_h200: list[Shipped], monkeypatch: pytest.MonkeyPatch, gpu: str, listed: str
) -> None:
    monkeypatch.setattr(measure, "_gpu", lambda call: gpu)
    timed()
    assert kept().list == listed


@pytest.mark.usefixtures("on_h200")
def test_of_fp8_the_first_candidates_are_measured_where_plans_ship(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [KernelConfig(reducers=number) for number in range(1, 10)]
    monkeypatch.setattr(measure, "candidates", lambda *_, promoted: found)
    pair = Fp8Pair(quantized(torch.ones(16, 16), "tensor"), quantized(torch.ones(32, 16), "tensor"))
    call = OperatorCall("all_gather_gemm", pair.x.numbers, pair.weight.numbers, GROUP, fp8=pair)
    assert measure.list_plans(call, False) == ("short", found[:4])
    assert measure.list_plans(call, True) == ("full", found)


@pytest.mark.usefixtures("on_h200")
def test_a_list_that_there_is_not_is_refused(timed: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_FLUX_TUNE", "long")
    with pytest.raises(UserError, match="MEGATRON_FLUX_TUNE must be one of short, full, use, not 'long'"):
        timed()


@pytest.mark.parametrize(
    ("other", "taken"),
    [
        ({}, True),
        ({"gain": 0.029}, False),
        ({"gain": None}, False),  # two GPUs emulated eight
        ({"m": 16}, False),
        ({"gpu": "NVIDIA H100 80GB HBM3"}, False),
        ({"nvls": "1"}, False),  # stock may be faster than it was in the runs
        ({"dtype": torch.float16}, False),
    ],
)
def test_without_measuring_only_a_plan_that_was_clearly_faster_is_taken(
    timed: Tuned,
    on_h200: list[Shipped],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    other: dict[str, Any],
    taken: bool,
) -> None:
    plan = KernelConfig(reducers=8)
    on_h200[:] = [Shipped(SHAPE._replace(m=other.get("m", 8)), plan, other.get("gain", 0.03), "run")]
    log_once.cache_clear()
    monkeypatch.setattr(measure, "_gpu", lambda call: other.get("gpu", "NVIDIA H200"))
    monkeypatch.setenv("MEGATRON_FLUX_TUNE_SECONDS", "0")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", other.get("nvls", "0"))
    for _ in ("first", "again"):
        assert timed(x=X.to(other.get("dtype", torch.bfloat16))) == (("fused", plan) if taken else STOCK)
        timed.forget()
    said = ("calls without a kept plan run stock's", "calls for which the package has a plan")
    assert [caplog.text.count(words) for words in said] == [not taken, taken]
    assert not cache.cache_path().exists(), "nothing was measured that could be kept"


# Transfers by chunks


@pytest.fixture
def over_host(timed: Tuned, monkeypatch: pytest.MonkeyPatch) -> Tuned:
    """A group that talks through host memory."""
    monkeypatch.setattr(links, "probe", lambda group, device: Link("host", "asked for"))
    monkeypatch.setattr(keys, "by_chunks", lambda x, group: True)
    monkeypatch.setattr(transports, "why_none", lambda *_: None)
    return timed


def test_over_host_memory_chunked_is_measured_against_stock(over_host: Tuned) -> None:
    assert over_host.why_not(X, W, GROUP) is None
    assert over_host() == ("chunked", 1)
    assert over_host("all_gather_gemm", bias=torch.zeros(6)) == ("chunked", 1)
    assert over_host("all_gather", w=None) == ("chunked", 1)
    assert over_host("gemm_all_reduce") == STOCK, "it needs peers' memory"
    entries = [cache.parse(*item) for item in cache.load(cache.cache_path()).items()]
    assert [set(entry.ms) for entry in entries] == [{"reference", "chunked x1"}] * 3
    with captured_calls():
        assert over_host() == ("chunked", 1)
        over_host.backends.chunked["chunked"].reason = "it cannot be captured"  # type: ignore[attr-defined]
        assert over_host() == STOCK
    assert over_host.why_not(X, W, GROUP) == "it cannot be captured"


def test_an_8_bit_wire_only_where_it_was_asked_for(over_host: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in ("of the process", "of the file"):
        for wire, name in (("exact", "chunked"), ("fp8", "chunked_fp8")):
            assert over_host(wire=wire) == (name, 1), "what was kept for another wire is no answer"
        over_host.forget()
        monkeypatch.setattr(timing, "interleaved", lambda *_: 1 / 0)
    assert sum("host wire=fp8" in key for key in cache.load(cache.cache_path())) == 1


def test_an_8_bit_wire_that_this_gpu_cannot_have(over_host: Tuned) -> None:
    over_host.backends.chunked["chunked_fp8"].reason = "not on this GPU"  # type: ignore[attr-defined]
    assert over_host(wire="fp8") == ("chunked", 1)


def test_the_number_of_pieces_is_measured_and_kept(over_host: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "LEAST_BYTES", 8)
    monkeypatch.setattr(chunked, "LEAST_ROWS", 2)
    for _ in ("measured", "kept"):
        assert over_host() == ("chunked", 4), "one a row; the last candidate is the fastest"
        over_host.forget()
        monkeypatch.setattr(timing, "interleaved", lambda *_: 1 / 0)
    assert set(kept().ms) == {"reference", "chunked x2", "chunked x4"}
    assert (kept().label, kept().plan) == ("chunked x4", None)


def test_a_chunked_backend_that_fails_everywhere_gets_another_transport(
    over_host: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed: list[Any] = []
    monkeypatch.setattr(transports, "renew", renewed.append)
    monkeypatch.setattr(over_host.backends.chunked["chunked"], "plan", lambda call, pieces: 1 / 0)
    assert over_host() == STOCK
    assert renewed == [GROUP]


def test_over_pcie_only_where_it_was_asked_for(tuner: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link("p2p", "no NVLink between GPU 0 and GPU 1")
    monkeypatch.setattr(links, "probe", lambda group, device: link)
    monkeypatch.setattr(keys, "by_chunks", lambda x, group: links.by_chunks(link))
    monkeypatch.setattr(tuner.backends.fused, "reason", "over PCIe")
    monkeypatch.delenv("MEGATRON_FLUX_LINK", raising=False)
    assert tuner.untested(X, GROUP) == "over PCIe"
    made = OperatorCall("gemm_reduce_scatter", X, W, GROUP)
    assert " tp=2 p2p | " in key_of(made, captured=False)
    monkeypatch.setenv("MEGATRON_FLUX_LINK", "p2p")
    assert tuner.untested(X, GROUP) is None
    assert " tp=2 p2p in chunks | " in key_of(made, captured=False), "not what fused kernels were measured over"


@pytest.mark.parametrize("shape", [(6, 8), (3, 2, 8)])
def test_a_wgrad_runs_beside_an_all_reduce(shape: tuple[int, ...]) -> None:
    """Layers give x with its leading dimensions."""
    call = OperatorCall("gemm_all_reduce", torch.randn(shape), torch.randn(8, 4), GROUP, transposed=True)
    made: list[str] = []
    beside_wgrad(call, {"way": lambda: made.append("call")})["way"]()
    assert made == ["call"]
