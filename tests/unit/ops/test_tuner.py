"""What the tuner does with a kept answer; measuring itself needs GPUs."""

from __future__ import annotations

import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.comm import links, transports
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.comm.links import Link
from megatron_flux.errors import UserError
from megatron_flux.ops import shipped_plans, timing
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.backends import chunked, tuner_calls, tuner_measurement, tuning_cache
from megatron_flux.ops.backends import tuned as tuner
from megatron_flux.ops.backends.tuned import TunedBackend
from megatron_flux.ops.backends.tuning_cache import describe, store
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.ops.fp8_operand import Fp8Pair, quantized
from megatron_flux.ops.kernel_config import KernelConfig
from megatron_flux.ops.shipped_plans import Entry, Shape
from megatron_flux.settings import WIRES


class Group:
    group_name = "g"

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


class Recorder:
    """A backend that says it was called, and with which configuration."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log = name, log

    def all_gather_gemm(self, call: OperatorCall, config: Any = None) -> Any:
        self.log.append((self.name, config))
        return call.x, call.x

    def gemm_reduce_scatter(self, call: OperatorCall, config: Any = None) -> Pending:
        self.log.append((self.name, config))
        return Pending(call.x)


GROUP: Any = Group()
X, W = torch.zeros(8, 4), torch.zeros(6, 4)


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TunedBackend:
    monkeypatch.setenv("MEGATRON_FLUX_TUNE_CACHE", str(tmp_path / "tuned.json"))
    monkeypatch.setenv("MEGATRON_FLUX_TUNE_SECONDS", "0")
    monkeypatch.setattr(links, "probe", lambda group, device: Link("nvlink", ""))
    alone = SimpleNamespace(of_all_ranks=lambda mine, about: [mine])
    monkeypatch.setattr(tuner.agreement, "of_group", lambda group: alone)
    monkeypatch.setattr(tuner.agreement, "failures", lambda group, about, mine: {} if mine is None else {0: mine})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    log: list[Any] = []
    made = TunedBackend(*(Recorder(name, log) for name in ("reference", "pipelined", "fused")))  # type: ignore[arg-type]
    made.log = log
    return made


def call(backend: TunedBackend, wire: str = "exact") -> Any:
    OperatorCall("gemm_reduce_scatter", X, W, GROUP, wire=wire).run(backend).wait()
    return backend.log[-1]


def forget(backend: TunedBackend) -> None:
    state_of(GROUP).tuned.pop(backend, None)


def keep(backend: str, plan: KernelConfig | None) -> None:
    key = describe("gemm_reduce_scatter", 8, 6, 4, X, False, 2, "nvlink")
    store(tuning_cache.cache_path(), key, {"backend": backend, "plan": plan and asdict(plan), "ms": {backend: 1.0}})


def test_nothing_kept_and_no_time_to_measure_is_reference(tuned: TunedBackend) -> None:
    assert call(tuned) == ("reference", None)


@pytest.mark.parametrize("name", ["reference", "pipelined"])
def test_a_kept_answer_is_taken(tuned: TunedBackend, name: str) -> None:
    keep(name, None)
    assert call(tuned) == (name, None)


def test_a_kept_plan_holds_for_the_call_alone(tuned: TunedBackend) -> None:
    keep("fused", KernelConfig(reducers=7))
    assert call(tuned) == ("fused", KernelConfig(reducers=7))


def gather(backend: TunedBackend, bias: torch.Tensor | None) -> Any:
    OperatorCall("all_gather_gemm", X, W, GROUP, bias=bias).run(backend)
    return backend.log[-1]


def test_pipelined_which_rounds_before_a_bias_is_neither_measured_nor_taken_for_one(
    tuned: TunedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")

    def fastest_last(ways: dict[str, Any], *_: Any) -> dict[str, list[float]]:
        return {name: [1.0 / place] for place, name in enumerate(ways, 1)}

    monkeypatch.setenv("MEGATRON_FLUX_TUNE_SECONDS", "30")
    monkeypatch.setattr(timing, "interleaved", fastest_last)
    monkeypatch.setattr(timing, "all_agree", lambda *_: False)
    monkeypatch.setattr(tuner_calls, "candidates", lambda *_: [])
    assert gather(tuned, torch.zeros(6)) == ("reference", None)
    (answer,) = tuning_cache.load(tuning_cache.cache_path()).values()
    assert (answer["backend"], list(answer["ms"])) == ("reference", ["reference"])
    tuning_cache.cache_path().unlink()
    forget(tuned)
    tuned.pipelined.release = lambda group: None
    assert gather(tuned, None) == ("pipelined", None)
    assert gather(tuned, torch.zeros(6)) == ("reference", None)
    with captured_calls():
        assert gather(tuned, None) == ("reference", None), "it cannot be captured"
        tuning_cache.cache_path().unlink()
        forget(tuned)
        assert gather(tuned, None) == ("reference", None)
    (answer,) = tuning_cache.load(tuning_cache.cache_path()).values()
    assert list(answer["ms"]) == ["reference"], "it is not measured for calls that will be captured"


def test_pipelined_which_has_no_gemm_all_reduce_is_not_tried(
    tuned: TunedBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("MEGATRON_FLUX_TUNE_SECONDS", "30")
    monkeypatch.setenv("MEGATRON_FLUX_TUNE", "full")
    monkeypatch.setattr(timing, "interleaved", lambda ways, *_: {key: [1.0] for key in ways})
    monkeypatch.setattr(timing, "all_agree", lambda *_: False)
    monkeypatch.setattr(tuned, "reference", Sums("reference", tuned.log))
    tuned.decide(OperatorCall("gemm_all_reduce", X, W, GROUP))
    (answer,) = tuning_cache.load(tuning_cache.cache_path()).values()
    assert (answer["list"], list(answer["ms"])) == ("full", ["reference"])
    assert "cannot run" not in caplog.text, "a warning that nobody can do anything about"


def test_a_tuner_without_pipelined(tuned: TunedBackend) -> None:
    keep("pipelined", None)
    tuned.pipelined = None
    assert call(tuned) == ("reference", None)


def test_the_file_is_read_once_per_shape(tuned: TunedBackend) -> None:
    keep("fused", KernelConfig())
    call(tuned)
    tuning_cache.cache_path().unlink()
    assert call(tuned)[0] == "fused"


def test_capture_measures_nothing_and_remembers_nothing(
    tuned: TunedBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep("fused", KernelConfig())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert call(tuned)[0] == "reference"
    assert "gemm_reduce_scatter m=8 n=6 k=4 was never run before this CUDA graph's capture" in caplog.text
    caplog.clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert call(tuned)[0] == "fused"
    assert not caplog.text


def test_calls_that_will_be_captured_take_the_answer_for_eager_ones(tuned: TunedBackend) -> None:
    keep("fused", KernelConfig(reducers=7))
    with captured_calls():
        assert call(tuned) == ("fused", KernelConfig(reducers=7))
        assert tuned.answer("gemm_reduce_scatter", 8, 6, 4, X, False, GROUP, "exact")["backend"] == "fused"
    tuning_cache.cache_path().unlink()
    forget(tuned)
    keep("pipelined", None)
    assert call(tuned) == ("pipelined", None)
    with captured_calls():
        assert call(tuned) == ("reference", None)  # no time to measure


def test_calls_that_will_be_captured_keep_their_answer_for_themselves(tuned: TunedBackend) -> None:
    key = describe("gemm_reduce_scatter", 8, 6, 4, X, False, 2, "nvlink", captured=True)
    store(tuning_cache.cache_path(), key, {"backend": "fused", "plan": asdict(KernelConfig(reducers=3)), "ms": {}})
    assert call(tuned) == ("reference", None)
    keep("fused", KernelConfig(reducers=7))
    with captured_calls():
        assert call(tuned) == ("reference", None)  # as before in this process
        forget(tuned)
        assert call(tuned) == ("fused", KernelConfig(reducers=3))
    assert call(tuned) == ("fused", KernelConfig(reducers=7))


def test_the_file_lies_with_everything_else_that_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGATRON_FLUX_TUNE_CACHE", raising=False)
    monkeypatch.setenv("MEGATRON_FLUX_CACHE", str(tmp_path))
    assert tuning_cache.cache_path() == tmp_path / "tuned.json"
    monkeypatch.setenv("MEGATRON_FLUX_TUNE_CACHE", str(tmp_path / "mine.json"))
    assert tuning_cache.cache_path() == tmp_path / "mine.json"


def test_a_kept_plan_that_the_call_cannot_run_is_not_taken(tuned: TunedBackend) -> None:
    keep("fused", KernelConfig(ws=True, band=1000))  # of the four rows that a rank has
    assert call(tuned) == ("reference", None)


STORE = """
import fcntl, os, sys, time
from pathlib import Path
from megatron_flux.ops.backends.tuning_cache import store
path, name = Path(sys.argv[1]), sys.argv[2]
flock = fcntl.flock
def as_over_nfs(file, how):  # which makes a byte-range lock of it, and that takes a file that is open for writing
    if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(9, "Bad file descriptor")
    flock(file, how)
