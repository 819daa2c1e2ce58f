"""What every launched rank executes: ``python -m megatron_flux.run.worker MODULE ARGUMENT`` calls ``MODULE.work``.

Before that it logs as rank 0 or as one of the others, and learns how to end (:func:`megatron_flux.run.rank.serve`).
"""

from __future__ import annotations

import importlib
import os
import sys
from types import MappingProxyType

from megatron_flux.run.rank import serve

MEASURED = MappingProxyType(
    {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # as Megatron trains
        "NCCL_NVLS_ENABLE": "0",  # no NVLink multicast on any side: the fused kernels have none
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "UB_SKIPMC": "1",  # TransformerEngine's userbuffers refuse to start without it where multicast is missing
    }
)
"""Environment of processes that are measured: it decides the figures."""


def set_environment() -> None:
    """Apply :data:`MEASURED` but for what the user has set, before CUDA, NCCL or TransformerEngine start."""
    for name, value in MEASURED.items():
        os.environ.setdefault(name, value)


def work() -> None:
    """Do what the command line says."""
    module, argument = sys.argv[1:]
    importlib.import_module(module).work(argument)


if __name__ == "__main__":
    serve(work)
