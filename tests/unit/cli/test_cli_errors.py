"""However a command ends, the last line says why."""

import signal
import sys

import pytest

from megatron_flux.cli import main as cli
from megatron_flux.errors import UserError
from megatron_flux.telemetry import environment


class OutOfTheOrdinary(BaseException):
    """No ``Exception``, like torch's CheckpointException."""


def end(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> object:
    def examine() -> None:
        raise error

    monkeypatch.setattr(environment, "examine", examine)
    monkeypatch.setattr(sys, "argv", ["megatron-flux", "doctor"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (EOFError("Ran out of input"), 1, "EOFError: Ran out of input"),
        (RuntimeError("two\nlines"), 1, "RuntimeError: two lines"),
        (OutOfTheOrdinary("of the saving"), 1, "OutOfTheOrdinary: of the saving"),
        (KeyboardInterrupt(), 128 + signal.SIGINT, "interrupted"),
        (UserError("bad"), 2, "bad"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_the_last_line_is_the_cause(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert end(monkeypatch, error) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1] == f"megatron-flux: error: {said}"
    assert ("Traceback" in "\n".join(lines)) is not isinstance(error, KeyboardInterrupt | UserError)
    assert "Aborted" not in "\n".join(lines)
