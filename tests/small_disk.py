"""A file system of a few megabytes, mounted for a test: what a full disk does cannot be had otherwise."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, megabytes: float) -> Iterator[Path]:
    """``folder`` as a disk of that size; skips the test where nothing may be mounted."""
    folder.mkdir()
    size = f"size={int(megabytes * 1e6)}"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no disk to fill: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path) -> None:
    """Take what is left of the disk."""
    with (folder / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 65536)
        except OSError:
            pass
