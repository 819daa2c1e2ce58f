"""megatron-core's ColumnParallelLinear and RowParallelLinear, patched against stock and against float64."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FluxConfig
from tests.distributed.data import TOLERANCE, integers, normals, require_close
from tests.distributed.megatron_world import flux, megatron, model_config
from tests.distributed.pool import on_ranks

S_PER_RANK, B, IN, OUT = 3, 2, 8, 12
"""The sequence is ``tp * S_PER_RANK``; ``IN`` and ``OUT`` are the whole layer's."""

STRICT = FluxConfig(strict=True)


@dataclass(frozen=True)
class Case:
    """One way to build and call a layer."""

    kind: str
    bias: bool = True
    skip_bias_add: bool = False
    gather_output: bool = False
    runtime_gather_output: bool | None = None
    frozen: bool = False
    input_grad: bool = True
    weight_passed: bool = False
    splits_input: bool = False
    """A row layer's ``input_is_parallel=False``."""
    dtype: torch.dtype = torch.float32
    exact: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def sequence_parallel(self) -> bool:
        return self.options.get("sequence_parallel", True)

    @property
    def gathers(self) -> bool:
        return self.gather_output if self.runtime_gather_output is None else self.runtime_gather_output

    def make(self, *shape: int, seed: int) -> torch.Tensor:
        return (integers if self.exact else normals)(*shape, seed=seed, dtype=self.dtype)


@dataclass
class Run:
    """Results of a forward and backward on this rank; None where there is none."""

    y: torch.Tensor
    bias_out: torch.Tensor | None
    dx: torch.Tensor | None
    dw: torch.Tensor | None
    db: torch.Tensor | None


@dataclass
class Whole:
    """The layer on one process in float64, cut to what this rank should have."""

    x: torch.Tensor
    dy: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    expected: Run


def cut(t: torch.Tensor, dim: int) -> torch.Tensor:
    return t.chunk(dist.get_world_size(), dim=dim)[dist.get_rank()].contiguous()


def whole(case: Case) -> Whole:
    """Operands of this rank, cut from the whole layer's, and the results that follow from them."""
    s = S_PER_RANK * dist.get_world_size()
    column = case.kind == "column"
    x, weight, bias = case.make(s, B, IN, seed=1), case.make(OUT, IN, seed=2), case.make(OUT, seed=3)
    dy = case.make(s, B, OUT, seed=4)
    y = x.double() @ weight.double().t()
    if case.bias and not case.skip_bias_add:
        y = y + bias.double()
    dx, dw = dy.double() @ weight.double(), torch.einsum("sbn,sbk->nk", dy.double(), x.double())
    db = dy.double().sum((0, 1))
    if column:
        y_own, dy_own = (y, dy) if case.gathers else (cut(y, 2), cut(dy, 2))
        x_own, dx_own = (cut(x, 0), cut(dx, 0)) if case.sequence_parallel else (x, dx)
        own = Run(y_own, cut(bias, 0), dx_own, cut(dw, 0), cut(db, 0))
        return Whole(x_own, dy_own, cut(weight, 0), cut(bias, 0), own)
    # Row: every rank has the whole bias, and sees the gradient of the rows of the sequence that it has.
    y_own, dy_own = (cut(y, 0), cut(dy, 0)) if case.sequence_parallel else (y, dy)
    own = Run(y_own, bias, cut(dx, 2), cut(dw, 1), dy_own.double().sum((0, 1)))
    if case.splits_input:
        own.dx = dx
    return Whole(x if case.splits_input else cut(x, 2), dy_own, cut(weight, 1), bias, own)


def build(case: Case, w: Whole) -> torch.nn.Module:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    config = model_config(params_dtype=case.dtype, **case.options)
    common = {"config": config, "init_method": config.init_method, "bias": case.bias}
    if case.kind == "column":
        layer = ColumnParallelLinear(
            IN,
            OUT,
            gather_output=case.gather_output,
            skip_bias_add=case.skip_bias_add,
            skip_weight_param_allocation=case.weight_passed,
            **common,
        )
    else:
        common |= {"input_is_parallel": not case.splits_input, "skip_bias_add": case.skip_bias_add}
        layer = RowParallelLinear(IN, OUT, **common)
    with torch.no_grad():
        if layer.weight is not None:
            layer.weight.copy_(w.weight).requires_grad_(not case.frozen)
        if layer.bias is not None:
            layer.bias.copy_(w.bias).requires_grad_(not case.frozen)
    return layer


def run(case: Case, layer: torch.nn.Module, w: Whole) -> Run:
    x = w.x.clone().requires_grad_(case.input_grad)
    kwargs: dict[str, Any] = {}
    weight = layer.weight
    if case.weight_passed:
        weight = kwargs["weight"] = torch.nn.Parameter(w.weight.clone(), requires_grad=not case.frozen)
    if case.runtime_gather_output is not None:
        kwargs["runtime_gather_output"] = case.runtime_gather_output
    for parameter in layer.parameters():
        parameter.grad = None
    y, bias_out = layer(x, **kwargs)
    assert y.requires_grad == (case.input_grad or not case.frozen)
    if y.requires_grad:
        y.backward(w.dy)
    return Run(
        y.detach(), bias_out, x.grad, weight.grad, None if layer.bias is None or case.frozen else layer.bias.grad
    )


