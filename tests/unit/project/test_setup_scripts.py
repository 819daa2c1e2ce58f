"""quickstart.sh: what it installs and says, with a Python that imitates pip. Options of measure.sh."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_flux.cli import command_line
from megatron_flux.cli.main import COMMANDS, find, taken_by
from tests.executable import executable

ROOT = Path(__file__).parents[3]
PYTHON = r"""#!/bin/bash
# An installation is a file of its name beside the interpreter; what pip is asked for is written down.
case "$*" in
    --version) echo Python 3.12.1 ;;
    *"-m venv .venv")
        mkdir -p .venv/bin .venv/packages
        cp "$0" .venv/bin/python
        ;;
    "-m pip index versions torch"*) echo "Available versions: 2.14.0, $(cat offered), 2.12.0" && echo "$*" >>asked ;;
    "-m pip install "*)
        words="$*"
        echo "${words#-m pip install --no-compile --disable-pip-version-check --retries 2 --timeout 15 }" >>asked
        mkdir -p .venv/packages/half-1.dist-info
        [ ! -e no-index ] || exit 1
        case "$*" in *--editable*) touch .venv/bin/megatron_flux ;; *) touch .venv/bin/torch ;; esac
        ;;
    "-m compileall "*) echo "$*" >>compiled ;;
    *"import megatron_flux, torch") test -e .venv/bin/megatron_flux ;;
    *"import torch") test -e .venv/bin/torch ;;
    *"sys.prefix == sys.base_prefix)") exit 1 ;;
    *print\(sys.prefix\)) echo "$PWD/.venv" ;;
    *purelib*) echo "$PWD/.venv/packages" ;;
    *device_count*) echo 0 ;;
    "-m megatron_flux.cli compare "*) echo "ran: $*" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The scripts and nothing else, with a Python to make .venv with; no driver, and PyPI's versions of torch."""
    (tmp_path / "scripts").mkdir()
    for name in ("environment.sh", "quickstart.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "offered").write_text("2.13.0")
    python = executable(tmp_path / "bin" / "python3", PYTHON)
    monkeypatch.setenv("MEGATRON_FLUX_PYTHON", str(python))
    monkeypatch.delenv("MEGATRON_FLUX_TORCH", raising=False)
    monkeypatch.setenv("PATH", f"{python.parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def run(checkout: Path) -> tuple[int, str]:
    command = ["bash", "scripts/quickstart.sh", "--dry-run"]
    done = subprocess.run(
        command, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
    )
    return done.returncode, done.stdout


def test_everything_is_installed_once(checkout: Path) -> None:
    code, said = run(checkout)
    assert code == 0
    assert said.index("making .venv with Python 3.12.1") < said.index("to download") < said.index("ran: ")
    assert "up to 400 MB to download" in said
    packages = checkout / ".venv" / "packages"
    assert (checkout / "compiled").read_text() == f"-m compileall -q {packages}/torch {packages}/sympy\n"
    (checkout / "asked").unlink()
    assert "ran: " in run(checkout)[1]
    assert not (checkout / "asked").exists()
    (checkout / "pyproject.toml").write_text("[project]\nanother = 1\n")
    run(checkout)
    assert (checkout / "asked").read_text() == "--editable .[run,wandb]\n"
    assert len((checkout / "compiled").read_text().splitlines()) == 1, "torch was there, and compiled"


def test_a_broken_environment_is_made_anew_if_it_is_ours(checkout: Path) -> None:
    own = checkout / ".venv" / "mine"
    own.parent.mkdir()
    own.touch()
    code, said = run(checkout)
    assert (code, own.exists()) == (2, True)
    assert "error: .venv has no Python that runs, and was not made here; repair it or move it away" in said
    own.unlink()
    assert run(checkout)[0] == 0
    (checkout / ".venv/bin/python").unlink()
    code, said = run(checkout)
    assert code == 0
    assert "making .venv anew: its Python does not run" in said


def stages(gpus: int) -> list[tuple[str, list[str]]]:
    command = [str(ROOT / "scripts" / "measure.sh"), "--dry-run", "/nowhere"]
    environment = os.environ | {"MEGATRON_FLUX_GPUS": str(gpus)}
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    return [(line.partition(":")[0], shlex.split(line.partition(":")[2])) for line in printed.splitlines()]


@pytest.mark.parametrize("gpus", [2, 4])
def test_commands_take_their_options(gpus: int) -> None:
    checked = []
    for stage, words in stages(gpus):
        if "megatron_flux.cli" not in words:
            continue
        name, rest = find(words[words.index("megatron_flux.cli") + 1 :])
        model, launches = taken_by(COMMANDS[name])
        command_line.read(model, rest, prog=stage, about="", launches=launches)
        checked.append(stage)
    assert len(checked) > 20
