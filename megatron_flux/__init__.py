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

Importing this package patches nothing and imports neither megatron-core, triton, TransformerEngine, apex nor wandb.
"""

# First of all: as it is imported, torch may load megatron_flux_autoload, which imports parts of this package whole.
import torch  # noqa: F401

from megatron_flux import ops
from megatron_flux.config import FluxConfig
from megatron_flux.errors import FallbackError, FluxError, OperatorError, UnsupportedVersionError, UserError
from megatron_flux.layers.release import release
from megatron_flux.patch import first_linear
from megatron_flux.patch.layer_options import set_backend
from megatron_flux.patch.patcher import is_patched, patch, patched, report, tune_model, unpatch
from megatron_flux.patch.spec import flux_spec, spec_provider
from megatron_flux.version import __version__

first_linear.watch()  # here, too: torch may load no entry points (TORCH_DEVICE_BACKEND_AUTOLOAD=0)

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
