"""A norm and column-parallel layer with an adapter, as frameworks for fine-tuning build it."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_flux import FluxConfig, report
from tests.distributed.megatron_world import flux, model_config, on_gpu
from tests.distributed.te_cases import Case, Sizes, build, numbers, te_megatron
from tests.distributed.te_fp8_cases import autocast, by_te_checkpoint, fresh, recipe_of

EPS = 1e-5
Numbers = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Lora:
    """One way to build and to run the two."""

    returned: str = "gathered"
    frozen: bool = True  # the layer's parameters
    bias: bool = False
    skip_bias_add: bool = False
    rms: bool = True
    sequence_parallel: bool = True
    dtype: torch.dtype = torch.bfloat16
    recipe: str | None = None
    fusion: bool = False
    recompute: bool = False
    hooks: bool = False
    rank: int = 8
    sizes: Sizes = field(default=Sizes(8, 2, 32, 48))

    @property
    def case(self) -> Case:
        options = {"normalization": "RMSNorm" if self.rms else "LayerNorm", "layernorm_epsilon": EPS}
        options |= {"sequence_parallel": self.sequence_parallel, "bf16": self.dtype == torch.bfloat16}
        more = {"bias": self.bias, "skip_bias_add": self.skip_bias_add, "fusion": self.fusion}
        return Case("norm column", dtype=self.dtype, options=options, sizes=self.sizes, **more)


def whole(lora: Lora) -> Numbers:
    """All parameters, unsharded."""
    k, n, r = lora.sizes.k, lora.sizes.n, lora.rank
    shapes = {"norm": (k,), "weight": (n, k), "a": (r, k), "b": (n, r)}
    shapes |= {} if lora.rms else {"norm_bias": (k,)}
    shapes |= {"bias": (n,)} if lora.bias else {}
    made = {name: 0.3 * numbers(*shape, seed=30 + i) for i, (name, shape) in enumerate(shapes.items())}
    made["norm"] += 1
    return {name: t.to(lora.dtype) for name, t in made.items()}


def input_of(lora: Lora, micro_batch: int) -> torch.Tensor:
    """The whole sequence."""
    size = lora.sizes
    return numbers(size.s_per_rank * dist.get_world_size(), size.b, size.k, seed=7 + micro_batch, dtype=lora.dtype)


def gradient_of(lora: Lora, micro_batch: int) -> torch.Tensor:
    size = lora.sizes
    return numbers(size.s_per_rank * dist.get_world_size(), size.b, size.n, seed=70 + micro_batch, dtype=lora.dtype)


def oracle(lora: Lora, micro_batches: int) -> Numbers:
    """Results and gradients in fp32, of one process."""
    p = {name: t.float().requires_grad_() for name, t in whole(lora).items()}
    found: Numbers = {}
    for i in range(micro_batches):
        x = input_of(lora, i).float().requires_grad_()
        k = (x.shape[-1],)
        h = F.rms_norm(x, k, p["norm"], EPS) if lora.rms else F.layer_norm(x, k, p["norm"], p["norm_bias"], EPS)
        y = h @ p["weight"].t() + (h @ p["a"].t()) @ p["b"].t()
        if lora.bias and not lora.skip_bias_add:
            y = y + p["bias"]
        y.backward(gradient_of(lora, i).float())
        found |= {f"y{i}": y.detach(), f"dx{i}": x.grad}
    return found | {name: t.grad for name, t in p.items() if t.grad is not None}


class Adapter(torch.nn.Module):
    """``b(a(x))`` of two column-parallel linears; the whole ``x`` on every rank."""

    def __init__(self, lora: Lora) -> None:
        super().__init__()
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear

        config = model_config(hidden_size=lora.sizes.k, params_dtype=lora.dtype, sequence_parallel=False)
        made = {"config": config, "init_method": config.init_method, "bias": False}
        gathered = lora.sequence_parallel
        self.a = ColumnParallelLinear(lora.sizes.k, lora.rank, gather_output=True, disable_grad_reduce=gathered, **made)
        self.b = ColumnParallelLinear(lora.rank, lora.sizes.n, gather_output=False, **made)
        self.gathers = lora.sequence_parallel and lora.returned == "local"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        if self.gathers:
            x = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True)
        return self.b(self.a(x)[0])[0]


class Adapted(torch.nn.Module):
    """The layer and its adapter, with this rank's part of the parameters."""

    def __init__(self, lora: Lora) -> None:
        super().__init__()
        self.layer, self.adapter = build(lora.case), Adapter(lora)
        self.layer.return_layernorm_output = True
        self.layer.return_layernorm_output_gathered = lora.returned == "gathered"
        for name, parameter in self.sharded(lora):
            with torch.no_grad():
                parameter.copy_(of_this_rank(name, whole(lora)[name], lora))
            parameter.requires_grad_(name in "ab" or not lora.frozen)

    def sharded(self, lora: Lora) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters by the oracle's names."""
        layer = self.layer
        names = {"norm": layer.layer_norm_weight, "weight": layer.weight, "a": self.adapter.a.weight}
        names |= {"b": self.adapter.b.weight}
        names |= {} if lora.rms else {"norm_bias": layer.layer_norm_bias}
        yield from (names | ({"bias": layer.bias} if lora.bias else {})).items()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.layer(x)
        if len(result) == 3:
            y, bias, norm_output = result
            assert bias is self.layer.bias
        else:
            (y, norm_output), bias = result
            assert bias is None
        return y + self.adapter(norm_output)


