"""Tokenizers by file, read by megatron.core's own classes with Hugging Face's or Google's package, which are optional.

Only text that is not in the cache yet needs them, and the size of the vocabulary: ranks that find tokenized text read
neither. Nothing is downloaded: the file must be there.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from megatron_flux.errors import UserError, one_line, require

Kind = Literal["HuggingFaceTokenizer", "SentencePieceTokenizer"]
_PACKAGES = {"HuggingFaceTokenizer": "transformers", "SentencePieceTokenizer": "sentencepiece"}
_LIBRARIES = {"HuggingFaceTokenizer": "huggingface", "SentencePieceTokenizer": "sentencepiece"}
_NAMES = ("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "*.model")
"""Files of a model's folder that make its tokenizer."""


class Tokenizer(NamedTuple):
    """One that was read."""

    vocab_size: int
    end_of_document: int
    encode: Callable[[str], list[int]]


@functools.cache
def load(kind: Kind, model: Path) -> Tokenizer:
    """Read the tokenizer in ``model``. Raises UserError: no package, no tokenizer, or no end-of-sequence token."""
    require(_PACKAGES[kind], f"--tokenizer-type {kind}")
    path = _checked(kind, model)
    fast = {"use_fast": True} if kind == "HuggingFaceTokenizer" else {}
    try:
        from megatron.core.tokenizers import MegatronTokenizer

        read = MegatronTokenizer.from_pretrained(str(path), metadata_path={"library": _LIBRARIES[kind]}, **fast)
        end = read.eod if kind == "HuggingFaceTokenizer" else read.eos_id
    except Exception as error:  # whatever these packages make of a file that is none
        raise UserError(f"--tokenizer-model {model} is no {kind}: {one_line(error)[:200]}") from None
    if end is None or end < 0:
        raise UserError(f"--tokenizer-model {model} has no end-of-sequence token, which ends documents; add one to it")
    return Tokenizer(read.vocab_size, end, read.tokenize)


def fingerprint(kind: Kind, model: Path) -> str:
    """Return the kind, and the SHA-256 of the tokenizer's file or files."""
    path, digest = _checked(kind, model), hashlib.sha256()
    files = {path} if path.is_file() else {file for name in _NAMES for file in path.glob(name) if file.is_file()}
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"{kind} {digest.hexdigest()}"


def _checked(kind: Kind, model: Path) -> Path:
    """Return the path to read: for a file of Hugging Face's, its folder."""
    if not model.exists():
        raise UserError(f"--tokenizer-model {model} does not exist; give a tokenizer's file or folder on this machine")
    return model.parent if kind == "HuggingFaceTokenizer" and model.is_file() else model
