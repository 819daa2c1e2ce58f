"""Arms of ``bench peers``: the calls of every project that fuses a tensor-parallel GEMM with its communication.

An arm tells why it cannot run a call (:meth:`Arm.why_not`) and opens its ways to run one: callables that return this
rank's rows of the result, by setting. Opening and closing are collective. NVLink multicast is off for all arms.

Sources: torch 2.11 and 2.13 (``torch.distributed._symmetric_memory``), TransformerEngine 2.11 (``module/base.py``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from packaging.version import Version

from megatron_flux.bench import calls
from megatron_flux.bench.calls import Operands, stock
from megatron_flux.bench.cases import GATHERS, REDUCES, SCATTERS, Case
from megatron_flux.bench.harness import run_until_tuned, userbuffers
from megatron_flux.ops.fp8_operand import Fp8Pair
from megatron_flux.version import __version__

Ways = dict[str, Callable[[], torch.Tensor]]  # calls of an arm, by setting
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Arm:
    """Calls of one project."""

    name: str
    ways: Callable[[Operands], AbstractContextManager[Ways]]
    package: str | None = "torch"  # distribution that it is a part of; None is this one
    ops: tuple[str, ...] = (GATHERS, SCATTERS, REDUCES)
    nccl: str | None = None  # lowest NCCL; None where the arm does not use it
    cpu: bool = False  # runs without GPUs, too
    why: Callable[[torch.device], str | None] = lambda device: None  # further reasons of :meth:`why_not`

    def version(self) -> str:
        """Return the versions of what runs."""
        if self.package is None:
            return f"megatron-flux {__version__}"
        found = f"{self.package} {version(self.package)}"
        return found if self.nccl is None or not torch.cuda.is_available() else f"{found}, nccl {_nccl()}"

    def why_not(self, case: Case, device: torch.device) -> str | None:
        """Return why the arm cannot run ``case`` here; None if it may. A missing package is seen as it is opened."""
        if device.type != "cuda":
            return None if self.cpu else "it needs GPUs"
        if case.op not in self.ops:
            return f"it has no {case.op} that could run here (docs/peers.md)"
        if self.nccl is not None and _nccl() < Version(self.nccl):
            return f"NCCL {_nccl()} is too old for it: {self.nccl} or newer"
        return self.why(device)


def _nccl() -> Version:
    return Version(".".join(map(str, torch.cuda.nccl.version())))


@contextmanager
def nccl(inputs: Operands) -> Iterator[Ways]:
    """Open NCCL's collective and cuBLASLt's GEMM in sequence, into buffers that are kept; gloo on CPUs."""
    yield {"": stock(inputs)["serial"]}


@contextmanager
def nccl_symm(inputs: Operands) -> Iterator[Ways]:
    """Open the same in memory that is registered as NCCL windows, all buffers at once, for its other kernels."""
    backend: Any = inputs.group._get_backend(inputs.x.device)
    pool = torch.cuda.MemPool(backend.mem_allocator)  # ncclMemAlloc
    with torch.cuda.use_mem_pool(pool):
        call = stock(inputs)["serial"]
    backend.register_mem_pool(pool, symm=True)
    try:
        yield {"": call}
    finally:
        torch.cuda.synchronize()
        backend.deregister_mem_pool(pool)


@contextmanager
def torch_async_tp(inputs: Operands) -> Iterator[Ways]:
    """Open torch's async-TP operators, which are not asked for the gathered x."""
    importlib.import_module("torch.distributed._symmetric_memory")  # registers the operators
    case, x, wt, name = inputs.case, inputs.x, inputs.by_k, inputs.group.group_name
    pair: Any = inputs.pair
    fused, gathers = torch.ops.symm_mem, case.op == GATHERS

    def bf16() -> Any:
        if gathers:
            return fused.fused_all_gather_matmul(x, [wt], 0, name, return_A=False)[1][0]
        return fused.fused_matmul_reduce_scatter(x, wt, "sum", 0, name)

    def fp8() -> Any:  # without bias and scale of the result, with fast sums
        by_x, by_weight = pair.x.scale_inv, pair.weight.scale_inv
        if gathers:
            more = [None], [None], [BF16], [True]
            return fused.fused_all_gather_scaled_matmul(x, [wt], by_x, [by_weight], 0, name, *more)[1][0]
        how = "sum", 0, 0, name, [case.m, case.n], None, None, BF16, True
        return fused.fused_scaled_matmul_reduce_scatter(x, wt, by_x, by_weight, *how)

    yield {"": bf16 if inputs.pair is None else fp8}


