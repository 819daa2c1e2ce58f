"""Layers over TransformerEngine in FP8 trained the same way stock and patched, on CPUs and on GPUs."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist

from megatron_flux import FluxConfig, ops
from megatron_flux.ops.fp8_operand import Fp8Operand
from megatron_flux.patch.te_fp8 import SUPPORTED_FP8
from tests.distributed import te_stand_in
from tests.distributed.data import require_close
from tests.distributed.megatron_world import flux, on_gpu
from tests.distributed.te_cases import Case, Sizes, build, gradient_of, input_of, numbers, te_megatron
from tests.distributed.te_stand_in_fp8 import numbers_of

Result = TypeVar("Result")
FP8 = FluxConfig(strict=True, backend="reference", fp8=True)
SIZES = Sizes(64, 2, 256, 384)
"""128 rows per rank, as blocks want them."""
GPU_SIZES = Sizes(256, 2, 1024, 1536)

RECIPES = ("delayed", "tensorwise", "blockwise")
KINDS = ("norm column", "column", "row")
BF16 = 2**-7
"""One result may be rounded up and the other down, of sums of as many partial results as there are ranks."""
GPU = 2**-6
"""Tensor cores add up FP8 products in 14 bits, in another order in every kernel."""


def why_not() -> str | None:
    """Why these tests cannot run with the TransformerEngine of the stand-in, or None."""
    if reason := te_stand_in.why_not():
        return reason
    found = [path.stem.split("-")[1] for path in Path(te_stand_in.SOURCE).glob("transformer_engine-*.dist-info")]
    if not found or found[0] not in SUPPORTED_FP8:
        return f"FP8 is for TransformerEngine {SUPPORTED_FP8}, here is {', '.join(found) or 'none'}"
    return None


needed = te_stand_in.skipped(why_not())
"""The mark of tests over TransformerEngine's layers in FP8."""


def tolerance() -> float:
    return GPU if on_gpu() else BF16


def recipe_of(name: str) -> Any:
    from transformer_engine.common import recipe

    if name == "delayed":
        return recipe.DelayedScaling(amax_history_len=4)
    classes = {
        "tensorwise": "Float8CurrentScaling",
        "blockwise": "Float8BlockScaling",
        "mxfp8": "MXFP8BlockScaling",
        "nvfp4": "NVFP4BlockScaling",
    }
    return getattr(recipe, classes[name])()


def autocast(recipe: Any) -> Any:
    from megatron.core import parallel_state
    from transformer_engine.pytorch import fp8_autocast

    group = parallel_state.get_tensor_model_parallel_group()
    return fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe, fp8_group=group)


def fp8_case(kind: str, **options: Any) -> Case:
    size = GPU_SIZES if dist.is_initialized() and on_gpu() else SIZES
    given = {"fusion": True, "dtype": torch.bfloat16, "sizes": size, **options}
    given["options"] = {"bf16": True, **given.get("options", {})}
    return Case(kind, **given)


def built(case: Case, recipe: str | None = None) -> torch.nn.Module:
    """The layer; with primary weights in FP8 where a recipe is given."""
    from transformer_engine.pytorch import quantized_model_init

    if recipe is None:
        return build(case)
    with quantized_model_init(enabled=True, recipe=recipe_of(recipe)):
        layer = build(case)
    if recipe == "delayed":  # it has seen what was in the parameter's memory before
        layer.reset_fp8_meta_tensors()
    with torch.no_grad():  # copying into a parameter quantises
        layer.weight.copy_(numbers(*layer.weight.shape, seed=100 * (1 + dist.get_rank()), dtype=case.dtype))
    return layer


