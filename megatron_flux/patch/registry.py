"""The supported megatron-core lines, and the check that the installed one is what its line says."""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from megatron_flux.errors import UnsupportedVersionError
from megatron_flux.patch import (
    megatron_core_0_15,
    megatron_core_0_16,
    megatron_core_0_17,
    megatron_core_0_18,
    megatron_core_0_19,
)
from megatron_flux.patch.line import MegatronCoreLine, Symbol
from megatron_flux.patch.package_info import version_of_tree

LINES: tuple[MegatronCoreLine, ...] = tuple(
    module.LINE
    for module in (
        megatron_core_0_15,
        megatron_core_0_16,
        megatron_core_0_17,
        megatron_core_0_18,
        megatron_core_0_19,
    )
)
SUPPORTED_MEGATRON_CORE = SpecifierSet(">=0.15,<0.20")
SUPPORTED_TORCH = SpecifierSet(">=2.11")


def shown(versions: SpecifierSet) -> str:
    """A range as people write it, lower bound first: str() has no order."""
    return ",".join(sorted(map(str, versions), reverse=True))


def installed_megatron_core() -> str:
    """The version of what ``import megatron.core`` finds: the installed package's, or a source checkout's own.

    A Megatron-LM checkout comes before the installed package when one of its scripts runs, and need not be of the same
    version. Nothing is imported.

    Raises:
        UnsupportedVersionError: there is none.
    """
    core = _imported_folder()
    try:
        packaged = Path(str(distribution("megatron-core").locate_file("megatron/core"))).resolve()
        if core in (None, packaged):
            return version("megatron-core")
    except PackageNotFoundError:
        pass
    try:
        if core is not None:
            return version_of_tree(core)
    except (FileNotFoundError, ValueError):
        pass
    raise UnsupportedVersionError(
        f"megatron-core is not installed; install a version {shown(SUPPORTED_MEGATRON_CORE)}: "
        f"pip install 'megatron-core{shown(SUPPORTED_MEGATRON_CORE)}'"
    )


def _imported_folder() -> Path | None:
    """The folder that ``import megatron.core`` takes, without importing it; None if there is none."""
    try:
        spec = find_spec("megatron.core")
    except ModuleNotFoundError:
        return None
    return Path(spec.origin).resolve().parent if spec is not None and spec.origin is not None else None


def find_line(megatron_core: str) -> MegatronCoreLine:
    """The line that a megatron-core version belongs to.

    Raises:
        UnsupportedVersionError: outside the supported range, which the message states.
    """
    release = release_of(megatron_core)
    for line in LINES:
        if release is not None and release in line.versions:
            return line
    raise UnsupportedVersionError(
        f"megatron-core {megatron_core} is not supported; supported is {shown(SUPPORTED_MEGATRON_CORE)}: "
        f"pip install 'megatron-core{shown(SUPPORTED_MEGATRON_CORE)}'"
    )


def check_torch(torch_version: str) -> None:
    """Refuse a torch outside the supported range.

    Raises:
        UnsupportedVersionError: with the range.
    """
    release = release_of(torch_version)
    if release is None or release not in SUPPORTED_TORCH:
        raise UnsupportedVersionError(
            f"torch {torch_version} is not supported; supported is {shown(SUPPORTED_TORCH)}: "
            f"pip install 'torch{shown(SUPPORTED_TORCH)}'"
        )


def release_of(version_text: str) -> Version | None:
    """The release that a version belongs to; None if it is not a version.

    Pre-releases and vendor builds (``2.11.0a0+...nv26.01``) have the interface of the release they lead to, but sort
    before it, and would be refused at the lower bound.
    """
    try:
        return Version(Version(version_text).base_version)
    except InvalidVersion:
        return None


def resolve(symbol: Symbol) -> object:
    """Import what ``symbol.path`` names and check its signature.

    Raises:
        UnsupportedVersionError: it is missing, or lacks one of the expected parameters.
    """
    module_name, _, qualified = symbol.path.partition(":")
    try:
        target = attrgetter(qualified)(importlib.import_module(module_name))
    except (ImportError, AttributeError) as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and absent.partition(".")[0] != "megatron":
            # megatron-core 0.18 and later import triton unconditionally, and do not declare it.
            raise UnsupportedVersionError(
                f"megatron-core {installed_megatron_core()} cannot be imported without the package {absent!r}: "
                f"pip install {absent.partition('.')[0]}"
            ) from error
        raise UnsupportedVersionError(
            f"{symbol.path} is missing from the installed megatron-core ({error}); use an unmodified release "
            f"{shown(SUPPORTED_MEGATRON_CORE)}"
        ) from error
    except IndexError as error:
        raise UnsupportedVersionError(
            f"megatron-core {installed_megatron_core()} cannot be imported here ({error}); 0.15 builds a CUDA "
            "extension on import where it finds nvcc, and without a visible GPU must be told for which: "
            "export TORCH_CUDA_ARCH_LIST=9.0"
        ) from error
    present = inspect.signature(target).parameters
    missing = [name for name in symbol.parameters if name not in present]
    if missing:
        raise UnsupportedVersionError(
            f"{symbol.path} of the installed megatron-core lacks the parameter(s) {', '.join(missing)} "
            f"(it has {', '.join(present)}); use an unmodified release {shown(SUPPORTED_MEGATRON_CORE)}"
        )
    return target


def checked_versions() -> MegatronCoreLine:
    """The installed megatron-core's line; quick, since megatron-core is not imported.

    Raises:
        UnsupportedVersionError: torch or megatron-core outside the supported range.
    """
    check_torch(version("torch"))
    return find_line(installed_megatron_core())


def checked_line() -> MegatronCoreLine:
    """The installed megatron-core's line, with torch's version and all its symbols checked.

    Raises:
        UnsupportedVersionError: anything is not as the line says.
    """
    line = checked_versions()
    for symbol in line.symbols:
        resolve(symbol)
    return line
