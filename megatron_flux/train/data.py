"""The text of a run: tokenized into Megatron's indexed dataset, and read from it in micro-batches.

Text files are read as bytes: tokens 0-255, 256 ends a document, 257 pads. Other tokens come in a .bin/.idx pair, as
Megatron-LM's preprocessing makes it. Without ``--data`` the text is the source code of Python's standard library.

Tokenized text and megatron-core's indices lie in a cache folder, under names made from the files' paths, sizes and
times. One process builds under a lock, and a build that dies leaves nothing that looks finished. Users may share the
folder: each reads only what that user or root alone can have written, and builds the rest again under another name.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sysconfig
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_flux.errors import UserError
from megatron_flux.files import locked
from megatron_flux.patch.megatron_core import installed_megatron_core
from megatron_flux.settings import cache_folder
from megatron_flux.train.config import RunConfig

END_OF_DOCUMENT, _PAD, _BYTE_VOCAB_SIZE = 256, 257, 258
_SCANNED_TOKENS = 1 << 24
"""Tokens of a foreign pair that are checked against the vocabulary before training; each batch is checked as well."""


class Corpus(NamedTuple):
    """An indexed dataset on disk, the pair ``prefix.bin`` and ``prefix.idx``; ``is_bytes``: made here from bytes."""

    prefix: Path
    tokens: int
    documents: int
    is_bytes: bool


def find_sources(data: list[Path]) -> list[Path] | Path:
    """Return the text files that ``data`` names, sorted, or the prefix of a pair. Raises UserError."""
    pairs = [prefix for path in data if (prefix := _pair_prefix(path)) is not None]
    if pairs and len(data) > 1:
        raise UserError(f"--data takes one .bin/.idx pair, or text files and folders; got {len(data)} with a pair")
    if pairs:
        return pairs[0]
    paths = data or [Path(sysconfig.get_paths()["stdlib"])]
    return sorted({file for path in paths for file in _text_files(path, only_python=not data)})


def prepare(config: RunConfig) -> Corpus:
    """Return the indexed dataset of a run's text, made now if it is not in the cache. Raises UserError.

    Call it before there are process groups, in which megatron-core has ranks wait for the first one.
    """
    sources, vocab_size = find_sources(config.data), config.shape.vocab_size
    if isinstance(sources, Path):
        corpus = _check_pair(sources, vocab_size)
    elif vocab_size < _BYTE_VOCAB_SIZE:
        needs = f"byte-level text needs a vocabulary of {_BYTE_VOCAB_SIZE}, not {vocab_size}"
        raise UserError(f"{needs}; set vocab_size higher, or give a .bin/.idx pair")
    else:
        corpus = _check_pair(_tokenized(sources, cache_folder(config.data_cache)), vocab_size)._replace(is_bytes=True)
    _indices(config, corpus)
    return corpus


def name_of(data: list[Path]) -> str:
    """Return ``data`` in words: the paths, or the default text."""
    return " ".join(str(path.absolute()) for path in data) or "the source files of Python's standard library"


def _pair_prefix(path: Path) -> Path | None:
    """Return the common prefix if ``path`` names a pair: by prefix, by its .bin or by its .idx."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    missing = [suffix for suffix in (".bin", ".idx") if not Path(f"{prefix}{suffix}").is_file()]
    if len(missing) == 1 and (path != prefix or not path.exists()):
        raise UserError(f"--data {path}: {prefix}{missing[0]} is missing; a dataset is a pair of .bin and .idx")
    return None if missing else prefix


