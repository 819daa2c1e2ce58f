"""Times of GEMMs, collectives, fused calls and whole layers: measured where they were, else from the table of devices.

The formulae, and the public source of every figure in the table, are in slurm/PLAN.md.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_flux import gpus
from megatron_flux.bench.fp8 import of_title
from megatron_flux.bench.layer_config import LAYER_MODELS
from megatron_flux.bench.shapes import Case
from megatron_flux.errors import UserError
from megatron_flux.estimate import slow_links
from megatron_flux.estimate.fp8 import PRECISIONS, Precision
from megatron_flux.estimate.slow_links import PCIE, SLOW
from megatron_flux.kernels.wire_format import EXACT, FP8, INT8
from megatron_flux.train.fp8 import Recipe
from megatron_flux.train.presets import ModelShape


@dataclass(frozen=True)
class Device:
    """One kind of GPU in its usual node. GB are 1e9 bytes; bandwidths are of one direction of one GPU."""

    key: str
    name: str  # part of what CUDA calls it
    memory_gb: float
    memory_gb_per_s: float
    sms: int
    pcie: Literal[3, 4, 5]  # generation, of 16 lanes
    link: Literal["nvlink", "p2p"]  # between the GPUs of a node, as in megatron_flux.comm.links
    link_gb_per_s: float
    network_gb_per_s: float  # between nodes: the GPU's share of the adapters
    gemm: float
    nccl: float
    overlap: float
    attention: float
    memory: float = 0.8
    network: float = 0.86
    step_us: float = 7.3
    nccl_sms: int = 24

    @property
    def peak_flops(self) -> float:
        """Dense bf16 FLOP/s."""
        return self._kind.bf16_tflops * 1e12

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability."""
        return self._kind.capability

    @property
    def _kind(self) -> gpus.Gpu:
        if (kind := gpus.named(self.name)) is None:
            raise ValueError(f"{self.name} is not in the table of megatron_flux/gpus.py")
        return kind


DEVICES: dict[str, Device] = {
    device.key: device
    for device in (
        #      key          name              memory      SMs PCIe link            netw. gemm  nccl  overl.attn.
        Device("h200",      "H200",           141, 4800,  132, 5, "nvlink", 450,    50, 0.70, 0.65, 0.92, 0.35),
        Device("h100-sxm",  "H100",            80, 3350,  132, 5, "nvlink", 450,    50, 0.70, 0.65, 0.72, 0.35),
        Device("h100-nvl",  "H100 NVL",        94, 3938,  132, 5, "p2p",     64, 3.125, 0.70, 0.24, 0.40, 0.35),
        Device("h100-pcie", "H100 PCIe",       80, 2039,  114, 5, "p2p",     64, 3.125, 0.70, 0.24, 0.40, 0.35),
        Device("a100-sxm",  "A100",            80, 2039,  108, 4, "nvlink", 300,    25, 0.81, 0.67, 0.63, 0.50),
        Device("a100-pcie", "A100 80GB PCIe",  80, 1935,  108, 4, "p2p",     32, 3.125, 0.81, 0.24, 0.40, 0.50),
        Device("l40s",      "L40S",            48,  864,  142, 4, "p2p",     32, 3.125, 0.70, 0.24, 0.40, 0.50),
        Device("l20",       "L20",             48,  864,   92, 4, "p2p",     32, 3.125, 0.93, 0.24, 0.40, 0.50),
    )
}  # fmt: skip


def device_named(name: str) -> Device | None:
    """The device that CUDA calls ``name``; None where it is not in the table."""
    # An H100 PCIe is no H100 SXM, nor a GH200 an H200; cards are in the table under names that say so.
    card = next((kind for kind in ("PCIE", "NVL") if kind in name.upper()), "")
    found = [d for d in DEVICES.values() if re.search(rf"\b{d.name}\b", name) and card in d.name.upper()]
    return max(found, key=lambda device: len(device.name), default=None)


