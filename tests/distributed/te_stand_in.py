"""TransformerEngine's own Python on CPUs, its compiled part replaced by torch.

TransformerEngine is Python over one compiled module, ``transformer_engine_torch``. Tests of patched against stock
layers need all of the former (parameters, autograd functions, main_grad, checkpoints) and of the latter four norm
kernels, one GEMM and a group of them, and what quantises (:mod:`tests.distributed.te_stand_in_fp8`). So its Python is
read as it was released, and those are written in torch here, with the arguments that it has for them. It is told that
there is a Hopper GPU.

What asks for a GPU is left out when it is compiled to bytecode: its assertions, and in newer releases errors with
"needs CUDA". An environment cannot have it without its compiled part, which is why it is kept in a folder of its own::

    pip install --no-deps --target FOLDER transformer-engine==2.11.0
    MEGATRON_FLUX_TE_SOURCE=FOLDER pytest tests/distributed/test_te_layers.py

Hazard: megatron-core decides at import whether there is a TransformerEngine, so :func:`install` comes first, and in
processes of their own.
"""

import ast
import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from tests.distributed import te_stand_in_fp8

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


def skipped(why: str | None) -> pytest.MarkDecorator:
    """Return the mark that skips tests for the reason ``why``, if there is one."""
    return pytest.mark.skipif(why is not None, reason=str(why))


needed = skipped(why_not())
"""The mark of tests over TransformerEngine's layers."""


def _quantized(y: torch.Tensor, quantizer: Any) -> Any:
    return y if quantizer is None else te_stand_in_fp8.quantize(y, quantizer)


