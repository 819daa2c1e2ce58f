"""Which steps are profiled, as given on the command line."""

from __future__ import annotations

import re

from megatron_flux.errors import UserError


def profiled_steps(given: str | None, steps: int, block_steps: int | None) -> tuple[int, int] | None:
    """First and last step of ``--profile-steps``.

    Args:
        given: ``5-7``, or ``5`` alone; None is none.
        steps: steps of the run.
        block_steps: steps of a turn where two arms take turns: one profiler cannot run over both.

    Raises:
        UserError: not of that form, not within the run, or not within one turn.
    """
    if given is None:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", given.strip())
    if match is None:
        raise UserError(f"--profile-steps {given!r} is not of the form 5-7; give the first and the last step")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 2 <= first <= last <= steps:
        raise UserError(
            f"--profile-steps {given} must lie within the steps 2 to {steps}, the first one not behind the last (the "
            "step ahead of them starts the profiler)"
        )
    if block_steps is not None and (first - 2) // block_steps != (last - 1) // block_steps:
        start = (first - 1) // block_steps * block_steps
        possible = (
            f"{start + 2}-{min(start + block_steps, steps)}" if start + 2 <= min(start + block_steps, steps) else ""
        )
        raise UserError(
            f"--profile-steps {given} with the step ahead of them must lie within one turn of {block_steps} steps; "
            + (f"use {possible} or fewer, or more --block-steps" if possible else "use more --block-steps")
        )
    return first, last
