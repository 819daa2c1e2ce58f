"""Decisions of the tuner: from its file, from another m, from a trial. Clock and backends are replaced.

On real ranks: tests/distributed/test_trial.py and test_tuner.py; on GPUs: tests/gpu/checks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.comm import group_state, links, transports
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.comm.links import Link
from megatron_flux.errors import OperatorError
from megatron_flux.log_once import log_once
from megatron_flux.ops import timing
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.backends import chunked
from megatron_flux.ops.backends.tuned import TunedBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.ops.kernel_config import KernelConfig
from megatron_flux.ops.tuner import alone, cache, candidates, keys, shipped, trial
from megatron_flux.ops.tuner import tuner as module
from megatron_flux.ops.tuner.cache import Entry
from megatron_flux.ops.tuner.candidates import Backends
from megatron_flux.ops.tuner.keys import key_of
from megatron_flux.settings import WIRES
from tests.unit.groups import group_of
from tests.unit.ops.fakes import OnGpu

pytest.importorskip("triton")

GROUP = group_of(2)
X, W = torch.zeros(8, 4), torch.zeros(6, 4)
STOCK = ("reference", None)


class Recorder:
    """A backend that notes its name, and the plan or number of pieces of each call."""

    def __init__(self, name: str, log: list[Any], wire: str = "exact") -> None:
        self.name, self.log, self.wire, self.reason, self.ready = name, log, wire, None, True

    def plan(self, call: OperatorCall, config: Any = None, pieces: Any = None) -> Any:
        def run(call: OperatorCall) -> Any:
            self.log.append((self.name, config or pieces))
            return (call.x, call.x) if call.operator == "all_gather_gemm" else Pending(call.x)

        return SimpleNamespace(
            run=run, degraded=(), replay_ms=None, compile_ahead=lambda call, y: (), is_ready=lambda call: self.ready
        )

    def why_not(self, *_: Any) -> str | None:
        return self.reason

    untested = why_not

    def renew(self, group: Any) -> None: ...


class Tuned(TunedBackend):
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.patch = patch.setattr
        wires = {"chunked" if wire == "exact" else f"chunked_{wire}": wire for wire in WIRES}
        parts: Any = (
            *(Recorder(name, self.log) for name in ("reference", "fused")),
            {name: Recorder(name, self.log, wire) for name, wire in wires.items()},
        )
        super().__init__(Backends(*parts))

    def __call__(self, operator: str = "gemm_reduce_scatter", x: torch.Tensor = X, w: Any = W, **how: Any) -> Any:
        """Return the name of what runs such a call, once that is decided."""
        call = OperatorCall(operator, x, w.to(x.dtype) if w is not None else None, GROUP, **how)
        for _ in range(100):
            timing.finish(call.run(self))
            if all(one.decided for one in self.trials):
                return self.log[-1]
        pytest.fail("a trial has no end")

    @property
    def trials(self) -> list[trial.Trial]:
        return list(self.tuner.decisions(GROUP).trials.values())

    def forget(self) -> None:
        module._writer().submit(lambda: None).result()
        state_of(GROUP).tuned.pop(self.tuner, None)


@pytest.fixture
def tuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tuned]:
    monkeypatch.setenv("MEGATRON_FLUX_TUNE_CACHE", str(tmp_path / "tuned.json"))
    monkeypatch.setenv("MEGATRON_FLUX_TUNE", "off")
    monkeypatch.setattr(links, "probe", lambda group, device: Link("nvlink", ""))
    monkeypatch.setattr(module.agreement, "begin", lambda mine, group, about: lambda: [mine])
    monkeypatch.setattr(
        module.agreement, "failures", lambda group, about, mine: {} if mine is None else {0: mine, 1: mine}
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    made = Tuned(monkeypatch)
    yield made
    made.forget()


def call_of(m: int = 8) -> OperatorCall:
    return OperatorCall("gemm_reduce_scatter", torch.zeros(m, 4), W, GROUP)


def keep(backend: str = "fused", plan: KernelConfig | None = None, *, m: int = 8, captured: bool = False) -> None:
    key = key_of(call_of(m), captured=captured)
    cache.store(cache.cache_path(), key, Entry(backend=backend, plan=plan, ms={backend: 1.0}))  # type: ignore[arg-type]


def kept() -> Entry:
    module._writer().submit(lambda: None).result()
    ((key, data),) = cache.load(cache.cache_path()).items()
    return cache.parse(key, data)


def test_kernels_asked_for_while_ranks_exchange_are_not_taken_for_compiled(tuner: Tuned) -> None:
    one = trial.Trial([Entry(backend="reference"), Entry(backend="fused", plan=KernelConfig())], "a call")
    while one._answers is None:
        one.turn(call_of())
    one.begun[1] = one.rounds  # as another m does that can run it
    one.futures[1].append(Future())
    while one._answers is not None:
        one.turn(call_of())
    assert not one.is_compiled(1)


# Looking up


def test_capture_tries_nothing_reads_nothing_and_remembers_nothing(
    tuner: Tuned, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What has not run before has no workspace, whatever the file has."""
    monkeypatch.setenv("MEGATRON_FLUX_TUNE", "on")
    monkeypatch.setattr(keys, "_machine", lambda device: "GPU")
    keep(plan=KernelConfig())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    x, w = X.as_subclass(OnGpu), W.as_subclass(OnGpu)
    assert tuner(x=x, w=w) == STOCK
    assert "gemm_reduce_scatter m=8 n=6 k=4 has not run for CUDA graphs before this capture" in caplog.text
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert tuner(x=x, w=w) == ("fused", KernelConfig())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tuner(x=x, w=w) == ("fused", KernelConfig()), "which has run by now"
    caplog.clear()
    tuner.tuner.backends.fused.ready = False  # type: ignore[attr-defined]
    assert tuner(x=x, w=w) == STOCK, "eagerly, so that graphs have no workspace"
    assert "has not run for CUDA graphs before this capture" in caplog.text


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


