"""Linears with a frozen weight, in bf16 and in each recipe of FP8: stock's dx, and nothing that only wgrad needs."""

from typing import Any
from unittest import mock

import pytest

from megatron_flux import ops
from megatron_flux.layers import keep
from tests.distributed import te_fp8_cases as cases
from tests.distributed.data import saved_by
from tests.distributed.pool import on_ranks
from tests.distributed.te_cases import Case
from tests.distributed.te_fp8_cases import FP8, KINDS, RECIPES, Training, both, built, fp8_case, needed, train

pytestmark = needed

EVERY = (None, *RECIPES)
"""Recipes; None is bf16."""


def frozen(case: Case, primary: str | None = None) -> Any:
    layer = built(case, primary)
    layer.weight.requires_grad_(False)
    if (bias := getattr(layer, "bias", None)) is not None:
        bias.requires_grad_(False)
    return layer


HOW = {
    "": (False, False, False),
    "recompute": (False, True, False),
    "no sequence parallelism": (True, False, False),
    "primary weights": (False, False, True),
}
CASES = [
    *((KINDS[i % 3], recipe, "") for i, recipe in enumerate((*EVERY, *EVERY))),
    *((KINDS[(i + 2) % 3], recipe, "recompute") for i, recipe in enumerate(EVERY)),
    *((KINDS[(i + 1) % 3], recipe, "no sequence parallelism") for i, recipe in enumerate(EVERY)),
    *((KINDS[(i + 2) % 3], recipe, "primary weights") for i, recipe in enumerate(RECIPES)),
]


@pytest.mark.parametrize(("kind", "recipe", "how"), CASES)
@on_ranks("te_world2")
def test_stocks_dx_and_no_gather_for_wgrad(kind: str, recipe: str | None, how: str) -> None:
    whole, recompute, primary = HOW[how]
    column = kind != "row"
    case = fp8_case(kind, options={"sequence_parallel": not whole})
    asked: list[bool] = []

    def run() -> Training:
        layer = frozen(case, recipe if primary else None)
        training = train(case, layer, (recipe,) * 2, cases.by_te_checkpoint(layer) if recompute else None)
        assert (training.found.pop("weight0") == 7).all()  # as it was built
        assert not training.found.pop("weight1").any()  # as the first step's end left it
        return training

    def gather(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs.get("return_gathered", False))
        return gather_gemm(*args, **kwargs)

    gather_gemm, before = ops.all_gather_gemm, keep.report()["total"]
    with mock.patch.object(ops, "all_gather_gemm", gather):
        calls = cases.require_stocks(run, f"{kind}, {recipe}")[1].calls
    assert not any(asked)
    assert keep.report()["total"] == before
    forward, backward = 4 * (1 + recompute), 4
    if whole:
        assert calls == {"gemm_all_reduce/reference": backward if column else forward}
    else:
        gathers, sums = (forward, backward) if column else (backward, forward)
        assert calls == {"all_gather_gemm/reference": gathers, "gemm_reduce_scatter/reference": sums}


@pytest.mark.parametrize(("kind", "recipe"), [(KINDS[i % 3], recipe) for i, recipe in enumerate((*EVERY, *EVERY))])
@on_ranks("te_world2")
def test_no_input_is_saved(kind: str, recipe: str | None) -> None:
    """But the norm's, which its own backward reads."""
    case = fp8_case(kind)

    def saved() -> int:
        layer, x = frozen(case), cases.input_of(case, 7).requires_grad_()
        with cases.autocast(recipe and cases.recipe_of(recipe)):
            y, kept = saved_by(lambda: layer(x)[0])
        y.sum().backward()
        kept.pop(layer.weight.untyped_storage().data_ptr(), None)
        return sum(numel == x.numel() for numel, _ in kept.values())

    stock, ours = both(saved, FP8)[:2]
    assert ours == (kind == "norm column") <= stock
