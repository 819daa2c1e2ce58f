"""YAML whose scalars stay as they are written."""

from pathlib import Path
from typing import Any

import pytest

from megatron_flux import plain_yaml
from megatron_flux.errors import UserError

WRITTEN = "12:00:00 1:30 0123 0o17 0x1f 1_000 +5 1e3 12.10 .inf no off 2026-11-25 -0"


def load(folder: Path, text: str) -> Any:
    file = folder / "own.yaml"
    file.write_text(text)
    return plain_yaml.read(file, "own")


def test_scalars_stay_as_they_are_written(tmp_path: Path) -> None:
    for written in WRITTEN.split():
        assert load(tmp_path, f"x: [{written}, {{a: {written}}}]") == {"x": [written, {"a": written}]}


def test_what_is_no_text(tmp_path: Path) -> None:
    assert load(tmp_path, "x: [true, False, null, ~, 0, 720, -5, '720', \"null\"]")["x"] == [
        *(True, False, None, None, 0, 720, -5, "720", "null")
    ]
    assert load(tmp_path, "a: &x {b: 1}\nc: {<<: *x, d: 2}")["c"] == {"b": 1, "d": 2}
    for text, said in (
        ("!!python/object/apply:os.system ['true']", "own is not YAML: could not determine a constructor"),
        ("a: [", "own is not YAML: "),
        ("[" * 20_000, "own is not YAML: "),  # at once
        ("[1, 2]", "own must hold fields and values, it holds a list"),
    ):
        with pytest.raises(UserError, match=said) as error:
            load(tmp_path, text)
        assert "\n" not in str(error.value)
