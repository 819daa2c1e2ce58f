"""The entry point that torch loads: hooks and nothing more; without the variable see unit/project/test_imports.py."""

import re
from pathlib import Path

import pytest

import megatron_flux_autoload
from megatron_flux import settings
from megatron_flux.megatron_lm import hooks
from tests.megatron_lm.conftest import Run

LOADED = """
import sys
import torch
print(*sorted({name for name in sys.modules if name.partition(".")[0] in ("megatron_flux_autoload", "megatron_flux",
               "megatron", "wrapt", "triton", "wandb")}))
"""


BUILDS = """
import torch
{imports}
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import RowParallelLinear
config = ModelParallelConfig(use_cpu_initialization=True, perform_initialization=False)
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
from megatron.core import parallel_state
parallel_state.initialize_model_parallel()
for _ in range(2):
    layer = RowParallelLinear(4, 4, config=config, init_method=None, bias=False, input_is_parallel=True,
                              skip_bias_add=True)
"""
STEPS = """
with cpu_shims():
    layer(torch.ones(2, 1, 4))
for _ in range(2):
    torch.optim.SGD(layer.parameters(), 0.1).step()
"""


def test_a_script_without_megatron_training_is_switched_on(run_forked: Run, tmp_path: Path) -> None:
    """Its first linear does it; rank 0 says so, and after the first optimizer step what ran."""
    script = tmp_path / "script.py"
    script.write_text(BUILDS.format(imports="from megatron_flux.train.shims import cpu_shims") + STEPS)
    result = run_forked(str(script), MEGATRON_FLUX="1")
    assert result.code == 0, result.err
    on, ran = (line for line in result.out.splitlines() if line.startswith("> megatron-flux"))
    assert re.fullmatch(r"> megatron-flux \S+ is on: megatron-core [\d.]+, \d+ methods replaced", on)
    assert re.search("after the first optimizer step: layers that run flux: 0; .*row: tp = 1", ran)


@pytest.mark.parametrize(
    ("imports", "on"), [("import importlib, megatron_flux; importlib.reload(megatron_flux)", True), ("", False)]
)
def test_a_script_that_imports_flux_needs_no_plugins_of_torch(
    run_forked: Run, tmp_path: Path, imports: str, on: bool
) -> None:
    """``reload``: the warm Python has imported it before the variable was set."""
    script = tmp_path / "script.py"
    script.write_text(BUILDS.format(imports=imports))
    result = run_forked(str(script), MEGATRON_FLUX="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.code == 0, result.err
    assert result.out.startswith("> megatron-flux ") is on


@pytest.mark.parametrize(("value", "waits"), [(None, 0), ("", 0), ("False", 0), ("1", 1), ("maybe", 1)])
def test_what_the_variable_switches(monkeypatch: pytest.MonkeyPatch, value: str | None, waits: int) -> None:
    registered: list[int] = []
    monkeypatch.setattr(hooks, "register", lambda: registered.append(1))
    monkeypatch.delenv("MEGATRON_FLUX", raising=False)
    if value is not None:
        monkeypatch.setenv("MEGATRON_FLUX", value)
    megatron_flux_autoload.load()
    assert len(registered) == waits
    assert megatron_flux_autoload.OFF == settings.OFF


def test_waits_with_any_other_value_which_the_parser_may_refuse(run: Run, installed: Path) -> None:
    """This package may be imported before torch, which then loads a part of it in the middle of that."""
    result = run("-c", f"import megatron_flux.run.node\n{LOADED}", path=(installed,), MEGATRON_FLUX="yes")
    assert result.code == 0, result.err
    loaded = result.out.split()
    assert {"megatron_flux.megatron_lm.hooks", "wrapt"} <= set(loaded)
    assert [name for name in loaded if name.partition(".")[0] in ("megatron", "triton", "wandb")] == []
