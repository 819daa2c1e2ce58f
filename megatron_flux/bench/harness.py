"""Benchmark harness of operators and layers: cases by variants, in interleaved rounds.

1. :func:`run_cases` gives each case a deadline and writes what was measured so far: ``summary.json`` with one row per
   case (operators) or per case and variant (layers), and ``rounds.jsonl`` with the raw rounds.
2. A benchmark builds the variants of its case. All ranks leave out what one rank cannot do (:func:`attempt`), unless
   the others wait for that rank: then the run ends.
3. :func:`measure` times them: each round runs one burst of every variant in a new random order, and a time is the
   slowest rank's (:mod:`megatron_flux.ops.timing`).

All functions with :class:`Ranks` are collective.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from megatron_flux import nvml
from megatron_flux.comm import agreement, links
from megatron_flux.errors import FluxError, UserError
from megatron_flux.log_once import logger
from megatron_flux.metrics.strict_json import write_atomically
from megatron_flux.ops import timing
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.run import rank
from megatron_flux.telemetry import environment

WARMUP_STEPS = 3
TUNING_STEPS = 5  # between two looks whether the tuner has decided
MOST_TUNING_S = 300.0
GRACE_S = 30.0
"""Seconds after a rank's failure in which peers fail alike, or get on without it: ranks compile at different speeds."""

Samples = dict[str, list[Any]]
"""One variant's rounds, an entry each. Of the slowest rank: ``step_ms``, ``host_ms`` (to enqueue a step on an idle GPU)
and ``busy_host_ms`` (behind other steps). ``sm_clock_mhz`` of the slowest GPU in the middle of the burst, null where
NVML told none, and ``throttle_reasons``: names of what held any GPU's clock down then."""
Measured = tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]
"""Rows, what was skipped (each with its ``reason``), lines of rounds.jsonl."""
_T = TypeVar("_T")


class Ranks(NamedTuple):
    """Process groups and device of a benchmark."""

    device: torch.device
    group: dist.ProcessGroup  # tensor-parallel
    ranks: dist.ProcessGroup
    """Gloo group of all ranks: a barrier of NCCL is a kernel, which would show in traces and in the next step."""
    link: links.Link
    say: Callable[[str], None]  # write a line for people; does nothing on other ranks than the first


@dataclass
class Variant:
    """One way to do the work of a case."""

    name: str
    run: Callable[[], Any]
    active: Callable[[], AbstractContextManager[Any]] = nullcontext  # context around every burst of ``run``
    facts: dict[str, Any] = field(default_factory=dict)  # further fields of the variant's row


def ranks_of(
    group: dist.ProcessGroup, device: torch.device, link: str | None, timeout: float, log: Callable[[str], None]
) -> Ranks:
    """Describe the ranks of ``group``, which may use no stronger ``link``; ``timeout`` in seconds."""
    ranks = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    links.want(links.Wanted(link))
    return Ranks(device, group, ranks, links.probe(group, device), log if ranks.rank() == 0 else lambda _: None)


def run_cases(
    cases: Sequence[_T],
    here: Ranks,
    measured: Callable[[_T, float | None], Measured],
    about: Mapping[str, Any],
    out: Path,
    seconds: float | None,
) -> dict[str, Any]:
    """Measure all cases, none begun after ``seconds``; return the summary, which the first rank writes after each.

    ``measured`` gets a case and its deadline (:func:`time.monotonic`). ``about`` goes into the summary.
    """
    summary: dict[str, Any] = {
        "device": environment.device_name(),
        "tp": here.group.size(),
        "link": here.link.kind,
        "versions": environment.versions(),
        "environment": environment.switches(),
        **about,
        "rows": [],
        "skipped": [],
    }
    rounds: list[dict[str, Any]] = []
    began, deadline = time.monotonic(), None
    for index, case in enumerate(cases):
        if seconds is not None:
            if agreement.of_all_ranks(time.monotonic() - began > seconds, here.ranks)[0]:
                here.say(f"stopped after {seconds:g} s, {len(cases) - index} of {len(cases)} left out")
                break
            # An equal share of the time for each; what one does not need is the next one's.
            deadline = began + seconds * (index + 1) / len(cases)
        for found, kept in zip(measured(case, deadline), (summary["rows"], summary["skipped"], rounds), strict=True):
            kept += found
        if here.device.type == "cuda":
            torch.cuda.empty_cache()
        if here.ranks.rank() == 0:
            out.mkdir(parents=True, exist_ok=True)
            (out / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rounds))
            write_atomically(out / "summary.json", json.dumps(summary, indent=1) + "\n")  # the run may be killed
    return summary


