"""Topology of a group: how its ranks reach each other's memory, and which other groups' kernels run beside its own.

=========  ==================================================================================================
link       meaning
=========  ==================================================================================================
nvlink     one host, every pair of GPUs has peer access and an NVLink connection (directly or through NVSwitch)
p2p        one host, every pair has peer access, at least one pair without NVLink
host       one host, at least one pair without peer access: through host memory
none       anything else: several hosts, no GPU
=========  ==================================================================================================

A user may ask for a weaker one than there is (``MEGATRON_FLUX_LINK``, ``FluxConfig(link=...)``); stronger ones are not
used then. On CPUs ``host`` can be asked for, too: the same protocol over the same shared memory.

Why other groups matter: a fused kernel holds every SM and waits for its peers. A peer may first have to run a kernel of
another group, NCCL's, which waits for a rank whose SMs a fused kernel holds: both would wait without end. With one
hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) kernels start in the order in which they were enqueued, the same on
all ranks. Graphs' launches and streams of different priorities do not keep it. There, and with more queues, fused calls
start together (:func:`starts_together`).

torch.distributed does not tell whether the stream of the layers waits for a group's collectives, so all groups count
but those known to be waited for: the default group, and groups over the very ranks of tensor parallelism in
:data:`WAITED_FOR`. Groups made after the first question are not seen.
"""

from __future__ import annotations

import itertools
import os
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_flux import nvml, settings
from megatron_flux.comm.agreement import of_all_ranks, together
from megatron_flux.comm.group_state import Beside, Link, all_states, state_of
from megatron_flux.errors import UserError
from megatron_flux.log_once import log_once

KINDS = settings.LINKS
"""Kinds of links, from the weakest to the strongest."""


def probe(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Return the weakest link that any rank of ``group`` sees; collective on first use."""
    state = state_of(group)
    if state.link is None and device.type != "cuda":
        state.link = _weakened(Link("none", f"{device.type} tensors have no peer access"), group, device)
    elif state.link is None:
        seen_by_all = together(group, "which GPUs there are", lambda: _gpu(device))
        links = together(group, "what connects the GPUs", lambda: _link(group, device, seen_by_all))
        state.link = _weakened(min(links, key=lambda link: KINDS.index(link.kind)), group, device)
    return state.link


@dataclass(frozen=True)
class Wanted:
    """User-requested link, for all groups."""

    link: str | None = None
    """Strongest link to use; None leaves it to ``MEGATRON_FLUX_LINK``."""
    strict: bool = False
    """Raise where a link cannot be used, instead of using a slower one."""


wanted = Wanted()


def asked() -> str | None:
    """Return the strongest link that the user allows; None if nothing was asked for."""
    return wanted.link or settings.link()


def by_chunks(link: Link | None) -> bool:
    """Return True if flux chooses chunked backends over ``link``, not fused: ``host``, or ``p2p`` if asked for."""
    return link is not None and (link.kind == "host" or (link.kind == "p2p" and asked() == "p2p"))


def name(link: Link) -> str:
    """Return the cache-key prefix. Fused and chunked plans use different prefixes, so neither reads the other's."""
    return f"{link.kind} in chunks" if link.kind != "host" and by_chunks(link) else link.kind


def want(what: Wanted) -> None:
    """Set the request on all ranks; a change drops the plans of all groups."""
    global wanted
    if what == wanted:
        return
    wanted = what
    for state in all_states():
        state.link = None
        state.transports.clear()
        state.tuned.clear()
        state.chosen.clear()
        state.forget_plans()


def _weakened(there: Link, group: dist.ProcessGroup, device: torch.device) -> Link:
    """Return ``there``, or the weaker link that was asked for; collective. Raises UserError for a stronger one."""
    link = asked()
    if link is None or link == there.kind:
        return there
    if (
        device.type != "cuda"
        and link == "host"
        and len(set(of_all_ranks(socket.gethostname(), group, "the hosts"))) == 1
    ):
        return Link("host", "asked for")
    if KINDS.index(link) > KINDS.index(there.kind):
        raise UserError(
            f"link={link} (or MEGATRON_FLUX_LINK) asks for more than there is: this group's link is {there.kind}"
            f"{f' ({there.reason})' if there.reason else ''}; use one of: "
            f"{', '.join(KINDS[: KINDS.index(there.kind) + 1])}"
        )
    return Link(link, f"asked for, where there is {there.kind}")


def _gpu(device: torch.device) -> tuple[str, str]:
    return socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)


