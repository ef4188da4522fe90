"""Drop-in for nemo_automodel.components.models.gemma4_moe.cp_local_ring: its documented names.

The collected chunks up to this rank's own become one neighbourhood whose suffix are the queries. It
is computed on its real positions: padding or another document between two tokens does not shorten
their distance. Must not know communication.
"""

from __future__ import annotations

from typing import Any

import torch

from ringattn.context import Context
from ringattn.call import backward, forward
from ringattn.nemo import chunks as chunk_math
from ringattn.nemo import ring, segments
from ringattn.nemo.segments import build_packed_ring_segments

Owned = dict[int, torch.Tensor]


def _scale_of(ctx: Any) -> float:
    return ring.scale_of(ctx)


def _fold_pad(ids: torch.Tensor, pm: torch.Tensor | None) -> torch.Tensor:
    """Padding becomes document 0; without a mask the same tensor."""
    return ids if pm is None else ids.masked_fill(pm, 0)


def _concat_neighborhood(
    ctx: Any, chunks: list[Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, list[int]]:
    """k, v, ids (None if unpacked and unpadded) and owners of the chunks up to this rank,
    ascending."""
    valid = sorted((c for c in chunks if c[0] <= ctx.cp_rank), key=lambda c: int(c[0]))
    ids = []
    for _, key, _, metadata in valid:
        own, pads = metadata.get(ring.DOCUMENTS), metadata.get(ring.PADDING)
        if own is None and pads is not None:
            own = torch.ones(key.shape[0], key.shape[2], dtype=torch.int32, device=key.device)
        ids.append(None if own is None else _fold_pad(own, pads))
    known = [t for t in ids if t is not None]
    return (
        torch.cat([c[1] for c in valid], 2),
        torch.cat([c[2] for c in valid], 2),
        torch.cat(known, 1) if len(known) == len(ids) else None,
        [int(c[0]) for c in valid],
    )


def _cached_sliding_segments(
    ctx: Any, folded_q_ids: torch.Tensor, folded_nb_ids: torch.Tensor, lo: int
) -> Any:
    """Segments of the queries and the neighbourhood, once a step; lo is the first owner."""
    segments.set_generation(
        segments.RING_SEGMENT_CACHE, segments.RING_SEGMENT_GEN, ctx.metadata[ring.DOCUMENTS]
    )
    key = ("sliding", ctx.cp_rank, ctx.cp_size, lo, *folded_q_ids.shape, folded_nb_ids.shape[1])
    return segments.cached(
        segments.RING_SEGMENT_CACHE,
        key,
        lambda: build_packed_ring_segments(folded_q_ids, folded_nb_ids),
    )


def _window(win: Any) -> tuple[int, int]:
    """FlashAttention's (left, right) window, the query itself not counted, -1 = none, as ours."""
    left, right = win if isinstance(win, (tuple, list)) else (win, 0)
    return 0 if left < 0 else int(left) + 1, 0 if right < 0 else int(right) + 1


def _fa_ll_varlen_fwd(
    qp: torch.Tensor, kp: torch.Tensor, vp: torch.Tensor, seg: Any, scale: Any, win: Any
) -> tuple[torch.Tensor, Any]:
    """out [T, Hq, D] and what the backward needs."""
    left, right = _window(win)
    causal = right == 1
    out, lse = chunk_math.varlen_forward(
        qp, kp, vp, seg, float(scale), causal, left, 0 if causal else right
    )
    return out, (qp, kp, vp, out, lse)


def _fa_ll_varlen_bwd(
    dout_p: torch.Tensor, st: Any, seg: Any, scale: Any, win: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    left, right = _window(win)
    causal = right == 1
    q, k, v, out, lse = st
    return chunk_math.varlen_backward(
        dout_p, q, k, v, out, lse, seg, float(scale), causal, left, 0 if causal else right
    )


def _rows_as_segments(q: torch.Tensor, k: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every batch row of [B, S, H, D] tensors is a segment."""
    return {
        name: torch.arange(t.shape[0] + 1, dtype=torch.int32, device="cpu") * t.shape[1]
        for name, t in (("cu_q", q), ("cu_k", k))
    }


def _fa_ll_dense_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: Any, win: Any
) -> tuple[torch.Tensor, Any]:
    """FlashAttention's layout: [B, S, H, D]."""
    seg = _rows_as_segments(q, k)
    out, state = _fa_ll_varlen_fwd(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), seg, scale, win
    )
    return out.view(q.shape), (state, q.shape, k.shape)


def _fa_ll_dense_bwd(
    grad_out: torch.Tensor, st: Any, scale: Any, win: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    state, q_shape, k_shape = st
    seg = _rows_as_segments(
        torch.empty(q_shape, device="meta"), torch.empty(k_shape, device="meta")
    )
    dq, dk, dv = _fa_ll_varlen_bwd(grad_out.flatten(0, 1), state, seg, scale, win)
    return dq.view(q_shape), dk.view(k_shape), dv.view(k_shape)


def _owner_grad_dict(
    per_owner: Owned, cp_rank: int, cp_size: int, n_prior: int, zeros_like: torch.Tensor
) -> Owned:
    """Every owner at a distance of 0 to n_prior, zeros where it was not attended."""
    owners = [(cp_rank - distance) % cp_size for distance in range(n_prior + 1)]
    return {
        owner: per_owner[owner] if owner in per_owner else torch.zeros_like(zeros_like)
        for owner in owners
    }


def sliding_ring_compute_fa_fwd(ctx: Any, chunks: list[Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """out [B, Hq, S, D] over the collected chunks, and what the backward needs."""
    k_nb, v_nb, nb_ids, owners = _concat_neighborhood(ctx, chunks)
    seq, whole = ctx.query.shape[2], k_nb.shape[2]
    # The rows of other ranks are no queries here: zeros in, nothing out, no gradient.
    query = ctx.query.new_zeros(*ctx.query.shape[:2], whole, ctx.query.shape[3])
    query[:, :, whole - seq :] = ctx.query.detach()
    context: Context = ring.context_of(None, ring.layer_of(ctx.module, ctx), query.device)
    step = context.step((query.shape[0], whole), packed_seq_ids=nb_ids)
    out, lse, _ = forward(query, k_nb, v_nb, step.core, 0)
    saved = {
        "tensors": (query, k_nb, v_nb, out, lse),
        "core": step.core,
        "owners": owners,
        "seq": seq,
        "cp_rank": ctx.cp_rank,
        "cp_size": ctx.cp_size,
        "n_prior": ring.n_prior(ctx.module, ctx),
    }
    return out[:, :, whole - seq :], saved


def sliding_ring_compute_fa_bwd(
    saved: dict[str, Any], grad_out: torch.Tensor
) -> tuple[torch.Tensor, Owned, Owned]:
    """dq and the maps owner -> dK, dV that _route_kv_grads_to_owners takes."""
    query, k_nb, v_nb, out, lse = saved["tensors"]
    seq = saved["seq"]
    whole = query.shape[2]
    dout = torch.zeros_like(query)
    dout[:, :, whole - seq :] = grad_out
    dq, dk, dv = backward(dout, query, k_nb, v_nb, out, lse, saved["core"], 0)

    def by_owner(gradient: torch.Tensor) -> Owned:
        parts = {owner: gradient.narrow(2, i * seq, seq) for i, owner in enumerate(saved["owners"])}
        return _owner_grad_dict(
            parts, saved["cp_rank"], saved["cp_size"], saved["n_prior"], gradient[:, :, :seq]
        )

    return dq[:, :, whole - seq :], by_owner(dk), by_owner(dv)
