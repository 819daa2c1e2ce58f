"""What the tuner has chosen, for people: an answer's name, and a cache as a table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich.text import Text

from megatron_flux.bench.ops_report import print_table
from megatron_flux.errors import UserError
from megatron_flux.metrics.table import number
from megatron_flux.ops.kernel_config import label_of

Answers = Mapping[str, Mapping[str, Any]]

_CALL = re.compile(r"(?P<op>\w+) m=(?P<m>\d+) n=(?P<n>\d+) k=(?P<k>\d+) (?P<setting>.+)")
"""The part of a key before the first bar; see :func:`megatron_flux.ops.backends.tuning_cache.describe`."""

_TIMES = ("reference", "pipelined", "best fused", "choice")


def chosen(answer: Mapping[str, Any]) -> str:
    """What runs, named as the answer's times are: a backend, with ``fused`` its plan."""
    if answer["plan"] is None:
        return answer["backend"]
    try:
        return f"fused {label_of(answer['plan'])}"
    except TypeError:
        return "fused (a plan of another version)"


def show(answers: Answers, file: IO[str] | None = None, calls: Sequence[tuple[str, str]] | None = None) -> None:
    """Print ``answers``, a table for each GPU and versions.

    Args:
        answers: by key, as in the tuner's cache.
        file: where to; standard output by default.
        calls: rows as pairs of a model's name for a call and its key; without it every key, sorted by shape.

    Raises:
        UserError: an answer that is not what the tuner writes.
    """
    wanted = calls or [("", key) for key in sorted(answers, key=_order)]
    machines = dict.fromkeys(_machine(key) for _, key in wanted)
    for machine in machines:
        rows = [(name, key) for name, key in wanted if _machine(key) == machine]
        print_table(
            ("call", "op", "setting") if calls else ("op", "setting"),
            ("m x n x k", *_TIMES, "gain"),
            [[*([name] if calls else []), *_cells(key, answers[key])] for name, key in rows],
            last="chosen",
            title=f"{machine}: {len(rows)} call(s)",
            notes=("milliseconds: the slowest rank's median when it was tuned; gain: reference / choice",),
            file=file,
        )


def _cells(key: str, answer: Mapping[str, Any]) -> list[str | Text]:
    try:
        ms, name = dict(answer["ms"]), chosen(answer)
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"the tuning cache has no usable answer for {key!r}; delete that entry to tune it again"
        ) from None
    call = _CALL.match(key.split(" | ")[0])
    if call is None:
        op, setting, shape = key, "-", "-"
    else:
        op, setting, shape = call["op"], call["setting"], f"{call['m']} x {call['n']} x {call['k']}"
    fused = [value for way, value in ms.items() if way.startswith("fused")]
    times = (ms.get("reference"), ms.get("pipelined"), min(fused, default=None), ms.get(name))
    gain = times[0] / times[-1] if times[0] and times[-1] else None
    return [
        op,
        setting,
        shape,
        *map(number, times),
        number(gain, ".2f", "x"),
        Text(name, style="" if name == "reference" else "bold"),
    ]


def _machine(key: str) -> str:
    return ", ".join(key.split(" | ")[1:]) or "unknown machine"


def _order(key: str) -> tuple[Any, ...]:
    call = _CALL.match(key)
    return (1, key) if call is None else (0, call["op"], call["setting"], *(int(call[size]) for size in "mnk"))
