"""set_backend() and the directions of FluxConfig, on megatron-core's own classes without building layers' weights."""

from typing import Any

import pytest
import torch

from megatron_flux import UserError, set_backend
from megatron_flux.config import Backends
from megatron_flux.patch.layer_options import check_backends
from megatron_flux.patch.reasons import backends_of

DEFAULT = Backends("auto", "auto", "auto")


def linear(cls: Any) -> torch.nn.Module:
    module = cls.__new__(cls)
    torch.nn.Module.__init__(module)
    return module


@pytest.fixture
def model() -> torch.nn.Module:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    class Special(ColumnParallelLinear):
        pass

    mlp = torch.nn.ModuleDict({"fc1": linear(ColumnParallelLinear), "fc2": linear(RowParallelLinear)})
    layer = torch.nn.ModuleDict({"mlp": mlp, "norm": torch.nn.LayerNorm(2)})
    inner = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer]), "output": linear(Special)})
    return torch.nn.ModuleDict({"module": torch.nn.ModuleDict({"module": inner})})


def chosen(model: torch.nn.Module) -> dict[str, Any]:
    names = {name: backends_of(module, DEFAULT) for name, module in model.named_modules()}
    return {name.removeprefix("module.module."): found for name, found in names.items() if found is not DEFAULT}


def test_names_choose_layers(model: torch.nn.Module) -> None:
    assert set_backend(model, "reference", names="layers.*") == ["layers.0.mlp.fc1", "layers.0.mlp.fc2"]
    assert set_backend([model], "fused", names="*fc2", dgrad="chunked", wgrad="fused") == ["layers.0.mlp.fc2"]
    assert set_backend(model, "stock", names="output") == ["output"]
    assert chosen(model) == {
        "layers.0.mlp.fc1": Backends("reference", "reference", "reference"),
        "layers.0.mlp.fc2": Backends("fused", "chunked", "fused"),
        "output": "stock",
    }
    assert len(set_backend(model, None)) == 3
    assert chosen(model) == {}


WRAPPED = {"Megatron-Bridge": ("{}", "to_wrap", "adapter"), "peft": ("base_model.model.{}", "base_layer", "lora_A")}


@pytest.mark.parametrize("framework", WRAPPED)
def test_an_adapted_linear_is_found_by_its_own_name(framework: str) -> None:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    prefix, base, adapter = WRAPPED[framework]
    wrapper = torch.nn.ModuleDict({base: linear(ColumnParallelLinear), adapter: linear(RowParallelLinear)})
    model: torch.nn.Module = torch.nn.ModuleDict(
        {"decoder": torch.nn.ModuleDict({"qkv": wrapper}), "output": linear(ColumnParallelLinear)}
    )
    for word in reversed(prefix.split(".")[:-1]):
        model = torch.nn.ModuleDict({word: model})
    model = torch.nn.ModuleDict({"module": model})
    wrapped, output = prefix.format(f"decoder.qkv.{base}"), prefix.format("output")
    for name in ("*.qkv", "decoder.qkv", f"*.{base}", wrapped):
        assert set_backend(model, "reference", names=name) == [wrapped]
    assert set_backend(model, "stock", names="output") == [output]
    assert set_backend(model, "reference", names="*.qkv.*") == [wrapped, prefix.format(f"decoder.qkv.{adapter}")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "quick"}, "unknown backend 'quick'; use one of: auto, .*; or 'stock'"),
        ({"backend": "reference", "wgrad": "quick"}, "unknown backend 'quick'"),
        ({"backend": "stock", "dgrad": "fused"}, "dgrad cannot be combined with backend='stock'"),
        ({"backend": None, "forward": "fused"}, "forward cannot be combined with backend=None"),
        (
            {"backend": "reference", "names": "decoder.*"},
            r"no tensor-parallel linear is named 'decoder.\*'; there are: layers.0.mlp.fc1, ",
        ),
    ],
)
def test_what_cannot_be_chosen_changes_nothing(model: torch.nn.Module, arguments: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        set_backend(model, **arguments)
    assert chosen(model) == {}


def test_nccl_beside_a_fused_kernel_needs_one_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    risky = Backends("auto", "auto", "reference")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    with pytest.raises(UserError, match=r"wgrad='reference' gathers with NCCL .* CUDA_DEVICE_MAX_CONNECTIONS=1"):
        check_backends(risky)
    check_backends(Backends("auto", "reference", "reference"))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    check_backends(risky)