fcntl.flock = as_over_nfs
path.with_name(name).touch()
while not all(path.with_name(other).exists() for other in "ab"):
    time.sleep(0.01)
for i in range(40):
    store(path, f"{name} {i}", {"backend": "reference"})
"""


def test_writers_at_the_same_time_lose_no_answer(warm_python: str, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    (tmp_path / "writer.py").write_text(STORE)
    writers = [subprocess.Popen([warm_python, "-m", "writer", str(path), name], cwd=tmp_path) for name in "ab"]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    assert len(tuning_cache.load(path)) == 80
    assert not list(path.parent.glob(".tuned.json.?????*"))


# Plans that ship with the package.

FULL = [KernelConfig(reducers=count) for count in (4, 5, 6)]
SHAPE = Shape("gemm_reduce_scatter", "[n,k]", 2, 8, 6, 4)


@pytest.fixture
def on_h200(tuned: TunedBackend, monkeypatch: pytest.MonkeyPatch) -> TunedBackend:
    """A tuner on GPUs for which plans ship: of shapes farther and farther away; later candidates are faster."""
    pytest.importorskip("triton")
    known = [Entry(SHAPE._replace(m=m), KernelConfig(reducers=m), 0.5, "run") for m in (64, 32, 16)]
    monkeypatch.setattr(tuner_calls, "gpu_of", lambda call: "NVIDIA H200")
    monkeypatch.setattr(shipped_plans, "entries", lambda: tuple(known))
    monkeypatch.setattr(tuner_calls, "candidates", lambda *_: FULL)
    monkeypatch.setenv("MEGATRON_FLUX_TUNE_SECONDS", "30")
    monkeypatch.setattr(timing, "interleaved", lambda ways, *_: {n: [1.0 / i] for i, n in enumerate(ways, 1)})
    monkeypatch.setattr(timing, "all_agree", lambda mine, *_: mine)
    monkeypatch.setattr(timing, "sustained", lambda ways, ms, *_: {name: ms[name] for name in ways})
    monkeypatch.setattr(tuner_measurement, "gemm_only", lambda call: None)
    tuned.pipelined.release = lambda group: None
    tuned.known = known
    return tuned


def kept_answer() -> dict[str, Any]:
    (answer,) = tuning_cache.load(tuning_cache.cache_path()).values()
    return answer


def test_the_nearest_plans_and_the_first_candidate_are_measured(
    on_h200: TunedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(on_h200) == ("fused", FULL[0])
    short = kept_answer()
    assert (short["list"], list(short["ms"])) == (
        "short",
        ["fused default", "fused reducers=16", "fused reducers=32", "reference"],
    )
    assert on_h200.log[:2] == [("fused", KernelConfig(reducers=16)), ("fused", KernelConfig(reducers=32))]
    forget(on_h200)
    monkeypatch.setattr(shipped_plans, "entries", lambda: 1 / 0)
    assert call(on_h200) == ("fused", FULL[0]), "a kept answer is taken"
    forget(on_h200)
    monkeypatch.setenv("MEGATRON_FLUX_TUNE", "full")
    assert call(on_h200) == ("fused", FULL[-1]), "but not where all are to be measured"
    full = kept_answer()
    assert (full["list"], "pipelined" in full["ms"], len(full["ms"])) == ("full", True, 5)
    forget(on_h200)
    monkeypatch.delenv("MEGATRON_FLUX_TUNE")
    assert call(on_h200) == ("fused", FULL[-1]), "an answer of a full list holds for both"


def test_the_plan_of_the_very_shape_makes_nearest_ones_superfluous(on_h200: TunedBackend) -> None:
    on_h200.known.append(Entry(SHAPE, KernelConfig(reducers=8), 0.0, "run"))
    call(on_h200)
    assert set(kept_answer()["ms"]) == {"reference", "fused reducers=8", "fused default"}


@pytest.mark.parametrize("gpu", ["", "NVIDIA GH200 480GB", "NVIDIA A100-SXM4-80GB"])
def test_where_no_plans_ship_all_candidates_are_measured(
    on_h200: TunedBackend, monkeypatch: pytest.MonkeyPatch, gpu: str
) -> None:
    monkeypatch.setattr(tuner_calls, "gpu_of", lambda call: gpu)
    assert call(on_h200) == ("fused", FULL[-1])
    assert kept_answer()["list"] == "full"


def test_of_fp8_the_first_candidates_are_measured_where_plans_ship(
    on_h200: TunedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [KernelConfig(reducers=number) for number in range(1, 10)]
    monkeypatch.setattr(tuner_calls, "fp8_candidates", lambda *_, promoted: found)
    pair = Fp8Pair(quantized(torch.ones(16, 16), "tensor"), quantized(torch.ones(32, 16), "tensor"))
    made = OperatorCall("all_gather_gemm", pair.x.numbers, pair.weight.numbers, GROUP, fp8=pair)
    assert tuner_calls.listed(made, False) == ("short", [asdict(plan) for plan in found[:4]])
    assert tuner_calls.listed(made, True) == ("full", [asdict(plan) for plan in found])
    monkeypatch.setattr(tuner_calls, "gpu_of", lambda call: "")
    assert tuner_calls.listed(made, False) == ("full", [asdict(plan) for plan in found])


def test_h100_begins_with_the_plans_of_h200(on_h200: TunedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner_calls, "gpu_of", lambda call: "NVIDIA H100 80GB HBM3")
    call(on_h200)
    assert kept_answer()["list"] == "short"


def test_a_list_that_there_is_not_is_refused(on_h200: TunedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_FLUX_TUNE", "long")
    with pytest.raises(UserError, match="MEGATRON_FLUX_TUNE must be one of short, full, not 'long'"):
        call(on_h200)
    with pytest.raises(ValueError, match="list must be short or full, not 'long'"):
        tuning_cache.usable({"backend": "reference", "plan": None, "ms": {}, "list": "long"}, "key")


@pytest.mark.parametrize(
    ("other", "taken"),
    [
        ({}, True),
        ({"gain": 0.03}, True),
        ({"gain": 0.029}, False),
        ({"gain": None}, False),  # two GPUs stood in for eight
        ({"m": 16}, False),
        ({"gpu": "NVIDIA H100 80GB HBM3"}, False),
        ({"nvls": "1"}, False),  # stock may be faster than it was in the runs
        ({"margin": "8"}, False),
        ({"dtype": torch.float16}, False),
    ],
)
def test_without_measuring_only_a_plan_that_was_clearly_faster_is_taken(
    on_h200: TunedBackend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    other: dict[str, Any],
    taken: bool,
) -> None:
    plan, m = KernelConfig(reducers=8), other.get("m", 8)
    on_h200.known[:] = [Entry(SHAPE._replace(m=m), plan, other.get("gain", 0.5), "run")]
    tuning_cache.say_once.cache_clear()
    monkeypatch.setattr(tuner_calls, "gpu_of", lambda call: other.get("gpu", "NVIDIA H200"))
    for name, value in {"TUNE_SECONDS": "0", "SM_MARGIN": other.get("margin", "0")}.items():
        monkeypatch.setenv(f"MEGATRON_FLUX_{name}", value)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", other.get("nvls", "0"))
    x = X.to(other.get("dtype", torch.bfloat16))
    for _ in ("first", "again"):
        OperatorCall("gemm_reduce_scatter", x, W.to(x.dtype), GROUP).run(on_h200).wait()
        assert on_h200.log[-1] == (("fused", plan) if taken else ("reference", None))
        forget(on_h200)
    said = ("calls without a kept choice run stock's", "calls for which the package has a plan")
    assert [caplog.text.count(words) for words in said] == [not taken, taken]
    assert not tuning_cache.cache_path().exists(), "nothing was measured that could be kept"


# Bursts leave a few candidates; who is fastest by itself is taken.


@pytest.mark.parametrize(
    ("ms", "expected"),
    [
        ({"reference": 2.0, "a": 1.0, "b": 1.07, "c": 1.09}, ["a", "b"]),
        ({"reference": 1.0, "a": 0.995}, ["reference", "a"]),  # within the margin it is reference that counts
        ({"reference": 2.0}, ["reference"]),
        ({"reference": 1.02, **dict.fromkeys("abcdefgh", 1.0)}, ["a", "b", "c", "d", "e", "f"]),
        ({"reference": 1.005, **dict.fromkeys("abcdefgh", 1.0)}, ["reference", "a", "b", "c", "d", "e"]),
    ],
)
def test_finalists(ms: dict[str, float], expected: list[str]) -> None:
    assert tuner_measurement.finalists(ms) == expected


@pytest.mark.parametrize(
    ("lasting", "chosen"),
    [
        ({"reference": 1.2, "pipelined": 1.1}, "pipelined"),
        ({"reference": 1.1, "pipelined": 1.2}, "reference"),
        ({"reference": 1.1, "pipelined": 1.095}, "reference"),  # others must win by 1 %
    ],
)
def test_the_fastest_by_itself_is_taken(
    tuned: TunedBackend, monkeypatch: pytest.MonkeyPatch, lasting: dict[str, float], chosen: str
) -> None:
    pytest.importorskip("triton")
    asked: list[Any] = []

    def sustained(ways: dict[str, Any], ms: dict[str, float], *_: Any) -> dict[str, float]:
        asked.append((list(ways), ms))
        return lasting

    monkeypatch.setenv("MEGATRON_FLUX_TUNE_SECONDS", "30")
    monkeypatch.setattr(timing, "interleaved", lambda ways, *_: {"reference": [1.0], "pipelined": [1.01]})
    monkeypatch.setattr(timing, "sustained", sustained)
    monkeypatch.setattr(timing, "all_agree", lambda mine, *_: mine)
    monkeypatch.setattr(tuner_calls, "candidates", lambda *_: [])
    monkeypatch.setattr(tuner_measurement, "gemm_only", lambda call: None)
    tuned.pipelined.release = lambda group: None
    assert gather(tuned, None) == (chosen, None)
    assert asked == [(["reference", "pipelined"], {"reference": 1.0, "pipelined": 1.01})]
    (answer,) = tuning_cache.load(tuning_cache.cache_path()).values()
    assert (answer["backend"], answer["sustained_ms"]) == (chosen, lasting)


def test_no_time_is_left_to_run_candidates_by_themselves(tuned: TunedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("MEGATRON_FLUX_TUNE_SECONDS", "0.001")
    monkeypatch.setattr(timing, "interleaved", lambda ways, *_: {"reference": [1.0], "pipelined": [0.98]})
    monkeypatch.setattr(timing, "all_agree", lambda mine, *_: mine)
    monkeypatch.setattr(tuner_calls, "candidates", lambda *_: time.sleep(0.01) or [])
    monkeypatch.setattr(tuner_measurement, "gemm_only", lambda call: None)
    tuned.pipelined.release = lambda group: None
    assert gather(tuned, None) == ("pipelined", None)
    (answer,) = tuning_cache.load(tuning_cache.cache_path()).values()
    assert answer["sustained_ms"] == {}


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
    made.clear()
    timing.sustained({"endless": lambda: "endless"}, {"endless": 5000.0}, GROUP, torch.device("cpu"))
    assert made == [("endless", 1, 1)] * 2


class Chunked(Recorder):
    """One of the chunked backends."""

    def __init__(self, name: str, wire: str, log: list[Any], reason: str | None = None) -> None:
        super().__init__(name, log)
        self.wire, self.reason = wire, reason

    def why_not(self, *operands: Any) -> str | None:
        return self.reason

    def all_gather(self, call: OperatorCall, pieces: int | None = None) -> Pending:
        self.log.append((self.name, pieces))
        return Pending(call.x)

    def all_gather_gemm(self, call: OperatorCall, pieces: int | None = None) -> Any:
        return super().all_gather_gemm(call, config=pieces)

    def gemm_reduce_scatter(self, call: OperatorCall, pieces: int | None = None) -> Any:
        return super().gemm_reduce_scatter(call, config=pieces)


@pytest.fixture
def over_host(tuned: TunedBackend, monkeypatch: pytest.MonkeyPatch) -> TunedBackend:
    """A tuner whose group talks through host memory; candidates that come last are the fastest."""
    monkeypatch.setattr(links, "probe", lambda group, device: Link("host", "asked for"))
    monkeypatch.setattr(tuner_calls, "by_chunks", lambda x, group: True)
    monkeypatch.setattr(transports, "why_none", lambda *_: None)
    monkeypatch.setenv("MEGATRON_FLUX_TUNE_SECONDS", "30")
    monkeypatch.setattr(timing, "interleaved", lambda ways, *_: {n: [1.0 / i] for i, n in enumerate(ways, 1)})
    monkeypatch.setattr(timing, "all_agree", lambda *_: False)
    made = {wire: Chunked("chunked" if wire == "exact" else f"chunked_{wire}", wire, tuned.log) for wire in WIRES}
    found = TunedBackend(tuned.reference, tuned.pipelined, tuned.fused, made)  # type: ignore[arg-type]
    found.log = tuned.log
    found.reference.all_gather = made["exact"].all_gather
    return found


def test_over_host_memory_chunked_is_measured_against_stock(over_host: TunedBackend) -> None:
    assert over_host.why_not(X, W, GROUP) is None
    assert call(over_host) == ("chunked", 1)
    assert gather(over_host, torch.zeros(6)) == ("chunked", 1), "a bias is no obstacle"
    OperatorCall("all_gather", X, None, GROUP).run(over_host).wait()
    kept = tuning_cache.load(tuning_cache.cache_path())
    assert [set(answer["ms"]) for answer in kept.values()] == [{"reference", "chunked x1"}] * 3
    assert all(" tp=2 host | " in key for key in kept)
    assert all(tuning_cache.usable(answer, key) for key, answer in kept.items())
    assert over_host.prepare(OperatorCall("all_gather", X, None, GROUP), (16, 4)) is None
    with captured_calls():
        assert call(over_host) == ("chunked", 1)
        over_host.chunked["chunked"].reason = "it cannot be captured"  # type: ignore[attr-defined]
        assert call(over_host) == ("reference", None)
    assert over_host.why_not(X, W, GROUP) == "it cannot be captured"


def test_over_peers_memory_only_where_it_was_asked_for(
    over_host: TunedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link("p2p", "no NVLink between GPU 0 and GPU 1")
    monkeypatch.delenv("MEGATRON_FLUX_LINK", raising=False)
    assert not links.by_chunks(link)
    assert links.name(link) == "p2p"
    monkeypatch.setenv("MEGATRON_FLUX_LINK", "p2p")
    assert links.by_chunks(link)
    monkeypatch.setattr(links, "probe", lambda group, device: link)
    assert over_host.untested(X, GROUP) is None
    assert call(over_host)[0] == "chunked"
    (key,) = tuning_cache.load(tuning_cache.cache_path())
    assert " tp=2 p2p in chunks | " in key, "not what fused kernels were measured over"


def test_auto_goes_over_host_memory_unasked_and_over_pcie_not(
    over_host: TunedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGATRON_FLUX_LINK", raising=False)
    assert over_host.untested(X, GROUP) is None
    link = Link("p2p", "no NVLink between GPU 0 and GPU 1")
    monkeypatch.setattr(tuner_calls, "by_chunks", lambda x, group: links.by_chunks(link))
    monkeypatch.setattr(over_host.fused, "untested", lambda x, group: "over PCIe", raising=False)
    assert over_host.untested(X, GROUP) == "over PCIe"
    monkeypatch.setattr(links, "_wanted", links.Wanted(link="p2p"))
    assert over_host.untested(X, GROUP) is None


def test_an_8_bit_wire_only_where_it_was_asked_for(over_host: TunedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in ("of the process", "of the file"):
        for wire, name in (("exact", "chunked"), ("fp8", "chunked_fp8"), ("int8", "chunked_int8")):
            assert call(over_host, wire) == (name, 1), "what was kept for another wire is no answer"
            found = over_host.answer("gemm_reduce_scatter", 8, 6, 4, X, False, GROUP, wire)
            assert found is not None
            assert found["backend"] == name
        forget(over_host)
        monkeypatch.setattr(timing, "interleaved", lambda *_: 1 / 0)
    for wire in ("fp8", "int8"):
        assert sum(f"host wire={wire}" in key for key in tuning_cache.load(tuning_cache.cache_path())) == 1


def test_an_8_bit_wire_that_this_gpu_cannot_have(over_host: TunedBackend) -> None:
    over_host.chunked["chunked_fp8"].reason = "not on this GPU"
    assert call(over_host, "fp8") == ("chunked", 1)


def test_the_number_of_pieces_is_measured_and_kept(over_host: TunedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "LEAST_BYTES", 8)
    monkeypatch.setattr(chunked, "LEAST_ROWS", 2)
    for _ in ("measured", "kept"):
        assert call(over_host) == ("chunked", 4), "one a row; the last candidate is the fastest"
        answer = over_host.answer("gemm_reduce_scatter", 8, 6, 4, X, False, GROUP, "exact")
        assert answer is not None
        assert set(answer["ms"]) == {"reference", "chunked x2", "chunked x4"}
        assert (tuning_cache.label(answer), answer["pieces"], answer["plan"]) == ("chunked x4", 4, None)
        forget(over_host)
        monkeypatch.setattr(timing, "interleaved", lambda *_: 1 / 0)


@pytest.mark.parametrize("pieces", [0, True, "4"])
def test_pieces_that_cannot_be_are_refused(pieces: Any) -> None:
    answer = {"backend": "chunked", "plan": None, "ms": {}, "pieces": pieces}
    with pytest.raises(ValueError, match="pieces must be a number from 1 on"):
        tuning_cache.usable(answer, "key")
    with pytest.raises(ValueError, match="with a chunked backend"):
        tuning_cache.usable({**answer, "backend": "reference", "pieces": 4}, "key")


def test_a_chunked_backend_that_fails_everywhere_gets_another_transport(
    over_host: TunedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed: list[Any] = []
    monkeypatch.setattr(transports, "renew", renewed.append)
    monkeypatch.setattr(over_host.chunked["chunked"], "gemm_reduce_scatter", lambda call, pieces: 1 / 0)
    monkeypatch.setattr(
        tuner.agreement, "failures", lambda group, about, mine: {} if mine is None else {0: mine, 1: mine}
    )
    assert call(over_host) == ("reference", None)
    assert renewed == [GROUP]


def test_a_plan_of_another_m_runs_only_where_it_is_legal(tuned: TunedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "MOST_M", 2)
    small, large = KernelConfig(reducers=3), KernelConfig(reducers=7)
    sums = OperatorCall("gemm_reduce_scatter", X, W, GROUP)
    known = tuned._measured(sums)
    known[6] = {"backend": "fused", "plan": asdict(small), "ms": {"fused": 1.0}}
    known[64] = {"backend": "fused", "plan": asdict(large), "ms": {"fused": 1.0}}
    assert call(tuned) == ("fused", small), "m is 8"
    forget(tuned)
    tuned._measured(sums).update(known)
    monkeypatch.setattr(tuner, "fits", lambda op, config, *sizes: config == large)
    assert call(tuned) == ("fused", large), "the nearest that fits"
    forget(tuned)
    tuned._measured(sums).update(known)
    monkeypatch.setattr(tuner, "fits", lambda *_: False)
    counted = tuner.stats.degraded[tuner._INSTEAD]
    assert call(tuned) == ("reference", None)
    assert tuner.stats.degraded[tuner._INSTEAD] == counted + 1, "counted: no silent fallback"


def test_what_is_asked_for_ahead_is_measured_whatever_was(tuned: TunedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """As benchmarks and tune_model() do, with more values of m than a training waits for."""
    measured: list[int] = []

    def measure(call: OperatorCall) -> dict[str, Any]:
        measured.append(call.m)
        return {"backend": "reference", "plan": None, "ms": {"reference": 1.0}}

    monkeypatch.setattr(tuned, "_measure", measure)
    monkeypatch.setattr(tuned, "pipelined", None)
    monkeypatch.setattr(tuner, "MOST_M", 2)
    for rows in (8, 16, 24):
        tuned.decide(OperatorCall("gemm_reduce_scatter", torch.zeros(rows, 4), W, GROUP))
    OperatorCall("gemm_reduce_scatter", torch.zeros(32, 4), W, GROUP).run(tuned)
    assert measured == [8, 16, 24], "and what a training asks for is not, with so many known"


class Sums(Recorder):
    """``gemm_all_reduce`` as well."""

    def gemm_all_reduce(self, call: OperatorCall, config: Any = None) -> Pending:
        self.log.append((self.name, config))
        return Pending(call.x)


OWN, ONE, TWO = AllReduceConfig(own_gemm=True), AllReduceConfig(), AllReduceConfig(shots=2)


class Decoding:
    """A tuner of decode steps, in whose measurements ``fastest`` wins; ``measured`` are the rows that were."""

    def __init__(self, tuned: TunedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = tuned.log
        self.fastest: AllReduceConfig | None = None
        self.measured: list[int] = []
        self.made = TunedBackend(Sums("reference", self.log), None, Sums("fused", self.log))  # type: ignore[arg-type]

        def measure(call: OperatorCall) -> dict[str, Any]:
            self.measured.append(call.m)
            name, plan = ("reference", None) if self.fastest is None else ("fused", asdict(self.fastest))
            return {"backend": name, "plan": plan, "ms": {name: 1.0}}

        monkeypatch.setattr(self.made, "_measure", measure)

    def step(self, m: int, **how: Any) -> Any:
        """What runs a step of ``m`` rows."""
        OperatorCall("gemm_all_reduce", torch.zeros(m, 4), torch.zeros(64, 4), GROUP, **how).run(self.made).wait()
        name, config = self.log[-1]
        return config or name

    def tune(self, m: int, fastest: AllReduceConfig | None) -> None:
        """As tune_model() does."""
        self.fastest = fastest
        self.made.decide(OperatorCall("gemm_all_reduce", torch.zeros(m, 4), torch.zeros(64, 4), GROUP))


@pytest.fixture
def decoding(tuned: TunedBackend, monkeypatch: pytest.MonkeyPatch) -> Decoding:
    made = Decoding(tuned, monkeypatch)
    yield made
    forget(made.made)


def test_a_decode_step_whose_rows_change_runs_the_nearest_plan_and_stock_beside_stock(decoding: Decoding) -> None:
    """After m = 1, 2, 4, ... were tuned no step from 1 to 1024 rows waits for a measurement."""
    plans = {1: OWN, 2: OWN, 4: OWN, 8: OWN, 16: OWN, 32: ONE, 64: ONE, 128: TWO, 256: None, 512: None}
    for m, plan in plans.items():
        decoding.tune(m, plan)
    assert decoding.measured == list(plans), "each of them itself, although another is near, and more than eight"
    for m in range(1, 513):
        ran = decoding.step(m)
        if m in plans:
            assert ran == (plans[m] or "reference"), m
        elif m > 128:
            assert ran == "reference", f"{m}: stock won at 256, and may have"
        else:
            below, above = (near := 1 << (m.bit_length() - 1)), 2 * near
            assert ran in (plans[below], plans[above]), m
            if m * m < below * above and m > 1:
                assert ran == plans[below], m
    assert decoding.step(20) == OWN
    assert decoding.step(24) == ONE
    assert decoding.measured == list(plans)
    assert decoding.step(700) == "reference"
    assert decoding.measured == list(plans), "eight and more were measured"


def test_what_the_file_has_of_other_rows_is_enough(decoding: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    for m, plan in {8: OWN, 16: None, 64: ONE}.items():
        decoding.tune(m, plan)
    forget(decoding.made)  # another process
    read: list[str] = []
    stock = tuning_cache.of_other_rows
    monkeypatch.setattr(tuning_cache, "of_other_rows", lambda key, *a, **k: read.append(key) or stock(key, *a, **k))
    assert [decoding.step(m) for m in (5, 8, 9, 17, 40, 100)] == [OWN, OWN, "reference", "reference", ONE, ONE]
    assert len(read) == 1, "read once for all rows"
    assert decoding.measured == [8, 16, 64]
    with captured_calls():  # other answers
        decoding.fastest = TWO
        assert decoding.step(9) == TWO
    assert decoding.measured == [8, 16, 64, 9]
    for m in (10, 11):  # beside a wgrad: of a training, whose rows stay
        decoding.step(m, async_op=True)
    assert decoding.measured == [8, 16, 64, 9, 10, 11]


def test_rows_with_no_answer_near_are_measured_when_they_come(decoding: Decoding) -> None:
    decoding.fastest = ONE
    for m in (40, 20, 80, 21, 79, 10, 9):
        assert decoding.step(m) == ONE
    assert decoding.measured == [40, 10]


def test_a_plan_that_these_rows_cannot_run_is_passed_over(decoding: Decoding) -> None:
    decoding.tune(64, OWN)
    decoding.fastest = TWO
    assert decoding.step(65) == TWO, "the own GEMM ends at 64 rows"
    assert decoding.measured == [64, 65]
