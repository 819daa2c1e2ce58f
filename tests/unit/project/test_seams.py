"""scripts/seams.py shows what moved between two releases; what it looks at is in the installed ones."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

from scripts import seams
from tests.distributed.te_stand_in import SOURCE

OLD = '''
class Layer:
    def forward(self, x):
        """Says."""
        return x + 1

    def gone(self): ...

if True:
    def helper():
        return 1
'''
NEW = OLD.replace("x + 1", "x + 2").replace("Says", "Says more").replace("def gone", "def came")


def compare(monkeypatch: pytest.MonkeyPatch, old: Path, new: Path, *paths: str) -> int:
    monkeypatch.setattr(seams, "PATHS", paths)
    monkeypatch.setattr(sys, "argv", ["seams.py", str(old), str(new)])
    return seams.main()


def test_what_moved_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, wheel = tmp_path / "old", tmp_path / "new.whl"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "layers.py").write_text(OLD)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pkg/layers.py", NEW)
    assert compare(monkeypatch, folder, wheel, "pkg.layers", "another.package:f") == 1
    out = capsys.readouterr().out
    for words in ("code pkg.layers:Layer.forward\n", "    -    return x + 1\n", "    +    return x + 2\n", "1 places"):
        assert words in out
    assert "gone pkg.layers:Layer.gone\n" in out
    assert "new  pkg.layers:Layer.came (2 lines)\n" in out
    assert "Says" not in out
    assert compare(monkeypatch, folder, wheel, "pkg.layers:helper") == 0
    assert compare(monkeypatch, folder, wheel, "no.such") == 1, "an old release that shows nothing"


def test_what_is_looked_at_is_there() -> None:
    folders = [
        Path(importlib.util.find_spec("megatron.core").origin).parents[2],
        *filter(None, [SOURCE and Path(SOURCE)]),
    ]
    missing = [path for path in seams.PATHS if not any(seams.functions(folder, path) for folder in folders)]
    inherited = {
        path for path in missing if path.rpartition(".")[0].endswith(("TEColumnParallelLinear", "TERowParallelLinear"))
    }
    te = {path for path in missing if path.startswith("transformer_engine")} if not SOURCE else set()
    assert set(missing) == inherited | te
