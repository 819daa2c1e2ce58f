"""A stand-in Megatron-LM tree, and a way to run its script on two gloo processes or one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.megatron_lm.stand_in import write_tree
from tests.train.conftest import UNCOMPILED

ROOT = Path(__file__).parents[2]
SCRIPT = "pretrain_tiny.py"
LAYOUT = ("--tensor-model-parallel-size", "2", "--sequence-parallel")


@dataclass
class Result:
    """Output of a run."""

    code: int
    out: str
    err: str

    def rows(self, kind: str) -> list[Any]:
        """The decoded rows that the stand-in's ``tensorboard`` or ``wandb`` writer printed."""
        return [json.loads(line.split(" ", 1)[1]) for line in self.out.splitlines() if line.startswith(kind + " ")]

    @property
    def losses(self) -> list[float]:
        return [value for _, name, value in self.rows("tensorboard") if name == "lm loss"]

    def flux(self, name: str) -> list[float]:
        return [value for _, tag, value in self.rows("tensorboard") if tag == f"flux/{name}"]


Run = Callable[..., Result]


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree nobody changes."""
    return write_tree(tmp_path_factory.mktemp("megatron-lm"))


def environment_of(path: tuple[Path, ...], more: dict[str, str]) -> dict[str, str]:
    """This one's without what a launcher or a test sets, and with this checkout and ``path`` on Python's path."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "MEGATRON_FLUX")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    earlier = [kept["PYTHONPATH"]] if kept.get("PYTHONPATH") else []
    paths = os.pathsep.join([str(ROOT), *map(str, path), *earlier])
    return {**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}


@pytest.fixture(scope="session")
def run(tree: Path, warm_python: str) -> Run:
    """Run ``python WORDS`` on ``processes`` ranks under torchrun, in the tree, with this checkout on the path.

    torchrun itself is warm, what it starts is fresh, unless another ``python`` is given.
    """

    def run_(
        *words: str,
        processes: int = 1,
        folder: Path = tree,
        path: tuple[Path, ...] = (),
        python: str = sys.executable,
        **more: str,
    ) -> Result:
        environment = environment_of(path, {"PYTHON_EXEC": python, **UNCOMPILED, **more})
        launcher = [warm_python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        done = subprocess.run(
            [*(launcher if processes > 1 else [python]), *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,  # a machine shared by many is slow, not wrong
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return run_


@pytest.fixture(scope="session")
def run_forked(run: Run, warm_python: str) -> Run:
    """Do what ``run`` does in warm ranks: not for what happens as torch is imported."""
    return partial(run, python=warm_python)
