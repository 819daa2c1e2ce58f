"""Examine this machine and this Python: versions, devices, the links between them, and if flux can run."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import warnings
from importlib.metadata import PackageNotFoundError, version
from itertools import permutations
from pathlib import Path
from typing import Any

import torch

from megatron_flux import nvml, settings
from megatron_flux.comm import links
from megatron_flux.comm.links import Link
from megatron_flux.errors import FluxError
from megatron_flux.metrics.summary import without_gpu
from megatron_flux.ops import backend_names
from megatron_flux.patch import megatron_core, te_seam
from megatron_flux.patch.megatron_core import REPLACED, SUPPORTED_MEGATRON_CORE, SUPPORTED_TORCH, TE_REPLACED, shown
from megatron_flux.version import COMMIT, __version__

_PACKAGES = ("megatron-core", "torch", "triton", "transformer-engine", "wandb", "numpy")

_SWITCHES = (
    *("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE"),
    *("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "PYTORCH_CUDA_ALLOC_CONF"),
    *("TORCH_SYMM_MEM_DISABLE_MULTICAST", "UB_SKIPMC"),
)


def versions() -> dict[str, str | None]:
    """Return the versions of what decides results and speed; None if not installed. Imports none of them.

    ``apex`` is judged by its kernel module: the distribution of that name on PyPI is another project.
    """
    found: dict[str, str | None] = {"megatron-flux": __version__, "megatron-flux commit": COMMIT}
    found |= {"megatron-flux sources": source_hash(), "python": platform.python_version()}
    found |= {package: _installed(package) for package in _PACKAGES}
    found["triton"] = found["triton"] or _installed("pytorch-triton")  # its name beside torch's nightly builds
    found["apex wgrad kernel"] = "present" if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") else None
    gpus = torch.cuda.is_available()
    found["cuda"] = torch.version.cuda if gpus else None
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if gpus else None
    return found


@functools.cache
def source_hash(folder: Path = Path(__file__).parents[1]) -> str:
    """Hash the package's Python files: two checkouts of one version may differ."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device_name() -> str:
    """Return the first GPU's name, or the processor's. Makes no CUDA context if NVML can be asked."""
    if torch.cuda.is_available():
        return (nvml.names() or [torch.cuda.get_device_name()])[0]
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def link(asked: str | None = None) -> dict[str, Any]:
    """Return how the GPUs of this machine reach each other. Makes no CUDA context if NVML can be asked.

    ``kind`` is a link of :mod:`megatron_flux.comm.links`, ``none`` with fewer than two GPUs, or a weaker one where that
    is ``asked`` for, here or by ``MEGATRON_FLUX_LINK``; ``reason``: why it is not ``nvlink``; ``pairs`` and
    ``peer_access``: ordered pairs of GPUs, and those with peer access.
    """
    by = "MEGATRON_FLUX_LINK asks" if asked is None else "asked"
    asked = asked or settings.link()
    count = torch.cuda.device_count()
    if count < 2:
        kind = "host" if asked == "host" and count == 0 else "none"
        return {"kind": kind, "reason": f"{count} GPU(s)", "pairs": 0, "peer_access": 0}
    pairs = count * (count - 1)
    seen = nvml.pairs()
    if seen is not None and len(seen) == pairs:
        peers, without = sum(peer for peer, _ in seen), sum(not linked for _, linked in seen)
        found = Link("p2p", f"{without} of {pairs} pairs of GPUs without NVLink") if without else Link("nvlink", "")
    else:
        peers = sum(torch.cuda.can_device_access_peer(a, b) for a, b in permutations(range(count), 2))
        found = links.between(list(range(count)))
    if peers < pairs:
        found = Link("host", "not every pair of GPUs has peer access")
    if asked is not None and links.KINDS.index(asked) < links.KINDS.index(found.kind):
        found = Link(asked, f"{by} for it, there is {found.kind}")
    return {"kind": found.kind, "reason": found.reason, "pairs": pairs, "peer_access": peers}


_SLOW_LINKS = {
    "host": "some GPUs use no peer access ({}): their traffic goes through host memory; auto measures chunked against "
    "stock's collectives and GEMMs there",
    "p2p": "no NVLink between all GPUs ({}): auto runs stock's collectives and GEMMs, unless MEGATRON_FLUX_LINK=p2p "
    "has it measure chunked against them; fused kernels run there by name only (backend fused or tuned), have not been "
    "tried, and hang where the platform has no atomics between GPUs over PCIe",
}

