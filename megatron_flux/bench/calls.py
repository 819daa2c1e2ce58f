"""Operator calls on random operands, by stock and by flux, and their plans: for ``ops``, ``peers`` and ``tune``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.bench.cases import GATHERS, REDUCES, SCATTERS, Case
from megatron_flux.comm import links
from megatron_flux.errors import UserError
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.ops.fp8_operand import Fp8Kind, Fp8Pair, random_pair
from megatron_flux.ops.gemm import fp8_gemm
from megatron_flux.ops.tuner.cache import Entry

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CALLS = 12  # calls of a decode graph
COLD_BYTES = 160 << 20
"""Bytes of the weights that the calls of a graph read: three times the L2 cache of an H200."""

Runs = dict[str, Callable[[], Any]]


class Operands(NamedTuple):
    """Operands of one call on this rank, other ones on every rank."""

    case: Case
    group: dist.ProcessGroup
    x: torch.Tensor  # ``[rows, k]``: this rank's shard where it is gathered
    weights: list[torch.Tensor]
    """One, ``[n, k]`` or for dgrad ``[k, n]``; for a decode call as many as its graph reads."""
    pair: Fp8Pair | None = None  # FP8 operands, of which ``x`` and the weight are the numbers

    @property
    def by_k(self) -> torch.Tensor:
        """The weight as ``torch.matmul`` takes it, ``[k, n]``."""
        return self.weights[0] if self.case.transposed else self.weights[0].t()


def device_of(command: str, group: dist.ProcessGroup, dtype: torch.dtype) -> torch.device:
    """Return this rank's device. Collective. Raises UserError unless fused kernels or transfers by chunks can run."""
    device = torch.device("cuda", torch.cuda.current_device())
    if not links.by_chunks(links.probe(group, device)):
        probe = torch.empty(8, 8, dtype=dtype, device=device)
        reason = get_backend("fused").why_not(probe, probe, group)
        if reason is not None:
            raise UserError(f"{command}: the fused backend cannot run here: {reason}")
    return device


def operands(case: Case, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> Operands:
    """Make operands as the operator takes them; results are in ``dtype``. One scale of x is alike on all ranks."""
    rows = case.m // group.size() if case.op == GATHERS else case.m
    generator = torch.Generator(device=device).manual_seed(1 + group.rank())
    if case.fp8 is not None:
        blocks, dgrad = case.fp8 == "blockwise", case.direction == "dgrad"
        of_x = torch.float8_e5m2 if dgrad and not blocks else torch.float8_e4m3fn
        kind = Fp8Kind(of_x, torch.float8_e4m3fn, "1x128" if blocks else "tensor", dtype, promoted=blocks or dgrad)
        pair = random_pair(rows, case.n, case.k, kind, device, generator)
        return Operands(case, group, pair.x.numbers, [pair.weight.numbers], pair)
    count = 1
    if case.direction == "decode":
        cold = -(-COLD_BYTES // (case.n * case.k * dtype.itemsize)) if device.type == "cuda" else 0
        count = min(max(2, cold), CALLS)

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device).normal_(generator=generator)

    shape = (case.k, case.n) if case.transposed else (case.n, case.k)
    return Operands(case, group, random(rows, case.k), [random(*shape) for _ in range(count)])


def stock(inputs: Operands) -> Runs:
    """Return the runs of the GEMM alone, of the collective alone, and of one behind the other (``serial``).

    Makes all buffers and runs nothing: a GEMM would put its workspace beside them (``nccl_symm``). A reduce-scatter
    alone sends what the GEMM has left.
    """
    case, group, pair = inputs.case, inputs.group, inputs.pair
    gathers = case.op == GATHERS
    y = inputs.x.new_empty(case.m, case.n, dtype=inputs.x.dtype if pair is None else pair.out)
    shard = y.new_empty(case.m // group.size(), case.n) if case.op == SCATTERS else y
    if pair is None:
        # Random, not empty: a GEMM of zeros draws less power and clocks higher.
        x = inputs.x.repeat(group.size(), 1) if gathers else inputs.x
        alone = multiply = partial(torch.matmul, x, inputs.by_k, out=y)
        transfers = [(x, inputs.x)]
    else:
        operand = pair.x.repeated(group.size()) if gathers else pair.x
        alone = partial(fp8_gemm, pair._replace(x=operand.one_shard()), out=y)
        multiply = partial(fp8_gemm, pair._replace(x=operand), out=y)  # lays gathered scales of blocks out first
        transfers = [(operand.data, pair.x.data)]
        if pair.blocks:
            transfers.append((operand.scale_inv.view(-1, operand.scale_inv.shape[-1]), pair.x.scale_inv))
    sent = [(target, source.clone()) for target, source in transfers] if gathers else []

    def communicate() -> None:
        for target, source in sent:
            dist.all_gather_into_tensor(target, source, group=group)
        if case.op == SCATTERS:
            dist.reduce_scatter_tensor(shard, y, group=group)
        elif case.op == REDUCES:
            dist.all_reduce(y, group=group)

    def serial() -> torch.Tensor:
        if gathers:
            communicate()
        multiply()
        if not gathers:
            communicate()
        return shard

    return {"gemm": alone, "nccl": communicate, "serial": serial}


def flux(inputs: Operands, **how: Any) -> Callable[[], torch.Tensor]:
    """Return the call of the public operator, whose host time counts; ``how``: its further options."""
    case, pair = inputs.case, inputs.pair
    if pair is None:
        given: tuple[Any, Any] = inputs.x, inputs.weights[0]
        how["transposed"] = case.transposed
    else:
        given = pair.x, pair.weight
        how |= {"split_accumulator": pair.split, "out_dtype": pair.out}
    return partial(getattr(ops, case.op), *given, inputs.group, **how)


def as_tuned(inputs: Operands, wire: str = "exact") -> OperatorCall:
    """Return the call as the tuner sees it."""
    transposed = inputs.case.transposed and inputs.pair is None  # FP8 operands are k-major, both
    how: dict[str, Any] = {"return_gathered": False, "wire": wire, "fp8": inputs.pair}
    return OperatorCall(inputs.case.op, inputs.x, inputs.weights[0], inputs.group, transposed, **how)


def plan_of(call: OperatorCall, *, captured: bool = False, full: bool = False) -> Entry:
    """Have the tuner decide about this very call, and return its entry; ``full``: of all candidates. Collective."""
    tuned: Any = get_backend("tuned")
    with captured_calls() if captured else nullcontext():
        entry: Entry = tuned.tuner.decide(call, full=full)
    return entry
