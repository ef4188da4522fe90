"""Attention of one query shard on one key chunk: varlen on packed rows, and masked on dense ones.

For callers that drive their own ring. Must not know who owns what.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ringattn import _c
from ringattn.backend import shared_backend
from ringattn.context import Context
from ringattn.function import attention_with_lse
from ringattn.layer import Layer
from ringattn.nemo.rows import as_thd, host
from ringattn.view import ForwardLayout, backward_io, check, check_device

# Added to scores that a chunk must not see; far below every score, and exact in bf16 and f16.
_FAR = 16384.0


def _layer(
    q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool, window: int, window_right: int = 0
) -> Layer:
    return Layer(
        q_heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        scale=scale,
        dtype=q.dtype,
        causal=causal,
        window=window,
        window_right=window_right,
    )


def _lengths(seg: dict[str, Any]) -> tuple[_c.Varlen, list[torch.Tensor]]:
    kept = [host(seg[name], torch.int32).contiguous() for name in ("cu_q", "cu_k")]
    if kept[0].numel() != kept[1].numel():
        raise ValueError(f"cu_k: {kept[1].numel()} elements, expected {kept[0].numel()}, as of cu_q")
    lens = _c.Varlen(
        size=ctypes.sizeof(_c.Varlen),
        cu_q=kept[0].data_ptr(),
        cu_k=kept[1].data_ptr(),
        segments=kept[0].numel() - 1,
    )
    return lens, kept


def varlen_forward(
    q_pack: torch.Tensor,
    k_pack: torch.Tensor,
    v_pack: torch.Tensor,
    seg: dict[str, Any],
    scale: float,
    causal: bool,
    window: int = 0,
    window_right: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, Hq, D] and lse [Hq, T]; causal and window are aligned to each document's last
    token."""
    q, k, v = (t.detach().contiguous() for t in (q_pack, k_pack, v_pack))
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    layer = _layer(q, k, scale, causal, window, window_right).to_c()
    lens, _kept = _lengths(seg)
    tensors = (as_thd(q), as_thd(k), as_thd(v), as_thd(out), lse[None])
    check(k_pack=tensors[1], v_pack=tensors[2])
    check_device(q.device, k_pack=k, v_pack=v)
    io = _c.ForwardIo.from_buffer_copy(ForwardLayout(*tensors).pack(*tensors))
    with shared_backend(q.device).default_stream() as backend:
        _c.check(
            _c.lib.ra_varlen_forward(
                backend.handle, ctypes.byref(layer), ctypes.byref(lens), ctypes.byref(io)
            )
        )
    return out, lse


def varlen_backward(
    grad_out_pack: torch.Tensor,
    q_pack: torch.Tensor,
    k_pack: torch.Tensor,
    v_pack: torch.Tensor,
    out_pack: torch.Tensor,
    lse_pack: torch.Tensor,
    seg: dict[str, Any],
    scale: float,
    causal: bool,
    window: int = 0,
    window_right: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv [T, H, D] from the merged out and lse."""
    q, k, v = (t.detach().contiguous() for t in (q_pack, k_pack, v_pack))
    out, dout = (t.detach().to(q.dtype).contiguous() for t in (out_pack, grad_out_pack))
    lse = lse_pack.detach().float().contiguous()
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    layer = _layer(q, k, scale, causal, window, window_right).to_c()
    lens, _kept = _lengths(seg)
    written = [as_thd(t) for t in (dout, dq, dk, dv)]
    io = _c.BackwardIo.from_buffer_copy(
        backward_io(as_thd(q), as_thd(k), as_thd(v), as_thd(out), lse[None], written)
    )
    with shared_backend(q.device).default_stream() as backend:
        _c.check(
            _c.lib.ra_varlen_backward(
                backend.handle, ctypes.byref(layer), ctypes.byref(lens), ctypes.byref(io)
            )
        )
    return dq, dk, dv


def _span(parts: dict[int, torch.Tensor], length: int) -> torch.Tensor:
    """Parts at their positions in [rows, length], 0 elsewhere."""
    like = next(iter(parts.values()))
    whole = like.new_zeros(like.shape[0], length)
    for start, part in parts.items():
        whole[:, start : start + part.shape[1]] = part
    return whole


def masked_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: Layer,
    q_start: int,
    k_start: int,
    q_ids: torch.Tensor,
    k_ids: torch.Tensor,
    q_types: torch.Tensor | None = None,
    k_types: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse [B, Hq, Sq] of a query shard on one chunk of keys, both at their global
    positions.

    ids: document ids, <= 0 is padding. Another rank's chunk becomes one row with the shard, in
    which the shard's own keys are pushed out of every softmax by eight further channels.
    """
    if q_start == k_start:
        with Context(layers=[layer], device=query.device) as context:
            step = context.step(packed_seq_ids=q_ids, mm_token_type_ids=q_types)
            return attention_with_lse(query, key, value, step)
    first, seq_q, seq_k = min(q_start, k_start), query.shape[2], key.shape[2]
    at_q, at_k = q_start - first, k_start - first
    length = max(at_q + seq_q, at_k + seq_k)
    ids = _span({at_q: q_ids, at_k: k_ids}, length)
    types = None
    if q_types is not None and k_types is not None:
        types = _span({at_q: q_types, at_k: k_types}, length)

    def lay(tensor: torch.Tensor, start: int, extra: float, extra_elsewhere: float) -> torch.Tensor:
        rows, heads, seq, channels = tensor.shape
        whole = tensor.new_zeros(rows, heads, length, channels + 8)
        whole[..., channels] = extra_elsewhere
        whole[:, :, start : start + seq, :channels] = tensor
        whole[:, :, start : start + seq, channels] = extra
        return whole

    wide = Layer(
        q_heads=layer.q_heads,
        kv_heads=layer.kv_heads,
        head_dim=layer.head_dim + 8,
        scale=layer.scale,
        dtype=layer.dtype,
        causal=layer.causal,
        window=layer.window,
        window_right=layer.window_right,
        vision=layer.vision,
    )
    push = _FAR / layer.scale
    root = push**0.5
    q, k = lay(query, at_q, root, 0.0), lay(key, at_k, 0.0, -root)
    with Context(layers=[wide], device=query.device) as context:
        step = context.step(packed_seq_ids=ids, mm_token_type_ids=types)
        out, lse = attention_with_lse(q, k, lay(value, at_k, 0.0, 0.0), step)
    out = out[:, :, at_q : at_q + seq_q, : layer.head_dim]
    lse = lse[:, :, at_q : at_q + seq_q]
    empty = lse < -_FAR / 2
    return out.masked_fill(empty[..., None], 0), lse.masked_fill(empty, float("-inf"))
