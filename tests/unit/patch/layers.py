"""Layers as far as the patch reads them, and a patch whose flux and stock calls are recorded."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux import FluxConfig
from megatron_flux.patch import linears
from megatron_flux.patch.linears import LinearPatch
from megatron_flux.patch.megatron_core import TE_KINDS
from tests.unit.groups import group_of

GROUP, X = group_of(2), torch.ones(2, 1, 4)
REMOVED = object()


class _Layer(torch.nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(fp8=None, fp4=None, _cpu_offloading_context=None)
        self.tp_group, self.sequence_parallel = GROUP, True
        self.weight = torch.nn.Parameter(torch.ones(3, 4))
        self.bias = torch.nn.Parameter(torch.ones(3))
        for name, value in attributes.items():
            setattr(self, name, value)


class Layer(_Layer):
    def __init__(self, **changes: Any) -> None:
        off = dict.fromkeys(("explicit_expert_comm", "skip_bias_add", "gradient_accumulation_fusion"), False)
        super().__init__(**off | {"input_is_parallel": True} | changes)

    def _forward_impl(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("not called: the stock row layer is stubbed as a whole")


class TeLayer(_Layer):
    def __init__(self, **changes: Any) -> None:
        off = dict.fromkeys(("te_return_bias", "fuse_wgrad_accumulation", "disable_parameter_transpose_cache"), False)
        attributes = {"parallel_mode": "column", "tp_size": 2, "te_quant_params": None, "layer_norm_bias": None}
        attributes |= {"apply_bias": True, "is_first_microbatch": True}
        super().__init__(**off | attributes | changes)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(4))


def keywords(**changes: Any) -> dict[str, Any]:
    """Return the keywords of ``_forward_impl``, with ``changes``; :data:`REMOVED` leaves one out."""
    stock = {
        "bias": None,
        "gradient_accumulation_fusion": False,
        "allreduce_dgrad": False,
        "sequence_parallel": True,
        "grad_output_buffer": None,
        "wgrad_deferral_limit": None,
        "tp_group": GROUP,
    }
    return {name: value for name, value in {**stock, **changes}.items() if value is not REMOVED}


class Te:
    """A TransformerEngine that has its own reason, or none."""

    reason: str | None = None
    installed = "2.11.0"

    def why_stock(self, layer: Any, weight: torch.Tensor, fp8: bool) -> str | None:
        assert not fp8
        assert weight is layer.weight
        return self.reason

    def delayed(self, layer: Any, bias: torch.Tensor | None) -> None:
        return None

    def norm(self, layer: Any) -> str:
        return "norm"

    def returned(self, layer: Any) -> str | None:
        return getattr(layer, "returned", None)


class Traced:
    """A patch for one megatron-core; ``calls`` are flux's, a stock layer returns ``stock``."""

    def __init__(self, added: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
        self.te: Any = Te()
        self.patch = LinearPatch(FluxConfig(backend="reference", fp8=False), added, Layer, self.te)
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        for name in ("column_parallel_linear", "row_parallel_linear"):
            monkeypatch.setattr(linears, name, self._flux)
        patch = self.patch
        self._methods = {
            "column": patch.column_forward_impl(lambda *_, **__: "stock"),
            "row": patch.row_forward(lambda *_, **__: "stock"),
            **{kind: patch.te_forward(kind, self._stock_te) for kind in TE_KINDS},
        }

    def run(self, kind: str, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the replaced method; ``kwargs`` change a column layer's usual keywords."""
        if kind == "column":
            return self._methods[kind](layer, X, layer.weight, *args, **keywords(**kwargs))
        return self._methods[kind](layer, X, *args, **kwargs)

    def _flux(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert x is X
        self.calls.append((args, kwargs))
        return torch.zeros(2, 1, 3)

    def _stock_te(self, layer: TeLayer, *args: Any, **kwargs: Any) -> str:
        assert layer.is_first_microbatch is True  # stock itself ends the first micro-batch
        return "stock"
