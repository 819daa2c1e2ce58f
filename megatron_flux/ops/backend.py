"""What a backend is: one way to run the operators."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm.collectives import Pending
from megatron_flux.ops.call import OperatorCall
from megatron_flux.settings import WIRES


class Backend:
    """One way to run the operators. Calls arrive checked, ``x`` contiguous ``[m, k]``, ``tp`` greater than one; shapes
    are those of :mod:`megatron_flux.ops`.
    """

    name: str
    automatic = False
    """``auto`` may choose it. Otherwise it runs only when it is asked for by name."""
    needs_cuda = False
    """It runs on CUDA tensors in 16 bits only, which a configuration can be refused for before anything starts."""
    gathers_stay = False
    """What its all_gather hands out is never overwritten by a later one."""
    wire = WIRES[0]
    """How its gathers send the numbers."""
    operators: Collection[str] = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "all_gather")
    """Those it has; ``reference`` runs the others."""

    def why_not(self, x: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup) -> str | None:
        """Return None if this backend can take these operands, else the reason; ``weight`` is None for an
        all_gather.
        """
        return None

    def untested(self, x: torch.Tensor, group: dist.ProcessGroup) -> str | None:
        """Return None, or why it has not been tried on operands that :meth:`why_not` lets pass. There ``auto`` passes
        it over, and asked for by name it warns.
        """
        return None

    def all_gather_gemm(self, call: OperatorCall) -> Any:
        """Return ``([m, n], gathered x [m, k])``."""
        raise NotImplementedError

    def gemm_reduce_scatter(self, call: OperatorCall) -> Pending:
        """Return ``[m/tp, n]``, finished unless ``async_op``."""
        raise NotImplementedError

    def gemm_all_reduce(self, call: OperatorCall) -> Pending:
        """Return ``[m, n]``, finished unless ``async_op``."""
        raise NotImplementedError

    def all_gather(self, call: OperatorCall) -> Pending:
        """Return ``[m, k]``; without ``return_gathered`` it may lack the rank's own rows, and then says so."""
        raise NotImplementedError

    def prepare(self, call: OperatorCall, shape: tuple[int, ...]) -> Any:
        """Return a :class:`~megatron_flux.ops.fast_path.PreparedCall` like the call just made, whose result has
        ``shape``; None where it must be decided anew every time. ``x`` has its leading dimensions there.
        """
        return None

    def bytes_received(self, call: OperatorCall, exact: int) -> int:
        """Return what a rank receives for ``call``, of which ``exact`` bytes are the numbers as they are."""
        return exact

    def decide(self, call: OperatorCall) -> None:
        """Do for such a call what its first one would do before it runs. Collective."""
