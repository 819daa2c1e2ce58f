"""Bad values of environment variables get a line. That they count as of CUDA's start: test_imports.py."""

import pytest

from megatron_flux import UserError, settings


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
