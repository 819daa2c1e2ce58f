"""Assumptions about TransformerEngine, in one place and checked when ``patch()`` is called.

Used of it
    * the norm kernels that its ``LayerNormLinear`` calls, with the module's own ``eps``, ``zero_centered_gamma`` and SM
      margins, so that a patched layer's norm is stock's to the bit;
    * what switches its linears to another kind of work: fp8, of which :mod:`megatron_flux.patch.te_fp8` has all else,
      and its calibration, CPU offloading, ONNX export and the debug tools, which are states of the process;
      userbuffers, FSDP and quantized weights, and torch's symmetric all-reduce, which are attributes of a module;
      weights that are distributed once more (2.19), which say so;
    * where wgrad is delayed, its GEMM and the module's store (:meth:`TransformerEngine.delayed`);
    * that a ``LayerNormLinear`` returns the norm's output as well, also gathered, where its attributes say so.

All of it is the same in the source of releases 2.9 to 2.20; ``scripts/seams.py`` compares them with another's. A
release beyond whose code is that of 2.20.2 (:data:`NEWEST_SEAMS`) is used with a warning. Another, or one that lacks a
symbol, leaves its layers stock with that reason.

``patch()`` does not import TransformerEngine where megatron-core has not. Only :func:`why_unusable` does, where its
layers were asked for.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_flux.errors import UnsupportedVersionError, one_line
from megatron_flux.layers import DelayedWgrad, Norm, Returned
from megatron_flux.layers.backward import unread_gradient
from megatron_flux.layers.precision import LinearState
from megatron_flux.log_once import log_once
from megatron_flux.patch import seams
from megatron_flux.patch.megatron_core import release_of, shown
from megatron_flux.patch.te_fp8 import SUPPORTED_FP8, TransformerEngineFp8, gemm_options

_BEYOND = "2.21"
SUPPORTED_TE = SpecifierSet(f">=2.9,<{_BEYOND}")
NEWEST = "2.20.2"

NEWEST_SEAMS = {
    "transformer_engine.pytorch.module.linear": "6e7bcc2e6671",
    "transformer_engine.pytorch.module.layernorm_linear": "2feed8c5529e",
    "transformer_engine.pytorch.module._common:apply_normalization": "22e2391308a6",
    "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.grad_output_preprocess": "3e7aa1d68d0b",
    "transformer_engine.pytorch.distributed:_all_gather_fp8": "f6861b53dddd",
    "transformer_engine.pytorch.distributed:gather_along_first_dim": "66ac93668616",
}
"""Code that flux's layers do anew, with digests of :data:`NEWEST`; scripts/seams.py prints them."""

DELAYS_WGRAD = SpecifierSet(">=2.11")
"""Releases whose ``general_gemm`` is called without a workspace."""

_userbuffers = attrgetter(
    "ub_overlap_ag_fprop",
    "ub_overlap_rs_fprop",
    "ub_overlap_ag_dgrad",
    "ub_overlap_rs_dgrad",
    "ub_bulk_wgrad",
    "ub_bulk_dgrad",
)


def load(*, strict: bool = False) -> TransformerEngine:
    """Return the installed TransformerEngine. Raises UnsupportedVersionError: its release, or a missing symbol."""
    try:
        installed = version("transformer-engine")
    except PackageNotFoundError:  # not installed as a distribution
        installed = str(getattr(importlib.import_module("transformer_engine"), "__version__", "of unknown version"))
    release, known = release_of(installed), shown(SUPPORTED_TE)
    usable = release is not None and release in SUPPORTED_TE
    if release is not None and release >= Version(_BEYOND) and not strict:
        file = getattr(importlib.import_module("transformer_engine"), "__file__", None)
        found = f"TransformerEngine {installed}"
        usable = file is not None and not seams.changed(Path(file).resolve().parents[1], NEWEST_SEAMS, found, known)
    if release is None or not usable:
        raise UnsupportedVersionError(f"TransformerEngine {installed}, supported is {known}")
    try:
        return TransformerEngine(installed, release)
    except (ImportError, AttributeError) as error:
        raise UnsupportedVersionError(
            f"TransformerEngine {installed} is not as expected ({error}), supported are unmodified releases {known}"
        ) from error


