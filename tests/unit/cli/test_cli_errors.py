"""However a command ends, the last line says why."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_flux.cli import main as cli
from megatron_flux.errors import UserError
from megatron_flux.telemetry import environment
from tests.processes import until


class OutOfTheOrdinary(BaseException):
    """No ``Exception``, like torch's CheckpointException."""


def end(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> object:
    """The exit code of a command that raises ``error``."""

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
@pytest.mark.parametrize("rank", [None, "3"])
def test_the_last_line_is_the_cause(
    error: BaseException,
    code: int,
    said: str,
    rank: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    account = tmp_path / "error.json"
    if rank is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(account))
    monkeypatch.setattr("megatron_flux.run.rank.end_with_parent", lambda: None)  # pytest is no rank's process
    assert end(monkeypatch, error) == code
    lines = capsys.readouterr().err.strip().splitlines()
    if rank is not None and isinstance(error, UserError):
        assert lines == [], "rank 0 says it for all"
    else:
        assert lines[-1] == f"megatron-flux: error: {'' if rank is None else 'rank 3: '}{said}"
    assert ("Traceback" in "\n".join(lines)) is not isinstance(error, KeyboardInterrupt | UserError)
    assert "Aborted" not in "\n".join(lines)
    if rank is not None and isinstance(error, Exception):
        # The launcher reads it, and names the error after its own kind.
        assert json.loads(account.read_text())["message"]["message"] == f"{type(error).__name__}: {error}"


def test_a_reader_that_leaves_is_said_in_one_line() -> None:
    """As in ``megatron-flux slurm render ... | head -n 1``, but for sure."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "megatron_flux.cli", "slurm", "render", "--profile=local", "--job=tiny"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    lines = process.stderr.read().strip().splitlines()
    assert lines == ["megatron-flux: error: broken pipe: whatever read the output has gone"]
    assert process.wait(timeout=60) == 1


def test_ctrl_c_while_torch_is_imported_is_no_traceback() -> None:
    command = [sys.executable, "-c", "import megatron_flux_autoload; megatron_flux_autoload.main()", "doctor"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    until(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text())
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "megatron-flux: error: interrupted\n"
    assert process.returncode == 128 + signal.SIGINT
