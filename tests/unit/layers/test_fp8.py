"""When a row-parallel layer's dy is gathered twice."""

import pytest
import torch

from megatron_flux.layers.fp8 import Rows, worth_two_gathers


@pytest.mark.parametrize(
    ("tp", "hidden", "columns", "worth"),
    [
        (2, 4096, 2048, True),  # GPT-3 6.7B: linear_proj, linear_fc2
        (2, 4096, 8192, True),
        (4, 12288, 3072, True),  # GPT-3 175B
        (8, 12288, 1536, False),
        (8, 12288, 6144, True),
        (8, 8192, 1024, False),  # Llama-70B
    ],
)
def test_dgrad_must_hide_both_gathers(tp: int, hidden: int, columns: int, worth: bool) -> None:
    dy = Rows(torch.empty(8192 // tp, hidden, dtype=torch.uint8, device="meta"), torch.ones(1))
    assert worth_two_gathers(dy, columns, tp) == worth


def test_what_is_transposed_in_no_time_is_gathered_once() -> None:
    dy = Rows(torch.empty(512, 4096, dtype=torch.uint8, device="meta"), torch.ones(1))
    assert not worth_two_gathers(dy, 2048, 2)
