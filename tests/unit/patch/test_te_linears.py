"""The replaced methods of the layers over TransformerEngine, without it: what runs stock, what is passed on, what is
installed and taken off again. The layers themselves are in tests/distributed/test_te_layers.py and tests/gpu.
"""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_flux
from megatron_flux import FallbackError, FluxConfig, FluxError, UnsupportedVersionError
from megatron_flux.config import ALL_EXACT, Backends
from megatron_flux.ops import cuda_graphs
from megatron_flux.patch import linears as module
from megatron_flux.patch import megatron_core, patcher, te_seam
from megatron_flux.patch.linears import KEEP, LinearPatch
from megatron_flux.patch.linears import TE_KINDS as KINDS
from megatron_flux.patch.megatron_core import INFERENCE_LAYERS, LINES, TE_LAYERS
from tests.unit.groups import group_of
from tests.unit.te_layers import extension

GROUP = group_of(2)
X = torch.ones(2, 1, 4)


class Layer(torch.nn.Module):
    """What the patch reads of a TransformerEngine layer of megatron-core."""

    def __init__(self, bias: bool = True, skip_bias_add: bool = False, **changes: Any) -> None:
        super().__init__()
        attributes = {
            "config": SimpleNamespace(fp8=None, fp4=None, _cpu_offloading_context=None),
            "parallel_mode": "column",
            "tp_size": 2,
            "tp_group": GROUP,
            "sequence_parallel": True,
            "te_quant_params": None,
            "apply_bias": bias and not skip_bias_add,
            "te_return_bias": bias and skip_bias_add,
            "fuse_wgrad_accumulation": False,
            "is_first_microbatch": True,
            "disable_parameter_transpose_cache": False,
        }
        for name, value in {**attributes, **changes}.items():
            setattr(self, name, value)
        self.weight = torch.nn.Parameter(torch.ones(3, 4))
        self.bias = torch.nn.Parameter(torch.ones(3)) if bias else torch.Tensor()
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(4))
        self.layer_norm_bias = None


class Seam:
    """A TransformerEngine that has its own reason, or none."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def why_stock(self, layer: Any, weight: torch.Tensor, fp8: bool) -> str | None:
        assert not fp8
        assert weight is layer.weight
        return self.reason

    def norm(self, layer: Any) -> str:
        return "norm"


@pytest.fixture(params=(LINES[0], LINES[-1]), ids=lambda line: str(line.versions))  # the others are as the first
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A patch of one line whose flux and stock layers say which they are."""
    te = Seam()
    linears = LinearPatch(FluxConfig(backend="reference", fp8=False), request.param, object, te)  # type: ignore[arg-type]
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def flux(name: str) -> Callable[..., torch.Tensor]:
        def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            assert x is X
            calls.append((name, args, kwargs))
            return torch.zeros(2, 1, 3)

        return call

    for name in ("column_parallel_linear", "row_parallel_linear"):
        monkeypatch.setattr(module, name, flux(name))

    def stock(layer: Layer, *args: Any, **kwargs: Any) -> str:
        assert layer.is_first_microbatch is True  # stock itself ends the first micro-batch
        return "stock"

    forwards = {kind: linears.te_forward(kind, stock) for kind in KINDS}
    return SimpleNamespace(linears=linears, te=te, calls=calls, line=request.param, forwards=forwards)


def require_stock(world: SimpleNamespace, kind: str, reason: str, call: Callable[[], Any]) -> None:
    world.linears.config = FluxConfig(fp8=False)
    assert call() == "stock"
    assert dict(world.linears.fallbacks) == {(kind, reason): 1}
    assert world.calls == []
    assert world.linears.active_layers == 0
    world.linears.config = FluxConfig(strict=True, fp8=False)
    with pytest.raises(FallbackError) as error:
        call()
    assert f"{kind} layer" in str(error.value)
    assert reason in str(error.value)


def configured(**attributes: Any) -> Layer:
    layer = Layer()
    vars(layer.config).update(attributes)
    return layer


def on_the_weight(**attributes: Any) -> Layer:
    layer = Layer()
    for name, value in attributes.items():
        setattr(layer.weight, name, value)
    return layer


