"""The differences between megatron-core releases, and the check that the installed one is as expected.

To support a newer one, compare its sources with the newest one here; CONTRIBUTING.md says how. A release newer than
that runs, with a warning, where the code that flux does anew is the same (:data:`NEWEST_SEAMS`). All functions raise
:class:`UnsupportedVersionError` where something is not as expected.
"""

from __future__ import annotations

import inspect
import re
import sys
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from megatron_flux.errors import UnsupportedVersionError
from megatron_flux.patch import seams
from megatron_flux.patch.provenance import name_of_other

LAYERS = "megatron.core.tensor_parallel.layers"
TE_LAYERS = "megatron.core.extensions.transformer_engine"
"""megatron-core's layers over TransformerEngine; it imports this with its tensor-parallel layers."""

_IMPL, _X = ("self", "input", "weight"), ("self", "x")
TE_KINDS = TE_NORM_COLUMN, TE_COLUMN, TE_ROW = "TE norm column", "TE column", "TE row"
"""Kinds of layers over TransformerEngine, as fallbacks are counted; the others are ``column`` and ``row``."""
_TE_CLASSES = dict(
    zip(TE_KINDS, ("TELayerNormColumnParallelLinear", "TEColumnParallelLinear", "TERowParallelLinear"), strict=True)
)
REPLACED = {
    f"{LAYERS}:ColumnParallelLinear._forward_impl": _IMPL,
    f"{LAYERS}:RowParallelLinear.forward": ("self", "input_"),
}
"""``module:class.method`` of what flux replaces, and the parameters it must have."""
TE_REPLACED = {f"{TE_LAYERS}:{name}.forward": _X for name in _TE_CLASSES.values()}
"""Replaced methods and parameters where megatron-core has TransformerEngine; the last two inherit the method."""
_LINEARS = {path.rpartition(".")[0] for path in (*REPLACED, *TE_REPLACED)}
INFERENCE_LAYERS = "megatron.core.tensor_parallel.inference_layers"
"""megatron-core's inference-optimized layers (``transformer_impl="inference_optimized"``), from 0.16 on: subclasses of
those over TransformerEngine, with a ``forward`` of their own; imported with its tensor-parallel layers."""
_LINEAR = f"{LAYERS}:linear_with_grad_accumulation_and_async_allreduce"
_LINEAR_PARAMETERS = (
    *("input", "weight", "bias", "gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel"),
    *("grad_output_buffer", "wgrad_deferral_limit", "tp_group"),
)


ADDED: dict[str, tuple[str, object]] = {
    "gtp_remat_size": ("0.19", 1),  # weights are sharded once more, over a GTP group
    "output_dtype": ("0.20", None),  # results have another dtype than the input
}
"""Keywords of the linear function, and attributes of layers and of TransformerEngine layers' weights, that came after
the oldest release: since when, and the value that means "off". Another value runs stock."""

_OLDEST, _BEYOND = "0.15", "0.21"
SUPPORTED_MEGATRON_CORE = SpecifierSet(f">={_OLDEST},<{_BEYOND}")
NEWEST = "0.20"
"""The newest known release, so far as a source tree: main of 22 August 2026."""
NEWEST_SEAMS = {
    "megatron.core.tensor_parallel.layers:ColumnParallelLinear._forward_impl": "e57bace9b9a1",
    "megatron.core.tensor_parallel.layers:RowParallelLinear.forward": "5c2ddcf88c43",
    "megatron.core.extensions.transformer_engine:TELayerNormColumnParallelLinear.forward": "fa0d5ed2ffc1",
    "megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward": "3ecd54ba7ff9",
    "megatron.core.tensor_parallel.layers:RowParallelLinear._forward_impl": "5b5fc2be0be3",
    "megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce": "16ebc12357ad",
    "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication": "2c203fddeb18",
    "megatron.core.tensor_parallel.layers:_linear_forward": "e8ea5abd2b51",
    "megatron.core.tensor_parallel.layers:_wgrad_gemm": "cfc2f24b0d09",
    "megatron.core.extensions.transformer_engine:TELinear.forward": "ad87957e050e",
}
"""Code that flux replaces or does anew, and its callers, with digests of :data:`NEWEST`, which ``python
scripts/seams.py FOLDER`` prints."""
SUPPORTED_TORCH = SpecifierSet(">=2.11")


def shown(versions: SpecifierSet) -> str:
    """Format a range with the lower bound first: str() has no order."""
    return ",".join(sorted(map(str, versions), reverse=True))


def is_linear(module: object) -> bool:
    """Return True for a tensor-parallel linear, of a subclass too. Imports nothing."""
    return any(f"{cls.__module__}:{cls.__qualname__}" in _LINEARS for cls in type(module).__mro__)


def te_classes() -> dict[str, type]:
    """Return megatron-core's TransformerEngine layers by kind; none where it has not imported TransformerEngine."""
    module = sys.modules.get(TE_LAYERS)
    return {kind: getattr(module, name) for kind, name in _TE_CLASSES.items()} if getattr(module, "HAVE_TE", 0) else {}


def linear_classes() -> dict[str, type]:
    """Return all classes of linears by kind; imports megatron-core's layers."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    return {"column": ColumnParallelLinear, "row": RowParallelLinear, **te_classes()}


def inference_classes() -> list[tuple[type, str]]:
    """Return megatron-core's inference-optimized layers, if imported, with the kinds that they override."""
    module = sys.modules.get(INFERENCE_LAYERS)
    classes = [] if module is None else [found for found in vars(module).values() if isinstance(found, type)]
    own = [cls for cls in classes if cls.__module__ == INFERENCE_LAYERS and "forward" in vars(cls)]
    return [(cls, kind) for cls in own for kind, base in te_classes().items() if issubclass(cls, base)]


