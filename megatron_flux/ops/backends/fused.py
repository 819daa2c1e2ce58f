"""The ``fused`` backend: one persistent kernel per operator over symmetric memory.

Hopper gets the warp-specialised kernels (:mod:`kernels.hopper.pieces`) wherever TMA can address the operands
and, for all_gather_gemm, 128 divides a rank's rows; everything else gets the plain Triton ones.

Contract: that of :mod:`megatron_flux.ops.backends.base`; all ranks of a group make the same calls in the same order. A
gathered input is a view of a slab: of an all_gather valid until the group's next all_gather, of an all_gather_gemm
until its next all_gather_gemm or gemm_reduce_scatter. Results are fresh tensors.

Determinism: both operators are bitwise reproducible (see the kernels).

Limits, said by :meth:`FusedBackend.why_not`: bf16 or fp16 on CUDA, one host with peer access, 2, 4 or 8 ranks. Anything
TMA cannot address (rows that are no multiple of 16 bytes, GPUs before Hopper) runs the plain kernels on pointers.

Hazard: both kernels want every SM at once and wait for peers. A kernel of another process group on another stream that
waits for *its* peers at the same time (NCCL of data parallelism) can hold SMs while it waits for a rank whose SMs are
held by this one: two groups then wait for each other. Where kernels of other groups can run beside this one's
(:mod:`megatron_flux.comm.beside`), the backend therefore asks for one of

* ``MEGATRON_FLUX_SM_MARGIN``: as many SMs as the other kernels take are left to them. It always helps;
* ``CUDA_DEVICE_MAX_CONNECTIONS=1``, which Megatron asks for with sequence parallelism: all kernels go through one
  hardware queue, in which all ranks enqueue them in the same order. That is not said of a graph's launch, nor of
  streams of different priorities: calls in graphs, and calls beside NCCL's streams of high priority, need the margin.

Hazard: flags are atomics on a peer's memory, of system scope. NVLink has them; over PCIe the platform may not, and then
a wait has no end. Elsewhere than on NVLink ``auto`` therefore leaves the backend alone (:meth:`FusedBackend.untested`).
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from megatron_flux.comm import links as topology
from megatron_flux.comm import slab
from megatron_flux.comm.beside import ALONE, Beside, beside
from megatron_flux.comm.pending import Pending
from megatron_flux.ops.alignment import aligned
from megatron_flux.ops.checks import agree
from megatron_flux.ops.cuda_graphs import capturing, capturing_on_gpu
from megatron_flux.ops.fast_path.replay import ReadyCall
from megatron_flux.ops.kernel_config import KernelConfig, ag_plan, rs_plan
from megatron_flux.settings import one_queue, sm_margin


class FusedBackend:
    """See the module. ``twin`` runs on CPU tensors in Triton's interpreter, for tests."""

    needs_cuda = True
    automatic = False
    """``auto`` does not choose it; the tuner does where it is the fastest."""

    def __init__(self, name: str = "fused", *, twin: bool = False) -> None:
        """Nothing is allocated or imported before the first call."""
        self.name = name
        self.twin = twin
        self.plan: KernelConfig | None = None
        """Overrides the choice of plan (the tuner and tests set it)."""

    def why_not(self, x: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup) -> str | None:
        """None, or the first limit these operands meet; collective on a group's first call."""
        if self.twin:
            return None if x.device.type == "cpu" else "the twin runs on CPU tensors"
        if x.device.type != "cuda":
            return f"it needs CUDA tensors, x is on {x.device.type}"
        if weight is not None and not weight.is_contiguous():
            return f"weight must be contiguous, its strides are {weight.stride()}"
        reason = limit(x.dtype, group.size(), _capability(x.device), beside=beside(group), captured=capturing_on_gpu())
        if reason is not None:
            return reason
        link = topology.probe(group, x.device)
        if link.kind == "none":
            return f"no peer access within the group: {link.reason}"
        return None

    def untested(self, x: torch.Tensor, group: dist.ProcessGroup) -> str | None:
        """Why ``auto`` leaves a group alone in which :meth:`why_not` finds no obstacle; None if it does not."""
        if self.twin:
            return None
        link = topology.probe(group, x.device)
        return None if link.is_nvlink else f"{link.reason}: {OFF_NVLINK}"

    def all_gather_gemm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        group: dist.ProcessGroup,
        *,
        transposed: bool,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~megatron_flux.ops.backends.base.Backend`."""
        from megatron_flux.ops.launch import plain as launch

        mp, k = x.shape
        n = weight.shape[1] if transposed else weight.shape[0]
        agree(
            group,
            ("all_gather_gemm", "m", mp * group.size(), "n", n, "k", k, "dtype", x.dtype, "transposed", transposed),
            x.device,
        )
        x, weight = aligned(x), aligned(weight)
        work, plan = self._gather_work(x, group, n, capturing(x))
        return launch.all_gather_gemm(x, weight, work, plan, transposed=transposed, bias=bias)

    def _gather_work(
        self, x: torch.Tensor, group: dist.ProcessGroup, n: int, captured: bool
    ) -> tuple[slab.Slab, KernelConfig]:
        """Slab and plan of an all_gather_gemm."""
        from megatron_flux.ops.launch import plain as launch

        mp, k = x.shape
        ws = launch.hopper_kernels(x, n, k) and mp % 128 == 0
        plan = self.plan or self._gather_plan(mp, n, k, group.size(), launch.sm_count(x.device), ws)
        plan = launch.within_flags(plan, mp * group.size())
        return self._gather_slab(x, group, plan, ws, captured), plan

    _gather_plan = staticmethod(ag_plan)

    def _gather_slab(
        self, x: torch.Tensor, group: dist.ProcessGroup, plan: KernelConfig, ws: bool, captured: bool
    ) -> slab.Slab:
        """``ws``: whether warp-specialised kernels can run the call."""
        return slab.pool.get(group, "gemm", group.size() * x.numel() * x.element_size(), x.device, captured)

    def gemm_reduce_scatter(
        self, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, *, transposed: bool, async_op: bool
    ) -> Pending:
        """See :class:`~megatron_flux.ops.backends.base.Backend`. Always finished: there is nothing left to overlap."""
        from megatron_flux.ops.launch import plain as launch

        m, k = x.shape
        n = weight.shape[1] if transposed else weight.shape[0]
        agree(
            group, ("gemm_reduce_scatter", "m", m, "n", n, "k", k, "dtype", x.dtype, "transposed", transposed), x.device
        )
        x, weight = aligned(x), aligned(weight)
        work, plan = self._scatter_work(x, group, n, capturing(x))
        return Pending(launch.gemm_reduce_scatter(x, weight, work, plan, transposed=transposed))

    def _scatter_work(
        self, x: torch.Tensor, group: dist.ProcessGroup, n: int, captured: bool
    ) -> tuple[slab.Slab, KernelConfig]:
        """Slab and plan of a gemm_reduce_scatter."""
        from megatron_flux.ops.launch import plain as launch

        (m, k), tp = x.shape, group.size()
        ws = launch.hopper_kernels(x, n, k)
        plan = self.plan or rs_plan(m // tp, n, k, tp, launch.sm_count(x.device), ws)
        nbytes = launch.rs_tiles(m // tp, n, plan) * plan.bm * plan.bn * x.element_size()
        return self._scatter_slab(group, nbytes, x.device, captured), plan

    def _scatter_slab(self, group: dist.ProcessGroup, nbytes: int, device: torch.device, captured: bool) -> slab.Slab:
        """``nbytes``: what one source sends."""
        return slab.pool.get(group, "gemm", group.size() * nbytes, device, captured)

    def ready(
        self,
        operator: str,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        group: dist.ProcessGroup,
        transposed: bool,
        shape: tuple[int, ...],
        bias: bool = False,
    ) -> ReadyCall | None:
        """See :class:`~megatron_flux.ops.backends.base.Backend`."""
        # A plan that somebody set is his for as long as he likes: it must be looked at in every call.
        if self.twin or self.plan is not None or capturing(x):
            return None
        call = self.ready_with_plan(operator, x, weight, group, transposed, shape, bias)
        if call is not None:
            call.allowed = lambda: self.plan is None
        return call

    def ready_with_plan(
        self,
        operator: str,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        group: dist.ProcessGroup,
        transposed: bool,
        shape: tuple[int, ...],
        bias: bool = False,
    ) -> ReadyCall | None:
        """As :meth:`ready`, with the plan that is set: the caller answers for it."""
        from megatron_flux.ops.fast_path import prepare as make_ready

        x2d = x.view(-1, x.shape[-1])
        if operator == "all_gather":
            return make_ready.all_gather(x, self._copy_work(x2d, group, False))
        assert weight is not None  # noqa: S101 - both other operators have one
        n = weight.shape[1] if transposed else weight.shape[0]
        if operator == "all_gather_gemm":
            work, plan = self._gather_work(x2d, group, n, False)
            return make_ready.all_gather_gemm(x, weight, work, plan, transposed, shape, bias)
        work, plan = self._scatter_work(x2d, group, n, False)
        return make_ready.gemm_reduce_scatter(x, weight, work, plan, transposed, shape)

    def all_gather(self, x: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool) -> Pending:
        """See :class:`~megatron_flux.ops.backends.base.Backend`. By copy engine: it takes no SM from the GEMM it hides
        behind.

        The result is valid until the next ``all_gather`` of the group. A capture must hold its ``wait()`` too.
        """
        from megatron_flux.comm import copy_engine as launch_copies

        agree(group, ("all_gather", "x", tuple(x.shape), "dtype", x.dtype), x.device)
        return launch_copies.all_gather(x, self._copy_work(x, group, capturing(x)))

    def renew(self, group: dist.ProcessGroup) -> None:
        """Make new workspaces for ``group``, after the same call has raised on all its ranks; see
        :meth:`megatron_flux.comm.slab.SlabPool.renew`. Collective.
        """
        slab.pool.renew(group)

    def _copy_work(self, x: torch.Tensor, group: dist.ProcessGroup, captured: bool) -> slab.Slab:
        """The slab of an all_gather of x ``[mp, k]``."""
        return slab.pool.get(group, "gather", group.size() * x.numel() * x.element_size(), x.device, captured)


OFF_NVLINK = (
    "fused kernels wait for atomics on peers' memory, which need not arrive over PCIe, and have not been run there"
)
"""Why ``auto`` runs stock between GPUs that reach each other's memory without NVLink."""


def limit(
    dtype: torch.dtype,
    size: int,
    capability: tuple[int, int],
    world: int | None = None,
    *,
    shielded: bool | None = None,
    beside: Beside = ALONE,
    captured: bool = False,
) -> str | None:
    """None, or why CUDA tensors of ``dtype`` in a group of ``size`` ranks cannot run fused, links aside.

    Args:
        dtype: of the operands.
        size: ranks of the group.
        capability: the GPU's compute capability.
        world: ranks of the job; None asks torch.distributed.
        shielded: whether other process groups' kernels cannot block these; None decides by this process's settings as
            of CUDA's start (:mod:`megatron_flux.settings`).
        beside: what runs beside the group, its being smaller than the world aside.
        captured: the calls run in CUDA graphs.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bf16 or fp16, x is {dtype}"
    if size not in (2, 4, 8):
        return f"it needs a group of 2, 4 or 8 ranks, not {size}"
    others = beside.others or size < (world or dist.get_world_size())
    reason = _why_blocked(others, beside.high_priority, captured) if shielded is None else None
    if shielded is False and others:
        reason = _MANY_QUEUES
    if reason is not None:
        return reason
    if capability < (8, 0):
        return f"it needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    return None


_MARGIN = "MEGATRON_FLUX_SM_MARGIN to the number of SMs that NCCL takes"

_MANY_QUEUES = (
    f"other process groups run beside this one: set CUDA_DEVICE_MAX_CONNECTIONS=1 before CUDA starts, or {_MARGIN}"
)


def _why_blocked(others: bool, high_priority: bool, captured: bool) -> str | None:
    """Why kernels of other process groups could block this process's fused ones; see the module."""
    if sm_margin() > 0:
        return None
    if high_priority:
        return (
            "NCCL runs on streams of high priority, which CUDA_DEVICE_MAX_CONNECTIONS=1 does not put in order with "
            f"others: set {_MARGIN}, or leave their priority as it is"
        )
    if others and captured:
        return (
            "other process groups run beside this one's CUDA graphs, whose launches CUDA_DEVICE_MAX_CONNECTIONS=1 does "
            f"not put in order with theirs: set {_MARGIN}, or train without graphs"
        )
    return _MANY_QUEUES if others and not _others_cannot_block() else None


def _others_cannot_block() -> bool:
    """Of calls outside graphs and streams of one priority."""
    return one_queue() or sm_margin() > 0


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
