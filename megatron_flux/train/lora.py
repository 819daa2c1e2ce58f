"""LoRA: low-rank adapters beside frozen tensor-parallel linears, in the layout of Megatron-Bridge's ``LoRA``.

An adapted linear gives ``base(x) + alpha / rank * B(A(x))``. Every A and B is divided among the tensor-parallel ranks:

=======================  =============================  =============================
base                     A ``[rank, in]``               B ``[out, rank]``
=======================  =============================  =============================
column (QKV, FC1)        column-parallel, gathered      column-parallel
row (proj, FC2)          row-parallel                   column-parallel, gathered
=======================  =============================  =============================

Adapters work on all rows. With sequence parallelism the input of a column linear's adapter is therefore gathered before
A, and its gradient is summed by that gather's reduce-scatter, not by A (``disable_grad_reduce``). The output of a row
linear's adapter is cut to the local rows behind B. TransformerEngine's linears that hold a norm return its output,
gathered; other linears give the adapter their own input.

Hazard: TransformerEngine 2.4 to 2.20.2 drops the gradient of a gathered norm output (docs/fine-tuning.md). In
:func:`own_gathers` adapters gather local norm outputs themselves, whose gradients are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, mappings
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from megatron_flux.errors import FluxError
from megatron_flux.patch.adapters import Form
from megatron_flux.train.options import LORA_TARGETS

_ROW = ("linear_proj", "linear_fc2")
Init = Callable[[torch.Tensor], torch.Tensor]


def add_adapters(
    model: torch.nn.Module,
    config: Any,
    rank: int,
    *,
    alpha: float = 32,
    targets: Sequence[str] = LORA_TARGETS,
    init_b: Init = torch.nn.init.zeros_,
) -> None:
    """Freeze ``model`` and wrap every linear that ``targets`` names. Raises FluxError: there is none.

    A starts from Xavier's normal distribution and B from zero. ``rank`` is a multiple of the tensor-parallel size.
    """
    model.requires_grad_(False)
    found = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in targets]
    if not found:
        raise FluxError(f"no linear is called {' or '.join(targets)}: the model has nothing to adapt")
    for name in found:
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        base = getattr(owner, leaf)
        setattr(owner, leaf, AdaptedLinear(base, Adapter(leaf, base, config, rank, alpha, init_b)))
    embedding = getattr(model, "embedding", None)
    if config.recompute_granularity == "full" and embedding is not None:
        # A recomputed layer has gradients only if its input asks for one, and a frozen embedding's output does not.
        embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())


class Adapter(torch.nn.Module):
    """A and B beside ``base``, the linear called ``name``.

    Takes what ``base`` multiplies: ``[s, b, in]`` of a column linear (``[s/tp, b, in]`` where ``gathers`` is True),
    ``[s, b, in/tp]`` of a row linear. Returns a summand of its output.
    """

    def __init__(self, name: str, base: Any, config: Any, rank: int, alpha: float, init_b: Init) -> None:
        super().__init__()
        row, tp = name in _ROW, parallel_state.get_tensor_model_parallel_world_size()
        out_features, in_features = base.weight.shape
        out_features, in_features = (out_features, in_features * tp) if row else (out_features * tp, in_features)
        self._row, self._scale, self._gated = row, alpha / rank, name == "linear_fc1" and config.gated_linear_unit
        self.gathers = config.sequence_parallel and not row
        self._scatters = config.sequence_parallel and row
        how: dict[str, Any] = {"config": config, "bias": False}
        into: dict[str, Any] = {"init_method": torch.nn.init.xavier_normal_, **how}
        unsummed = config.sequence_parallel
        with mock.patch.object(config, "sequence_parallel", False):  # A and B work on all rows
            if row:
                into |= {"input_is_parallel": True, "skip_bias_add": True}
                self.linear_in = RowParallelLinear(in_features, rank, **into)
            else:
                into |= {"gather_output": True, "disable_grad_reduce": unsummed}
                self.linear_in = ColumnParallelLinear(in_features, rank, **into)
            self.linear_out = ColumnParallelLinear(rank, out_features, init_method=init_b, gather_output=row, **how)

    @property
    def form(self) -> Form:
        """Its parts, for :mod:`megatron_flux.patch.adapters`."""
        row, modules = self._row, self._modules
        communicates = self._scatters if row else self.gathers
        return Form(modules["linear_in"], modules["linear_out"], row, communicates, self._scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the adapter's summand of the output for the input ``x``."""
        if self.gathers:
            x = mappings.gather_from_sequence_parallel_region(x)
        low, _ = self.linear_in(x)
        y, _ = self.linear_out(low)
        if self._scatters:
            y = mappings.scatter_to_sequence_parallel_region(y)
        return y * self._scale

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return A and B for megatron-core's checkpoints."""
        state: dict[str, Any] = {}
        for name, linear in self.named_children():
            state |= linear.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)  # type: ignore[operator]
        if self._gated:  # a rank's rows of B are those of gate and value, as in FC1
            b = f"{prefix}linear_out.weight"
            state[b] = apply_swiglu_sharded_factory(state[b], sharded_offsets)
        return state


