"""Inputs that every rank can make for every rank, and comparisons that say how far off they are."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

TOLERANCE = 1e-5
Tensors = list[torch.Tensor] | dict[str, torch.Tensor]
LARGEST_EXACT = {torch.float32: 2**24, torch.float16: 2**11, torch.bfloat16: 2**8}


def integers(*shape: int, seed: int, dtype: torch.dtype = torch.float32, high: int = 2) -> torch.Tensor:
    """Integers in [-high, high]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-high, high + 1, shape, generator=generator).to(dtype)


def normals(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference, relative to the largest magnitude expected; infinite for NaN or other shapes."""
    if actual.shape != expected.shape or not actual.isfinite().all():
        return float("inf")
    scale = expected.double().abs().max()
    assert scale > 0, "nothing can be learned from a comparison with zeros"
    return float((actual.double() - expected.double()).abs().max() / scale)


def require_close(name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    """Fail unless ``actual`` is within ``tolerance`` of ``expected``; 0 asks for equality, in range for the dtype."""
    if tolerance == 0:
        assert expected.double().abs().max() <= LARGEST_EXACT[actual.dtype], f"{name}: {actual.dtype} would round this"
    error = relative_error(actual, expected)
    assert error <= tolerance, (
        f"{name}: relative error {error:.3e} > {tolerance:.1e}; got {tuple(actual.shape)}, expected "
        f"{tuple(expected.shape)}"
    )


def gathered(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """``x`` of all ranks of ``group``, by stock."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts)


def summed(partial: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The sum over all ranks of ``group`` in fp32, by stock."""
    total = partial.float().clone()
    dist.all_reduce(total, group=group)
    return total


def require_equal(found: Tensors, expected: Tensors) -> None:
    """Fail unless both, lists or dictionaries, have the same bits, none of them all zeros."""
    one, other = (dict(enumerate(of)) if isinstance(of, list) else of for of in (found, expected))
    assert one.keys() == other.keys()
    for name, tensor in other.items():
        assert tensor.any(), f"{name} is zero: nothing is compared"
        assert torch.equal(one[name], tensor), f"{name} differs by {(one[name] - tensor).abs().max()}"


def saved_by(forward: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, dict[int, tuple[int, int]]]:
    """The result of ``forward``, and elements and bytes of what it saves for backward, each memory once by its address.

    Quantized tensors are left out; of the others backward may free the memory.
    """
    saved: dict[int, tuple[int, int]] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if type(t) in (torch.Tensor, torch.nn.Parameter):
            saved[t.untyped_storage().data_ptr()] = t.numel(), t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        return forward(), saved


def saved_bytes(forward: Callable[[], torch.Tensor]) -> int:
    """Bytes that ``forward`` saves; its backward runs, too."""
    y, saved = saved_by(forward)
    y.backward(torch.ones_like(y))
    return sum(nbytes for _, nbytes in saved.values())


def attempt(call: Callable[[], object]) -> tuple[str, str, float]:
    """Return the name and message of the exception that ``call`` raises, if any, and its seconds."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began
