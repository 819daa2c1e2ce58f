"""Whole checkpoints: every MLP's activation order is folded, everything else stays as it is, byte for byte.

What comes out is an ordinary GPTQ checkpoint with the same tensors, shapes and files: columns of gate and up, rows of
down and the ``g_idx`` of down have another order. Files are safetensors, by Llama's names (``*.gate_proj``,
``*.up_proj``, ``*.down_proj``; mixtures' experts, too) or GPT-2's (``*.c_fc``, ``*.c_proj`` of ``*.mlp``).

A folder from somebody else is not trusted: neither names in an index nor links leave the folder, pickles are not
opened, and all is checked before anything is written. The result is made in a folder beside the target and takes its
name when it is whole. In memory is one MLP at a time.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_flux.errors import StorageError, UserError, one_line
from megatron_flux.quant.fold import MLP, divides, fold, forward, shard, tensor_parallel_sizes, why_not
from megatron_flux.quant.gptq import BITS, GPTQLinear

NAMES = re.compile(
    r"^(?P<at>.+)\.(?P<linear>gate_proj|up_proj|down_proj|(?<=\.mlp\.)c_fc|(?<=\.mlp\.)c_proj)\.(?P<of>\w+)$"
)
PARTS = {"qweight": True, "qzeros": True, "scales": True, "g_idx": True, "bias": False}
"""A linear's tensors, and which must be there."""
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
CHECK_ROWS, CHECK_ERROR, CHECK_TP = 4, 1e-4, (8, 4, 2)

Progress = Callable[[str], None]  # called with what was done, after each file and each MLP


@dataclass(frozen=True)
class Stored:
    """Place of a tensor: the file's name, and its first byte there."""

    file: str
    start: int
    shape: tuple[int, ...]


@dataclass
class Found:
    """Layers of a checkpoint that can be folded."""

    folder: Path
    bits: int
    zero_offset: int
    tensors: dict[str, Stored]
    mlps: dict[str, tuple[tuple[str, ...], str]]  # names of FC1's linears and of FC2, by the MLP's place
    others: list[str]  # linears with activation order that are in no MLP


def read(folder: Path) -> Found:
    """Check a checkpoint and find its MLPs; no weight is read. Raises UserError: it cannot be folded."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; name a GPTQ checkpoint's")
    _refuse_links(folder)
    bits, zero_offset = _quantization(folder)
    tensors: dict[str, Stored] = {}
    for name in _files(folder):
        for tensor, stored in _header(folder / name).items():
            if tensor in tensors:
                raise UserError(f"{folder}: tensor {tensor} is in {tensors[tensor].file} and in {name}")
            tensors[tensor] = stored
    tensors = dict(sorted(tensors.items(), key=lambda item: _natural(item[0])))
    found = Found(folder, bits, zero_offset, tensors, _mlps(folder, tensors), [])
    inside = {f"{at}.{linear}" for at, (first, second) in found.mlps.items() for linear in (*first, second)}
    for name in found.tensors:
        linear, _, part = name.rpartition(".")
        if part == "g_idx" and linear not in inside and bool((_tensor(found, name).diff() < 0).any()):
            found.others.append(linear)
    return found


def run(
    found: Found, out: Path, *, tp: int | None = None, check: bool = False, progress: Progress = lambda done: None
) -> dict[str, Any]:
    """Write ``found`` folded to ``out``, which must not exist.

    Returns ``mlps``, a dict for each: its ``name``, ``state`` (``folded`` or ``was folded``), ``tp`` (sizes up to 64
    that divide) and ``error`` (the largest relative difference from the unfolded MLP, None where it was not checked);
    and ``others``, the linears with activation order that stay as they are.

    Raises UserError: ``out`` exists or cannot be made, an MLP cannot be folded, or (``check``) differs once it is.
    Raises StorageError: no room, or it could not be written. Nothing is left in any of these cases.
    """
    examine(found, out, tp)
    mlps: list[dict[str, Any]] = []
    with _made_whole(out) as part:
        for path in sorted(found.folder.iterdir()):  # links, of which a cache of downloads is made, become files
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, part / path.name)
            progress(f"copied {path.name}")
        for at in found.mlps:
            before = load(found, at)
            after = fold(before, tp)
            error = _check(before, after, at) if check else None
            if after is not before:
                _write(found, part, at, after)
            state = "was folded" if after is before else "folded"
            mlps.append({"name": at, "state": state, "tp": tensor_parallel_sizes(before), "error": error})
            progress(f"folded {at}")
    return {"mlps": mlps, "others": found.others}


def examine(found: Found, out: Path, tp: int | None) -> None:
    """Raise what keeps ``found`` from being folded to ``out``, as :func:`run` would; write nothing."""
    _may_write(found, out)
    for at in found.mlps:
        if (reason := why_not(load(found, at), tp)) is not None:
            raise UserError(reason)


def load(found: Found, at: str) -> MLP:
    """Read one MLP of a checkpoint."""

    def linear(name: str) -> GPTQLinear:
        parts = {part: _tensor(found, f"{name}.{part}") for part in PARTS if f"{name}.{part}" in found.tensors}
        return GPTQLinear(**parts, bits=found.bits, zero_offset=found.zero_offset, name=name)

    first, second = found.mlps[at]
    return MLP(tuple(linear(f"{at}.{name}") for name in first), linear(f"{at}.{second}"))


def _tensor(found: Found, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(found.folder / found.tensors[name].file, framework="pt") as file:
        return file.get_tensor(name)


def _check(before: MLP, after: MLP, at: str) -> float:
    """Return the largest relative difference on random inputs, also of up to 8 ranks' parts together."""
    x = torch.randn(CHECK_ROWS, before.first[0].k, generator=torch.Generator().manual_seed(0))
    expected = forward(before, x)
    results = [forward(after, x)]
    if (tp := next((size for size in CHECK_TP if divides(after, size)), None)) is not None:
        results.append(torch.stack([forward(shard(after, rank, tp), x) for rank in range(tp)]).sum(0))
    norm = float(expected.norm()) or 1.0  # an MLP that was added to a model computes zeros
    error = max(float((result - expected).norm()) / norm for result in results)
    if not error <= CHECK_ERROR:
        raise UserError(
            f"{at}: folded it differs by {error:.1e} of what it computes (at most {CHECK_ERROR:g} is rounding); the "
            "checkpoint has numbers that are not finite, or this is an error of megatron-flux: please report it"
        )
    return error


