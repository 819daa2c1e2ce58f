"""Flash-attention over a paged cache of keys and values, in torch: for machines without its kernels."""

from typing import Any

import torch


def varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, *_: Any,
    softmax_scale: float, causal: bool, block_table: torch.Tensor, **__: Any,
) -> torch.Tensor:  # fmt: skip
    """``flash_attn_varlen_func``: causal, the last token of each request sees all of its keys."""
    assert causal
    token = torch.arange(len(q), device=q.device)
    request = torch.searchsorted(cu_q[1:].long().contiguous(), token, right=True).clamp(max=len(cu_q) - 2)
    behind = cu_q[request + 1] - 1 - token
    return attend(q, k, v, softmax_scale, block_table[request], cu_k.diff()[request] - behind)


def with_kvcache(
    *, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cache_seqlens: torch.Tensor,
    block_table: torch.Tensor, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """``flash_attn_with_kvcache``: one token a request, ``[requests, 1, heads, channels]``."""
    return attend(q[:, 0], k_cache, v_cache, q.shape[-1] ** -0.5, block_table, cache_seqlens)[:, None]


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    blocks: torch.Tensor,
    seen: torch.Tensor,
) -> torch.Tensor:
    """Each token to the first ``seen[token]`` keys of its ``blocks[token]``; sums in fp32."""
    k, v = (c[blocks.long().clamp(min=0)].flatten(1, 2).float() for c in (k_cache, v_cache))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("qhd,qkhd->qhk", q.float(), k) * scale
    unseen = torch.arange(k.shape[1], device=q.device) >= seen[:, None]
    shares = scores.masked_fill(unseen[:, None], float("-inf")).softmax(-1).nan_to_num(0.0)  # of no key: none
    v = v.masked_fill(unseen[:, :, None, None], 0.0)  # memory that nobody has written may hold anything
    return torch.einsum("qhk,qkhd->qhd", shares, v).to(q.dtype)
