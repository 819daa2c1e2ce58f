"""``bench ops``: the operators against GEMM alone, the collective alone, both in turn, and torch's async-TP.

It runs on every rank of a node. All variants of a call are interleaved in one process
(:mod:`megatron_flux.ops.timing`); times are medians over rounds of the slowest rank. The rows of ``summary.json``:

* ``e_overlap``: FLUX's overlap efficiency (arXiv 2406.06858, eq. 2) of the tuned call,
  ``1 - (tuned - gemm) / (serial - gemm)``: 1 is "as fast as the GEMM alone", 0 is "no better than serial".
* ``fp8``: the recipe of FP8 operands (:mod:`megatron_flux.bench.fp8_calls`), null of 16 bits. Then there is no
  async-TP, and NCCL gathers the bytes.
* ``bound_ms``: max(GEMM alone, bytes received / link rate). The link rate is the fastest seen for these bytes: a
  copy-engine rate measured at the start of the run.
* ``async_tp_ms`` calls torch's operator itself, ``pipelined_ms`` the same through this package's ``pipelined`` backend:
  their difference is host time.
* ``host_us``: by variant, the time to enqueue one call while the GPU is busy with those before.
* ``async_tp_own``: ``gemm_ms``, ``serial_ms`` and ``async_tp_ms`` of a second pass with ``async_tp_connections`` as
  ``CUDA_DEVICE_MAX_CONNECTIONS``. Megatron trains with one hardware queue, and so do all variants of the main pass, but
  async-TP moves shards on a second stream and may be faster with more. CUDA reads the variable when it starts, so the
  second pass has processes of its own. The passes are not interleaved; the GEMM, which both have, says whether the
  machine was another by then.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.bench import fp8_calls, process_group, report
from megatron_flux.bench.shapes import Case, OpsRun
from megatron_flux.comm import links, transports
from megatron_flux.comm.group_state import state_of
from megatron_flux.ops import timing
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.ops.backends.tuner_calls import key_of
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.fp8_operand import Fp8Pair
from megatron_flux.run import folder, rank

LINK_BYTES = 64 << 20
WARMUP_CALLS = 3
BACKENDS = ("pipelined", "fused", "tuned")
"""Measured through the public operators, so that their host time counts."""
ASYNC_TP = ("gemm", "serial", "async_tp")
"""Variants of the second pass."""
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"

Variant = Callable[[], object]

logger = logging.getLogger("megatron_flux")


def operands(
    case: Case, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` and ``weight`` as the operator takes them, fresh and random."""
    rows = case.m // group.size() if case.op == "all_gather_gemm" else case.m
    weight = (case.k, case.n) if case.transposed else (case.n, case.k)
    return (torch.randn(rows, case.k, dtype=dtype, device=device), torch.randn(*weight, dtype=dtype, device=device))


def call(
    case: Case, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, backend: str, wire: str = "exact"
) -> Variant:
    """The operator through one backend."""
    operator = getattr(ops, case.op)
    return lambda: operator(x, weight, group, transposed=case.transposed, backend=backend, wire=wire)


def as_tuned(
    case: Case, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, wire: str, pair: Fp8Pair | None = None
) -> OperatorCall:
    """The same as the tuner sees it; ``pair``: FP8 operands, of which ``x`` and ``weight`` are the numbers."""
    transposed = case.transposed and pair is None  # FP8 operands are k-major, both
    return OperatorCall(case.op, x, weight, group, transposed, return_gathered=False, wire=wire, fp8=pair)


def backends(link: links.Link, wire: str) -> tuple[str, ...]:
    """Those that are measured over ``link``."""
    if not links.by_chunks(link):
        return BACKENDS
    return ("chunked", *([f"chunked_{wire}"] if wire != "exact" else []), "tuned")


