"""Layers over TransformerEngine built and run the same way on CPUs and on GPUs, and what ranks check of them."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux import FluxConfig
from tests.distributed import te_stand_in
from tests.distributed.data import normals, require_close
from tests.distributed.megatron_world import flux, megatron, model_config, on_gpu

# `auto` would tune every small shape on GPUs; what is compared here are the layers.
STRICT = FluxConfig(strict=True, backend="reference")

CLASSES = {
    "norm column": "TELayerNormColumnParallelLinear",
    "column": "TEColumnParallelLinear",
    "row": "TERowParallelLinear",
}

NORMS: dict[str, dict[str, Any]] = {
    "LayerNorm": {"normalization": "LayerNorm"},
    "RMSNorm": {"normalization": "RMSNorm"},
    "LayerNorm, zero-centred": {"normalization": "LayerNorm", "layernorm_zero_centered_gamma": True},
    "RMSNorm, zero-centred": {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": True},
}


@dataclass(frozen=True)
class Sizes:
    """The sequence is ``tp * s_per_rank``; ``k`` and ``n`` are the whole layer's. GPUs' GEMMs want aligned ones."""

    s_per_rank: int
    b: int
    k: int
    n: int


@dataclass(frozen=True)
class Case:
    """One way to build and call a layer."""

    kind: str
    bias: bool = True
    skip_bias_add: bool = False
    fusion: bool = False
    dtype: torch.dtype = torch.float32
    micro_batches: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    sizes: Sizes | None = None
    delayed: bool = False
    """wgrad is computed by ``backward_dw``."""

    @property
    def size(self) -> Sizes:
        return self.sizes or sizes()


def sizes() -> Sizes:
    return Sizes(64, 2, 256, 384) if on_gpu() else Sizes(3, 2, 8, 12)


def tolerance(dtype: torch.dtype) -> float:
    if dtype == torch.bfloat16:
        return 2**-6
    return 2e-3 if on_gpu() else 1e-5


def model_tolerance() -> float:
    """For gradients of whole models in fp32, through several layers."""
    return 1e-2 if on_gpu() else 1e-5


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return normals(*shape, seed=seed, dtype=dtype).to("cuda" if on_gpu() else "cpu")


@contextlib.contextmanager
def te_megatron(tp: int, **more: int) -> Iterator[None]:
    """Set up :func:`megatron` over TransformerEngine."""
    if not on_gpu():
        te_stand_in.install()
    with megatron(tp=tp, **more):
        yield


def build(case: Case) -> torch.nn.Module:
    from megatron.core.extensions import transformer_engine as extension

    config = model_config(
        hidden_size=case.size.k, params_dtype=case.dtype, gradient_accumulation_fusion=case.fusion, **case.options
    )
    # The configuration allows this only beside experts whose communication overlaps; layers read it as they are built.
    config.delay_wgrad_compute = case.delayed
    more = {"input_is_parallel": True} if case.kind == "row" else {"gather_output": False}
    layer = getattr(extension, CLASSES[case.kind])(
        case.size.k,
        case.size.n,
        config=config,
        init_method=config.init_method,
        bias=case.bias,
        skip_bias_add=case.skip_bias_add,
        is_expert=False,
        **more,
    )
    with torch.no_grad():
        for i, (name, parameter) in enumerate(layer.named_parameters()):
            # Weights differ between ranks, parameters that are not sharded must not.
            seed = 10 * i + (100 * (1 + dist.get_rank()) if name == "weight" else 0)
            start = 1.0 if name == "layer_norm_weight" and not layer.zero_centered_gamma else 0.0
            parameter.copy_(start + 0.5 * numbers(*parameter.shape, seed=seed, dtype=case.dtype))
    if case.fusion:
        for parameter in layer.parameters():
            parameter.main_grad = torch.full(parameter.shape, 7.0, device=parameter.device)
            parameter.grad_added_to_main_grad = False
    return layer


def mark_bias(layer: Any) -> None:
    """Mark the bias as TransformerEngine does where wgrad is delayed; on CPUs megatron-core makes another one later."""
    for name in layer.bias_names:
        getattr(layer, name).skip_backward_post_hook = True


def input_of(case: Case, seed: int) -> torch.Tensor:
    """This rank's: rows of the sequence for column layers, columns of all rows for row layers."""
    size, tp = case.size, dist.get_world_size()
    rows, width = (size.s_per_rank * tp, size.k // tp) if case.kind == "row" else (size.s_per_rank, size.k)
    return numbers(rows, size.b, width, seed=seed + 10 * dist.get_rank(), dtype=case.dtype)


def gradient_of(y: torch.Tensor, seed: int) -> torch.Tensor:
    return numbers(*y.shape, seed=seed + 10 * dist.get_rank(), dtype=y.dtype)


def run(
    case: Case, layer: torch.nn.Module, call: Callable[[torch.Tensor], Any] | None = None
) -> dict[str, torch.Tensor]:
    """Forward and backward over the micro-batches: results, gradients and what is in main_grad."""
    found: dict[str, torch.Tensor] = {}
    layer.zero_grad(set_to_none=True)
    for i in range(case.micro_batches):
        x = input_of(case, 7 + i).requires_grad_()
        y, bias = (call or layer)(x)
        assert (bias is not None) == (case.bias and case.skip_bias_add)
        assert bias is None or bias is layer.bias
        y.backward(gradient_of(y, 70 + i))
        found |= {f"y{i}": y.detach(), f"dx{i}": x.grad}
        assert layer.is_first_microbatch is False
    for name, parameter in layer.named_parameters():
        fused = case.fusion and name == "weight"
        assert getattr(parameter, "grad_added_to_main_grad", False) is (fused and parameter.requires_grad)
        gradient = parameter.main_grad if fused else parameter.grad
        if gradient is not None:
            found[name] = gradient.clone()
    return found


def run_frozen(case: Case, layer: Any, names: tuple[str, ...], input_grad: bool, how: Any = None) -> dict[str, Any]:
    """Results and gradients of a layer with these parameters frozen; ``how``: what its forward runs in."""
    for name in names:
        getattr(layer, name).requires_grad_(False)
    x = input_of(case, 7).requires_grad_(input_grad)
    with how or contextlib.nullcontext():
        y, _ = layer(x)
    assert y.requires_grad
    y.backward(gradient_of(y, 8))
    # TransformerEngine computes a frozen norm's gradient, and autograd drops it.
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None and name not in names}
    return {"y": y.detach(), **gradients, **({"dx": x.grad} if input_grad else {})}


