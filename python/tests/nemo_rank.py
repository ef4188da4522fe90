"""One rank of a NeMo ring: its ring context and gradient from the whole tensors of a case."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from reference import Case
from ringattn.nemo import cp_attention as cp
from world import DEVICE

RING_CASES = {
    "global": Case(docs=[[1] * 7 + [2] * 5]),
    "sliding": Case(
        window=4, docs=[[1] * 3 + [2] * 3 + [1] * 6], pads=[[False] * 4 + [True] + [False] * 7]
    ),
    "images": Case(window=3, vision="over_window", types=[[0, 1, 1, 1, 1, 1, 0, 0, 2, 2, 2, 2]]),
    "batch": Case(rows=2, docs=[[1] * 6 + [2] * 6, [2] * 12]),
    "bf16": Case(dtype=torch.bfloat16, window=5),
}


def module_of(case: Case, **values: Any) -> Any:
    config = SimpleNamespace(use_bidirectional_attention="vision" if case.vision != "off" else None)
    known: dict[str, Any] = {
        "sliding_window": case.window or None,
        "scaling": case.scale,
        "is_causal": case.causal,
        "config": config,
    }
    return SimpleNamespace(**{**known, **values})


def ctx_of(
    case: Case, rank: int, size: int, group: Any, module: Any = None
) -> cp.CPRingAttentionContext:
    seq = case.seq // size
    part = slice(rank * seq, (rank + 1) * seq)
    q, k, v = (t[:, :, part].to(DEVICE) for t in case.inputs()[:3])
    metadata = {
        "_packed_seq_ids": case.tensor("docs"),
        "padding_mask": case.tensor("pads"),
        "mm_token_type_ids": case.tensor("types"),
    }
    cut = {
        n: None if t is None else t[:, part].contiguous().to(DEVICE) for n, t in metadata.items()
    }
    return cp.CPRingAttentionContext(
        module=module or module_of(case),
        query=q,
        key=k,
        value=v,
        cp_mesh=None,
        cp_group=group,
        cp_size=size,
        cp_rank=rank,
        seq_local=seq,
        seq_full=case.seq,
        seq_global_start=rank * seq,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=True,
        scale=None,
        enable_gqa=True,
        kwargs={},
        metadata=cut,
        metadata_seq_dims={},
    )


def dout_of(case: Case, ctx: cp.CPRingAttentionContext) -> torch.Tensor:
    part = slice(ctx.seq_global_start, ctx.seq_global_start + ctx.seq_local)
    return case.inputs()[3][:, :, part].to(DEVICE)