def layernorm_fwd(input, weight, bias, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    x = input.float()
    mean = x.mean(-1)
    reciprocal = (x.var(-1, unbiased=False) + eps).rsqrt()
    y = (x - mean[:, None]) * reciprocal[:, None] * (weight.float() + zero_centered_gamma) + bias.float()
    return [_quantized(y.to(input.dtype), quantizer), mean, reciprocal]


def layernorm_bwd(dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma):
    assert dz.shape == x.shape
    normed = (x.float() - mu[:, None]) * rsigma[:, None]
    d = dz.float() * (gamma.float() + zero_centered_gamma)
    dx = rsigma[:, None] * (d - d.mean(-1, keepdim=True) - normed * (d * normed).mean(-1, keepdim=True))
    return [dx.to(x.dtype), (dz.float() * normed).sum(0).to(gamma.dtype), dz.float().sum(0).to(gamma.dtype)]


def rmsnorm_fwd(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    x = input.float()
    reciprocal = (x.square().mean(-1) + eps).rsqrt()
    y = (x * reciprocal[:, None] * (weight.float() + zero_centered_gamma)).to(input.dtype)
    return [_quantized(y, quantizer), None, reciprocal]


def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma):
    assert dz.shape == x.shape
    normed = x.float() * rsigma[:, None]
    d = dz.float() * (gamma.float() + zero_centered_gamma)
    dx = rsigma[:, None] * (d - normed * (d * normed).mean(-1, keepdim=True))
    return [dx.to(x.dtype), (dz.float() * normed).sum(0).to(gamma.dtype)]


@torch.no_grad()
def generic_gemm(
    a, transa, b, transb, out, quantizer, out_dtype, bias, bias_dtype, gelu, gelu_in, grad, workspace, workspace_size,
    accumulate, use_split_accumulator, **communication,
):  # fmt: skip
    """Column-major as cuBLAS: in torch's order ``op(b) @ op(a)``. With ``grad``, ``bias`` asks for its gradient."""
    lead = b.size()[:-1]
    rows_a, rows_b = _k_major(a, not transa), _k_major(b, transb)
    plain = not hasattr(a, "_fp8_dtype") and (bias is None or grad) and not accumulate
    if plain and (out is None or out.dtype == a.dtype):
        # In their own dtype, as the layers under test do: CPUs differ in the order in which they add (AMX).
        rows_a, rows_b = rows_a.to(a.dtype), rows_b.to(b.dtype)
    d = rows_b @ rows_a.t()
    bias_gradient = None
    if bias is not None and grad:
        bias_gradient = b.float().reshape(-1, b.shape[-1]).sum(0).to(b.dtype)
    elif bias is not None:
        d = d + bias.float()
    if out is None:
        dtype = a.dtype if out_dtype is None else te_stand_in_fp8.torch_dtype(out_dtype)
        return d.to(dtype).view(d.shape if transb else (*lead, d.shape[-1])), bias_gradient, None, None
    return (out.add_(d) if accumulate else out.copy_(d)), bias_gradient, None, None


def te_general_grouped_gemm(
    a, transa, b, transb, out, out_dtype, m_splits, bias, bias_dtype, single_output, gelu_in, grad, workspaces,
    workspace_size, accumulate, use_split_accumulator, sm_count,
):  # fmt: skip
    """One GEMM after the other, without a bias; ``single_output``: into the rows of one result."""
    for one, other, result in zip(a, b, out[0].split(m_splits) if single_output else out, strict=True):
        how = (None, None, None, bias_dtype, False, None, grad, workspaces[0], workspace_size)
        generic_gemm(one, transa, other, transb, result, *how, accumulate, use_split_accumulator)
    return bias


def _k_major(operand: Any, transposed: bool) -> torch.Tensor:
    """fp32 ``[rows, k]`` of ``operand`` ``[..., k]``, or of one ``[k, rows]`` that is used ``transposed``."""
    if hasattr(operand, "_fp8_dtype"):
        return te_stand_in_fp8.numbers_of(operand, transposed)
    rows = operand.float().reshape(-1, operand.shape[-1])
    return rows.t() if transposed else rows


_FP8 = (
    *("quantize", "dequantize", "bgrad_quantize", "fp8_transpose", "swap_first_dims", "create_empty_quantized_tensor"),
    "fused_amax_and_scale_update_after_reduction",
)
_INDICES = {
    "FP8FwdTensors": [f"GEMM{i}_{what}" for i in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT")],
    "FP8BwdTensors": [f"GRAD_{what}{i}" for i in (1, 2, 3) for what in ("OUTPUT", "INPUT")],
}
"""Enumerations whose values are places in lists."""


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
    """``if ...: raise RuntimeError("TransformerEngine needs CUDA")`` does nothing; the device ``cuda`` is the CPU."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.copy_location(ast.Constant("cpu"), node) if node.value == "cuda" else node

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


@contextlib.contextmanager
def _one_by_one(*args: object, **kwargs: object) -> Iterator[types.SimpleNamespace]:
    yield types.SimpleNamespace(wait=lambda: None)


def install() -> None:
    """Make ``import transformer_engine`` work in this process; once, and before megatron-core is imported."""
    if "transformer_engine" in sys.modules:
        return
    assert "megatron.core" not in sys.modules, "megatron-core has already looked for TransformerEngine"
    import torch._dynamo

    # Its own switch for builds, where the compiled part is not there yet.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    compiled = _Compiled("transformer_engine_torch")
    norms = (layernorm_fwd, layernorm_bwd, rmsnorm_fwd, rmsnorm_bwd)
    for function in (*norms, generic_gemm, te_general_grouped_gemm):
        setattr(compiled, function.__name__, function)
    for name in _FP8:
        setattr(compiled, name, getattr(te_stand_in_fp8, name))
    for name, values in _INDICES.items():
        setattr(compiled, name, type(name, (), {value: i for i, value in enumerate(values)}))
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
    compiled.get_num_cublas_streams = lambda: 1
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    quantization = importlib.import_module("transformer_engine.pytorch.quantization")
    quantization.check_fp8_block_scaling_support = lambda: (True, "")  # it looks at the version of CUDA
    torch.cuda.is_current_stream_capturing = lambda: False
    distributed = importlib.import_module("transformer_engine.pytorch.distributed")
    distributed._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    distributed._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.distributed._coalescing_manager = _one_by_one  # gloo does not join collectives
