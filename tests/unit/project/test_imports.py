"""``import megatron_flux`` neither imports optional or heavy packages nor patches anything."""

import re
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


CORE_ALONE = """
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
class Missing:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing)
"""


def test_patch_and_megatron_flux_1_need_the_core_alone() -> None:
    python(
        CORE_ALONE + "import megatron_flux, megatron_flux.megatron_lm.start, megatron_flux.megatron_lm.hooks as hooks\n"
        "megatron_flux.patch(); assert megatron_flux.is_patched(); hooks.register()"
    )


def test_the_command_without_its_packages_says_what_to_install() -> None:
    main = CORE_ALONE + "from megatron_flux_autoload import main\nmain()"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", main], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert re.fullmatch(
        r"megatron-flux: error: it needs \w+, which is not installed: pip install jinja2 plotly rich pyyaml "
        r"\(the extra run\)\n",
        done.stderr,
    )


def test_import_patches_nothing() -> None:
    assert python(PATCHES_NOTHING) == "stock"
