"""``import megatron_flux`` neither imports optional or heavy packages nor patches anything; nor does ``import torch``.

All in one process: to import torch and megatron-core takes nearly all of its time.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

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
before = set(sys.modules)
import torch
ours = ("megatron_flux_autoload", "megatron_flux", "megatron", "wrapt", "triton", "wandb")
loaded = [name for name in set(sys.modules) - before if name.partition(".")[0] in ours]
# An installed copy of this package may be the one that torch loads; it must be as quiet.
assert loaded == ["megatron_flux_autoload"], loaded
before = set(sys.modules)
import megatron_flux, megatron_flux.layers, megatron_flux.megatron_lm
imported = {name.partition(".")[0] for name in set(sys.modules) - before}
heavy = {"triton", "transformer_engine", "apex", "wandb", "megatron", "plotly", "fused_weight_gradient_mlp_cuda"}
assert "megatron_flux" in imported and not imported & heavy, imported
"""

SET_LATE = """
import os
from megatron_flux import settings

def late(starts):
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    os.environ["MEGATRON_FLUX_TIMEOUT_S"] = "7"
    if starts:
        torch._C._cuda_init = lambda: None  # a GPU that there is not
        torch.cuda._is_compiled = lambda: True
        torch._C._cuda_getDeviceCount = lambda: 0
        torch.cuda._cudart = object()
        torch._C._cudart = object()
        torch.cuda._lazy_init()
        assert torch.cuda.is_initialized()
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    os.environ["MEGATRON_FLUX_TIMEOUT_S"] = "9"
    print(settings.one_queue(), settings.timeout_s(), flush=True)

for starts in (True, False):
    if (child := os.fork()) == 0:
        try:
            late(starts)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
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


def test_the_core_alone_is_imported_and_patches_when_told(installed: Path) -> None:
    """Without the packages of the extras, the command says what to install. What is set after CUDA's start, does not
    count.
    """
    code = CORE_ALONE + IS_LIGHT + SET_LATE + COMMAND_IS_REFUSED + PATCHES_NOTHING + PATCHES
    path = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if name != "MEGATRON_FLUX"} | {"PYTHONPATH": path}
    # -I would hide the checkout when the package is found through PYTHONPATH.
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "False 7.0\nTrue 9.0\n", done.stderr
    assert re.match(
        r"megatron-flux: error: it needs \w+, which is not installed: pip install jinja2 plotly rich pyyaml "
        r"\(the extra run\)\n",
        done.stderr,
    )