@dataclass
class Training:
    """Results by step and micro-batch; state of the quantizers after every step."""

    found: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)

    def require_same(self, stock: Training, what: str) -> None:
        assert self.found.keys() == stock.found.keys(), (what, sorted(self.found), sorted(stock.found))
        assert self.state.keys() == stock.state.keys(), (what, sorted(self.state), sorted(stock.state))
        for name, expected in stock.found.items():
            assert self.found[name].dtype == expected.dtype, (what, name)
            require_close(f"{what}: {name}", self.found[name], expected, tolerance())
        for name, expected in stock.state.items():
            assert torch.equal(self.state[name], expected), (what, name, self.state[name], expected)


def state_of(layer: Any) -> dict[str, torch.Tensor]:
    """Amax histories and scales; bytes of the cached weight."""
    found: dict[str, torch.Tensor] = {}
    for key in ("scaling_fwd", "scaling_bwd"):
        for name in ("amax_history", "scale"):
            value = getattr(layer.fp8_meta.get(key), name, None)
            if isinstance(value, torch.Tensor):
                found[f"{key} {name}"] = value.clone()
    for cached, weight in layer._fp8_workspaces.items():
        for name in ("_data", "_transpose", "_scale_inv", "_rowwise_data", "_columnwise_data"):
            value = getattr(weight, name, None)
            if isinstance(value, torch.Tensor):
                found[f"{cached} {name}"] = value.clone()
    return found


def train(
    case: Case, layer: Any, recipes: tuple[str | None, ...], call: Callable[[torch.Tensor], Any] | None = None
) -> Training:
    """A step for every recipe (None: without FP8)."""
    training, weight = Training(), layer.weight
    for step, name in enumerate(recipes):
        layer.is_first_microbatch = True
        for i in range(case.micro_batches):
            x = input_of(case, 7 + 20 * step + i).requires_grad_()
            with autocast(None if name is None else recipe_of(name)):
                y, _ = (call or layer)(x)
            y.backward(gradient_of(y, 70 + 20 * step + i))
            training.found |= {f"y{step}.{i}": y.detach(), f"dx{step}.{i}": x.grad}
        for parameter_name, parameter in layer.named_parameters():
            fused = case.fusion and parameter_name == "weight"
            gradient = parameter.main_grad if fused else parameter.grad
            if gradient is None:
                continue
            training.found[f"{parameter_name}{step}"] = gradient.clone()
            gradient.zero_()
        training.state |= {f"{step} {key}": value for key, value in state_of(layer).items()}
        with torch.no_grad():
            weight.copy_(0.4 * numbers(*weight.shape, seed=900 + step + 50 * dist.get_rank(), dtype=case.dtype))
    return training


@contextlib.contextmanager
def fp8_megatron(**more: int) -> Any:
    """Set up :func:`te_megatron` without the state of earlier autocasts."""
    with te_megatron(dist.get_world_size(), **more):
        fresh()
        yield


def fresh() -> None:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()


def both(work: Callable[[], Result], config: FluxConfig = FP8) -> tuple[Result, Result, Any]:
    """Run ``work`` with stock and with flux, each from fresh FP8 state; return both results and the record of flux."""
    with fp8_megatron():
        stock = work()
        fresh()
        with flux(config) as seen:
            ours = work()
        fresh()
    return stock, ours, seen


def require_stocks(work: Callable[[], Training], what: str, config: FluxConfig = FP8) -> tuple[Training, Any]:
    """Require stock's training of flux, with no layer that runs stock. Returns flux's, and its record."""
    stock, ours, seen = both(work, config)
    ours.require_same(stock, what)
    assert seen.calls
    assert seen.fallbacks == {}
    return ours, seen


def require_same(
    case: Case, recipes: tuple[str | None, ...], primary: str | None = None, config: FluxConfig = FP8
) -> dict[str, int]:
    """Stock's training and ours; calls by operator and backend."""
    work = lambda: train(case, built(case, primary), recipes)  # noqa: E731
    return require_stocks(work, f"{case.kind}, {recipes}", config)[1].calls


def rank_fp8_case(
    case: Case, recipe: str, steps: int, primary: bool, backend: str = "reference", wgrad: str | None = None
) -> dict[str, int]:
    return require_same(
        case, (recipe,) * steps, recipe if primary else None, replace(FP8, backend=backend, wgrad=wgrad)
    )


