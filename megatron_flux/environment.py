"""What this machine and this Python have: versions, devices and the links between them."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

_PACKAGES = ("megatron-core", "torch", "triton", "transformer-engine", "wandb", "numpy")


def versions() -> dict[str, str | None]:
    """Versions of what decides results and speed; None where it is not installed. Imports none of them.

    ``apex`` is judged by its kernel module: the distribution of that name on PyPI is another project.
    """
    from megatron_flux.version import __version__

    found: dict[str, str | None] = {"megatron-flux": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["apex wgrad kernel"] = "present" if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") else None
    found["cuda"] = torch.version.cuda if torch.cuda.is_available() else None
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    return found


def device_kind() -> str:
    """``cuda`` where torch sees a GPU, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name() -> str:
    """The GPU's name, or the processor's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def link() -> dict[str, Any]:
    """How the GPUs of this machine reach each other.

    Returns:
        ``kind``: ``none`` (fewer than two GPUs), ``nvlink`` (every pair), ``p2p`` (every pair has peer access, not all
        of it over NVLink or that is not known), or ``host`` (some pair goes through host memory); ``pairs``: GPU pairs
        in all, with peer access, and with NVLink (None where nvidia-smi cannot say).
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    peers = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    nvlinks = _nvlink_pairs(count)
    if not pairs:
        kind = "none"
    elif peers < len(pairs):
        kind = "host"
    else:
        kind = "nvlink" if nvlinks == len(pairs) else "p2p"
    return {"kind": kind, "pairs": {"all": len(pairs), "peer_access": peers, "nvlink": nvlinks}}


def _nvlink_pairs(count: int) -> int | None:
    """Ordered GPU pairs joined by NVLink, read from ``nvidia-smi topo -m``; None where that is not possible."""
    program = shutil.which("nvidia-smi")
    if program is None or count < 2:
        return None
    try:
        done = subprocess.run(  # noqa: S603 - a fixed argument list
            [program, "topo", "-m"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("GPU")]
    return sum(cell.startswith("NV") for row in rows for cell in row[1 : count + 1])
