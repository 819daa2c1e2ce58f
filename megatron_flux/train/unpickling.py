"""Restrict what pickles in a checkpoint may name.

torch's reader unpickles a checkpoint's index (``.metadata``) and objects, TransformerEngine its FP8 scales. A pickle
calls whatever its author names, so a checkpoint from somebody else could run any code.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO
from unittest import mock

import torch

_NAMES = {
    *(("collections", "OrderedDict"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"), ("torch", "Size")),
    *(("torch.serialization", "_get_layout"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo")),
    # Tensors of FP8 scales; the latter is torch.load, with weights alone.
    *(("torch._utils", "_rebuild_tensor_v2"), ("torch.storage", "_load_from_bytes")),
}
_MODULES = ("torch.distributed.checkpoint.metadata", "transformer_engine.common.recipe")
"""Modules whose classes hold data alone."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names. Raises UnpicklingError: a checkpoint does not need it."""
        if (module, name) in _NAMES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module in _MODULES:
            named = super().find_class(module, name)
            if isinstance(named, type) and named.__module__ == module:
                return named
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs and could run any code")


def _load(file: BinaryIO, **options: Any) -> Any:
    return _Unpickler(file, **options).load()


@contextmanager
def restricted() -> Iterator[None]:
    """Make pickle and torch refuse to load all but :data:`_NAMES` and :data:`_MODULES`, in the whole process."""
    with (
        mock.patch.object(pickle, "load", _load),
        mock.patch.object(pickle, "loads", lambda data, **options: _load(io.BytesIO(data), **options)),
        mock.patch.dict(os.environ, {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}),
    ):
        os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)  # torch refuses both
        yield