def rank_switches(kind: str, recipes: tuple[str | None, ...]) -> None:
    require_same(fp8_case(kind), recipes)


# What is multiplied


@contextlib.contextmanager
def multiplied() -> Iterator[list[tuple[str, bool, Any, Any]]]:
    """The operands of every GEMM, each as :func:`described`, and whether it splits sums: ``(name, split, weight or x, x
    or dy)``.

    Of TransformerEngine's GEMM names are its layouts, of ours the operators', whose x is the local shard.
    """
    import transformer_engine_torch as tex

    seen: list[tuple[str, bool, Any, Any]] = []
    stock, gather, scatter = tex.generic_gemm, ops.all_gather_gemm, ops.gemm_reduce_scatter

    def gemm(a: Any, transa: bool, b: Any, transb: bool, *args: Any, **kwargs: Any) -> Any:
        name = f"{'NT'[transa]}{'NT'[transb]}"
        seen.append((name, args[-1], described(a, not transa), described(b, transb)))
        return stock(a, transa, b, transb, *args, **kwargs)

    def operator(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Fp8Operand, weight: Fp8Operand, *args: Any, **kwargs: Any) -> Any:
            split = kwargs["split_accumulator"]
            seen.append((name, split, (weight.data.clone(), weight.dequantized()), (x.data.clone(), x.dequantized())))
            return run(x, weight, *args, **kwargs)

        return call

    with (
        mock.patch.object(tex, "generic_gemm", gemm),
        mock.patch.object(ops, "all_gather_gemm", operator("all_gather_gemm", gather)),
        mock.patch.object(ops, "gemm_reduce_scatter", operator("gemm_reduce_scatter", scatter)),
    ):
        yield seen


