"""What the package relies on in megatron-core, TransformerEngine and torch, read out of the package itself.

Nothing is listed here by hand that the code says: names come from its imports, from what it does with what it imported,
from strings such as ``"module:class.method"``, and from the registries of ``patch/``. So the list cannot go stale.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_flux.patch import megatron_core, te_fp8, te_seam

PACKAGE = Path(__file__).parents[1] / "megatron_flux"
ROOTS = {"megatron-core": "megatron.core", "transformer-engine": "transformer_engine", "torch": "torch"}
"""What each distribution is imported as."""

BY_RELEASE = frozenset(te_fp8.BY_RELEASE)
"""What a supported release need not have."""
ATTRIBUTES = "attributes of layers"
"""A seam where one class of several has each name: those that a release does not have are another package's."""
COMPILED = frozenset({"torch._C._distributed_c10d._detect_dma_connectivity"})
"""What no stub declares; a test asks the installed release itself."""
RETURNS = {
    "torch.distributed._symmetric_memory.rendezvous": "torch._C._distributed_c10d._SymmetricMemory",
}
"""What a call gives, where the package uses attributes of it."""

_MEGATRON_LAYERS = {
    "column": (f"{megatron_core.LAYERS}:ColumnParallelLinear",),
    "row": (f"{megatron_core.LAYERS}:RowParallelLinear",),
    "te": (
        *(f"{megatron_core.TE_LAYERS}:{name}" for name in ("TELinear", "TELayerNormColumnParallelLinear")),
        "transformer_engine.pytorch.module.linear:Linear",
        "transformer_engine.pytorch.module.layernorm_linear:LayerNormLinear",
    ),
}
LAYERS_OF: dict[str, dict[str, tuple[str, ...]]] = {
    "linears": {
        "why_stock_column": ("column",),
        **dict.fromkeys(("row_forward", "why_stock_row"), ("row",)),
        **dict.fromkeys(("te_forward", "why_stock_te"), ("te",)),
        **dict.fromkeys(("why_stock_common", "activate"), ("column", "row", "te")),
    },
    "te_seam": dict.fromkeys(("why_stock", "norm"), ("te",)),
    "te_fp8": dict.fromkeys(("why_stock", "_why_stock_shapes", "run", "__init__", "_weight_of"), ("te",)),
}
"""By module of ``patch/``: functions with a ``layer`` of which they use attributes, and the kinds of it."""


class Relied(NamedTuple):
    """One thing that another release must have."""

    seam: str
    path: str
    """``module:qualified.name``, ``module.name`` or a module."""
    body: bool = False
    """Whether its code matters too: it was written anew here."""
    parameters: int | None = None
    """How many it must have, of a function of a compiled module."""


def relied(package: str) -> list[Relied]:
    """What is relied on of a distribution, by seam; a path once, and once more where its code matters."""
    root = ROOTS[package]
    found: list[Relied] = []
    if package != "torch":
        replaced = (*megatron_core.REPLACED, *megatron_core.TE_REPLACED)
        found += [Relied("replaced methods", path) for path in replaced]
        found += [
            Relied("bodies that flux does in their place", path, body=True)
            for path in (*megatron_core.REIMPLEMENTED, *te_seam.REIMPLEMENTED, *te_fp8.REIMPLEMENTED)
        ]
        found += [
            Relied("compiled kernels", f"transformer_engine_torch:{name}", parameters=count)
            for name, count in (te_seam.KERNELS | te_fp8.KERNELS).items()
        ]
        found += [Relied(ATTRIBUTES, path) for paths in attributes().values() for path in paths]
    for name in names():
        found.append(Relied(f"{'private ' if package == 'torch' else ''}names in {name.room}", name.path))
    by_path: dict[str, Relied] = {}
    for one in found:
        if re.match(rf"{re.escape(root)}(_torch)?[.:]", one.path):
            by_path.setdefault(f"{one.path} {one.body}" if one.body else one.path, one)
    return list(by_path.values())


