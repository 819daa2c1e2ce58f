"""What the scripts that write tables into READMEs share; they are run with ``PYTHONPATH=.``."""

from __future__ import annotations

from collections.abc import Iterable

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