# --- reading


def _refuse_links(folder: Path) -> None:
    """Refuse what is no file, and links out of the folder, which would be read and copied. Hugging Face's cache keeps a
    snapshot's files in ``blobs``, two folders above.
    """
    allowed = folder.resolve(), folder.resolve().parent.parent / "blobs"
    for path in folder.rglob("*"):  # it does not follow links
        real = path.resolve()
        if path.is_symlink() and (real.is_dir() or not any(map(real.is_relative_to, allowed))):
            raise UserError(f"{path} is a link to {real}; put a copy of what you trust in its place")
        if not (real.is_file() or real.is_dir()):
            raise UserError(f"{path} is neither a file nor a folder; remove it")


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON object: {one_line(error)}") from None


def _quantization(folder: Path) -> tuple[int, int]:
    """Return the bits, and what zero points are stored less."""
    configs: dict[str, Any] = {
        name: _json(folder / name) for name in ("quantize_config.json", "config.json") if (folder / name).is_file()
    }
    configs |= {name: config.get("quantization_config") for name, config in configs.items() if name == "config.json"}
    configs = {name: config for name, config in configs.items() if isinstance(config, dict)}
    if not configs:
        neither = "neither quantize_config.json nor config.json says how it was quantised"
        raise UserError(f"{folder} is no GPTQ checkpoint: {neither}")
    found: dict[str, Any] = {"quant_method": "gptq", "checkpoint_format": "gptq", "bits": None}
    for key, default in found.items():
        values = {name: config[key] for name, config in configs.items() if key in config}
        found[key] = next(iter(values.values()), default)
        if any(other != found[key] for other in values.values()):
            differs = " and ".join(f"{key} {value!r} in {name}" for name, value in values.items())
            raise UserError(f"{folder} has {differs}; weights can be right by one of them alone: correct the other")
    method, layout, bits = found.values()
    where = " and ".join(str(folder / name) for name in configs)
    if method != "gptq" or layout not in ("gptq", "gptq_v2"):
        others = f"quant_method {method!r}, checkpoint_format {layout!r}"
        raise UserError(f"{where}: {others}; fold reads gptq in format gptq or gptq_v2")
    if bits not in BITS or not isinstance(bits, int):
        raise UserError(f"{where}: bits {bits!r}; can be one of {', '.join(map(str, BITS))}")
    return bits, 1 if layout == "gptq" else 0


def _files(folder: Path) -> list[str]:
    if (folder / INDEX).is_file():
        named = _json(folder / INDEX).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
            raise UserError(f"{folder / INDEX} has no weight_map of names of files")
        names = sorted(set(named.values()))
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise UserError(f"{folder / INDEX} names {name!r}; a file of this folder, *.safetensors, is allowed")
            if not (folder / name).is_file():
                raise UserError(f"{folder / INDEX} names {name}, which is not there; is the download complete?")
        return names
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(names) == 1:
        return names
    if names:
        raise UserError(f"{folder} has {len(names)} safetensors files and no {INDEX}; which of them belong together?")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    what = f"{pickles[0]} is a pickle, which could run anything" if pickles else f"no {WHOLE} and no {INDEX}"
    raise UserError(f"{folder} has no safetensors files ({what}); convert the checkpoint to safetensors")


