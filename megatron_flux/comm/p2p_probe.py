"""Which schedule a group's link through peers' memory has: where its GPUs are, and a short measurement that is kept.

Two islands of GPUs (two NUMA nodes, or else two PCIe root complexes, as many of the group's GPUs at each) may go by
either schedule of :mod:`~megatron_flux.comm.p2p_schedule`: the faster is taken. Everything else goes flat. What was
measured lies in the cache folder, one JSON file for each group of GPUs, in the order of ranks, and driver. Collective;
the first rank alone reads and writes, and all have its answer.
"""

from __future__ import annotations

import json
import logging
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux import nvml
from megatron_flux.comm import link_speed
from megatron_flux.comm.agreement import first_rank, together
from megatron_flux.comm.host_ring import MIB
from megatron_flux.comm.p2p_link import P2PLink
from megatron_flux.comm.p2p_schedule import Islands
from megatron_flux.files import write_atomically
from megatron_flux.settings import cache_folder

logger = logging.getLogger("megatron_flux")

BYTES = 32 * MIB
"""That a rank receives in each measurement."""


def made(group: dist.ProcessGroup, device: torch.device, *, one_queue: bool | None = None) -> P2PLink:
    """The link of ``group`` with its schedule; raises as :class:`~megatron_flux.comm.p2p_link.P2PLink`."""
    link = P2PLink(group, device, one_queue=one_queue)
    found = probe(group, device, link)
    link.use(_islands(found))
    return link


def probe(group: dist.ProcessGroup, device: torch.device, link: P2PLink) -> dict[str, Any]:
    """``gpus`` (see :func:`place`, with ``uuid`` and ``driver``), ``islands`` of ranks (None: there are not two),
    ``schedule`` (``flat`` or ``islands``) and ``gb_per_s`` that a rank receives, by schedule, in a ``gather`` and in an
    ``exchange``; empty where there was no memory to measure in. ``link`` is used for it.
    """
    gpus = together(group, "where the GPUs are", lambda: _here(device))
    two = islands(gpus)
    path = cache_folder() / f"link-{zlib.crc32(json.dumps(gpus).encode()):08x}.json"
    kept = first_rank(group, "kept speeds", lambda: _kept(path, gpus))
    if kept is not None:
        return kept
    speeds: dict[str, dict[str, float]] = {}
    buffers = link_speed.buffers(group, device, BYTES)
    if buffers is not None:
        for name, way in {"flat": None, **({"islands": two} if two else {})}.items():
            link.use(way)
            speeds[name] = link_speed.received(link, group, device, buffers)
    best = min(speeds, key=lambda name: sum(1 / speed for speed in speeds[name].values())) if speeds else None
    schedule = best or ("islands" if two else "flat")
    found = {"gpus": gpus, "islands": two and [list(ranks) for ranks in two], "schedule": schedule, "gb_per_s": speeds}
    if speeds:
        first_rank(group, "keeping speeds", lambda: _keep(path, found))
    return found


def place(bus: str | None, root: Path = Path("/sys/bus/pci/devices")) -> dict[str, Any]:
    """``bus``, the ``numa_node`` beside it and the PCIe ``root_complex`` above it, from sysfs; None: not known."""
    node = above = None
    if bus is not None:
        try:
            number = int((root / bus / "numa_node").read_text())
            node = number if number >= 0 else None  # -1: the firmware does not say
        except (OSError, ValueError):
            pass
        above = next(iter(re.findall(r"/(pci[0-9a-f]+:[0-9a-f]+)/", str((root / bus).resolve()))), None)
    return {"bus": bus, "numa_node": node, "root_complex": above}


def islands(gpus: Sequence[dict[str, Any]]) -> Islands | None:
    """The two islands of ranks, whose ``gpus`` are given by rank; None where there are not two of the same size, or of
    one GPU each.
    """
    for what in ("numa_node", "root_complex"):
        at: dict[Any, list[int]] = {}
        for rank, gpu in enumerate(gpus):
            at.setdefault(gpu[what], []).append(rank)
        if None not in at and len(at) == 2:
            one, other = map(tuple, at.values())
            if len(one) == len(other) > 1:
                return one, other
    return None


def _here(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {**place(None), "uuid": None, "driver": None}
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return {**place(nvml.pci_address(device)), "uuid": uuid, "driver": nvml.source()}


def _islands(found: dict[str, Any]) -> Islands | None:
    if found["schedule"] == "flat":
        return None
    one, other = found["islands"]
    return tuple(one), tuple(other)


def _kept(path: Path, gpus: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What the file says of these GPUs; None where it says nothing of use."""
    try:
        found = json.loads(path.read_text())
        if found["gpus"] == gpus and (found["schedule"] == "flat" or _islands(found) == islands(gpus)):
            return found
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        logger.warning("megatron_flux: %s cannot be used, and the link is measured anew: %s", path, error)
    return None


def _keep(path: Path, found: dict[str, Any]) -> None:
    """A reader sees the whole file or none. That it cannot be written is said."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(found, indent=1))
    except OSError as error:
        logger.warning("megatron_flux: what the link does cannot be kept, and is measured in every run: %s", error)
