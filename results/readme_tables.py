"""What the scripts that write tables into READMEs share; they are run with ``PYTHONPATH=.``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from megatron_flux.ops.kernel_config import KernelConfig

BEGIN, END = "<!-- tables.py: begin -->\n", "<!-- tables.py: end -->\n"

X, MINUS = "\N{MULTIPLICATION SIGN}", "\N{MINUS SIGN}"

SHORT = {"all_gather_gemm": "AG", "gemm_reduce_scatter": "RS"}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Markdown."""
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *map(list, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def percent(value: float, digits: int = 0, sign: str = "") -> str:
    """For people; ``sign`` as in a format."""
    return f"{100 * value:{sign}.{digits}f} %".replace("-", MINUS)


def between_marks(text: str, made: str) -> str:
    """``text`` with ``made`` between the two marks."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + made + END + rest.split(END)[1]


_GONE = {"comm": 0, "skip": 0, "pace": False, "block": 0, "chunks": 1}
"""Fields of plans that later versions do not have any more, in their order, with their defaults."""


def chosen(answer: Mapping[str, Any]) -> str:
    """Return the name of a stored answer, as its times have it, also for plans of earlier versions."""
    plan = answer["plan"]
    if plan is None:
        return str(answer["backend"])
    base: dict[str, Any] = {}
    for field in fields(KernelConfig):
        base |= (_GONE if field.name == "early" else {}) | {field.name: field.default}
    differs = (f"{name}={plan[name]}" for name in base if plan.get(name, base[name]) != base[name])
    return f"{answer['backend']} {' '.join(differs) or 'default'}"
