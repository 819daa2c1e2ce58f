"""Documents: links lead to files and headings, every environment variable is documented, sentences are short."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

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


NO_REASONS = ("what_ran", "why_unusable", "_offloading")
"""Answers about layers that were not called, and to a command; a part of reasons."""
NOT_REASONS = {"--flux", "reference"}
"""Other words beside reasons in the tables."""


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


def _sentences(document: Path) -> Iterator[str]:
    """Yield sentences of prose, table cells and list items; code and generated tables are left out."""
    text = re.sub(r"```.*?```|<!-- (?:options|table) .*?<!-- end -->", "\n\n", document.read_text(), flags=re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=[|#]|\s*[-*] |\s*\d+\. )", text):
        for cell in block.split("|") if block.startswith("|") else [block]:
            words = " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).split())
            yield from re.split(r"(?<=[.!?:;])(?:\*\*)? (?=[A-Z`*(])", words)


@pytest.mark.parametrize("document", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_have_at_most_25_words(document: Path) -> None:
    assert [sentence for sentence in _sentences(document) if len(sentence.split()) > 25] == []


def _texts(expression: ast.expr | None, module: ModuleType) -> Iterator[str]:
    """Yield the texts that an expression may give: ``…`` where something is filled in."""
    match expression:
        case ast.Constant(value=str(text)):
            yield text
        case ast.Name(id=name) if isinstance(getattr(module, name, None), str):
            yield getattr(module, name)
        case ast.JoinedStr(values=parts):
            yield re.sub("…+", "…", "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in parts))
        case ast.IfExp(body=one, orelse=other):
            yield from (text for part in (one, other) for text in _texts(part, module))
        case ast.BoolOp(values=parts):
            yield from (text for part in parts for text in _texts(part, module))


def _reasons(name: str) -> Iterator[str]:
    """Yield reasons for stock in a module of patch/: what is counted, and what functions that return text return."""
    module = importlib.import_module(f"megatron_flux.patch.{name}")
    for function in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if not isinstance(function, ast.FunctionDef) or function.name in NO_REASONS:
            continue
        answers = re.match(r"str\b|.*\| str\b", ast.unparse(function.returns)) if function.returns else None
        for node in ast.walk(function):
            match node:
                case ast.Return(value=value) if answers:
                    yield from _texts(value, module)
                case ast.Call(func=ast.Attribute(attr="runs_stock"), args=[_, reason, _]):
                    yield from _texts(reason, module)
                case ast.Assign(targets=[ast.Name(id="reason")], value=value):
                    yield from _texts(value, module)
                case ast.Raise(exc=ast.Call(args=[text])) if function.name == "load":
                    yield from _texts(text, module)


def test_every_reason_to_run_stock_is_documented() -> None:
    found = {reason for name in ("linears", "reasons", "originals", "te_seam", "te_fp8") for reason in _reasons(name)}
    text = (ROOT / "docs" / "limits.md").read_text()
    assert sorted(reason for reason in found if f"`{reason}`" not in text) == []
    assert len(found) > 50
    stock = {
        words
        for row in re.findall(r"^\|[^|]*\| stock ¹?\|(.*)$", text, re.MULTILINE)
        for words in re.findall("`(.*?)`", row)
    }
    assert sorted(stock - found - NOT_REASONS) == [], "documented, and given nowhere"