def test_off_tries_nothing_ahead_either_unless_all_is_asked_for(timed: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_FLUX_TUNE", "off")
    timed.decide(call_of())
    assert (timed.log, timed.trials) == ([], [])
    assert timed() == STOCK
    assert timed.tuner.decide(call_of(), full=True).plan == FULL[-1], "the command tune is there for nothing else"
    assert timed() == ("fused", FULL[-1])


# Other values of m


def test_a_plan_of_another_m_runs_where_it_is_near_and_legal(tuner: Tuned) -> None:
    near, farther = KernelConfig(reducers=3), KernelConfig(reducers=7)
    keep(plan=farther, m=6)
    keep(plan=near, m=10)
    legal: tuple[Callable[..., bool], ...] = (lambda *_: True, lambda op, plan, *_: plan == farther, lambda *_: False)
    for fits, ran in zip(legal, (("fused", near), ("fused", farther), STOCK), strict=True):
        tuner.patch(candidates, "fits", fits)
        assert tuner() == ran
        tuner.forget()
    tuner.patch(candidates, "fits", legal[0])
    assert tuner(x=torch.zeros(32, 4)) == STOCK, "too far away"


def test_decode_steps_of_other_rows_run_the_nearest_plan(tuner: Tuned) -> None:
    """After m = 1, 2, 4, ... were tuned no step of other rows is new, with entries of their own in graphs."""
    own, one, two = AllReduceConfig(own_gemm=True), AllReduceConfig(), AllReduceConfig(shots=2)
    plans = {1: own, 2: own, 4: own, 8: own, 16: own, 32: one, 64: one, 128: two, 256: None, 512: None}

    def step(m: int) -> OperatorCall:
        return OperatorCall("gemm_all_reduce", torch.zeros(m, 4), torch.zeros(64, 4), GROUP)

    for m, plan in plans.items():
        entry = Entry(backend="reference" if plan is None else "fused", plan=plan, ms={"a": 1.0})
        cache.store(cache.cache_path(), key_of(step(m), captured=False), entry)
    for m in range(1, 700):
        step(m).run(tuner)
        below = 1 << min(m.bit_length() - 1, 9)
        near = [plans[at] for at in (below, min(2 * below, 512))]
        assert tuner.log[-1] in [("reference" if plan is None else "fused", plan) for plan in near], m
    for m, ran in {20: ("fused", own), 24: ("fused", one), 300: STOCK, 1000: STOCK}.items():
        step(m).run(tuner)
        assert tuner.log[-1] == ran
    assert tuner.plan(step(1000)).degraded, "too far away"
    with captured_calls():
        assert tuner.plan(step(20)).degraded, "eager calls are bound by the host"


# Trials


@pytest.fixture
def timed(tuner: Tuned, monkeypatch: pytest.MonkeyPatch) -> Tuned:
    """Candidates that come last are the fastest."""
    monkeypatch.setenv("MEGATRON_FLUX_TUNE", "on")
    monkeypatch.setattr(candidates, "candidates", lambda *_, **__: FULL)
    clock(tuner, lambda candidate: 1.0 / (candidate + 1))
    return tuner


def clock(tuned: Tuned, ms: Callable[[int], float]) -> None:
    """Turns of a candidate take so long, for :func:`call_of`."""
    begin = trial.Trial.begin

    def begun(one: trial.Trial, candidate: int, rows: int, cuda: bool) -> Any:
        end = begin(one, candidate, rows, cuda)
        one._samples[-1].begun = ms(candidate) * rows / 8
        return end

    tuned.patch(trial.Trial, "begin", begun)
    tuned.patch(trial, "_between", lambda begun, ended: begun)


@pytest.mark.parametrize(("other", "wins"), [(0.98, True), (0.995, False), (1.05, False)])
def test_the_fastest_is_taken_if_it_wins_by_1_percent(
    tuner: Tuned, monkeypatch: pytest.MonkeyPatch, other: float, wins: bool
) -> None:
    monkeypatch.setenv("MEGATRON_FLUX_TUNE", "on")
    monkeypatch.setattr(candidates, "candidates", lambda *_, **__: [KernelConfig()])
    clock(tuner, lambda candidate: other if candidate else 1.0)
    assert tuner() == (("fused", KernelConfig()) if wins else STOCK)
    assert kept().ms == {"reference": 1.0, "fused default": other}


def test_the_other_width_of_tiles_runs_once_it_is_compiled(timed: Tuned) -> None:
    """Until then what it follows from does; neither has a trial of its own."""
    other = KernelConfig(reducers=9)
    assert timed() == ("fused", FULL[-1])
    timed.patch(module, "in_fewest_rounds", lambda call, entry: Entry(backend="fused", plan=other))
    call = call_of(10)
    for _ in range(20):
        timing.finish(call.run(timed))
    ran = timed.log[-20:]
    assert (ran[0], ran[-1]) == (("fused", FULL[-1]), ("fused", other))
    assert ran.count(STOCK) == 0
    assert timed() == ("fused", FULL[-1]), "of the m that was tried"


def test_passes_with_and_without_gradients_run_one_plan(timed: Tuned) -> None:
    """Importance ratios punish a difference. A forward without gradients does not ask for the gathered input."""
    plans = state_of(GROUP).plans
    forward, training = (
        OperatorCall("all_gather_gemm", X, W, GROUP, return_gathered=returned) for returned in (False, True)
    )
    for key, call in (("forward", forward), ("training", training)):
        plans[key] = timed.plan(call)
    trials = dict(zip(("training", "forward"), reversed(timed.trials), strict=True))
    while trials["training"].decided is None:
        plans["training"].run(training)
    plans["training"].run(training)
    assert timed.log[-1] == ("fused", FULL[-1])
    clock(timed, lambda candidate: 1.0 + candidate)
    while "forward" in plans and not isinstance(plans["forward"], SimpleNamespace):
        plans["forward"].run(forward)
    assert trials["forward"].decided.backend == "reference"
    assert "forward" not in plans, "made anew"
    for _ in range(20):
        timed.plan(forward).run(forward)
    assert timed.log[-1] == ("fused", FULL[-1])
    del plans["training"]


def test_trials_are_forgotten_in_the_end(timed: Tuned) -> None:
    timed.patch(cache, "keep", lambda *_: None)
    timed.patch(group_state, "MOST_ENTRIES", most := 16)
    for n in range(1, most + 20):
        timed.plan(OperatorCall("gemm_reduce_scatter", X, torch.zeros(n, 4), GROUP))
    decisions = timed.tuner.decisions(GROUP)
    assert max(map(len, (decisions.trials, decisions.kinds))) == most
    for m in range(2, 2 * most + 40, 2):
        timed.tuner.decide(call_of(m))
    kinds = decisions.kinds.values()
    assert max(map(len, (decisions.trials, kinds, *(kind.known for kind in kinds)))) == most


def test_of_further_m_both_widths_are_tried_and_nothing_that_it_cannot_run(timed: Tuned) -> None:
    """Which width is the faster one changes with m, and a candidate without a turn would be a warning."""
    given = [KernelConfig(reducers=4), KernelConfig(bn=128), KernelConfig(reducers=5), KernelConfig(reducers=6)]
    timed.patch(candidates, "candidates", lambda *_, **__: given)
    assert timed() == ("fused", given[-1])
    timed.patch(candidates, "fits", lambda op, plan, *_: plan != given[-1])
    timed(x=torch.zeros(512, 4))
    assert [entry.plan for entry in timed.trials[-1].entries] == [None, *given[:2]]


def test_calls_that_will_be_captured_are_decided_at_once(timed: Tuned) -> None:
    with captured_calls():
        call_of().run(timed)
        assert timed.log[-1] == ("fused", FULL[-1])
        assert [one.decided is not None for one in timed.trials] == [True]
        ran = len(timed.log)
        call_of(10).run(timed)
        assert len(timed.log) == ran + 1
    ((key, _),) = cache.load(cache.cache_path()).items()
    assert " in graphs " in key


def test_a_candidate_that_cannot_be_captured(timed: Tuned, caplog: pytest.LogCaptureFixture) -> None:
    """All-reduces of few rows are measured in graphs."""
    made = OperatorCall("gemm_all_reduce", torch.zeros(8, 4), torch.zeros(64, 4), GROUP)
    entries = [Entry(backend="reference"), *(Entry(backend="fused", plan=AllReduceConfig(shots=i)) for i in (1, 2))]

    def captured(call: OperatorCall, backends: Backends, entry: Entry) -> Any:
        if entry is entries[1]:
            raise MemoryError("no room for a graph")
        return lambda: None

    timed.patch(alone, "_captured", captured)
    timed.patch(
        timing, "rounds", lambda ways, *_: {name: SimpleNamespace(ms=[20.0 / (i + 1)]) for i, name in enumerate(ways)}
    )
    found = alone.decide_in_graphs(made, entries, timed.backends)
    assert (found.plan, found.ms) == (entries[2].plan, {"reference": 2.0, entries[2].label: 1.0})
    assert "no room for a graph" in caplog.text
    timed.patch(module.agreement, "failures", lambda group, about, mine: {} if mine is None else {0: mine})
    with pytest.raises(OperatorError, match=r"failed on some ranks \(rank 0: MemoryError: no room for a graph\)"):
        alone.decide_in_graphs(made, entries, timed.backends)


# Plans that ship with the package


FULL = [KernelConfig(reducers=count) for count in (4, 5, 6)]
KIND = "gemm_reduce_scatter n=6 k=4 float32 [n,k] tp=2 nvlink | NVIDIA H100"
SHIPPED = KernelConfig(reducers=9)


@pytest.fixture
def ships(timed: Tuned, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let plans ship for the GPU that this one says to be."""
    kinds: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(shipped, "_kinds", lambda: kinds)
    monkeypatch.setattr(keys, "_machine", lambda device: "NVIDIA H100 | flux 1")
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)

    def ship(plan: KernelConfig | None = SHIPPED, m: int = 8, kind: str = KIND) -> None:
        entry = Entry(backend="reference" if plan is None else "fused", plan=plan, ms={"reference": 1.0}, run="run")
        kinds.setdefault(kind, {})[str(m)] = entry.to_json()

    ship()
    return ship


def test_until_what_ships_is_compiled_calls_run_what_is_for_the_nearest_m(
    timed: Tuned, ships: Callable[..., None]
) -> None:
    near, far = KernelConfig(reducers=7), KernelConfig(reducers=3)
    ships(far, m=128)
    ships(near, m=32)
    assert [timed(x=torch.zeros(rows, 4)) for rows in (128, 8)] == [("fused", far), ("fused", SHIPPED)]
    at = len(timed.log)
    timed.patch(candidates, "fits", lambda op, plan, rows, *_: plan != SHIPPED or rows != 13)
    timed.plan(call_of(28)).run(call_of(28))
    timed.plan(call_of(26)).run(call_of(26))
    assert timed.log[at:] == [("fused", SHIPPED), STOCK], "and stock where that cannot run"
    assert timed(x=torch.zeros(28, 4)) == ("fused", near)


def test_the_own_file_counts_before_what_ships(timed: Tuned, ships: Callable[..., None]) -> None:
    """In a bucket where it has something; another one has what ships."""
    own = KernelConfig(reducers=7)
    keep(plan=own, m=6)
    ships(m=32)
    assert [timed(x=torch.zeros(rows, 4)) for rows in (8, 32)] == [("fused", own), ("fused", SHIPPED)]


@pytest.mark.parametrize(
    ("other", "holds"),
    [
        ({}, True),
        ({"machine": "NVIDIA H100 NVL | flux 1"}, False),
        ({"machine": "NVIDIA H100 | flux 2"}, True),
        ({"link": "p2p"}, False),
        ({"tp": 4}, False),  # stock may be faster by multicast
        ({"tp": 4, "nvls": "1"}, False),
        ({"tp": 4, "nvls": "0"}, True),
        ({"nvls": "1"}, True),  # NCCL has none for two
        ({"dtype": torch.float16}, False),
        ({"transposed": True}, False),
        ({"m": 32}, False),
    ],
)
def test_where_a_plan_holds_that_ships(
    tuner: Tuned, ships: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    other: dict[str, Any], holds: bool,
) -> None:  # fmt: skip
    """As in the runs that it is from. Without trials it runs at once; elsewhere stock does."""
    ships(kind=KIND.replace("tp=2", "tp=4"))
    log_once.cache_clear()
    monkeypatch.setenv("MEGATRON_FLUX_TUNE", "off")
    monkeypatch.setattr(keys, "_machine", lambda device: other.get("machine", "NVIDIA H100 | flux 1"))
    monkeypatch.setattr(links, "probe", lambda group, device: Link(other.get("link", "nvlink"), ""))
    if "nvls" in other:
        monkeypatch.setenv("NCCL_NVLS_ENABLE", other["nvls"])
    x, w = (torch.zeros(size, 4, dtype=other.get("dtype", torch.float32)) for size in (other.get("m", 8), 6))
    transposed = "transposed" in other
    call = OperatorCall("gemm_reduce_scatter", x, w.t().contiguous() if transposed else w, group_of(other.get("tp", 2)))
    timing.finish(call._replace(transposed=transposed).run(tuner))
    assert tuner.log == [("fused", SHIPPED) if holds else STOCK]
    assert caplog.text.count("calls without a kept plan run stock's") == (not holds)


@pytest.mark.usefixtures("ships")
def test_all_candidates_are_measured_whatever_ships(timed: Tuned) -> None:
    assert timed.tuner.decide(call_of(), full=True).plan == FULL[-1]
    assert (timed(), kept().run) == (("fused", FULL[-1]), None)
    timed.forget()
    clock(timed, lambda candidate: pytest.fail("it is known"))
    assert timed.tuner.decide(call_of(), full=True).plan == FULL[-1], "it is this machine's own"


# Transfers by chunks


@pytest.fixture
def over_host(timed: Tuned, monkeypatch: pytest.MonkeyPatch) -> Tuned:
    monkeypatch.setattr(links, "probe", lambda group, device: Link("host", "asked for"))
    monkeypatch.setattr(keys, "by_chunks", lambda x, group: True)
    monkeypatch.setattr(transports, "why_none", lambda *_: None)
    return timed


def test_over_host_memory_chunked_is_tried_against_stock(over_host: Tuned) -> None:
    assert over_host.why_not(X, W, GROUP) is None
    assert over_host() == ("chunked", 1)
    assert over_host("all_gather_gemm", bias=torch.zeros(6)) == ("chunked", 1)
    assert over_host("all_gather", w=None) == ("chunked", 1)
    assert over_host("gemm_all_reduce") == STOCK, "it needs peers' memory"
    module._writer().submit(lambda: None).result()
    entries = [cache.parse(*item) for item in cache.load(cache.cache_path()).items()]
    assert [set(entry.ms) for entry in entries] == [{"reference", "chunked x1"}] * 3
    with captured_calls():
        assert over_host() == ("chunked", 1)
        over_host.backends.chunked["chunked"].reason = "it cannot be captured"  # type: ignore[attr-defined]
        assert over_host() == STOCK
    assert over_host.why_not(X, W, GROUP) == "it cannot be captured"


def test_an_8_bit_wire_only_where_it_was_asked_for(over_host: Tuned) -> None:
    for _ in ("of the process", "of the file"):
        for wire, name in (("exact", "chunked"), ("int8", "chunked_int8")):
            assert over_host(wire=wire) == (name, 1), "what was kept for another wire is no answer"
        over_host.forget()
        clock(over_host, lambda candidate: pytest.fail("it is known"))
    assert sum("host wire=int8" in key for key in cache.load(cache.cache_path())) == 1


def test_the_number_of_pieces_is_tried_and_kept(over_host: Tuned) -> None:
    over_host.patch(chunked, "LEAST_BYTES", 8)
    over_host.patch(chunked, "LEAST_ROWS", 2)
    for _ in ("tried", "kept"):
        assert over_host() == ("chunked", 4), "one a row; the last candidate is the fastest"
        over_host.forget()
        clock(over_host, lambda candidate: pytest.fail("it is known"))
    assert set(kept().ms) == {"reference", "chunked x2", "chunked x4"}
    assert (kept().label, kept().plan) == ("chunked x4", None)


def test_a_chunked_backend_that_fails_everywhere_gets_another_transport(over_host: Tuned) -> None:
    renewed: list[Any] = []
    over_host.patch(transports, "renew", renewed.append)
    broken = SimpleNamespace(run=lambda call: 1 / 0, replay_ms=None, compile_ahead=lambda call, y: ())
    over_host.patch(over_host.backends.chunked["chunked"], "plan", lambda call, pieces: broken)
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


@pytest.mark.parametrize("beside", [False, True])
def test_ahead_of_a_training_calls_stand_as_in_it(timed: Tuned, beside: bool) -> None:
    """Other work before each keeps the GPU behind the host; wgrad stands between begin and wait, where it will."""
    for name in ("work_before", "wgrad_of"):
        timed.patch(alone, name, lambda call, name=name: lambda: timed.log.append(name))
    call = OperatorCall("gemm_all_reduce", torch.zeros(8, 4), torch.zeros(64, 4), GROUP, async_op=beside)
    timed.tuner.decide(call)
    step = 3 if beside else 2
    assert timed.log[::step] == ["work_before"] * (len(timed.log) // step)
    assert timed.log[2::3] == ["wgrad_of"] * (len(timed.log) // 3) if beside else "wgrad_of" not in timed.log
