"""Markers by folder; one warm Python for all tests; no process may be left behind when they have ended."""

import gc
import signal
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.left_behind import pytest_sessionfinish, pytest_sessionstart, pytest_terminal_summary
from tests.warm import Warm

__all__ = ["pytest_sessionfinish", "pytest_sessionstart", "pytest_terminal_summary"]

TESTS = Path(__file__).parent
RANKS = ("distributed", "field", "megatron_lm", "slurm", "train")
"""Folders whose tests start processes that communicate."""
COMMANDS = ("megatron_lm", "slurm")
"""Folders whose tests start commands and jobs alone."""
WITHOUT_MEGATRON = ("bench", "comm", "kernels", "layers", "metrics", "ops", "quant", "telemetry")
"""Folders of tests/unit that import no megatron-core."""
OVER_TE = {"te_world", "te_world2", "te_world4", "libraries_world2", "newest_bridge_world2"}
"""Fixtures whose workers have imported TransformerEngine."""
LONGER = ("test_checkpoint.py", "test_compiled", "test_report.py", "test_signals.py", "test_wandb_", "test_watch.py")
"""Beginnings of names of files there that compile kernels, start processes or draw pages."""

# On a busy machine a test that takes a millisecond may wait longer than hypothesis allows by default.
hypothesis.settings.register_profile("busy", deadline=None)
hypothesis.settings.load_profile("busy")

# A shell without job control starts a command with & that ignores SIGINT; tests' processes would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all has been imported, of which nothing is garbage


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m fast``, do not import what has no fast test: megatron-core may not even be importable."""
    if config.option.markexpr != "fast" or not collection_path.is_relative_to(TESTS):
        return None
    folder, *below = (*collection_path.relative_to(TESTS).parts, "unit")[:2]
    return folder != "unit" or below[0] not in (*WITHOUT_MEGATRON, "unit") or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder; docs/testing.md says what the markers mean."""
    for item in items:
        folder, *below = item.path.relative_to(TESTS).parts
        fixtures = set(getattr(item, "fixturenames", ()))
        longer = item.get_closest_marker("slow") or "warm_python" in fixtures
        if folder in COMMANDS or (folder in RANKS and "warm_python" in fixtures):
            item.add_marker("commands")
        elif fixtures & OVER_TE:
            item.add_marker("te")
        if folder in RANKS:
            item.add_marker("ranks")
        elif folder == "unit" and below[0] in WITHOUT_MEGATRON and not (longer or item.path.name.startswith(LONGER)):
            item.add_marker("fast")


def pytest_collection_finish() -> None:
    """No collection looks through what has been imported again."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Extension modules complain of leaks at exit otherwise."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def warm_python() -> Iterator[str]:
    """A Python with everything imported, see :mod:`tests.warm`; fresh ones are for tests of starts and ends."""
    warm = Warm()
    yield str(warm.python)
    warm.stop()


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that, on the path, is this package as pip would install it, with the entry points of pyproject.toml."""
    folder = tmp_path_factory.mktemp("site")
    points = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]["entry-points"]
    info = folder / "megatron_flux_under_test-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-flux-under-test\nVersion: 1\n")
    lines = [
        line for group, names in points.items() for line in (f"[{group}]", *(f"{n} = {v}" for n, v in names.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run ``megatron-flux WORDS`` in this process and return what it prints. It must end with ``code``.

    Of bad input (2) that is its one line, without the beginning.
    """
    from megatron_flux.cli.main import main

    def run(*words: object, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["megatron-flux", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert (ended.value.code or 0) == code, out + err
        if code != 2:
            return out + err
        (line,) = err.splitlines()
        assert (out, line.startswith("megatron-flux: error: ")) == ("", True), out + err
        return line.removeprefix("megatron-flux: error: ")

    return run
