"""The ``fused`` backend: one persistent kernel per operator over symmetric memory.

Hopper gets the warp-specialised kernels (:mod:`kernels.hopper.pieces`) wherever TMA can address the operands
and, for all_gather_gemm, 128 divides a rank's rows; everything else gets the plain Triton ones.

Contract: that of :mod:`megatron_flux.ops.call`; all ranks of a group make the same calls in the same
order. A gathered input is a view of a slab: of an all_gather valid until the group's next all_gather, of an
all_gather_gemm until its next all_gather_gemm or gemm_reduce_scatter. Results are fresh tensors, bitwise reproducible.

Limits, said by :meth:`FusedBackend.why_not`: bf16, fp16 or FP8 on CUDA, one host with peer access, 2, 4 or 8
ranks. Anything TMA cannot address (rows that are no multiple of 16 bytes, GPUs before Hopper) runs the plain kernels on
pointers.

Hazard: both kernels want every SM at once and wait for peers. A kernel of another process group on another stream that
waits for *its* peers at the same time (NCCL of data parallelism) can hold SMs while it waits for a rank whose SMs are
held by this one: two groups then wait for each other. Where kernels of other groups can run beside this one's
(:mod:`megatron_flux.comm.links`), the backend therefore asks for one of

* ``MEGATRON_FLUX_SM_MARGIN``: as many SMs as the other kernels take are left to them. It always helps;
* ``CUDA_DEVICE_MAX_CONNECTIONS=1``, which Megatron asks for with sequence parallelism: all kernels go through one
  hardware queue, in which all ranks enqueue them in the same order. That is not said of a graph's launch, nor of
  streams of different priorities: calls in graphs, and calls beside NCCL's streams of high priority, need the margin.

Hazard: flags are atomics on a peer's memory, of system scope. NVLink has them; over PCIe the platform may not, and then
a wait has no end. Elsewhere than on NVLink ``auto`` therefore leaves the backend alone (:meth:`FusedBackend.untested`).
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm import copy_engine, links
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import ALL_REDUCE, all_states, state_of
from megatron_flux.comm.links import ALONE, Beside
from megatron_flux.comm.slab import MOST_CALLS, Slab, scale_bytes
from megatron_flux.kernels.wire_format import FP8_CAPABILITY
from megatron_flux.ops import fast_path
from megatron_flux.ops.all_reduce_config import AllReduceConfig, all_reduce_config
from megatron_flux.ops.backend import Backend
from megatron_flux.ops.backends.scatter_gather import scatter_and_gather
from megatron_flux.ops.call import OperatorCall, aligned, compare_calls
from megatron_flux.ops.cuda_graphs import capturing, capturing_on_gpu
from megatron_flux.ops.fp8_operand import FORMATS
from megatron_flux.ops.kernel_config import (
    KernelConfig,
    ag_config,
    for_fp8,
    fp8_config,
    rs_config,
    rs_tiles,
)
from megatron_flux.settings import one_queue, sm_margin

OFF_NVLINK = (
    "fused kernels wait for atomics on peers' memory, which need not arrive over PCIe, and have not been run there"
)
"""Why ``auto`` runs stock between GPUs that reach each other's memory without NVLink."""

_MARGIN = "MEGATRON_FLUX_SM_MARGIN to the number of SMs that NCCL takes"


