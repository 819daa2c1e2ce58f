"""``import megatron_flux`` neither imports optional or heavy packages nor patches anything."""

import re
import subprocess
import sys

CORE_ALONE = """
import gc; gc.disable()
import sys
import tomllib
from importlib import metadata
from packaging.requirements import Requirement
with open("pyproject.toml", "rb") as file:
    extras = tomllib.load(file)["project"]["optional-dependencies"]
names = {Requirement(line).name.lower() for name in ("run", "wandb", "quant")
    for line in extras[name]}
modules = {module for module, found in metadata.packages_distributions().items() if names & {n.lower() for n in found}}
assert {"plotly", "yaml", "rich"} <= modules, modules
sys.modules |= dict.fromkeys(modules)
"""

IS_LIGHT = """
import torch
before = set(sys.modules)
import megatron_flux, megatron_flux.layers, megatron_flux.megatron_lm
imported = {name.partition(".")[0] for name in set(sys.modules) - before}
heavy = {"triton", "transformer_engine", "apex", "wandb", "megatron", "plotly", "fused_weight_gradient_mlp_cuda"}
assert "megatron_flux" in imported and not imported & heavy, imported
"""

COMMAND_IS_REFUSED = """
import megatron_flux_autoload
try:
    megatron_flux_autoload.main()
except SystemExit as ended:
    assert ended.code == 2
"""

PATCHES_NOTHING = """
import megatron.core.tensor_parallel.layers as layers
assert not megatron_flux.is_patched()
for owner, name in ((layers.ColumnParallelLinear, "_forward_impl"), (layers.RowParallelLinear, "forward")):
    method = vars(owner)[name]
    assert method.__module__ == layers.__name__, method
    assert method.__qualname__ == f"{owner.__name__}.{name}", method
assert megatron_flux.report()["patched"] is False
"""

PATCHES = """
import megatron_flux.megatron_lm.start, megatron_flux.megatron_lm.hooks as hooks
megatron_flux.patch()
assert megatron_flux.is_patched()
hooks.register()
"""


HELP = """
import contextlib, io, sys
from megatron_flux.cli.main import COMMANDS, run
for words in ([], *map(str.split, COMMANDS)):
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        run([*words, "--help"])
    assert said.getvalue().startswith("usage: megatron-flux"), words
assert not {"torch", "megatron", "numpy", "rich"} & sys.modules.keys(), sorted(sys.modules)
"""


def test_help_does_not_wait_for_torch() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", HELP], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_core_alone_is_imported_and_patches_when_told() -> None:
    """Without the packages of the extras, the command says what to install."""
    code = CORE_ALONE + IS_LIGHT + COMMAND_IS_REFUSED + PATCHES_NOTHING + PATCHES
    # -I would hide the checkout when the package is found through PYTHONPATH.
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.match(
        r"megatron-flux: error: it needs \w+, which is not installed: pip install jinja2 plotly rich pyyaml "
        r"\(the extra run\)\n",
        done.stderr,
    )
