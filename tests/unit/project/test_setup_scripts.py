"""Options of measure.sh: the commands that it gives them to take them."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron_flux.cli import command_line
from megatron_flux.cli.main import COMMANDS, find, taken_by

ROOT = Path(__file__).parents[3]


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
