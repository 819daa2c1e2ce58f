"""The registry of megatron-core lines: ranges, refusals, and that a refusal replaces nothing."""

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import megatron_flux
from megatron_flux import UnsupportedVersionError
from megatron_flux.patch import megatron_core, seams
from megatron_flux.patch.megatron_core import LAYERS, REPLACED, check_symbol


@pytest.mark.parametrize(
    ("version", "release"), [("0.15.0rc7", "0.15.0"), ("0.19.0.dev3", "0.19.0"), ("0.19.99", "0.19.99")]
)
def test_a_version_belongs_to_a_release(version: str, release: str) -> None:
    assert megatron_core.check_megatron_core(version) == Version(release)


@pytest.mark.parametrize("version", ["0.14.9", "main-branch"])
def test_other_versions_are_refused_with_the_range(version: str) -> None:
    with pytest.raises(UnsupportedVersionError, match=r"0\.15.*0\.21.*pip install 'megatron-core") as error:
        megatron_core.check_megatron_core(version)
    assert version in str(error.value)


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A release beyond all lines, with the layers.py of the installed one, which is the newest known here."""
    layers = importlib.util.find_spec(LAYERS)
    assert layers is not None
    installed = Path(str(layers.origin))
    paths = [path for path in megatron_core.NEWEST_SEAMS if path.startswith(LAYERS)]
    monkeypatch.setattr(megatron_core, "NEWEST_SEAMS", seams.digests(installed.parents[3], paths))
    core = _checkout(tmp_path, "0.97.0")
    (core / "tensor_parallel").mkdir()
    copy = core / "tensor_parallel" / "layers.py"
    copy.write_text(installed.read_text())
    _import_finds(monkeypatch, core)
    return copy


def test_a_newer_release_with_the_same_code_runs_with_a_warning(newer: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = newer.read_text()
    newer.write_text(
        "# A comment.\n" + text.replace("        super().__init__()\n", "        super().__init__()  # base\n")
    )
    assert megatron_core.checked_versions() == Version("0.97.0")
    assert "megatron-core 0.97.0 is newer than >=0.15,<0.21" in caplog.text
    with pytest.raises(UnsupportedVersionError, match=r"megatron-core 0\.97\.0 is not supported"):
        megatron_core.checked_versions(strict=True)


def test_a_newer_release_with_other_code_is_refused_by_what_changed(newer: Path) -> None:
    text = newer.read_text()
    changed = text.replace(
        "def _forward_impl(self, input, weight, *args, **kwargs):", "def _forward_impl(self, input):"
    )
    assert changed != text
    newer.write_text(changed)
    with pytest.raises(UnsupportedVersionError, match=r"layers:ColumnParallelLinear\._forward_impl.*Update") as error:
        megatron_core.checked_versions()
    assert "linear_with_grad" not in str(error.value)


def _checkout(folder: Path, version: str) -> Path:
    """A folder with a ``megatron/core`` that states ``version`` and cannot be imported."""
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    major, minor, patch = version.split(".")
    (core / "package_info.py").write_text(f'MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ""\n')
    (core / "__init__.py").write_text("raise RuntimeError")
    return core


def _import_finds(monkeypatch: pytest.MonkeyPatch, core: Path | None) -> None:
    spec = None if core is None else importlib.util.spec_from_file_location("megatron.core", core / "__init__.py")
    monkeypatch.setattr(megatron_core, "find_spec", lambda name: spec)


def test_a_checkout_ahead_of_the_installed_package_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed = importlib.metadata.version("megatron-core")
    assert megatron_core.installed_megatron_core() == installed
    _import_finds(monkeypatch, _checkout(tmp_path, "0.15.7"))
    assert megatron_core.installed_megatron_core() == "0.15.7"
    assert megatron_core.checked_versions() == Version("0.15.7")


def test_a_missing_symbol_or_parameter_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedVersionError, match=r"NoSuchLinear.*use an unmodified release"):
        check_symbol(f"{LAYERS}:NoSuchLinear.forward", ())
    path = f"{LAYERS}:RowParallelLinear.forward"
    with pytest.raises(UnsupportedVersionError, match=r"lacks the parameter\(s\) no_such_parameter") as error:
        check_symbol(path, ("self", "input_", "no_such_parameter"))
    assert path in str(error.value)
    assert "it has self, input_" in str(error.value)


@pytest.mark.parametrize(
    "refusal",
    [
        pytest.param(("REPLACED", {**REPLACED, f"{LAYERS}:RowParallelLinear.forward": ("gone",)}), id="parameter"),
        pytest.param(("ADDED", {"gone": ("0.15", None)}), id="parameter that a release added"),
        pytest.param(("SUPPORTED_TORCH", SpecifierSet(">=99")), id="torch version"),
    ],
)
def test_a_refusal_replaces_nothing(refusal: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    before = dict(vars(ColumnParallelLinear)), dict(vars(RowParallelLinear))
    monkeypatch.setattr(megatron_core, *refusal)
    with pytest.raises(UnsupportedVersionError):
        megatron_flux.patch()
    assert not megatron_flux.is_patched()
    assert (dict(vars(ColumnParallelLinear)), dict(vars(RowParallelLinear))) == before
