"""Prefetch a column-parallel layer's gathered input for its wgrad, before backward comes to that layer.

Within the column layer's own backward the gather of ``x`` shares the link with dgrad's reduce-scatter. A row-parallel
layer's wgrad uses no link, nor does attention's backward behind it. So the row layer's backward starts that gather when
its own dgrad is enqueued, for the column-parallel layer that ran before it in forward and comes next in backward.

Measured on four H200s (results/layer-h200x4-ahead): 37.58 -> 37.17 ms per layer of GPT-3 175B, 18.75 -> 18.44 of
Llama-70B; on two that emulate eight, Llama's QKV dgrad with its reduce-scatter 646 -> 401 us. Computing the column
layer's wgrad during the next row layer's gather of dy as well gained nothing.

Contract
    * Forward: a column layer registers itself (:func:`register`), the next row layer of the same group takes it
      (:func:`take`). Whatever pairs they make, results are the same: a column layer that finds its input not gathered
      gathers it itself.
    * All ranks of a group run the same layers in the same order, and so make the same gathers in the same order.
    * A gathered input is valid until the group's next all_gather begins (:func:`megatron_flux.ops.all_gather`); after
      that it is gathered again (:meth:`ColumnState.gathered`).

Hazards
    * Saved tensors may be unpacked once only (``torch.utils.checkpoint`` without reentrance), and the layer's own
      backward needs them too: they are held here in between. Where hooks are in place (offloading, checkpoints)
      unpacking must happen when they expect it: such layers do not register.
    * A pair must keep no activation alive: the row layer holds what belongs to the weight, and a weak reference. (If
      the column layer's backward never comes, the input that was gathered for it lives until the group's next gather.)
    * A weak reference may still be alive on some ranks only, where a graph waits for the garbage collector. The two
      layers of a pair are in one graph, in which the row layer's backward holds the other. A layer that runs stock in
      between, or a forward that fails, ends the registration (:func:`clear`), so that no pair reaches across graphs.
    * A CUDA graph that holds the row layer's backward must hold the column layer's too, or capture ends with an error:
      what was begun in it must end in it. In Megatron's graphs both are parts of one transformer layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_flux.comm.group_state import all_states, state_of
from megatron_flux.layers.keep import Kept
from megatron_flux.layers.precision import LinearState, Norm, Saved

Returned = Literal["local", "gathered"]


@dataclass(slots=True, weakref_slot=True)
class ColumnState(LinearState):
    """State of a column-parallel layer's backward, with the gather of its input ``x`` ``[s/tp, b, k]``."""

    norm: Norm | None = None
    reduce_dgrad: bool = True
    """Without sequence parallelism ``dx`` is summed over ranks here."""
    returned: Returned | None = None
    deferred: Callable[[torch.Tensor], bool] | None = None
    """Takes ``dy`` for a wgrad that its owner computes later, with an input that it has too. False: not this time."""
    gather_ahead: bool = False
    _ctx: weakref.ref[Any] | None = None
    _saved: Saved | None = None
    _pending: Any = None
    _begun: int = 0
    kept: Kept | None = None

    def saved_tensors(self, ctx: Any) -> Saved:
        """Return ``ctx.saved_tensors``, perhaps unpacked already, to the layer's backward; ends the prefetch."""
        saved, self._saved, self._ctx = self._saved, None, None
        return ctx.saved_tensors if saved is None else saved

    def prefetch(self) -> None:
        """Start gathering ``x`` for the coming backward, unless the layer cannot have one."""
        ctx = None if self._ctx is None else self._ctx()
        if ctx is None or self._pending is not None:
            return
        self._saved = saved = ctx.saved_tensors
        self.gather(saved)

    def gather(self, saved: Saved) -> None:
        """Start gathering, unless that was done early, or in forward."""
        if self.kept is not None and self.kept.gathered is None:
            self.kept = None
        if self._pending is None and self.kept is None:
            self._pending = self.precision.gather_x(saved, self)
            self._begun = state_of(self.group).gathers_begun

    def settle(self) -> None:
        """Finish the part of the gather that would wait for the kernel that comes next."""
        if self._pending is not None:
            self._pending.settle()

    def gathered(self, saved: Saved) -> Any:
        """Return ``x`` ``[s, b, k]``, gathered anew if another gather began since; None: neither kept nor gathered."""
        if self.kept is not None:
            kept, self.kept = self.kept, None
            return kept.take()
        pending, self._pending = self._pending, None
        stays = self.own_gathered or self._begun == state_of(self.group).gathers_begun
        if pending is not None and not stays:
            pending.wait()  # it must be finished all the same
            pending = self.precision.gather_x(saved, self)
        return None if pending is None else pending.wait()


def register(ctx: Any, linear: ColumnState) -> None:
    """Let the next row-parallel layer prefetch this column-parallel layer's input; called in forward."""
    state = state_of(linear.group)
    state.column = None
    if linear.gather_ahead and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        linear._ctx = weakref.ref(ctx)
        state.column = weakref.ref(linear)


def take(group: dist.ProcessGroup) -> ColumnState | None:
    """Return the column-parallel layer whose input the calling row-parallel layer prefetches in its backward."""
    state = state_of(group)
    column, state.column = state.column, None
    return None if column is None else column()


def clear() -> None:
    """End all registrations: a layer runs stock, or failed."""
    for state in all_states():
        state.column = None
