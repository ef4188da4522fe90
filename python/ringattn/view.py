"""A torch tensor as the library sees it: address, dtype, sizes and strides. Nothing is copied.

The hot path packs the structs of a call in one go, which costs a tenth of setting ctypes fields one
by one, and a forward's all but the addresses once; python/tests/test_c.py holds the layout to the
header. Must not know what is computed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from typing import NoReturn

import torch

from ringattn import _c
from ringattn.errors import ShapeError
from ringattn.layer import DTYPE

Kept = Sequence[torch.Tensor]
WORDS = 2 + 2 * _c.RA_NDIM
_LIKE_NOTHING = f"{8 * WORDS}x"
_ALL_BUT_ADDRESS = struct.Struct(f"={WORDS - 1}q")
_TENSOR = f"q{_ALL_BUT_ADDRESS.size}s"
_FORWARD = struct.Struct(f"=q{_TENSOR * 5}")
_KEPT = struct.Struct(f"={_TENSOR * 2}")  # the last part of an ra_forward_io
_FORWARD_SIZE = _FORWARD.size + _KEPT.size
_NOTHING_KEPT = bytes(_KEPT.size)
_BACKWARD = struct.Struct(f"={1 + 5 * WORDS}q{_LIKE_NOTHING * 2}{4 * WORDS}q")
_BACKWARD_KEEPING = struct.Struct(f"={1 + 11 * WORDS}q")


def _words(tensor: torch.Tensor) -> tuple[int, ...]:
    """The ten words of an ra_tensor: [rows, heads, seq, channels], strides in elements."""
    return (tensor.data_ptr(), DTYPE[tensor.dtype], *tensor.shape, *tensor.stride())


def check(**tensors: torch.Tensor) -> None:
    """Can each of them be an ra_tensor?"""
    for name, tensor in tensors.items():
        problem = None
        if tensor.dim() != _c.RA_NDIM:
            problem = f"{tensor.dim()} dimensions, expected 4: rows, heads, seq, channels"
        elif tensor.dtype not in DTYPE:
            problem = f"dtype {tensor.dtype}, expected float32, bfloat16 or float16"
        if problem is not None:
            raise ShapeError(_c.RA_E_SHAPE, "RA_E_SHAPE", f"{name}: {problem}")


def view(tensor: torch.Tensor, name: str = "tensor") -> _c.Tensor:
    """An ra_tensor. The caller keeps the torch tensor alive."""
    check(**{name: tensor})
    address, code, *rest = _words(tensor)
    result = _c.Tensor()
    result.data, result.dtype = address, code
    result.size[:] = rest[: _c.RA_NDIM]
    result.stride[:] = rest[_c.RA_NDIM :]
    return result


def _lse_words(lse: torch.Tensor) -> tuple[int, ...]:
    """lse is [rows, heads, seq] to torch and has one channel more to the library."""
    return (lse.data_ptr(), _c.RA_F32, *lse.shape, 1, *lse.stride(), 1)


def signature_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[object, ...]:
    """All of them but the addresses."""
    return (
        q.shape,
        q.stride(),
        q.dtype,
        q.device,
        k.shape,
        k.stride(),
        k.dtype,
        k.device,
        v.shape,
        v.stride(),
        v.dtype,
        v.device,
    )


class ForwardLayout:
    """An ra_forward_io but for the addresses. out is like q; kept: kept_k and kept_v, or none."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        kept: Kept = (),
    ) -> None:
        written = (*map(_words, (q, k, v, out)), _lse_words(lse))
        self._rest = [_ALL_BUT_ADDRESS.pack(*rest) for _, *rest in written]
        self._kept_rest = [_ALL_BUT_ADDRESS.pack(*_words(t)[1:]) for t in kept]

    def pack(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        kept: Kept = (),
    ) -> bytes:
        """With the addresses of tensors of the same layout."""
        q_rest, k_rest, v_rest, out_rest, lse_rest = self._rest
        io = _FORWARD.pack(
            _FORWARD_SIZE,
            q.data_ptr(),
            q_rest,
            k.data_ptr(),
            k_rest,
            v.data_ptr(),
            v_rest,
            out.data_ptr(),
            out_rest,
            lse.data_ptr(),
            lse_rest,
        )
        if not kept:
            return io + _NOTHING_KEPT
        (kept_k, kept_v), (k_rest, v_rest) = kept, self._kept_rest
        return io + _KEPT.pack(kept_k.data_ptr(), k_rest, kept_v.data_ptr(), v_rest)


def check_device(device: torch.device, **tensors: torch.Tensor) -> None:
    """Do they all lie where the library will look for them?"""
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ShapeError(
                _c.RA_E_SHAPE,
                "RA_E_SHAPE",
                f"{name}: on device {tensor.device}, expected {device}, as q",
            )


def _refuse_unlike(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
) -> NoReturn:
    expected = (
        ("k", k, q.dtype, k.shape),
        ("v", v, q.dtype, k.shape),
        ("out", out, q.dtype, q.shape),
        ("lse", lse, torch.float32, lse.shape),
        ("dout", dout, q.dtype, q.shape),
    )
    name, tensor, dtype, shape = next(e for e in expected if e[2:] != (e[1].dtype, e[1].shape))
    raise ShapeError(
        _c.RA_E_SHAPE,
        "RA_E_SHAPE",
        f"{name}: {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {tuple(shape)}",
    )


def backward_io(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    kept: Kept = (),
) -> bytes:
    """An ra_backward_io. gradients: dout, and dq, dk and dv like q, k and v."""
    dout, dq, dk, dv = gradients
    dtype, q_shape, k_shape = q.dtype, q.shape, k.shape
    # What hooks bring back may be anything, and the library believes what is written here.
    if not (
        dtype is k.dtype is v.dtype is out.dtype is dout.dtype
        and lse.dtype is torch.float32
        and q_shape == out.shape == dout.shape
        and k_shape == v.shape
    ):
        _refuse_unlike(q, k, v, out, lse, dout)
    if not q.device == k.device == v.device == out.device == lse.device == dout.device:
        check_device(q.device, k=k, v=v, out=out, lse=lse, dout=dout)
    layout = _BACKWARD_KEEPING if kept else _BACKWARD
    code = DTYPE[dtype]
    like_q, like_k = (code, *q_shape), (code, *k_shape)
    return layout.pack(
        layout.size,
        q.data_ptr(),
        *like_q,
        *q.stride(),
        k.data_ptr(),
        *like_k,
        *k.stride(),
        v.data_ptr(),
        *like_k,
        *v.stride(),
        out.data_ptr(),
        *like_q,
        *out.stride(),
        *_lse_words(lse),
        *chain.from_iterable(map(_words, kept)),
        dout.data_ptr(),
        *like_q,
        *dout.stride(),
        dq.data_ptr(),
        *like_q,
        *dq.stride(),
        dk.data_ptr(),
        *like_k,
        *dk.stride(),
        dv.data_ptr(),
        *like_k,
        *dv.stride(),
    )