@dataclass(frozen=True)
class Calibration:
    """What only whole layers show, none of it taken from a layer of flux. Defaults: of the four workloads in
    results/layer-h200x4-ahead/sustained and results/layer-h200x4-more, as computed by
    :func:`megatron_flux.estimate.measured.calibrate`; they are taken for all devices.
    """

    streamed: float = 0.41  # share of the memory's bandwidth that norms, activations, residuals and copies reach
    gap_ms: float = 0.29  # the GPU's idle time in a layer's forward and backward
    traffic: float = 3.0
    """Bytes of memory bandwidth whose time a layer loses per byte that flux receives while it computes. Measured
    without flux: layers without communication, with and without the same bytes sent beside them by copy engine
    (:mod:`megatron_flux.bench.no_communication`). Most of it is likely power: the clock falls by about as much."""


@dataclass(frozen=True)
class Pair:
    """A GEMM and its collective, milliseconds, and the bytes that a rank receives."""

    nbytes: int
    gemm: float
    collective: float
    serial: float
    fused: float
    link: float  # that flux's own transfer takes by itself


@dataclass(frozen=True)
class Call:
    """One measured operator call, milliseconds."""

    case: Case
    tp: int
    gemm_ms: float
    nccl_ms: float
    serial_ms: float
    tuned_ms: float  # over the link host that of chunks, of numbers as they are
    wires: Mapping[str, float] = field(default_factory=dict)  # there, that of chunks by 8-bit wire

    @property
    def overlap(self) -> float:
        """FLUX's overlap efficiency of the tuned call (arXiv 2406.06858, equation 2)."""
        return 1 - (self.tuned_ms - self.gemm_ms) / (self.serial_ms - self.gemm_ms)


