"""Run folders: two runs never share one, and a run that is refused leaves nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_flux.errors import UserError
from megatron_flux.run import folder


@contextmanager
def run_in(out: Path, *, default: bool = False, overwrite: bool = False, resuming: bool = False) -> Iterator[Path]:
    def describe(out: Path) -> dict[str, str]:
        return {"out": out.name, "resuming": str(resuming)}

    with folder.made(out, describe, default=default, overwrite=overwrite, resuming=resuming) as made:
        yield made


def everything(root: Path) -> dict[str, str | None]:
    return {str(p.relative_to(root)): p.read_text() if p.is_file() else None for p in sorted(root.rglob("*"))}


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """The folder of a run that has ended."""
    with run_in(tmp_path / "run") as out:
        (out / "flux").mkdir()
        (out / "flux" / "metrics.jsonl").write_text("a week of work\n")
        folder.write_ended(out, "finished", {"flux": 7})
    return tmp_path / "run"


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "20261122-101500-train-tiny"
    with run_in(out, default=True) as first, run_in(out, default=True) as second, run_in(out, default=True) as third:
        assert [path.name for path in (first, second, third)] == [out.name, f"{out.name}-2", f"{out.name}-3"]
        for path in (first, second, third):
            assert json.loads((path / folder.CONFIG).read_text())["out"] == path.name


@pytest.mark.parametrize("how", ["overwrite", "resuming"])
def test_a_run_that_goes_on_is_not_replaced(earlier: Path, how: str) -> None:
    with run_in(earlier, resuming=True):
        before = everything(earlier)
        with pytest.raises(UserError, match="taken by another run; wait for its end"), run_in(earlier, **{how: True}):
            pass
        assert everything(earlier) == before
    with run_in(earlier, **{how: True}):
        pass


def test_runs_that_name_the_same_folder_do_not_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, check = tmp_path / "run", folder.check_free
    with run_in(out), monkeypatch.context() as patched:
        patched.setattr(folder, "check_free", lambda *_, **__: None)  # it has looked before the first one came
        with pytest.raises(UserError, match="taken by another run"), run_in(out):
            pass
        assert (out / folder.CONFIG).is_file()
    with pytest.raises(UserError, match="holds an earlier run; give another folder, or --overwrite"):
        check(out, overwrite=False)


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


@pytest.mark.parametrize("default", [True, False])
def test_a_refused_run_leaves_no_folder(tmp_path: Path, default: bool) -> None:
    with pytest.raises(UserError), run_in(tmp_path / "runs" / "new", default=default):
        raise UserError("no layer of such a name")
    assert list(tmp_path.iterdir()) == []


def _record_and_refuse(out: Path) -> None:
    assert not (out / folder.ENDED).exists(), "it has not ended again"
    (out / "flux").mkdir(exist_ok=True)
    raise UserError("token 999 in the last batch")


def test_a_refused_run_leaves_what_it_has_recorded(tmp_path: Path) -> None:
    with pytest.raises(UserError), run_in(tmp_path / "run") as out:
        _record_and_refuse(out)
    assert {folder.CONFIG, "flux"} <= set(everything(tmp_path / "run"))


def test_a_refused_resume_leaves_the_earlier_run(earlier: Path) -> None:
    before = everything(earlier)
    with pytest.raises(UserError), run_in(earlier, resuming=True):
        _record_and_refuse(earlier)
    assert everything(earlier) == before


def test_overwriting_deletes_the_earlier_run(earlier: Path) -> None:
    with run_in(earlier, overwrite=True):
        pass
    assert not {"flux", folder.ENDED} & set(everything(earlier))