def why_unusable() -> str | None:
    """Return why no layer over TransformerEngine could run flux, or be built at all; None where they can.

    Imports TransformerEngine: for where its layers were asked for. megatron-core does not say why it could not.
    """
    try:
        importlib.import_module("transformer_engine.pytorch")
        load()
    except UnsupportedVersionError as error:
        return str(error)
    except Exception as error:  # its loader raises what it likes: ImportError, OSError, RuntimeError, AssertionError
        return f"TransformerEngine cannot be imported ({one_line(error)}), supported is {shown(SUPPORTED_TE)}"
    return None


class TransformerEngine:
    """The installed TransformerEngine, as far as flux calls or asks it."""

    def __init__(self, installed: str, release: Version) -> None:
        """Find the symbols of ``installed``. Raises ImportError, AttributeError: one is missing."""
        self.installed = installed
        self.norms = {
            kind: [resolve_name(f"transformer_engine_torch:{kind.lower()}_{way}") for way in ("fwd", "bwd")]
            for kind in ("LayerNorm", "RMSNorm")
        }
        self.dtypes = resolve_name("transformer_engine.pytorch.constants:TE_DType")
        fp8 = "transformer_engine.pytorch.quantization:FP8GlobalStateManager"
        self.in_fp8 = resolve_name(f"{fp8}.is_fp8_enabled")
        self._fp8_calibration = resolve_name(f"{fp8}.is_fp8_calibration")
        self._offloading = resolve_name("transformer_engine.pytorch.cpu_offload:is_cpu_offload_enabled")
        self._exporting = resolve_name("transformer_engine.pytorch.export:is_in_onnx_export_mode")
        self._gemm = resolve_name("transformer_engine.pytorch.cpp_extensions:general_gemm")
        self._delays_wgrad = release in DELAYS_WGRAD
        self._debug = resolve_name("transformer_engine.debug.pytorch.debug_state:TEDebugState")
        # Missing here rather than at the first call.
        resolve_name("transformer_engine.debug.pytorch.debug_state:TEDebugState.debug_enabled")
        self.fp8: TransformerEngineFp8 | str = f"fp8 with TransformerEngine {installed}, supported is {SUPPORTED_FP8}"
        """What flux uses of it in FP8, or why that cannot be used."""
        if release in SUPPORTED_FP8:
            try:
                self.fp8 = TransformerEngineFp8(release)
            except (ImportError, AttributeError) as error:
                self.fp8 = f"fp8: TransformerEngine {installed} is not as expected ({one_line(error)})"

    def why_stock(self, layer: Any, weight: torch.Tensor, fp8: bool = False) -> str | None:
        """Return why TransformerEngine must run this call of a ``Linear`` or ``LayerNormLinear`` itself, or None.

        ``weight`` is ``layer.weight``, which is slow to get. ``fp8``: the call is to run FP8, whose own reasons
        :attr:`fp8` has.
        """
        if any(_userbuffers(layer)):
            if layer.ub_bulk_wgrad and not weight.requires_grad:
                log_once(
                    "TransformerEngine's userbuffers (tp_comm_overlap) do not sum dx over ranks where a weight is "
                    "frozen: gradients of all layers before are wrong. Leave tp_comm_overlap off (docs/fine-tuning.md)"
                )
            return "userbuffers (tp_comm_overlap)"
        symmetric = getattr(layer, "symmetric_ar_type", None)
        if symmetric is not None and layer.parallel_mode == "row" and not layer.sequence_parallel:
            return f"torch's symmetric all-reduce (symmetric_ar_type={symmetric})"
        if layer.wgrad_store.delay_wgrad_compute():
            if not self._delays_wgrad:
                return f"delayed wgrad with TransformerEngine {self.installed}, supported is {DELAYS_WGRAD}"
            if layer.fuse_wgrad_accumulation and torch.is_grad_enabled() and not hasattr(weight, "main_grad"):
                return "delayed wgrad (delay_wgrad_compute) without main_grad"  # backward_dw would drop the gradient
        if not fp8 and self.in_fp8():
            return "fp8 (autocast)"
        if self._fp8_calibration():
            return "fp8 calibration"
        if not fp8 and layer.primary_weights_in_fp8:
            return "quantized weights"
        if len(layer.weight_names) != 1:
            return "parameters_split"
        if type(weight) is not torch.nn.Parameter and not fp8:
            return f"weight of type {type(weight).__name__}"
        if getattr(weight, "is_distributed_weight", False):
            return "distributed weight (is_distributed_weight)"
        if layer.fsdp_group is not None:
            return "TransformerEngine's FSDP"
        # Megatron's own offloading makes TransformerEngine say that it offloads, too: see patch.reasons.
        if self._offloading() and not (
            getattr(getattr(layer, "config", None), "fine_grained_activation_offloading", False)
            or (not fp8 and self.offloads_anything())
        ):
            return "activation offloading to the CPU"
        if self._exporting():
            return "ONNX export"
        if self._debug.debug_enabled:
            return "TransformerEngine's debug tools"
        return None

    def offloads_anything(self) -> bool:
        """Return True if its activation offloading, where it is on, takes whatever is saved: not the older kind."""
        module: Any = importlib.import_module("transformer_engine.pytorch.cpu_offload")
        return hasattr(module, "OFFLOAD_SYNCHRONIZER") and not module.NVTE_CPU_OFFLOAD_V1

    def delayed(self, layer: Any, bias: torch.Tensor | None) -> DelayedWgrad | None:
        """Return what takes this call's wgrad if it is delayed, else None.

        With ``delay_wgrad_compute`` backward puts operands and a function into the module's ``wgrad_store``.
        ``backward_dw``, which is stock's, takes the oldest, and does the rest: ``weight.grad``, the bias's gradient,
        and the hooks of Megatron's DistributedDataParallel. ``bias``: of a column-parallel layer that adds it; the GEMM
        sums its gradient. In FP8 None: quantising ``dy`` sums it.
        """
        store, gemm = layer.wgrad_store, self._gemm
        if not store.delay_wgrad_compute():
            return None

        def put(linear: LinearState, x: Any, dy: Any, split_accumulator: bool) -> torch.Tensor | None:
            parameter = linear.parameter
            how = gemm_options(linear, parameter.dtype, split_accumulator)

            def wgrad_gemm(x: Any, dy: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
                dw, db, *_ = gemm(x, dy, bias=bias, **how)
                return dw, db

            store.put([x, dy], wgrad_gemm)
            return None if linear.main_grad is None else unread_gradient(parameter, parameter.dtype)

        return put

    @staticmethod
    def returned(layer: Any) -> Returned | None:
        """Return which norm output a ``LayerNormLinear`` also returns: without sequence parallelism it is whole."""
        if not getattr(layer, "return_layernorm_output", False):
            return None
        gathered = getattr(layer, "return_layernorm_output_gathered", False)
        return "gathered" if gathered and layer.sequence_parallel else "local"

    def norm(self, layer: Any) -> Norm:
        """Return the norm of a ``LayerNormLinear``, for use in the current grad mode."""
        sms = layer.fwd_ln_sm_margin if torch.is_grad_enabled() else layer.inf_ln_sm_margin
        return _norm(self, layer.normalization, layer.eps, layer.zero_centered_gamma, sms, layer.bwd_ln_sm_margin)


@lru_cache(maxsize=256)
def _norm(
    te: TransformerEngine, kind: str, eps: float, zero_centered: bool, sms_forward: int, sms_backward: int
) -> Norm:
    """Make one norm for all layers with the same options: it has no state. The kernels leave ``sms_*`` SMs free."""
    has_mean = kind == "LayerNorm"
    kernel_forward, kernel_backward = te.norms[kind]

    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, quantizer: Any = None) -> Any:
        affine = (weight, bias) if has_mean else (weight,)
        # No output buffer.
        return kernel_forward(x, *affine, eps, None, quantizer, te.dtypes[x.dtype], sms_forward, zero_centered)

    def backward(
        dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor | None, deviation: torch.Tensor
    ) -> Any:
        statistics = (mean, deviation) if has_mean else (deviation,)
        found = kernel_backward(dy, x, *statistics, weight, sms_backward, zero_centered)
        return found if has_mean else (*found, None)

    return Norm(forward, backward)
