"""Wrong operands are refused before any communication, and the message says what was given, allowed and to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_flux import UserError, ops
from megatron_flux.ops.fp8_operand import Fp8Operand, quantized
from tests.unit.groups import group_of

ROWS, K, N = 4, 6, 5
AG, RS = "all_gather_gemm", "gemm_reduce_scatter"
BOTH = (AG, RS)
X, W = torch.ones(ROWS, K), torch.ones(N, K)
FP8, E5M2 = (quantized(torch.ones(16, 16), "tensor", dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))
OWN = {"own_gathered": True, "backend": "reference"}
SHAPES = [((K,), (N, K)), ((ROWS, K), (K,)), ((ROWS, K), (1, N, K)), ((), (N, K))]
DTYPES = [(torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16), (torch.float64,) * 2, (torch.int64,) * 2]
ALLOWED = ("torch.float32", "torch.bfloat16", "torch.float16")
BIASES = [torch.ones(N + 1), torch.ones(1, N), torch.ones(N, dtype=torch.bfloat16)]

CASES: list[tuple[tuple[str, ...], Any, Any, dict[str, Any], tuple[str, ...]]] = [
    # operators, x, weight, what else is given, and words of the message
    (BOTH, X, W.t(), {}, (f"{(ROWS, K)}", f"{(K, N)}", f"k = {N}", "is transposed=False meant?")),
    (BOTH, X, W, {"transposed": True}, (f"{(ROWS, K)}", f"{(N, K)}", f"k = {N}", "is transposed=True meant?")),
    *((BOTH, torch.ones(x), torch.ones(w), {}, ("at least 2 dimensions", f"{x}", f"{w}")) for x, w in SHAPES),
    ((*BOTH, "gemm_all_reduce"), X[:, :0], W[:, :0], {}, (f"x {(ROWS, 0)} has no columns, so k is 0",)),
    *((BOTH, X.to(x), W.to(w), {}, (f"got {x} and {w}", *ALLOWED)) for x, w in DTYPES),
    (BOTH, X, W.to("meta"), {}, ("x is on cpu and weight on meta; move them to one device",)),
    *(
        (BOTH, X, W, {"bias": b}, (f"bias must be [{N}] torch.float32 on cpu", f"got {list(b.shape)} {b.dtype}"))
        for b in BIASES
    ),
    (BOTH, X, W, {"backend": "nccl"}, (f"unknown backend 'nccl'; use one of: {', '.join(ops.backend_names())}",)),
    (BOTH, X, W, {"group": None}, ("init_process_group", "group=")),
    ((RS,), X[:3], W, {}, (f"{(3, K)}", "divisible by the group size 2", "pad")),
    ((RS,), torch.ones(3, 2, K), W, {}, (f"first dimension of x {(3, 2, K)}",)),
    ((RS,), X, W, {"bias": torch.ones(N), "async_op": True}, ("add it after wait()",)),
    ((AG,), X, W, OWN, ("got return_gathered=False and torch.float32",)),
    # In FP8 the kernel would write to x.
    ((AG,), FP8, FP8, {**OWN, "return_gathered": True}, ("and no FP8, got return_gathered=True and FP8 operands",)),
    (BOTH, FP8, torch.ones(16, 16), {}, ("weight Tensor; both must be Fp8Operand",)),
    (BOTH, FP8, FP8, {"transposed": True}, ("transposed out",)),
    (BOTH, FP8, FP8, {"wire": "int8"}, ("wire='int8'",)),
    (BOTH, FP8, quantized(torch.ones(16, 32), "tensor"), {}, ("x [16, 16] and weight [16, 32] have different k",)),
    (BOTH, FP8, quantized(torch.ones(16, 16), "128x128"), {}, ("use tensor with tensor or 1x128",)),
    (BOTH, quantized(torch.ones(16, 16), "1x128"), FP8, {}, ("use tensor with tensor or 1x128",)),
    (BOTH, E5M2, E5M2, {}, ("both float8_e5m2",)),
    (BOTH, Fp8Operand(FP8.data, FP8.dtype, FP8.scale_inv, "tensor", 2), FP8, {}, ("each must be one",)),
    (BOTH, FP8, FP8, {"bias": torch.zeros(16)}, ("bias must be [16] torch.bfloat16",)),
    (BOTH, FP8, FP8, {"out_dtype": torch.float32}, ("out_dtype must be",)),
    (BOTH, FP8, FP8, {"backend": "fused"}, ("needs CUDA tensors",)),
]


@pytest.mark.parametrize(("operators", "x", "weight", "more", "words"), CASES)
def test_a_call_that_is_refused(
    operators: tuple[str, ...], x: Any, weight: Any, more: dict[str, Any], words: tuple[str, ...]
) -> None:
    for operator in operators:
        before = ops.stats.total(operator)
        with pytest.raises(UserError) as error:
            getattr(ops, operator)(x, weight, **{"group": group_of(2)} | more)
        assert ops.stats.total(operator) == before
        message = str(error.value)
        assert "\n" not in message
        assert message.startswith(operator) or more
        assert all(part in message for part in words), message


def test_all_gather_refuses_what_it_cannot_send() -> None:
    with pytest.raises(UserError, match=r"all_gather: x must .* got \(4, 6\) torch.float64"):
        ops.all_gather(X.double(), group_of(2))
    with pytest.raises(UserError, match=r"all_gather: x must .* got \(6,\) torch.float32"):
        ops.all_gather(X[0], group_of(2))
    with pytest.raises(UserError, match=r"all_gather: x must .* one column, .* got \(4, 0\) torch.float32"):
        ops.all_gather(X[:, :0], group_of(2))
    with pytest.raises(UserError, match="unknown backend 'nccl'"):
        ops.all_gather(X, group_of(2), backend="nccl")
