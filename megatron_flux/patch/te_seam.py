"""All that flux assumes of TransformerEngine, in one place and checked when ``patch()`` is called.

Used of it
    * the norm kernels that its ``LayerNormLinear`` calls: ``layernorm_fwd``, ``layernorm_bwd``, ``rmsnorm_fwd`` and
      ``rmsnorm_bwd`` of the compiled module ``transformer_engine_torch``, with the module's own ``eps``,
      ``zero_centered_gamma`` and SM margins, so that a patched layer's norm is stock's to the bit;
    * what switches its linears to another kind of work: fp8 and its calibration, CPU offloading, ONNX export and the
      debug tools, which are states of the process; userbuffers, delayed wgrad, a returned norm output, FSDP and
      quantized weights, which are attributes of a module.

Both are the same in the source of releases 2.9 to 2.18; 2.19 brings weights that are distributed once more. Another
release, or one whose symbols are not as expected, leaves its layers stock with that reason.

``patch()`` does not import TransformerEngine: :func:`in_use` looks at what megatron-core has imported, which tries to
import it wherever it is installed. Only :func:`why_unusable` does, where its layers were asked for.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from packaging.specifiers import SpecifierSet

from megatron_flux.errors import UnsupportedVersionError
from megatron_flux.layers import Norm
from megatron_flux.patch.megatron_core import TE_LAYERS, release_of, shown

SUPPORTED_TE = SpecifierSet(">=2.9,<2.19")

_KERNELS = {"layernorm_fwd": 9, "layernorm_bwd": 7, "rmsnorm_fwd": 8, "rmsnorm_bwd": 6}
"""Functions of ``transformer_engine_torch`` and how many parameters they take, all of them positional."""

_userbuffers = attrgetter(
    "ub_overlap_ag_fprop",
    "ub_overlap_rs_fprop",
    "ub_overlap_ag_dgrad",
    "ub_overlap_rs_dgrad",
    "ub_bulk_wgrad",
    "ub_bulk_dgrad",
)


def in_use() -> ModuleType | None:
    """megatron-core's module of TransformerEngine layers, or None where it could not import TransformerEngine."""
    extension = sys.modules.get(TE_LAYERS)
    return extension if extension is not None and getattr(extension, "HAVE_TE", False) else None


def load() -> TransformerEngine:
    """The installed TransformerEngine, checked.

    Raises:
        UnsupportedVersionError: a release outside the supported range, or symbols that are not as expected.
    """
    installed = _installed_version()
    release = release_of(installed)
    if release is None or release not in SUPPORTED_TE:
        raise UnsupportedVersionError(f"TransformerEngine {installed}, supported is {shown(SUPPORTED_TE)}")
    try:
        return TransformerEngine()
    except (ImportError, AttributeError, TypeError) as error:
        raise UnsupportedVersionError(
            f"TransformerEngine {installed} is not as expected ({error}), supported are unmodified releases "
            f"{shown(SUPPORTED_TE)}"
        ) from error


def why_unusable() -> str | None:
    """Why no layer over TransformerEngine could run flux, or be built at all; None where they can.

    Imports TransformerEngine: for where its layers were asked for. megatron-core does not say why it could not.
    """
    try:
        importlib.import_module("transformer_engine.pytorch")
        load()
    except UnsupportedVersionError as error:
        return str(error)
    except Exception as error:  # its loader raises what it likes: ImportError, OSError, RuntimeError, AssertionError
        why = " ".join(str(error).split())
        return f"TransformerEngine cannot be imported ({why}), supported is {shown(SUPPORTED_TE)}"
    return None


