"""The rooms of the package: who imports whom, in which order, and how much there is to read.

Run as ``python -m scripts.rooms``: it prints the rooms from top to bottom, each with its files, its lines and the rooms
it imports, then everything that breaks a rule. tests/unit/project/test_docs.py fails on imports that break one.

Rules
    * imports go downwards only, those inside functions and under TYPE_CHECKING included;
    * modules form no circle, within a room either;
    * every folder opens with a docstring.

``megatron_flux/__init__.py``, the public face, is a room of its own above patch/: what is below must not import it.
``megatron_flux_autoload.py``, which torch and the command import, is the top: nothing may import it.
That Python runs the ``__init__`` of every folder on the way to a module is not counted as an import.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = "megatron_flux"
AUTOLOAD = "megatron_flux_autoload"
FACE, ROOT = "public face", "root modules"
ROOMS = (
    AUTOLOAD,
    *("cli", "slurm", "bench", "quant", "train", "run", "megatron_lm", "telemetry", "metrics"),
    *(FACE, "patch", "layers", "ops", "comm", "kernels", ROOT),
)
"""From top to bottom."""


@dataclass(frozen=True)
class Import:
    """One import statement's target."""

    importer: str
    imported: str
    line: int


class Package:
    """The modules of the package below ``root`` and what they import of each other."""

    def __init__(self, root: Path) -> None:
        """Read and parse all of them.

        Raises:
            ValueError: a folder that :data:`ROOMS` lacks, or a relative import.
        """
        self.texts: dict[str, str] = {}
        folders = []
        for path in sorted([*(root / PACKAGE).rglob("*.py"), *root.glob(f"{AUTOLOAD}.py")]):
            parts = path.relative_to(root).with_suffix("").parts
            folder = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if folder else parts)
            self.texts[name] = path.read_text(encoding="utf-8")
            folders += [name] if folder else []
        if unknown := [name for name in folders if name.count(".") == 1 and name.split(".")[1] not in ROOMS]:
            raise ValueError(f"scripts/rooms.py gives {', '.join(unknown)} no place in the order; add it to ROOMS")
        trees = {name: ast.parse(text) for name, text in self.texts.items()}
        self.without_docstring = [name for name in folders if not ast.get_docstring(trees[name])]
        self.imports = [edge for name, tree in trees.items() for edge in self._imports_of(name, tree)]

    def _imports_of(self, importer: str, tree: ast.Module) -> Iterator[Import]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                if node.level:
                    raise ValueError(f"{importer}:{node.lineno}: relative import; write it out")
                # Of a folder either a module of it is imported, or something that its __init__ has.
                inside = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in self.texts else str(node.module) for name in inside]
            else:
                continue
            for name in dict.fromkeys(names):
                if name in self.texts and name != importer:
                    yield Import(importer, name, node.lineno)

    def upward(self) -> list[str]:
        """Imports of a room further up."""
        found = [(edge, room_of(edge.importer), room_of(edge.imported)) for edge in self.imports]
        return [
            f"{edge.importer}:{edge.line} imports {edge.imported} ({room} -> {above})"
            for edge, room, above in found
            if ROOMS.index(above) < ROOMS.index(room)
        ]

    def circles(self) -> list[str]:
        """Modules that import each other, directly or through others: the first circle that is found."""
        direct: dict[str, set[str]] = {name: set() for name in self.texts}
        for edge in self.imports:
            direct[edge.importer].add(edge.imported)
        try:
            TopologicalSorter(direct).prepare()
        except CycleError as error:
            return [" <- ".join(error.args[1])]
        return []

    def lines(self, names: list[str] | None = None) -> int:
        """Of these modules, or of all."""
        return sum(len(self.texts[name].splitlines()) for name in (self.texts if names is None else names))


def room_of(module: str) -> str:
    """The room of a module of the package."""
    parts = module.split(".")
    if len(parts) == 1:
        return AUTOLOAD if module == AUTOLOAD else FACE
    return parts[1] if parts[1] in ROOMS else ROOT


def main() -> None:
    """Print the order and what breaks it."""
    package = Package(Path(__file__).parents[1])
    print(f"{'room':<22}{'files':>5}{'lines':>7}   imports")
    for room in ROOMS:
        names = [name for name in package.texts if room_of(name) == room]
        below = {room_of(edge.imported) for edge in package.imports if room_of(edge.importer) == room} - {room}
        shown = ", ".join(other for other in ROOMS if other in below)
        print(f"{room:<22}{len(names):>5}{package.lines(names):>7}   {shown}")
    print(f"{'all':<22}{len(package.texts):>5}{package.lines():>7}")
    for title, found in (
        ("upward imports", package.upward()),
        ("circles", package.circles()),
        ("folders without a docstring", package.without_docstring),
    ):
        print(f"\n{title}: {len(found) or 'none'}", *found, sep="\n  ")


if __name__ == "__main__":
    main()
