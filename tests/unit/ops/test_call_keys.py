"""What two calls must have in common for one to be made as the other was: every part of the key is looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_flux.ops import fast_path


class Operand:
    """A tensor on a GPU, as far as a key looks at it."""

    is_cuda = True

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16, device: int = 0) -> None:
        self.shape, self.dtype, self.get_device = torch.Size(shape), dtype, lambda: device


def key(**changed: Any) -> Any:
    call = {
        "operator": "all_gather_gemm",
        "x": Operand(4, 8),
        "weight": Operand(6, 8),
        "bias": Operand(6),
        "backend": "auto",
        "transposed": False,
        "return_gathered": False,
        "inside": Operand(6),
        "wire": "exact",
    }
    return fast_path.key_of(**(call | changed))


def test_calls_of_one_kind_have_one_key() -> None:
    assert key() == key()
    assert hash(key()) == hash(key())


@pytest.mark.parametrize(
    "changed",
    [
        {"operator": "gemm_reduce_scatter"},
        {"backend": "fused"},
        {"wire": "int8"},
        {"transposed": True},
        {"return_gathered": True},
        {"x": Operand(8, 8)},
        {"x": Operand(2, 2, 8)},
        {"x": Operand(4, 8, dtype=torch.float16)},
        {"x": Operand(4, 8, device=1)},
        {"weight": None},
        {"weight": Operand(8, 8)},
        {"weight": Operand(6, 8, dtype=torch.float16)},
        {"weight": Operand(6, 8, device=1)},
        {"bias": None},
        {"bias": Operand(5)},
        {"bias": Operand(6, dtype=torch.float16)},
        {"bias": Operand(6, device=1)},
        {"inside": None},
        {"inside": Operand(5)},
        {"inside": Operand(6, dtype=torch.float16)},
        {"inside": Operand(6, device=1)},
    ],
    ids=lambda changed: " ".join(f"{k} {getattr(v, 'dtype', v)}" for k, v in changed.items()),
)
def test_calls_of_another_kind_have_another_key(changed: dict[str, Any]) -> None:
    assert key(**changed) != key()


def test_gathers_of_two_dtypes_are_two_kinds() -> None:
    """A gather has no weight whose dtype would tell."""
    gathers = [
        fast_path.key_of("all_gather", Operand(4, 8, dtype=dtype), None, None, "auto")  # type: ignore[arg-type]
        for dtype in (torch.bfloat16, torch.float16)
    ]
    assert gathers[0] != gathers[1]
