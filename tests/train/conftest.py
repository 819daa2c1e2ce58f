"""Fixtures for the training commands: a small corpus with a cache of its own, and a way to run the command."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import megatron_flux
from megatron_flux.metrics.recorder import read_records
from tests.distributed.conftest import templates

__all__ = ["templates"]

Run = Callable[..., subprocess.CompletedProcess[str]]

UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}
"""For fresh Pythons of which only the end matters: torch leaves its compilers out, a quarter of what a rank imports."""

SMALL = ("--num-layers", "1", "--seq-length", "64", "--micro-batch-size", "1", "--global-batch-size", "1")
"""For trainings of which no size matters: starts are dear enough."""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of real text: this package's own source files."""
    source = Path(megatron_flux.__file__).parent
    folder = tmp_path_factory.mktemp("corpus")
    for file in sorted(source.rglob("*.py")):
        (folder / f"{file.parent.name}-{file.name}").write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user without a launcher or a process of wandb's, with an empty data cache."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "WANDB_SERVICE")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, "MEGATRON_FLUX_CACHE": str(tmp_path_factory.mktemp("cache")), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def command(environment: dict[str, str], corpus: Path, warm_python: str) -> Run:
    """Run ``megatron-flux`` on the small corpus as a warm process; another exit code than ``code`` fails the test."""

    def run(*arguments: str | Path, code: int = 0, data: bool = True, **more: str) -> subprocess.CompletedProcess[str]:
        words = [warm_python, "-m", "megatron_flux.cli", *map(str, arguments)]
        done = subprocess.run(
            [*words, "--data", str(corpus)] if data else words,
            capture_output=True,
            text=True,
            timeout=600,  # a machine shared by many is slow, not wrong
            env={**environment, **more},
        )
        assert done.returncode == code, f"{words}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@contextmanager
def running(
    words: Sequence[str | Path], environment: dict[str, str], until: Callable[[], object], log: Path, **how: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start a command and wait until ``until()`` is true. Its errors go to ``log``; it is killed at the end."""
    with log.open("w") as file:
        process = subprocess.Popen([*map(str, words)], stderr=file, text=True, env=environment, **how)
        try:
            deadline = time.monotonic() + 300
            while not until():
                assert time.monotonic() < deadline, log.read_text()
                assert process.poll() is None, log.read_text()
                time.sleep(0.005)
            yield process
        finally:
            process.kill()


def records(folder: Path) -> list[dict[str, Any]]:
    """The records of baseline or flux."""
    return read_records(folder / "metrics.jsonl")


def losses(folder: Path) -> list[float]:
    return [record["lm loss"] for record in records(folder)]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())
