"""Documents: links, variables and the tables of options and of fields; and that imports go downwards only."""

import re
from pathlib import Path

import pytest

from megatron_flux.metrics import schema
from scripts import option_tables
from scripts.rooms import Package
from tests.documented import fields

ROOT = Path(__file__).parents[3]
DOCS = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("examples", "patches", "results", "slurm")),
    *sorted((ROOT / "examples").glob("*/README.md")),
)
READ_IN = ("megatron_flux", "scripts", "tests", "megatron_flux_autoload.py")
SET_BY_THE_PACKAGE = {"MEGATRON_FLUX_LAUNCHER"}
"""Between a launcher and its ranks: nothing that a user sets."""


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


def _anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("document", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert "://" in link or target.exists(), link
        assert "://" in link or not anchor or anchor in _anchors(target), link


def test_option_tables_are_those_of_the_code() -> None:
    """If it fails: ``python -m scripts.option_tables``."""
    text = option_tables.FILE.read_text(encoding="utf-8")
    assert option_tables.document(text) == text
    assert text.count("<!-- end -->") == len(re.findall("<!-- options ", text))


def test_the_fields_of_a_record_are_documented() -> None:
    """Other tests compare the tables of a record's objects with those of real runs."""
    optional = schema.StepRecord.__optional_keys__
    documented = fields("record")
    assert documented.keys() == schema.StepRecord.__annotations__.keys()
    assert {name for name, (kind, _) in documented.items() if kind.endswith("?")} == optional


def test_no_import_goes_upwards_or_in_a_circle() -> None:
    package = Package(Path(__file__).parents[3])
    assert (package.upward(), package.circles()) == ([], [])