class TransformerEngine:
    """What flux calls and asks of the installed TransformerEngine."""

    def __init__(self) -> None:
        """Find and check the symbols.

        Raises:
            ImportError: a module is missing.
            AttributeError: a symbol is missing.
            TypeError: a kernel takes another number of parameters.
        """
        self.kernels = kernels = importlib.import_module("transformer_engine_torch")
        for name, expected in _KERNELS.items():
            found = _parameter_count(getattr(kernels, name))
            if found is not None and found != expected:
                raise TypeError(f"{name} takes {found} parameters, not {expected}")
        self.dtypes = _symbol("constants:TE_DType")
        self._fp8_enabled = _symbol("quantization:FP8GlobalStateManager.is_fp8_enabled")
        self._fp8_calibration = _symbol("quantization:FP8GlobalStateManager.is_fp8_calibration")
        self._offloading = _symbol("cpu_offload:is_cpu_offload_enabled")
        self._exporting = _symbol("export:is_in_onnx_export_mode")
        self._debug = importlib.import_module("transformer_engine.debug.pytorch.debug_state").TEDebugState
        _ = self._debug.debug_enabled  # missing here rather than at the first call

    def why_stock(self, layer: Any, weight: torch.Tensor) -> str | None:
        """Why TransformerEngine must run this call of a ``Linear`` or ``LayerNormLinear`` itself, or None.

        ``weight`` is ``layer.weight``, which is slow to get.
        """
        if any(_userbuffers(layer)):
            return "userbuffers (tp_comm_overlap)"
        if layer.wgrad_store.delay_wgrad_compute():
            return "delayed wgrad (delay_wgrad_compute)"
        if self._fp8_enabled():
            return "fp8 (autocast)"
        if self._fp8_calibration():
            return "fp8 calibration"
        if layer.primary_weights_in_fp8:
            return "quantized weights"
        if len(layer.weight_names) != 1:
            return "parameters_split"
        if type(weight) is not torch.nn.Parameter:
            return f"weight of type {type(weight).__name__}"
        if layer.fsdp_group is not None:
            return "TransformerEngine's FSDP"
        if getattr(layer, "return_layernorm_output", False):
            return "return_layernorm_output"
        if self._offloading():
            return "activation offloading to the CPU"
        if self._exporting():
            return "ONNX export"
        if self._debug.debug_enabled:
            return "TransformerEngine's debug tools"
        return None

    def norm(self, layer: Any) -> Norm:
        """The norm of a ``LayerNormLinear``, for use in the current grad mode."""
        forward_margin = layer.fwd_ln_sm_margin if torch.is_grad_enabled() else layer.inf_ln_sm_margin
        return _norm(
            self, layer.normalization, layer.eps, layer.zero_centered_gamma, forward_margin, layer.bwd_ln_sm_margin
        )


class _NormKernels:
    """Options of one norm; what ``forward`` and ``backward`` of the two below take and give: :class:`Norm`."""

    def __init__(
        self, kernels: Any, dtypes: Any, eps: float, zero_centered: bool, forward_margin: int, backward_margin: int
    ) -> None:
        """``dtypes``: torch's dtypes to TransformerEngine's; margins: SMs that the kernels leave free."""
        self._kernels, self._dtypes, self._eps, self._zero_centered = kernels, dtypes, eps, zero_centered
        self._forward_margin, self._backward_margin = forward_margin, backward_margin

    def _forward_options(self, x: torch.Tensor) -> tuple[Any, ...]:
        """eps, no output buffer, no quantizer, output dtype, SM margin, zero-centred gamma."""
        return self._eps, None, None, self._dtypes[x.dtype], self._forward_margin, self._zero_centered


class _LayerNorm(_NormKernels):
    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        return self._kernels.layernorm_fwd(x, weight, bias, *self._forward_options(x))

    def backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        mean: torch.Tensor | None,
        reciprocal_deviation: torch.Tensor,
    ) -> Any:
        return self._kernels.layernorm_bwd(
            dy, x, mean, reciprocal_deviation, weight, self._backward_margin, self._zero_centered
        )


class _RMSNorm(_NormKernels):
    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        return self._kernels.rmsnorm_fwd(x, weight, *self._forward_options(x))

    def backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        mean: torch.Tensor | None,
        reciprocal_deviation: torch.Tensor,
    ) -> Any:
        dx, dweight = self._kernels.rmsnorm_bwd(
            dy, x, reciprocal_deviation, weight, self._backward_margin, self._zero_centered
        )
        return dx, dweight, None


@lru_cache(maxsize=256)
def _norm(te: TransformerEngine, kind: str, *options: Any) -> Norm:
    """One for all layers with the same options: it has no state."""
    return {"LayerNorm": _LayerNorm, "RMSNorm": _RMSNorm}[kind](te.kernels, te.dtypes, *options)


def _parameter_count(function: Callable[..., Any]) -> int | None:
    """How many parameters a function takes; of a compiled one by its docstring, None where that does not say."""
    try:
        return len(inspect.signature(function).parameters)
    except ValueError:
        pass
    # pybind11's first line: name(first: type, second: type[a, b]) -> type. A colon that is part of a C++ type's name
    # has no space behind it.
    line = (function.__doc__ or "").partition("\n")[0]
    inside = line.removeprefix(f"{function.__name__}(")
    if inside == line:
        return None
    count, depth = 0, 1
    for here, behind in pairwise(inside):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(here, 0)
        if depth == 0:
            break
        count += depth == 1 and here == ":" and behind == " "
    return count


def _symbol(path: str) -> Any:
    module, _, name = path.partition(":")
    return attrgetter(name)(importlib.import_module(f"transformer_engine.pytorch.{module}"))


def _installed_version() -> str:
    """Distribution metadata, or the package's own version where it was not installed as a distribution."""
    try:
        return version("transformer-engine")
    except PackageNotFoundError:
        return str(getattr(importlib.import_module("transformer_engine"), "__version__", "of unknown version"))
