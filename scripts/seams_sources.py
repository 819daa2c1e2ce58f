"""Names, signatures and bodies in the sources of a release: a folder, a wheel or an sdist. Nothing of it is imported.

A :class:`Release` reads Python and its stubs with :mod:`ast`, follows imports and base classes inside itself, and finds
two things that are not Python: functions of TransformerEngine's compiled module by its pybind file, and torch's
operators by their schemas.
"""

from __future__ import annotations

import ast
import copy
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distribution
from pathlib import Path

CSRC = ("transformer_engine/pytorch/csrc", "csrc")
"""TransformerEngine's C++ in a checkout, and in the sdist of ``transformer-engine-torch``."""
SCHEMAS = (
    "torchgen/packaged/ATen/native/native_functions.yaml",
    "aten/src/ATen/native/native_functions.yaml",
    "torch/distributed/_symmetric_memory/__init__.py",
)
"""Where torch declares its operators: in a wheel, in a checkout, in both."""


@dataclass(frozen=True)
class Found:
    """What a name is: a node in a module, or a line where it is not Python."""

    module: str
    node: ast.AST | None = None
    line: str = ""


class Release:
    """The sources of one release, in one or several places."""

    def __init__(self, package: str, paths: Sequence[Path]) -> None:
        """Of the installed ``package`` (a distribution's name) without ``paths``.

        Raises:
            importlib.metadata.PackageNotFoundError: it is not installed.
            ValueError: a path that is no folder, wheel or sdist.
        """
        self.label = ", ".join(path.name for path in paths)
        if not paths:
            installed = distribution(package)
            paths, self.label = [Path(str(installed.locate_file("")))], f"{package} {installed.version} (installed)"
        self._places = [_texts(path) for path in paths]
        self.text, self.tree, self.find = cache(self._text), cache(self._tree), cache(self._find)

    def _text(self, path: str) -> str | None:
        """Of a file, by its path below the root."""
        return next((text for place in self._places if (text := place(path)) is not None), None)

    def _tree(self, module: str) -> ast.Module | None:
        """Of a module, or its stub where it is compiled."""
        base = module.replace(".", "/")
        for path in (f"{base}.py", f"{base}/__init__.py", f"{base}.pyi", f"{base}/__init__.pyi"):
            if (text := self.text(path)) is not None:
                try:
                    return ast.parse(text)
                except SyntaxError as error:
                    raise ValueError(f"{self.label}: {path} cannot be read by this Python ({error})") from error
        return None

    def _find(self, path: str) -> Found | None:
        """What ``module:qualified.name`` or ``module.qualified.name`` is; None where nothing says so."""
        if path.startswith("torch.ops."):
            return self._operator(path.split(".")[3])
        if path.startswith("transformer_engine_torch:"):
            return self._compiled(path.partition(":")[2])
        module, colon, qualified = path.partition(":")
        if colon:
            return self._in_module(module, tuple(qualified.split(".")), ())
        parts = tuple(path.split("."))
        lengths = [n for n in range(len(parts), 0, -1) if self.tree(".".join(parts[:n])) is not None]
        found = (self._in_module(".".join(parts[:n]), parts[n:], ()) for n in lengths)
        return next((f for f in found if f is not None), None)

    def _in_module(self, module: str, names: tuple[str, ...], seen: tuple[object, ...]) -> Found | None:
        tree = self.tree(module)
        if tree is None or (module, names) in seen:
            return None
        seen = (*seen, (module, names))
        if not names:
            return Found(module, tree)
        stars = []
        for node in _statements(tree.body):
            if names[0] in _bound(node):
                if isinstance(node, ast.ImportFrom | ast.Import):
                    target = _target(node, names[0], module, self.text)
                    if target.partition(".")[0] != module.partition(".")[0]:
                        return Found(module, node)  # another package's
                    if (found := self._dotted(target, names[1:], seen)) is not None:
                        return found
                elif len(names) == 1:
                    return Found(module, node)
                elif (owner := self._class(node, module, seen)) is not None:
                    return self._member(owner, names[1:], seen)
            elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                stars.append(_target(node, "*", module, self.text))
        for star in stars:
            if (found := self._in_module(star, names, seen)) is not None:
                return found
        return self._in_module(f"{module}.{names[0]}", names[1:], seen)

    def _dotted(self, target: str, names: tuple[str, ...], seen: tuple[object, ...]) -> Found | None:
        if self.tree(target) is not None:
            return self._in_module(target, names, seen)
        module, _, name = target.rpartition(".")
        return self._in_module(module, (name, *names), seen) if module else None

    def _class(self, node: ast.AST, module: str, seen: tuple[object, ...]) -> Found | None:
        """The class that a definition is, or that the variable it sets is an instance of."""
        if isinstance(node, ast.ClassDef):
            return Found(module, node)
        value = getattr(node, "value", None)
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            found = self._in_module(module, (value.func.id,), seen)
            return found if found is not None and isinstance(found.node, ast.ClassDef) else None
        return None

    def _member(self, owner: Found, names: tuple[str, ...], seen: tuple[object, ...]) -> Found | None:
        if not isinstance(owner.node, ast.ClassDef):
            return None
        for node in _statements(owner.node.body):
            if names[0] in _bound(node):
                return Found(owner.module, node)
        if any(names[0] in _attributes(node) for node in ast.walk(owner.node)):
            return Found(owner.module)
        for base in owner.node.bases:
            above = self._in_module(owner.module, tuple(ast.unparse(base).split(".")), seen)
            if above is not None and (inherited := self._member(above, names, seen)) is not None:
                return inherited
        return None

    def _operator(self, name: str) -> Found | None:
        for path in SCHEMAS:
            if (line := re.search(rf'^.*(?:\s|"){name}\(.*$', self.text(path) or "", re.M)) is not None:
                return Found(path, line=line[0].strip())
        return None

    def _compiled(self, name: str) -> Found | None:
        for folder in CSRC:
            bound = re.search(rf'm\.def\("{name}",[^;]*;', self.text(f"{folder}/extensions/pybind.cpp") or "")
            declared = re.search(rf"\b{name}\(([^;{{]*)\)\s*[;{{]", self.text(f"{folder}/extensions.h") or "")
            if bound is not None and declared is not None:
                return Found(folder, line=" ".join(declared[1].split()))
        return None


