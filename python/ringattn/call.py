"""The library's two calls on torch tensors: shapes in, C call, tensors out.

What a forward derives from its tensors' signature is derived once and then kept with the step: a
model's layers of a kind differ in addresses only. Must not know autograd.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from ringattn import _c
from ringattn.backend import Function
from ringattn.context import Core, StepCore
from ringattn.errors import ShapeError
from ringattn.view import ForwardLayout, Kept, backward_io, check, signature_of


def _refuse_device(device: torch.device, backend: str, **tensors: torch.Tensor) -> NoReturn:
    name, tensor = next((n, t) for n, t in tensors.items() if t.device != device)
    raise ShapeError(
        _c.RA_E_SHAPE,
        "RA_E_SHAPE",
        f"{name}: on device {tensor.device}, expected {device}, where the context's backend "
        f"({backend}) runs",
    )


def _open(core: StepCore) -> Core:
    context = core.core
    if context.closed:
        raise RuntimeError("context: closed")
    return context


def _run(context: Core, function: Function, plan: int, io: bytes) -> None:
    comm = context.comm
    comm.in_call = True
    status = context.backend.run(function, context.ctx, plan, io)
    comm.in_call = False
    if status:
        comm.check_call(status)


class Call:
    """The forward of one layer of a step on tensors of one signature, which it has checked."""

    __slots__ = ("_device", "_kept_shape", "_layout", "_lse_layout", "core", "index", "signature")

    def __init__(
        self, core: StepCore, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        context = _open(core)
        self.core, self.index = core, index
        self._device = device = context.backend.device
        self._layout: ForwardLayout | None = None
        try:
            if not q.device == k.device == v.device == device:
                _refuse_device(device, context.backend.name, q=q, k=k, v=v)
            check(q=q, k=k, v=v)
            self.signature = signature_of(q, k, v)
        except Exception as error:
            # The library never sees this call, so nobody else would tell the other ranks.
            context.comm.abort(str(error))
            raise
        rows, heads, seq, _ = q.shape
        width = max(seq, 1)
        self._lse_layout = ((rows, heads, seq), (heads * width, width, 1))
        self._kept_shape = None
        if core.kept_seq is not None:
            self._kept_shape = (1, k.shape[1], core.kept_seq[index], k.shape[3])

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Kept]:
        """out, lse and the rows to keep: kept_k and kept_v, or nothing. q, k and v: of the
        signature."""
        core = self.core
        context = _open(core)
        try:
            out = torch.empty_like(q)
            # torch.empty takes half as long again.
            size, stride = self._lse_layout
            lse = torch.empty_strided(size, stride, dtype=torch.float32, device=self._device)
            shape = self._kept_shape
            kept = () if shape is None else (k.new_empty(shape), k.new_empty(shape))
            layout = self._layout
            if layout is None:
                layout = self._layout = ForwardLayout(q, k, v, out, lse, kept)
            io = layout.pack(q, k, v, out, lse, kept)
        except Exception as error:
            context.comm.abort(str(error))
            raise
        _run(context, _c.lib.ra_attn_forward, core.plans[self.index], io)
        return out, lse, kept


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, core: StepCore, index: int
) -> tuple[torch.Tensor, torch.Tensor, Kept]:
    """One forward for itself."""
    return Call(core, index, q, k, v).forward(q, k, v)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    core: StepCore,
    index: int,
    kept: Kept = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv. The tensors are read anew: hooks on saved tensors may bring others back."""
    context = _open(core)
    try:
        if dout.stride(-1) != 1:
            dout = dout.contiguous()
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        io = backward_io(q, k, v, out, lse, (dout, dq, dk, dv), kept)
    except Exception as error:
        context.comm.abort(str(error))
        raise
    _run(context, _c.lib.ra_attn_backward, core.plans[index], io)
    return dq, dk, dv