def of_this_rank(name: str, t: torch.Tensor, lora: Lora) -> torch.Tensor:
    """The rank's part of a whole tensor of the oracle."""
    tp, rank = dist.get_world_size(), dist.get_rank()
    if name in {"weight", "a", "b", "bias"}:
        return t.chunk(tp)[rank]
    if name.startswith("y"):
        return t.chunk(tp, -1)[rank]
    return t.chunk(tp)[rank] if name.startswith("dx") and lora.sequence_parallel else t


@contextlib.contextmanager
def hooked(wanted: bool) -> Iterator[None]:
    """Saved tensors go somewhere else and come back as others, as in offloading."""
    if not wanted:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        yield


def train(lora: Lora, model: Adapted, micro_batches: int = 2) -> Numbers:
    """All forwards, then all backwards, as in a pipeline: this rank's results and gradients, of the norm summed."""
    call: Callable[[torch.Tensor], torch.Tensor] = model
    if lora.recompute:
        from megatron.core import tensor_parallel

        call = by_te_checkpoint(model) if lora.recipe else lambda x: tensor_parallel.checkpoint(model, False, x)
    inputs, results = [], []
    for i in range(micro_batches):
        x = of_this_rank("dx", input_of(lora, i), lora).clone().requires_grad_()
        with hooked(lora.hooks), autocast(lora.recipe and recipe_of(lora.recipe)):
            inputs.append(x)
            results.append(call(x))
    for i, y in enumerate(results):
        y.backward(of_this_rank("y", gradient_of(lora, i), lora))
    found = {f"y{i}": y.detach() for i, y in enumerate(results)}
    found |= {f"dx{i}": x.grad for i, x in enumerate(inputs)}
    for name, parameter in model.sharded(lora):
        fused = lora.fusion and name == "weight" and not lora.frozen
        gradient = parameter.main_grad if fused else parameter.grad
        if gradient is None:
            continue
        if name.startswith("norm") and lora.sequence_parallel:
            dist.all_reduce(gradient)
        found[name] = gradient
    return found


def errors(lora: Lora, found: Numbers, want: Numbers) -> dict[str, float]:
    """Return the error of ``found`` against the oracle, by name: relative, in the norm."""

    def error(name: str) -> float:
        expected = of_this_rank(name, want[name], lora).double()
        assert found[name].shape == expected.shape, (name, found[name].shape, expected.shape)
        return float((found[name].double() - expected).norm() / expected.norm())

    return {name: error(name) for name in found}


def rank_lora(lora: Lora, backend: str = "reference") -> tuple[dict[str, int], dict[str, Any]]:
    """Check that flux is no further from the oracle than twice stock. Return calls, and what report() counts."""
    right = replace(lora, returned="local")
    with te_megatron(dist.get_world_size()):
        fresh()
        want = oracle(lora, 2)
        stock = errors(right, train(right, Adapted(right)), want)
        fresh()
        with flux(FluxConfig(strict=True, backend=backend, fp8=lora.recipe is not None)) as seen:
            model = Adapted(lora)
            ours = errors(lora, train(lora, model), want)
            counted = report()["norm_gradients"]
        fresh()
    assert ours.keys() == stock.keys()
    trained = {"a", "b"} if lora.frozen else {"a", "b", "norm", "weight"}
    assert trained <= ours.keys()
    slack = 1e-6 if lora.dtype == torch.float32 else 2**-10
    times = 4 if backend == "twin" else 2  # Triton's interpreter cuts bf16 off instead of rounding
    for name, error in ours.items():
        limit = times * stock[name] + (2e-3 if on_gpu() else slack)
        assert error <= limit, f"{lora}: {name} is {error:.2e} off, stock {stock[name]:.2e}"
    assert not [reason for reason in seen.fallbacks if not reason.startswith("operators: ")], seen.fallbacks
    return seen.calls, counted
