"""What differs between lines of megatron-core releases, and the check that the installed one is what its line says.

To support another line, compare its sources with the newest one here and add a row to :data:`LINES`; CONTRIBUTING.md
says what to compare.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from megatron_flux.errors import UnsupportedVersionError

LAYERS = "megatron.core.tensor_parallel.layers"
REPLACED = (("ColumnParallelLinear", "_forward_impl"), ("RowParallelLinear", "forward"))
"""Classes of :data:`LAYERS` and the method of each that flux replaces."""

TE_LAYERS = "megatron.core.extensions.transformer_engine"
"""megatron-core's layers over TransformerEngine; it imports this with its tensor-parallel layers."""

TE_REPLACED = (
    ("TELayerNormColumnParallelLinear", "forward"),
    ("TEColumnParallelLinear", "forward"),
    ("TERowParallelLinear", "forward"),
)
"""As :data:`REPLACED`, of :data:`TE_LAYERS`; the last two inherit the method."""


class Symbol(NamedTuple):
    """A callable that flux replaces or relies on, and the parameters it must have."""

    path: str
    """``module:qualified.name``."""

    parameters: tuple[str, ...]
    """Names that its signature must contain."""


class MegatronCoreLine(NamedTuple):
    """What flux knows of one line of releases."""

    versions: SpecifierSet

    symbols: tuple[Symbol, ...]
    """Checked before anything is replaced; a missing one is refused with its name."""

    te_symbols: tuple[Symbol, ...] = ()
    """As ``symbols``, for the layers over TransformerEngine; checked where megatron-core has imported it."""

    neutral_keywords: MappingProxyType[str, object] = MappingProxyType({})
    """Keywords of ``ColumnParallelLinear._forward_impl`` beyond the operands, with the value that means "off". A call
    with another value, or with a keyword that is not listed, runs stock."""

    neutral_attributes: MappingProxyType[str, object] = MappingProxyType({})
    """Attributes of a layer, or of a TransformerEngine layer's weight, with the value that means "off"; another value
    runs stock."""


_TE_SYMBOLS = tuple(Symbol(path=f"{TE_LAYERS}:{cls}.{name}", parameters=("self", "x")) for cls, name in TE_REPLACED)


def _line(
    versions: str, *, te_symbols: tuple[Symbol, ...] = _TE_SYMBOLS, off: dict[str, object] | None = None
) -> MegatronCoreLine:
    """``off``: what this line added to the linear function and the layers, with the value that means "off"."""
    added = off or {}
    linear_parameters = (
        *("input", "weight", "bias", "gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel"),
        *("grad_output_buffer", "wgrad_deferral_limit", "tp_group"),
        *added,
    )
    return MegatronCoreLine(
        versions=SpecifierSet(versions),
        symbols=(
            Symbol(path=f"{LAYERS}:ColumnParallelLinear._forward_impl", parameters=("self", "input", "weight")),
            Symbol(path=f"{LAYERS}:RowParallelLinear.forward", parameters=("self", "input_")),
            Symbol(path=f"{LAYERS}:RowParallelLinear._forward_impl", parameters=("self", "input", "weight")),
            Symbol(path=f"{LAYERS}:linear_with_grad_accumulation_and_async_allreduce", parameters=linear_parameters),
        ),
        te_symbols=te_symbols,
        neutral_keywords=MappingProxyType({"grad_output_buffer": None, "wgrad_deferral_limit": None, **added}),
        neutral_attributes=MappingProxyType(added),
    )


LINES = (
    _line(">=0.15,<0.16", te_symbols=()),
    _line(">=0.16,<0.17"),  # 0.16.1 is the newest release for Python 3.11
    _line(">=0.17,<0.18"),
    _line(">=0.18,<0.19"),
    _line(">=0.19,<0.20", off={"gtp_remat_size": 1}),  # weights sharded once more, over a GTP group: those run stock
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


def version_of_tree(core: Path) -> str:
    """The version that the sources in a ``megatron/core`` folder state, such as ``0.16.1``; nothing of them is run.

    Raises:
        FileNotFoundError: there is no ``package_info.py``.
        ValueError: it does not assign the constants ``MAJOR``, ``MINOR`` and ``PATCH``.
    """
    path = core / "package_info.py"
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except SyntaxError as error:
        raise ValueError(f"{path} is not Python: {error}") from error
    constants = {
        statement.targets[0].id: statement.value.value
        for statement in body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.Constant)
    }
    parts = ("MAJOR", "MINOR", "PATCH")
    if missing := [name for name in parts if name not in constants]:
        raise ValueError(f"{path} does not assign {', '.join(missing)}")
    return ".".join(str(constants[name]) for name in parts) + str(constants.get("PRE_RELEASE", ""))


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
    raise _not_supported("megatron-core", megatron_core, SUPPORTED_MEGATRON_CORE)


def check_torch(torch_version: str) -> None:
    """Refuse a torch outside the supported range.

    Raises:
        UnsupportedVersionError: with the range.
    """
    release = release_of(torch_version)
    if release is None or release not in SUPPORTED_TORCH:
        raise _not_supported("torch", torch_version, SUPPORTED_TORCH)


def _not_supported(package: str, found: str, supported: SpecifierSet) -> UnsupportedVersionError:
    return UnsupportedVersionError(
        f"{package} {found} is not supported; supported is {shown(supported)}: "
        f"pip install '{package}{shown(supported)}'"
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
