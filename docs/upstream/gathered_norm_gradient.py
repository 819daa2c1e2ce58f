"""Is the gradient of a gathered norm output in the input's gradient? For transformer_engine.pytorch.LayerNormLinear.

    torchrun --nproc-per-node 2 gathered_norm_gradient.py          # two GPUs, TransformerEngine as installed
    torchrun --nproc-per-node 2 gathered_norm_gradient.py --cpu    # TransformerEngine's own Python over torch

The loss depends on the norm's output alone, so that dx is that of torch's layer_norm. For the local output and for the
gathered one, the script prints how far dx is from that: 0 is right, 1 is a dx of zeros.

``--cpu`` needs this repository: tests/distributed/te_stand_in.py has torch code in the place of the compiled part.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist

ROWS, HIDDEN = 8, 16


def errors(device: torch.device) -> dict[str, float]:
    """Return the relative error of dx on this rank, by the kind of norm output."""
    import transformer_engine.pytorch as te

    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(ROWS, 1, HIDDEN, generator=torch.Generator().manual_seed(rank)).to(device)  # of the sequence
    factors = torch.randn(size * ROWS, 1, HIDDEN, generator=torch.Generator().manual_seed(9)).to(device)
    mine = factors[rank * ROWS : (rank + 1) * ROWS]
    found = {}
    for name, gathered in (("local", False), ("gathered", True)):
        layer = te.LayerNormLinear(
            HIDDEN, 4 * size, bias=False, device=device, params_dtype=torch.float32, sequence_parallel=True,
            tp_group=dist.group.WORLD, tp_size=size, parallel_mode="column",
            return_layernorm_output=True, return_layernorm_output_gathered=gathered,
        )  # fmt: skip
        given, plain = (x.clone().requires_grad_() for _ in range(2))
        y, normed = layer(given)
        # A rank that reads the whole output contributes its share of the gradient; the ranks' sum is that of `mine`.
        loss = (normed * (factors / size if gathered else mine)).sum()
        (loss + 0 * y.sum()).backward()
        (torch.nn.functional.layer_norm(plain, (HIDDEN,)) * mine).sum().backward()
        found[name] = float((given.grad - plain.grad).norm() / plain.grad.norm())
    return found


def main() -> None:
    """Measure on GPUs, or with ``--cpu`` on CPUs."""
    shims, device = nullcontext(), torch.device("cpu")
    if "--cpu" in sys.argv:
        from megatron_flux.train.shims import cpu_shims
        from tests.distributed import te_stand_in

        te_stand_in.install()
        shims = cpu_shims()
    dist.init_process_group("gloo" if "--cpu" in sys.argv else "nccl")
    if "--cpu" not in sys.argv:
        device = torch.device("cuda", dist.get_rank())
        torch.cuda.set_device(device)
    with shims:
        for name, error in errors(device).items():
            print(f"rank {dist.get_rank()}, {name} norm output: error of dx {error:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
