"""Operands in FP8: what their bytes and scales stand for, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_flux.errors import UserError
from megatron_flux.ops import gemm as gemms
from megatron_flux.ops.fp8_operand import Fp8Operand, Fp8Pair, quantized

E4M3 = torch.float8_e4m3fn
SQUARE = {"tensor": "tensor", "1x128": "128x128"}  # scaling of the weight beside x


def numbers(rows: int, k: int) -> torch.Tensor:
    """Very different in size from block to block."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.randint(-6, 6, (rows, k // 8 + 1), generator=generator).float())
    return torch.randn(rows, k, generator=generator) * sizes.repeat_interleave(8, 1)[:, :k]


@pytest.mark.parametrize("scaling", ["tensor", "1x128"])
def test_cublaslt_gets_what_begins_at_16_bytes(monkeypatch: pytest.MonkeyPatch, scaling: str) -> None:
    """Wherever a view of more bytes begins: its documentation asks for that."""
    x, weight = quantized(numbers(8, 512), scaling), quantized(numbers(16, 512), SQUARE[scaling])
    given: list[torch.Tensor] = []

    def multiplied(a: torch.Tensor, b: torch.Tensor, *, scale_a: torch.Tensor, scale_b: torch.Tensor, **_: Any) -> None:
        given.extend((a, b) if scaling == "tensor" else (a, b, scale_a, scale_b))

    monkeypatch.setattr(gemms, "cublas_takes", lambda *_: True)
    monkeypatch.setattr(torch, "_scaled_mm", multiplied)
    gemms.fp8_gemm(Fp8Pair(displaced(x), displaced(weight)))
    assert [tensor.data_ptr() % 16 for tensor in given] == [0] * len(given)
    assert torch.equal(given[0].float(), x.numbers.float())
    assert torch.equal(given[1].t().float(), weight.numbers.float())


def displaced(operand: Fp8Operand) -> Fp8Operand:
    data, scales = (
        torch.cat([torch.zeros(1, dtype=of.dtype), of.flatten()])[1:].view(of.shape)
        for of in (operand.data, operand.scale_inv)
    )
    assert data.data_ptr() % 16
    return Fp8Operand(data, operand.dtype, scales, operand.scaling)


def test_shards_become_one_and_rows_are_repeated() -> None:
    parts = [quantized(numbers(6, 300) * 10**r, "1x128") for r in range(2)]
    stacked = torch.stack([part.scale_inv for part in parts])
    whole = Fp8Operand(torch.cat([part.data for part in parts]), E4M3, stacked, "1x128", 2)
    one = whole.one_shard()
    assert (one.shards, one.scale_inv.shape) == (1, (3, 12))
    assert torch.equal(one.dequantized(), whole.dequantized())
    assert one.one_shard() is one
    twice = parts[1].repeated(2)
    assert twice.shards == 2
    assert torch.equal(twice.dequantized(), parts[1].dequantized().repeat(2, 1))
    by_tensor = quantized(numbers(4, 16), "tensor")
    assert torch.equal(by_tensor.repeated(3).one_shard().dequantized(), by_tensor.dequantized().repeat(3, 1))
    with pytest.raises(UserError, match="no common one"):
        Fp8Operand(whole.data, E4M3, torch.ones(2), "tensor", 2).one_shard()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": torch.zeros(4, 256)}, "uint8"),
        ({"scale_inv": torch.ones(2)}, "1 element"),
        ({"scaling": "rowwise"}, "1x128"),
        ({"scaling": "1x128"}, r"wanted: \[2, 4\]"),
        ({"shards": 3}, "equal shards"),
        ({"shards": 2, "scaling": "1x128"}, r"wanted: \[2, 2, 4\]"),
    ],
)
def test_what_does_not_fit_is_one_line(change: dict[str, object], said: str) -> None:
    good = {"data": torch.zeros(4, 256, dtype=torch.uint8), "dtype": E4M3, "scale_inv": torch.ones(1)}
    with pytest.raises(UserError, match=said) as error:
        Fp8Operand(**good | change)
    assert "\n" not in str(error.value)
