"""scripts/seams.py: what it says the package relies on is there in the installed releases, and it sees what moves."""

from __future__ import annotations

import ast
import importlib
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_flux.patch import te_fp8, te_seam
from tests.distributed.te_stand_in import SOURCE

SCRIPTS = Path(__file__).parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))
try:
    import seams
    import seams_relied
    import seams_sources
finally:
    sys.path.remove(str(SCRIPTS))

Relied, Release = seams_relied.Relied, seams_sources.Release
needs_te = pytest.mark.skipif(not SOURCE, reason="needs TransformerEngine's Python: MEGATRON_FLUX_TE_SOURCE")
KERNELS = {f"transformer_engine_torch:{name}" for name in te_seam.KERNELS | te_fp8.KERNELS}


# What is relied on exists


def missing(package: str, *paths: Path) -> set[str]:
    release = Release(package, paths)
    names = [one for one in seams_relied.relied(package) if one.seam != seams_relied.ATTRIBUTES]
    assert len(names) > 10
    return {one.path for one in names if release.find(one.path) is None}


def test_every_name_is_in_the_installed_megatron_core() -> None:
    assert missing("megatron-core") == set()


def test_every_name_is_in_the_installed_torch() -> None:
    assert missing("torch") == seams_relied.COMPILED
    for path in seams_relied.COMPILED:
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name)


@needs_te
def test_every_name_is_in_transformer_engine() -> None:
    found = missing("transformer-engine", Path(SOURCE)) - seams_relied.BY_RELEASE
    assert found == KERNELS  # declared in C++, which its wheel does not have


@needs_te
def test_every_attribute_of_layers_is_in_one_of_their_classes() -> None:
    megatron, te = Release("megatron-core", []), Release("transformer-engine", [Path(SOURCE)])
    wanted = seams_relied.attributes()
    assert {"column.explicit_expert_comm", "row.input_is_parallel", "te.fwd_ln_sm_margin"} <= set(wanted)
    assert {"te.return_layernorm_output", "te.ub_bulk_dgrad", "row.tp_group"} <= set(wanted)
    absent = {
        name
        for name, paths in wanted.items()
        if not any(release.find(path) for path in paths for release in (megatron, te))
    }
    assert absent <= {"te.prepare_forward_ctx", "te.get_weight_workspace"}, (
        "which some releases of TransformerEngine have"
    )


def test_no_function_of_the_patch_that_asks_a_layer_is_left_out() -> None:
    for module, known in seams_relied.LAYERS_OF.items():
        tree = ast.parse((seams_relied.PACKAGE / "patch" / f"{module}.py").read_text())
        methods = [
            n for c in tree.body if isinstance(c, ast.ClassDef) for n in c.body if isinstance(n, ast.FunctionDef)
        ]
        assert {f.name for f in methods if list(seams_relied.of_layer(f))} == set(known)


def test_the_registry_and_the_code_are_both_looked_at() -> None:
    paths = {one.path: one for one in seams_relied.relied("megatron-core")}
    assert "megatron.core.tensor_parallel.layers:RowParallelLinear.forward" in paths
    assert "megatron.core.dist_checkpointing.strategies.torch._replace_state_dict_keys_with_sharded_keys" in paths
    assert "megatron.core.tensor_parallel.random._get_cuda_rng_state" not in paths  # as a keyword of mock only
    found = {one.path for one in seams_relied.relied("torch")}
    assert "torch._C._distributed_c10d._SymmetricMemory.get_buffer" in found
    assert "torch.distributed._symmetric_memory._group_name_to_workspace_tensor" in found


