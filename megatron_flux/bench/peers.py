"""``bench peers``: fused communication and GEMM of every project that has it, on the same calls in the same rounds.

1. Each arm of :mod:`megatron_flux.bench.arms` that can run a call opens its ways to run it. Each way is compared with
   an fp32 reference. The fastest right one, by one burst, takes part in the rounds: an arm's best setting.
2. An arm that raises on any rank is left out of that call on all ranks, with the reason. One that does not come back
   ends the run with its name (:func:`watched`): its kernels hold the GPUs, so nothing else could be measured.

Fields of a row, one per call and arm: ``device``, ``op``, ``model``, ``m``, ``n``, ``k``, ``dtype`` (bf16, fp8) and

* ``arm``, its ``version``, and ``queues``: CUDA_DEVICE_MAX_CONNECTIONS;
* ``ms``: median over rounds of the slowest rank; null of an arm whose result is wrong;
* ``error``: the largest of any row of the result, relative to the reference.

``skipped`` has the arms that did not run a call; rounds.jsonl has each arm's setting.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.bench import arms, harness, tables
from megatron_flux.bench.arms import Arm, Inputs
from megatron_flux.bench.cases import Case
from megatron_flux.bench.harness import WARMUP_STEPS, Measured, NotHereError, Ranks, Variant
from megatron_flux.bench.options import PeersRun
from megatron_flux.comm import agreement
from megatron_flux.errors import FluxError, UserError, one_line
from megatron_flux.ops import timing
from megatron_flux.run import rank
from megatron_flux.telemetry import environment

logger = logging.getLogger("megatron_flux")

TOLERANCE = {"bf16": 0.01, "fp8": 0.06}
"""Largest ``error`` that passes. FP8 is compared with products of the same 8-bit numbers, which the tensor core sums in
14 bits."""
ROWS_AT_ONCE = 4096

Watch = Callable[[], AbstractContextManager[None]]
"""Opens :func:`watched` of one arm and call."""


def set_environment() -> None:
    """Switch NVLink multicast off in every arm. Call before CUDA or any of the libraries starts.

    Raises UserError: the user has switched it on.
    """
    rank.set_environment()
    for name, value in rank.MEASURED.items():
        if os.environ[name] != value and name != "CUDA_DEVICE_MAX_CONNECTIONS":
            raise UserError(f"{name}={os.environ[name]}: bench peers compares without NVLink multicast; unset it")


def reference(inputs: Inputs) -> torch.Tensor:
    """Return this rank's rows of the result, in fp32. Collective."""
    case, group, pair = inputs.case, inputs.here.group, inputs.pair
    x, weight = (inputs.x, inputs.weight) if pair is None else (pair.x.dequantized(), pair.weight.dequantized())
    if case.op == arms.GATHERS:
        x, mine = x.new_empty(case.m, case.k), x
        dist.all_gather_into_tensor(x, mine.contiguous(), group=group)
        return x.float() @ weight.float().t()
    y = x.float() @ weight.float().t()
    dist.all_reduce(y, group=group)
    return y if case.op == arms.REDUCES else y.chunk(group.size())[group.rank()].clone()