def measure(
    variants: Sequence[Variant],
    here: Ranks,
    *,
    rounds: int,
    burst: int,
    deadline: float | None = None,
    gpu: nvml.Gpu | None = None,
) -> dict[str, Samples]:
    """Time every variant once a round, by name; the samples are those of all ranks.

    Python's garbage collector runs between variants, not inside them. From the second round on each rank reads its
    GPU's clock in the middle of a burst: variants that move data while they multiply may be held at lower clocks. No
    round but the first begins after ``deadline``.
    """
    by_name = {variant.name: variant for variant in variants}
    seen: dict[str, list[nvml.Reading | None]] = {name: [] for name in by_name}
    half: dict[str, float] = {}  # of a variant's last burst, in seconds
    running, began, glance = "", 0.0, None

    def barrier() -> None:
        nonlocal began, glance
        dist.barrier(group=here.ranks)
        glance = nvml.Glance(gpu, half[running]) if gpu is not None and running in half else None
        began = time.perf_counter()

    @contextmanager
    def around(name: str) -> Iterator[None]:
        nonlocal running
        running = name
        gc.collect()
        gc.disable()
        try:
            with by_name[name].active():
                yield
                half[name] = (time.perf_counter() - began) / 2
                seen[name].append(glance.result() if glance else None)
        finally:
            gc.enable()

    def go_on() -> bool:
        return not agreement.of_all_ranks(deadline is not None and time.monotonic() > deadline, here.ranks)[0]

    steps = {name: variant.run for name, variant in by_name.items()}
    how: dict[str, Any] = {"around": around, "barrier": barrier, "go_on": go_on}
    timed = timing.rounds(steps, here.group, here.device, rounds, burst, **how)
    by_rank = agreement.of_all_ranks(seen, here.ranks)
    samples: dict[str, Samples] = {}
    for name, one in timed.items():
        by_round = [list(filter(None, of_ranks)) for of_ranks in zip(*(seen[name] for seen in by_rank), strict=True)]
        reasons = [{why for r in readings for why in nvml.throttle_reasons(r.throttle)} for readings in by_round]
        samples[name] = {
            "step_ms": one.ms,
            "host_ms": one.first_host_ms,
            "busy_host_ms": one.host_ms,
            "sm_clock_mhz": [min(filter(None, (r.sm_clock_mhz for r in of)), default=None) for of in by_round],
            "throttle_reasons": [sorted(of) for of in reasons],
        }
    return samples


def capture(step: Callable[[], _T], generators: Sequence[torch.Generator] = ()) -> Callable[[], _T]:
    """Capture ``step`` in a CUDA graph and return its replay. All ranks call it; the GPU is idle before and after.

    The step must allocate nothing outside torch's allocator, draw random numbers from ``generators`` alone and never
    wait for the GPU. The graph keeps the memory of its results for as long as the replay lives.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    # Workspaces of captured operators cannot be made during capture.
    with torch.cuda.stream(side), captured_calls():
        for _ in range(WARMUP_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    # thread_local: NCCL's watchdog thread may ask for events while this thread captures.
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        result = step()
    torch.cuda.synchronize()

    def replay() -> _T:
        graph.replay()
        return result

    return replay


def run_until_tuned(step: Callable[[], object], ranks: dist.ProcessGroup) -> None:
    """Make steps until the tuner has decided about all their calls. Collective. Raises FluxError: it takes too long."""
    tuned: Any = get_backend("tuned")
    began, before = time.monotonic(), -1
    # Not until all trials are over: one of a variant that failed goes on for ever.
    while any(agreement.of_all_ranks(tuned.tuner.turns() != before, ranks)):
        before = tuned.tuner.turns()
        for _ in range(TUNING_STEPS):
            step()
        if max(agreement.of_all_ranks(time.monotonic() - began, ranks)) > MOST_TUNING_S:
            raise FluxError(f"the tuner has not decided within {MOST_TUNING_S:.0f} s")


@contextmanager
def ended_after(seconds: float, error: FluxError) -> Iterator[None]:
    """End this process with ``error`` unless the block ends in time: a hang on a GPU raises nothing."""

    def end() -> None:
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


def attempt(action: Callable[[], _T], ranks: dist.ProcessGroup, what: str) -> tuple[_T | None, str | None]:
    """Run ``action`` on all ``ranks``. Returns its result, or None and the first failing rank's reason on all ranks.

    If peers still wait for a rank :data:`GRACE_S` after it failed, it ends with an error that names ``what``.
    """
    result, mine = None, None
    try:
        result = action()
    except UserError as error:  # says what cannot be measured here
        mine = str(error)
    except Exception as error:  # whatever a variant raises is the reason why it is left out
        mine = f"rank {ranks.rank()}: {type(error).__name__}: {error}"
    alone = FluxError(f"{what}: {mine}; its peers have not come to the end of it in {GRACE_S:g} s")
    with nullcontext() if mine is None else ended_after(GRACE_S, alone):
        reason = next(filter(None, agreement.of_all_ranks(mine, ranks, f"the end of {what}")), None)
    return (result, None) if reason is None else (None, " ".join(reason.split())[:500])


@contextmanager
def opened(link: str | None = None, *, cpu: bool = False) -> Iterator[dist.ProcessGroup]:
    """Yield the group of all ranks that a launcher started, each on its GPU; NCCL uses no stronger ``link``."""
    rank.set_environment()
    with rank.process_group("cpu" if cpu else "cuda", link):
        yield dist.distributed_c10d._get_default_group()
        if not cpu:
            torch.cuda.synchronize()


@contextmanager
def userbuffers(shape: list[int], tp: int, *, fp8: bool, **more: Any) -> Iterator[None]:
    """Open TransformerEngine's userbuffers for operands of this shape; UB_SKIPMC keeps NVLink multicast off."""
    import transformer_engine.pytorch as te

    modes = te.UserBufferQuantizationMode
    how: dict[str, Any] = {"dtype": torch.bfloat16, "bootstrap_backend": "gloo", **more}
    try:
        te.initialize_ub(shape, tp, quantization_modes=[modes.FP8 if fp8 else modes.NONE], **how)
        yield
    finally:
        torch.cuda.synchronize()
        te.destroy_ub()


def show(print_tables: Callable[[dict[str, Any]], None], summary: dict[str, Any], out: Path) -> None:
    """Print the tables of ``summary`` on the first rank."""
    if rank.is_first():
        print_tables(summary)
        logger.info("summary and rounds: %s", out)
