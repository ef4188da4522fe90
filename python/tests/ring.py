"""One rank of a test case: whole tensors in, this rank's shard through ringattn, results out."""

from __future__ import annotations

from typing import Any

import torch

import ringattn
from reference import Case
from world import DEVICE


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


def open_context(group: Any, *layers: ringattn.Layer, **options: Any) -> ringattn.Context:
    """A context on the device that is tested."""
    return ringattn.Context(
        group, layers=layers, **{"device": DEVICE, "timeout_ms": 20_000, **options}
    )


def step_of(context: ringattn.Context, case: Case) -> ringattn.Step:
    """The step of this rank's slice of the case's metadata."""

    def part(name: str) -> torch.Tensor | None:
        whole = case.tensor(name)
        return None if whole is None else cut(context, case, whole, 1)

    length = cut(context, case, torch.zeros(1, case.seq, device="cpu"), 1).shape[1]
    return context.step(
        (case.rows, length),
        packed_seq_ids=part("docs"),
        padding_mask=part("pads"),
        mm_token_type_ids=part("types"),
        layout=case.layout,
    )


def cut(context: ringattn.Context, case: Case, whole: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's part of a whole tensor, on the context's device."""
    part = ringattn.shard(whole, context.rank, context.size, case.layout, dim)
    return part.to(context.device)


def attend(
    context: ringattn.Context, case: Case, step: ringattn.Step, layer: ringattn.Layer | int = 0
) -> list[torch.Tensor]:
    """This rank's out, dq, dk, dv of one call."""
    q, k, v, dout = (cut(context, case, t, 2) for t in case.inputs())
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out = ringattn.attention(*leaves, step, layer)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def run_case(
    rank: int, size: int, group: Any, case: Case, options: dict[str, Any] | None = None
) -> list[torch.Tensor]:
    """The same in a context of its own."""
    layer = layer_of(case)
    with open_context(group, layer, **(options or {})) as context:
        return attend(context, case, step_of(context, case), layer)


def whole_of(case: Case, parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The ranks' results put together."""
    return [ringattn.unshard(list(p), case.layout, 2) for p in zip(*parts)]
