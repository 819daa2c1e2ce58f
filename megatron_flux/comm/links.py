"""How the ranks of a group can reach each other's memory. One collective per group, remembered.

=========  ==================================================================================================
link       meaning
=========  ==================================================================================================
nvlink     one host, every pair of GPUs has peer access and an NVLink connection (directly or through NVSwitch)
p2p        one host, every pair has peer access, at least one pair without NVLink
none       anything else: several hosts, no peer access, no GPU
=========  ==================================================================================================
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_flux import nvml


@dataclass(frozen=True)
class Link:
    """What connects a group."""

    kind: str
    reason: str
    """Why it is not ``nvlink``; empty if it is."""

    @property
    def is_nvlink(self) -> bool:
        """Also where the kind has more words behind it."""
        return self.kind.split()[0] == "nvlink"


_links: dict[str, Link] = {}


def probe(group: dist.ProcessGroup, device: torch.device) -> Link:
    """The link of ``group``; collective on first use, so call it on all ranks at the same point."""
    link = _links.get(group.group_name)
    if link is None:
        link = _links[group.group_name] = _probe(group, device)
    return link


def forget() -> None:
    """Drop what was remembered (groups may be destroyed and made again under the same name)."""
    _links.clear()


def _probe(group: dist.ProcessGroup, device: torch.device) -> Link:
    if device.type != "cuda":
        return Link("none", f"{device.type} tensors have no peer access")
    index = device.index if device.index is not None else torch.cuda.current_device()
    mine = (socket.gethostname(), str(torch.cuda.get_device_properties(index).uuid), index)
    everyone: list[tuple[str, str, int]] = [mine] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    if len({host for host, _, _ in everyone}) > 1:
        return _agree(Link("none", "the group spans several hosts"), group)
    if len({uuid for _, uuid, _ in everyone}) < len(everyone):
        return _agree(Link("none", "two ranks share a GPU"), group)
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    for _, uuid, _ in everyone:
        if uuid not in visible:
            # One GPU visible per process: CUDA cannot be asked, symmetric memory still maps the peer's.
            return _agree(_unseen([uuid for _, uuid, _ in everyone]), group)
        if uuid != mine[1] and not torch.cuda.can_device_access_peer(index, visible[uuid]):
            return _agree(Link("none", f"no peer access between GPU {index} and GPU {visible[uuid]}"), group)
    return _agree(between([visible[uuid] for _, uuid, _ in everyone]), group)


def _unseen(uuids: list[str]) -> Link:
    """``nvlink`` or ``p2p``, for GPUs of this machine that this process cannot all see."""
    unseen = "peers' GPUs are not visible to this process (CUDA_VISIBLE_DEVICES)"
    linked = nvml.linked(uuids)
    if linked:
        return Link("nvlink", "")
    return Link("p2p", f"{unseen}, and NVML {'cannot tell' if linked is None else 'finds no NVLink between some'}")


def between(devices: list[int]) -> Link:
    """``nvlink`` or ``p2p``, for GPUs of this machine (by index) that all have peer access to each other."""
    try:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _detect_dma_connectivity

        matrix = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix
    except (ImportError, RuntimeError) as error:
        return Link("p2p", f"NVLink could not be asked for: {error}")
    for a in devices:
        for b in devices:
            if a != b and not matrix[a][b]:
                return Link("p2p", f"no NVLink between GPU {a} and GPU {b}")
    return Link("nvlink", "")


def _agree(link: Link, group: dist.ProcessGroup) -> Link:
    """The weakest link that any rank sees."""
    links = [link] * group.size()
    dist.all_gather_object(links, link, group=group)
    return min(links, key=lambda seen: ("none", "p2p", "nvlink").index(seen.kind))