REASONS: dict[str, Callable[[], Layer]] = {
    "expert layer with explicit communication": lambda: Layer(parallel_mode=None, tp_size=1),
    "tp = 1": lambda: Layer(tp_size=1, sequence_parallel=False),
    "no tensor-parallel group": lambda: Layer(tp_group=None),
    "quantization of single modules (te_quant_params)": lambda: Layer(te_quant_params=object()),
    "fp8 (hybrid)": lambda: configured(fp8="hybrid"),
    "fp4 (e2m1)": lambda: configured(fp4="e2m1"),
    "activation offloading to the CPU": lambda: configured(
        _cpu_offloading_context=SimpleNamespace(inside_context=True)
    ),
    "activation offloading to the CPU (fine_grained_activation_offloading)": lambda: configured(
        fine_grained_activation_offloading=True
    ),
    "Megatron-FSDP weight": lambda: on_the_weight(__fsdp_param__=True),
    "dtypes torch.float32 and torch.bfloat16": lambda: Layer().bfloat16(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reason", list(REASONS))
def test_reasons(world: SimpleNamespace, kind: str, reason: str) -> None:
    layer = REASONS[reason]()
    require_stock(world, kind, reason, lambda: world.forwards[kind](layer, X))


@pytest.mark.parametrize("kind", KINDS)
def test_what_transformer_engine_must_run_itself(world: SimpleNamespace, kind: str) -> None:
    world.te.reason, layer = "userbuffers", Layer()
    require_stock(world, kind, "userbuffers", lambda: world.forwards[kind](layer, X))


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_that_are_not_known(world: SimpleNamespace, kind: str) -> None:
    layer, reason = Layer(), "forward was called with unknown argument(s) [1, 'mode']"
    require_stock(world, kind, reason, lambda: world.forwards[kind](layer, X, 1, mode=2))


def test_a_norm_of_another_dtype(world: SimpleNamespace) -> None:
    layer = Layer()
    layer.layer_norm_weight.data = layer.layer_norm_weight.data.bfloat16()
    reason = "dtypes torch.float32 and torch.bfloat16 (norm)"
    require_stock(world, "TE norm column", reason, lambda: world.forwards["TE norm column"](layer, X))


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainable_bias_on_a_frozen_weight(world: SimpleNamespace, kind: str) -> None:
    layer, reason = Layer(), "trainable bias on a frozen weight"
    layer.weight.requires_grad_(False)
    if kind == "TE row":  # its bias is added outside of the linear: it has its gradient
        world.forwards[kind](layer, X)
        assert len(world.calls) == 1
    else:
        require_stock(world, kind, reason, lambda: world.forwards[kind](layer, X))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_a_line(world: SimpleNamespace, kind: str) -> None:
    if not world.line.added:
        world.forwards[kind](on_the_weight(gtp_remat_size=2), X)
        assert len(world.calls) == 1
        return
    for neutral in (None, 1):
        world.forwards[kind](on_the_weight(gtp_remat_size=neutral), X)
    assert len(world.calls) == 2
    world.calls.clear()
    world.linears._active.clear()
    layer, reason = on_the_weight(gtp_remat_size=2), "unsupported weight attribute gtp_remat_size=2"
    require_stock(world, kind, reason, lambda: world.forwards[kind](layer, X))


@pytest.mark.parametrize("kind", KINDS)
def test_an_unusable_transformer_engine(kind: str) -> None:
    reason = "TransformerEngine 2.8.0, supported is >=2.9,<2.21"
    linears = LinearPatch(FluxConfig(), LINES[0], lambda: None, reason)
    assert linears.te_forward(kind, lambda *args: "stock")(Layer(), X) == "stock"
    assert dict(linears.fallbacks) == {(kind, reason): 1}


# What is passed on


def expected_arguments(kind: str, layer: Layer, bias: torch.Tensor | None) -> tuple[Any, ...]:
    return (layer.weight, GROUP) if kind == "TE row" else (layer.weight, bias, GROUP)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize(("bias", "skip"), [(False, True), (False, False), (True, True), (True, False)])
def test_what_is_passed_on(world: SimpleNamespace, kind: str, fusion: bool, bias: bool, skip: bool) -> None:
    layer = Layer(bias=bias, skip_bias_add=skip, fuse_wgrad_accumulation=fusion, sequence_parallel=not fusion)
    y, returned = world.forwards[kind](layer, X)
    assert returned is (layer.bias if bias and skip else None)
    added = bias and not skip and kind == "TE row"  # the others add it inside
    assert torch.equal(y, torch.full((2, 1, 3), float(added)))
    [(_, args, kwargs)] = world.calls
    wanted = expected_arguments(kind, layer, layer.bias if bias and not skip else None)
    assert len(args) == len(wanted)
    assert all(one is other for one, other in zip(args, wanted, strict=True))
    options = {"gradient_accumulation_fusion": fusion, "overwrite_main_grad": True, "sequence_parallel": not fusion}
    options |= {"backend": Backends.of("reference"), "wires": ALL_EXACT}
    if kind != "TE row":
        options |= {"epilogue_bias": True, "gather_ahead": True}  # the bias as in stock's GEMM
        options |= {"keep_gathered": None, "keep_gathered_bytes": None}
    if kind == "TE norm column":
        norm = kwargs.pop("norm")
        assert (norm[0], norm[1] is layer.layer_norm_weight, norm[2]) == ("norm", True, None)
    assert kwargs == options
    assert world.linears.active_layers == 1
    assert not world.linears.fallbacks


@pytest.mark.parametrize("kind", ["TE norm column", "TE column"])
def test_whether_to_gather_ahead_is_passed_on(world: SimpleNamespace, kind: str) -> None:
    keeping = {"keep_gathered": True, "keep_gathered_bytes": 4096}
    world.linears.config = FluxConfig(backend="reference", gather_ahead=False, **keeping)
    world.forwards[kind](Layer(), X)
    assert world.calls[0][2]["gather_ahead"] is False
    assert keeping.items() <= world.calls[0][2].items()
    layer = Layer()
    layer.__dict__[KEEP] = False  # as set_keep_gathered does
    world.forwards[kind](layer, X)
    assert world.calls[1][2]["keep_gathered"] is False


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_graph_no_micro_batch_replaces_main_grad(
    world: SimpleNamespace, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "capture_id", lambda x: 1 if x is X else None)
    layer = Layer()
    world.forwards[kind](layer, X)
    assert world.calls[0][2]["overwrite_main_grad"] is False
    assert layer.is_first_microbatch is False
    on_request = on_the_weight(overwrite_main_grad=True)
    world.forwards[kind](on_request, X)
    assert world.calls[1][2]["overwrite_main_grad"] is True


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_switch_the_mode(world: SimpleNamespace, kind: str) -> None:
    try:
        world.forwards[kind](configured(cuda_graph_impl="transformer_engine"), X)
        assert cuda_graphs.capturing(X)
    finally:
        world.linears.close()
    assert not cuda_graphs.capturing(X)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_micro_batch_replaces_main_grad(world: SimpleNamespace, kind: str) -> None:
    layer = Layer()

    def overwrites() -> bool:
        world.calls.clear()
        world.forwards[kind](layer, X)
        assert layer.is_first_microbatch is False
        return world.calls[0][2]["overwrite_main_grad"]

    assert overwrites() is True
    assert overwrites() is False
    layer.is_first_microbatch = layer.disable_parameter_transpose_cache = True
    assert overwrites() is False  # stock then has no first micro-batch
    layer.weight.overwrite_main_grad = True
    assert overwrites() is True


# Installing


@pytest.fixture
def imitated(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    import megatron.core.tensor_parallel.layers  # noqa: F401 - before its extension is exchanged

    made = extension()
    monkeypatch.setitem(sys.modules, TE_LAYERS, made)
    monkeypatch.setattr(te_seam, "load", lambda: SimpleNamespace(version="2.11.0"))
    yield made
    megatron_flux.unpatch()


CLASSES = ("TELayerNormColumnParallelLinear", "TEColumnParallelLinear", "TERowParallelLinear", "TELinear")


def test_three_classes_are_replaced_and_restored_to_the_identical_objects(
    imitated: types.ModuleType, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    caplog.set_level(logging.INFO, logger="megatron_flux")
    before = [dict(vars(getattr(imitated, name))) for name in CLASSES]
    megatron_flux.patch()
    now = [vars(getattr(imitated, name)) for name in CLASSES]
    assert [[k for k in n if n[k] is not b.get(k)] for n, b in zip(now, before, strict=True)] == [["forward"]] * 3 + [
        []
    ]
    assert imitated.TERowParallelLinear.forward.__doc__ == "Forward."
    paths = [f"{TE_LAYERS}.{name}.forward" for name in CLASSES[:3]]
    assert megatron_flux.report()["replaced"][2:] == paths
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert all(path in said for path in paths)
    assert "5 replacements in megatron-core" in said
    megatron_flux.unpatch()
    assert [dict(vars(getattr(imitated, name))) for name in CLASSES] == before
    assert imitated.TERowParallelLinear().forward(1) == "stock"


def test_somebody_elses_later_replacement_is_not_thrown_away(imitated: types.ModuleType) -> None:
    megatron_flux.patch()
    flux = vars(imitated.TERowParallelLinear)["forward"]
    imitated.TERowParallelLinear.forward = theirs = lambda self, x: x
    with pytest.raises(FluxError, match=r"TERowParallelLinear\.forward was replaced after"):
        megatron_flux.unpatch()
    assert vars(imitated.TERowParallelLinear)["forward"] is theirs
    imitated.TERowParallelLinear.forward = flux


@pytest.mark.parametrize("version", ["0.15.3", "0.16.1", "0.17.0", "0.18.2"])
def test_a_layer_with_another_signature_is_refused_and_nothing_replaced(
    imitated: types.ModuleType, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(megatron_core, "installed_megatron_core", lambda: version)
    exec("def forward(self, hidden): return hidden", vars(imitated))  # the release's own, as its code says
    imitated.TELinear.forward = imitated.forward
    before = [dict(vars(getattr(imitated, name))) for name in CLASSES]
    with pytest.raises(UnsupportedVersionError, match=r"TEColumnParallelLinear\.forward .* lacks the parameter"):
        megatron_flux.patch()
    assert not megatron_flux.is_patched()
    assert [dict(vars(getattr(imitated, name))) for name in CLASSES] == before


def test_an_unsupported_release_is_patched_to_say_so(
    imitated: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise UnsupportedVersionError("TransformerEngine 2.8.0, supported is >=2.9,<2.21")

    monkeypatch.setattr(te_seam, "load", refuse)
    megatron_flux.ops.stats.reset()
    with megatron_flux.patched():
        assert imitated.TERowParallelLinear().forward(X) == "stock"
        assert megatron_flux.report()["fallbacks"] == {"TE row: TransformerEngine 2.8.0, supported is >=2.9,<2.21": 1}


def test_without_transformer_engine_its_layers_are_left_alone(imitated: types.ModuleType) -> None:
    imitated.HAVE_TE = False
    with megatron_flux.patched():
        assert len(megatron_flux.report()["replaced"]) == 2
        assert "forward" not in vars(imitated.TERowParallelLinear)
    assert patcher._linears is None


@pytest.fixture
def optimized(imitated: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """megatron-core's inference-optimized layers, as far as the patch looks at them; in training they call the base."""
    made = types.ModuleType(INFERENCE_LAYERS)

    def layer(name: str, base: type) -> type:
        def forward(self: Any, x: object) -> object:
            return base.forward(self, x) if self.training else "optimized"

        bases = (base, torch.nn.Module)
        return type(name, bases, {"forward": forward, "__module__": INFERENCE_LAYERS})

    for name in CLASSES:
        setattr(
            made, name.replace("TE", "Inference", 1), layer(name.replace("TE", "Inference", 1), getattr(imitated, name))
        )
    made.SomethingElse = type("SomethingElse", (), {"__module__": INFERENCE_LAYERS})
    made.TERowParallelLinear = imitated.TERowParallelLinear  # imported there
    monkeypatch.setitem(sys.modules, INFERENCE_LAYERS, made)
    return made


def test_inference_optimized_layers_run_stock_and_are_counted(
    optimized: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name.replace("TE", "Inference", 1) for name in CLASSES[:3]]
    before = [dict(vars(getattr(optimized, name))) for name in names]
    layers = [getattr(optimized, name)().eval() for name in names]
    monkeypatch.setattr(LinearPatch, "why_stock_te", lambda self, kind, *_: f"base of {kind}")
    with megatron_flux.patched():
        assert megatron_flux.report()["replaced"][5:] == [f"{INFERENCE_LAYERS}.{name}.forward" for name in names]
        assert [layer(X) for layer in layers] == ["optimized"] * 3
        assert optimized.InferenceLinear().eval()(X) == "optimized"  # no tensor-parallel layer
        said = module.INFERENCE_OPTIMIZED
        assert megatron_flux.report()["fallbacks"] == {f"{kind}: {said}": 1 for kind in KINDS}
        layers[2].train()
        assert layers[2](X) == "stock"
        assert megatron_flux.report()["fallbacks"][f"TE row: {said}"] == 1
        assert megatron_flux.report()["fallbacks"]["TE row: base of TE row"] == 1
    assert [dict(vars(getattr(optimized, name))) for name in names] == before
    with (
        megatron_flux.patched(FluxConfig(strict=True)),
        pytest.raises(FallbackError, match="inference-optimized"),
    ):
        layers[0](X)
    with megatron_flux.patched(FluxConfig(strict=True)):
        layers[0].__dict__[module.CHOICE] = "stock"
        assert layers[0](X) == "optimized"