def require_same(case: Case, stock: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> None:
    assert stock.keys() == ours.keys()
    for name, expected in stock.items():
        assert ours[name].dtype == expected.dtype
        require_close(f"{case}: {name}", ours[name], expected, tolerance(case.dtype))


def rank_case(case: Case, backend: str = "reference") -> dict[str, Any]:
    with te_megatron(dist.get_world_size()):
        stock = run(case, build(case))
        layer = build(case)
        with flux(FluxConfig(strict=True, backend=backend)) as seen:
            ours = run(case, layer)
        require_same(case, stock, ours)
        assert (seen.active_layers, seen.fallbacks) == (1, {})
        return seen.calls


def rank_small_bias(kind: str, options: dict[str, Any]) -> None:
    """A result of 257 lies between two numbers of bf16: a bias of 1/64 decides, unless it comes after the rounding."""
    case, small = Case(kind, dtype=torch.bfloat16, options=options), 1 / 64

    def forward(bias: float) -> torch.Tensor:
        layer = build(case)
        with torch.no_grad():
            layer.weight.zero_()
            layer.weight[:, 0], layer.weight[:, 1] = 255, 2
            layer.bias.fill_(bias)
            if kind == "norm column":  # every normed element is 1, as x is without a norm
                layer.layer_norm_weight.zero_()
                layer.layer_norm_bias.fill_(1)
            return layer(torch.ones_like(input_of(case, 7)))[0].float()

    with te_megatron(dist.get_world_size()):
        stock = forward(small)
        with flux(STRICT) as seen:
            ours, rounded = forward(small), forward(0)
        assert seen.calls == ({} if options else {"all_gather_gemm/reference": 2})
    after = (rounded + small).bfloat16().float()
    assert (stock.mean(), after.mean()) == (258, 256)
    assert ours.mean() == stock.mean(), f"TE {kind}: mean {ours.mean()}, stock's {stock.mean()}: bias after rounding?"
    assert torch.equal(ours, stock)


def setting(**attributes: Any) -> Callable[[Any], Any]:
    """Return a change that sets ``attributes`` of a layer."""

    def change(layer: Any) -> Any:
        for name, value in attributes.items():
            setattr(layer, name, value)
        return contextlib.nullcontext()

    return change
