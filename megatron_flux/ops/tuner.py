"""The ``tuned`` backend: measures once per call shape which backend and plan is fastest, and keeps the answer.

Contract
    * Candidates are ``reference``, ``pipelined`` and a short list of fused plans. ``pipelined`` rounds before it adds a
      bias: where the GEMM adds one it is not measured, and takes nothing. Bursts in turns leave those that are about as
      fast as the fastest; of these the one is kept that is fastest when it runs by itself until the GPU has settled at
      its power limit (:mod:`megatron_flux.ops.timing` says why). Times are the slowest rank's. ``reference`` is taken
      unless another wins by 1 %, so a tuned call is never slower than that was in the measurement.
    * All ranks of a group decide together: times are reduced by maximum over the group, and a kept answer is read by
      the group's first rank and broadcast. One collective per new shape, none afterwards.
    * Answers live in a JSON file that people can read and edit: ``MEGATRON_FLUX_TUNE_CACHE``, default ``tuned.json``
      in the cache folder (:mod:`megatron_flux.cache`). Its keys name operator, shape, dtype, weight form, group size,
      link, GPU and versions. Only the first rank of a group writes, atomically.
    * Tuning takes a bounded time: ``MEGATRON_FLUX_TUNE_SECONDS`` per shape (default 30), after which no candidate is
      compiled, and after twice as long nothing is measured once more, though what has begun is finished (some seconds);
      0 never measures and takes ``reference`` where nothing is kept. During CUDA-graph capture nothing is measured
      either: a call that is new then takes ``reference`` and is logged.
    * Calls that will be captured (:mod:`megatron_flux.ops.capture`) take the answer for eager ones, unless it is
      ``pipelined``, which cannot be captured. Where there is none they are measured in their own mode, eagerly and so
      with a handshake for each, and the answer is kept for such calls alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_flux.cache import cache_folder
from megatron_flux.comm import topology
from megatron_flux.comm.pending import Pending
from megatron_flux.errors import UserError
from megatron_flux.ops import timing
from megatron_flux.ops.alone import GemmAlone
from megatron_flux.ops.capture import capturing
from megatron_flux.ops.fused import FusedBackend
from megatron_flux.ops.pipelined import PipelinedBackend
from megatron_flux.ops.plan import Plan, candidates
from megatron_flux.ops.ready import ReadyCall
from megatron_flux.ops.reference import ReferenceBackend
from megatron_flux.version import __version__

logger = logging.getLogger("megatron_flux")

MARGIN = 0.99

CLOSE, FINALISTS = 1.08, 6
"""How much slower in bursts, and how many, the candidates are that are measured once more by themselves."""


def cache_path() -> Path:
    """Where answers are kept."""
    given = os.environ.get("MEGATRON_FLUX_TUNE_CACHE")
    return Path(given) if given else cache_folder() / "tuned.json"


def describe(
    op: str, m: int, n: int, k: int, x: torch.Tensor, transposed: bool, tp: int, link: str, *, captured: bool = False
) -> str:
    """The key of an answer: everything it depends on. ``captured``: the calls run as inside a CUDA graph."""
    device = _device_name(x.device)
    form = "[k,n]" if transposed else "[n,k]"
    versions = f"flux {__version__} torch {torch.__version__}"
    mode = " in graphs" if captured else ""
    return f"{op} m={m} n={n} k={k} {str(x.dtype)[6:]} {form} tp={tp} {link}{mode} | {device} | {versions}"


@functools.cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def load(path: Path) -> dict[str, Any]:
    """All kept answers; none if the file does not exist.

    Raises:
        UserError: the file is not what this module writes.
    """
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"tuning cache {path} cannot be read: {error}; delete it to tune again") from error
    if not isinstance(found, dict):
        raise UserError(f"tuning cache {path} must hold one JSON object; delete it to tune again")
    return found


def store(path: Path, key: str, answer: dict[str, Any]) -> None:
    """Add one answer; a reader sees the old file or the new one, and writers take turns (several groups, several jobs).

    On a file system without locks a writer may undo what another one added meanwhile: that call is tuned once more.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        merged = {**load(path), key: answer}
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "w") as out:
            json.dump(merged, out, indent=1, sort_keys=True)
            out.write("\n")
        os.replace(name, path)
    finally:
        os.close(folder)  # and with it the lock


def _kind(
    op: str, x: torch.Tensor, m: int, n: int, k: int, group: dist.ProcessGroup, transposed: bool
) -> tuple[Any, ...]:
    """What calls with one choice have in common."""
    return (group.group_name, op, m, n, k, x.dtype, x.device, transposed, capturing(x))


def ranked(ms: dict[str, float]) -> list[str]:
    """The candidates by what speaks for them, best first, from milliseconds by candidate."""
    return sorted(ms, key=lambda name: ms[name] * (MARGIN if name == "reference" else 1.0))


