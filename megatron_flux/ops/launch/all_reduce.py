"""Launching the kernels of gemm_all_reduce, from the slab's turn to the call's end. Imports triton."""

from __future__ import annotations

from typing import Any

import torch

from megatron_flux.comm.slab import Slab, kept, unbroken
from megatron_flux.kernels import all_reduce as kernels
from megatron_flux.kernels.launch import Launch, by_triton, first_or_again
from megatron_flux.ops.all_reduce_config import ALIGNED, AllReduceConfig
from megatron_flux.ops.call import ALIGNMENT, OperatorCall
from megatron_flux.ops.gemm import partial
from megatron_flux.ops.kernel_config import cdiv
from megatron_flux.ops.launch import DTYPES, sm_count, uses_tma
from megatron_flux.ops.launch.plain import _descriptor

INTEGERS = {2: torch.int16, 4: torch.int32}


def gemm_all_reduce(made: OperatorCall, work: Slab, config: AllReduceConfig) -> torch.Tensor:
    """``[m, n]``, the sum over ranks; ``made`` has aligned operands, and its slab room for them (``config.nbytes``)."""
    x, m, n = made.x, made.m, made.n
    if config.own_gemm:
        out, product = x.new_empty((m, n)), None
    else:
        product = partial(made)
        out = torch.empty_like(product)
    with unbroken(work, made.operator):
        half = work.begin().half
        if product is None:
            _with_gemm(made, out, work, half, config)
        else:
            _by_itself(product, out, work, half, config)
        work.end()
    return out


def kernel_key(made: OperatorCall, half: int, config: AllReduceConfig) -> tuple[Any, ...]:
    """Of the kernel that a call launches on a slab: everything but its operands' addresses."""
    return gemm_key(made, half, config) if config.own_gemm else sum_key(made.m * made.n, made.out, half, config)


def gemm_key(made: OperatorCall, half: int, config: AllReduceConfig) -> tuple[Any, ...]:
    """Likewise, of an own GEMM."""
    return ("gemm_all_reduce", config, half, made.m, made.n, made.k, made.out, made.transposed)


def sum_key(count: int, dtype: torch.dtype, half: int, config: AllReduceConfig) -> tuple[Any, ...]:
    """Likewise, of ``count`` numbers that are added by themselves."""
    return ("all_reduce", config, half, count, dtype)


def _by_itself(partial: torch.Tensor, out: torch.Tensor, work: Slab, half: int, config: AllReduceConfig) -> None:
    kernel = kernels.one_shot_kernel if config.shots == 1 else kernels.two_shot_kernel
    count, tp = partial.numel(), work.tp
    stride = config.stride(count, 0, tp)
    ctas = min(config.ctas, cdiv(count if config.shots == 1 else stride, config.block))
    arguments = (
        partial.view(INTEGERS[partial.element_size()]), out,
        *_of_slab(work, half, out.element_size()), stride, count, work.rank,
    )  # fmt: skip
    key = sum_key(count, out.dtype, half, config)
    operands = {"x": partial, "y": out}
    _launch(
        kernel, work, key, ctas, config, arguments, operands, BLOCK=config.block, CTAS=ctas, DTYPE=DTYPES[out.dtype]
    )


def _with_gemm(made: OperatorCall, out: torch.Tensor, work: Slab, half: int, config: AllReduceConfig) -> None:
    x, weight, (m, n), k, size = made.x, made.weight, out.shape, made.k, out.element_size()
    ctas = min(sm_count(x.device), config.tiles(m, n))
    tma = uses_tma(x, n, k)
    a, b = x, weight
    if tma:
        a = _descriptor(x, config.bm, config.bk)
        b = _descriptor(weight, *((config.bk, config.bn) if made.transposed else (config.bn, config.bk)))
    arguments = (a, b, out, *_of_slab(work, half, size), config.stride(m, n, work.tp), m, n, k, work.rank)
    key = gemm_key(made, half, config)
    _launch(
        kernels.gemm_one_shot_kernel, work, key, ctas, config, arguments, {"a": x, "b": weight, "y": out},
        BM=config.bm, BN=config.bn, BK=config.bk, ROWS=config.rows_at_a_time, CTAS=ctas, TRANSPOSED=made.transposed,
        TMA=tma, DTYPE=DTYPES[out.dtype], num_stages=config.stages,
    )  # fmt: skip


def _of_slab(work: Slab, half: int, size: int) -> tuple[Any, ...]:
    """The slabs of all ranks by step, what every kernel takes of its call, and the numbers in a half."""
    integers = INTEGERS[size]
    sinks = kept(
        work.descriptors,
        ("numbers", integers),
        lambda: [work.data[(work.rank + 1 + step % work.tp) % work.tp].view(integers) for step in range(8)],
    )
    alarm = work.alarm
    return (*sinks, work.epochs, alarm.words, alarm.limit, half, 1 - half, work.half_bytes // size)


def _launch(
    kernel: Any, work: Slab, key: tuple[Any, ...], ctas: int, config: AllReduceConfig, arguments: tuple[Any, ...],
    operands: dict[str, torch.Tensor], **constants: Any,
) -> None:  # fmt: skip
    size = operands["y"].element_size()
    cuda = work.data_table.is_cuda

    def launch() -> Launch:
        made = by_triton(
            kernel, ctas, *arguments, TP=work.tp, EMPTY=kernels.EMPTY[size], CPU=not cuda, num_warps=config.warps,
            **constants,
        )  # fmt: skip
        return made, arguments

    if cuda and all(operand.data_ptr() % ALIGNMENT == 0 for operand in operands.values()):
        first_or_again(work.kernels, key, ctas, launch, work.data_table.get_device(), **operands)
    else:
        launch()


__all__ = ["ALIGNED", "gemm_all_reduce"]