def _text_files(path: Path, *, only_python: bool) -> list[Path]:
    candidates = [path]
    for folder, subfolders, names in os.walk(path):  # yields nothing for a file
        subfolders[:] = sorted(s for s in subfolders if s[0] != "." and s not in ("site-packages", "__pycache__"))
        candidates += [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
    # is_file: opening a named pipe waits for a writer.
    files = [f for f in candidates if (not only_python or f.suffix == ".py") and f.is_file() and _is_text(f)]
    if not files:
        what = "has no text in it" if path.exists() else "does not exist"
        raise UserError(f"--data {path} {what}; give text files, a folder of them or a .bin/.idx pair")
    return files


def _is_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(8192)
    except OSError as error:
        raise UserError(f"--data {path} cannot be read: {error.strerror}; check its permissions") from None
    return bool(head) and b"\0" not in head


def _tokenized(files: list[Path], cache: Path) -> Path:
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        digest.update(os.fsencode(file.resolve()) + f"\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return _cached(cache, f"bytes-{digest.hexdigest()[:16]}", lambda folder: _build(files, folder / "text")) / "text"


def _cached(cache: Path, name: str, build: Callable[[Path], object]) -> Path:
    """Return the folder ``name`` of the cache; ``build`` fills it if it is missing. Raises UserError."""
    folder = cache / name
    if folder.exists() and not _is_own(folder):
        folder = cache / f"{name}-{os.geteuid()}"
    try:
        if not folder.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            with locked(cache / f"{folder.name}.lock", 600) as alone:
                if not folder.is_dir():
                    if alone:
                        for dead in cache.glob(f"{folder.name}.building-*"):  # of a process that was killed
                            shutil.rmtree(dead, ignore_errors=True)
                    _fill(folder, build)
    except TimeoutError as error:
        raise UserError(f"{error} for 10 minutes; end it or set data_cache") from None
    except OSError as error:
        message = f"the data cache {cache} cannot be written: {error.strerror or error}"  # NumPy gives words alone
        raise UserError(f"{message}; make room, or set data_cache") from None
    if not _is_own(folder):
        raise UserError(f"{folder} can be written by another user than this one and root; remove it or set data_cache")
    return folder


def _is_own(folder: Path) -> bool:
    """Return True if only this user and root can have written what is in ``folder``."""
    try:
        stats = [path.lstat() for path in (folder, *folder.iterdir())]
    except OSError:
        return False
    return all(stat.st_uid in (0, os.geteuid()) and not stat.st_mode & 0o022 for stat in stats)


def _fill(folder: Path, build: Callable[[Path], object]) -> None:
    building = folder.with_name(f"{folder.name}.building-{uuid.uuid4().hex}")
    building.mkdir(mode=0o755)
    try:
        build(building)
        for path in building.iterdir():
            path.chmod(path.stat().st_mode & ~0o022)  # whatever the umask: others may read it, not write it
        try:
            building.rename(folder)
        except OSError:
            if not folder.is_dir():  # without locks another process may have been faster
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _build(files: list[Path], prefix: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for file in files:
        tokens = np.append(np.frombuffer(file.read_bytes(), dtype=np.uint8), np.int32(END_OF_DOCUMENT))
        builder.add_document(torch.from_numpy(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")


def _check_pair(prefix: Path, vocab_size: int) -> Corpus:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    with Path(f"{prefix}.idx").open("rb") as file:
        if file.read(9) != b"MMIDIDX\x00\x00":  # the reader would leave half an object that complains when it goes
            raise UserError(f"--data {prefix}.idx is not a Megatron index; make the pair with Megatron's preprocessing")
    try:
        dataset = IndexedDataset(str(prefix))
        dtype, tokens = np.dtype(dataset.index.dtype), int(dataset.index.sequence_lengths.sum(dtype=np.int64))
    except Exception as error:  # the reader asserts, and raises whatever numpy or struct raise
        cause = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"--data {prefix}.idx is damaged: {cause}; make the pair again") from None
    if (size := Path(f"{prefix}.bin").stat().st_size) != tokens * dtype.itemsize:
        says = f"its index says {tokens} tokens of {dtype.itemsize} bytes"
        raise UserError(f"--data {prefix}.bin has {size} bytes, but {says}; make the pair again")
    if tokens:
        head = np.memmap(f"{prefix}.bin", dtype=dtype, mode="r")[:_SCANNED_TOKENS]
        _check_vocabulary(head.min().item(), head.max().item(), vocab_size, str(prefix))
    return Corpus(prefix, tokens, len(dataset), is_bytes=False)


def _check_vocabulary(lowest: float, highest: float, vocab_size: int, where: str) -> None:
    """Refuse tokens outside ``[0, vocab_size)``: Megatron's embedding would silently read them as zeros."""
    if not (lowest >= 0 and highest < vocab_size):  # a pair of floats can hold NaN
        outside = highest if lowest >= 0 else lowest
        raise UserError(f"{where} has token {outside}, outside the vocabulary of {vocab_size}; set vocab_size")


def build_dataset(config: RunConfig, corpus: Corpus) -> Any:
    """Return an epoch of the corpus as megatron-core's GPTDataset, shuffled by the seed. Collective."""
    return _dataset(config, corpus, _indices(config, corpus))


def _indices(config: RunConfig, corpus: Corpus) -> Path:
    """Return the folder of megatron-core's index files for this run, made now if it is not in the cache.

    megatron-core takes any that exist for whole, also those of a run that died.
    """
    changed = Path(f"{corpus.prefix}.bin").stat().st_mtime_ns  # a pair that was made again must not meet its old ones
    order = config.seed, config.shape.seq_length, config.shape.vocab_size, installed_megatron_core()
    name = f"indices-{hashlib.sha256(repr((*corpus, changed, *order)).encode()).hexdigest()[:16]}"
    return _cached(cache_folder(config.data_cache), name, lambda folder: _dataset(config, corpus, folder))


def _dataset(config: RunConfig, corpus: Corpus, indices: Path) -> Any:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    vocab_size, pad, eod = _BYTE_VOCAB_SIZE, _PAD, END_OF_DOCUMENT
    if not corpus.is_bytes:  # padded and cut already: a pad that never occurs, the usual place for eod
        vocab_size, pad, eod = config.shape.vocab_size, -1, config.shape.vocab_size - 1
    dataset_config = GPTDatasetConfig(
        random_seed=config.seed,
        sequence_length=config.shape.seq_length,
        blend=([str(corpus.prefix)], None),
        split="1,0,0",  # all of it for training
        path_to_cache=str(indices),
        tokenizer=SimpleNamespace(vocab_size=vocab_size, pad=pad, eod=eod, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,  # attention is causal by construction in every spec used here
    )
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [None, None, None], lambda: True, dataset_config)
    dataset, *_ = builder.build()
    if len(dataset) == 0:
        few = f"{name_of(config.data)} has no sequence of {config.shape.seq_length} + 1 tokens"
        raise UserError(f"{few}; give more text or a smaller --seq-length")
    return dataset


class MicroBatches:
    """Iterates without end over this rank's micro-batches of a dataset, after ``consumed`` sequences of all ranks.

    Each has ``tokens``, ``labels``, ``loss_mask`` and ``position_ids``, all ``[micro_batch_size, seq_length]``.
    """

    def __init__(self, config: RunConfig, dataset: Any, dp_rank: int, device: torch.device) -> None:
        self._config, self._dataset, self._dp_rank, self._device = config, dataset, dp_rank, device
        self.consumed = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        size = self._config.micro_batch_size
        first = self.consumed + self._dp_rank * size
        samples = [self._dataset[(first + i) % len(self._dataset)] for i in range(size)]
        self.consumed += size * self._config.dp
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        text = batch["tokens"]
        vocab_size = self._config.shape.vocab_size
        _check_vocabulary(int(text.min()), int(text.max()), vocab_size, f"sequence {first} of the data")
        if self._device.type == "cuda":
            batch = {name: t.pin_memory().to(self._device, non_blocking=True) for name, t in batch.items()}
        return batch