def test_names_of_a_module(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text(
        "import importlib, torch\n"
        "import torch.distributed._symmetric_memory as symm\n"
        "from megatron.core import parallel_state as state\n"
        "from torch import nn\n"
        "_M = 'torch._inductor.config'\n"
        "def f(x):\n"
        "    handle = symm.rendezvous(x)\n"
        "    module = importlib.import_module(_M)\n"
        "    getattr(module, '_hidden', None)\n"
        "    return handle.multicast_ptr, state.get_rank(), torch.cuda.sum(), torch.cuda._lazy_call, x._private\n"
    )
    assert {name.path for name in seams_relied.names(tmp_path)} == {
        "torch.distributed._symmetric_memory",
        "torch.distributed._symmetric_memory.rendezvous",
        "torch._C._distributed_c10d._SymmetricMemory.multicast_ptr",
        "torch._inductor.config",
        "torch._inductor.config._hidden",
        "torch.cuda._lazy_call",
        "megatron.core.parallel_state",
        "megatron.core.parallel_state.get_rank",
    }


# Two releases


OLD = {
    "pkg/__init__.py": "from pkg.base import *\nraise RuntimeError('imported')\n",
    "pkg/base.py": """
class Base:
    mode: int = 0

    def __init__(self, x, *, y: int = 1):
        self.width = x
        self.register_parameter("weight", None)

    def run(self, x):
        '''Says.'''
        return x + 1

    def helper_of_run(self):
        return 1
""",
    "pkg/sub/__init__.py": "from .layer import Layer as L\n",
    "pkg/sub/layer.py": "if True:\n    from ..base import Base\n"
    "try:\n    class Layer(Base): pass\nexcept E:\n    pass\nthe = Layer()\n",
    "transformer_engine/pytorch/csrc/extensions/pybind.cpp": 'm.def("norm_fwd", &norm_fwd, "Norm", py::arg("x"));',
    "transformer_engine/pytorch/csrc/extensions.h": "std::vector<py::object> norm_fwd(\n"
    "  const at::Tensor &x, std::variant<int, bool> y);",
    "torch/distributed/_symmetric_memory/__init__.py": 'lib.define(\n    "fused_op(Tensor A, int dim) -> Tensor"\n)\n',
}


@pytest.fixture
def compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Compare :data:`OLD` with one in which texts are replaced, for what is relied on; exit code and output."""

    def run(items: list[Relied], *edits: tuple[str, str], options: tuple[str, ...] = ()) -> tuple[int, str]:
        for name in ("old", "new"):
            for path, text in OLD.items():
                file = tmp_path / name / path
                file.parent.mkdir(parents=True, exist_ok=True)
                for before, after in edits if name == "new" else ():
                    text = text.replace(before, after)
                file.write_text(text)
        monkeypatch.setattr(seams, "relied", lambda package: items)
        code = seams.main(["torch", "--old", str(tmp_path / "old"), "--new", str(tmp_path / "new"), *options])
        return code, capsys.readouterr().out

    return run


RUN = Relied("bodies", "pkg.base:Base.run", body=True)


@pytest.mark.parametrize(
    "path",
    [
        *("pkg:Base.run", "pkg.base.Base.mode", "pkg.sub.L.width", "pkg.sub.layer:Layer.weight", "pkg.sub"),
        *("pkg.sub.layer.the.run", "torch.ops.symm_mem.fused_op.default", "transformer_engine_torch:norm_fwd"),
    ],
)
def test_a_name_is_found_until_it_is_gone(compare: Callable[..., tuple[int, str]], path: str) -> None:
    items = [Relied("names", path)]
    code, out = compare(items)
    assert (code, "names: 1 looked at, nothing moved" in out) == (0, True)
    edits = [(name, "other") for name in ("run(", "mode", "width", "weight", "fused_op", '"norm_fwd"')]
    if path == "pkg.sub":
        assert compare([Relied("names", "pkg.none")])[0] == 2  # the old release does not show it
    else:
        code, out = compare(items, *((before, after + "(" * before.endswith("(")) for before, after in edits))
        assert (code, f"gone       {path}\n" in out) == (1, True)


def test_parameters(compare: Callable[..., tuple[int, str]]) -> None:
    items = [Relied("names", "pkg.base:Base"), Relied("names", "pkg.base:Base.run")]
    assert compare(items, ("y: int", "y: float"), ("x + 1", "x + 2"))[0] == 0
    code, out = compare(items, ("*, y: int = 1", "y=2"))
    assert code == 1
    assert "parameters pkg.base:Base\n    - (self, x, *, y=1)\n    + (self, x, y=2)" in out


def test_parameters_of_a_compiled_function(compare: Callable[..., tuple[int, str]]) -> None:
    norm = "transformer_engine_torch:norm_fwd"
    assert compare([Relied("kernels", norm, parameters=2)])[0] == 0
    code, out = compare([Relied("kernels", norm, parameters=2)], ("const at::Tensor &x", "at::Tensor x, int sms"))
    assert (code, f"{norm}: 3, and the package gives 2" in out) == (1, True)


def test_code(compare: Callable[..., tuple[int, str]]) -> None:
    assert compare([RUN], ("Says.", "Says more."), ("x + 1", "x + 1  # why"))[0] == 0
    code, out = compare([RUN], ("x + 1", "x + 2"))
    assert code == 1
    assert "code       pkg.base:Base.run\n" in out
    assert "    -    return x + 1\n    +    return x + 2\n" in out
    code, out = compare([RUN], ("x + 1", "x + 2"), options=("--brief",))
    assert (code, "return" in out, "pkg.base:Base.run" in out) == (1, False, True)


def test_functions_of_a_module(compare: Callable[..., tuple[int, str]]) -> None:
    module = [Relied("bodies", "pkg.base", body=True)]
    assert compare(module)[0] == 0
    assert "code       pkg.base:Base\n" in compare(module, ("mode: int = 0", "mode: int = 1"))[1]
    code, out = compare(module, ("helper_of_run", "helper_of_runs"), ("return 1", "return 2"))
    assert (code, "pkg.base:Base.helper_of_run, now Base.helper_of_runs\n" in out) == (1, True)
    assert "    -    return 1\n" in out
    assert "    +    return 2\n" in out
    out = compare(module, ("helper_of_run", "q"))[1]
    assert "gone       pkg.base:Base.helper_of_run\n" in out
    assert "new        pkg.base:Base.q (2 lines)\n" in out


def test_wheels_and_sdists(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, sdist = tmp_path / "pkg-1-py3-none-any.whl", tmp_path / "pkg_torch-1.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pkg/base.py", OLD["pkg/base.py"])
    for name in ("pybind.cpp", "extensions.h"):
        path = f"extensions/{name}" if name == "pybind.cpp" else name
        file = tmp_path / "pkg_torch-1" / "csrc" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(OLD[f"transformer_engine/pytorch/csrc/{path}"])
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(tmp_path / "pkg_torch-1", "pkg_torch-1")
    items = [RUN, Relied("kernels", "transformer_engine_torch:norm_fwd", parameters=2)]
    monkeypatch.setattr(seams, "relied", lambda package: items)
    assert seams.main(["torch", "--old", str(wheel), str(sdist), "--new", str(wheel), str(sdist)]) == 0
    assert seams.main(["torch", "--old", str(wheel), str(sdist), "--new", str(wheel)]) == 1
    assert seams.main(["torch", "--old", str(wheel), "--new", str(wheel), str(sdist)]) == 2
    assert seams.main(["torch", "--old", str(wheel), "--new", str(tmp_path / "none.zip")]) == 2
    assert "none.zip is not a folder, a wheel (.whl) or an sdist (.tar.gz)" in capsys.readouterr().err


def test_sources_that_this_python_cannot_read(
    compare: Callable[..., tuple[int, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare([RUN], ("class Base:", "class Base::"))[0] == 2