def compare(case: Case, name: str, actual: Run, expected: Run, tolerance: float) -> None:
    require_close(f"{name}: y", actual.y, expected.y, tolerance)
    assert (actual.bias_out is not None) == (case.bias and case.skip_bias_add)
    if actual.bias_out is not None:
        require_close(f"{name}: returned bias", actual.bias_out, expected.bias_out, tolerance)
    for what, present in (
        ("dx", case.input_grad),
        ("dw", not case.frozen),
        ("db", case.bias and not case.skip_bias_add and not case.frozen),
    ):
        one, other = getattr(actual, what), getattr(expected, what)
        assert (one is not None) == present, f"{name}: {what} is {'there' if one is not None else 'missing'}"
        if present:
            assert one.dtype == case.dtype
            require_close(f"{name}: {what}", one, other, tolerance)


def expected_calls(case: Case) -> dict[str, int]:
    """Operator calls of one forward and backward."""
    trained = not case.frozen
    if not case.sequence_parallel:
        calls = {"gemm_all_reduce": int(case.kind == "row" or case.input_grad)}
    elif case.kind == "column":
        calls = {"all_gather_gemm": 1, "gemm_reduce_scatter": int(case.input_grad), "all_gather": int(trained)}
    else:
        calls = {
            "gemm_reduce_scatter": 1,
            "all_gather_gemm": int(case.input_grad),
            "all_gather": int(trained and not case.input_grad),
        }
    return {f"{operator}/reference": n for operator, n in calls.items() if n}


OPTIONS = {
    "plain": {},
    "random": {"exact": False},
    "no bias": {"bias": False},
    "skip_bias_add": {"skip_bias_add": True},
    "frozen": {"frozen": True},
    "input without gradient": {"input_grad": False},
    "frozen and input without gradient": {"frozen": True, "input_grad": False},
    "bf16": {"dtype": torch.bfloat16},
}
COLUMN_OPTIONS = {
    "gather_output": {"gather_output": True, "skip_bias_add": True},
    "runtime gather": {"runtime_gather_output": True},
    "no runtime gather": {"gather_output": True, "runtime_gather_output": False},
    "weight passed": {"weight_passed": True, "bias": False},
    "weight passed, frozen": {"weight_passed": True, "frozen": True},
}
WHOLE = {"sequence_parallel": False}
CASES = {
    **{f"column, {name}": Case("column", **options) for name, options in (OPTIONS | COLUMN_OPTIONS).items()},
    **{f"row, {name}": Case("row", **options) for name, options in OPTIONS.items()},
}
CASES |= {f"{name}, whole": replace(case, options=WHOLE) for name, case in CASES.items() if "runtime" not in name}
CASES |= {
    f"row, splits its input{more}": Case("row", splits_input=True, options=WHOLE, **options)
    for more, options in (("", {}), (", frozen", {"frozen": True}), (", no input gradient", {"input_grad": False}))
}


@pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
@on_ranks("world")
def test_against_stock_and_float64(case: Case) -> None:
    with megatron(tp=dist.get_world_size()):
        w = whole(case)
        layer = build(case, w)
        stock = run(case, layer, w)
        with flux(STRICT) as seen:
            ours = run(case, layer, w)
        assert (seen.active_layers, seen.fallbacks) == (1, {})
        assert seen.calls == expected_calls(case)
        tolerance = 0 if case.exact else TOLERANCE
        compare(case, "flux against stock", ours, stock, tolerance)
        compare(case, "flux against float64", ours, w.expected, tolerance)


@pytest.mark.parametrize("kind", ["column", "row"])
@on_ranks("world2")
def test_main_grad_is_the_forwards(kind: str) -> None:
    case = Case(kind, bias=False)
    with megatron(tp=dist.get_world_size()):
        w = whole(case)
        layer = build(case, w)
        layer.gradient_accumulation_fusion = True
        first, second = (torch.zeros(layer.weight.shape) for _ in range(2))
        with flux(STRICT):
            layer.weight.main_grad = first
            y, _ = layer(w.x)
            layer.weight.main_grad = second
            y.backward(w.dy)
        require_close("the main_grad of the forward", first, w.expected.dw, 0)
        assert not second.any()


@on_ranks("world2")
def test_a_weight_used_twice() -> None:
    """One weight in two calls of one graph, as with MTP's output layer; also passed to a layer that has none."""
    case = Case("column", bias=False, weight_passed=True)
    with megatron(tp=dist.get_world_size()):
        w = whole(case)
        layer = build(case, w)
        weight = torch.nn.Parameter(w.weight.clone())

        def backward() -> torch.Tensor:
            x = w.x.clone().requires_grad_()
            weight.grad = None
            y = layer(x, weight=weight)[0] + 2 * layer(3 * x, weight=weight)[0]
            y.backward(w.dy)
            return x.grad

        dx = backward()
        dw = weight.grad
        require_close("stock's dw", dw, 7 * w.expected.dw, 0)
        for fusion in (False, True):
            layer.gradient_accumulation_fusion = fusion
            weight.main_grad = torch.zeros(weight.shape)
            with flux(STRICT):
                require_close("dx", backward(), dx, 0)
            require_close("dw", weight.main_grad if fusion else weight.grad, dw, 0)
