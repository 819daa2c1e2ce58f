"""``bench peers`` without ranks: no multicast, and the check of results."""

import pytest
import torch

from megatron_flux.bench import peers
from megatron_flux.errors import FluxError
from megatron_flux.run.rank import MEASURED
from tests.unit.bench.conftest import Run

PEERS = ("bench", "peers")


@pytest.mark.parametrize("name", sorted(MEASURED.keys() - {"CUDA_DEVICE_MAX_CONNECTIONS"}))
def test_multicast_cannot_be_switched_on(run: Run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "7")
    assert f"{name}=7: bench peers compares without NVLink multicast" in run(*PEERS, "--dry-run", code=2)


def test_every_row_counts() -> None:
    right = torch.randn(5000, 8) + 10
    assert peers.error_of(right.bfloat16(), right) < 5e-3
    wrong = right.clone()
    wrong[4999] *= 1.25
    assert peers.error_of(wrong, right) == pytest.approx(0.25)
    wrong[2, 3] = torch.nan
    assert not peers.error_of(wrong, right) <= 1
    with pytest.raises(FluxError, match=r"its result is \[8, 5000\], not \[5000, 8\]"):
        peers.error_of(right.t(), right)
