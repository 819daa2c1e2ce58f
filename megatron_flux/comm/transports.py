"""Which transport a group has: through peers' memory where its GPUs have that access, through host memory where all its
ranks are on one host, else send and receive.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_flux.comm import links, p2p_probe
from megatron_flux.comm.group_state import all_states, state_of
from megatron_flux.comm.host_link import HostLink
from megatron_flux.comm.send_recv import SendRecv
from megatron_flux.comm.transport import Transport
from megatron_flux.errors import UserError

logger = logging.getLogger("megatron_flux")


def transport_of(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """The transport between the ranks of ``group``; collective on first use. Where there is no memory for it, it is the
    next slower one, and a warning says what is needed. Raises UserError: the same, where flux is strict.
    """
    found = state_of(group).transports
    if device not in found:
        found[device] = _made(group, device)
    return found[device]


def _made(group: dist.ProcessGroup, device: torch.device) -> Transport:
    ways: dict[str, list[Callable[..., Transport]]] = {"none": [], "host": [HostLink]}
    for make in ways.get(links.probe(group, device).kind, [p2p_probe.made, HostLink]):
        try:
            return make(group, device)
        except UserError as error:
            if links.wanted().strict:
                raise
            if group.rank() == 0:
                logger.warning("megatron_flux: chunks go another way, which is slower: %s", error)
    return SendRecv(group)


def renew(group: dist.ProcessGroup) -> None:
    """Have the next call make a new transport: the way on after a call has raised on every rank of ``group``."""
    state_of(group).transports.clear()
    state_of(group).forget_calls()


def shared_bytes() -> int:
    """Bytes of shared host memory that this rank holds, of all groups."""
    made = [transport for state in all_states() for transport in state.transports.values()]
    return sum(transport.shared_bytes for transport in made if isinstance(transport, HostLink))
