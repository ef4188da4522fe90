"""Per-document segments of a query shard and a key chunk, and the bounded caches around them.

A cache belongs to a generation: a metadata tensor, held weakly and with its version, so that
neither a new tensor at an old address nor one refilled in place finds an old entry. Must not know
tensors of attention.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ringattn import _c
from ringattn.nemo.rows import host

CACHE_MAX = 256
RING_SEGMENT_CACHE: dict[Any, Any] = {}
RING_SEGMENT_GEN: list[Any] = [None, None]
BLOCK_MASK_CACHE: dict[Any, Any] = {}
BLOCK_MASK_GEN: list[Any] = [None, None]


def _array(pointer: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    result = torch.empty(count, dtype=dtype, device="cpu")
    if count > 0:
        ctypes.memmove(result.data_ptr(), pointer, count * result.element_size())
    return result


def build_packed_ring_segments(q_ids: torch.Tensor, k_ids: torch.Tensor) -> dict[str, Any] | None:
    """q_index, k_index, cu_q, cu_k, max_q, max_k, dense_local, dense_cross and pad_rows; None where
    no document is shared."""
    q, k = (host(t).clamp(min=0).to(torch.int32).contiguous() for t in (q_ids, k_ids))
    found = _c.Segments()
    _c.check(
        _c.lib.ra_segments_build(
            q.data_ptr(), q.shape[1], k.data_ptr(), k.shape[1], q.shape[0], ctypes.byref(found)
        )
    )
    try:
        if found.count == 0:
            return None
        pads = None
        if found.pad_rows:
            pads = _array(found.pad_rows, q.numel(), torch.uint8).view(q.shape).bool()
            pads = pads.to(q_ids.device)
        arrays = {
            "q_index": _array(found.q_index, found.q_total, torch.int64),
            "k_index": _array(found.k_index, found.k_total, torch.int64),
            "cu_q": _array(found.cu_q, found.count + 1, torch.int32),
            "cu_k": _array(found.cu_k, found.count + 1, torch.int32),
        }
        return {name: array.to(q_ids.device) for name, array in arrays.items()} | {
            "max_q": int(found.max_q),
            "max_k": int(found.max_k),
            "dense_local": bool(found.dense_local),
            "dense_cross": bool(found.dense_cross),
            "pad_rows": pads,
        }
    finally:
        _c.lib.ra_segments_free(ctypes.byref(found))


def row_single_doc_prefix(row: list[int]) -> bool:
    """One document as a prefix, then only padding; an all-padding row is not."""
    ids = torch.tensor([row], device="cpu")
    segments = build_packed_ring_segments(ids, ids)
    return segments is not None and bool(segments["dense_local"])


def row_single_doc_full(row: list[int]) -> bool:
    """One document and no padding."""
    ids = torch.tensor([row], device="cpu")
    segments = build_packed_ring_segments(ids, ids)
    return segments is not None and bool(segments["dense_cross"])


def set_generation(
    cache: dict[Any, Any], generation: list[Any], tensor: torch.Tensor | None
) -> None:
    """Empties the cache unless tensor is the very one that it was filled for, unchanged."""
    known = generation[0]() if generation[0] is not None else None
    version = None if tensor is None else tensor._version
    if tensor is not None and known is tensor and generation[1] == version:
        return
    cache.clear()
    generation[:] = [None if tensor is None else weakref.ref(tensor), version]


def cached(cache: dict[Any, Any], key: Any, build: Callable[[], Any]) -> Any:
    """The entry of a key, also None; the oldest goes when the cache is full."""
    if key not in cache:
        value = build()
        while len(cache) >= CACHE_MAX:
            del cache[next(iter(cache))]
        cache[key] = value
    return cache[key]


def cached_ring_segments(
    q_ids: torch.Tensor, k_ids: torch.Tensor, cp_rank: int, owner: int, cp_size: int
) -> dict[str, Any] | None:
    """build_packed_ring_segments, once a step for each owner."""
    set_generation(RING_SEGMENT_CACHE, RING_SEGMENT_GEN, q_ids)
    key = (cp_rank, owner, cp_size, q_ids.shape[0], q_ids.shape[1], k_ids.shape[1])
    found: dict[str, Any] | None = cached(
        RING_SEGMENT_CACHE, key, lambda: build_packed_ring_segments(q_ids, k_ids)
    )
    return found


def chunk_dense_eligible(seg: dict[str, Any], causal: bool) -> bool:
    """The flag of the chunk's role: a local chunk runs causally, a cross chunk does not."""
    return bool(seg["dense_local"] if causal else seg["dense_cross"])
