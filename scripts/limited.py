"""A torchrun with a time limit, for the scripts that start others' programs."""

from __future__ import annotations

import subprocess
from pathlib import Path


def run(words: list[str], *, cwd: Path, environment: dict[str, str], log: Path, seconds: float) -> int | None:
    """The exit code of ``words``, or None where it ran past ``seconds`` and was ended; output goes to ``log``.

    torchrun's ranks have sessions of their own, so that killing its group would leave them: it is asked to end them
    first, for which it takes up to 30 seconds.
    """
    with log.open("w") as file:
        process = subprocess.Popen(words, cwd=cwd, env=environment, stdout=file, stderr=file)  # noqa: S603
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(45)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return None
