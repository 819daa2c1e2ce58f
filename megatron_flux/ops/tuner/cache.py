"""The tuner's file: entries by key, as JSON that people can read and edit. It can never stop a training.

If the folder cannot be written, the file is damaged or an entry cannot be used, that is logged once, with the path and
what to do, and tuning goes on in memory. ``megatron-flux tune``, which exists to fill the file, uses :func:`load` and
:func:`store`, which raise.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, TypeAdapter, ValidationError, field_validator
from pydantic import ValidationInfo as Info

from megatron_flux import files
from megatron_flux.errors import UserError, one_line
from megatron_flux.log_once import log_once
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.kernel_config import KernelConfig
from megatron_flux.settings import cache_folder

Plan = KernelConfig | AllReduceConfig
Milliseconds = Annotated[float, Field(ge=0, le=1e9)]

_PLANS: dict[bool, TypeAdapter[Any]] = {True: TypeAdapter(AllReduceConfig), False: TypeAdapter(KernelConfig)}


class Entry(BaseModel):
    """The backend and plan of a call, with the measurements that decided."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", arbitrary_types_allowed=True)

    backend: Literal["reference", "fused", "chunked", "chunked_int8"]
    plan: SkipValidation[Plan | None] = None
    pieces: Annotated[int, Field(ge=1)] | None = None
    ms: dict[str, Milliseconds] = {}
    """Median times, by candidate; empty: not measured, or the plan of another m."""
    run: str | None = None
    """File below results/ of the run that these are from, of an entry that ships; None: measured on this machine."""

    @field_validator("plan", mode="before")
    @classmethod
    def _of_the_operator(cls, plan: Any, info: Info) -> Any:
        if isinstance(plan, dict) and info.context:
            adapter = _PLANS[info.context["key"].startswith("gemm_all_reduce")]
            return adapter.validate_json(json.dumps(plan), strict=True)  # of Python's objects only instances are strict
        return plan

    @property
    def label(self) -> str:
        """Name of the chosen candidate in :attr:`ms`."""
        if self.plan is not None:
            return f"{self.backend} {self.plan.label()}"
        return self.backend if self.pieces is None else f"{self.backend} x{self.pieces}"

    def to_json(self) -> dict[str, Any]:
        """Return what the file has, ready for JSON."""
        return {"plan": None, **self.model_dump(exclude_none=True)}


def parse(key: str, data: Any) -> Entry:
    """Return the entry under ``key``. Raises ValueError: the tuner cannot have written it; it may be another user's."""
    try:
        entry = Entry.model_validate(data, context={"key": key})
    except ValidationError as error:
        causes = (f"{'.'.join(map(str, e['loc']))} {e['msg']}, not {e['input']!r}" for e in error.errors())
        raise ValueError("; ".join(causes)) from None
    wire = entry.backend.partition("chunked_")[2]
    if wire and f" wire={wire}" not in key:
        raise ValueError(f"backend {entry.backend} sends {wire}, which such a call does not allow")
    if (entry.plan is None) == (entry.backend == "fused"):
        raise ValueError(f"plan must be an object with backend fused and null otherwise, not {entry.plan!r}")
    if entry.pieces is not None and not entry.backend.startswith("chunked"):
        raise ValueError(f"pieces goes with a chunked backend, not with {entry.backend}")
    return entry


def cache_path() -> Path:
    """Return the file: ``MEGATRON_FLUX_TUNE_CACHE``, or ``tuned.json`` in the cache folder."""
    given = os.environ.get("MEGATRON_FLUX_TUNE_CACHE")
    return Path(given) if given else cache_folder() / "tuned.json"


def find(key: str, m: int) -> dict[int, Entry]:
    """Return entries like that under ``key``, which is of ``m`` rows, by their rows; log what is wrong with them."""
    path, found = cache_path(), dict[int, Entry]()
    try:
        kept = load(path)
    except UserError as error:
        log_once(f"{error}. Until then plans are found anew and kept in memory alone")
        return found
    head, _, tail = key.partition(f" m={m} ")
    for other, data in kept.items():
        rows = other.removeprefix(f"{head} m=").removesuffix(f" {tail}")
        if not rows.isdecimal() or other != f"{head} m={rows} {tail}":
            continue
        try:
            found[int(rows)] = parse(other, data)
        except ValueError as error:
            log_once(f"tuning cache {path} has an entry that cannot be used and is found anew: {error} ({other})")
    return found


def keep(key: str, entry: Entry) -> None:
    """Store in the file that :func:`find` reads; log that it cannot be written."""
    path = cache_path()
    try:
        store(path, key, entry)
    except UserError:
        pass  # damaged, and find() has logged it
    except OSError as error:
        log_once(
            f"the tuner's plans cannot be kept in {path}: {error}. They hold for this process alone: set "
            "MEGATRON_FLUX_TUNE_CACHE to a file that can be written"
        )


def load(path: Path) -> dict[str, Any]:
    """Return all entries as JSON has them, none if there is no file. Raises UserError: it is not what was written."""
    try:
        entries = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"tuning cache {path} cannot be read: {one_line(error)}; delete it to tune again") from error
    if not isinstance(entries, dict):
        raise UserError(f"tuning cache {path} must hold one JSON object; delete it to tune again")
    return entries


def store(path: Path, key: str, entry: Entry) -> None:
    """Add one entry; a reader sees the old file or the new one, and writers lock it (several groups, several jobs).

    On a file system without locks a writer may undo what another one added meanwhile: that call is tuned once more.
    Raises OSError: it cannot be written. Raises UserError: the file is damaged; it stays as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.locked(path.with_name(f".{path.name}.lock"), 10.0):
        text = json.dumps({**load(path), key: entry.to_json()}, indent=1, sort_keys=True)
        files.write_atomically(path, f"{text}\n")
