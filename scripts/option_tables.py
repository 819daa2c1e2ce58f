"""Write the option tables of docs/commands.md from the commands' models: ``python -m scripts.option_tables``.

Run it when an option changes; tests/unit/project/test_docs.py compares. The document holds each table between
``<!-- options COMMANDS -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic.fields import FieldInfo

from megatron_flux.cli.main import COMMANDS, taken_by
from megatron_flux.options import group_of, is_argument, is_file_only, names

FILE = Path(__file__).parents[1] / "docs" / "commands.md"


def table(commands: tuple[str, ...]) -> str:
    """One row for each option, by group; an option of some of the commands says whose it is."""
    models = {command: taken_by(COMMANDS[command])[0] for command in commands}
    rows: dict[str, dict[str, list[str]]] = {}
    for command, model in models.items():
        for name, field in model.model_fields.items():
            row = f"| {_shown(name, field)} | {_default(field)} | {_escaped(str(field.description))}"
            rows.setdefault(group_of(model, name), {}).setdefault(row, []).append(command)
    text = ""
    for group, found in rows.items():
        text += f"| {group} | default | |\n| --- | --- | --- |\n"
        for row, whose in found.items():
            text += row + ("" if len(whose) == len(commands) else f" ({', '.join(whose)})") + " |\n"
        text += "\n"
    return text


def document(text: str) -> str:
    """Return ``text`` with its tables made anew. Raises ValueError: a command has no table in it."""
    marks = re.compile(r"<!-- options (.*?) -->\n.*?<!-- end -->", re.DOTALL)
    tables = {named: table(tuple(named.split(", "))) for named in marks.findall(text)}
    if missing := COMMANDS.keys() - {name for named in tables for name in named.split(", ")}:
        raise ValueError(f"docs/commands.md has no table of {', '.join(sorted(missing))}")
    return marks.sub(lambda m: f"<!-- options {m[1]} -->\n{tables[m[1]]}<!-- end -->", text)


def _shown(name: str, field: FieldInfo) -> str:
    if is_argument(field):
        return f"`{name.upper()}`"
    if is_file_only(field):
        return ", ".join(f"`{word.replace('-', '_')}`" for word in names(name, field))
    return ", ".join(f"`--{word}`" for word in names(name, field))


def _default(field: FieldInfo) -> str:
    default = field.default
    if field.is_required():
        return "required"
    if default in (None, [], ""):
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"`{','.join(map(str, default)) if isinstance(default, list) else default}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    FILE.write_text(document(FILE.read_text(encoding="utf-8")), encoding="utf-8")
