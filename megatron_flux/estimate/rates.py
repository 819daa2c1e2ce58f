"""Times of single GEMMs, collectives and fused calls: measured where they were, else from the device's figures.

======================  =======================================================================================
time                    formula
======================  =======================================================================================
GEMM                    2 m n k / rate; rate: of the most similar measured GEMM, or ``gemm`` x peak
collective              (tp - 1) x step + bytes received / (``nccl`` x link): a ring, arXiv 2104.04473, section 3.2
serial                  GEMM + collective: stock Megatron's exposed pairs
overlapped              max(GEMM, collective) + ``nccl_sms``/SMs x min(GEMM, collective): NCCL takes SMs meanwhile
fused                   max(GEMM + (1 - E) x collective, collective), at most serial (the tuner knows stock as well);
                        E is FLUX's overlap efficiency, arXiv 2406.06858, equation 2
disturbance             ``traffic`` x bytes received / memory bandwidth: what communication costs a whole layer even
                        where it is hidden, and no single call shows
small kernels           bytes / (``streamed`` x memory bandwidth), and ``gap_ms`` of idle time a layer
======================  =======================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_flux.bench.shapes import Case
from megatron_flux.estimate.devices import Device
from megatron_flux.estimate.measured import MeasuredCalls


@dataclass(frozen=True)
class Calibration:
    """What only whole layers show, none of it taken from a layer of flux. Defaults: of the four workloads in
    results/layer-h200x4-ahead/sustained and results/layer-h200x4-more, as computed by
    :func:`megatron_flux.estimate.validation.calibrate`; they are taken for all devices.
    """

    streamed: float = 0.41
    """Share of the memory's bandwidth that norms, activations, residuals and copies reach."""
    gap_ms: float = 0.29
    """The GPU's idle time in a layer's forward and backward."""
    traffic: float = 3.0
    """Bytes of memory bandwidth whose time a layer loses per byte that flux receives while it computes. Measured
    without flux: layers without communication, with and without the same bytes sent beside them by copy engine
    (:mod:`megatron_flux.bench.busy_floor`). Most of it is likely power: the clock falls by about as much."""


@dataclass(frozen=True)
class Pair:
    """A GEMM and its collective, milliseconds, and the bytes that a rank receives."""

    nbytes: int
    gemm: float
    collective: float
    serial: float
    fused: float


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Where times come from. What is None is as the calls or the device say."""

    device: Device
    calls: MeasuredCalls | None = None
    link_gb_per_s: float | None = None
    """Between the GPUs of a node, one direction."""
    network_gb_per_s: float | None = None
    """Between nodes, a GPU's share of the adapters, one direction."""
    overlap: float | None = None
    """FLUX's overlap efficiency."""
    host_ms_per_layer: float = 0.0
    """Host time to enqueue a layer's forward and backward."""
    calibration: Calibration = field(default_factory=Calibration)

    @property
    def link(self) -> float:
        """Peak of the link within a node, GB/s in one direction."""
        return self.link_gb_per_s or self.device.link_gb_per_s

    @property
    def reached(self) -> float:
        """GB/s that NCCL reaches per GPU within a node, for long messages."""
        if self.calls:
            return self.link / self.device.link_gb_per_s / self.calls.ms_per_byte / 1e6
        return self.device.nccl * self.link

    def gemm(self, m: int, n: int, k: int) -> float:
        """Milliseconds of ``[m, k] x [k, n]``."""
        flops = self.calls.flops(m, n, k) if self.calls else self.device.gemm * self.device.peak_flops
        return max(2e3 * m * n * k / flops, self.memory(2 * (m * k + k * n + m * n)))

    def memory(self, nbytes: float) -> float:
        """Milliseconds to stream so many bytes through the GPU's memory."""
        return nbytes / (self.device.memory * self.device.memory_gb_per_s * 1e6)

    def collective(self, nbytes: float, ranks: int) -> float:
        """Milliseconds of an all-gather or reduce-scatter within a node; ``nbytes`` is what a rank receives."""
        if ranks == 1:
            return 0.0
        if self.calls:
            per_byte = self.calls.ms_per_byte * self.device.link_gb_per_s / self.link
            return (ranks - 1) * self.calls.step_ms + nbytes * per_byte
        return (ranks - 1) * self.device.step_us / 1e3 + nbytes / (self.device.nccl * self.link * 1e6)

    def streamed(self, nbytes: float) -> float:
        """Milliseconds of a layer's small kernels that read and write so many bytes."""
        return nbytes / (self.calibration.streamed * self.device.memory_gb_per_s * 1e6)

    def disturbance(self, nbytes: float) -> float:
        """Milliseconds that receiving so many bytes behind GEMMs costs."""
        return self.calibration.traffic * nbytes / (self.device.memory_gb_per_s * 1e6)

    def network(self, nbytes: float, adapters: int = 1) -> float:
        """Milliseconds to send so many bytes to another node over the shares of so many GPUs in its adapters."""
        gb_per_s = (self.network_gb_per_s or self.device.network_gb_per_s) * adapters
        return nbytes / (self.device.network * gb_per_s * 1e6)

    def within_node(self, nbytes: float) -> float:
        """Milliseconds to send so many bytes to another GPU of the node."""
        return nbytes / (self.device.nccl * self.link * 1e6)

    def overlapped(self, gemm: float, collective: float) -> float:
        """Milliseconds of a GEMM with an NCCL kernel beside it."""
        return max(gemm, collective) + self.device.nccl_sms / self.device.sms * min(gemm, collective)

    def pair(self, case: Case, tp: int) -> Pair:
        """All times of one operator call. Measured times stand for themselves while link and overlap are the own."""
        nbytes = case.bytes_received(tp)
        call = self.calls.exact(case, tp) if self.calls else None
        if call and self.link_gb_per_s is None and self.overlap is None:
            return Pair(nbytes, call.gemm_ms, call.nccl_ms, call.serial_ms, min(call.tuned_ms, call.serial_ms))
        gemm = call.gemm_ms if call else self.gemm(case.m, case.n, case.k)
        collective = self.collective(nbytes, tp)
        overlap = self.overlap
        if overlap is None:
            overlap = self.calls.overlap(case) if self.calls else self.device.overlap
        fused = max(gemm + (1 - overlap) * collective, collective)
        return Pair(nbytes, gemm, collective, gemm + collective, min(fused, gemm + collective))
