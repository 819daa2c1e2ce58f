"""Measure the precision of the wire formats by operator, into errors.json. Seeded, on a CPU, less than a minute.

    PYTHONPATH=. python results/wire-cpu/errors.py

Runs the encoder, decoder and sum of :mod:`megatron_flux.kernels.wire` for one rank of ``TP`` whose peers' rows are
sent. Errors are relative to the norm of the exact result in fp64. Rows for formats that are gone stay.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megatron_flux.kernels import wire
from megatron_flux.settings import WIRES

TP, ROWS, K, N = 4, 64, 4096, 1024
INPUTS = {
    "normal": lambda x: x,
    "outliers": lambda x: x * torch.where(torch.rand(x.shape[-1]) < 0.002, 60.0, 1.0),  # some channels of activations
    "gradients": lambda x: 1e-5 * x * torch.exp(2 * torch.randn(x.shape[0], 1)),  # rows of very different size
}


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the error relative to the norm."""
    return float((found.double() - exact).norm() / exact.norm())


def sent(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` ``[rows, k]`` bf16 as it arrives."""
    data = torch.empty(wire.nbytes(name, *x.shape, x.element_size()), dtype=torch.uint8)
    if name == wire.EXACT:
        return x
    out = torch.empty_like(x)
    wire.encode(x, data, {})
    wire.decode(data, out, {})
    return out


def summed(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the ranks' partial sums, the first one's own, as the operator adds them."""
    own, *peers = parts
    size = wire.nbytes(name, *own.shape, own.element_size())
    data = torch.zeros(len(parts), size, dtype=torch.uint8)
    for source, part in enumerate(peers, 1):
        if name == wire.EXACT:
            data[source] = part.view(-1).view(torch.uint8)
        else:
            wire.encode(part, data[source], {})
    out = torch.empty_like(own)
    wire.add(name, data, own, 0, out, {})
    return out


def main() -> None:
    """Measure every input in every wire format."""
    torch.manual_seed(1)
    file = Path(__file__).parent / "errors.json"
    kept = [row for row in json.loads(file.read_text()) if row["wire"] not in WIRES]
    rows = []
    for kind, scaled in INPUTS.items():
        x = scaled(torch.randn(TP * ROWS, K)).bfloat16()
        w = (0.02 * torch.randn(N, K)).bfloat16()
        exact = x.double() @ w.double().t()
        shards = [(x[:, i * K // TP : (i + 1) * K // TP], w[:, i * K // TP : (i + 1) * K // TP]) for i in range(TP)]
        partials = [(a.float() @ b.float().t()).bfloat16() for a, b in shards]
        for name in WIRES:
            arrived = torch.cat([x[:ROWS], *(sent(name, x[i * ROWS : (i + 1) * ROWS]) for i in range(1, TP))])
            gathered, multiplied = error(arrived, x.double()), error(arrived @ w.t(), exact)
            rows.append(
                {
                    "input": kind, "wire": name, "all_gather": gathered, "all_gather_gemm": multiplied,
                    "gemm_reduce_scatter": error(summed(name, partials), exact),
                }
            )  # fmt: skip
        rows += [row for row in kept if row["input"] == kind]
    file.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