class MeasuredCalls:
    """The calls of one or more summaries of one kind of GPU, and what they say about calls that were not measured."""

    def __init__(
        self, calls: list[Call], device: Device, sources: list[str], link: str = "nvlink", gb_per_s: float = 0.0
    ) -> None:
        """``calls`` must have some in 16 bits; ``sources``: files, ``gb_per_s``: what flux's transfers reached."""
        self.calls, self.device, self.sources = calls, device, sources
        self.link, self.gb_per_s = link, gb_per_s
        self._plain = [call for call in calls if call.case.fp8 is None]
        # nccl_ms = steps * a + bytes * b with the least relative squares; a ring over tp ranks has tp - 1 steps.
        sides = np.array([[call.tp - 1, call.case.bytes_received(call.tp)] for call in self._plain], dtype=float)
        times = np.array([call.nccl_ms for call in self._plain])
        (step, per_byte), *_ = np.linalg.lstsq(sides / times[:, None], np.ones(len(times)), rcond=None)
        if min(step, per_byte) < 0 or not per_byte:  # sizes that do not tell latency from bandwidth
            step, per_byte = 0.0, times.sum() / sides[:, 1].sum()
        self.step_ms, self.ms_per_byte = float(step), float(per_byte)

    def exact(self, case: Case, tp: int) -> Call | None:
        """The very call, if it was measured; the model's name does not matter, nor where the scale of a tensor is from.
        The last one counts.
        """

        def kind(of: Case, ranks: int) -> tuple[Any, ...]:
            fp8 = "delayed" if of.fp8 == "current" else of.fp8
            return of.op, of.direction, of.m, of.n, of.k, fp8, ranks

        same = [c for c in self.calls if kind(c.case, c.tp) == kind(case, tp)]
        return same[-1] if same else None

    def nearest(self, m: int, n: int, k: int, op: str | None = None) -> Call:
        """The call in 16 bits (of ``op``, if one was measured) whose GEMM is most like this one, in powers of two."""
        like = [math.log2(size) for size in (m, n, k)]
        calls = [call for call in self._plain if op in (None, call.case.op)] or self._plain
        return min(calls, key=lambda call: math.dist(map(math.log2, (call.case.m, call.case.n, call.case.k)), like))


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Where times come from, all in milliseconds. What is None is as the calls or the device say."""

    device: Device
    calls: MeasuredCalls | None = None
    link_gb_per_s: float | None = None  # between the GPUs of a node, one direction
    network_gb_per_s: float | None = None  # between nodes, a GPU's share of the adapters, one direction
    overlap: float | None = None  # FLUX's overlap efficiency
    host_ms_per_layer: float = 0.0  # host time to enqueue a layer's forward and backward
    kind: str | None = None  # of the link between the GPUs of a node: the device's, or a weaker one
    gpus: int = 8  # of a node, which share its host memory
    wire: str = EXACT  # that flux sends where the link is host
    grad_wire: str | None = None  # the same of gradients; None: as ``wire``
    keep_gathered: bool = False  # of flux: x is not gathered again for wgrad
    fp8: Recipe | None = None  # of the layers' linears
    clock: float = 1.0  # times that GEMMs are faster than at the power limit
    calibration: Calibration = Calibration()

    @property
    def link(self) -> float:
        """Peak of the link within a node, GB/s in one direction."""
        return self.link_gb_per_s or self._own_link

    @property
    def _own_link(self) -> float:
        return self.device.link_gb_per_s if self._is_own else PCIE[self.device.pcie]

    @property
    def _is_own(self) -> bool:
        return self.kind in (None, self.device.link)

    @property
    def reached(self) -> float:
        """GB/s that NCCL reaches per GPU of a tensor-parallel group, for long messages."""
        calls = self._over_this_link
        return self.link / self._own_link / calls.ms_per_byte / 1e6 if calls else self.nccl

    @property
    def _over_this_link(self) -> MeasuredCalls | None:
        """The calls, where they say what its collectives take: of a group that spans nodes, others do not."""
        return self.calls if self.calls and self.calls.link == (self.kind or self.device.link) else None

    @property
    def nccl(self) -> float:
        """The same, from the table."""
        if self._is_own:
            return self.device.nccl * self.link
        return slow_links.nccl(str(self.kind), self.link, self.gpus)

    @property
    def chunks(self) -> float | None:
        """GB/s that flux's own transfers reach where the link is host; None on others."""
        if self.kind != "host":
            return None
        if self.calls and self.calls.gb_per_s:
            return self.calls.gb_per_s * self.link / self._own_link
        return slow_links.chunks(self.link, self.gpus)

    @property
    def precision(self) -> Precision | None:
        """What FP8 changes; None in bf16."""
        return None if self.fp8 is None else PRECISIONS[self.fp8]

    def gathered_bytes(self, m: int, k: int, tp: int) -> int:
        """What a rank receives of ``[m, k]`` of which every rank has its rows."""
        return Case("all_gather_gemm", "", "", "", m, 0, k, self.fp8).bytes_received(tp)

    def quantising(self, numbers: float) -> float:
        """To quantise so many numbers, or to transpose them."""
        return 0.0 if self.precision is None else self.streamed(self.precision.quantising * numbers)

    def wgrad(self, m: int, n: int, k: int) -> float:
        """As :meth:`gemm`, in FP8 where the linears are."""
        return self.gemm(m, n, k, 1.0 if self.precision is None else self.precision.backward)

    def gemm(self, m: int, n: int, k: int, speed: float = 1.0) -> float:
        """``[m, k] x [k, n]``: at the FLOP/s of the most similar measured GEMM in 16 bits, times ``speed``, and no
        faster than the memory.
        """
        flops = self.clock * self.device.gemm * self.device.peak_flops
        if self.calls:
            like = self.calls.nearest(m, n, k)
            flops = 2e3 * like.case.m * like.case.n * like.case.k / like.gemm_ms
        return max(2e3 * m * n * k / flops / speed, self.memory(2 * (m * k + k * n + m * n)))

    def collective(self, nbytes: float, ranks: int) -> float:
        """A ring's all-gather or reduce-scatter in a node (arXiv 2104.04473, 3.2); a rank receives ``nbytes``."""
        if ranks == 1:
            return 0.0
        if calls := self._over_this_link:
            return (ranks - 1) * calls.step_ms + nbytes * calls.ms_per_byte * self._own_link / self.link
        return (ranks - 1) * self.device.step_us / 1e3 + self.within_node(nbytes)

    def memory(self, nbytes: float) -> float:
        """To stream so many bytes through the GPU's memory."""
        return nbytes / (self.device.memory * self.device.memory_gb_per_s * 1e6)

    def streamed(self, nbytes: float) -> float:
        """A layer's small kernels that read and write so many bytes."""
        return nbytes / (self.calibration.streamed * self.device.memory_gb_per_s * 1e6)

    def disturbance(self, nbytes: float) -> float:
        """What receiving so many bytes behind GEMMs costs a whole layer; no single call shows it. Of chunked calls
        :data:`~megatron_flux.estimate.slow_links.CHUNKED_GEMM` has it.
        """
        if self.chunks is not None:
            return 0.0
        return self.calibration.traffic * nbytes / (self.device.memory_gb_per_s * 1e6)

    def network(self, nbytes: float, adapters: int = 1) -> float:
        """To send so many bytes to another node over the shares of so many GPUs in its adapters."""
        gb_per_s = (self.network_gb_per_s or self.device.network_gb_per_s) * adapters
        return nbytes / (self.device.network * gb_per_s * 1e6)

    def within_node(self, nbytes: float) -> float:
        """To send so many bytes to another GPU of the node."""
        return nbytes / (self.nccl * 1e6)

    def overlapped(self, gemm: float, collective: float) -> float:
        """A GEMM with an NCCL kernel beside it, which takes SMs meanwhile."""
        if self.kind in SLOW:  # the collective is mostly the longer, and may be as long as it is
            return max(collective, gemm + self.device.nccl_sms / self.device.sms * collective)
        return max(gemm, collective) + self.device.nccl_sms / self.device.sms * min(gemm, collective)

    def transfer(self, nbytes: float, tp: int) -> float:
        """Flux's own transfer alone, in which a rank receives ``nbytes`` of bf16, as they are or fewer on the wire."""
        if self.chunks is None:
            return self.collective(nbytes, tp)
        return slow_links.on_wire(nbytes, self.wire) / (self.chunks * 1e6)

    def coding(self, numbers: float) -> float:
        """To bring so many numbers to 8 bits and back, where they travel so."""
        return 0.0 if self.wire == EXACT else 3 * numbers / (slow_links.CODED * self.device.memory_gb_per_s * 1e6)

    def host_ms(self, arm: str) -> float:
        """Host time to enqueue a layer of the arm ``baseline`` or ``flux``."""
        if arm != "flux" or self.chunks is None:
            return self.host_ms_per_layer
        wires = (self.wire, self.of_gradients.wire)
        return self.host_ms_per_layer * sum(slow_links.CHUNKED_HOST[wire] for wire in wires) / len(wires)

    @property
    def of_gradients(self) -> Rates:
        """The same where what is sent are gradients."""
        return self if self.grad_wire in (None, self.wire) else replace(self, wire=self.grad_wire, grad_wire=None)

    def pair(self, case: Case, tp: int) -> Pair:
        """All times of one operator call. Measured times stand for themselves while link and overlap are the own."""
        case = case if self.precision is None else replace(case, fp8=self.fp8)
        nbytes, overlap = case.bytes_received(tp), self.overlap
        link = self.transfer(nbytes, tp)
        call = self.calls.exact(case, tp) if self.calls else None
        own = call and (call.tuned_ms if self.wire == EXACT else call.wires.get(self.wire))
        if call and own and self.link_gb_per_s is None and overlap is None:
            return Pair(nbytes, call.gemm_ms, call.nccl_ms, call.serial_ms, min(own, call.serial_ms), link)
        speed, kernel = self._speeds(case)
        gemm = call.gemm_ms if call else self.gemm(case.m, case.n, case.k, speed)
        collective = self.collective(nbytes, tp)
        serial = gemm + collective
        if self.chunks is not None:
            block = nbytes / (tp - 1) if tp > 1 else 0.0  # of bf16, that a rank has of the gathered or scattered tensor
            adding = self.memory((tp + 1) * block) if case.op == "gemm_reduce_scatter" else 0.0
            fused = slow_links.chunked(case, tp, gemm, link, self.coding(nbytes / 2 + block / 2), adding)
            return Pair(nbytes, gemm, collective, serial, min(fused, serial), link)
        if overlap is None and self.calls:
            overlap = min(1.0, max(0.0, self.calls.nearest(case.m, case.n, case.k, case.op).overlap))
        fused = max(
            gemm / kernel + (1 - (self.device.overlap if overlap is None else overlap)) * collective, collective
        )
        return Pair(nbytes, gemm, collective, serial, min(fused, serial), link)

    def _speeds(self, case: Case) -> tuple[float, float]:
        """Of the call's GEMM over bf16, and of flux's kernel over that."""
        if self.precision is None:
            return 1.0, 1.0
        if case.direction == "forward":
            return self.precision.forward, self.precision.kernel_forward
        return self.precision.backward, self.precision.kernel_dgrad


