"""Helpers for tests of ``examples/``: train a framework's model stock, then with ``MEGATRON_FLUX=1``."""

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import is_patched, ops, report, unpatch
from megatron_flux.patch import first_linear, patcher
from tests.distributed import te_stand_in
from tests.distributed.megatron_world import loss_and_gradients

STEPS = 3
SOURCES: dict[str, str] = {}
"""Folders with other names than a framework's own: see :mod:`tests.distributed.newest_preload`."""


def source(name: str) -> Path:
    """Return the folder in which ``scripts/test.sh`` puts a framework."""
    return Path(sys.prefix, SOURCES.get(name, f"{name}-source"))


def why_not(name: str, *packages: str) -> str | None:
    """Why these tests cannot run here, or None."""
    if (reason := te_stand_in.why_not()) is not None or source(name).is_dir():
        return reason
    return f"needs pip install --no-deps --target {source(name)} {' '.join(packages)}, which scripts/test.sh does"


def needed(name: str, *packages: str) -> pytest.MarkDecorator:
    """Return the mark of tests over a framework."""
    return te_stand_in.skipped(why_not(name, *packages))


def stub(*names: str) -> None:
    """Let these modules be imported; they do nothing."""
    for name in names:
        sys.modules.setdefault(name, mock.MagicMock(__spec__=ModuleSpec(name, None), __path__=[]))


def import_parts(package: str, folder: Path) -> None:
    """Let modules of ``package`` be imported without its own start, which imports its hub of models."""
    if package not in sys.modules:
        module = type(sys)(package)
        module.__path__ = [str(folder)]
        sys.modules[package] = module


def import_bridge(name: str) -> Any:
    """Return a module of Megatron-Bridge, without the starts of its packages."""
    folder = source("bridge") / "megatron" / "bridge"
    import_parts("megatron.bridge", folder)
    import_parts("megatron.bridge.models", folder / "models")
    if te_stand_in.SOURCE not in sys.path:
        sys.path.append(te_stand_in.SOURCE)  # it asks for TransformerEngine's version
    return importlib.import_module(f"megatron.bridge.{name}")


def bridge_provider(**options: Any) -> Any:
    """Return Megatron-Bridge's own provider of a small Llama, of TransformerEngine's layers."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from tests.distributed.megatron_world import FAMILIES, SEQUENCE, VOCABULARY, _te_layer

    def spec(config: Any) -> Any:
        layer, norm = _te_layer(config, {})
        return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=norm)

    tp = dist.get_world_size()
    given: dict[str, Any] = {
        **{"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, "num_query_groups": 2},
        **{"vocab_size": VOCABULARY, "seq_length": SEQUENCE, "make_vocab_size_divisible_by": 2},
        **{"tensor_model_parallel_size": tp, "sequence_parallel": True, "use_cpu_initialization": True},
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "bias_activation_fusion": False},
        **{"bias_dropout_fusion": False, "masked_softmax_fusion": False, "persist_layer_norm": False},
        **{"gradient_accumulation_fusion": False, "apply_rope_fusion": False, "cross_entropy_loss_fusion": False},
        **{"share_embeddings_and_output_weights": False, "position_embedding_type": "rope"},
        "transformer_layer_spec": spec,
    }
    provider = import_bridge("models.gpt_provider").GPTModelProvider(**given | FAMILIES["llama"] | options)
    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    return provider


@contextlib.contextmanager
def switched_on() -> Iterator[io.StringIO]:
    """``MEGATRON_FLUX=1`` in a process that has just begun; what is printed. Layers are stock afterwards."""
    ops.stats.reset()
    with (
        mock.patch.dict(os.environ, MEGATRON_FLUX="1", RANK=str(dist.get_rank())),
        mock.patch.object(first_linear, "_settled", False),
        mock.patch.object(patcher, "was_patched", False),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        first_linear.watch()
        try:
            yield printed
        finally:
            first_linear.settle()
            unpatch()


def random_parameters(model: torch.nn.Module, scale: float = 0.2) -> None:
    """Fill all parameters, adapters' zeros too; the sharded ones of each rank differ."""
    with torch.no_grad():
        for i, (name, parameter) in enumerate(model.named_parameters()):
            of_rank = dist.get_rank() if getattr(parameter, "tensor_model_parallel", False) else 0
            generator = torch.Generator().manual_seed(1000 + i + 100_000 * of_rank)
            start = 1.0 if "norm" in name else 0.0
            parameter.copy_(start + scale * torch.randn(parameter.shape, generator=generator))


Step = Callable[[torch.nn.Module, int], torch.Tensor]
"""Forward and backward of a model on the data of a seed; the loss."""


def plain_step(model: torch.nn.Module, seed: int) -> torch.Tensor:
    """A :data:`Step` without a framework."""
    return loss_and_gradients(model, seed)[0]


def trained(
    build: Callable[[], torch.nn.Module], one_step: Step = plain_step
) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """Build a model and train it; the losses of its steps."""
    model = build()
    random_parameters(model)
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for step in range(STEPS):
        losses.append(one_step(model, 7 + step))
        optimizer.step()
    return model, losses


def compared(
    build: Callable[[], torch.nn.Module], one_step: Step = plain_step, *, tolerance: float = 0
) -> tuple[torch.nn.Module, dict[str, str], str]:
    """Require stock's losses and parameters of flux, to the bit unless a ``tolerance`` is given. Returns flux's model,
    what its layers ran, and what rank 0 printed.
    """

    def same(one: torch.Tensor, other: torch.Tensor) -> bool:
        return torch.allclose(one, other, rtol=tolerance, atol=tolerance) if tolerance else torch.equal(one, other)

    stock, losses = trained(build, one_step)
    assert not is_patched()
    with switched_on() as printed:
        model, ours = trained(build, one_step)
        assert is_patched(), "MEGATRON_FLUX=1 has not switched flux on"
        layers = report(model)["layers"]
    assert len({float(loss.mean()) for loss in losses}) == STEPS, "nothing was trained"
    assert all(same(a, b) for a, b in zip(ours, losses, strict=True))
    parameters = dict(stock.named_parameters())
    for name, parameter in model.named_parameters():
        assert same(parameter, parameters[name]), name
    return model, layers, printed.getvalue()


def require_flux(layers: dict[str, str], printed: list[str], count: int) -> None:
    """All of the ``count`` layers ran flux, and rank 0 alone has said so."""
    assert set(layers.values()) == {"flux"}
    assert len(layers) == count
    on, ran = printed[0].splitlines()
    assert " is on: " in on
    assert f"layers that run flux: {count}; " in ran
    assert printed[1] == ""
