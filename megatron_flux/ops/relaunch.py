"""Launching a kernel that has been launched before, without binding its arguments again.

Triton's own launch of these kernels costs about 50 us of host time (30 arguments, ten of them TMA descriptors); most of
it finds out which compiled variant fits. Callers here know: they give a ``key`` that determines everything the variant
depends on, and from the second call on the compiled kernel is run directly.

Hazard: a key that leaves out something Triton specialises on (whether an int is 1 or divisible by 16, the alignment of
a pointer, any constexpr) would run the wrong variant. Where launch hooks are installed (profilers), Triton's own path
is taken.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from triton import knobs


class Relauncher:
    """One kernel and its compiled variants by key."""

    def __init__(self, kernel: Any) -> None:
        """``kernel`` is a Triton or Gluon kernel whose constexpr parameters come last."""
        self.kernel = kernel
        self._known: dict[Hashable, tuple[Any, Any, Any, tuple[Any, ...]]] = {}

    def __call__(
        self,
        key: Hashable,
        grid: int,
        arguments: Sequence[Any],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
        device: int,
    ) -> None:
        """Launch ``grid`` CTAs on the current stream of ``device``; ``constants`` in the order of the signature."""
        known = self._known.get(key)
        if known is None or _hooked():
            compiled = self.kernel[(grid,)](*arguments, **constants, **options)
            self._known[key] = (compiled.run, compiled.function, compiled.packed_metadata, tuple(constants.values()))
            return
        run, function, metadata, values = known
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(grid, 1, 1, stream, function, metadata, None, None, None, *arguments, *values)


def _hooked() -> bool:
    """Whether a launch hook would be called; an empty chain of hooks is none."""
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)
