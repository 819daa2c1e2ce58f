"""FP8 of TransformerEngine's compiled part in torch: quantise, transpose, dequantise, amax and scale updates, operands.

What a quantizer asks for is made as Hopper's kernels make it: numbers times their scale in fp32, cut to the largest of
the format and rounded to even by torch's own FP8 types; a transposed copy for every use by columns; scales and copies
laid out as ``Float8Quantizer``, ``Float8CurrentScalingQuantizer`` and ``Float8BlockQuantizer`` say
(transformer_engine/pytorch/tensor). A GEMM takes both operands k-major, as ``wgmma`` does: what was not made is an
error here as it is there.
"""

from typing import Any

import torch
import torch.distributed as dist

FP32_TOP = torch.finfo(torch.float32).max
BLOCK = 128


def torch_dtype(fp8_dtype: Any) -> torch.dtype:
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    return TE_DType_To_Torch[fp8_dtype]


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scaled fp32 as bytes of ``dtype``, saturated."""
    top = torch.finfo(dtype).max
    return x.clamp(-top, top).to(dtype).view(torch.uint8)


def scale_of(amax: torch.Tensor, dtype: torch.dtype, quantizer: Any) -> torch.Tensor:
    """Return the factor for numbers of this largest magnitude."""
    amax = amax.clamp_min(quantizer.amax_epsilon)
    scale = torch.finfo(dtype).max / amax
    scale = torch.where((amax == 0) | ~amax.isfinite(), torch.ones_like(scale), scale)
    scale = torch.where(scale.isinf(), torch.full_like(scale, FP32_TOP), scale)
    if quantizer.force_pow_2_scales:
        _, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - 1)
    return scale


def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: torch.Tensor | None = None) -> Any:
    """``tensor`` as ``quantizer`` says, into ``output`` where that is given."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    if noop is not None and noop.item():
        return output
    # No version counters: kernels do not move them, and what was saved for backward may be written to.
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(_memory(output)):
        blocks = isinstance(quantizer, Float8BlockQuantizer)
        return (_in_blocks if blocks else _whole)(tensor.detach(), quantizer, output)


def _memory(tensor: Any) -> tuple[torch.Tensor, ...]:
    names = ("_data", "_transpose", "_scale_inv", "_rowwise_data", "_columnwise_data", "_rowwise_scale_inv")
    found = [getattr(tensor, name, None) for name in (*names, "_columnwise_scale_inv")]
    return tuple(t for t in found if t is not None)


def _write(holder: Any, name: str, value: torch.Tensor | None) -> None:
    """Update a tensor as the compiled part does: in its memory where it has some; without what is not asked for."""
    into = getattr(holder, name)
    if into is None or value is None:
        setattr(holder, name, value)
    else:
        assert into.shape == value.shape, (name, into.shape, value.shape)
        into.copy_(value)


def _whole(x: torch.Tensor, quantizer: Any, output: Any) -> Any:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer, Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    dtype, amax = torch_dtype(quantizer.dtype), x.float().abs().amax().reshape(1)
    if isinstance(quantizer, Float8Quantizer):
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
        scale = quantizer.scale
    else:
        if quantizer.with_amax_reduction:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=quantizer.amax_reduction_group)
        scale = scale_of(amax, dtype, quantizer)
        if hasattr(quantizer, "amax"):  # to 2.15
            quantizer.amax.copy_(amax)
            quantizer.scale.copy_(scale)
    data, scale_inv = cast(x.float() * scale, dtype), scale.reciprocal().reshape(1)
    rows, columns = quantizer.rowwise_usage, quantizer.columnwise_usage
    if output is None:
        made = {
            "data": data if rows else None,
            "data_transpose": fp8_transpose(data) if columns else None,
            "fp8_scale_inv": scale_inv,
            "fp8_dtype": quantizer.dtype,
            "quantizer": quantizer,
        }
        return Float8TensorStorage(**made) if quantizer.internal else Float8Tensor(x.shape, x.dtype, **made)
    _write(output, "_data", data if rows else None)
    _write(output, "_transpose", fp8_transpose(data) if columns else None)
    output._transpose_invalid = not columns
    output._scale_inv.copy_(scale_inv)
    return output


