"""ringattn.attention: the operation on torch tensors, differentiable.

In eager mode an autograd function, under torch.compile a pair of custom operators; both end in the
same two calls of the library (call.py). Nothing is kept for the backward but q, k, v, out, lse, the
step and, with keep_kv, the rows that were received.
Must not know models.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.autograd.function import once_differentiable

from ringattn.call import Call, backward, forward
from ringattn.context import Step, step_of
from ringattn.layer import Layer
from ringattn.view import signature_of


def _gradients(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, lse, *kept = ctx.saved_tensors
    call = ctx.call
    return (*backward(dout, q, k, v, out, lse, call.core, call.index, kept), None)


class _Attention(torch.autograd.Function):
    """Eager mode. The saved step lives as long as the graph."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, kept = call.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse, *kept)
        ctx.call = call
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # of lse: it has none
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, _dlse: Any) -> tuple[torch.Tensor | None, ...]:
        # once_differentiable costs as much as all of ours; only create_graph needs its refusal.
        if torch.is_grad_enabled():
            return _gradients_once(ctx, dout)
        return _gradients(ctx, dout)


_gradients_once = once_differentiable(_gradients)


@torch.library.custom_op("ringattn::attend", mutates_args=())
def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: torch.Tensor, layer: int, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse, kept_k, kept_v; keep: does the step's context keep rows?"""
    out, lse, kept = forward(q, k, v, step_of(step), layer)
    kept_k, kept_v = kept or (k.new_empty(0), k.new_empty(0))
    return out, lse, kept_k, kept_v


@_attend.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: torch.Tensor, layer: int, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    shape: list[Any] = [0]
    if keep:
        # How many rows a step brings is not known to the graph, which serves every step.
        shape = [1, k.shape[1], torch.library.get_ctx().new_dynamic_size(), k.shape[3]]
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    return torch.empty_like(q), lse, k.new_empty(shape), k.new_empty(shape)


@torch.library.custom_op("ringattn::attend_backward", mutates_args=())
def _attend_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    kept_k: torch.Tensor,
    kept_v: torch.Tensor,
    step: torch.Tensor,
    layer: int,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kept = (kept_k, kept_v) if keep else ()
    return backward(dout, q, k, v, out, lse, step_of(step), layer, kept)


@_attend_backward.register_fake
def _(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    kept_k: torch.Tensor,
    kept_v: torch.Tensor,
    step: torch.Tensor,
    layer: int,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, step, ctx.layer, ctx.keep = inputs
    ctx.save_for_backward(q, k, v, *output, step)
    ctx.mark_non_differentiable(*output[1:])


def _attend_gradients(ctx: Any, dout: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    saved = ctx.saved_tensors
    dq, dk, dv = torch.ops.ringattn.attend_backward(dout, *saved, ctx.layer, ctx.keep)
    return dq, dk, dv, None, None, None


_attend.register_autograd(_attend_gradients, setup_context=_save)


def _refuse_types(step: Any, **tensors: Any) -> NoReturn:
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}: {type(value).__name__}, expected a tensor")
    raise TypeError(f"step: {type(step).__name__}, expected what Context.step returns")


def _index_of(step: Step, layer: Layer | int) -> int:
    if isinstance(layer, int):
        if not 0 <= layer < len(step.layers):
            raise IndexError(f"layer: {layer}, expected 0 to {len(step.layers) - 1}")
        return layer
    for index, known in enumerate(step.layers):
        if known is layer or known == layer:
            return index
    raise ValueError(f"layer: {layer}, expected one of the context's: {step.layers}")


def _with_unit_channels(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The library wants the channels of a head side by side; all other strides are free. A scalar
    has no channels: the call refuses it by name."""
    return [t if t.dim() == 0 or t.stride(-1) == 1 else t.contiguous() for t in tensors]


def attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: Step, layer: Layer | int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse [rows, q_heads, seq_local] (f32, natural log, -inf where no key is allowed, no
    gradient)."""
    tensor = torch.Tensor
    if not (
        isinstance(q, tensor)
        and isinstance(k, tensor)
        and isinstance(v, tensor)
        and isinstance(step, Step)
    ):
        _refuse_types(step, q=q, k=k, v=v)
    index = _index_of(step, layer)
    if torch.is_autocast_enabled(step.device_type):
        dtype = step.layers[index].dtype
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if torch.compiler.is_compiling():
        q, k, v = _with_unit_channels(q, k, v)
        out, lse, _, _ = torch.ops.ringattn.attend(q, k, v, step.handle, index, step.keep_kv)
        return out, lse
    call = step.calls[index]
    if call is None or call.signature != signature_of(q, k, v):
        q, k, v = _with_unit_channels(q, k, v)
        call = step.calls[index] = Call(step.core, index, q, k, v)
    out, lse = _Attention.apply(q, k, v, call)
    return out, lse


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: Step, layer: Layer | int = 0
) -> torch.Tensor:
    """Exact attention of this rank's queries over every rank's keys. Collective.

    q: [rows, q_heads, seq_local, head_dim]; k, v: [rows, kv_heads, seq_local, head_dim], of the
    layer's dtype; any strides. The result is like q. Its gradients are those of the sum of all
    ranks' losses, never scaled by the number of ranks. Under autocast q, k and v are cast to the
    layer's dtype; elsewhere another dtype is refused.
    """
    return attention_with_lse(q, k, v, step, layer)[0]
