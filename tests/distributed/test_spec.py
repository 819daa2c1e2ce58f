"""Layer specs whose linears run flux without a patch, on real ranks: losses, gradients, checkpoints, the report."""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

import megatron_flux
from megatron_flux import FallbackError, FluxConfig, ops, report
from megatron_flux.patch import patcher
from tests.distributed import megatron_world, te_stand_in
from tests.distributed.data import require_equal
from tests.distributed.megatron_world import FAMILIES, gpt_model, megatron, step
from tests.distributed.pool import on_ranks
from tests.distributed.te_cases import te_megatron
from tests.distributed.test_gpt import LAYERS, expected_calls

CONFIG = FluxConfig(backend="reference")
OUTPUT = {"output_layer": "not patched"}
LINEARS = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")


@contextlib.contextmanager
def process() -> Iterator[None]:
    """A process that has neither patched nor made subclasses, and counts from zero."""
    assert patcher._linears is None
    ops.stats.reset()
    try:
        yield
    finally:
        megatron_flux.unpatch()
        patcher._linears = None


def plain(spec: Any) -> Any:
    """The same, to be compared: no ``partial``, which specs have from megatron-core 0.18 on, equals another."""
    if isinstance(spec, partial):
        return spec.func, plain(spec.args), plain(spec.keywords)
    if isinstance(spec, dict):
        return {name: plain(part) for name, part in spec.items()}
    if isinstance(spec, list | tuple):
        return [plain(part) for part in spec]
    if is_dataclass(spec) and not isinstance(spec, type):
        return type(spec), {field.name: plain(getattr(spec, field.name)) for field in fields(spec)}
    return spec


def submodules_of(spec: Any) -> Any:
    """Of a ``ModuleSpec``, or of a ``partial``."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def flux_model(family: str, *, te: bool = False, config: FluxConfig = CONFIG, **options: Any) -> Any:
    """A model of the same specs as ``gpt_model``'s, turned into flux ones."""
    name = "_te_layer" if te else "_local_layer"
    stock = getattr(megatron_world, name)

    def converted(of: Any, spec: dict[str, Any]) -> Any:
        layer, norm = stock(of, spec)
        before = plain(copy.deepcopy(layer))
        made = megatron_flux.flux_spec(layer, config)
        assert plain(layer) == before, "the spec that was given has changed"
        return made, norm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_world, name, converted)
        return gpt_model(family, te=te, **options)


def ran(model: Any) -> dict[str, str]:
    return dict(report(model)["layers"])


FLUX = {f"decoder.layers.{i}.{name}": "flux" for i in range(LAYERS) for name in LINEARS}


def check_model(family: str, *, te: bool, sequence_parallel: bool) -> None:
    """Check results against stock's to the bit, before, while and after megatron-core is patched."""
    options = {"te": te, "sequence_parallel": sequence_parallel}
    with process():
        model = gpt_model(family, **options)
        stock = step(model)
        ours = flux_model(family, **options)
        require_checkpoints_alike(ours, model)
        ours.load_state_dict(model.state_dict())
        calls = [expected_calls(LAYERS, output=n, sequence_parallel=sequence_parallel) for n in (0, 1)]
        require_equal(step(ours), stock)
        now = report(ours)
        assert (now["patched"], now["replaced"], now["active_layers"]) == (False, [], 4 * LAYERS)
        assert (now["fallbacks"], now["calls"], now["layers"]) == ({}, calls[0], FLUX | OUTPUT)

        with megatron_flux.patched(CONFIG):
            ops.stats.reset()
            require_equal(step(ours), stock)
            now = report(ours)
            assert (now["patched"], now["active_layers"], now["fallbacks"]) == (True, 4 * LAYERS + 1, {})
            assert (now["calls"], now["layers"]) == (calls[1], FLUX | {"output_layer": "flux"})

        ops.stats.reset()
        require_equal(step(ours), stock)
        now = report(ours)
        assert (now["patched"], now["calls"], now["layers"]) == (False, calls[0], FLUX | OUTPUT)
        require_equal(step(model), stock)
        assert report()["calls"] == calls[0], "a model of the stock spec ran flux"
        assert set(ran(model).values()) == {"not patched"}


def require_checkpoints_alike(ours: Any, model: Any) -> None:
    """The same keys, shapes and shards."""
    assert list(ours.state_dict()) == list(model.state_dict())
    shards = [one.sharded_state_dict() for one in (ours, model)]
    assert shards[0].keys() == shards[1].keys()
    for name, shard in shards[0].items():
        same = shards[1][name]
        assert type(shard) is type(same), name
        for about in ("key", "global_shape", "global_offset", "replica_id"):
            assert getattr(shard, about, None) == getattr(same, about, None), (name, about)


@pytest.mark.parametrize(("family", "sequence_parallel"), [("gpt3", True), ("llama", False)])
@on_ranks("world2")
def test_a_local_spec(family: str, sequence_parallel: bool) -> None:
    with megatron(tp=dist.get_world_size()):
        check_model(family, te=False, sequence_parallel=sequence_parallel)


@te_stand_in.needed
@pytest.mark.parametrize(("family", "sequence_parallel"), [("llama", True), ("gpt3", False)])
@on_ranks("te_world2")
def test_a_spec_over_transformer_engine(family: str, sequence_parallel: bool) -> None:
    with te_megatron(dist.get_world_size()):
        check_model(family, te=True, sequence_parallel=sequence_parallel)


