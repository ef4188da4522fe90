"""Drop-in for nemo_automodel.components.models.gemma4_moe.cp_attention: its documented names.

The work is done by the library: whole calls by its ring, parts by its building blocks. Where the
original is known to be wrong this module is right: see docs/pytorch.md. Private names are here
because programs use them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from ringattn import _c
from ringattn.context import StepCore
from ringattn.call import backward, forward
from ringattn.layer import refuse
from ringattn.nemo import chunks, exchange, ring, rows, segments
from ringattn.nemo.ring import CPRingAttentionContext
from ringattn.nemo.segments import build_packed_ring_segments

logger = logging.getLogger(__name__)

_RING_SEGMENT_CACHE: dict[Any, Any] = segments.RING_SEGMENT_CACHE
_RING_SEGMENT_GEN: list[Any] = segments.RING_SEGMENT_GEN
_BLOCK_MASK_CACHE: dict[Any, Any] = segments.BLOCK_MASK_CACHE
_BLOCK_MASK_GEN: list[Any] = segments.BLOCK_MASK_GEN
_LIVE_ROW_MERGE_MAX_FRACTION = rows.LIVE_ROW_MERGE_MAX_FRACTION
_GEMMA4_CP_FLEX_RING_OK_LOGGED = False

_build_packed_ring_segments = build_packed_ring_segments
_row_single_doc_prefix = segments.row_single_doc_prefix
_row_single_doc_full = segments.row_single_doc_full
_chunk_dense_eligible = segments.chunk_dense_eligible
_cached_ring_segments = segments.cached_ring_segments
_gather_thd = rows.gather_thd
_scatter_thd = rows.scatter_thd
_gather_lse = rows.gather_lse
_scatter_lse = rows.scatter_lse
_grad_add_live_ = rows.grad_add_live_
_merge_flex_chunk = rows.merge
_merge_ffpa_packed_chunk = rows.merge
_merge_live_chunk_ = rows.merge_live_chunk_
_use_live_row_merge = rows.use_live_row_merge
_direct_exchange = exchange.direct_exchange
_ring_exchange = exchange.ring_exchange
_metadata_like = exchange.metadata_like
_detach_metadata = exchange.detach_metadata
_route_kv_grads_to_owners = exchange.route_to_owners
_zero_if_none = exchange.zero_if_none


def _ring_segment_set_generation(gen_tensor: torch.Tensor) -> None:
    segments.set_generation(_RING_SEGMENT_CACHE, _RING_SEGMENT_GEN, gen_tensor)


def _block_mask_set_generation(gen_tensor: Any) -> None:
    segments.set_generation(_BLOCK_MASK_CACHE, _BLOCK_MASK_GEN, gen_tensor)


def _cached_block_mask(key: Any, build: Callable[[], Any]) -> Any:
    return segments.cached(_BLOCK_MASK_CACHE, key, build)


def gemma4_vision_group_ids(mm_token_type_ids: torch.Tensor) -> torch.Tensor:
    """Block numbers of vision tokens of whole rows, -1 elsewhere. A shard alone cannot know
    them."""
    types = mm_token_type_ids
    narrow = ((types == 1) | (types == 2)).to(device="cpu", dtype=torch.int32).contiguous()
    groups = torch.empty_like(narrow)
    _c.check(
        _c.lib.ra_vision_groups(
            narrow.data_ptr(), narrow.shape[0], narrow.shape[1], groups.data_ptr()
        )
    )
    return groups.to(types.device)


def _base_gemma4_cp_mask(
    attention_module: torch.nn.Module, ctx: Any, q_idx: Any, kv_idx: Any, kv_global_start: int = 0
) -> Any:
    """The causal and window part of the mask, on global positions; indices may be tensors."""
    age = (q_idx + ctx.seq_global_start) - (kv_idx + kv_global_start)
    window = ring.window_of(attention_module)
    allowed = age >= 0 if ring.is_causal(attention_module) else age == age
    return allowed & (age < window) if window > 0 else allowed


@contextlib.contextmanager
def _duck_shape_disabled() -> Iterator[None]:
    """Nothing to disable: kernels are compiled ahead of time, for every length."""
    yield


def _compiled_flex_attention(attention_module: torch.nn.Module) -> Callable[..., Any]:
    """The chunk function of a module; nothing is compiled at run time."""
    return functools.partial(_run_gemma4_flex_chunk, attention_module)


def _ids_and_types(
    metadata: dict[str, torch.Tensor | None], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    ids, pads = metadata.get(ring.DOCUMENTS), metadata.get(ring.PADDING)
    if ids is None:
        ids = torch.ones(like.shape[0], like.shape[2], dtype=torch.int32, device=like.device)
    return ids if pads is None else ids.masked_fill(pads, 0), ring.types_of(metadata)


def _run_gemma4_flex_chunk(
    attention_module: torch.nn.Module,
    ctx: Any,
    key_chunk: torch.Tensor,
    value_chunk: torch.Tensor,
    metadata_chunk: dict[str, torch.Tensor | None],
    kv_global_start: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]:
    """out, lse, the rows [B, S] that see no key of the chunk (None if all see one), and the head
    dimension, which is never padded."""
    layer = ring.layer_of(attention_module, ctx)
    q_ids, q_types = _ids_and_types(ctx.metadata, ctx.query)
    k_ids, k_types = _ids_and_types(metadata_chunk, key_chunk)
    q_start = int(ctx.seq_global_start)
    if layer.window == 0 and layer.causal and q_start != kv_global_start:
        out, lse = _global_chunk(
            layer.scale, ctx, key_chunk, value_chunk, q_ids, k_ids, kv_global_start
        )
    else:
        with torch.no_grad():
            out, lse = chunks.masked_chunk(
                ctx.query,
                key_chunk,
                value_chunk,
                layer,
                q_start,
                kv_global_start,
                q_ids,
                k_ids,
                q_types,
                k_types,
            )
    empty = torch.isneginf(lse).all(1)
    return out, lse, empty if bool(empty.any()) else None, int(ctx.query.shape[3])


def _global_chunk(
    scale: float,
    ctx: Any,
    key_chunk: torch.Tensor,
    value_chunk: torch.Tensor,
    q_ids: torch.Tensor,
    k_ids: torch.Tensor,
    kv_global_start: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Another rank's chunk under a causal mask: all of it lies before the queries, or none."""
    batch, heads, seq, _ = ctx.query.shape
    seg = (
        build_packed_ring_segments(q_ids, k_ids) if kv_global_start < ctx.seq_global_start else None
    )
    if seg is None:
        lse = ctx.query.new_full((batch, heads, seq), float("-inf"), dtype=torch.float32)
        return torch.zeros_like(ctx.query), lse
    q = rows.gather_thd(ctx.query, seg["q_index"])
    k = rows.gather_thd(key_chunk, seg["k_index"])
    v = rows.gather_thd(value_chunk, seg["k_index"])
    out, lse = chunks.varlen_forward(q, k, v, seg, scale, False)
    return (
        rows.scatter_thd(out, seg["q_index"], batch, heads, seq),
        rows.scatter_lse(lse, seg["q_index"], batch, heads, seq),
    )


