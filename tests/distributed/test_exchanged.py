"""Another library exchanges what stock calls and flux does not: its work is done, counted by its name."""

import functools
import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_flux.patch.originals import CALLED, _places
from megatron_flux.patch.provenance import name_of_other
from tests.distributed import te_stand_in
from tests.distributed.megatron_world import flux, megatron, model_config
from tests.distributed.pool import on_ranks
from tests.distributed.te_cases import Case, build, te_megatron
from tests.distributed.te_cases import run as te_run
from tests.distributed.test_stock_layers import make, results, width_of

HERE = __name__


class Wrapped:
    """Replacement by a second patcher: it looks like the release's object and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def around(self, raw: Any) -> Any:
        if isinstance(raw, type):
            return type(
                raw.__name__, (raw,), {"__module__": HERE, "apply": classmethod(self.around(raw.apply.__func__))}
            )
        found = raw.__func__ if isinstance(raw, staticmethod) else raw

        @functools.wraps(found)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return found(*args, **kwargs)

        return staticmethod(wrapper) if isinstance(raw, staticmethod) else wrapper


def places(kind: str) -> Iterator[tuple[Any, str, str]]:
    """The owner, the name in it and the label of every place of a kind of layer that can be wrapped."""
    for path in CALLED[kind]:
        module = importlib.import_module(path.partition(":")[0])
        for _, _, label in _places(path):
            *classes, name = label.split(".")
            yield functools.reduce(getattr, classes, module), name, label


def raw_of(owner: Any, name: str) -> Any:
    return vars(owner).get(name, getattr(owner, name))


def run(kind: str, frozen: bool = False, whole: bool = False, layer: Any = None) -> list[torch.Tensor]:
    layer = layer or make(kind, model_config())
    layer.weight.requires_grad_(not frozen)
    layer.sequence_parallel, layer.allreduce_dgrad = not whole, whole and kind == "column"
    return results(layer, torch.ones(4, 2, width_of(kind)))


def every_place(kind: str, ways: list[Callable[[], list[torch.Tensor]]]) -> None:
    for owner, name, label in places(kind):
        raw, ours, theirs = raw_of(owner, name), Wrapped(), Wrapped()
        with mock.patch.object(owner, name, ours.around(raw)), flux() as seen:
            now = [way() for way in ways]
        with mock.patch.object(owner, name, theirs.around(raw)):
            expected = [way() for way in ways]
        (reason,) = seen.fallbacks
        assert re.fullmatch(rf"{kind}: .* replaced by {re.escape(HERE)}\..*", reason), reason
        assert seen.fallbacks[reason] == sum(seen.fallbacks.values()) >= len(ways)
        assert seen.calls == {}
        assert ours.calls == theirs.calls > 0, label
        for one, other in zip(now, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    with flux() as seen:
        ways[0]()
    assert seen.fallbacks == {}


@pytest.mark.parametrize("kind", ["column", "row"])
@on_ranks("world2")
def test_every_place(kind: str) -> None:
    with megatron(tp=2):
        choices = [(frozen, whole) for frozen in (False, True) for whole in (False, True)]
        every_place(kind, [functools.partial(run, kind, *choice) for choice in choices])


@te_stand_in.needed
@pytest.mark.parametrize("kind", ["norm column", "column", "row"])
@on_ranks("te_world2")
def test_every_place_over_te(kind: str) -> None:
    def call(case: Case) -> list[torch.Tensor]:
        return list(te_run(case, build(case)).values())

    cases = [Case(kind, options={"sequence_parallel": sp}) for sp in (True, False)]
    with te_megatron(2):
        every_place(f"TE {kind}", [functools.partial(call, case) for case in cases])


@on_ranks("world2")
def test_batch_invariant_mode() -> None:
    from megatron.core.transformer.custom_layers import batch_invariant_kernels

    with megatron(tp=2), mock.patch.object(batch_invariant_kernels, "_batch_invariant_MODE", True):
        with flux() as seen:
            for kind in ("column", "row"):
                run(kind)
        gemm = name_of_other(batch_invariant_kernels._te_general_gemm_patched, "general_gemm")
        assert gemm == f"{batch_invariant_kernels.__name__}._te_general_gemm_patched"
        reason = "batch-invariant mode (batch_invariant_mode)"
        assert seen.fallbacks == {f"{kind}: {reason}": 1 for kind in ("column", "row")}
