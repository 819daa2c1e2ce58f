"""The tile schedules: the kernels' own Python, on plain numbers."""

from __future__ import annotations

from collections import Counter
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")

from megatron_flux.kernels import device
from megatron_flux.kernels.hopper import ag_gemm as hopper_ag_gemm

GL = SimpleNamespace(minimum=min)


def plain(module: Any, name: str, **more: Any) -> Any:
    """A device function as a function of numbers."""
    code = getattr(module, name).fn.__code__
    return FunctionType(code, {"gl": GL, **more})


raster = plain(device, "raster", min=min)
gather_place = plain(hopper_ag_gemm, "_place", raster=raster)
by_destination = plain(device, "_by_destination")
scatter_place = plain(device, "scatter_place", raster=raster, _by_destination=by_destination)


def gathered_tiles(rank: int, tp: int, own: int, npn: int, group: int, span: int) -> list[tuple[int, ...]]:
    return [gather_place(t, own, npn, rank, group, span, tp) for t in range(own * npn * tp)]


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize(("own", "npn", "group"), [(1, 1, 3), (2, 5, 8), (8, 24, 16), (5, 3, 3), (8, 5, 8)])
@pytest.mark.parametrize("span", [1, 2, 3])
def test_a_gather_does_every_tile_once_and_its_own_first(tp: int, own: int, npn: int, group: int, span: int) -> None:
    for rank in range(tp):
        tiles = gathered_tiles(rank, tp, own, npn, group, span)
        every = Counter((src, rb, pn) for src in range(tp) for rb in range(own) for pn in range(npn))
        assert Counter(tiles) == every
        sources = [src for src, _, _ in tiles]
        assert set(sources[: own * npn]) == {rank}
        steps = [(src - rank) % tp for src in sources]
        assert set(steps[own * npn : 2 * own * npn]) == {1}  # the first to come waits for no other
        # Shards that come later are never done before those that come a span earlier.
        places = [0 if step == 0 else 1 if step == 1 else 2 + (step - 2) // span for step in steps]
        assert places == sorted(places)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize(("nrb", "npn"), [(1, 1), (8, 48), (7, 5), (16, 3)])
def test_a_scatter_does_every_tile_once(tp: int, nrb: int, npn: int) -> None:
    """``tp`` of 1: to all ranks, of whose tiles each rank has all."""
    for band in range(1, min(4, nrb) + 1) if tp > 1 else (1, 8):
        tiles = [scatter_place(t, nrb, npn, band, tp) for t in range(nrb * npn * tp)]
        assert Counter(tiles) == Counter((s, rb, pn) for s in range(tp) for rb in range(nrb) for pn in range(npn))
        # The own tiles of the last band come last.
        assert {step for step, _, _ in tiles[-band * npn :]} == {tp - 1}
