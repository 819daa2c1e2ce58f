"""patch(), unpatch(), patched(), report(): idempotent, nested, reversible to the identical objects, logged."""

from collections.abc import Iterator
from typing import Any

import pytest
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_flux import FluxConfig, FluxError, UserError, is_patched, patch, patched, unpatch
from megatron_flux.comm import links
from megatron_flux.patch import patcher

SEAM = ((ColumnParallelLinear, "_forward_impl"), (RowParallelLinear, "forward"))
"""Local layers. Those over TransformerEngine are in tests/distributed; where it is installed they count too."""


def methods() -> tuple[object, ...]:
    return tuple(vars(owner)[name] for owner, name in SEAM)


STOCK = methods()
STOCK_CLASSES = dict(vars(ColumnParallelLinear)), dict(vars(RowParallelLinear))


@pytest.fixture(autouse=True)
def stock_before_and_after() -> Iterator[None]:
    assert methods() == STOCK
    yield
    for (owner, name), stock in zip(SEAM, STOCK, strict=True):
        setattr(owner, name, stock)
    for r in patcher._replacements[len(SEAM) :]:
        if r.inherited:
            delattr(r.owner, r.name)
        else:
            setattr(r.owner, r.name, r.stock)
    patcher._linears = None
    patcher._replacements.clear()


def config() -> FluxConfig | None:
    return None if patcher._linears is None else patcher._linears.config


def test_patch_replaces_two_methods_and_nothing_else_and_unpatch_restores_them() -> None:
    patch()
    assert is_patched()
    for (owner, name), before in zip(SEAM, STOCK_CLASSES, strict=True):
        now = dict(vars(owner))
        assert now.keys() == before.keys()
        assert [key for key in now if now[key] is not before[key]] == [name]
    unpatch()
    assert not is_patched()
    assert (dict(vars(ColumnParallelLinear)), dict(vars(RowParallelLinear))) == STOCK_CLASSES
    unpatch()
    assert methods() == STOCK


def test_patched_nests_and_restores_the_outer_config() -> None:
    def fails() -> None:
        with patched(FluxConfig(strict=False)):
            raise ZeroDivisionError

    with patched(FluxConfig(strict=True)):
        outer = methods()
        with pytest.raises(ZeroDivisionError):
            fails()
        with patched(FluxConfig(backend="reference")):
            assert config() == FluxConfig(backend="reference")
            with patched():
                assert config() == FluxConfig(backend="reference")
            assert config() == FluxConfig(backend="reference")
        assert config() == FluxConfig(strict=True)
        assert methods() == outer
    assert methods() == STOCK


@pytest.mark.parametrize("which", [0, 1])
def test_somebody_elses_later_replacement_is_not_thrown_away(which: int) -> None:
    patch()
    flux = methods()
    owner, name = SEAM[which]

    def theirs(*args: object, **kwargs: object) -> None: ...

    setattr(owner, name, theirs)
    with pytest.raises(FluxError, match=rf"{owner.__name__}\.{name} was replaced after .*theirs"):
        unpatch()
    assert is_patched()
    assert vars(owner)[name] is theirs
    other_owner, other_name = SEAM[1 - which]
    assert vars(other_owner)[other_name] is flux[1 - which]
    setattr(owner, name, flux[which])
    unpatch()
    assert methods() == STOCK


@pytest.mark.parametrize("already", [False, True], ids=["stock", "patched"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "warp"}, "unknown backend 'warp'; use one of: auto, reference"),
        ({"wire": "fp8"}, "unknown wire 'fp8'; use one of: exact, int8$"),
        ({"keep_gathered_bytes": 0.5}, "keep_gathered_bytes must be a number of bytes, 0 or more, not 0.5"),
    ],
)
def test_bad_values_are_refused_before_anything_changes(given: dict[str, Any], message: str, already: bool) -> None:
    if already:
        patch()
    before = methods(), config(), links.wanted
    with pytest.raises(UserError, match=message):
        patch(FluxConfig(**given))
    assert (methods(), config(), links.wanted) == before


def test_the_link_holds_from_the_patch_on() -> None:
    try:
        patch(FluxConfig(link="host", strict=True))
        assert links.wanted == links.Wanted("host", strict=True)
        patch(FluxConfig())
        assert links.wanted == links.Wanted()
    finally:
        links.want(links.Wanted())
