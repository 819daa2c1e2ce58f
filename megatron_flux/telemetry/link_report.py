"""``doctor --links``: where the GPUs are, and how fast the links between them. The ranks' work, and its table.

Its result is shown; nothing is decided by it but the schedule of :mod:`~megatron_flux.comm.p2p_probe`, which is kept. A
rank that dies ends it; one that does not answer ends it after :data:`LIMIT_S` seconds, or ``MEGATRON_FLUX_TIMEOUT_S``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux import nvml, settings
from megatron_flux.comm import link_speed, links, p2p_probe
from megatron_flux.comm.agreement import first_rank
from megatron_flux.comm.p2p_link import P2PLink
from megatron_flux.errors import FluxError, OperatorError, UserError, one_line

LIMIT_S = 30.0


def work(argument: str) -> None:
    """One rank for each GPU, or some without GPUs: measure; the first writes JSON to the file ``argument``.

    Raises:
        FluxError: another rank did not answer, or CUDA failed.
    """
    began, limit = time.monotonic(), settings.timeout_s() or LIMIT_S
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=limit))
        group = dist.group.WORLD
        found: dict[str, Any] = {"device": device.type, "ranks": group.size(), "gpus": [], "pairs": []}
        if device.type == "cuda":
            found["gpus"] = [
                p2p_probe.place(nvml.pci_address(torch.device("cuda", gpu))) for gpu in range(group.size())
            ]
            found |= first_rank(group, "speeds of pairs", lambda: link_speed.pairs(group.size()))
            found["peers"] = _through_peers(group, device)
        found["host"] = link_speed.through_host(group, device)
        dist.barrier()
    except (OperatorError, RuntimeError) as error:  # a transport's, torch.distributed's and CUDA's
        raise FluxError(f"the links could not be measured (limit {limit:g} s): {one_line(error)}") from error
    found["seconds"] = time.monotonic() - began
    if group.rank() == 0:
        Path(argument).write_text(json.dumps(found))
    dist.destroy_process_group()


def _through_peers(group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """What :func:`~megatron_flux.comm.p2p_probe.probe` has found, or ``why_not``. Collective."""
    try:
        link = links.probe(group, device)
        if link.kind not in ("p2p", "nvlink"):
            return {"why_not": f"the link is {link.kind}: {link.reason}"}
        return p2p_probe.probe(group, device, P2PLink(group, device))
    except UserError as error:  # on all ranks, or on none
        return {"why_not": str(error)}


def lines(found: dict[str, Any]) -> list[str]:
    """What :func:`work` found, for people."""
    who, gpus = "GPU" if found["gpus"] else "process", found["gpus"]
    said = [f"{found['ranks']} {'GPUs' if gpus else 'processes'}, speeds in GB/s, measured in {found['seconds']:.1f} s"]
    for gpu, at in enumerate(gpus):
        node = "not known" if at["numa_node"] is None else at["numa_node"]
        said.append(
            f"GPU {gpu}: {at['bus'] or 'bus not known'}, NUMA node {node}, {at['root_complex'] or 'root not known'}"
        )
    for pair in found["pairs"]:
        speeds = "" if pair["push"] is None else f"  push {pair['push']:.1f}  pull {pair['pull']:.1f}"
        said.append(f"GPU {pair['from']} to GPU {pair['to']}: {pair['kind']}{speeds}")
    if "all_at_once" in found:
        said += [f"all GPUs at once, {name}: {_each(found['all_at_once'][name])}" for name in ("push", "pull")]
    said += _peers(found["peers"]) if "peers" in found else []
    host = found["host"]
    if "why_not" in host:
        return [*said, f"through host memory: not measured: {host['why_not']}"]
    slots = f"slots of {host['slot_bytes'] // 2**20} MiB"
    for name, words in (("down", f"{who} to host memory"), ("up", f"host memory to {who}")):
        said.append(f"{words} ({slots}): alone {_each(host[name])}, all at once {_each(host[f'{name}_at_once'])}")
    said.append(
        f"through host memory, received by each {who}: gather {host['gather']:.1f}, exchange {host['exchange']:.1f}"
    )
    return said


def _peers(found: dict[str, Any]) -> list[str]:
    if "why_not" in found:
        return [f"through peers' memory: not measured: {found['why_not']}"]
    two = " and ".join(", ".join(map(str, ranks)) for ranks in found["islands"] or ())
    said = [f"through peers' memory: schedule {found['schedule']}, {f'islands {two}' if two else 'no two islands'}"]
    for name, speeds in found["gb_per_s"].items():
        each = f"gather {speeds['gather']:.1f}, exchange {speeds['exchange']:.1f}"
        said.append(f"through peers' memory, received by each GPU, {name}: {each}")
    return said


def _each(speeds: Sequence[float | None]) -> str:
    return " ".join("-" if speed is None else f"{speed:.1f}" for speed in speeds)
