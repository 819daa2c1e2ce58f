"""What megatron_lm_gpus.py needs around the runs: a checkout that starts here, the environment, what was found here."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from megatron_flux.patch.megatron_core import version_of_tree
from megatron_flux.telemetry import environment

ROOT = Path(__file__).resolve().parents[1]
GROUP = "torch.backends"
_SUFFIX = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"


@dataclass(frozen=True)
class Prepared:
    """A checkout that can start here and the environment that its runs get."""

    checkout: Path
    environment: dict[str, str]
    scratch: Path

    def patched(self) -> Path:
        """A copy with the patch set applied; made once."""
        tree = self.scratch / "patched"
        if not tree.exists():
            shutil.copytree(self.checkout, tree, ignore=shutil.ignore_patterns("tests", ".git"))
            line = Version(version_of_tree(tree / "megatron" / "core")).release[:2]
            patches = sorted((ROOT / "patches" / "megatron-lm").glob(f"core_v{line[0]}.{line[1]}.*/*.patch"))
            if not patches:
                raise SystemExit(f"there is no patch set for Megatron-LM {line[0]}.{line[1]} in patches/megatron-lm")
            # Without a ceiling git takes the patches' paths as relative to a repository around the scratch folder.
            environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent.resolve())}
            command = ["git", "apply", *map(str, patches)]
            subprocess.run(command, cwd=tree, env=environment, check=True)  # noqa: S603
        return tree


def gpus() -> int:
    """How many GPUs this machine has."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def prepare(checkout: Path, scratch: Path) -> Prepared:
    """Have the checkout's C++ helpers built, and this checkout of megatron-flux on the path with its entry point."""
    path = [str(ROOT), str(ROOT / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])]
    hidden = ("MEGATRON_FLUX", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    if not any(point.name == "megatron_flux" for point in entry_points(group=GROUP)):
        path.insert(0, str(_entry_point(scratch / "site")))
    # What Megatron-LM's Makefile asks, python3 and python3-config, must be about the Python that runs it.
    tools = scratch / "bin"
    _tool(tools / "python3-config", f"exec {shlex.quote(sys.executable)} -c {shlex.quote(_SUFFIX)}")
    words = [str(tools), str(Path(sys.executable).parent), variables.get("PATH", os.defpath)]
    variables |= {
        "PYTHONPATH": os.pathsep.join(path),
        "PATH": os.pathsep.join(words),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_NVLS_ENABLE": variables.get("NCCL_NVLS_ENABLE", "0"),
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    _helpers(checkout, tools, variables)
    return Prepared(checkout, variables, scratch)


def _tool(path: Path, line: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def _entry_point(site: Path) -> Path:
    """A folder that, on the path, is megatron-flux as pip installs it: for a machine where only its source is."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    info = site / "megatron_flux-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-flux\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *(f"{n} = {v}" for n, v in points.items())]) + "\n")
    return site


def _helpers(checkout: Path, tools: Path, variables: dict[str, str]) -> None:
    """Have the Python extension that Megatron-LM compiles with ``make`` at each start.

    Where it cannot be compiled, the installed megatron-core's prebuilt one is put there, and ``make`` is answered.
    """
    datasets = checkout / "megatron" / "core" / "datasets"

    def works(*words: str) -> bool:
        done = subprocess.run(words, cwd=checkout, env=variables, capture_output=True, text=True, check=False)  # noqa: S603
        return done.returncode == 0

    imports = (sys.executable, "-c", "import megatron.core.datasets.helpers_cpp")
    if shutil.which("make") and works("make", "-C", str(datasets)) and works(*imports):
        return
    try:
        prebuilt = Path(str(distribution("megatron-core").locate_file("megatron/core/datasets")))
        for file in prebuilt.glob("helpers_cpp*.so"):
            shutil.copy(file, datasets)
    except PackageNotFoundError:
        pass
    if not works(*imports):
        sys.exit(f"megatron_lm_gpus.py: make -C {datasets} does not work here, and no prebuilt helpers_cpp does")
    _tool(tools / "make", "exit 0")


def described(checkout: Path, nproc: int) -> dict[str, Any]:
    """Device, link and versions; the checkout's own megatron-core comes before an installed one."""
    return {
        "Megatron-LM": version_of_tree(checkout / "megatron" / "core"),
        "device": environment.device_name(),
        "processes": nproc,
        "link": environment.link(),
        "versions": {name: found for name, found in environment.versions().items() if name != "megatron-core"},
    }


def choices(path: Path) -> dict[str, Any]:
    """What the tuner chose by call: the proof of which kernels ran."""
    return json.loads(path.read_text()) if path.exists() else {}
