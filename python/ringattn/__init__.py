"""ringattn: exact context-parallel (ring) attention for PyTorch, forward and backward.

    layer = ringattn.Layer(q_heads=8, kv_heads=2, head_dim=256, scale=1.0, dtype=torch.bfloat16)
    ctx = ringattn.Context(group, layers=[layer])            # once; collective
    step = ctx.step(packed_seq_ids=ids)                      # once a batch; collective
    out = ringattn.attention(q, k, v, step, layer)           # every layer; collective

Names are loaded when they are first used, so that `python -m ringattn.info` can say what is missing
where torch is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ringattn.errors import (
    ArgumentError,
    CommError,
    DeviceError,
    MemoryExhausted,
    MismatchError,
    RingattnError,
    ShapeError,
    UnavailableError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from ringattn.balance import balanced_runs
    from ringattn.context import Context, Step
    from ringattn.function import attention, attention_with_lse
    from ringattn.layer import Layer
    from ringattn.shards import (
        documents_of_positions,
        position_ids,
        shard,
        shard_runs,
        shift_labels,
        unshard,
    )
    from ringattn.transformers import Ring, register

__version__ = "0.1.0"

_HOME = {
    "balanced_runs": "balance",
    "Context": "context",
    "Step": "context",
    "attention": "function",
    "attention_with_lse": "function",
    "Layer": "layer",
    "documents_of_positions": "shards",
    "position_ids": "shards",
    "shard": "shards",
    "shard_runs": "shards",
    "shift_labels": "shards",
    "unshard": "shards",
    "Ring": "transformers",
    "register": "transformers",
}

__all__ = [
    "ArgumentError",
    "CommError",
    "Context",
    "DeviceError",
    "Layer",
    "MemoryExhausted",
    "MismatchError",
    "Ring",
    "RingattnError",
    "ShapeError",
    "Step",
    "UnavailableError",
    "UnsupportedError",
    "attention",
    "attention_with_lse",
    "balanced_runs",
    "documents_of_positions",
    "position_ids",
    "register",
    "shard",
    "shard_runs",
    "shift_labels",
    "unshard",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"ringattn.{_HOME[name]}"), name)
    raise AttributeError(f"module 'ringattn' has no attribute {name!r}")
