"""megatron-core's ColumnParallelLinear and RowParallelLinear, patched against stock."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FluxConfig
from tests.distributed.data import TOLERANCE, integers, normals, require_close
from tests.distributed.megatron_world import flux, megatron, model_config
from tests.distributed.pool import WorkerPool, on_ranks

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
    summed: bool = True
    """Of a column layer, by itself: an adapter's first one leaves dx to whoever has gathered its input."""
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


def cut(t: torch.Tensor, dim: int) -> torch.Tensor:
    return t.chunk(dist.get_world_size(), dim=dim)[dist.get_rank()].contiguous()


Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def operands(case: Case) -> Given:
    """This rank's x, dy, weight and bias, cut from the whole layer's."""
    s = S_PER_RANK * dist.get_world_size()
    shapes = (s, B, IN), (s, B, OUT), (OUT, IN), (OUT,)
    x, dy, weight, bias = (case.make(*shape, seed=1 + i) for i, shape in enumerate(shapes))
    if case.kind == "column":
        x = cut(x, 0) if case.sequence_parallel else x
        return x, dy if case.gathers else cut(dy, 2), cut(weight, 0), cut(bias, 0)
    # Row: every rank has the whole bias, and sees the gradient of the rows of the sequence that it has.
    dy = cut(dy, 0) if case.sequence_parallel else dy
    return x if case.splits_input else cut(x, 2), dy, cut(weight, 1), bias


def build(case: Case, given: Given) -> torch.nn.Module:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    config = model_config(params_dtype=case.dtype, **case.options)
    common = {"config": config, "init_method": config.init_method, "bias": case.bias}
    common["skip_bias_add"] = case.skip_bias_add
    if case.kind == "column":
        more = {"gather_output": case.gather_output, "skip_weight_param_allocation": case.weight_passed}
        more["disable_grad_reduce"] = not case.summed
        layer = ColumnParallelLinear(IN, OUT, **common, **more)
    else:
        layer = RowParallelLinear(IN, OUT, input_is_parallel=not case.splits_input, **common)
    with torch.no_grad():
        for parameter, value in zip((layer.weight, layer.bias), given[2:], strict=True):
            if parameter is not None:
                parameter.copy_(value).requires_grad_(not case.frozen)
    return layer


def run(case: Case, layer: torch.nn.Module, given: Given) -> dict[str, torch.Tensor]:
    """Results and gradients of a forward and backward."""
    x, dy = given[0].clone().requires_grad_(case.input_grad), given[1]
    weight, kwargs = layer.weight, dict[str, Any]()
    if case.weight_passed:
        weight = kwargs["weight"] = torch.nn.Parameter(given[2].clone(), requires_grad=not case.frozen)
    if case.runtime_gather_output is not None:
        kwargs["runtime_gather_output"] = case.runtime_gather_output
    layer.zero_grad(set_to_none=True)
    y, bias = layer(x, **kwargs)
    assert y.requires_grad == (case.input_grad or not case.frozen)
    if y.requires_grad:
        y.backward(dy)
    db = None if layer.bias is None else layer.bias.grad
    found = {"y": y.detach(), "bias": bias, "dx": x.grad, "dw": weight.grad, "db": db}
    return {name: t for name, t in found.items() if t is not None}


def expected_calls(case: Case) -> dict[str, int]:
    """Operator calls of one forward and backward."""
    trained = not case.frozen
    if not case.sequence_parallel:
        calls = {"gemm_all_reduce": int(case.kind == "row" or (case.input_grad and case.summed))}
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
    f"column of an adapter{more}": Case(
        "column", bias=False, gather_output=True, summed=False, options=WHOLE, **options
    )
    for more, options in (("", {}), (", frozen", {"frozen": True}))
}
CASES |= {
    f"row, splits its input{more}": Case("row", splits_input=True, options=WHOLE, **options)
    for more, options in (("", {}), (", frozen", {"frozen": True}), (", no input gradient", {"input_grad": False}))
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_patched_equals_stock(world2: WorkerPool, case: Case) -> None:
    world2.run(rank_patched, case)


def test_patched_equals_stock_on_four_ranks(world4: WorkerPool) -> None:
    for kind in ("column", "row"):
        for more in ("", ", whole"):
            world4.run(rank_patched, CASES[f"{kind}, plain{more}"])


def rank_patched(case: Case) -> None:
    with megatron(tp=dist.get_world_size()):
        given = operands(case)
        layer = build(case, given)
        stock = run(case, layer, given)
        with flux(STRICT) as seen:
            ours = run(case, layer, given)
        assert (seen.active_layers, seen.fallbacks) == (1, {})
        assert seen.calls == expected_calls(case)
        wanted = {"y", *["bias"] * (case.bias and case.skip_bias_add), *["dx"] * case.input_grad}
        if not case.frozen:
            wanted |= {"dw", *["db"] * (case.bias and not case.skip_bias_add)}
        assert ours.keys() == stock.keys() == wanted
        for name, expected in stock.items():
            assert ours[name].dtype == expected.dtype == case.dtype
            require_close(name, ours[name], expected, 0 if case.exact else TOLERANCE)


@pytest.mark.parametrize("kind", ["column", "row"])
@on_ranks("world2")
def test_main_grad_is_the_forwards(kind: str) -> None:
    case = Case(kind, bias=False)
    with megatron(tp=dist.get_world_size()):
        x, dy, *_ = given = operands(case)
        layer = build(case, given)
        dw = run(case, layer, given)["dw"]
        layer.weight.grad, layer.gradient_accumulation_fusion = None, True
        first, second = (torch.zeros(layer.weight.shape) for _ in range(2))
        with flux(STRICT):
            layer.weight.main_grad = first
            y, _ = layer(x)
            layer.weight.main_grad = second
            y.backward(dy)
        require_close("the main_grad of the forward", first, dw, 0)
        assert not second.any()


@on_ranks("world2")
def test_a_weight_used_twice() -> None:
    """One weight in two calls of one graph, as with MTP's output layer; also passed to a layer that has none."""
    case = Case("column", bias=False, weight_passed=True)
    with megatron(tp=dist.get_world_size()):
        given = operands(case)
        layer, weight = build(case, given), torch.nn.Parameter(given[2].clone())

        def backward() -> torch.Tensor:
            x = given[0].clone().requires_grad_()
            weight.grad = None
            y = layer(x, weight=weight)[0] + 2 * layer(3 * x, weight=weight)[0]
            y.backward(given[1])
            return x.grad

        dx = backward()
        dw = weight.grad
        for fusion in (False, True):
            layer.gradient_accumulation_fusion = fusion
            weight.main_grad = torch.zeros(weight.shape)
            with flux(STRICT):
                require_close("dx", backward(), dx, 0)
            require_close("dw", weight.main_grad if fusion else weight.grad, dw, 0)
