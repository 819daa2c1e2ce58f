"""Run folders: two runs never share one, and a run that is refused leaves nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_flux.errors import UserError
from megatron_flux.run import folder


@contextmanager
def run_in(out: Path, *, overwrite: bool = False, resuming: bool = False) -> Iterator[Path]:
    with folder.made(out, {"out": out.name, "resuming": resuming}, overwrite=overwrite, resuming=resuming):
        yield out


def everything(root: Path) -> dict[str, str | None]:
    return {str(p.relative_to(root)): p.read_text() if p.is_file() else None for p in sorted(root.rglob("*"))}


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    with run_in(tmp_path / "run") as out:
        (out / "flux").mkdir()
        (out / "flux" / "metrics.jsonl").write_text("a week of work\n")
        folder.write_ended(out, "finished", {"flux": 7})
    return tmp_path / "run"


def test_runs_of_the_same_second_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert len({folder.default_folder("train", "tiny") for _ in range(20)}) > 10
    monkeypatch.setenv("RANK", "1")
    assert str(folder.default_folder("train", "tiny")).endswith("-train-tiny"), "the ranks of one run agree"


@pytest.mark.parametrize("how", ["overwrite", "resuming"])
def test_a_run_that_goes_on_is_not_replaced(earlier: Path, how: str) -> None:
    with run_in(earlier, resuming=True):
        before = everything(earlier)
        with pytest.raises(UserError, match="taken by another run; wait for its end"), run_in(earlier, **{how: True}):
            pass
        assert everything(earlier) == before
    with run_in(earlier, **{how: True}):
        pass


def test_a_folder_that_cannot_be_made_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--out .*file/run cannot be written: Not a directory; give another folder"):
        folder.check_free(tmp_path / "file" / "run", overwrite=False)
    folder.check_free(tmp_path / "some" / "run", overwrite=False)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").touch()
    with pytest.raises(UserError, match="is not a run folder"):
        folder.check_free(tmp_path / "thesis", overwrite=True)
    assert set(everything(tmp_path)) == {"file", "thesis", "thesis/chapter"}


def test_a_refused_run_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError), run_in(tmp_path / "runs" / "new"):
        raise UserError("no layer of such a name")
    assert list(tmp_path.iterdir()) == []


def _refuse(out: Path) -> None:
    assert not (out / folder.ENDED).exists(), "it has not ended again"
    raise UserError("no layer of such a name")


def _record_and_refuse(out: Path) -> None:
    folder.begun(out)
    (out / "flux").mkdir(exist_ok=True)
    raise UserError("token 999 in the last batch")


@pytest.mark.parametrize("how", ["overwrite", "resuming"])
def test_a_run_that_is_refused_leaves_the_earlier_run(earlier: Path, how: str) -> None:
    before = everything(earlier)
    with pytest.raises(UserError, match="no layer"), run_in(earlier, **{how: True}):
        _refuse(earlier)
    assert everything(earlier) == before
    with pytest.raises(KeyboardInterrupt), run_in(earlier, **{how: True}):
        raise KeyboardInterrupt  # killed before it has begun
    with pytest.raises(UserError), run_in(earlier, resuming=True):
        raise UserError("no layer of such a name")
    assert everything(earlier) == before


def test_a_run_that_has_begun_replaces_the_earlier_one(earlier: Path) -> None:
    with pytest.raises(UserError, match="token 999"), run_in(earlier, overwrite=True):
        _record_and_refuse(earlier)
    assert set(everything(earlier)) == {folder.CONFIG, "flux", ".lock"}