def read_ops(paths: list[Path]) -> MeasuredCalls | None:
    """Read summaries of ``bench ops``; a :class:`UserError` for files of different GPUs, or without whole calls."""
    if not paths:
        return None
    calls, devices, rates, names = [], [], [], ("gemm_ms", "nccl_ms", "serial_ms", "tuned_ms")
    kinds: set[str] = set()
    for path in paths:
        summary, device = read_summary(path, "bench ops", ("op", "m", "n", "k", *names))
        through_host = summary["link"] == "host"  # where what the tuner has chosen may be an 8-bit wire
        devices.append(device)
        kinds.add(summary["link"])
        rates.append(summary.get("link_gb_per_s") or 0.0)
        for row in summary["rows"]:
            case = Case(*(row[name] for name in ("op", "model", "layer", "direction", "m", "n", "k")), row.get("fp8"))
            times = [row["chunked_ms" if through_host and name == "tuned_ms" else name] for name in names]
            wires = {wire: row[f"chunked_{wire}_ms"] for wire in (FP8, INT8) if row.get(f"chunked_{wire}_ms")}
            if all(isinstance(t, (int, float)) and t > 0 for t in times) and times[2] > times[0]:
                calls.append(Call(case, summary["tp"], wires=wires, **dict(zip(names, times, strict=True))))
    if len({found.key for found in devices}) > 1:
        raise UserError(f"--ops are of different GPUs: {', '.join(d.key for d in devices)}; give files of one kind")
    if len(kinds) > 1:
        raise UserError(f"--ops are over different links: {', '.join(sorted(kinds))}; give files of one")
    if not any(call.case.fp8 is None for call in calls):
        raise UserError(
            f"--ops {paths[0]} has no call in 16 bits with all of its times; measure with megatron-flux bench ops"
        )
    return MeasuredCalls(calls, devices[0], [str(path) for path in paths], kinds.pop(), min(rates))