_JOB = {
    "id": "SLURM_JOB_ID",
    "name": "SLURM_JOB_NAME",
    "cluster": "SLURM_CLUSTER_NAME",
    "partition": "SLURM_JOB_PARTITION",
    "array": "SLURM_ARRAY_JOB_ID",
    "array_task": "SLURM_ARRAY_TASK_ID",
    "restart": "SLURM_RESTART_COUNT",
}


def job() -> dict[str, str] | None:
    """Return the scheduler's job that this process is part of; None outside of one."""
    found = {name: os.environ[variable] for name, variable in _JOB.items() if variable in os.environ}
    return found if "id" in found else None


def switches() -> dict[str, str | None]:
    """Return the environment variables that affect communication and kernels; None if not set."""
    return {name: os.environ.get(name) for name in _SWITCHES}


def examine() -> dict[str, Any]:
    """Return what ``megatron-flux doctor`` prints: ``problems`` keep flux from running, ``notes`` do not."""
    installed, count, connected = versions(), torch.cuda.device_count(), link()
    problems: list[str] = []
    notes: list[str] = []
    would_patch: list[str] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # megatron-core's own, about packages that are reported here
            megatron_core.check_symbols()
        would_patch += REPLACED
        if megatron_core.te_classes():
            would_patch += TE_REPLACED
            te_seam.load()
    except FluxError as error:
        if not would_patch:
            problems.append(str(error))
        else:
            notes.append(f"TransformerEngine's layers would run stock: {error}")
    if count == 0:
        notes.append("no GPU: training runs on CPUs over gloo, in fp32: it shows the losses, and nothing of the speed")
        if hidden := nvml.names():
            notes.append(f"this torch does not see {len(hidden)} GPU(s): it was built without CUDA, or they are hidden")
    elif installed["transformer-engine"] is None:
        notes.append("no TransformerEngine: attention is Megatron's unfused one, with memory quadratic in the sequence")
    if count and connected["kind"] in _SLOW_LINKS:
        notes.append(_SLOW_LINKS[connected["kind"]].format(connected["reason"]))
    if installed["apex wgrad kernel"] is None and count:
        notes.append("no Apex kernel for gradient accumulation fusion: torch's addmm does the same")
    return {
        "versions": installed,
        "supported": {"torch": shown(SUPPORTED_TORCH), "megatron-core": shown(SUPPORTED_MEGATRON_CORE)},
        "devices": [torch.cuda.get_device_name(i) for i in range(count)] or [device_name()],
        "link": connected,
        "backends": backend_names(),
        "auto": _auto(count, connected["kind"]),
        "would_patch": [path.replace(":", ".") for path in would_patch],
        "problems": problems,
        "notes": notes,
        "ok": not problems,
    }


def _auto(gpus: int, kind: str) -> str:
    """Describe the backend ``auto`` here, with the reason if that is none of flux's own."""
    by_chunks = links.by_chunks(Link(kind, ""))
    if gpus == 0:
        return without_gpu(["tuned" if by_chunks else "reference"], kind)
    if gpus == 1:
        return "not used: tensor parallelism needs two GPUs"
    if by_chunks:
        return "tuned: chunked where it is measured to be faster than stock's collectives and GEMMs"
    return "tuned: fused kernels as measured" if kind == "nvlink" else f"reference: the link is {kind}"


def show(found: dict[str, Any]) -> None:
    """Print the result of :func:`examine`."""
    supported, names, connected = found["supported"], found["devices"], found["link"]
    peers, why = f"{connected['peer_access']} of {connected['pairs']}", connected["reason"]
    parts = {
        "versions": [
            f"{name} {value or 'not installed'}" + (f"  (supported {supported[name]})" if name in supported else "")
            for name, value in found["versions"].items()
        ],
        "devices": [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)],
        "link": [f"{connected['kind']}  ({peers} GPU pairs with peer access{f', {why}' if why else ''})"],
        "backends": [", ".join(found["backends"])],
        "would patch": found["would_patch"] or ["nothing"],
        "notes": found["notes"],
        "problems": found["problems"],
        "verdict": [f"flux can run here; auto is {found['auto']}" if found["ok"] else "flux cannot run here"],
    }
    for title, values in parts.items():
        for i, value in enumerate(values):
            print(f"{'' if i else title:<11} {value}")
