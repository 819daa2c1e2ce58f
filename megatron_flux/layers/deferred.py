"""Weight gradients that wait until there is something to hide behind them.

A row-parallel layer's backward begins with a gather of ``dy``. Where the link takes longer for it than dgrad, nothing
of that layer can hide the rest: its wgrad needs the gathered ``dy``. The wgrad of the column-parallel layer that
backward came through before can, since both its operands are there. So that one is deferred, and computed while the row
layer gathers.

Contract
    * Only gradients that are added to ``main_grad``, and only of layers whose input was gathered ahead
      (:mod:`megatron_flux.layers.ahead`): those have a row-parallel layer beside them, and the vocabulary's output
      layer, whose ``dy`` is large, has none.
    * They are computed in the order in which they were deferred: during the next row-parallel layer's gather, before
      the next gather for wgrad begins, before Megatron's DistributedDataParallel begins to reduce gradients
      (:mod:`megatron_flux.patch.grad_sync`), and at the latest when the backward pass ends.
    * ``main_grad`` is the same to the bit: the same GEMMs add to it in the same order.

Hazards
    * Whoever else reads ``main_grad`` before the backward pass ends reads it too early. So it is for those who ask for
      it, and while nobody watches over Megatron's reduction (:data:`guarded`) nothing is deferred.
    * A backward pass that fails never computes what it has deferred, and no later one may: the work belongs to the
      pass and dies with it. Passes nest (activation recompute), each with work of its own.
    * Deferred work keeps ``dy`` of its layer alive a little longer.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary

import torch

guarded = False
"""Whether gradients are computed before Megatron reduces them; set by :mod:`megatron_flux.patch.grad_sync`."""


class _Pass:
    """A backward pass and what it has deferred. Only autograd holds it."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def do(self) -> None:
        """Do it all, first come, first served; what is begun is not done again."""
        while self.work:
            self.work.pop(0)()


_passes: WeakValueDictionary[int, _Pass] = WeakValueDictionary()
"""By autograd's own number of the pass."""


def defer(work: Callable[[], None]) -> None:
    """Have ``work`` done later in this backward pass; call it in backward."""
    this = torch._C._current_graph_task_id()
    found = _passes.get(this)
    if found is None:
        found = _passes[this] = _Pass()
        torch.autograd.Variable._execution_engine.queue_callback(found.do)
    found.work.append(work)


def do_deferred() -> None:
    """Do what this backward pass has deferred so far; nothing outside of one."""
    if _passes:
        found = _passes.get(torch._C._current_graph_task_id())
        if found is not None:
            found.do()


def pending() -> Callable[[], None] | None:
    """What does the work that this backward pass has deferred, or None where there is none."""
    found = _passes.get(torch._C._current_graph_task_id()) if _passes else None
    return found.do if found is not None and found.work else None
