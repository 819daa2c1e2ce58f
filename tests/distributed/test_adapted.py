"""Adapters that run as one function: numbers against TP 1, what ranks exchange, and where their linears run instead."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_flux import FluxConfig, report, set_backend
from megatron_flux.layers import adapter as of_layers
from megatron_flux.train.shims import gradient_accumulation_fusion
from tests.distributed import te_stand_in
from tests.distributed.megatron_world import flux
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.te_cases import Case, Sizes, build, numbers, te_megatron
from tests.distributed.twins import NEEDS_TRITON, PLANS, registered

pytestmark = te_stand_in.needed

STRICT = FluxConfig(strict=True, backend="reference")
RANK, ALPHA, EPS = 8, 12, 1e-5  # a scale that bf16 has, and which is no power of two
Numbers = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Adapted:
    """A linear with an adapter."""

    row: bool = False
    sequence_parallel: bool = True
    dtype: torch.dtype = torch.bfloat16
    fusion: bool = False
    trained: str = "ab"
    need_dx: bool = True
    micro_batches: int = 1
    sizes: Sizes = field(default=Sizes(8, 2, 32, 48))

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Of all tensors, unsharded."""
        n, k, m = self.sizes.n, self.sizes.k, self.sizes.s_per_rank * dist.get_world_size()
        return {"weight": (n, k), "a": (RANK, k), "b": (n, RANK), "x": (m, k), "dy": (m, n)}

    def whole(self, name: str) -> torch.Tensor:
        """Return a tensor with the micro-batch as its second dimension, if it has one."""
        rows, columns = self.shapes()[name]
        shape = (rows, self.sizes.b, columns) if name in ("x", "dy") else (rows, columns)
        return (0.3 * numbers(*shape, seed=len(name) + ord(name[0]))).to(self.dtype)

    def mine(self, name: str, t: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor or of its gradient."""
        row, by_rows = self.row, self.sequence_parallel
        dims = {"weight": -1 if row else 0, "a": -1 if row else 0, "b": 0}
        dims |= {"x": -1 if row else 0 if by_rows else None, "y": (0 if by_rows else None) if row else -1}  # type: ignore[dict-item]
        dim = dims[name.removeprefix("d")]
        return t if dim is None else t.chunk(dist.get_world_size(), dim)[dist.get_rank()]

    def oracle(self) -> Numbers:
        """Results in fp32, of one process."""
        p = {name: self.whole(name).float().requires_grad_() for name in ("weight", "a", "b", "x")}
        x = p["x"] if self.row else F.rms_norm(p["x"], (self.sizes.k,), torch.ones(self.sizes.k), EPS)
        y = x @ p["weight"].t() + ALPHA / RANK * (x @ p["a"].t()) @ p["b"].t()
        for _ in range(self.micro_batches):
            y.backward(self.whole("dy").float(), retain_graph=True)
        gradients = {f"d{name}": p[name].grad for name in ("x", "a", "b")}
        return {"y": y.detach()} | {name: t for name, t in gradients.items() if t is not None}

    def build(self) -> Any:
        from megatron_flux.train.lora import AdaptedLinear, Adapter

        options: dict[str, Any] = {"sequence_parallel": self.sequence_parallel, "bf16": self.dtype == torch.bfloat16}
        options |= {"normalization": "RMSNorm", "layernorm_epsilon": EPS}
        case = Case("row" if self.row else "norm column", False, dtype=self.dtype, options=options, sizes=self.sizes)
        base = build(case).requires_grad_(False)
        base.config.gradient_accumulation_fusion = self.fusion  # type: ignore[union-attr]
        name = "linear_proj" if self.row else "linear_fc1"
        model: Any = AdaptedLinear(base, Adapter(name, base, base.config, RANK, ALPHA, torch.nn.init.zeros_))
        if not self.row:
            torch.nn.init.ones_(base.layer_norm_weight)  # type: ignore[arg-type]
        for name, parameter in self.parameters(model):
            with torch.no_grad():
                parameter.copy_(self.mine(name, self.whole(name)))
            parameter.requires_grad_(name in self.trained)
            if self.fusion:
                parameter.main_grad = torch.full(parameter.shape, 2.0)
                parameter.grad_added_to_main_grad = False
        return model

    def parameters(self, model: Any) -> Iterator[tuple[str, Any]]:
        yield "weight", model.to_wrap.weight
        yield from (("a", model.adapter.linear_in.weight), ("b", model.adapter.linear_out.weight))

    def results(self, model: Any) -> Numbers:
        x = self.mine("x", self.whole("x")).clone().requires_grad_(self.need_dx)
        forwards = [model(x) for _ in range(self.micro_batches)]
        for y, bias in forwards:
            assert bias is None
            y.backward(self.mine("dy", self.whole("dy")))
        found = {"y": y.detach()} | ({"dx": x.grad} if self.need_dx else {})
        for name, parameter in self.parameters(model):
            if name in self.trained:
                assert not self.fusion or parameter.grad_added_to_main_grad
                found[f"d{name}"] = parameter.main_grad - 2 if self.fusion else parameter.grad
            else:
                assert parameter.grad is None
        return found  # type: ignore[return-value]


def errors(case: Adapted, found: Numbers, want: Numbers) -> dict[str, float]:
    """Return the error of each tensor against the oracle's: relative, in the norm."""
    expected = {name: case.mine(name, want[name]).double() for name in found}
    return {name: float((found[name].double() - t).norm() / t.norm()) for name, t in expected.items()}


def rank_right(case: Adapted, backend: str = "reference") -> dict[str, int]:
    """Check that flux is no further from the oracle than twice stock. Return the calls."""
    from megatron_flux.train.lora import own_gathers

    with te_megatron(dist.get_world_size()), gradient_accumulation_fusion():
        want, model = case.oracle(), case.build()
        with own_gathers(model):  # whose gradients are right
            stock = errors(case, case.results(model), want)
        model = case.build()
        with flux(replace(STRICT, backend=backend)) as seen:
            ours = errors(case, case.results(model), want)
            assert set(report(model)["layers"].values()) == {"flux"}
    assert ours.keys() == stock.keys()
    slack = 1e-6 if case.dtype == torch.float32 else 2**-10
    times = 4 if backend == "twin" else 2  # Triton's interpreter cuts bf16 off instead of rounding
    for name, error in ours.items():
        assert error <= times * stock[name] + slack, f"{case}: {name} is {error:.2e} off, stock {stock[name]:.2e}"
    return seen.calls


COLUMN, ROW = Adapted(), Adapted(row=True)
CALLS = {
    COLUMN: {"all_gather_gemm": 1, "gemm_reduce_scatter": 1, "all_gather": 1, "gemm_all_reduce": 1},
    ROW: {"all_gather_gemm": 1, "gemm_reduce_scatter": 1, "all_gather": 2, "gemm_all_reduce": 1},
    replace(COLUMN, sequence_parallel=False): {"all_gather": 2, "gemm_all_reduce": 2},
    replace(ROW, sequence_parallel=False): {"all_gather": 1, "gemm_all_reduce": 2},
}


@pytest.mark.parametrize(("case", "calls"), CALLS.items(), ids=["column", "row", "column, no SP", "row, no SP"])
def test_gradients_are_those_of_tp_1(te_world2: WorkerPool, case: Adapted, calls: dict[str, int]) -> None:
    expected = {f"{name}/reference": count for name, count in calls.items()}
    for more in ({}, {"dtype": torch.float32}, {"fusion": True, "dtype": torch.float32}):
        for found in te_world2.run(rank_right, replace(case, **more)):
            assert found == expected


@pytest.mark.parametrize("case", CALLS, ids=["column", "row", "column, no SP", "row, no SP"])
def test_a_part_of_the_gradients(te_world2: WorkerPool, te_world4: WorkerPool, case: Adapted) -> None:
    for trained in ("a", "b"):
        for need_dx in (True, False):
            te_world2.run(rank_right, replace(case, trained=trained, need_dx=need_dx))
    te_world4.run(rank_right, case)


@pytest.mark.parametrize("case", CALLS, ids=["column", "row", "column, no SP", "row, no SP"])
@pytest.mark.parametrize("backend", ["chunked", pytest.param("twin", marks=NEEDS_TRITON)])
@on_ranks("te_world2")
def test_other_backends(case: Adapted, backend: str) -> None:
    """Two forwards come before either backward: what is saved must not lie in memory of the group."""
    with registered(PLANS["halves of tiles"]):
        calls = rank_right(replace(case, micro_batches=2, sizes=Sizes(16, 2, 64, 64)), backend)
    assert calls[f"all_gather/{backend}"] == 2 * CALLS[case]["all_gather"]


@pytest.mark.parametrize("how", ["twice", "of x alone", "of A and B alone", "dropout"])
@on_ranks("te_world2")
def test_a_row_parallel_linear_adds_its_adapters_dx(how: str) -> None:
    """In whatever order gradients are asked for; else the adapter gives it itself."""
    case = Adapted(row=True, dtype=torch.float32)
    with te_megatron(2):
        model = case.build()
        leaf = case.mine("x", case.whole("x")).clone().requires_grad_()
        weights = [model.adapter.linear_in.weight, model.adapter.linear_out.weight]
        dy = case.mine("dy", case.whole("dy"))
        with flux(STRICT), contextlib.ExitStack() as stack:
            if how == "dropout":
                form = model.adapter.form._replace(dropout=torch.nn.Identity())
                stack.enter_context(mock.patch.object(type(model.adapter), "form", form))
            y = model(leaf)[0]
        node = y.grad_fn.next_functions[0][0]
        assert type(node).__name__ == "_RowParallelLinearBackward"
        assert y.grad_fn.linear.linear is (None if how == "dropout" else node.linear)
        if how == "of A and B alone":
            torch.autograd.grad(y, weights, dy, retain_graph=True)
        if how == "of x alone":
            (dx,) = torch.autograd.grad(y, [leaf], dy)
        else:
            dx, *_ = torch.autograd.grad(y, [leaf, *weights], dy, retain_graph=how == "twice")
        if how == "twice":
            again, *_ = torch.autograd.grad(y, [leaf, *weights], dy)
            assert torch.equal(again, dx)
        assert node.linear.low_rank is None
        error = errors(case, {"dx": dx}, case.oracle())["dx"]
        assert error < 1e-5


class Arrival:
    """A forward pre-hook of Megatron's DistributedDataParallel (``overlap_param_gather``): parameters come with it."""

    __module__ = "megatron.core.distributed.distributed_data_parallel"

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter, self.sent = parameter, parameter.detach().clone()
        with torch.no_grad():
            parameter.fill_(float("nan"))

    def __call__(self, *_: Any) -> None:
        with torch.no_grad():
            self.parameter.copy_(self.sent)


@pytest.mark.parametrize("row", [False, True], ids=["column", "row"])
@on_ranks("te_world2")
def test_results_stay(row: bool) -> None:
    """Without gradients, while parameters are still gathered, and where a hook of the linear keeps what it has seen."""
    case, seen = Adapted(row=row), []
    with te_megatron(2), flux(STRICT):
        model, x = case.build(), case.mine("x", case.whole("x"))
        want, plain = model(x)[0], model.to_wrap(x)[0]
        plain = plain[0] if isinstance(plain, tuple) else plain
        for without in (torch.no_grad, torch.inference_mode):
            with without():
                assert torch.equal(model(x)[0], want)
        for module in (model.adapter.linear_in, model.adapter.linear_out):
            module.register_forward_pre_hook(Arrival(module.weight))
        assert torch.equal(model(x)[0], want)
        model.to_wrap.register_forward_hook(lambda module, given, result: seen.append(result[0]))
        assert torch.equal(model(x)[0], want)
        (kept,) = seen
        assert torch.equal(kept[0] if isinstance(kept, tuple) else kept, plain)


@on_ranks("te_world2")
def test_a_linear_whose_input_is_changed_on_its_way() -> None:
    """As a quantizer does: the adapter reads what comes before."""
    case = Adapted(row=True, dtype=torch.float32)
    with te_megatron(2):
        model = case.build()
        model.to_wrap.register_forward_pre_hook(lambda module, given: (3 * given[0],))
        stock = case.results(model)["dx"]
        for parameter in model.parameters():
            parameter.grad = None
        with flux(STRICT):
            assert (case.results(model)["dx"] - stock).norm() < 1e-5 * stock.norm()


@pytest.mark.parametrize("case", CALLS, ids=["column", "row", "column, no SP", "row, no SP"])
@on_ranks("te_world2")
def test_gradients_that_are_not_contiguous_and_no_rows(case: Adapted) -> None:
    case = replace(case, dtype=torch.float32)
    with te_megatron(2):
        model = case.build()
        x = case.mine("x", case.whole("x")).clone().requires_grad_()
        inputs = [x, model.adapter.linear_in.weight, model.adapter.linear_out.weight]
        with flux(STRICT):
            dy = numbers(*model(x)[0].shape, seed=3)
            for given in (torch.ones(()).expand(dy.shape), dy.transpose(0, 2).contiguous().transpose(0, 2)):
                want = torch.autograd.grad(model(x)[0], inputs, given.contiguous())
                assert all(map(torch.equal, torch.autograd.grad(model(x)[0], inputs, given), want))
        for context in (contextlib.nullcontext(), flux(STRICT)):
            with context:
                y = model(x.detach()[:0].requires_grad_())[0]
                y.backward(torch.ones_like(y))
            assert not model.adapter.linear_in.weight.grad.any()


class Hook:
    """A forward hook of the module ``__module__``."""

    def __init__(self, module: str) -> None:
        self.__module__, self.seen = module, list[str]()

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        self.seen.append(type(module).__name__)


@pytest.mark.parametrize("row", [False, True], ids=["column", "row"])
@on_ranks("te_world2")
def test_linears_run_where_more_is_asked_for(row: bool) -> None:
    """Then an adapter's numbers are stock's to the bit."""
    case = Adapted(row=row, sequence_parallel=False, dtype=torch.float32)
    with te_megatron(2):
        model = case.build()
        a, b = model.adapter.linear_in, model.adapter.linear_out
        stock = case.results(model)

        def runs_whole() -> bool:
            for parameter in (a.weight, b.weight):
                parameter.grad = None
            with (
                flux(STRICT),
                mock.patch("megatron_flux.patch.adapters.adapted", side_effect=of_layers.adapted) as called,
            ):
                found = case.results(model)
            if not called.called:
                assert all(torch.equal(found[name], t) for name, t in stock.items())
            return called.called

        assert runs_whole()
        for module in (a, b, model.adapter):
            for register in (module.register_forward_hook, module.register_forward_pre_hook):
                handle = register(Hook("another.library"))
                assert not runs_whole()
                handle.remove()
        hook = Hook("megatron.core.distributed.distributed_data_parallel")
        handles = [module.register_forward_pre_hook(hook) for module in (model.adapter, a, b)]
        assert runs_whole()
        assert hook.seen == ["Adapter", type(a).__name__, type(b).__name__]
        for handle in handles:
            handle.remove()
        with mock.patch.object(b, "forward", b.forward):
            assert not runs_whole()
        with mock.patch.object(model.to_wrap, "parallel_mode", None), pytest.raises(Exception, match="explicit"):
            runs_whole()
        set_backend(model, "stock", names="*linear_out")
        assert not runs_whole()
        set_backend(model, None)
        assert runs_whole()