def read_summary(path: Path, command: str, columns: tuple[str, ...]) -> tuple[dict[str, Any], Device]:
    """A summary, or a folder's, with these columns in every row, and its GPU; else a :class:`UserError`."""
    file = path / "summary.json" if path.is_dir() else path
    try:
        summary = json.loads(file.read_text())
        rows = summary["rows"]
        complete = bool(rows) and all(name in row for row in rows for name in columns) and int(summary["tp"]) > 1
        complete = complete and "link" in summary
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read as a summary.json of megatron-flux {command}: {error}") from None
    if not complete:
        raise UserError(f"{file} is no summary.json of megatron-flux {command}: rows need {', '.join(columns)}")
    if summary.get("stand_in"):
        raise UserError(
            f"{file} is of {summary['stand_in']} GPUs that stood in for {summary['tp']}: no measurement of that many; "
            "give a run on a whole group"
        )
    name = str(summary.get("device", ""))
    device = device_named(name)
    if device is None:
        raise UserError(f"{path} was measured on {name or 'an unnamed device'}, which is not in the table of devices")
    return summary, device


Workload = tuple[str, int, int]  # of bench layer: model, sequence, micro-batch

ARMS = {"te": "baseline", "local": "baseline", "flux_te": "flux", "flux_local": "flux", "floor": "floor"}
"""Arms of bench layer and what predicts them; of two, the first counts for more."""


