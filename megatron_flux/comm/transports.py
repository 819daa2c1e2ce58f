"""Which transport the chunked backends of a group use: through peers' memory where its GPUs have that access, through
host memory where all its ranks are on one host, else send and receive.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_flux.comm import links
from megatron_flux.comm.group_state import all_states, state_of
from megatron_flux.comm.host_link import HostLink
from megatron_flux.comm.p2p_link import P2PLink
from megatron_flux.comm.send_recv import SendRecv
from megatron_flux.errors import UserError

logger = logging.getLogger("megatron_flux")


def transport_of(group: dist.ProcessGroup, device: torch.device) -> HostLink | SendRecv:
    """Return the transport between the ranks of ``group``; collective on first use. Without memory for it, it is the
    next slower one, and a warning says what is needed. Raises UserError instead where flux is strict.
    """
    transports = state_of(group).transports
    if device not in transports:
        transports[device] = _make(group, device)
    return transports[device]


def _make(group: dist.ProcessGroup, device: torch.device) -> HostLink | SendRecv:
    candidates: dict[str, list[Callable[..., HostLink]]] = {"none": [], "host": [HostLink]}
    for make in candidates.get(links.probe(group, device).kind, [P2PLink, HostLink]):
        try:
            return make(group, device)
        except UserError as error:
            if links.wanted().strict:
                raise
            if group.rank() == 0:
                logger.warning("megatron_flux: chunks go another way, which is slower: %s", error)
    return SendRecv(group)


def renew(group: dist.ProcessGroup) -> None:
    """Let the next call make a new transport, after a call has raised on every rank of ``group``."""
    state_of(group).transports.clear()
    state_of(group).forget_calls()


def shared_bytes() -> int:
    """Return the bytes of shared host memory that this rank holds, over all groups."""
    transports = [transport for state in all_states() for transport in state.transports.values()]
    return sum(transport.shared_bytes for transport in transports if isinstance(transport, HostLink))
