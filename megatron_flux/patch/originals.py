"""Notice another library that has exchanged what stock calls and flux does not.

ModelOpt quantises a layer by exchanging functions of megatron-core or TransformerEngine while its ``forward`` runs.
megatron-core's batch-invariant mode exchanges TransformerEngine's GEMM and norm. Others wrap a method of a class. Flux
would throw that work away, so such a call runs stock, with the other object's name as the reason.

Contract: compare by identity, in every call. An object is the release's own if its code is, under decorators of torch
or of the release, and its name is that of its place. So it does not matter what was there when ``patch()`` ran, and an
object that is put back counts again. Hazard: ``==`` finds proxies (``wrapt``) equal to what they wrap.

Cost: 0.4 us a call of a column or TransformerEngine layer (10 objects), 0.7 us of a row layer (24), on the host of an
H100 (results/exchanged-h100x2).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pkgutil import resolve_name
from typing import Any

import torch

from megatron_flux.patch.megatron_core import LAYERS, TE_LAYERS
from megatron_flux.patch.provenance import name_of_other

MAPPINGS = "megatron.core.tensor_parallel.mappings"
TE_LINEAR = "transformer_engine.pytorch.module.linear"
TE_NORM_LINEAR = "transformer_engine.pytorch.module.layernorm_linear"
_BATCH_INVARIANT = "megatron.core.transformer.custom_layers.batch_invariant_kernels"

COLUMN = (
    f"{LAYERS}:linear_with_grad_accumulation_and_async_allreduce",
    f"{LAYERS}:linear_with_frozen_weight",
    f"{LAYERS}:LinearWithGradAccumulationAndAsyncCommunication",
    f"{LAYERS}:LinearWithFrozenWeight",
)
ROW = (
    *COLUMN,
    f"{LAYERS}:RowParallelLinear._forward_impl",
    f"{LAYERS}:reduce_scatter_to_sequence_parallel_region",
    f"{LAYERS}:reduce_from_tensor_model_parallel_region",
    f"{MAPPINGS}:_ReduceScatterToSequenceParallelRegion",
    f"{MAPPINGS}:_ReduceFromModelParallelRegion",
    *(f"{MAPPINGS}:_{name}" for name in ("reduce", "reduce_scatter_along_first_dim", "gather_along_first_dim")),
)
_GATHER, _REDUCTIONS = "gather_along_first_dim", ("reduce_scatter_along_first_dim", "allreduce")
TE = (
    *(f"{TE_LAYERS}:TELinear.forward", f"{TE_LINEAR}:Linear.forward", f"{TE_LINEAR}:_Linear"),
    *(f"{TE_LINEAR}:{name}" for name in ("general_gemm", *_REDUCTIONS)),
)
TE_NORM = (
    *(f"{TE_NORM_LINEAR}:LayerNormLinear.forward", f"{TE_NORM_LINEAR}:_LayerNormLinear"),
    *(f"{TE_NORM_LINEAR}:{name}" for name in ("general_gemm", "apply_normalization", _GATHER, *_REDUCTIONS)),
)
CALLED = {
    "column": COLUMN,
    "row": ROW,
    "TE norm column": TE_NORM,
    "TE column": (*TE, f"{TE_LINEAR}:{_GATHER}"),
    "TE row": (*TE, f"transformer_engine.pytorch.module.base:{_GATHER}"),
}
"""Functions by kind of layer (``module:name``, ``module:class.name``) that stock calls in the replaced method and flux
does not; of an autograd function also ``apply``, ``forward`` and ``backward``."""

_NEVER_SEEN = object()


class Originals:
    """The objects that stock calls for one kind of layer, and the name of each in a message."""

    def __init__(self, paths: Iterable[str], method: str, stock: Callable[..., Any]) -> None:
        """``stock``: the replaced method ``class.name``, which another library may have wrapped before."""
        self._wrapped = _reason(method, stock)
        places = [place for path in paths for place in _places(path)]
        self._labels = [label for _, _, label in places]
        self._names = {f"own{i}": _NEVER_SEEN for i in range(len(places))}
        self._names |= {f"owner{i}": owner for i, (owner, _, _) in enumerate(places)}
        now = [f"owner{i}.{read}" for i, (_, read, _) in enumerate(places)]
        # Compiled: Python caches where an attribute is in the code that reads it, which takes 10 ns instead of 50.
        untouched = " and ".join(f"{found} is own{i}" for i, found in enumerate(now))
        self._untouched = eval(f"lambda: {untouched}", self._names)  # noqa: S307 - names of this file
        self._now = eval(f"lambda: ({', '.join(now)},)", self._names)  # noqa: S307
        self._other()  # now rather than in the first call, which a step waits for

    def why_stock(self) -> str | None:
        """Return the reason if another object is in the place of the release's own, else None."""
        return self._wrapped if self._wrapped is not None or self._untouched() else self._other()

    def _other(self) -> str | None:
        """Look closely, and remember what turns out to be the release's own."""
        for i, found in enumerate(self._now()):
            if found is not self._names[f"own{i}"]:
                if (reason := _reason(self._labels[i], found)) is not None:
                    return reason
                self._names[f"own{i}"] = found
        return None


def _reason(label: str, found: Any) -> str | None:
    other = name_of_other(found, label.rpartition(".")[2])
    return None if other is None else f"{label} replaced by {other}"


def _places(path: str) -> Iterator[tuple[Any, str, str]]:
    """Yield owner, attribute and label of each object behind ``path``."""
    module, _, label = path.partition(":")
    *classes, name = label.split(".")
    owner = resolve_name(f"{module}:{'.'.join(classes)}")
    if (found := getattr(owner, name, None)) is None:
        return  # not in every release
    yield owner, name, label
    if issubclass(type(found), type) and issubclass(found, torch.autograd.Function):
        yield from ((found, method, f"{label}.{method}") for method in ("forward", "backward"))
        # Inherited from torch, and bound to the class: read as an attribute it is another object each time.
        yield vars(found), "get('apply')", f"{label}.apply"


def batch_invariant() -> bool:
    """Return True while megatron-core's batch-invariant mode is on, which exchanges torch's own GEMM, too."""
    module = sys.modules.get(_BATCH_INVARIANT)
    return module is not None and module.is_batch_invariant_mode_enabled()
