"""What a user may say of two GPUs that stand in for more; no torch."""

from __future__ import annotations

from megatron_flux.errors import UserError

SIZES = (4, 8)
HELP = (
    "Two GPUs do what each of this many (4 or 8) would: shapes, schedules and bytes are those of the large group, the "
    "figures are no measurement of it."
)


def processes(tp: int, stand_in_for: int | None) -> int:
    """How many are a group of ``tp``, or stand in for it."""
    return tp if stand_in_for is None else 2


def checked_stand_in(size: int, nproc: int | None, started: int | None, *, gpus: int | None = None) -> int:
    """``size``, if two processes can stand in for a group of so many.

    Args:
        size: of the tensor-parallel group.
        nproc: processes asked for, if any.
        started: processes that a launcher has started, if any.
        gpus: GPUs that are visible here; None in a dry run, which speaks of some other machine.

    Raises:
        UserError: another size, another number of processes than two, or fewer GPUs.
    """
    if size not in SIZES:
        raise UserError(f"--stand-in-for {size}: two GPUs can stand in for {' or '.join(map(str, SIZES))}")
    if nproc not in (None, 2):
        raise UserError(f"--stand-in-for {size} takes two GPUs, not --nproc {nproc}; leave --nproc out")
    if started not in (None, 2):
        raise UserError(f"--stand-in-for {size} takes two processes, the launcher has started {started}")
    if started is None and gpus is not None and gpus < 2:
        raise UserError(f"--stand-in-for {size} takes two GPUs, {gpus} is visible here; --dry-run works without")
    return size
