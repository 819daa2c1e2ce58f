"""Look up what depends on the kind of GPU alone: its compute capability and its peak, by the name the driver gives."""

from __future__ import annotations

import re
from typing import NamedTuple


class Gpu(NamedTuple):
    """One kind of GPU."""

    name: str
    capability: tuple[int, int]
    bf16_tflops: float


GPUS = (
    # Dense bf16 with fp32 accumulation, from NVIDIA's data sheets of these products (their figures "with sparsity" are
    # twice as high). A name without a form factor is that of the SXM module, where there is one.
    Gpu("GB200", (10, 0), 2500.0),
    Gpu("B200", (10, 0), 2250.0),
    Gpu("H200 NVL", (9, 0), 835.5),
    Gpu("H200", (9, 0), 989.4),
    Gpu("H100 PCIe", (9, 0), 756.0),
    Gpu("H100 NVL", (9, 0), 835.5),
    Gpu("H100", (9, 0), 989.4),
    Gpu("H800", (9, 0), 989.4),
    Gpu("H20", (9, 0), 148.0),
    Gpu("A100", (8, 0), 312.0),
    Gpu("A100 PCIe", (8, 0), 312.0),
    Gpu("A800", (8, 0), 312.0),
    Gpu("A800 PCIe", (8, 0), 312.0),
    Gpu("L40S", (8, 9), 362.05),
    Gpu("L20", (8, 9), 119.5),
)

# Words that tell neither the chip nor its form factor. Any other word (RTX, MIG, GRID, Active) makes another product.
_NO_MATTER = re.compile(r"NVIDIA|SXM\d|HBM\d\w*|\d+GB")


def named(name: str) -> Gpu | None:
    """Return the kind of GPU that the driver calls ``name``; None if it is not in the table."""
    words = {word for word in re.split(r"[^A-Z0-9]+", name.upper()) if word and not _NO_MATTER.fullmatch(word)}
    return next((gpu for gpu in GPUS if set(gpu.name.upper().split()) == words), None)


def device_peak(device_name: str, device: str, precision: str, fp8: str | None = None) -> tuple[float | None, str]:
    """Return the dense peak (TFLOP/s) of a device (``cuda`` or ``cpu``) and its source; None and the reason if unknown.

    Where layers run in FP8 (a recipe) it is twice that of bf16, as in these data sheets; not all of a step is FP8.
    """
    if device != "cuda":
        return None, "no MFU: the peak of processors is not in the table"
    if precision != "bf16":
        return None, f"no MFU: the table of peaks is for bf16, this run is {precision}"
    if (gpu := named(device_name)) is None:
        return None, f"no MFU: the peak of {device_name!r} is not in the table (megatron_flux/gpus.py)"
    of, times = ("bf16", 1) if fp8 is None else ("FP8", 2)
    return times * gpu.bf16_tflops, f"NVIDIA's data sheet of the {gpu.name}, {of} without sparsity"