def signature(found: Found) -> str:
    """The parameters of a function, or of a class's ``__init__``, without annotations; of other languages the line."""
    node = found.node
    if isinstance(node, ast.ClassDef):
        node = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return found.line
    arguments = copy.deepcopy(node.args)
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(arguments)


def bodies(found: Found) -> dict[str, list[str]]:
    """The code of every function and method in a module, class or function, as lines without docstrings or comments.

    A module's own statements are left out, a class's are under its name.
    """
    parts: dict[str, list[str]] = {}

    def visit(node: ast.AST, name: str) -> None:
        if isinstance(node, ast.Module | ast.ClassDef):
            body = list(_statements(node.body))
            inner = [n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
            for one in inner:
                visit(one, f"{name}.{one.name}".lstrip("."))
            if isinstance(node, ast.ClassDef):
                parts[name] = [line for n in body if n not in inner for line in _lines(n)]
        else:
            parts[name] = _lines(node)

    if found.node is not None:
        visit(found.node, getattr(found.node, "name", ""))
    return {name: lines for name, lines in parts.items() if lines}


def _lines(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return []
    node = copy.deepcopy(node)
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner, clean=False) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    return ast.unparse(node).splitlines()


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a block, and of the blocks of ``if``, ``try``, ``with`` and ``for`` in it."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.For):
            for field in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(node, field, []):
                    yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _bound(node: ast.stmt) -> list[str]:
    """The names that a statement binds."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.Import):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
    return []


def _target(node: ast.Import | ast.ImportFrom, name: str, module: str, text: Callable[[str], str | None]) -> str:
    """The dotted name that an import binds ``name`` to; the module itself for ``*``."""
    for alias in node.names:
        if (alias.asname or alias.name) == name and isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                is_folder = any(text(f"{module.replace('.', '/')}/__init__.py{i}") is not None for i in ("", "i"))
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_folder]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            return base if name == "*" else f"{base}.{alias.name}"
        if isinstance(node, ast.Import) and (alias.asname or alias.name.partition(".")[0]) == name:
            return alias.name if alias.asname else name
    raise AssertionError(f"{name} is not in {ast.unparse(node)}")


def _attributes(node: ast.AST) -> list[object]:
    """The names that code of a class gives to attributes."""
    match node:
        case ast.Attribute(attr=name, ctx=ast.Store()):
            return [name]
        case ast.Call(func=ast.Attribute(attr="register_parameter"), args=[ast.Constant(value=name), *_]):
            return [name]
        # TransformerEngine: self.weight_names = ["weight"], of which it registers each.
        case ast.Assign(targets=[ast.Attribute(attr="weight_names" | "bias_names")], value=ast.List(elts=elements)):
            return [element.value for element in elements if isinstance(element, ast.Constant)]
    return []


def _texts(path: Path) -> Callable[[str], str | None]:
    """A function from a path below the root of a folder, a wheel or an sdist to the text there, or None."""
    if path.is_dir():

        def of_folder(name: str) -> str | None:
            file = path / name
            return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None

        return of_folder
    if path.suffix == ".whl" and path.is_file():
        wheel = zipfile.ZipFile(path)
        names = set(wheel.namelist())
        return lambda name: wheel.read(name).decode(errors="replace") if name in names else None
    if path.name.endswith(".tar.gz") and path.is_file():
        with tarfile.open(path) as archive:
            members = [m for m in archive if m.isfile() and m.name.endswith((".py", ".pyi", ".cpp", ".h", ".yaml"))]
            texts = {m.name.partition("/")[2]: archive.extractfile(m).read().decode(errors="replace") for m in members}  # type: ignore[union-attr]
        return texts.get
    raise ValueError(f"{path} is not a folder, a wheel (.whl) or an sdist (.tar.gz)")