def _header(path: Path) -> dict[str, Stored]:
    """Return where the tensors of a file are. The library has checked that they fill it without holes or overlaps."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is no sound safetensors file: {one_line(error)}") from None
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entries = json.loads(file.read(length))
    return {
        name: Stored(path.name, 8 + length + entries[name]["data_offsets"][0], tuple(entries[name]["shape"]))
        for name in names
    }


def _mlps(folder: Path, tensors: dict[str, Stored]) -> dict[str, tuple[tuple[str, ...], str]]:
    linears: dict[str, dict[str, set[str]]] = {}
    for name in tensors:
        if (matched := NAMES.match(name)) is not None:
            linears.setdefault(matched["at"], {}).setdefault(matched["linear"], set()).add(matched["of"])
    found: dict[str, tuple[tuple[str, ...], str]] = {}
    for at, there in linears.items():
        if not any("qweight" in parts for parts in there.values()):
            continue  # not quantised: it has no order
        first, second = (("gate_proj", "up_proj"), "down_proj") if "down_proj" in there else (("c_fc",), "c_proj")
        for linear in (*first, second):
            parts = there.get(linear, set())
            missing = [part for part, needed in PARTS.items() if needed and part not in parts]
            if missing:
                raise UserError(f"{folder}: {at}.{linear} lacks {', '.join(missing)}; fold needs all linears of an MLP")
            if unknown := sorted(parts - PARTS.keys()):
                may = f"is unknown and may depend on the order; known are {', '.join(PARTS)}"
                raise UserError(f"{folder}: {at}.{linear}.{unknown[0]} {may}")
        found[at] = (first, second)
    if not found:
        raise UserError(
            f"{folder}: none of its {len(tensors)} tensors is of a quantised MLP by Llama's names (*.gate_proj, "
            "*.up_proj, *.down_proj) or GPT-2's (*.mlp.c_fc, *.mlp.c_proj)"
        )
    for name in (name for name in tensors if NAMES.match(name) is None):
        for at in found.keys() & {name[: dot.start()] for dot in re.finditer(r"\.", name)}:
            # A norm between the linears, an adapter: what has a number for each of the second one's inputs.
            if set(tensors[name].shape) & set(tensors[f"{at}.{found[at][1]}.g_idx"].shape):
                raise UserError(
                    f"{folder}: {name} {list(tensors[name].shape)} may depend on the order of {at}.{found[at][1]}'s "
                    "inputs, which fold changes; merge it into the weights before they are quantised"
                )
    return found


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


# --- writing


def _may_write(found: Found, out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} exists; name a folder that does not")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent} is no folder; make it first")
    if (part := out.with_name(f".{out.name}.part")).exists():
        raise UserError(f"{part} exists: another fold is writing {out}, or was killed; if none is, remove that folder")
    if out.resolve().is_relative_to(found.folder.resolve()):
        raise UserError(f"{out} is inside {found.folder}; name a folder beside it")
    needed = sum(path.stat().st_size for path in found.folder.rglob("*") if path.is_file())
    if (free := shutil.disk_usage(out.parent).free) < needed:
        room = f"{needed / 1e9:.3g} GB are needed, {free / 1e9:.3g} GB are free"
        raise StorageError(f"{out}: {room}; make room, or name a folder on another disk")


@contextmanager
def _made_whole(out: Path) -> Iterator[Path]:
    """Yield a folder that becomes ``out`` if all goes well, and is removed if not."""
    part = out.with_name(f".{out.name}.part")
    with ExitStack() as end:
        try:
            part.mkdir()  # what is there by now is another fold's, and stays
            end.callback(shutil.rmtree, part, ignore_errors=True)
            yield part
            part.rename(out)
        except OSError as error:
            raise StorageError(f"{out} could not be written: {one_line(error)}") from error


def _write(found: Found, part: Path, at: str, mlp: MLP) -> None:
    """Write the folded tensors over the copied ones: all have the sizes and places they had."""
    first, second = found.mlps[at]
    for name, linear in zip((*first, second), (*mlp.first, mlp.second), strict=True):
        for of in PARTS:
            tensor: torch.Tensor | None = getattr(linear, of)
            if tensor is None:
                continue
            stored = found.tensors[f"{at}.{name}.{of}"]
            data = tensor.contiguous().view(torch.uint8).numpy()
            with (part / stored.file).open("r+b") as file:
                file.seek(stored.start)
                file.write(data.tobytes())