class FusedBackend(Backend):
    """See the module. ``twin`` runs on CPU tensors in Triton's interpreter, for tests."""

    needs_cuda = True

    def __init__(self, name: str = "fused", *, twin: bool = False) -> None:
        """Nothing is allocated or imported before the first call."""
        self.name, self.twin = name, twin
        self._config: KernelConfig | None = None

    @property
    def config(self) -> KernelConfig | None:
        """What calls use that are given no configuration; None, the default, chooses by shape. For measurements."""
        return self._config

    @config.setter
    def config(self, config: KernelConfig | None) -> None:
        self._config = config
        for state in all_states():
            state.prepared.clear()

    def why_not(self, x: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup) -> str | None:
        """None, or the first limit these operands meet; collective on a group's first call."""
        if self.twin:
            return None if x.device.type == "cpu" else "the twin runs on CPU tensors"
        if x.device.type != "cuda":
            return f"it needs CUDA tensors, x is on {x.device.type}"
        if weight is not None and not weight.is_contiguous():
            return f"weight must be contiguous, its strides are {weight.stride()}"
        beside = links.beside(group)
        reason = limit(x.dtype, group.size(), _capability(x.device), beside=beside, captured=capturing_on_gpu())
        if reason is not None:
            return reason
        link = links.probe(group, x.device)
        return f"no peer access within the group: {link.reason}" if link.kind in ("none", "host") else None

    def untested(self, x: torch.Tensor, group: dist.ProcessGroup) -> str | None:
        """Why ``auto`` leaves a group alone in which :meth:`why_not` finds no obstacle; None if it does not."""
        if self.twin:
            return None
        link = links.probe(group, x.device)
        return None if link.is_nvlink else f"{link.reason}: {OFF_NVLINK}"

    def all_gather_gemm(self, call: OperatorCall, config: KernelConfig | None = None) -> Any:
        """See :class:`~megatron_flux.ops.backend.Backend`; ``config``: how, not what is chosen here."""
        return self._launch(call, config)

    def gemm_reduce_scatter(self, call: OperatorCall, config: KernelConfig | None = None) -> Pending:
        """As :meth:`all_gather_gemm`. Always finished: there is nothing left to overlap."""
        return Pending(self._launch(call, config))

    def gemm_all_reduce(self, call: OperatorCall, config: AllReduceConfig | None = None) -> Pending:
        """As :meth:`all_gather_gemm`; finished, but for an all_gather behind a reduce-scatter, with ``async_op``."""
        config = config or _all_reduce_config(call)
        if config.shots == 0:
            return scatter_and_gather(call, self)
        from megatron_flux.ops.launch import all_reduce as launch

        call = call._replace(x=aligned(call.x), weight=aligned(call.weight))
        compare_calls(call)
        return Pending(launch.gemm_all_reduce(call, self._sum_slab(call, config, capturing(call.x)), config))

    def all_gather(self, call: OperatorCall) -> Pending:
        """By copy engine, which takes no SM from the GEMM it hides behind. A capture must hold its ``wait()`` too."""
        compare_calls(call)
        work = self._gather_slab(call, capturing(call.x))
        return copy_engine.all_gather(call.x, work, own_rows=call.return_gathered)

    def prepare(
        self, call: OperatorCall, shape: tuple[int, ...], config: KernelConfig | AllReduceConfig | None = None
    ) -> fast_path.PreparedCall | None:
        """See :class:`~megatron_flux.ops.backend.Backend`; ``config``: that the call was given."""
        # A configuration that somebody set is looked at in every call.
        if self.twin or (config is None and self.config is not None) or capturing(call.x):
            return None
        # The next call, which all ranks make, replaces a slab that is worn out; this rank alone prepares.
        if any(work.calls >= MOST_CALLS for work in state_of(call.group).slabs.values()):
            return None
        if call.operator == "gemm_all_reduce":
            made = config or _all_reduce_config(call)
            if call.fp8 is not None:
                return None
            if not isinstance(made, AllReduceConfig) or made.shots == 0:  # two operators, of many rows
                return None
            return fast_path.prepare_all_reduce(call, self._sum_slab(call, made, False), made, shape)
        assert not isinstance(config, AllReduceConfig), "that of another operator"  # noqa: S101
        if call.operator == "all_gather":
            return fast_path.prepare(call, self._gather_slab(call, False), None, shape)
        return fast_path.prepare(call, *self._placed(call, config, False), shape)

    def _launch(self, call: OperatorCall, config: KernelConfig | None) -> Any:
        from megatron_flux.ops import launch
        from megatron_flux.ops.launch import plain

        call = call._replace(x=aligned(call.x), weight=aligned(call.weight))
        if call.fp8 is not None:
            call = call._replace(fp8=call.fp8.with_aligned_scales())
        compare_calls(call)
        work, config = self._placed(call, config, capturing(call.x))
        kernels: ModuleType = plain
        if config.ws:
            kernels = importlib.import_module("megatron_flux.ops.launch.hopper")  # Gluon
        return getattr(launch, call.operator)(call, work, config, kernels)

    def _placed(self, call: OperatorCall, config: KernelConfig | None, captured: bool) -> tuple[Slab, KernelConfig]:
        """Slab and configuration of a call with a GEMM; ``ws`` is set in the latter where Hopper's kernels run it."""
        from megatron_flux.ops import launch

        operator, x, m, n, k, tp = call.operator, call.x, call.m, call.n, call.k, call.group.size()
        sms, config = launch.sm_count(x.device), config or self.config
        hopper = launch.hopper_kernels(call, *([] if config is None else [config.bm]))
        if config is None and call.fp8 is not None:
            config = fp8_config(operator, m // tp, n, k, tp, sms, hopper, promoted=call.fp8.promoted)
        elif config is None:
            choose = ag_config if operator == "all_gather_gemm" else rs_config
            config = choose(m // tp, n, k, tp, sms, hopper)
        elif config.ws and not hopper:
            config = replace(config, ws=False)
        if call.fp8 is not None:
            config = for_fp8(config, promoted=call.fp8.promoted)
        if operator == "all_gather_gemm":
            nbytes = x.numel() * x.element_size()
            if (scales := call.sent_scales) is not None:
                nbytes += scale_bytes(scales.shape)
        else:
            nbytes = rs_tiles(m // tp, n, config) * config.bm * config.bn * call.out.itemsize
        return self._slab(call, nbytes, config, captured), config

    def _slab(self, call: OperatorCall, nbytes: int, config: KernelConfig | None, captured: bool) -> Slab:
        """The slab of a call in which one source sends ``nbytes``; ``config``: None of an all_gather."""
        purpose = "gather" if call.operator == "all_gather" else "gemm"
        return state_of(call.group).slab(purpose, call.group.size() * nbytes, call.x.device, captured)

    def _sum_slab(self, call: OperatorCall, config: AllReduceConfig, captured: bool) -> Slab:
        nbytes = config.nbytes(call.m, call.n, call.group.size(), call.out.itemsize)
        return state_of(call.group).slab(ALL_REDUCE, nbytes, call.x.device, captured)

    def _gather_slab(self, call: OperatorCall, captured: bool) -> Slab:
        return self._slab(call, call.x.numel() * call.x.element_size(), None, captured)

    def renew(self, group: dist.ProcessGroup) -> None:
        """Make new workspaces for ``group``, after the same call has raised on all its ranks; see
        :meth:`megatron_flux.comm.group_state.GroupState.renew_slabs`. Collective.
        """
        state_of(group).renew_slabs()


def _all_reduce_config(call: OperatorCall) -> AllReduceConfig:
    fp8 = call.fp8 is not None
    return all_reduce_config(call.m, call.n, call.k, call.group.size(), call.out.itemsize, fp8=fp8)


def limit(
    dtype: torch.dtype,
    size: int,
    capability: tuple[int, int],
    *,
    beside: Beside = ALONE,
    captured: bool = False,
) -> str | None:
    """None, or why CUDA tensors of ``dtype`` in a group of ``size`` ranks cannot run fused, links aside.

    ``capability`` is the GPU's; ``beside`` what runs beside the group, its being smaller than the world aside;
    ``captured``: the calls run in CUDA graphs.
    """
    if dtype not in (torch.bfloat16, torch.float16, *FORMATS):
        return f"it needs bf16, fp16 or FP8, x is {dtype}"
    if size not in (2, 4, 8):
        return f"it needs a group of 2, 4 or 8 ranks, not {size}"
    others = beside.others or size < dist.get_world_size()
    if (reason := _why_blocked(others, beside.high_priority, captured)) is not None:
        return reason
    least = FP8_CAPABILITY if dtype in FORMATS else (8, 0)
    if capability < least:
        return f"it needs compute capability {least[0]}.{least[1]}, this GPU has {capability[0]}.{capability[1]}"
    return None


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