def _tiles(x: torch.Tensor, high: int) -> torch.Tensor:
    """``[rows, k]`` in blocks, padded with zeros: ``[row blocks, high, k blocks, 128]``."""
    rows, k = x.shape
    row_blocks, blocks = -(-rows // high), -(-k // BLOCK)
    whole = x.new_zeros(row_blocks * high, blocks * BLOCK)
    whole[:rows, :k] = x
    return whole.view(row_blocks, high, blocks, BLOCK)


def _blocks(x: torch.Tensor, high: int, quantizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes ``[rows, k]`` and what gives the numbers back ``[row blocks, k blocks]``."""
    (rows, k), dtype, tiles = x.shape, torch_dtype(quantizer.dtype), _tiles(x, high)
    scale = scale_of(tiles.abs().amax((1, 3)), dtype, quantizer)
    scaled = (tiles * scale[:, None, :, None]).flatten(0, 1).flatten(1)[:rows, :k]
    return cast(scaled.contiguous(), dtype), scale.reciprocal()


def _laid_out(scales: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    padded = scales.new_zeros(shape)
    padded[: scales.shape[0], : scales.shape[1]] = scales
    return padded


def _in_blocks(x: torch.Tensor, quantizer: Any, output: Any) -> Any:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage

    shape, flat, dims = x.shape, x.float().reshape(-1, x.shape[-1]), quantizer.block_scaling_dim
    before_2_12 = hasattr(quantizer, "all_gather_usage")
    compact = before_2_12 and dims == 1 and quantizer.all_gather_usage
    high = 1 if dims == 1 else BLOCK
    names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    made: dict[str, Any] = dict.fromkeys(names)
    if quantizer.rowwise_usage:
        data, scales = _blocks(flat, high, quantizer)
        made["rowwise_data"] = data.view(shape)
        scales = scales if dims == 2 or compact else scales.t()
        made["rowwise_scale_inv"] = _laid_out(scales, quantizer.get_scale_shape(shape, False))
    if quantizer.columnwise_usage:
        data, scales = _blocks(flat.t().contiguous(), high, quantizer)
        made["columnwise_data"] = (data.t().contiguous() if compact else data).view(
            quantizer.get_columnwise_shape(shape)
        )
        scales = scales if dims == 2 else scales.t()
        made["columnwise_scale_inv"] = _laid_out(scales, quantizer.get_scale_shape(shape, True))
    if output is not None:
        for name, value in made.items():
            _write(output, f"_{name}", value)
        return output
    made |= {"fp8_dtype": quantizer.dtype, "quantizer": quantizer, "is_2D_scaled": dims == 2}
    if before_2_12:
        formats = tex.Float8BlockScaleTensorFormat
        made["data_format"] = formats.COMPACT if compact else formats.GEMM_READY
    if quantizer.internal:
        return Float8BlockwiseQTensorStorage(**made)
    return Float8BlockwiseQTensor(shape=shape, dtype=x.dtype, **made)


def dequantize(tensor: Any, otype: Any) -> torch.Tensor:
    numbers = tensor._data.view(torch_dtype(tensor._fp8_dtype)).float() * tensor._scale_inv
    return numbers.to(torch_dtype(otype))


def bgrad_quantize(dy: torch.Tensor, quantizer: Any) -> list[Any]:
    return [dy.float().reshape(-1, dy.shape[-1]).sum(0).to(dy.dtype), quantize(dy, quantizer)]


def fp8_transpose(input: torch.Tensor, dtype: Any = None, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Bytes ``[..., k]`` to ``[k, ...]``."""
    shape = (input.shape[-1], *input.shape[:-1])
    out = input.new_empty(shape) if out is None else out
    with torch.autograd._unsafe_preserve_version_counter(out):
        return out.copy_(input.reshape(-1, input.shape[-1]).t().view(shape))


def create_empty_quantized_tensor(
    quantizer: Any, shape: list[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
) -> Any:
    """From 2.16 on compiled. Of zeros, by a copy that tells no other rank; the quantizer's amax stays."""
    apart = quantizer.copy()
    apart.with_amax_reduction = False
    if hasattr(apart, "amax"):
        apart.amax, apart.scale = apart.amax.clone(), apart.scale.clone()
    made = quantize(torch.zeros(shape, dtype=dtype, device=device), apart)
    made._quantizer = quantizer
    return made


def swap_first_dims(tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """``[a, b, ...]`` to ``[b, a, ...]``."""
    swapped = tensor.transpose(0, 1).contiguous()
    return swapped if out is None else out.copy_(swapped)


def fused_amax_and_scale_update_after_reduction(
    amax: torch.Tensor,
    histories: list[torch.Tensor],
    scales: list[torch.Tensor],
    algo: str,
    fp8_dtype: Any,
    margin: int,
) -> None:
    top = torch.finfo(torch_dtype(fp8_dtype)).max
    for reduced, history, scale in zip(amax.split([s.numel() for s in scales]), histories, scales, strict=True):
        history[0] = reduced
        largest = history.amax(0) if algo == "max" else history[0].clone()
        history.copy_(history.roll(-1, 0))
        history[0] = 0
        new = top / largest / 2**margin
        new = torch.where((largest > 0) & largest.isfinite(), new, scale)
        scale.copy_(new.clamp_max(FP32_TOP))


def numbers_of(operand: Any, transposed: bool) -> torch.Tensor:
    """fp32 ``[rows, k]`` of an operand of a GEMM, or of its transposed copy ``[k, rows]``."""
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    dtype = torch_dtype(operand._fp8_dtype)
    if isinstance(operand, Float8TensorStorage):
        data = operand._transpose if transposed else operand._data
        assert data is not None, f"no {'transposed ' * transposed}data"
        assert not (transposed and operand._transpose_invalid)
        return _matrix(data, transposed).view(dtype).float() * operand._scale_inv
    data = operand._columnwise_data if transposed else operand._rowwise_data
    scales = operand._columnwise_scale_inv if transposed else operand._rowwise_scale_inv
    assert data is not None, f"no {'transposed ' * transposed}data"
    numbers = _matrix(data, transposed).view(dtype).float()
    rows, k = numbers.shape
    if operand._is_2D_scaled:
        by_block = scales[:, : -(-k // BLOCK)].repeat_interleave(BLOCK, 0)[:rows]
    else:
        by_block = scales[:, :rows].t()
    return numbers * by_block.repeat_interleave(BLOCK, 1)[:, :k]


def _matrix(data: torch.Tensor, transposed: bool) -> torch.Tensor:
    return data.reshape(data.shape[0], -1) if transposed else data.reshape(-1, data.shape[-1])
