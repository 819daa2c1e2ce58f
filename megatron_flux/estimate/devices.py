"""What GPUs can do, for predictions where nothing was measured. Every figure has its public source here.

Figures of the hardware (memory, its bandwidth, links; peaks are those of :mod:`megatron_flux.train.presets`):

* NVIDIA's data sheets: H200 (141 GB, 4.8 TB/s), H100 SXM (80 GB, 3.35 TB/s), A100 80 GB SXM (2039 GB/s) and PCIe
  (1935 GB/s), L20 (48 GB, 864 GB/s). NVLink 4 is 900 and NVLink 3 is 600 GB/s per GPU, PCIe 4.0 x16 is 64 GB/s, each
  counted in both directions: half of it here.
* Networks of usual nodes of eight GPUs: DGX H100 and H200, one 400 Gb/s adapter per GPU; DGX A100, one 200 Gb/s adapter
  per GPU; A100 PCIe, two 100 Gb/s adapters per node, the cluster of FLUX's paper (arXiv 2406.06858, section 5); L20:
  taken to be the same.

Shares of the hardware's figures that software reaches:

* ``gemm`` and ``nccl``: the H200's were measured by this project (results/ops-h200x4-nvlink: median rate of 48 cuBLAS
  calls, least squares through their NCCL times) and are taken for the H100 SXM as well. A100 SXM: cuBLAS and NCCL on
  A800 (2.438 ms for 4096 x 6144 x 12288, 0.662 ms for 88 MB at 200 GB/s); L20 likewise (5.746 and 5.392 ms, 11.2 and
  12.273 ms): bytedance/flux, docs/performance_report.md. A100 PCIe: GEMM as A100 SXM, which is high for its power
  limit, NCCL as L20, which has the same link.
* ``attention``: FlashAttention-2 reaches 50 to 73 % on A100 (arXiv 2307.08691) and 35 % on H100 (arXiv 2407.08608).
* ``memory``: 0.8, a usual share for kernels that stream; assumed.
* ``network``: 86 of 100 GB/s, a two-node all-reduce in NVIDIA/nccl-tests issue 175.
* ``overlap``: FLUX's overlap efficiency, 1 where all communication hides behind its GEMM. H200: this project's median
  of 32 calls, with plans chosen at the power limit (results/ops-h200x4-sustained). Others: means that FLUX's paper
  gives for its own kernels (A100 PCIe 40 %, A100 NVLink 63 %, H800 72 %); this project's kernels have not been measured
  there. L20: taken as A100 PCIe.
* ``step_us``: latency of one step of a ring, from the same least squares; taken for all.
* ``nccl_sms``: SMs that NCCL's ring takes, from the traces in results/layer-h200x4-nvlink; taken for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_flux.errors import UserError
from megatron_flux.train.presets import device_peak


@dataclass(frozen=True)
class Device:
    """One kind of GPU in its usual node. GB are 1e9 bytes; bandwidths are of one direction of one GPU."""

    key: str
    name: str
    """Part of what CUDA calls it."""
    memory_gb: float
    memory_gb_per_s: float
    sms: int
    capability: tuple[int, int]
    link: Literal["nvlink", "p2p"]
    """Between the GPUs of a node, as in :mod:`megatron_flux.comm.links`."""
    link_gb_per_s: float
    network_gb_per_s: float
    """Between nodes, the GPU's share of the adapters."""
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
        tflops, why = device_peak(self.name, "cuda", "bf16")
        if tflops is None:
            raise ValueError(why)
        return tflops * 1e12


DEVICES: dict[str, Device] = {
    device.key: device
    for device in (
        #      key          name              memory       SMs  capab.  link            netw. gemm  nccl  overl.attn.
        Device("h200",      "H200",           141, 4800,   132, (9, 0), "nvlink", 450,    50, 0.70, 0.65, 0.92, 0.35),
        Device("h100-sxm",  "H100",            80, 3350,   132, (9, 0), "nvlink", 450,    50, 0.70, 0.65, 0.72, 0.35),
        Device("a100-sxm",  "A100",            80, 2039,   108, (8, 0), "nvlink", 300,    25, 0.81, 0.67, 0.63, 0.50),
        Device("a100-pcie", "A100 80GB PCIe",  80, 1935,   108, (8, 0), "p2p",     32, 3.125, 0.81, 0.24, 0.40, 0.50),
        Device("l20",       "L20",             48,  864,    92, (8, 9), "p2p",     32, 3.125, 0.93, 0.24, 0.40, 0.50),
    )
}  # fmt: skip

LOW_OVERLAP = 0.40
"""The lower of two overlap efficiencies that the sensitivity to the link is shown with: the lowest mean that FLUX's
paper gives for its kernels (A100 PCIe)."""


def device(key: str) -> Device:
    """The device of this key.

    Raises:
        UserError: there is none.
    """
    if key not in DEVICES:
        raise UserError(f"unknown device {key!r}; use one of: {', '.join(DEVICES)}")
    return DEVICES[key]


def device_named(name: str) -> Device | None:
    """The device that CUDA calls ``name``; None where it is not in the table."""
    # An H100 PCIe is no H100 SXM; cards are in the table under names that say so.
    found = [d for d in DEVICES.values() if d.name in name and ("PCIe" not in name or "PCIe" in d.name)]
    return max(found, key=lambda device: len(device.name), default=None)
