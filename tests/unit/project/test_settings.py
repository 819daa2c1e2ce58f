"""Environment variables count as of CUDA's start; bad values get a line."""

import subprocess
import sys

import pytest

from megatron_flux import UserError, settings

LATE = """
import os, torch
import megatron_flux
from megatron_flux import settings

def late(starts):
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    os.environ["MEGATRON_FLUX_TIMEOUT_S"] = "7"
    if starts:
        torch._C._cuda_init = lambda: None  # a GPU that there is not
        torch.cuda._is_compiled = lambda: True
        torch._C._cuda_getDeviceCount = lambda: 0
        torch.cuda._cudart = object()
        torch._C._cudart = object()
        torch.cuda._lazy_init()
        assert torch.cuda.is_initialized()
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    os.environ["MEGATRON_FLUX_TIMEOUT_S"] = "9"
    print(settings.one_queue(), settings.timeout_s(), flush=True)

if (child := os.fork()) == 0:
    late(True)
    os._exit(0)
os.waitpid(child, 0)
late(False)
"""


def test_what_is_set_after_cuda_has_started_does_not_count() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LATE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "False 7.0\nTrue 9.0\n", done.stderr


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("MEGATRON_FLUX_TUNE", "short", settings.tunes),
        ("MEGATRON_FLUX_TIMEOUT_S", "0", settings.timeout_s),
        ("MEGATRON_FLUX_TIMEOUT_S", "inf", settings.timeout_s),
        ("MEGATRON_FLUX_TIMEOUT_S", "1e-12", settings.timeout_s),
    ],
)
def test_bad_values(name: str, value: str, read: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=rf"^{name} must be .*, not '{value}'$"):
        read()  # type: ignore[operator]


def test_the_tuner_is_on_unless_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, tunes in {"": True, "on": True, "off": False}.items():
        monkeypatch.setenv("MEGATRON_FLUX_TUNE", given)
        assert settings.tunes() is tunes
    monkeypatch.setenv("MEGATRON_FLUX_TUNE", "full")
    with pytest.raises(UserError, match=r"^MEGATRON_FLUX_TUNE must be one of on, off, not 'full'$"):
        settings.check()
