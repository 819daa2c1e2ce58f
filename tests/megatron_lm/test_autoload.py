"""The entry point that torch loads: inert without the variable, hooks and nothing more with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron_lm.conftest import Run

LOADED = """
import sys
import torch
print(*sorted({name for name in sys.modules if name.partition(".")[0] in ("megatron_flux_autoload", "megatron_flux",
               "megatron", "wrapt", "triton", "wandb")}))
"""


@pytest.mark.parametrize("module", ["megatron_flux", "megatron_flux.run.node"])
def test_this_package_may_be_imported_before_torch(run: Run, installed: Path, module: str) -> None:
    result = run("-c", f"import {module}; print('imported')", path=(installed,), MEGATRON_FLUX="1")
    assert (result.code, result.out.split()) == (0, ["imported"]), result.err


@pytest.mark.parametrize("value", [None, "", "0"])
def test_inert_without_the_variable(run: Run, installed: Path, value: str | None) -> None:
    more = {} if value is None else {"MEGATRON_FLUX": value}
    result = run("-c", LOADED, path=(installed,), **more)
    assert result.code == 0, result.err
    # An installed copy of this package may be the one that torch loads; it must be as quiet.
    assert result.out.split() == ["megatron_flux_autoload"]


def test_waits_with_the_variable(run: Run, installed: Path) -> None:
    result = run("-c", LOADED, path=(installed,), MEGATRON_FLUX="1")
    assert result.code == 0, result.err
    loaded = result.out.split()
    assert {"megatron_flux.megatron_lm.hooks", "wrapt"} <= set(loaded)
    assert [name for name in loaded if name.partition(".")[0] in ("megatron", "triton", "wandb")] == []
