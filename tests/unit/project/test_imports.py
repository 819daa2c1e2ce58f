"""What ``import megatron_flux`` does not do: import optional or heavy packages, or patch anything."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("triton", "transformer_engine", "apex", "wandb", "megatron", "plotly", "fused_weight_gradient_mlp_cuda")

IMPORTED_BY = """
import sys
import torch
before = set(sys.modules)
import {module}
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before}}))
"""

PATCHES_NOTHING = """
import gc; gc.disable()
import megatron_flux
import megatron.core.tensor_parallel.layers as layers
assert not megatron_flux.is_patched()
for owner, name in ((layers.ColumnParallelLinear, "_forward_impl"), (layers.RowParallelLinear, "forward")):
    method = vars(owner)[name]
    assert method.__module__ == layers.__name__, method
    assert method.__qualname__ == f"{owner.__name__}.{name}", method
assert megatron_flux.report()["patched"] is False
print("stock")
"""


def python(code: str) -> str:
    # -I would hide the checkout when the package is found through PYTHONPATH.
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_light() -> None:
    imported = python(
        IMPORTED_BY.format(module="megatron_flux, megatron_flux.layers, megatron_flux.megatron_lm")
    ).split()
    assert "megatron_flux" in imported
    assert [name for name in HEAVY if name in imported] == []


def test_import_patches_nothing() -> None:
    assert python(PATCHES_NOTHING) == "stock"