def variants(
    case: Case,
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup,
    names: Sequence[str] = BACKENDS,
    wire: str = "exact",
) -> dict[str, Variant]:
    """All by name: ``gemm`` and ``nccl`` alone, ``serial``, ``async_tp`` as torch has it where there is peer access,
    then the backends of these ``names``, of which the tuner may send ``wire``.
    """
    importlib.import_module("torch.distributed._symmetric_memory")  # registers torch's own fused operators
    fused = torch.ops.symm_mem
    wt = weight if case.transposed else weight.t()
    y = x.new_empty(case.m, case.n)
    found: dict[str, Variant]
    if case.op == "all_gather_gemm":
        # Random, not empty: a GEMM of zeros draws less power and clocks higher.
        full = torch.randn(case.m, case.k, dtype=x.dtype, device=x.device)

        def gathered() -> torch.Tensor:
            dist.all_gather_into_tensor(full, x, group=group)
            return torch.matmul(full, wt, out=y)

        found = {
            "gemm": lambda: torch.matmul(full, wt, out=y),
            "nccl": lambda: dist.all_gather_into_tensor(full, x, group=group),
            "serial": gathered,
            "async_tp": lambda: fused.fused_all_gather_matmul(x, [wt], 0, group.group_name),
        }
    else:
        z = x.new_empty(case.m // group.size(), case.n)

        def scattered() -> torch.Tensor:
            torch.matmul(x, wt, out=y)
            dist.reduce_scatter_tensor(z, y, group=group)
            return z

        found = {
            "gemm": lambda: torch.matmul(x, wt, out=y),
            "nccl": lambda: dist.reduce_scatter_tensor(z, y, group=group),
            "serial": scattered,
            "async_tp": lambda: fused.fused_matmul_reduce_scatter(x, wt, "sum", 0, group.group_name),
        }
    if "chunked" in names:
        del found["async_tp"]
    return found | {name: call(case, x, weight, group, name, wire) for name in names}


def timed(
    variants: Mapping[str, Variant], group: dist.ProcessGroup, device: torch.device, rounds: int, burst: int
) -> dict[str, timing.Samples]:
    """Warm up and time ``variants`` in turn."""
    for variant in variants.values():
        for _ in range(WARMUP_CALLS):
            variant()
    return timing.rounds(variants, group, device, rounds, burst)


def run(
    wanted: OpsRun, cases: Sequence[Case], group: dist.ProcessGroup, log: Callable[[str], None] = print
) -> dict[str, Any]:
    """Measure ``cases`` on all ranks of ``group``, and return the summary on all of them.

    The first rank writes ``summary.json`` and ``rounds.jsonl``, and calls ``log`` with a line per case.

    Raises:
        UserError: no CUDA device, or the group cannot run the fused backend (with the reason).
    """
    device, link = process_group.checked(wanted.command, group, process_group.DTYPES[wanted.dtype], chunks=True)
    first = dist.get_rank() == 0
    say = log if first else lambda _: None
    rate = _chunks_rate(group, device) if links.by_chunks(link) else _link_rate(group, device)
    summary: dict[str, Any] = {
        **process_group.machine(group, link),
        **({"wire": wanted.wire} if links.by_chunks(link) else {}),
        "link_gb_per_s": round(rate, 1),
        "command": folder.command_line(),
        "rounds": wanted.rounds,
        "burst": wanted.burst,
        "rows": [],
    }
    say(f"{len(cases)} calls on {group.size()} x {summary['device']}, {link.kind}, {rate:.0f} GB/s a rank")
    rounds: list[dict[str, Any]] = []
    began, seconds = time.monotonic(), wanted.seconds
    for number, case in enumerate(cases, 1):
        if seconds is not None and not timing.all_agree(time.monotonic() - began <= seconds, group):
            say(f"stopped after {seconds:g} s with {number - 1} of {len(cases)} calls measured")
            break
        row, raw = _case(case, wanted, group, device, link, rate)
        summary["rows"].append(row)
        say(f"[{number}/{len(cases)}, {time.monotonic() - began:.0f} s] {report.line(row)}")
        rounds.append({**asdict(case), "ms": raw})
        if first:
            process_group.write(wanted.out, summary, rounds)
        torch.cuda.empty_cache()
    return summary


def _case(
    case: Case, wanted: OpsRun, group: dist.ProcessGroup, device: torch.device, link: links.Link, rate: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The row of the summary, and by variant what ``rounds.jsonl`` holds."""
    dtype = process_group.DTYPES[wanted.dtype]
    pair, wire, chunks = None, wanted.wire, links.by_chunks(link)
    if case.fp8 is None:
        x, weight = operands(case, group, dtype, device)
        ways = variants(case, x, weight, group, backends(link, wire), wire)
    else:
        pair, wire = fp8_calls.pair_of(case, group, dtype, device), "exact"
        x, weight = pair.x.numbers, pair.weight.numbers
        ways = fp8_calls.variants(case, pair, group, chunks=chunks)
    tuner: Any = get_backend("tuned")
    call_of_tuner = as_tuned(case, x, weight, group, wire, pair)
    tuner.decide(call_of_tuner)  # by itself, whatever was measured of other m
    times = timed(ways, group, device, wanted.rounds, wanted.burst)
    raw = {
        name: {
            **dict(zip(("low", "median", "high"), timing.quartiles(found.ms), strict=True)),
            "host_us": round(1e3 * median(found.host_ms), 1),
        }
        for name, found in times.items()
    }
    ms = {name: round(found["median"], 4) for name, found in raw.items()}
    answer = tuner.decisions(group).answers[key_of(call_of_tuner, captured=False)]
    e = report.efficiency({f"{name}_ms": value for name, value in ms.items()}, "tuned")
    row = {
        **asdict(case),
        "dtype": str(dtype)[6:],
        **{f"{name}_ms": ms.get(name) for name in (ways if chunks else report.NAMES)},
        "tuned_choice": report.chosen(answer),
        "e_overlap": None if e is None else round(e, 4),
        "bound_ms": round(max(ms["gemm"], case.bytes_received(group.size()) / rate / 1e6), 4),
        "host_us": {name: found["host_us"] for name, found in raw.items()},
        "slab_bytes": state_of(group).slab_bytes(),
        **({"link": link.kind, "wire": wire, "shared_bytes": transports.shared_bytes()} if chunks else {}),
    }
    return row, raw


def _link_rate(group: dist.ProcessGroup, device: torch.device) -> float:
    """GB/s that a rank receives while every rank pushes to its neighbour by copy engine, slowest rank, best of 5."""
    peers = state_of(group).slab("bench", LINK_BYTES, device, False)
    source = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    target = peers.half(0, (group.rank() - 1) % group.size())[:LINK_BYTES]

    def push() -> None:
        for _ in range(4):
            target.copy_(source)

    return _best_rate(push, 4 * LINK_BYTES, group, device)


def _chunks_rate(group: dist.ProcessGroup, device: torch.device) -> float:
    """As :func:`_link_rate`, by chunks: a gather of ``LINK_BYTES`` from each rank, by nothing but copies."""
    link = transports.transport_of(group, device)
    mine = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    theirs = torch.empty(group.size(), LINK_BYTES, dtype=torch.uint8, device=device)

    def gather() -> None:
        link.gather("all_gather", mine, theirs, [0, LINK_BYTES]).wait()

    return _best_rate(gather, (group.size() - 1) * LINK_BYTES, group, device)


def _best_rate(move: Callable[[], None], nbytes: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """GB/s at which ``move``, by all ranks at once, brings each of them ``nbytes``: slowest rank, best of 5."""
    best = 0.0
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(5):
        dist.barrier(group=group)
        torch.cuda.synchronize()
        start.record()
        move()
        end.record()
        torch.cuda.synchronize()
        best = max(best, nbytes / start.elapsed_time(end) / 1e6)
    rate = torch.tensor(best, device=device)
    dist.all_reduce(rate, op=dist.ReduceOp.MIN, group=group)
    return rate.item()


def own_queues(wanted: OpsRun) -> str | None:
    """:data:`QUEUES` in a second pass for async-TP; None where the main pass has it, or none is wanted."""
    value = str(wanted.async_tp_connections)
    if wanted.link in ("host", "p2p") or None not in wanted.recipes:
        return None  # chunks are measured instead, or FP8 alone
    return None if not wanted.async_tp_connections or os.environ.get(QUEUES) == value else value


def add_async_tp(wanted: OpsRun, group: dist.ProcessGroup) -> dict[str, Any]:
    """Measure async-TP in the calls of ``summary.json``, add what was found to it, and return it."""
    dtype = process_group.DTYPES[wanted.dtype]
    device, _ = process_group.checked(wanted.command, group, dtype)
    path = wanted.out / "summary.json"
    summary = json.loads(path.read_text())
    plain = [row for row in summary["rows"] if row["fp8"] is None]
    for number, row in enumerate(plain, 1):
        case = Case(**{field.name: row[field.name] for field in fields(Case)})
        x, weight = operands(case, group, dtype, device)
        every = variants(case, x, weight, group)
        times = timed({name: every[name] for name in ASYNC_TP}, group, device, wanted.rounds, wanted.burst)
        row["async_tp_own"] = {f"{name}_ms": round(median(found.ms), 4) for name, found in times.items()}
        if rank.is_first():
            logger.info(f"[{number}/{len(plain)}] async-TP by itself: {case} {row['async_tp_own']}")
        torch.cuda.empty_cache()
    summary["async_tp_connections"] = os.environ.get(QUEUES)
    dist.barrier(group=group)  # every rank has read the file
    if rank.is_first():
        path.write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def work(text: str) -> None:
    """Measure on this rank what an :class:`OpsRun` as JSON says; the first one prints the table."""
    wanted = OpsRun.model_validate_json(text)
    rank.set_environment()
    rank.set_nccl_link(wanted.link)
    links.want(links.Wanted(wanted.link))
    log = wanted.out / "log.txt"
    with process_group.logged_to(log), process_group.opened() as group:
        second = wanted.command == "async-TP"
        summary = add_async_tp(wanted, group) if second else run(wanted, wanted.cases(), group, logger.info)
        if rank.is_first():
            process_group.show(report.show_async_tp if second else report.show_ops, summary, log)
            logger.info("summary, rounds, plot and log: %s", wanted.out)
