"""Imports go downwards only, modules form no circle, and folders say what they hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.rooms import AUTOLOAD, FACE, PACKAGE, ROOMS, ROOT, Package, room_of

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def package() -> Package:
    return Package(REPOSITORY)


def test_no_import_goes_upwards(package: Package) -> None:
    assert package.upward() == []


def test_no_modules_import_each_other(package: Package) -> None:
    assert package.circles() == []


def test_every_folder_has_a_docstring(package: Package) -> None:
    assert package.without_docstring == []


def test_every_room_has_modules(package: Package) -> None:
    assert {room_of(name) for name in package.texts} == set(ROOMS)


# What the rules find, on packages made for it.


def made(folder: Path, **texts: str) -> Package:
    """A package of ``room__module="text"``, with a docstring in every folder."""
    for name, text in texts.items():
        path = (folder / PACKAGE / name.replace("__", "/")).with_suffix(".py")
        for parent in [path.parent, *path.parent.parents]:
            if parent == folder:
                break
            parent.mkdir(parents=True, exist_ok=True)
            if not (parent / "__init__.py").exists():
                (parent / "__init__.py").write_text('"""What is here."""\n')
        path.write_text(text)
    return Package(folder)


def test_an_upward_import_is_found_in_a_function(tmp_path: Path) -> None:
    text = "def f():\n    from megatron_flux.ops.operators import gemm"
    (line,) = made(tmp_path, ops__operators="gemm = 1", comm__slab=text).upward()
    assert line == "megatron_flux.comm.slab:2 imports megatron_flux.ops.operators (comm -> ops)"
    assert made(tmp_path / "down", comm__slab="", ops__operators=text.replace("ops", "comm")).upward() == []


def test_the_public_face_is_above_the_patch_and_root_modules_are_below_all(tmp_path: Path) -> None:
    face, root = "from megatron_flux import patched", "from megatron_flux import nvml"
    package = made(
        tmp_path, nvml="import megatron_flux.kernels.launch", kernels__launch=root, layers__row=face, train__a=face
    )
    assert [line.split(" (")[1] for line in package.upward()] == [f"layers -> {FACE})", f"{ROOT} -> kernels)"]


def test_nothing_imports_what_torch_calls(tmp_path: Path) -> None:
    (tmp_path / f"{AUTOLOAD}.py").write_text("def load():\n    from megatron_flux import settings\n")
    package = made(tmp_path, settings="from megatron_flux_autoload import OFF")
    assert package.upward() == [f"megatron_flux.settings:1 imports {AUTOLOAD} ({ROOT} -> {AUTOLOAD})"]
    assert package.circles() == [f"megatron_flux.settings <-> {AUTOLOAD}"]


def test_circles_are_found_within_a_room_and_through_others(tmp_path: Path) -> None:
    package = made(
        tmp_path,
        ops__a="from megatron_flux.ops import b",
        ops__b="def f():\n    import megatron_flux.ops.c",
        ops__c="from megatron_flux.ops.a import x",
        ops__d="from megatron_flux.ops import a",
        comm__e="from megatron_flux.comm import f",
        comm__f="from megatron_flux.comm import e",
    )
    a, b, c = (f"megatron_flux.ops.{name}" for name in "abc")
    assert package.circles() == ["megatron_flux.comm.e <-> megatron_flux.comm.f", f"{a} <-> {b} <-> {c}"]
