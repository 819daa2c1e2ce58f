"""The transport of a group's chunked backends: peers' memory where its GPUs have that access, else host memory.

Between hosts there is none, and stock's operators run: chunks by torch's send and receive were slower than stock
(results/send-recv-h100x2).
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from megatron_flux.comm import links
from megatron_flux.comm.group_state import all_states, state_of
from megatron_flux.comm.host_link import HostLink
from megatron_flux.comm.p2p_link import P2PLink
from megatron_flux.errors import UserError

logger = logging.getLogger("megatron_flux")


def transport_of(group: dist.ProcessGroup, device: torch.device) -> HostLink:
    """Return the transport between the ranks of ``group``; collective on first use. Without memory for peers' memory it
    is host memory, and a warning says what is needed. Raises UserError: there is none, or flux is strict.
    """
    transports = state_of(group).transports
    if device not in transports:
        try:
            transports[device] = _make(group, device)
        except UserError as error:  # on all ranks
            transports[device] = str(error)  # not the exception, whose traceback holds the group
    transport = transports[device]
    if isinstance(transport, str):
        raise UserError(transport)
    return transport


def why_none(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return why ``group`` has no transport, or None if it has one. Collective, and raises, as :func:`transport_of`."""
    try:
        transport_of(group, device)
    except UserError as error:
        if links.wanted.strict:
            raise
        return str(error)
    return None


def _make(group: dist.ProcessGroup, device: torch.device) -> HostLink:
    link = links.probe(group, device)
    if link.kind == "none" and (device.type == "cuda" or links.asked()):  # else a CPU, of which nothing was asked
        raise UserError(f"the ranks of the group share no memory for chunks: {link.reason}")
    if link.kind in ("p2p", "nvlink"):
        try:
            return P2PLink(group, device)
        except UserError as error:
            if links.wanted.strict:
                raise
            if group.rank() == 0:
                logger.warning("megatron_flux: chunks go through host memory, which is slower: %s", error)
    return HostLink(group, device)


def renew(group: dist.ProcessGroup) -> None:
    """Let the next call make a new transport, after a call has raised on every rank of ``group``."""
    state_of(group).transports.clear()
    state_of(group).forget_calls()


def shared_bytes() -> int:
    """Return the bytes of shared host memory that this rank holds, over all groups."""
    transports = [transport for state in all_states() for transport in state.transports.values()]
    return sum(transport.shared_bytes for transport in transports if isinstance(transport, HostLink))
