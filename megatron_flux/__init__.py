"""Fused communication-GEMM tensor parallelism for Megatron.

Public face::

    import megatron_flux

    megatron_flux.patch()                 # megatron-core's tensor-parallel linears now run the fused operators
    megatron_flux.unpatch()               # the identical stock methods are back
    with megatron_flux.patched(): ...     # both, as a context
    megatron_flux.flux_spec(layer_spec)   # without a patch: a layer spec whose linears run flux
    megatron_flux.tune_model(model, sequence, micro_batch_size)  # before the first step, not in it
    megatron_flux.release()               # between steps: free workspaces and kept inputs until the next call

    megatron_flux.ops.all_gather_gemm     # the operators on their own
    megatron_flux.ops.gemm_reduce_scatter

Importing this package patches nothing and imports neither megatron-core, triton, TransformerEngine, apex nor wandb. Nor
torch, until one of these is asked for: the help of a command must not wait for it.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_flux.config import FluxConfig
from megatron_flux.errors import FallbackError, FluxError, OperatorError, UnsupportedVersionError, UserError
from megatron_flux.settings import OFF
from megatron_flux.version import __version__

if TYPE_CHECKING:
    from megatron_flux import ops
    from megatron_flux.layers.release import release
    from megatron_flux.patch.layer_options import set_backend
    from megatron_flux.patch.patcher import is_patched, patch, patched, report, tune_model, unpatch
    from megatron_flux.patch.spec import flux_spec, spec_provider

__all__ = [
    "FallbackError",
    "FluxConfig",
    "FluxError",
    "OperatorError",
    "UnsupportedVersionError",
    "UserError",
    "__version__",
    "flux_spec",
    "is_patched",
    "ops",
    "patch",
    "patched",
    "release",
    "report",
    "set_backend",
    "spec_provider",
    "tune_model",
    "unpatch",
]
_MODULES = {
    "release": "layers.release",
    "set_backend": "patch.layer_options",
    **dict.fromkeys(("is_patched", "patch", "patched", "report", "tune_model", "unpatch"), "patch.patcher"),
    **dict.fromkeys(("flux_spec", "spec_provider"), "patch.spec"),
}

# Whoever imports a part of this package first would bind its name here, in the place of the function's.
import_module(f"{__name__}.patch")
globals().pop("patch", None)


def __getattr__(name: str) -> Any:
    if name == "ops":
        return import_module(f"{__name__}.ops")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


if os.environ.get("MEGATRON_FLUX", "").lower() not in OFF:
    # First of all: as it is imported, torch may load megatron_flux_autoload, which imports parts of this package whole.
    import torch  # noqa: F401

    from megatron_flux.patch import first_linear

    first_linear.watch()  # here, too: torch may load no entry points (TORCH_DEVICE_BACKEND_AUTOLOAD=0)