def _link(group: dist.ProcessGroup, device: torch.device, gpus: list[tuple[str, str]]) -> Link:
    """Return the link that this rank sees between the ``gpus`` of all ranks (:func:`_gpu`)."""
    index = torch.cuda.current_device() if device.index is None else device.index
    hosts, uuids = zip(*gpus, strict=True)
    if len(set(hosts)) > 1:
        return Link("none", "the group spans several hosts")
    if len(set(uuids)) < len(uuids):
        return Link("host", "two ranks share a GPU")
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    for uuid in uuids:
        if uuid not in visible:
            # One GPU visible per process: CUDA cannot be asked, symmetric memory still maps the peer's.
            return _unseen(list(uuids))
        if uuid != uuids[group.rank()] and not torch.cuda.can_device_access_peer(index, visible[uuid]):
            return Link("host", f"no peer access between GPU {index} and GPU {visible[uuid]}")
    return between([visible[uuid] for uuid in uuids])


def _unseen(uuids: list[str]) -> Link:
    """Return ``nvlink`` or ``p2p``, for GPUs of this machine that this process cannot all see."""
    linked = nvml.linked(uuids)
    if linked:
        return Link("nvlink", "")
    answer = "cannot tell" if linked is None else "finds no NVLink between some"
    return Link("p2p", f"peers' GPUs are not visible to this process (CUDA_VISIBLE_DEVICES), and NVML {answer}")


def between(devices: list[int]) -> Link:
    """Return ``nvlink`` or ``p2p``, for GPUs of this machine (by index) that all have peer access to each other."""
    try:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

        matrix = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix
    except (ImportError, RuntimeError) as error:
        return Link("p2p", f"NVLink could not be asked for: {error}")
    missing = ((a, b) for a, b in itertools.permutations(devices, 2) if not matrix[a][b])
    a, b = next(missing, (None, None))
    return Link("nvlink", "") if a is None else Link("p2p", f"no NVLink between GPU {a} and GPU {b}")


WAITED_FOR = frozenset({
    "MODEL_PARALLEL_GROUP", "TENSOR_MODEL_PARALLEL_GROUP", "TENSOR_AND_CONTEXT_PARALLEL_GROUP",
    "TENSOR_AND_DATA_PARALLEL_GROUP", "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", "EXPERT_TENSOR_PARALLEL_GROUP",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
})  # fmt: skip
"""``group_desc`` of groups whose collectives the compute stream waits for, where they span the same ranks."""


def beside(group: dist.ProcessGroup) -> Beside:
    """Return what runs beside ``group`` on any of its ranks; collective on first use."""
    state = state_of(group)
    if state.beside is None:
        by_rank = of_all_ranks(seen(group), group, "what runs beside the group")
        state.beside = Beside(*(any(column) for column in zip(*by_rank, strict=True)))
    return state.beside


def starts_together(group: dist.ProcessGroup, *, captured: bool) -> bool:
    """Return True if fused calls begin on all ranks together (:meth:`Slab.start`). Collective on first use."""
    there = state_of(group).beside or beside(group)
    if there.high_priority or (there.others and captured):
        return True
    needed = there.others and not settings.one_queue()
    if needed and dist.get_rank() == 0:
        log_once(
            "other process groups run beside tensor parallelism, so fused calls begin on all its ranks together, "
            "behind a small kernel each; set CUDA_DEVICE_MAX_CONNECTIONS=1 before CUDA starts to save that"
        )
    return needed


def seen(group: dist.ProcessGroup) -> Beside:
    """Return what this rank sees beside ``group``."""
    groups = [other for other in dist.distributed_c10d._world.pg_map if other.size() > 1 and _on_nccl(other)]
    mine = set(dist.get_process_group_ranks(group))
    others = group.size() < dist.get_world_size() or any(
        other is not group
        and other.group_desc != "default_pg"
        and not (other.group_desc in WAITED_FOR and set(dist.get_process_group_ranks(other)) == mine)
        for other in groups
    )
    every = os.environ.get("TORCH_NCCL_HIGH_PRIORITY", "").lower() in ("1", "t", "true", "y", "yes")
    return Beside(others, bool(groups) and (every or any(map(_has_high_priority, groups))))


def _on_nccl(group: dist.ProcessGroup) -> bool:
    return "nccl" in dist.distributed_c10d._world.pg_backend_config.get(group, "")


def _has_high_priority(group: dist.ProcessGroup) -> bool:
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # a group of another kind
        return False
    return bool(getattr(getattr(backend, "options", None), "is_high_priority_stream", False))