def attributes() -> dict[str, list[str]]:
    """What the patch asks of layers, ``column.bias`` say, and the classes that may have it; one of them must."""
    found: dict[str, list[str]] = {}

    def add(kind: str, name: str) -> None:
        found[f"{kind}.{name}"] = [f"{owner}.{name}" for owner in _MEGATRON_LAYERS[kind]]

    for module, kinds in LAYERS_OF.items():
        tree = ast.parse((PACKAGE / "patch" / f"{module}.py").read_text(encoding="utf-8"))
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and function.name in kinds:
                for name in of_layer(function):
                    for kind in kinds[function.name]:
                        add(kind, name)
    for name in te_seam.USERBUFFERS:
        add("te", name)
    return found


def of_layer(function: ast.FunctionDef) -> Iterator[str]:
    """The attributes of ``layer`` that a function uses, but for those that every module of torch has."""
    of_torch = torch.nn.Module.__annotations__
    for node in ast.walk(function):
        match node:
            case ast.Attribute(value=ast.Name(id="layer"), attr=name) if not name.startswith("__"):
                if name not in of_torch:
                    yield name
            case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="layer"), ast.Constant(value=str(name)), *_]):
                yield name


class Name(NamedTuple):
    """A name of another package, and the room here that uses it."""

    room: str
    path: str


@cache
def names(package: Path = PACKAGE) -> tuple[Name, ...]:
    """All that the modules of ``package`` name in megatron-core and TransformerEngine, and privately in torch."""
    found = []
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package).parts
        reader = _Names()
        reader.visit(ast.parse(path.read_text(encoding="utf-8")))
        found += [Name(inside[0], name) for name in reader.found if _matters(name)]
    return tuple(dict.fromkeys(found))


def _matters(path: str) -> bool:
    if path.partition(".")[0] != "torch":
        return path.startswith(tuple(ROOTS.values()))
    return path.startswith("torch.ops.symm_mem.") or re.search(r"[.:]_(?!_)", path) is not None


class _Names(ast.NodeVisitor):
    """Names that a module imports, and chains of attributes that begin with one."""

    _LITERAL = re.compile(rf"(?:{'|'.join(map(re.escape, ROOTS.values()))})(?:\.\w+)+(?::[\w.]+)?")

    def __init__(self) -> None:
        self.found: list[str] = []
        self._aliases: dict[str, str] = {}
        self._literals: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.found.append(alias.name)
            self._aliases[alias.asname or alias.name.partition(".")[0]] = (
                alias.name if alias.asname else alias.name.partition(".")[0]
            )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            self.found.append(f"{node.module}.{alias.name}")

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and self._LITERAL.fullmatch(node.value):
            self.found.append(node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        chain = self._chain(node)
        if chain is None:
            self.generic_visit(node)
        else:
            self.found.append(chain)

    def visit_Assign(self, node: ast.Assign) -> None:
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Name):
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                self._literals[target.id] = value.value
            elif (bound := self._bound(value)) is not None:
                self._aliases[target.id] = bound
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name)), *_]):
                if name.startswith("_") and (chain := self._chain(owner)) is not None:
                    self.found.append(f"{chain}.{name}")
        self.generic_visit(node)

    def _bound(self, value: ast.expr) -> str | None:
        """What an assigned value is a name of."""
        if not isinstance(value, ast.Call):
            return self._chain(value)
        if ast.unparse(value.func) in ("importlib.import_module", "sys.modules.get") and value.args:
            module = value.args[0]
            literal = module.value if isinstance(module, ast.Constant) else self._literals.get(ast.unparse(module))
            return literal if isinstance(literal, str) else None
        return RETURNS.get(self._chain(value.func) or "")

    def _chain(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self._aliases.get(node.id)
        inner = self._chain(node.value) if isinstance(node, ast.Attribute) else None
        if inner is None or node.attr.startswith("__"):  # type: ignore[attr-defined]
            return inner
        return f"{inner}.{node.attr}"  # type: ignore[attr-defined]
