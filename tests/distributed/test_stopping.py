"""SIGTERM to ranks whose main thread waits where no Python runs: a request to stop, or the end of a run that failed."""

import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.test_launcher import begin
from tests.processes import MARK, end, free_port, left, until, with_mark

pytestmark = pytest.mark.slow

SECONDS = 25.0
"""For what takes a few on a busy machine. A launcher that waits for ranks which ignore its SIGTERM takes thirty."""
ALONE = ("--standalone", "--nproc-per-node=2", "-m", "tests.distributed.stopping")
OWN = """
import gc, sys; gc.disable()
from megatron_flux.run import launcher
launcher.launch("tests.distributed.stopping", sys.argv[1], 2, left="")
"""
LAUNCHERS = {
    "torchrun": ("-m", "torch.distributed.run", *ALONE),
    "node": ("-m", "megatron_flux.run.node", *ALONE),
    "own": ("-c", OWN),
}

Start = Callable[..., Any]


@pytest.fixture
def mark() -> Iterator[str]:
    mark = uuid.uuid4().hex
    yield mark
    end(mark)


@pytest.fixture
def start(mark: str) -> Iterator[Start]:
    """Start the ranks with a launcher of ``python``."""
    started: list[Any] = []

    def begins(how: str, what: str, folder: Path, python: str = sys.executable) -> Any:
        words = (*LAUNCHERS[how], *([f"{what} {folder}"] if how == "own" else [what, str(folder)]))
        started.append(begin(python, *words, **{MARK: with_mark(mark)}))
        return started[-1]

    yield begins
    end(mark)
    for process in started:
        process.kill()
        process.communicate(timeout=60)


def ready(folder: Path, ranks: int = 2) -> list[int]:
    """The processes of the ranks, once all of them listen."""
    files = [folder / f"ready-{rank}" for rank in range(ranks)]
    until(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def test_a_rank_that_dies_after_the_request_ends_the_others(start: Start, mark: str, tmp_path: Path) -> None:
    process = start("node", "die-later", tmp_path)
    ready(tmp_path)
    began = time.monotonic()
    process.terminate()
    process.communicate(timeout=120)
    assert time.monotonic() - began < SECONDS
    assert left(mark, SECONDS) == []


def test_a_second_signal_ends_the_ranks_at_once(start: Start, mark: str, tmp_path: Path) -> None:
    process = start("own", "wait", tmp_path)
    ready(tmp_path)
    process.terminate()
    assert any("a second one ends them at once" in line for line in process.stderr)
    process.terminate()
    _, said = process.communicate(timeout=120)
    assert "InterruptedRunError: stopped by SIGTERM" in said
    assert left(mark, SECONDS) == []


@pytest.mark.parametrize(("how", "name"), [("node", "SIGTERM"), ("torchrun", "SIGINT")])
def test_all_ranks_stop_in_order(start: Start, warm_python: str, tmp_path: Path, how: str, name: str) -> None:
    """Asked again and again: all together by our launcher, or one of them alone."""
    process = start(how, "ask", tmp_path, warm_python)
    _, second = ready(tmp_path)
    asked = process.pid if how == "node" else second
    for _ in range(3):
        with contextlib.suppress(ProcessLookupError):  # ended by the request before
            os.kill(asked, signal.Signals[name])
        time.sleep(0.05)
    _, said = process.communicate(timeout=120)
    assert {file.name for file in tmp_path.glob("ended-*")} == {"ended-0", "ended-1"}, said
    assert process.returncode == 0, said


def test_a_node_is_told_to_end_since_another_has_failed(mark: str, tmp_path: Path) -> None:
    """Slurm does so. A killed rank says nothing, but the note of its launcher does."""
    port = free_port()
    words = ["-m", "megatron_flux.run.node", "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    nodes = []
    for node in range(2):
        more = {"SLURMD_NODENAME": f"n{node}", "MEGATRON_FLUX_FAILURES": str(tmp_path / "failures")}
        of_node = [f"--master-port={port}", f"--node-rank={node}", *ALONE[-2:], "kill", str(tmp_path)]
        nodes.append(begin(sys.executable, *words, *of_node, **{MARK: with_mark(mark), **more}))
    try:
        first, _ = ready(tmp_path)
        assert nodes[1].wait(120) != 0
        assert psutil.Process(first).is_running(), "the first rank has noticed by itself, and shows nothing"
        nodes[0].terminate()
        began = time.monotonic()
        nodes[0].communicate(timeout=120)
        assert time.monotonic() - began < SECONDS
        assert left(mark, SECONDS) == []
    finally:
        for node in nodes:
            node.kill()
            node.communicate(timeout=60)


def test_a_node_that_waits_for_others_can_be_ended(tmp_path: Path) -> None:
    """No Python runs while it waits. It leaves no files."""
    words = ["--nnodes=2", "--node-rank=0", "--master-port=0", "none.py"]
    process = begin(sys.executable, "-m", "megatron_flux.run.node", *words, TMPDIR=str(tmp_path))
    try:
        connections = psutil.Process(process.pid).net_connections
        until(lambda: psutil.CONN_LISTEN in [connection.status for connection in connections()])
        time.sleep(0.5)
        process.terminate()
        _, said = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGTERM
    assert "was stopped by SIGTERM" in said
    assert not list(tmp_path.iterdir())