@on_ranks("world2")
def test_reasons_for_stock_are_counted_once_patched_or_not() -> None:
    """This includes layers made while megatron-core was patched."""
    with megatron(tp=dist.get_world_size()), process():
        megatron_flux.patch(CONFIG)
        model = flux_model("gpt3")
        megatron_flux.unpatch()
        stock = step(model)
        assert report(model)["layers"] == FLUX | OUTPUT
        megatron_flux.set_backend(model, "stock", names="*.linear_fc1")
        chosen = {"column: chosen with set_backend": LAYERS}
        require_equal(step(model), stock)
        assert report()["fallbacks"] == chosen
        with megatron_flux.patched():
            require_equal(step(model), stock)
            assert report()["fallbacks"] == {name: 2 * count for name, count in chosen.items()}
        ops.stats.reset()
        with megatron_flux.patched(FluxConfig(backend="reference", wgrad="chunked")):
            step(model)
            assert report()["calls"]["all_gather/chunked"] == LAYERS + 1  # qkv and the output layer
        ops.stats.reset()
        require_equal(step(model), stock)
        assert {name.partition("/")[2] for name in report()["calls"]} == {"reference"}, "the configuration is not back"


@on_ranks("world2")
def test_another_librarys_method_on_the_base_is_called_with_its_name_as_the_reason() -> None:
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    with megatron(tp=dist.get_world_size()), process(), pytest.MonkeyPatch.context() as patch:
        model, original, called = flux_model("gpt3"), RowParallelLinear.forward, []

        def wrapper(layer: Any, *args: Any, **kwargs: Any) -> Any:
            called.append(layer)
            return original(layer, *args, **kwargs)

        patch.setattr(RowParallelLinear, "forward", wrapper)
        step(model)
        assert len(called) == 2 * LAYERS
        ((reason, count),) = report()["fallbacks"].items()
        assert reason.startswith("row: RowParallelLinear.forward replaced by ")
        assert reason.endswith(".wrapper")
        assert count == 2 * LAYERS


@on_ranks("world2")
def test_a_provider() -> None:
    """megatron-core's functions use it for MLPs, dense or of experts."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_mlp_module_spec_for_backend
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    class MLP:
        @classmethod
        def build(cls, **_: Any) -> None: ...

    with megatron(tp=dist.get_world_size()), process():
        provider = megatron_flux.spec_provider(LocalSpecProvider(), CONFIG)
        column, row = provider.column_parallel_linear(), provider.row_parallel_linear()
        assert (column.__name__, row.__name__) == ("ColumnParallelLinear", "RowParallelLinear")
        assert column is megatron_flux.flux_spec(ColumnParallelLinear)
        assert issubclass(row, RowParallelLinear)
        made = [get_mlp_module_spec_for_backend(backend=provider, num_experts=n) for n in (None, 4)]
        expected = [get_mlp_module_spec_for_backend(backend=LocalSpecProvider(), num_experts=n) for n in (None, 4)]
        assert plain(made) != plain(expected)
        assert plain(made) == plain(megatron_flux.flux_spec(expected))
        normalization = FAMILIES["gpt3"]["normalization"]
        for whole in (
            megatron_flux.flux_spec(get_gpt_layer_local_spec)(normalization=normalization),
            megatron_flux.flux_spec(partial(get_gpt_layer_local_spec, normalization=normalization))(),
        ):
            assert plain(whole.submodules.mlp) == plain(made[0])
            assert whole.submodules.self_attention.submodules.linear_qkv is column
        builder = megatron_flux.flux_spec(partial(MLP.build, submodules=submodules_of(expected[0])))  # from 0.20 on
        assert (builder.func, builder.keywords) == (MLP.build, {"submodules": submodules_of(made[0])})


@on_ranks("world2")
def test_classes_that_megatron_core_compares_are_left_to_it() -> None:
    """Multi-latent attention is built, and all but its down projections run flux."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    with megatron(tp=dist.get_world_size()), process():
        attention = megatron_flux.flux_spec(get_gpt_layer_local_spec(multi_latent_attention=True), CONFIG)
        linears = attention.submodules.self_attention.submodules
        assert linears.linear_q_down_proj is linears.linear_kv_down_proj is ColumnParallelLinear
        assert linears.linear_q_up_proj is linears.linear_kv_up_proj is megatron_flux.flux_spec(ColumnParallelLinear)

        class Overrides(ColumnParallelLinear):
            def _forward_impl(self, *args: Any, **kwargs: Any) -> Any:
                return super()._forward_impl(*args, **kwargs)

        assert megatron_flux.flux_spec(Overrides) is Overrides
        strict = FluxConfig(strict=True)
        with pytest.raises(FallbackError, match=r"Overrides: its own _forward_impl runs; use another layer"):
            megatron_flux.flux_spec(Overrides, strict)
        with pytest.raises(FallbackError, match="flux_spec leaves to megatron-core linear_q_down_proj"):
            megatron_flux.flux_spec(get_gpt_layer_local_spec(multi_latent_attention=True), strict)


@te_stand_in.needed
@on_ranks("te_world2")
def test_mlps_of_the_op_fuser_are_left_to_megatron_core() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend

    with te_megatron(dist.get_world_size()), process():
        provider = megatron_flux.spec_provider(config=FluxConfig(strict=True))
        mlp = get_mlp_module_spec_for_backend(backend=provider, use_te_op_fuser=True)
        with pytest.raises(FallbackError, match="TEFusedMLP: its own forward runs"):
            megatron_flux.flux_spec(mlp)
        assert megatron_flux.flux_spec(mlp, CONFIG) is mlp
