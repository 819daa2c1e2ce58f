"""The file of the tuner's answers: its keys, and reading and writing it so that it can never stop a training.

The file is optional. A folder that cannot be written, a damaged file, an answer that this version cannot use: each is
said once, with the path and what to do, and tuning goes on in memory. ``megatron-flux tune``, which exists to fill the
file, uses :func:`load` and :func:`store`, which raise.

A key names everything that an answer depends on, so that what was kept under other circumstances is not found::

    operator, sizes, dtype, weight form, group size, link | GPU | versions and the plan's fields | settings
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megatron_flux import files
from megatron_flux.errors import UserError, one_line
from megatron_flux.ops import all_reduce_config
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.fp8_operand import Fp8Kind
from megatron_flux.ops.kernel_config import KernelConfig, label_of
from megatron_flux.settings import cache_folder, sm_margin
from megatron_flux.version import __version__

logger = logging.getLogger("megatron_flux")

BACKENDS = ("reference", "pipelined", "fused", "chunked", "chunked_fp8", "chunked_int8")  # what an answer may choose

_COUNTS, _TILES = range(1, 1025), (16, 32, 64, 128, 256)
_ALLOWED: dict[str, Sequence[int]] = {
    **dict.fromkeys(("bm", "bn", "bk"), _TILES),
    **{"block": tuple(1 << bit for bit in range(5, 17)), "warps": (1, 2, 4, 8, 16), "teams": (1, 2)},
    **{"stages": range(1, 17), "ring": range(1, 17), "spread": range(101), "shots": range(3)},
}
"""Numbers that a plan may have by its field's name; _COUNTS where it is not here. Beyond them kernels do not compile,
or count to nothing.
"""


def cache_path() -> Path:
    """Where answers are kept."""
    given = os.environ.get("MEGATRON_FLUX_TUNE_CACHE")
    return Path(given) if given else cache_folder() / "tuned.json"


def describe(
    op: str, m: int, n: int, k: int, x: torch.Tensor, transposed: bool, tp: int, link: str, *, captured: bool = False,
    fp8: Fp8Kind | None = None,
) -> str:  # fmt: skip
    """The key of an answer: everything it depends on. ``captured``: the calls run as inside a CUDA graph."""
    form = "[k,n]" if transposed else "[n,k]"
    mode = " in graphs" if captured else ""
    of = str(x.dtype)[6:] if fp8 is None else fp8.words()
    call = f"{op} m={m} n={n} k={k} {of} {form} tp={tp} {link}{mode}"
    # Of the environment, what changes who is the fastest: stock's multicast, SMs left to others, hardware queues.
    nvls, queues = (os.environ.get(name, "-") for name in ("NCCL_NVLS_ENABLE", "CUDA_DEVICE_MAX_CONNECTIONS"))
    kind = AllReduceConfig if op.startswith("gemm_all_reduce") else KernelConfig
    return f"{call} | {_machine(x.device, plan_schema(kind))} | nvls={nvls} margin={sm_margin()} connections={queues}"


@functools.cache
def _machine(device: torch.device, schema: str) -> str:
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else device.type
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda else "none"
    triton = "none"
    for package in ("pytorch-triton", "triton"):  # the former beside torch's nightly builds
        with contextlib.suppress(metadata.PackageNotFoundError):
            triton = metadata.version(package)
    versions = f"flux {__version__} plan {schema} torch {torch.__version__} triton {triton} nccl {nccl}"
    return f"{name} | {versions}"


@functools.cache
def plan_schema(kind: type = KernelConfig) -> str:
    """Changes with the fields of a configuration, so that plans with other fields are not found."""
    return f"{zlib.crc32(repr([(field.name, field.type) for field in fields(kind)]).encode()):08x}"


def plan_of(kept: Mapping[str, Any]) -> KernelConfig | AllReduceConfig:
    """The configuration whose fields these are: only those of a gemm_all_reduce have shots."""
    return AllReduceConfig(**kept) if "shots" in kept else KernelConfig(**kept)


def usable(answer: Any, key: str) -> dict[str, Any]:
    """Return ``answer``. Raises ValueError: the tuner cannot have written it under ``key``; says what is wrong.

    The file may be another user's. A plan out of range ends a training, and a wire that is not the key's rounds numbers
    that were to be sent as they are.
    """
    if not isinstance(answer, dict):
        raise ValueError(f"it must be an object, not {type(answer).__name__}")
    backend, plan = answer.get("backend"), answer.get("plan")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    wire = str(backend).partition("chunked_")[2]
    if wire and f" wire={wire}" not in key:
        raise ValueError(f"backend {backend} sends {wire}, which such a call does not allow")
    if (plan is None) == (backend == "fused") or not isinstance(plan, dict | None):
        raise ValueError(f"plan must be an object with backend fused and null otherwise, not {plan!r}")
    if plan is not None and ("shots" in plan) != key.startswith("gemm_all_reduce"):
        raise ValueError(f"the plan is of another operator: {plan!r}")
    pieces = answer.get("pieces")
    if pieces is not None and (not str(backend).startswith("chunked") or type(pieces) is not int or pieces < 1):
        raise ValueError(f"pieces must be a number from 1 on, with a chunked backend, not {pieces!r} with {backend}")
    for name in ("ms", "sustained_ms"):
        times = answer.get(name, {} if name != "ms" else None)
        if not isinstance(times, dict) or not all(map(_is_time, times.values())):
            raise ValueError(f"{name} must be an object of milliseconds, not {times!r}")
    if not _is_time(answer.get("gemm_ms", 0.0)):
        raise ValueError(f"gemm_ms must be milliseconds, not {answer['gemm_ms']!r}")
    if answer.get("list", "full") not in ("short", "full"):
        raise ValueError(f"list must be short or full, not {answer['list']!r}")
    kind = AllReduceConfig if "shots" in (plan or {}) else KernelConfig
    known = {field.name: type(field.default) for field in fields(kind)}
    for name, value in (plan or {}).items():
        if name not in known:
            raise ValueError(f"the plan has an unknown field {name!r}")
        if type(value) is not known[name]:
            raise ValueError(f"the plan's {name} must be of type {known[name].__name__}, not {value!r}")
        if known[name] is int and value not in (allowed := _ALLOWED.get(name, _COUNTS)):
            raise ValueError(f"the plan's {name} must be one of {allowed}, not {value}")
    return answer


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1e9


def is_short(answer: Any) -> bool:
    """Whether an answer was chosen from a short list; earlier versions had full ones only, and did not say so."""
    return isinstance(answer, dict) and answer.get("list") == "short"


def label(answer: Mapping[str, Any]) -> str:
    """What runs, named as the answer's times are: a backend, with ``fused`` its plan, with chunked ones their pieces.
    Raises TypeError: a plan of another version.
    """
    if answer["plan"] is not None:
        plan = answer["plan"]
        return f"{answer['backend']} {all_reduce_config.label_of(plan) if 'shots' in plan else label_of(plan)}"
    return answer["backend"] if answer.get("pieces") is None else f"{answer['backend']} x{answer['pieces']}"


def find(keys: Iterable[str], *, full: bool = False) -> list[dict[str, Any] | None]:
    """The kept answers under ``keys``, None where there is none to be used; what is wrong with the file is logged.
    ``full``: not those that were chosen from a short list.
    """
    path = cache_path()
    try:
        kept = load(path)
    except UserError as error:
        say_once(f"{error}. Until then choices are measured anew and kept in memory alone")
        return [None for _ in keys]
    found: list[dict[str, Any] | None] = []
    for key in keys:
        try:
            answer = None if kept.get(key) is None else usable(kept[key], key)
            found.append(None if full and is_short(answer) else answer)
        except ValueError as error:
            say_once(f"tuning cache {path} has an answer that cannot be used and is measured anew: {error} ({key})")
            found.append(None)
    return found


def of_other_rows(key: str, m: int, *, full: bool = False) -> dict[int, dict[str, Any]]:
    """The kept answers that differ from that under ``key``, of ``m`` rows, in their rows alone; by these. What is wrong
    with the file :func:`find` says.
    """
    head, _, tail = key.partition(f" m={m} ")
    try:
        kept = load(cache_path())
    except UserError:
        return {}
    found = {}
    for other, answer in kept.items():
        rows = other.removeprefix(f"{head} m=").removesuffix(f" {tail}")
        if rows.isdecimal() and other == f"{head} m={rows} {tail}" and not (full and is_short(answer)):
            with contextlib.suppress(ValueError):
                found[int(rows)] = usable(answer, other)
    return found


def keep(key: str, answer: dict[str, Any]) -> None:
    """:func:`store` in the file that :func:`find` reads; that it cannot be written is logged."""
    path = cache_path()
    try:
        store(path, key, answer)
    except UserError:
        pass  # damaged, and find() has said so
    except OSError as error:
        say_once(
            f"the tuner's choices cannot be kept in {path}: {error}. They hold for this process alone: set "
            "MEGATRON_FLUX_TUNE_CACHE to a file that can be written"
        )


@functools.cache
def say_once(message: str) -> None:
    """Log what a run need not be told twice."""
    logger.warning("megatron_flux: %s", message)


def load(path: Path) -> dict[str, Any]:
    """All kept answers; none if the file does not exist. Raises UserError: the file is not what this module writes."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"tuning cache {path} cannot be read: {one_line(error)}; delete it to tune again") from error
    if not isinstance(found, dict):
        raise UserError(f"tuning cache {path} must hold one JSON object; delete it to tune again")
    return found


def store(path: Path, key: str, answer: dict[str, Any]) -> None:
    """Add one answer; a reader sees the old file or the new one, and writers take turns (several groups, several jobs).
    On a file system without locks a writer may undo what another one added meanwhile: that call is tuned once more.
    Raises OSError: it cannot be written. Raises UserError: the file is damaged; it stays as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.locked(path.with_name(f".{path.name}.lock"), 10.0):
        files.write_atomically(path, json.dumps({**load(path), key: answer}, indent=1, sort_keys=True) + "\n")
