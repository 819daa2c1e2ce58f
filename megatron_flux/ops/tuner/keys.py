"""Keys of the tuner's file: everything that the speed of a plan depends on, in words.

    operator, sizes, dtype, weight form, group size, link | GPU | versions | settings

``flux`` is the release and a hash of the code that runs a call, so an update that leaves this code alone keeps plans.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_flux.comm import links
from megatron_flux.kernels.wire_format import EXACT
from megatron_flux.ops.call import OperatorCall
from megatron_flux.version import __version__

LONG_M = 512
"""Rows up to which a gemm_all_reduce is bound by memory and latency, not by power: bursts are enough."""

_PACKAGE = Path(__file__).parents[2]


def operator_of(call: OperatorCall) -> str:
    """Return the operator: an all-reduce that may hide behind wgrad is another one than one that is waited for."""
    beside = call.operator == "gemm_all_reduce" and call.async_op
    return f"{call.operator} beside wgrad" if beside else call.operator


def words_of(call: OperatorCall) -> str:
    """Return the call for people."""
    return f"{operator_of(call)} m={call.m} n={call.n} k={call.k}"


def by_chunks(x: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Return True if what crosses the group's link goes by chunks. Collective on a group's first call."""
    return x.is_cuda and links.by_chunks(links.probe(group, x.device))


def key_of(call: OperatorCall, *, captured: bool) -> str:
    """Return the key of ``call``; ``captured``: as inside a CUDA graph. Collective on a group's first call."""
    numbers = str(call.x.dtype)[6:] if call.fp8 is None else call.fp8.kind.words()
    sizes = call.m, call.n, call.k
    return describe(
        operator_of(call), *sizes, numbers, call.transposed, call.group, call.wire, call.x.device, captured=captured
    )


def describe(
    operator: str, m: int, n: int, k: int, numbers: str, transposed: bool, group: dist.ProcessGroup, wire: str,
    device: torch.device, *, captured: bool,
) -> str:  # fmt: skip
    """Return the key of a call on operands of ``numbers``, a dtype or a kind of FP8, in words."""
    link = links.probe(group, device)
    transfers = links.name(link)
    if wire != EXACT and links.by_chunks(link):
        transfers += f" wire={wire}"
    form, mode = "[k,n]" if transposed else "[n,k]", " in graphs" if captured else ""
    # Parts of the environment that change which candidate is the fastest.
    nvls, queues = (os.environ.get(name, "-") for name in ("NCCL_NVLS_ENABLE", "CUDA_DEVICE_MAX_CONNECTIONS"))
    return (
        f"{operator} m={m} n={n} k={k} {numbers} {form} tp={group.size()} {transfers}{mode} | {_machine(device)} | "
        f"nvls={nvls} connections={queues}{' together' if links.starts_together(group, captured=captured) else ''}"
    )


@functools.cache
def _machine(device: torch.device) -> str:
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else device.type
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda else "none"
    triton = "none"
    for package in ("pytorch-triton", "triton"):  # the former beside torch's nightly builds
        with contextlib.suppress(metadata.PackageNotFoundError):
            triton = metadata.version(package)
    release = __version__.partition("+")[0].partition(".dev")[0]
    flux = f"{release} {_hash_of_sources(_PACKAGE)}"
    return f"{name} | flux {flux} torch {torch.__version__} triton {triton} nccl {nccl}"


def _hash_of_sources(package: Path) -> str:
    files = [path for room in ("kernels", "ops", "comm") for path in (package / room).rglob("*.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()[:8]
