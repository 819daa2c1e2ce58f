"""The documents: short where they must be, whole where they claim to be, and with links that lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCS = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "slurm" / "README.md",
)
READ_IN = ("megatron_flux", "scripts", "tests", "megatron_flux_autoload.py")
SET_BY_THE_PACKAGE = {"MEGATRON_FLUX_LAUNCHER"}
"""Between a launcher and its ranks: nothing that a user sets."""


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_environment_variable_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    files = [file for name in READ_IN for file in [ROOT / name, *(ROOT / name).rglob("*")] if file.is_file()]
    sources = [file for file in files if file.suffix in (".py", ".sh", ".j2")]
    assert len(sources) > 200
    found = {name for file in sources for name in re.findall(r"\bMEGATRON_FLUX(?:_[A-Z]+)+\b", file.read_text())}
    missing = sorted(name for name in found - SET_BY_THE_PACKAGE if f"`{name}`" not in text)
    assert not missing
    documented = set(re.findall(r"`(MEGATRON_FLUX_[A-Z_]+)`", text))
    assert documented <= found, "documented, and read nowhere"


@pytest.mark.parametrize("document", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text())
    assert [link for link in links if "://" not in link and not (document.parent / link).exists()] == []