class AdaptedLinear(torch.nn.Module):
    """A frozen linear with an :class:`Adapter`. In a checkpoint the linear has the names that it has without one."""

    def __init__(self, base: Any, adapter: Adapter) -> None:
        super().__init__()
        self.to_wrap, self.adapter = base, adapter
        if hasattr(base, "return_layernorm_output"):
            base.return_layernorm_output = True
            # Userbuffers do not leave the gathered output behind.
            base.return_layernorm_output_gathered = adapter.gathers and not base.config.tp_comm_overlap
            adapter.gathers = adapter.gathers and base.config.tp_comm_overlap
        self.register_load_state_dict_pre_hook(_as_wrapped)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return output and bias, as the linear alone does."""
        found = self.to_wrap(x, *args, **kwargs)
        if len(found) == 3:  # TransformerEngine's, with a bias that is returned
            y, bias, normed = found
        else:
            y, bias = found
            y, normed = y if isinstance(y, tuple) else (y, x)
        return y + self.adapter(normed), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return linear and adapter for megatron-core's checkpoints."""
        base = self.to_wrap.sharded_state_dict(prefix, sharded_offsets, metadata)
        return {**base, **self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata)}


def _as_wrapped(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give the linear's entries of a checkpoint the names that they have inside :class:`AdaptedLinear`."""
    for key in [key for key in state if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        if name.partition(".")[0] not in module._modules:
            state[f"{prefix}to_wrap.{name}"] = state.pop(key)


def is_adapter(name: str) -> bool:
    """Return True if ``name`` is that of an adapter's parameter, in a model or in its checkpoint."""
    return ".adapter." in name


@contextmanager
def own_gathers(model: torch.nn.Module) -> Iterator[bool]:
    """Let adapters gather norm outputs themselves, where TransformerEngine's linears did. Yields True if any did.

    Outputs stay the same, and gradients are right in every release of TransformerEngine.
    """
    found = [
        adapted
        for adapted in model.modules()
        if isinstance(adapted, AdaptedLinear) and getattr(adapted.to_wrap, "return_layernorm_output_gathered", False)
    ]

    def switch(on: bool) -> None:
        for adapted in found:
            base: Any = adapted.to_wrap
            base.return_layernorm_output_gathered, adapted.adapter.gathers = not on, on
            # In blocks TransformerEngine's quantizer stays in the layout of what is not gathered, once it was in it.
            for quantizer in list(base.quantizers["scaling_fwd"])[:1]:
                if hasattr(quantizer, "all_gather_usage"):
                    quantizer.all_gather_usage = True

    switch(True)
    try:
        yield bool(found)
    finally:
        switch(False)