def error_of(result: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest relative error of a row; NaN if there is one. Raises FluxError: another shape."""
    if result.shape != right.shape:
        raise FluxError(f"its result is {list(result.shape)}, not {list(right.shape)}")
    parts = zip(result.split(ROWS_AT_ONCE), right.split(ROWS_AT_ONCE), strict=True)
    return torch.stack([((a.float() - b).norm(dim=1) / b.norm(dim=1)).max() for a, b in parts]).max().item()


@contextmanager
def watched(arm: str, case: Case, seconds: float) -> Iterator[None]:
    """End this process with the arm's name unless the block ends in time: a hang on a GPU raises nothing."""

    def end() -> None:
        words = f"arm {arm} has not come back for {seconds:g} s from {case.op} {case.model} m={case.m}"
        error = FluxError(f"{words}; leave it out of --arms")
        logger.error("%s", error)
        rank.WholeErrorFile().record_exception(error)  # the launcher reads it
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class PeersBench:
    """One call, by all arms."""

    def __init__(self, case: Case, wanted: PeersRun, here: Ranks) -> None:
        """Make the operands. Collective."""
        self.case, self.wanted, self.here = case, wanted, here
        self.inputs = arms.inputs_of(case, here)
        self.right = reference(self.inputs)
        dtype = "bf16" if case.fp8 is None else "fp8"
        self.tolerance = TOLERANCE[dtype]
        self.call = {"op": case.op, "model": case.model, "m": case.m, "n": case.n, "k": case.k, "dtype": dtype}
        self.rows: dict[str, dict[str, Any]] = {}
        self.skipped: list[dict[str, Any]] = []
        self.settings: dict[str, str] = {}
        self._raised: dict[str, str] = {}
        self._dropped: set[str] = set()

    def measure(self) -> Measured:
        """Open, check and time all arms."""
        with ExitStack() as opened:
            found = [self._opened(name, opened) for name in dict.fromkeys(self.wanted.arms)]
            ready = [variant for variant in found if variant is not None]
            samples = harness.measure(ready, self.here, rounds=self.wanted.rounds, burst=self.wanted.burst)
        for number, raised in enumerate(agreement.of_all_ranks(self._raised, self.here.ranks)):
            for label, reason in raised.items():
                if samples.pop(label, None) is not None:
                    self._skip(label, f"rank {number}: {reason}")
                    del self.rows[label]
        for label, one in samples.items():
            self.rows[label]["ms"] = round(median(one["step_ms"]), 5)
        rows = list(self.rows.values())
        self.here.say(tables.peers_line(self.call, rows))
        lines = [{**self.call, "arm": label, "setting": self.settings[label], **samples[label]} for label in samples]
        return rows, self.skipped, lines

    def _opened(self, name: str, opened: ExitStack) -> Variant | None:
        """Return the arm's fastest right way, which ``opened`` closes; None where it is skipped or wrong."""
        arm, here, ranks, entered = arms.ARMS[name], self.here, self.here.ranks, ExitStack()
        label = dist.get_backend(here.group) if name == "nccl" else name
        watch = partial(watched, label, self.case, self.wanted.timeout)
        with watch():
            ways, reason = harness.attempt(lambda: self._ways(arm, entered), ranks)
        opened.callback(self._close, label, entered, watch)
        if ways is None:
            self._skip(label, str(reason))
            return None
        errors, reasons = {}, {}
        for setting, way in ways.items():
            error, reason = self._checked(way, watch)
            if error is None:
                reasons[setting] = f"{setting}: {reason}" if setting else str(reason)
            else:
                errors[setting] = error
        if not errors:
            self._skip(label, "; ".join(reasons.values()))
            return None
        right = [setting for setting, error in errors.items() if error <= self.tolerance]
        calls = {setting: self._guarded(label, ways[setting]) for setting in right or errors}
        setting = next(iter(calls))
        if len(right) > 1:
            with watch():
                ms = {
                    key: timing.burst(call, self.wanted.burst, here.group, here.device) for key, call in calls.items()
                }
            setting = min(ms, key=ms.__getitem__)
        error = errors[setting]
        self.rows[label] = {
            **{"device": environment.device_name(), **self.call, "arm": label, "ms": None},
            "error": float(f"{error:.3g}") if math.isfinite(error) else None,
            "version": arm.version(),
            "queues": int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", 8)),
        }
        if not right:
            here.say(f"{label}: its result is WRONG and not timed: error {error:.3g}")
            return None
        self.settings[label] = setting
        return Variant(label, calls[setting], partial(self._burst, label, watch))

    def _ways(self, arm: Arm, entered: ExitStack) -> arms.Ways:
        """Open the arm. Raises NotHereError: it cannot run the call."""
        if (reason := arm.why_not(self.case, self.here)) is not None:
            raise NotHereError(reason)
        return entered.enter_context(arm.ways(self.inputs))

    def _close(self, label: str, entered: ExitStack, watch: Watch) -> None:
        """Close what the arm has opened on this rank."""
        with watch():
            _, reason = harness.attempt(entered.close, self.here.ranks)
        if reason is not None:
            self.here.say(f"{label} did not close: {reason}")

    def _checked(self, way: Callable[[], torch.Tensor], watch: Watch) -> tuple[float | None, str | None]:
        """Run a way a few times. Returns its largest error, of all calls and ranks, or the reason why there is none.

        Ranks agree after each call, so that one that raises on some ranks leaves no collective without its peers.
        """

        def call() -> float:
            torch.full_like(self.right, math.nan, dtype=arms.BF16)  # freed: memory of another arm's right result
            return error_of(way(), self.right)  # waits for the GPU

        errors: list[float] = []
        for _ in range(WARMUP_STEPS):
            with watch():
                error, reason = harness.attempt(call, self.here.ranks)
            if error is None:
                return None, reason
            errors += agreement.of_all_ranks(error, self.here.ranks)
        return max(errors, key=lambda one: (one != one, one)), None  # max() alone would pass over a NaN

    @contextmanager
    def _burst(self, label: str, watch: Watch) -> Iterator[None]:
        """Watch a burst. All ranks leave out what has raised on one of them in an earlier one."""
        with watch():
            if any(agreement.of_all_ranks(label in self._raised, self.here.ranks)):
                self._dropped.add(label)
            yield

    def _guarded(self, label: str, way: Callable[[], torch.Tensor]) -> Callable[[], Any]:
        """Return ``way``, whose errors wait for the end of the burst: its other calls meet the peers' calls."""

        def call() -> Any:
            if label in self._dropped:
                return None
            try:
                return way()
            except Exception as error:
                self._raised.setdefault(label, f"{type(error).__name__}: {one_line(error)}")
                return None

        return call

    def _skip(self, label: str, reason: str) -> None:
        self.skipped.append({**self.call, "arm": label, "reason": reason})


def run(wanted: PeersRun, group: dist.ProcessGroup, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure all calls on the ranks of ``group``. The first rank writes the run folder and calls ``log``."""
    device = torch.device("cuda", torch.cuda.current_device()) if wanted.device == "cuda" else torch.device("cpu")
    # Longer than the watch, which knows the arm's name.
    here = harness.ranks_of(group, device, None, 2 * wanted.timeout, log)
    cases = wanted.cases()
    here.say(f"{len(cases)} calls on {group.size()} ranks, {here.link.kind}, arms: {', '.join(wanted.arms)}")
    about = {"rounds": wanted.rounds, "burst": wanted.burst}

    def measured(case: Case, _: float | None) -> Measured:
        found = PeersBench(case, wanted, here).measure()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return found

    with torch.no_grad():
        return harness.run_cases(cases, here, measured, about, wanted.out, wanted.seconds)


def work(text: str) -> None:
    """Measure on this rank what a :class:`PeersRun` as JSON describes; the first one prints the table."""
    wanted = PeersRun.model_validate_json(text)
    set_environment()
    with harness.opened(cpu=wanted.device == "cpu") as group:
        harness.show(tables.show_peers, run(wanted, group, logger.info), wanted.out)
