"""TransformerEngine's own Python on CPUs, its compiled part replaced by torch.

TransformerEngine is Python over one compiled module, ``transformer_engine_torch``. Tests of patched against stock
layers need all of the former (parameters, autograd functions, main_grad, checkpoints) and of the latter four norm
kernels and one GEMM. So its Python is read as it was released, and those five are written in torch here.

What asks for a GPU is left out when it is compiled to bytecode: its assertions, and in newer releases errors with
"needs CUDA". An environment cannot have it without its compiled part, which is why it is kept in a folder of its own::

    pip install --no-deps --target FOLDER transformer-engine==2.11.0
    MEGATRON_FLUX_TE_SOURCE=FOLDER pytest tests/distributed/test_te_layers.py

Hazard: megatron-core decides at import whether there is a TransformerEngine, so :func:`install` comes first, and in
processes of their own.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

SOURCE = os.environ.get("MEGATRON_FLUX_TE_SOURCE", "")


def why_not() -> str | None:
    """Why these tests cannot run here, or None."""
    if torch.cuda.is_available():
        return "a GPU is here: tests/gpu has the same tests with TransformerEngine itself"
    if not (Path(SOURCE or "/nowhere") / "transformer_engine" / "pytorch").is_dir():
        return (
            "needs TransformerEngine's Python in a folder of its own: pip install --no-deps --target FOLDER "
            "transformer-engine==2.11.0, MEGATRON_FLUX_TE_SOURCE=FOLDER"
        )
    return None


def layernorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    ln_out: None,
    quantizer: None,
    otype: object,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    x = input.float()
    mean = x.mean(-1)
    reciprocal = (x.var(-1, unbiased=False) + eps).rsqrt()
    y = (x - mean[:, None]) * reciprocal[:, None] * (weight.float() + zero_centered_gamma) + bias.float()
    return [y.to(input.dtype), mean, reciprocal]


def layernorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    assert dz.shape == x.shape
    normed = (x.float() - mu[:, None]) * rsigma[:, None]
    d = dz.float() * (gamma.float() + zero_centered_gamma)
    dx = rsigma[:, None] * (d - d.mean(-1, keepdim=True) - normed * (d * normed).mean(-1, keepdim=True))
    return [dx.to(x.dtype), (dz.float() * normed).sum(0).to(gamma.dtype), dz.float().sum(0).to(gamma.dtype)]


def rmsnorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    ln_out: None,
    quantizer: None,
    otype: object,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor | None]:
    x = input.float()
    reciprocal = (x.square().mean(-1) + eps).rsqrt()
    return [(x * reciprocal[:, None] * (weight.float() + zero_centered_gamma)).to(input.dtype), None, reciprocal]


def rmsnorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    assert dz.shape == x.shape
    normed = x.float() * rsigma[:, None]
    d = dz.float() * (gamma.float() + zero_centered_gamma)
    dx = rsigma[:, None] * (d - normed * (d * normed).mean(-1, keepdim=True))
    return [dx.to(x.dtype), (dz.float() * normed).sum(0).to(gamma.dtype)]


def generic_gemm(
    a: torch.Tensor,
    transa: bool,
    b: torch.Tensor,
    transb: bool,
    out: torch.Tensor | None,
    quantizer: None,
    out_dtype: object,
    bias: torch.Tensor | None,
    bias_dtype: object,
    gelu: bool,
    gelu_in: None,
    grad: bool,
    workspace: torch.Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    **communication: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Column-major as cuBLAS: in torch's order ``op(b) @ op(a)``. With ``grad``, ``bias`` asks for its gradient."""
    lead = b.shape[:-1]
    rows_a, rows_b = (t.float().reshape(-1, t.shape[-1]) for t in (a, b))
    d = (rows_b.t() if transb else rows_b) @ (rows_a.t() if transa else rows_a)
    bias_gradient = None
    if bias is not None and grad:
        bias_gradient = rows_b.sum(0).to(b.dtype)
    elif bias is not None:
        d = d + bias.float()
    if out is None:
        return d.to(a.dtype).view(d.shape if transb else (*lead, d.shape[-1])), bias_gradient, None, None
    return (out.add_(d) if accumulate else out.copy_(d)), bias_gradient, None, None


class _Names(type):
    """Whatever is asked of an enumeration of the compiled module: a number of its own."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        number = len(vars(cls))
        setattr(cls, name, number)
        return number


class _Compiled(types.ModuleType):
    """``transformer_engine_torch``; what is not written here is a class of names."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Names(name, (), {})
        setattr(self, name, made)
        return made


class _WithoutCuda(ast.NodeTransformer):
    """``if ...: raise RuntimeError("TransformerEngine needs CUDA")`` does nothing."""

    def visit_If(self, node: ast.If) -> ast.AST:
        if isinstance(node.body[0], ast.Raise) and "needs CUDA" in ast.unparse(node.body[0]):
            node.body = [ast.copy_location(ast.Pass(), node)]
        return self.generic_visit(node)


class _WithoutAssertions(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        tree = _WithoutCuda().visit(ast.parse(self.get_data(path)))
        return compile(tree, path, "exec", dont_inherit=True, optimize=1)


class _Finder:
    """Finds ``transformer_engine`` in its folder."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "transformer_engine":
            return None
        for folder in path or [SOURCE]:
            found = importlib.machinery.FileFinder(folder, (_WithoutAssertions, [".py"])).find_spec(name)
            if found is not None:
                return found
        return None


def install() -> None:
    """Make ``import transformer_engine`` work in this process; once, and before megatron-core is imported."""
    if "transformer_engine" in sys.modules:
        return
    assert "megatron.core" not in sys.modules, "megatron-core has already looked for TransformerEngine"
    import torch._dynamo

    # Its own switch for builds, where the compiled part is not there yet.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    compiled = _Compiled("transformer_engine_torch")
    for function in (layernorm_fwd, layernorm_bwd, rmsnorm_fwd, rmsnorm_bwd, generic_gemm):
        setattr(compiled, function.__name__, function)
    sys.modules["transformer_engine_torch"] = compiled
    sys.modules["transformer_engine.pytorch.onnx_extensions"] = MagicMock()
    absent = importlib.util.find_spec("einops") is None
    if absent:
        sys.modules["einops"] = MagicMock()
    sys.path.append(SOURCE)  # for the distribution's metadata
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
    # The package's own __init__ would import its PyTorch part before the loader of compiled parts can be replaced.
    package = importlib.util.module_from_spec(importlib.util.find_spec("transformer_engine"))
    sys.modules["transformer_engine"] = package
    package.common = importlib.import_module("transformer_engine.common")
    package.common.load_framework_extension = lambda framework: None
    package.pytorch = importlib.import_module("transformer_engine.pytorch")
    package.__version__ = importlib.metadata.version("transformer_engine")
    if absent:
        del sys.modules["einops"]
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=8, minor=0)  # the GEMM's workspace
    torch.cuda.is_current_stream_capturing = lambda: False
