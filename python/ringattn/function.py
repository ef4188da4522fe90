"""ringattn.attention: the operation on torch tensors, differentiable.

In eager mode an autograd function, under torch.compile a pair of custom operators; both end in the
same two calls of the library. Nothing is kept for the backward but q, k, v, out, lse and the step.
Must not know models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ringattn import _c
from ringattn.context import Step, StepCore, step_of
from ringattn.errors import ShapeError
from ringattn.layer import Layer
from ringattn.view import backward_io, forward_io


def _check_device(core: StepCore, **tensors: torch.Tensor) -> None:
    backend = core.core.backend
    for name, tensor in tensors.items():
        if tensor.device.type != backend.device.type:
            raise ShapeError(
                _c.RA_E_SHAPE,
                "RA_E_SHAPE",
                f"{name}: on device {tensor.device}, expected {backend.device}, where the "
                f"context's backend ({backend.name}) runs",
            )


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, core: StepCore, index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if core.core.closed:
        raise RuntimeError("context: closed")
    comm = core.core.comm
    try:
        _check_device(core, q=q, k=k, v=v)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        io = forward_io((("q", q), ("k", k), ("v", v), ("out", out)), lse)
    except Exception as error:
        # The library never sees this call, so nobody else would tell the other ranks.
        comm.abort(str(error))
        raise
    stream = core.core.backend.stream()
    status = _c.lib.ra_attn_forward(core.core.ctx, core.plans[index], io, stream)
    if status:
        comm.check(status)
    return out, lse


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    core: StepCore,
    index: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if core.core.closed:
        raise RuntimeError("context: closed")
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    io = backward_io(
        (("q", q), ("k", k), ("v", v), ("out", out)),
        lse,
        (("dout", dout), ("dq", dq), ("dk", dk), ("dv", dv)),
    )
    stream = core.core.backend.stream()
    status = _c.lib.ra_attn_backward(core.core.ctx, core.plans[index], io, stream)
    if status:
        core.core.comm.check(status)
    return dq, dk, dv


class _Attention(torch.autograd.Function):
    """Eager mode. The saved step lives as long as the graph."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, core: StepCore, index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = _forward(q, k, v, core, index)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.core, ctx.index = core, index
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor, _dlse: Any) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return (*_backward(dout, q, k, v, out, lse, ctx.core, ctx.index), None, None)


@torch.library.custom_op("ringattn::attend", mutates_args=())
def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: torch.Tensor, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _forward(q, k, v, step_of(step), layer)


@torch.library.custom_op("ringattn::attend_backward", mutates_args=())
def _attend_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    step: torch.Tensor,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _backward(dout, q, k, v, out, lse, step_of(step), layer)


@_attend.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: torch.Tensor, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@_attend_backward.register_fake
def _(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    step: torch.Tensor,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, step, layer = inputs
    ctx.save_for_backward(q, k, v, *output, step)
    ctx.layer = layer
    ctx.mark_non_differentiable(output[1])


def _attend_gradients(ctx: Any, dout: torch.Tensor, _dlse: Any) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, lse, step = ctx.saved_tensors
    dq, dk, dv = torch.ops.ringattn.attend_backward(dout, q, k, v, out, lse, step, ctx.layer)
    return dq, dk, dv, None, None


_attend.register_autograd(_attend_gradients, setup_context=_save)


def _index_of(step: Step, layer: Layer | int) -> int:
    if isinstance(layer, int):
        if not 0 <= layer < len(step.layers):
            raise IndexError(f"layer: {layer}, expected 0 to {len(step.layers) - 1}")
        return layer
    for index, known in enumerate(step.layers):
        if known is layer or known == layer:
            return index
    raise ValueError(f"layer: {layer}, expected one of the context's: {step.layers}")


def attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: Step, layer: Layer | int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse [rows, q_heads, seq_local] (f32, natural log, -inf where no key is allowed, no
    gradient)."""
    index = _index_of(step, layer)
    if torch.is_autocast_enabled(step.device_type):
        dtype = step.layers[index].dtype
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    q = q if q.stride(-1) == 1 else q.contiguous()
    k = k if k.stride(-1) == 1 else k.contiguous()
    v = v if v.stride(-1) == 1 else v.contiguous()
    if torch.compiler.is_compiling():
        out, lse = torch.ops.ringattn.attend(q, k, v, step.handle, index)
    else:
        out, lse = _Attention.apply(q, k, v, step.core, index)
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