def finalists(ms: dict[str, float]) -> list[str]:
    """The candidates to measure by themselves, best first, from milliseconds by candidate in bursts."""
    best, *others = ranked(ms)
    return [best, *(name for name in others if ms[name] <= CLOSE * ms[best])][:FINALISTS]


def _first(answers: Iterable[dict[str, Any] | None], captured: bool) -> dict[str, Any] | None:
    """The first answer that there is and that such a call can run."""
    return next((a for a in answers if a is not None and not (captured and a["backend"] == "pipelined")), None)


class _Call(NamedTuple):
    """An operator call that is to be run, or measured first."""

    op: str
    run: Callable[[Any], Any]
    """Makes the call on a backend."""
    x: torch.Tensor
    m: int
    n: int
    k: int
    group: dist.ProcessGroup
    transposed: bool
    pipelines: bool
    """Whether ``pipelined`` may run it."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """See :func:`_kind`."""
        return _kind(self.op, self.x, self.m, self.n, self.k, self.group, self.transposed)


class TunedBackend:
    """See the module."""

    name = "tuned"
    needs_cuda = True
    automatic = True

    def __init__(self, reference: ReferenceBackend, pipelined: PipelinedBackend | None, fused: FusedBackend) -> None:
        """``fused`` also answers what this backend can run; None for ``pipelined`` leaves it out."""
        self.reference = reference
        self.pipelined = pipelined
        self.fused = fused
        self.answers: dict[tuple[str, str], dict[str, Any]] = {}
        """By group and key; filled as shapes come."""
        self._quick: dict[tuple[Any, ...], tuple[str, Plan | None]] = {}

    def why_not(self, x: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup) -> str | None:
        """Whatever keeps ``fused`` from running."""
        return self.fused.why_not(x, weight, group)

    def all_gather_gemm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        group: dist.ProcessGroup,
        *,
        transposed: bool,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~megatron_flux.ops.backend.Backend`."""

        def run(backend: Any) -> Any:
            return backend.all_gather_gemm(x, weight, group, transposed=transposed, bias=bias)

        m = x.shape[0] * group.size()
        n = weight.shape[1] if transposed else weight.shape[0]
        pipelines = self.pipelined is not None and bias is None
        return self._run(_Call("all_gather_gemm", run, x, m, n, x.shape[1], group, transposed, pipelines))

    def gemm_reduce_scatter(
        self, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, *, transposed: bool, async_op: bool
    ) -> Pending:
        """See :class:`~megatron_flux.ops.backend.Backend`."""

        def run(backend: Any) -> Any:
            return backend.gemm_reduce_scatter(x, weight, group, transposed=transposed, async_op=async_op)

        n = weight.shape[1] if transposed else weight.shape[0]
        pipelines = self.pipelined is not None
        return self._run(_Call("gemm_reduce_scatter", run, x, x.shape[0], n, x.shape[1], group, transposed, pipelines))

    def all_gather(self, x: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool) -> Pending:
        """By copy engine, never by NCCL: an NCCL kernel and a fused one must not wait for each other's SMs."""
        return self.fused.all_gather(x, group, async_op=async_op)

    def ready(
        self,
        operator: str,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        group: dist.ProcessGroup,
        transposed: bool,
        shape: tuple[int, ...],
        bias: bool = False,
    ) -> ReadyCall | None:
        """See :class:`~megatron_flux.ops.backend.Backend`."""
        if weight is None:
            return self.fused.ready(operator, x, weight, group, transposed, shape)
        k = x.shape[-1]
        m = x.numel() // k * (group.size() if operator == "all_gather_gemm" else 1)
        n = weight.shape[1] if transposed else weight.shape[0]
        choice = self._quick.get(_kind(operator, x, m, n, k, group, transposed))
        if choice is None or choice[1] is None or capturing(x):
            return None
        return self._with_plan(
            lambda fused: fused.ready_with_plan(operator, x, weight, group, transposed, shape, bias), choice[1]
        )

    def _run(self, call: _Call) -> Any:
        name, plan = self._choice(call)
        if plan is not None:
            return self._with_plan(call.run, plan)
        if name == "pipelined" and call.pipelines:  # no answer for calls that will be captured
            return call.run(self.pipelined)
        return call.run(self.reference)

    def _with_plan(self, run: Callable[[Any], Any], plan: Plan) -> Any:
        before, self.fused.plan = self.fused.plan, plan
        try:
            return run(self.fused)
        finally:
            self.fused.plan = before

    def _choice(self, call: _Call) -> tuple[str, Plan | None]:
        """The backend's name for this call, and its plan if it is ``fused``; measured if the call is new."""
        choice = self._quick.get(call.kind)
        if choice is None:
            found = self._find(call)
            choice = found["backend"], Plan(**found["plan"]) if found["plan"] is not None else None
            if not torch.cuda.is_current_stream_capturing():
                self._quick[call.kind] = choice
        return choice

    def _find(self, call: _Call) -> dict[str, Any]:
        """``{"backend", "plan", "ms", "sustained_ms", "gemm_ms"}`` for this call: ``ms`` by candidate in bursts,
        ``sustained_ms`` of those that were measured by themselves (none if one was far ahead, or time was up),
        ``gemm_ms`` of the GEMM alone (absent from answers of earlier versions, and where memory was short).
        """
        op, x, m, n, k, group = call.op, call.x, call.m, call.n, call.k, call.group
        link, captured = topology.probe(group, x.device).kind, capturing(x)
        shape = (op, m, n, k, x, call.transposed, group.size(), link)
        keys = [describe(*shape, captured=True), describe(*shape)] if captured else [describe(*shape)]
        found = _first([self.answers.get((group.group_name, key)) for key in keys], captured)
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                if group.rank() == 0:
                    logger.warning(
                        "megatron_flux: %s m=%d n=%d k=%d was never run before this CUDA graph's capture, so stock's "
                        "GEMM and collective become part of it; run it once inside "
                        "megatron_flux.ops.capture.captured_calls() before",
                        op, m, n, k,
                    )  # fmt: skip
                return {"backend": "reference", "plan": None, "ms": {}}
            cache = load(cache_path()) if group.rank() == 0 else {}
            kept: list[Any] = [_first([cache.get(key) for key in keys], captured)]
            dist.broadcast_object_list(kept, group=group, group_src=0)
            found = kept[0]
        if found is None:
            found = self._measure(call)
            if found["ms"] and group.rank() == 0:
                store(cache_path(), keys[0], found)
            if call.pipelines and found["ms"] and found["backend"] != "pipelined" and not self._pipelines(group):
                self.pipelined.release(group)
        self.answers[group.group_name, keys[0]] = found
        return found

    def answer(
        self, op: str, m: int, n: int, k: int, x: torch.Tensor, transposed: bool, group: dist.ProcessGroup
    ) -> dict[str, Any] | None:
        """What was decided in this process for a call, None if nothing was. Of ``x`` only dtype and device count."""
        link = topology.probe(group, x.device).kind
        key = describe(op, m, n, k, x, transposed, group.size(), link, captured=capturing(x))
        return self.answers.get((group.group_name, key))

    def _pipelines(self, group: dist.ProcessGroup) -> bool:
        """Whether any call of ``group`` so far runs on ``pipelined``."""
        return any(
            name == group.group_name and answer["backend"] == "pipelined" for (name, _), answer in self.answers.items()
        )

    def _measure(self, call: _Call) -> dict[str, Any]:
        limit = float(os.environ.get("MEGATRON_FLUX_TUNE_SECONDS", "30"))
        if limit <= 0:
            return {"backend": "reference", "plan": None, "ms": {}}
        began = time.monotonic()
        from megatron_flux.ops.launch import hopper_kernels, sm_count

        op, run, x, m, n, k, group = call.op, call.run, call.x, call.m, call.n, call.k, call.group
        device, mp, tp = x.device, m // group.size(), group.size()
        ws = hopper_kernels(x, n, k) and (op == "gemm_reduce_scatter" or mp % 128 == 0)
        ways: dict[str, tuple[Plan | None, Callable[[], Any]]] = {"reference": (None, lambda: run(self.reference))}
        if call.pipelines and not capturing(x):
            ways["pipelined"] = (None, lambda: run(self.pipelined))
            ways["pipelined"][1]()  # allocates its workspace
        for plan in candidates(op, mp, n, k, tp, sm_count(device), ws):

            def way(plan: Plan = plan) -> Any:
                return self._with_plan(run, plan)

            if not timing.all_agree(time.monotonic() - began <= limit, group, device):
                break
            way()  # compiles
            ways[f"fused {plan.label()}"] = (plan, way)
        timed = {name: way for name, (_, way) in ways.items()}
        alone = GemmAlone()
        if timing.all_agree(op != "all_gather_gemm" or alone.prepare(x, group), group, device):
            timed["gemm"] = lambda: run(alone)
        ms = {name: statistics.median(t) for name, t in timing.interleaved(timed, group, device).items()}
        gemm_ms = ms.pop("gemm", None)
        close = finalists(ms)
        lasting: dict[str, float] = {}
        if len(close) > 1 and timing.all_agree(time.monotonic() - began <= 2 * limit, group, device):
            lasting = timing.sustained({name: timed[name] for name in close}, ms, group, device)
        elif len(close) > 1 and group.rank() == 0:
            logger.warning("megatron_flux: %s m=%d n=%d k=%d is tuned by bursts only, time was up", op, m, n, k)
        best = ranked(lasting or ms)[0]
        chosen = ways[best][0]
        return {
            "backend": best if chosen is None else "fused",
            "plan": None if chosen is None else asdict(chosen),
            "ms": {name: round(value, 4) for name, value in ms.items()},
            "sustained_ms": {name: round(value, 4) for name, value in lasting.items()},
            **({} if gemm_ms is None else {"gemm_ms": round(gemm_ms, 4)}),
        }