def described(operand: Any, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes and numbers ``[rows, k]``, k-major."""
    names = ("_transpose", "_columnwise_data") if transposed else ("_data", "_rowwise_data")
    (data,) = [found for name in names if (found := getattr(operand, name, None)) is not None]
    numbers = numbers_of(operand, transposed)
    return data.reshape(numbers.shape).clone(), numbers


def rank_operands(kind: str, recipe: str, wgrad: str | None = None) -> dict[str, int]:
    """``wgrad``: backend of its gathers. Returns the calls."""
    case, rank = fp8_case(kind, micro_batches=1), dist.get_rank()

    def operands() -> list[tuple[str, bool, Any, Any]]:
        with multiplied() as seen:
            train(case, built(case), (recipe,) * 2)
        return seen

    stock, ours, seen = both(operands, replace(FP8, wgrad=wgrad))
    gathered = {"row": ("gemm_reduce_scatter", "all_gather_gemm")}.get(kind, ("all_gather_gemm", "gemm_reduce_scatter"))
    assert [name for name, *_ in stock] == ["TN", "NN", "NT"] * 2
    assert [name for name, *_ in ours] == [*gathered, "NT"] * 2
    splits = [split for _, split, *_ in stock]
    assert [split for _, split, *_ in ours] == splits
    assert splits == [recipe == "blockwise", True, True] * 2
    for (name, _, *expected), (_, _, *found) in zip(stock, ours, strict=True):
        for which, (data, values), (our_data, our_values) in zip("ab", expected, found, strict=True):
            if data.shape != our_data.shape:  # of what is gathered, the local shard
                mine = slice(rank * our_data.shape[0], (rank + 1) * our_data.shape[0])
                data, values = data[mine], values[mine]
            assert our_data.any()
            assert torch.equal(our_data, data), (kind, recipe, name, which)
            assert torch.equal(our_values, values), (kind, recipe, name, which)
    return seen.calls


# Recompute, no_grad, memory


def rank_fp8_recompute(kind: str, recipe: str, by_te: bool) -> None:
    case = fp8_case(kind)

    def recomputed() -> Training:
        from megatron.core import tensor_parallel

        layer = built(case)
        call = by_te_checkpoint(layer) if by_te else lambda x: tensor_parallel.checkpoint(lambda x: layer(x), False, x)
        return train(case, layer, (recipe,) * 2, call)

    require_stocks(recomputed, f"{kind}, {recipe}")


def peaks(case: Case, recipe: str, peak: Callable[[Callable[[], None]], int]) -> tuple[int, int]:
    """Peak memory of a micro-batch, by stock and by ours; ``peak`` measures that of a step."""
    with fp8_megatron():
        layer: Any = built(case)
        x = input_of(case, 7).requires_grad_()

        def step() -> None:
            with autocast(recipe_of(recipe)):
                y = layer(x)[0]
            y.backward(gradient_of(y, 70))
            x.grad = None
            layer.is_first_microbatch = False

        layer.is_first_microbatch = True
        stock = peak(step)
        layer.is_first_microbatch = True
        with flux(FP8):
            return stock, peak(step)


# As in a CUDA graph


@contextlib.contextmanager
def captured(recipe: str, replayed: list[Any]) -> Iterator[None]:
    """Capture a call as TransformerEngine does, registering and reducing nothing. Then do what it does behind each
    replay of delayed scaling, for the layers that were ``replayed``.
    """
    from transformer_engine.pytorch import graph
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

    graph.set_capture_start()
    try:
        yield
    finally:
        graph.set_capture_end()
    if recipe == "delayed":
        with autocast(recipe_of(recipe)):
            for layer in replayed:
                layer.fp8_meta["fp8_group"], layer.fp8_meta["recipe"] = State.get_fp8_group(), State.get_fp8_recipe()
                State.add_fp8_tensors_to_global_buffer(layer.fp8_meta)
        State.reduce_and_update_fp8_tensors(forward=False)


def train_captured(case: Case, layer: Any, recipe: str, primary: bool) -> Training:
    """Steps of micro-batches that all run as if captured; the weight changes in each micro-batch, and only the flag
    says from which of them on it counts.
    """
    from megatron.core import parallel_state
    from transformer_engine.pytorch import fp8_autocast
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

    training, group = Training(), parallel_state.get_tensor_model_parallel_group()
    skip = torch.zeros(1, device=layer.weight.device)
    getattr(State, "quantization_state", State).skip_fp8_weight_update_tensor = skip  # a state of its own from 2.15 on
    for step in range(3):
        for i in range(case.micro_batches):
            skip.fill_(i != 0)
            layer.is_first_microbatch = True  # as TransformerEngine leaves it before it captures
            x = input_of(case, 7 + 20 * step + i).requires_grad_()
            with captured(recipe, [layer]):
                with fp8_autocast(enabled=True, fp8_recipe=recipe_of(recipe), fp8_group=group, _graph=True):
                    y, _ = layer(x)
                y.backward(gradient_of(y, 70 + 20 * step + i))
            training.found |= {f"y{step}.{i}": y.detach(), f"dx{step}.{i}": x.grad}
            training.state |= {f"{step}.{i} {key}": value for key, value in state_of(layer).items()}
            if not primary:
                with torch.no_grad():
                    seed = 900 + 10 * step + i + 50 * dist.get_rank()
                    layer.weight.copy_(0.4 * numbers(*layer.weight.shape, seed=seed, dtype=case.dtype))
        training.found |= {f"weight{step}": layer.weight.main_grad.clone()}
    return training


def rank_fp8_captured(kind: str, recipe: str, primary: bool, cache: bool, backend: str = "reference") -> dict[str, int]:
    """Calls by operator and backend."""
    case = fp8_case(kind, micro_batches=2, options={"disable_parameter_transpose_cache": not cache})
    ours, seen = require_stocks(
        lambda: train_captured(case, built(case, recipe if primary else None), recipe, primary),
        f"{kind}, {recipe}",
        replace(FP8, backend=backend),
    )
    cached = [ours.state.get(f"2.{i} weight {name}") for i in (0, 1) for name in ("_data", "_rowwise_data")]
    if not primary:
        before, after = [t for t in cached if t is not None]
        assert torch.equal(before, after), "the weight was quantised in a micro-batch that skips it"
    return seen.calls


# Two layers


def by_te_checkpoint(call: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """``call``, recomputed in backward as Megatron has TransformerEngine do it in FP8."""
    from megatron.core import parallel_state, tensor_parallel
    from transformer_engine.pytorch import checkpoint

    tracker = tensor_parallel.random.get_cuda_rng_tracker
    group = parallel_state.get_tensor_model_parallel_group()
    return lambda x: checkpoint(call, x, get_rng_state_tracker=tracker, tp_group=group, use_reentrant=True)


def rank_fp8_pair(
    recipe: str, ahead: bool, backend: str = "reference", recompute: bool = False, wgrad: str | None = None
) -> dict[str, int]:
    """A row-parallel layer behind a column-parallel one, the input of which it gathers ahead."""
    small = {"sizes": Sizes(64, 2, 128, 128)} if "twin" in (backend, wgrad) else {}
    first = fp8_case("norm column", bias=False, **small)
    second = fp8_case("row", bias=False, sizes=replace(first.size, k=first.size.n, n=first.size.k))

    def run() -> dict[str, torch.Tensor]:
        layers = [built(first), built(second)]

        def call(x: torch.Tensor) -> torch.Tensor:
            return layers[1](layers[0](x)[0])[0]

        for i in range(3):
            x = input_of(first, 7 + i).requires_grad_()
            with autocast(recipe_of(recipe)):
                y = (by_te_checkpoint(call) if recompute else call)(x)
            y.backward(gradient_of(y, 70 + i))
        results = {"y": y.detach(), "dx": x.grad}
        for i, layer in enumerate(layers):
            results[f"weight {i}"] = layer.weight.main_grad
            results |= {f"{i} {name}": value for name, value in state_of(layer).items()}
        return results

    stock, ours, seen = both(run, replace(FP8, gather_ahead=ahead, backend=backend, wgrad=wgrad))
    assert stock.keys() == ours.keys()
    for name, expected in stock.items():
        if expected.any() and expected.is_floating_point():
            # What one layer rounds otherwise, the other quantises: a few numbers are an eighth off. (Triton's
            # interpreter cuts bf16 off, so that half of them are rounded otherwise.)
            error = (ours[name].float() - expected.float()).norm() / expected.float().norm()
            assert error < (2**-4 if backend == "twin" else 2**-5), (recipe, name, error)
    return seen.calls


# Checkpoints


def rank_fp8_state(kind: str, recipe: str) -> None:
    case = fp8_case(kind)
    # What is loaded here was saved here; TransformerEngine asks from 2.18 on.
    with mock.patch.dict(os.environ, {"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"}), fp8_megatron():
        stock = built(case)
        train(case, stock, (recipe,) * 2)
        fresh()
        ours = built(case)
        with flux(FP8):
            train(case, ours, (recipe,) * 2)
            states = [layer.state_dict() for layer in (stock, ours)]
            assert list(states[0]) == list(states[1])
            saved = [state["_extra_state"].numpy().tobytes() for state in states]
            extra = [pickle.loads(found) if found else {} for found in saved]  # empty: without history, from 2.18 on
            assert extra[0].keys() == extra[1].keys()
            for name, value in extra[0].items():
                same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: str(a) == str(b)
                assert same(extra[1][name], value), (name, extra[1][name], value)
        trainings = []
        for patch, state in ((contextlib.nullcontext(), states[1]), (flux(FP8), states[0])):
            fresh()
            layer = built(case)
            layer.load_state_dict(state)
            with patch:
                trainings.append(train(case, layer, (recipe,)))
        trainings[1].require_same(trainings[0], f"{kind}, {recipe}")
