"""One rank of a test case: whole tensors in, this rank's shard through ringattn, results out."""

from __future__ import annotations

from typing import Any

import torch

import ringattn
from reference import Case


def layer_of(case: Case, **changes: Any) -> ringattn.Layer:
    values: dict[str, Any] = {
        "q_heads": case.q_heads,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "scale": case.scale,
        "dtype": case.dtype,
        "causal": case.causal,
        "window": case.window,
        "vision": case.vision,
    }
    return ringattn.Layer(**{**values, **changes})


def step_of(context: ringattn.Context, case: Case) -> ringattn.Step:
    """The step of this rank's slice of the case's metadata."""

    def part(name: str) -> torch.Tensor | None:
        whole = case.tensor(name)
        return None if whole is None else cut(context, case, whole, 1)

    length = cut(context, case, torch.zeros(1, case.seq), 1).shape[1]
    return context.step(
        (case.rows, length),
        packed_seq_ids=part("docs"),
        padding_mask=part("pads"),
        mm_token_type_ids=part("types"),
        layout=case.layout,
    )


def cut(context: ringattn.Context, case: Case, whole: torch.Tensor, dim: int) -> torch.Tensor:
    return ringattn.shard(whole, context.rank, context.size, case.layout, dim)


def run_case(rank: int, size: int, group: Any, case: Case) -> list[torch.Tensor]:
    """This rank's out, dq, dk, dv."""
    layer = layer_of(case)
    with ringattn.Context(group, layers=[layer], timeout_ms=20_000) as context:
        step = step_of(context, case)
        q, k, v, dout = (cut(context, case, t, 2) for t in case.inputs())
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        out = ringattn.attention(*leaves, step, layer)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def whole_of(case: Case, parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The ranks' results put together."""
    return [ringattn.unshard(list(p), case.layout, 2) for p in zip(*parts)]