def _multicast_in_torch(device: torch.device) -> str | None:
    """Return the reason of async-TP: up to 2048 rows torch gathers by multicast where it sees any."""
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    seen = _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index)
    return "torch's symmetric memory would use NVLink multicast" if seen else None


@contextmanager
def te_userbuffers(inputs: Operands) -> Iterator[Ways]:
    """Open TransformerEngine's userbuffers: the GEMMs that its Linear calls, on operands that are quantised before."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.cpp_extensions import general_gemm
    from transformer_engine.pytorch.module.base import fill_userbuffers_buffer_for_all_gather as fill
    from transformer_engine.pytorch.module.base import get_ub

    case, group = inputs.case, inputs.group
    x, weight, quantizer = (inputs.x, inputs.weights[0], None) if inputs.pair is None else _te_fp8(inputs.pair)

    def gathered(buffer: Any) -> Any:
        whole, _ = fill(buffer, x, quantizer, group)  # copies x, as the Linear does
        return general_gemm(weight, whole, out_dtype=BF16, ub=buffer, ub_type=tex.CommOverlapType.AG)[0]

    def scattered(buffer: Any) -> torch.Tensor:
        y = inputs.x.new_empty(case.m // group.size(), case.n, dtype=BF16)
        general_gemm(weight, x, out_dtype=BF16, ub=buffer, ub_type=tex.CommOverlapType.RS, extra_output=y)
        return y

    # FC2's buffer has another method than proj's.
    ring = {"fc2_fprop": {"method": "ring_exchange", "num_sm": 1, "cga_size": 1, "set_sm_margin": False}}
    columns = case.k if case.op == GATHERS else case.n
    with userbuffers([case.m, columns], group.size(), fp8=inputs.pair is not None, ub_cfgs=ring):
        names = {"ring": "fc1_fprop"} if case.op == GATHERS else {"pipeline": "proj_fprop", "ring": "fc2_fprop"}
        call = gathered if case.op == GATHERS else scattered
        yield {way: partial(call, get_ub(name, inputs.pair is not None)) for way, name in names.items()}


def _te_fp8(pair: Fp8Pair) -> tuple[Any, Any, Any]:
    """Return x and weight as TransformerEngine's tensors, and a quantiser of their format."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    e4m3, one = tex.DType.kFloat8E4M3, torch.ones_like(pair.x.scale_inv)
    quantizer = Float8Quantizer(scale=one, amax=one.clone(), fp8_dtype=e4m3)
    x, weight = (
        Float8TensorStorage(data=o.data, fp8_scale_inv=o.scale_inv, fp8_dtype=e4m3, quantizer=quantizer)
        for o in (pair.x, pair.weight)
    )
    return x, weight, quantizer


@contextmanager
def flux(inputs: Operands) -> Iterator[Ways]:
    """Open this project's operators as layers call them, once the tuner has decided about the call: this very m."""
    if inputs.x.is_cuda:
        calls.plan_of(calls.as_tuned(inputs))
    call = calls.flux(inputs)
    run_until_tuned(call, inputs.group)
    yield {"": call}


_TWO = (GATHERS, SCATTERS)

ARMS = {
    arm.name: arm
    for arm in (
        Arm("nccl", nccl, nccl="2", cpu=True),
        Arm("nccl_symm", nccl_symm, nccl="2.27"),
        Arm("torch_async_tp", torch_async_tp, ops=_TWO, why=_multicast_in_torch),
        Arm("te_userbuffers", te_userbuffers, "transformer-engine", ops=_TWO),
        Arm("flux", flux, None, cpu=True),
    )
}
"""All arms by name, this project's last."""
