"""Plans that ship with the package: the fastest that tuners found on H200s, and a rule for shapes that are not there.

``shipped_plans.json`` holds one entry for each operator, shape, weight form and number of ranks that a run in results/
has tuned in bf16 over NVLink, with the run's name; ``results/shipped-plans/tables.py`` writes it from their raw files,
and says what the rule loses against measuring everything. Where two GPUs emulated eight, stock's collectives were no
measure: those entries have no time of ``reference``, and so no gain.

The rule: the plans of the nearest shapes of the same operator, number of ranks and weight form, by rows of a rank, n
and k in logarithms, of those that the shape can run (:func:`~megatron_flux.ops.kernel_config.fits`). They are
suggestions for the tuner; without a measurement on the machine itself only an entry for the very shape counts.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, NamedTuple

from megatron_flux.ops.kernel_config import KernelConfig, fits

NEAREST = 2  # plans that the rule suggests
GAIN = 0.03  # of reference's time, that a plan must have saved to be taken unmeasured


class Shape(NamedTuple):
    """A call, for which there may be an entry; ``m`` rows of all ranks together, ``n`` and ``k`` the rank's own."""

    op: str
    form: str  # of the weight: ``[n,k]``, or ``[k,n]`` where it is transposed
    tp: int
    m: int
    n: int
    k: int


class Entry(NamedTuple):
    """The plan that a run found for a shape."""

    shape: Shape
    plan: KernelConfig
    gain: float | None  # share of reference's time that the plan saved; None where that was no measure
    run: str  # its file, below results/


def entry_of(kept: Mapping[str, Any]) -> Entry:
    """Make one of an object of the file."""
    shape = Shape(**{name: kept[name] for name in Shape._fields})
    stock = kept["reference_ms"]
    return Entry(shape, KernelConfig(**kept["plan"]), None if stock is None else 1 - kept["ms"] / stock, kept["run"])


@functools.cache
def entries() -> tuple[Entry, ...]:
    """Return all entries."""
    text = resources.files(__package__).joinpath("shipped_plans.json").read_text(encoding="utf-8")
    return tuple(entry_of(kept) for kept in json.loads(text))


def suggests_for(gpu: str) -> bool:
    """Return True if they are worth measuring on a GPU of that name: H100 differs from H200 in its memory alone."""
    return re.search(r"\bH[12]00\b", gpu) is not None


def suggested(shape: Shape, known: Iterable[Entry]) -> list[KernelConfig]:
    """Return the plan for the very shape, else those of the nearest ones, nearest first; none of another tp."""
    near = _nearest(shape, known)
    exact = bool(near) and near[0].shape == shape
    return list(dict.fromkeys(entry.plan for entry in near))[: 1 if exact else NEAREST]


def unmeasured(shape: Shape, gpu: str, known: Iterable[Entry]) -> KernelConfig | None:
    """Return the plan to take where nothing may be measured: for the very shape. None: stock is the safer choice."""
    near = _nearest(shape, known) if re.search(r"\bH200\b", gpu) else []
    sure = bool(near) and near[0].shape == shape and near[0].gain is not None and near[0].gain >= GAIN
    return near[0].plan if sure else None


def _nearest(shape: Shape, known: Iterable[Entry]) -> list[Entry]:
    """Return entries whose plans such a call can run, nearest first; equally near ones by shape."""
    sizes = shape.m // shape.tp, shape.n, shape.k, shape.tp
    like = [entry for entry in known if entry.shape[:3] == shape[:3] and fits(shape.op, entry.plan, *sizes)]
    return sorted(like, key=lambda entry: (_distance(shape, entry.shape), entry.shape))


def _distance(one: Shape, other: Shape) -> float:
    """Return the distance of shapes with the same tp, in logarithms."""
    return math.hypot(*(math.log(a / b) for a, b in zip(one[3:], other[3:], strict=True)))