@dataclass(frozen=True)
class MeasuredLayers:
    """The rows of one or more summaries of ``bench layer``, each workload's of one."""

    rows: list[dict[str, Any]]
    tp: int
    device: Device
    source: str
    link: str = "nvlink"

    def workloads(self, fp8: Recipe | None = None) -> dict[Workload, dict[str, dict[str, Any]]]:
        """The rows by workload and arm, in their order; of models that the table of models knows, in this recipe."""
        found: dict[Workload, dict[str, dict[str, Any]]] = {}
        for row in self.rows:
            if row["model"] in LAYER_MODELS and row.get("fp8") == fp8:
                found.setdefault((row["model"], row["seq"], row["micro_batch"]), {})[row["arm"]] = row
        return found

    def ms(
        self, arm: str, shape: ModelShape, *sizes: int, wire: str = EXACT, grad_wire: str | None = None,
        fp8: Recipe | None = None,
    ) -> float | None:  # fmt: skip
        """Milliseconds of forward and backward of :attr:`Job.sizes`, None where that was not measured; of flux with
        these wires (None: gradients' is the activations').
        """
        if arm == "flux" and grad_wire not in (None, wire):
            return None  # not told apart in the names of arms
        wanted, all_rows = (shape.layer, *sizes), self.workloads(fp8).items()
        rows = [arms for (name, *of), arms in all_rows if (LAYER_MODELS[name].layer, *of, self.tp) == wanted]
        suffix = f"_{wire}wire" if arm == "flux" and wire != EXACT else ""
        names = [name + suffix for name, predicted_by in ARMS.items() if predicted_by == arm]
        return next((float(arms[name]["ms_per_layer"]) for name in names for arms in rows if name in arms), None)


def read_layers(paths: list[Path]) -> MeasuredLayers | None:
    """Summaries of ``bench layer``: of one kind of GPU and one tp, each workload in one file only."""
    if not paths:
        return None
    rows, kinds, seen = [], {}, {}
    for path in paths:
        summary, found = read_summary(path, "bench layer", ("model", "seq", "micro_batch", "arm", "ms_per_layer"))
        kinds[found.key, summary["tp"], summary["link"]] = found
        of = ((row["model"], row["seq"], row["micro_batch"], row.get("fp8")) for row in summary["rows"])
        here = dict.fromkeys(of, path)
        for one in here.keys() & seen.keys():
            both = f"--layers {seen[one]} and {path} both have {one[0]} {one[1]} x {one[2]}{of_title(one[3])}"
            raise UserError(f"{both}, whose arms count within one run; leave one out")
        seen |= here
        rows += summary["rows"]
    if len(kinds) > 1:
        found_kinds = ", ".join(f"{key} with tp {tp} over {link}" for key, tp, link in kinds)
        raise UserError(f"--layers are of different GPUs, tp or links: {found_kinds}; give files of one kind")
    ((_, tp, link), device), *_ = kinds.items()
    return MeasuredLayers(rows, tp, device, ", ".join(map(str, paths)), link)