def fused_mlp() -> type | None:
    """Return the class of MLPs that TransformerEngine's op fuser runs; None where there is none."""
    return getattr(sys.modules.get(TE_LAYERS), "TEFusedMLP", None) if te_classes() else None


def _folder() -> Path | None:
    """Return the folder of what ``import megatron.core`` finds, without importing it; None: nothing is found."""
    try:
        spec = find_spec("megatron.core")
    except ModuleNotFoundError:
        return None
    return Path(spec.origin).resolve().parent if spec is not None and spec.origin is not None else None


def installed_megatron_core() -> str:
    """Return the version of what ``import megatron.core`` finds: a Megatron-LM checkout comes before the installed
    package when one of its scripts runs, and need not be of the same version. Nothing is imported.
    """
    if (core := _folder()) is not None:
        with suppress(FileNotFoundError, ValueError):
            return version_of_tree(core)
    supported = shown(SUPPORTED_MEGATRON_CORE)
    raise UnsupportedVersionError(
        f"megatron-core is not installed; install a version {supported}: pip install 'megatron-core{supported}'"
    )


def version_of_tree(core: Path) -> str:
    """Return the version that ``megatron/core`` sources state. Raises FileNotFoundError or ValueError: they do not."""
    path = core / "package_info.py"
    text = path.read_text(encoding="utf-8")
    stated = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) *= *['\"]?([^'\"\s]*)", text, re.MULTILINE))
    try:
        return f"{stated['MAJOR']}.{stated['MINOR']}.{stated['PATCH']}{stated.get('PRE_RELEASE', '')}"
    except KeyError as missing:
        raise ValueError(f"{path} does not assign {missing.args[0]}") from None


def check_megatron_core(found: str, *, strict: bool = False) -> Version:
    """Return the release of ``found``, which must be supported, or, unless ``strict``, newer with the same code."""
    release, core = release_of(found), _folder()
    if not strict and release is not None and release >= Version(_BEYOND) and core is not None:
        known = shown(SUPPORTED_MEGATRON_CORE)
        if moved := seams.changed(core.parents[1], NEWEST_SEAMS, f"megatron-core {found}", known):
            raise UnsupportedVersionError(
                f"megatron-core {found} is newer than {known}, and has changed code that flux does anew: "
                f"{', '.join(moved)}. Update megatron_flux, or pip install 'megatron-core{known}'"
            )
        return release
    return check_release("megatron-core", found, SUPPORTED_MEGATRON_CORE)


def check_release(package: str, found: str, supported: SpecifierSet) -> Version:
    """Return the release that the version ``found`` of ``package`` belongs to, which must be supported."""
    release = release_of(found)
    if release is None or release not in supported:
        raise UnsupportedVersionError(
            f"{package} {found} is not supported; supported is {shown(supported)}: "
            f"pip install '{package}{shown(supported)}'"
        )
    return release


def release_of(version_text: str) -> Version | None:
    """Return the release that a version belongs to; None if it is not a version.

    Pre-releases and vendor builds (``2.11.0a0+...nv26.01``) have the interface of the release they lead to, but sort
    before it, and would be refused at the lower bound.
    """
    try:
        return Version(Version(version_text).base_version)
    except InvalidVersion:
        return None


def check_symbol(path: str, parameters: tuple[str, ...]) -> None:
    """Check the signature of ``module:qualified.name``, unless it is another library's: calls run stock through it."""
    releases = shown(SUPPORTED_MEGATRON_CORE)
    try:
        target = resolve_name(path)
    except (ImportError, AttributeError) as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and absent.partition(".")[0] != "megatron":
            # megatron-core 0.18 and later import triton unconditionally, and do not declare it.
            raise UnsupportedVersionError(
                f"megatron-core {installed_megatron_core()} cannot be imported without the package {absent!r}: "
                f"pip install {absent.partition('.')[0]}"
            ) from error
        raise UnsupportedVersionError(
            f"{path} is missing from the installed megatron-core ({error}); use an unmodified release {releases}"
        ) from error
    if name_of_other(target, re.split("[.:]", path)[-1]) is not None:
        return
    present = inspect.signature(target).parameters
    if missing := [name for name in parameters if name not in present]:
        raise UnsupportedVersionError(
            f"{path} of the installed megatron-core lacks the parameter(s) {', '.join(missing)} "
            f"(it has {', '.join(present)}); use an unmodified release {releases}"
        )


def checked_versions(*, strict: bool = False) -> Version:
    """Check the versions of torch and megatron-core, and return the latter's release; it is not imported."""
    check_release("torch", version("torch"), SUPPORTED_TORCH)
    return check_megatron_core(installed_megatron_core(), strict=strict)


def check_symbols(*, strict: bool = False) -> dict[str, object]:
    """Check versions and all symbols; return what the installed release has of :data:`ADDED`, with its "off"."""
    release = checked_versions(strict=strict)
    added = {name: off for name, (since, off) in ADDED.items() if release >= Version(since)}
    row = f"{LAYERS}:RowParallelLinear._forward_impl"
    for path, parameters in {**REPLACED, row: _IMPL, _LINEAR: (*_LINEAR_PARAMETERS, *added)}.items():
        check_symbol(path, parameters)
    for path, parameters in TE_REPLACED.items() if te_classes() else ():  # known once its layers are imported
        check_symbol(path, parameters)
    return added
