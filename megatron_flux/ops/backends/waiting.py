"""Calls that run on the rule's plan while they wait for their measurement (``MEGATRON_FLUX_TUNE=later``).

Tuning before the first step makes a training wait for all its shapes at once. Here a new call for which plans ship runs
at once, with the plan that the rule names, and is measured later, between two passes through the model.

Contract
    * A turn begins with the first forward call behind a dgrad (the weight transposed): a micro-batch's backward is done
      and most activations are gone. What a backward computes anew (activation recompute) is none of these. Where
      nothing but forward calls come (inference), every :data:`FORWARD` calls. One call is measured at a turn, on
      operands of its own, so a step is longer by that and not by all of them.
    * All ranks of a group make the same calls in the same order, which everything here depends on: nothing is read that
      they do not have in common, so that all of them measure at the same call. No rank talks to others about it.
    * No step is lost for want of memory: where a rank has no room for operands and results, the call goes on with the
      rule's plan on all of them.
    * While calls wait none of the group is prepared (:mod:`megatron_flux.ops.fast_path`), so that all of them are seen.
    * Nothing waits for CUDA graphs: a graph would keep the plan that it was captured with.

Hazard: a turn comes in the middle of a step, where other groups' kernels may be under way, as for any shape that is new
in a step. What holds for those holds here (docs/limits.md, *Other process groups beside fused kernels*).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_flux.errors import one_line
from megatron_flux.ops.checks import GATHERING, OperatorCall

FORWARD = 1024  # calls without a dgrad behind which a turn begins: more than a deep model's forward has


class Operands(NamedTuple):
    """What is needed to make a call once more, with random numbers; its weight is not kept alive."""

    call: OperatorCall  # x, weight and bias are empty
    rows: int  # of x
    k: int
    weight: tuple[int, ...]  # its shape

    @classmethod
    def of(cls, call: OperatorCall) -> Operands:
        """Those of ``call``, which has a weight."""
        assert call.weight is not None  # noqa: S101
        bias = None if call.bias is None else call.bias.new_empty(0)
        empty = call._replace(x=call.x.new_empty(0), weight=call.weight.new_empty(0), bias=bias)
        return cls(empty, call.x.numel() // call.k, call.k, tuple(call.weight.shape))

    def nbytes(self) -> int:
        """Of operands, and of what a candidate and the GEMM alone gather and return."""
        call, tp = self.call, self.call.group.size()
        n = self.weight[1 if call.transposed else 0]
        gathered = self.rows * tp if call.operator in GATHERING else 0
        results = 2 * (gathered or self.rows) * n
        return (self.rows * self.k + n * self.k + 2 * gathered * self.k + results) * call.x.element_size()

    def why_no_room(self) -> str | None:
        """None where that much memory can be had; it then stays with torch's allocator."""
        try:
            self.call.x.new_empty(self.nbytes(), dtype=torch.uint8)
        except RuntimeError as error:  # of which torch's own error is one
            return one_line(error)
        return None

    def call_with_random_numbers(self) -> OperatorCall:
        """Zeros would make the GEMM faster; the generator is its own, so that training's random numbers stay."""
        like = self.call.x
        generator = torch.Generator(device=like.device).manual_seed(dist.get_rank(self.call.group))

        def normal(*shape: int) -> torch.Tensor:
            return like.new_empty(shape).normal_(generator=generator)

        call = self.call._replace(x=normal(self.rows, self.k), weight=normal(*self.weight))
        return call if call.bias is None else call._replace(bias=normal(call.n))


@dataclass
class Waiting:
    """The calls of one group that wait, oldest first."""

    calls: dict[tuple[Any, ...], Operands] = field(default_factory=dict)
    seen: int = 0  # that have ever waited
    beyond: set[tuple[Any, ...]] = field(default_factory=set)
    """Further values of m than are measured: they run on the rule's plan, too, and ask again when nothing waits."""
    _backward: bool = False  # a dgrad has come since the last turn
    _forward: int = 0  # other calls since then

    def add(self, kind: tuple[Any, ...], call: OperatorCall) -> None:
        """Let calls of ``kind`` wait."""
        self.calls[kind] = Operands.of(call)
        self.seen += 1

    def turn(self, call: OperatorCall) -> tuple[Any, ...] | None:
        """The kind to measure before ``call`` runs; None: it is nobody's turn."""
        if call.transposed:
            self._backward, self._forward = True, 0
            return None
        if torch._C._current_graph_task_id() != -1:  # in a backward, which computes activations anew
            return None
        self._forward += 1
        if not self._backward and self._forward < FORWARD:
            return None
        self._backward, self._forward = False, 0
        return next(iter(self.calls), None)
