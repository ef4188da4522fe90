"""A NeMo ring context as one of ours: layer kind, context and step of a call, made once and kept.

Contexts are kept by process group, steps by the metadata tensors themselves (held weakly, with
their versions): a tensor at an old address, or one refilled in place, makes a new step. Must not
know hooks.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from ringattn.context import Context, Step
from ringattn.layer import Layer, Vision

DOCUMENTS, PADDING, TYPES = "_packed_seq_ids", "padding_mask", "mm_token_type_ids"
METADATA_KEYS = (TYPES, DOCUMENTS, PADDING)


@dataclass
class CPRingAttentionContext:
    """Inputs of one ring call, as run_cp_manual_attention builds them."""

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cp_mesh: Any
    cp_group: Any
    cp_size: int
    cp_rank: int
    seq_local: int
    seq_full: int
    seq_global_start: int
    attn_mask: Any
    dropout_p: float
    is_causal: bool
    scale: Any
    enable_gqa: bool
    kwargs: dict[str, Any]
    metadata: dict[str, torch.Tensor | None]
    metadata_seq_dims: dict[str, int]


def scale_of(ctx: Any) -> float:
    """The call's scale, or the module's; never a guess."""
    scale = ctx.scale if ctx.scale is not None else getattr(ctx.module, "scaling", None)
    if scale is None:
        raise ValueError("scale: None, and the module has no scaling; expected a number")
    return float(scale)


def window_of(module: Any) -> int:
    return int(getattr(module, "sliding_window", None) or 0)


def vision_of(module: Any) -> Vision:
    mode = getattr(getattr(module, "config", None), "use_bidirectional_attention", None)
    return "over_window" if mode == "vision" and window_of(module) > 0 else "off"


def is_causal(module: Any) -> bool:
    return bool(getattr(module, "is_causal", True))


def layer_of(module: Any, ctx: Any) -> Layer:
    return Layer(
        q_heads=ctx.query.shape[1],
        kv_heads=ctx.key.shape[1],
        head_dim=ctx.query.shape[3],
        scale=scale_of(ctx),
        dtype=ctx.query.dtype,
        causal=is_causal(module),
        window=window_of(module),
        vision=vision_of(module),
        dropout=ctx.dropout_p,
    )


def n_prior(module: Any, ctx: Any) -> int:
    """How many ranks before this one are needed; the window counts the query itself."""
    window = window_of(module)
    if window == 0 or vision_of(module) != "off" or not is_causal(module):
        return int(ctx.cp_size) - 1
    return min(int(ctx.cp_size) - 1, -(-(window - 1) // int(ctx.seq_local)))


def types_of(metadata: dict[str, torch.Tensor | None]) -> torch.Tensor | None:
    """Token types, from block numbers where only those are there: neighbours are one block."""
    groups = metadata.get("vision_group_ids")
    if metadata.get(TYPES) is None and groups is not None:
        return (groups >= 0).to(torch.int32)
    return metadata.get(TYPES)


class _Nobody:
    """Stands for the process group of a single process."""


_NOBODY = _Nobody()
_contexts: weakref.WeakKeyDictionary[Any, dict[Any, Context]] = weakref.WeakKeyDictionary()
_steps: weakref.WeakKeyDictionary[Context, tuple[Any, Step]] = weakref.WeakKeyDictionary()


def context_of(group: Any, layer: Layer, device: torch.device) -> Context:
    """Collective when the layer kind is new to the group."""
    kept = _contexts.setdefault(_NOBODY if group is None else group, {})
    key = (layer, device)
    if key not in kept:
        kept[key] = Context(group, layers=[layer], device=device)
    return kept[key]


def _mark(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else (weakref.ref(tensor), tensor._version)


def _same(marks: Any, tensors: list[torch.Tensor | None]) -> bool:
    return all(
        t is None if mark is None else mark[0]() is t and t is not None and mark[1] == t._version
        for mark, t in zip(marks, tensors)
    )


def step_of(context: Context, ctx: Any) -> Step:
    """The step of the call's metadata; collective when the metadata is new."""
    shape = (int(ctx.query.shape[0]), int(ctx.query.shape[2]))
    named = [ctx.metadata.get(DOCUMENTS), ctx.metadata.get(PADDING), types_of(ctx.metadata)]
    known = _steps.get(context)
    if known is not None and known[0][0] == shape and _same(known[0][1], named):
        return known[1]
    step = context.step(
        shape, packed_seq_ids=named[0], padding_mask=named[1], mm_token_type_ids=named[2]
    )
    if any(t is not None for t in named):
        _steps[context] = ((shape, [_mark(t) for t in named]), step)
    return step


def step_for(module: Any, ctx: Any) -> Step:
    return step_of(
        context_of(
            ctx.cp_group if ctx.cp_size > 1 else None, layer_of(module, ctx), ctx.query.device
        ),
        ctx,
    )
