"""The plans that ship with the package, and the rule for shapes that are not there."""

from __future__ import annotations

import pytest

from megatron_flux.ops.kernel_config import KernelConfig, fits
from megatron_flux.ops.shipped_plans import Entry, Shape, entries, suggested, suggests_for, unmeasured

SHAPE = Shape("all_gather_gemm", "[n,k]", 4, 8192, 6144, 8192)
H200 = "NVIDIA H200"


def entry(stages: int, gain: float | None = 0.1, **other: int | str) -> Entry:
    """For a shape that differs in ``other``; ``stages`` tells its plan."""
    return Entry(SHAPE._replace(**other), KernelConfig(ws=True, stages=stages), gain, "run")  # type: ignore[arg-type]


def plans(*stages: int) -> list[KernelConfig]:
    return [KernelConfig(ws=True, stages=count) for count in stages]


def test_what_ships_can_run_its_own_shapes() -> None:
    assert {known.shape.tp for known in entries()} == {2, 4, 8}
    assert len({known.shape for known in entries()}) == len(entries())
    for op, form, tp, m, n, k in (known.shape for known in entries()):
        (plan,) = suggested(Shape(op, form, tp, m, n, k), entries())
        assert plan.ws
        assert fits(op, plan, m // tp, n, k, tp)


def test_where_two_gpus_stood_in_for_eight_no_gain_is_claimed() -> None:
    stood_in = [known for known in entries() if known.run.startswith("stand-in")]
    assert {known.shape.tp for known in stood_in} == {8}
    assert {known.gain for known in stood_in} == {None}
    assert {known.shape.tp for known in entries() if known.gain is not None} == {2, 4}


def test_the_nearest_two_plans() -> None:
    far, near, nearer = entry(1, m=65536), entry(2, n=8192), entry(3, k=9000)
    assert suggested(SHAPE, [far, near, nearer]) == plans(3, 2)
    assert suggested(SHAPE, [far, near, entry(2, m=8000)]) == plans(2, 1), "the same plan counts once"
    assert suggested(SHAPE, [far, near, entry(5)]) == plans(5), "the very shape needs no others"
    assert suggested(SHAPE, [entry(1, tp=8), entry(2, form="[k,n]"), entry(3, op="gemm_reduce_scatter")]) == []


def test_near_is_a_matter_of_ratios() -> None:
    twice, a_quarter, five_times = entry(1, m=2 * 8192), entry(2, n=6144 // 4), entry(3, k=5 * 8192)
    assert suggested(SHAPE, [five_times, a_quarter, twice]) == plans(1, 2)


@pytest.mark.parametrize(
    ("shape", "plan"),
    [
        (SHAPE._replace(m=4 * 128 * 16), KernelConfig(ws=True, span=2)),  # two shards are more than a raster group
        (SHAPE._replace(k=64), KernelConfig(ws=True, late=True)),  # no quarter of the columns
        (SHAPE._replace(op="gemm_reduce_scatter", m=512), KernelConfig(ws=True, band=2)),  # a rank has one row block
    ],
)
def test_a_plan_that_the_shape_cannot_run_is_no_suggestion(shape: Shape, plan: KernelConfig) -> None:
    known = [Entry(shape, plan, 0.5, "run"), Entry(shape._replace(n=9999), KernelConfig(ws=True), 0.5, "run")]
    assert suggested(shape, known) == [KernelConfig(ws=True)]
    assert unmeasured(shape, H200, known) is None


def test_which_gpus_begin_with_them() -> None:
    assert [suggests_for(name) for name in (H200, "NVIDIA H100 PCIe", "NVIDIA GH200 480GB", "")] == [
        True,
        True,
        False,
        False,
    ]
