"""The failed rank that a launcher names."""

import signal

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron_flux.errors import UserError
from megatron_flux.run.launcher import failure_of


@pytest.mark.parametrize(
    ("codes", "times", "said"),
    [
        ((1, 1), (20, 10), "rank 1 failed"),
        ((1, -signal.SIGKILL), (10, 20), "rank 1 was killed by SIGKILL (exit code -9)"),  # others missed it
        ((-signal.SIGTERM, 1), (10, 20), "rank 1 failed"),  # the launcher ended the other
        ((2, 2), (0, 0), ""),
    ],
)
def test_the_first_failure_is_named(codes: tuple[int, int], times: tuple[int, int], said: str) -> None:
    failures = {}
    for rank, (code, at) in enumerate(zip(codes, times, strict=True)):
        failures[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="<N/A>")
        failures[rank].timestamp = at
    error = failure_of(ChildFailedError("worker", failures), "what was recorded is in runs/x")
    assert isinstance(error, UserError) == (2 in codes), "a refusal stays a refusal"
    assert str(error).startswith(said)
    assert ("runs/x" in str(error)) == (2 not in codes)