def _ffpa_varlen_forward_chunk(
    q_pack: torch.Tensor,
    k_pack: torch.Tensor,
    v_pack: torch.Tensor,
    seg: dict[str, Any],
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return chunks.varlen_forward(q_pack, k_pack, v_pack, seg, scale, causal)


def _ffpa_varlen_backward_chunk(
    grad_out_pack: torch.Tensor,
    q_pack: torch.Tensor,
    k_pack: torch.Tensor,
    v_pack: torch.Tensor,
    out_pack: torch.Tensor,
    lse_pack: torch.Tensor,
    seg: dict[str, Any],
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return chunks.varlen_backward(
        grad_out_pack, q_pack, k_pack, v_pack, out_pack, lse_pack, seg, scale, causal
    )


def _ffpa_varlen_ring_available() -> bool:
    """Varlen attention is part of the library."""
    return True


def _ring_use_ffpa_varlen(attention_module: torch.nn.Module, ctx: Any) -> bool:
    """Depends on the configuration and on the presence of a document map, never on a rank's slice.
    Both answers lead to the same results."""
    return (
        bool(getattr(attention_module, "_cp_use_ffpa", False))
        and ring.window_of(attention_module) == 0
        and ctx.query.shape[3] == 512
        and ctx.query.dtype in (torch.bfloat16, torch.float16)
        and ctx.metadata.get(ring.DOCUMENTS) is not None
        and _ffpa_varlen_ring_available()
    )


def _collect_ring_kv_chunks(ctx: Any) -> list[exchange.Chunk]:
    return exchange.collect(
        ctx.key,
        ctx.value,
        ctx.metadata,
        ring.n_prior(ctx.module, ctx),
        ctx.cp_group,
        ctx.cp_rank,
        ctx.cp_size,
    )


class _RingAttention(torch.autograd.Function):
    """What both rings of the reference are here: one call of the library in each direction."""

    @staticmethod
    def forward(
        autograd_ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ring_ctx: Any,
    ) -> torch.Tensor:
        core: StepCore = ring.step_for(ring_ctx.module, ring_ctx).core
        query, key, value = (
            t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value)
        )
        out, lse, _ = forward(query, key, value, core, 0)
        autograd_ctx.save_for_backward(query, key, value, out, lse)
        autograd_ctx.core = core
        return out

    @staticmethod
    def backward(
        autograd_ctx: Any, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        q, k, v, out, lse = autograd_ctx.saved_tensors
        return (*backward(grad_output, q, k, v, out, lse, autograd_ctx.core, 0), None)


class _Gemma4FFPAVarlenRingAttention(_RingAttention):
    """The global ring."""


class _Gemma4FlexRingAttention(_RingAttention):
    """The masked ring."""


class _Gemma4LocalKernelRingAttention(_RingAttention):
    """The sliding ring."""


def _run_gemma4_cp_ffpa_varlen_ring_forward(
    ctx: Any, seg_sink: dict[int, Any] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in f32; seg_sink gets the segments of every owner that shares a document."""
    step = ring.step_for(ctx.module, ctx)
    out, lse, _ = forward(ctx.query.detach(), ctx.key.detach(), ctx.value.detach(), step.core, 0)
    if seg_sink is not None:
        ids, _ = _ids_and_types(ctx.metadata, ctx.query)
        everyone = step.context.gather_rows(rows.host(ids))
        for owner in range(int(ctx.cp_rank) + 1):
            k_ids = everyone.narrow(1, owner * int(ctx.seq_local), int(ctx.seq_local))
            seg = build_packed_ring_segments(ids, k_ids)
            if seg is not None:
                seg_sink[owner] = seg
    return out.float(), lse


def _run_gemma4_cp_ring_attention_forward(
    attention_module: torch.nn.Module, ctx: Any
) -> torch.Tensor:
    step = ring.step_for(attention_module, ctx)
    return forward(ctx.query.detach(), ctx.key.detach(), ctx.value.detach(), step.core, 0)[0]


def _run_gemma4_cp_ring_attention(attention_module: torch.nn.Module, ctx: Any) -> torch.Tensor:
    kind: Any = _Gemma4FlexRingAttention
    if _ring_use_ffpa_varlen(attention_module, ctx):
        kind = _Gemma4FFPAVarlenRingAttention
    elif ring.window_of(attention_module) > 0 and ring.vision_of(attention_module) == "off":
        kind = _Gemma4LocalKernelRingAttention
    out: torch.Tensor = kind.apply(ctx.query, ctx.key, ctx.value, ctx)
    return out


def _group_of(cp_mesh: Any) -> tuple[Any, int, int]:
    group = cp_mesh.get_group() if hasattr(cp_mesh, "get_group") else cp_mesh
    if group is None:
        return None, 0, 1
    return group, torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


def _gemma4_cp_manual_attention(
    attention_module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cp_mesh: Any,
    attn_mask: Any,
    dropout_p: Any,
    is_causal: Any,
    scale: Any,
    enable_gqa: Any,
    kwargs: Any,
) -> torch.Tensor:
    """This rank's queries on every rank's keys; q, k and v are shards of equal length."""
    global _GEMMA4_CP_FLEX_RING_OK_LOGGED
    refuse(attn_mask=attn_mask, dropout_p=dropout_p)
    group, rank, size = _group_of(cp_mesh)
    known: dict[str, Any] = getattr(attention_module, "_cp_manual_metadata", None) or {}
    metadata = {**known, **{k: v for k, v in (kwargs or {}).items() if k in ring.METADATA_KEYS}}
    seq = int(query.shape[2])
    ctx = CPRingAttentionContext(
        module=attention_module,
        query=query,
        key=key,
        value=value,
        cp_mesh=cp_mesh,
        cp_group=group,
        cp_size=size,
        cp_rank=rank,
        seq_local=seq,
        seq_full=seq * size,
        seq_global_start=seq * rank,
        attn_mask=attn_mask,
        dropout_p=float(dropout_p or 0.0),
        is_causal=bool(is_causal),
        scale=scale,
        enable_gqa=bool(enable_gqa),
        kwargs=kwargs or {},
        metadata=metadata,
        metadata_seq_dims={name: 1 for name in metadata},
    )
    out = _run_gemma4_cp_ring_attention(attention_module, ctx)
    if not _GEMMA4_CP_FLEX_RING_OK_LOGGED:
        _GEMMA4_CP_FLEX_RING_OK_LOGGED = True
        logger.info("ring attention runs through ringattn %s", _c.version())
    return out


def _install_gemma4_cp_ring_sdpa(attention_module: torch.nn.Module, cp_mesh: Any) -> None:
    """While the module's forward runs, F.scaled_dot_product_attention is the ring; also in
    recomputation, because the forward itself is wrapped."""
    inner: Any = attention_module.forward

    def sdpa(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        return _gemma4_cp_manual_attention(
            attention_module,
            query,
            key,
            value,
            cp_mesh,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            kwargs,
        )

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        metadata = {k: v for k, v in kwargs.items() if k in ring.METADATA_KEYS}
        attention_module._cp_manual_metadata = metadata  # type: ignore[assignment]
        usual = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = sdpa
        try:
            return inner(*args, **kwargs)
        finally:
            F.scaled_dot_product_attention = usual

    attention_module.forward = forward


def attach_gemma4_cp_ring_attention(
    attention_module: torch.nn.Module, use_ffpa: bool = False
) -> None:
    """Gives a self-attention module setup_cp_attention(cp_mesh) and run_cp_manual_attention."""
    module: Any = attention_module
    module._cp_use_ffpa = use_ffpa
    module._cp_manual_metadata_keys = ring.METADATA_KEYS
    module.setup_cp_attention = functools.partial(_install_gemma4_cp_ring_sdpa, attention_module)
    module.run_cp_manual_attention = functools.partial(
        _gemma4_cp_manual_attention, attention_module
    )


def _patch_fsdp_accumulated_grad_guard() -> None:
    """FSDP2: a parameter that was never unsharded has no gradient to accumulate."""
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_param
    except ImportError:
        return
    parameter: Any = getattr(_fsdp_param, "FSDPParam", None)
    original: Any = getattr(parameter, "to_accumulated_grad_if_needed", None)
    if original is None or getattr(original, "_ringattn_guard", False):
        return

    @functools.wraps(original)
    def guarded(self: Any) -> None:
        if hasattr(self, "_unsharded_param"):
            original(self)

    guarded._ringattn_guard = True  # type: ignore[attr-defined]
    parameter.to_accumulated_grad_if_needed = guarded


_patch_fsdp_accumulated_grad_guard()
