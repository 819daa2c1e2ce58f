"""What a call's GEMM takes alone, and what collective and GEMM take in turn: the two ends of overlap efficiency.

FLUX (arXiv 2406.06858, section 5.1) defines the effective communication time of a way to run a call as its time minus
that of the GEMM alone, unsplit, and overlap efficiency as

    E_overlap = 1 - ECT(overlapped) / ECT(not overlapped) = (serial - overlapped) / (serial - GEMM)

with ``serial`` the collective and the GEMM one after the other: here the ``reference`` backend.

Both times are the slowest rank's median of interleaved bursts, from one measurement: the tuner's, where it measured the
call in question (it keeps both with its answer), else one made here, once per shape, between steps. Its operands are
random, since zeros make a GEMM draw less power and run faster, and come from a generator of their own: training's
random numbers stay what they were. ``all_gather`` has no GEMM: its time alone is 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm.pending import Pending
from megatron_flux.ops import timing
from megatron_flux.ops.observe import Call
from megatron_flux.ops.reference import ReferenceBackend, gemm


class GemmAlone:
    """A stand-in for a backend that leaves communication out: its results are wrong, its time is the GEMM's."""

    def __init__(self) -> None:
        """The gathered operand is made once and kept."""
        self._gathered: torch.Tensor | None = None

    def prepare(self, x: torch.Tensor, group: dist.ProcessGroup) -> bool:
        """Make the gathered operand of ``x`` ``[m/tp, k]``; False where there is no memory for it."""
        try:
            self._gathered = x.repeat(group.size(), 1)
        except torch.OutOfMemoryError:
            return False
        return True

    def all_gather_gemm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        group: dist.ProcessGroup,
        *,
        transposed: bool,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The GEMM over this rank's rows, repeated to the gathered size."""
        assert self._gathered is not None, "prepare() comes first"  # noqa: S101
        return gemm(self._gathered, weight, transposed=transposed, bias=bias), self._gathered

    def gemm_reduce_scatter(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        group: dist.ProcessGroup,
        *,
        transposed: bool,
        async_op: bool = False,
    ) -> Pending:
        """The GEMM, nothing summed."""
        return Pending(gemm(x, weight, transposed=transposed))


@dataclass(frozen=True)
class Alone:
    """Milliseconds of one call; None where they are not known."""

    gemm_ms: float | None
    serial_ms: float | None
    source: str
    """``tuner``, ``measured``, or why there is none."""


class AloneTimes:
    """The times of the calls seen so far, measured when a new one comes."""

    def __init__(self, answer: Callable[[Call], Mapping[str, Any] | None] | None = None) -> None:
        """``answer``: what the tuner keeps of a call, if it ran it."""
        self._answer = answer
        self._known: dict[Call, Alone] = {}

    def of(self, calls: Iterable[Call]) -> dict[Call, Alone]:
        """The times of ``calls``. Collective over the calls' groups when one of them is new to their ranks."""
        calls = list(calls)
        # One order for all ranks: two that are in two groups together must not measure them crosswise.
        for call in sorted(calls, key=lambda call: (_shape_of(call), call.group_name)):
            if call not in self._known:
                self._known[call] = self._find(call)
        return {call: self._known[call] for call in calls}

    def _find(self, call: Call) -> Alone:
        answer = self._answer(call) if self._answer is not None else None
        if answer and "gemm_ms" in answer and "reference" in answer["ms"]:
            return Alone(answer["gemm_ms"], answer["ms"]["reference"], "tuner")
        return measure(call)


def _shape_of(call: Call) -> tuple[Any, ...]:
    """What is the same on all ranks of the call's group."""
    return call.operator, call.m, call.n, call.k, str(call.dtype), call.transposed, call.backend


def measure(call: Call) -> Alone:
    """Measure ``call`` on random operands of its shape. Collective over its group."""
    group, reference = call.group, ReferenceBackend()
    operands = _operands(call)
    if not timing.all_agree(operands is not None, group, call.device) or operands is None:
        return Alone(None, None, "not measured: no memory for the operands on some rank")
    x, weight, alone = operands
    if call.operator == "all_gather":
        serial = timing.interleaved({"serial": lambda: reference.all_gather(x, group, async_op=True)}, group, x.device)
        return Alone(0.0, statistics.median(serial["serial"]), "measured")

    def run(backend: Any) -> Any:
        if call.operator == "all_gather_gemm":
            return backend.all_gather_gemm(x, weight, group, transposed=call.transposed)
        return backend.gemm_reduce_scatter(x, weight, group, transposed=call.transposed, async_op=False)

    ways = {"serial": lambda: run(reference), "gemm": lambda: run(alone)}
    found = timing.interleaved(ways, group, x.device)
    return Alone(statistics.median(found["gemm"]), statistics.median(found["serial"]), "measured")


def _operands(call: Call) -> tuple[torch.Tensor, torch.Tensor, GemmAlone] | None:
    """``x``, ``weight`` (of all_gather: of nothing) and the prepared GEMM of a call; None where memory is short.

    Everything that measuring will need is allocated once here, so that a rank finds out before others wait for it.
    """
    tp = call.group.size()
    rows = call.m if call.operator == "gemm_reduce_scatter" else call.m // tp
    generator = torch.Generator(device=call.device).manual_seed(call.group.rank())

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=call.device, dtype=call.dtype)

    alone = GemmAlone()
    try:
        x = random(rows, call.k)
        weight = random(call.k, call.n) if call.transposed else random(call.n, call.k)
        if call.operator == "all_gather_gemm" and not alone.prepare(x, call.group):
            return None
        # The reference backend's gathered operand, its result and the one before, which is dropped later.
        scratch = [x.new_empty(shape) for shape in ((call.m, call.k), (call.m, call.n), (call.m, call.n))]
        del scratch
    except torch.OutOfMemoryError:
        return None
    return x, weight, alone
