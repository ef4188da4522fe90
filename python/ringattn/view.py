"""A torch tensor as the library sees it: address, dtype, sizes and strides. Nothing is copied.

The hot path packs the structs of a call as 64-bit words in one go, which costs a tenth of setting
ctypes fields one by one; python/tests/test_c.py holds the layout to the header. Must not know what
is computed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from ringattn import _c
from ringattn.errors import ShapeError
from ringattn.layer import DTYPE

WORDS = 2 + 2 * _c.RA_NDIM
_NOTHING = (0,) * WORDS
_FORWARD = struct.Struct(f"={1 + 7 * WORDS}q")
_BACKWARD = struct.Struct(f"={1 + 11 * WORDS}q")


def words(tensor: torch.Tensor, name: str) -> tuple[int, ...]:
    """The ten words of an ra_tensor: [rows, heads, seq, channels], strides in elements."""
    if tensor.dim() != _c.RA_NDIM:
        raise ShapeError(
            _c.RA_E_SHAPE,
            "RA_E_SHAPE",
            f"{name}: {tensor.dim()} dimensions, expected 4: rows, heads, seq, channels",
        )
    code = DTYPE.get(tensor.dtype)
    if code is None:
        raise ShapeError(
            _c.RA_E_SHAPE,
            "RA_E_SHAPE",
            f"{name}: dtype {tensor.dtype}, expected float32, bfloat16 or float16",
        )
    return (tensor.data_ptr(), code, *tensor.shape, *tensor.stride())


def view(tensor: torch.Tensor, name: str = "tensor") -> _c.Tensor:
    """An ra_tensor. The caller keeps the torch tensor alive."""
    address, code, *rest = words(tensor, name)
    result = _c.Tensor()
    result.data, result.dtype = address, code
    result.size[:] = rest[: _c.RA_NDIM]
    result.stride[:] = rest[_c.RA_NDIM :]
    return result


def _lse_words(lse: torch.Tensor) -> tuple[int, ...]:
    """lse is [rows, heads, seq] to torch and has one channel more to the library."""
    return (lse.data_ptr(), _c.RA_F32, *lse.shape, 1, *lse.stride(), 1)


def forward_io(tensors: Sequence[tuple[str, torch.Tensor]], lse: torch.Tensor) -> bytes:
    """ra_forward_io of q, k, v, out and lse; kept_k and kept_v stay empty."""
    flat: list[int] = [_FORWARD.size]
    for name, tensor in tensors:
        flat += words(tensor, name)
    flat += _lse_words(lse)
    return _FORWARD.pack(*flat, *_NOTHING, *_NOTHING)


def backward_io(
    inputs: Sequence[tuple[str, torch.Tensor]],
    lse: torch.Tensor,
    gradients: Sequence[tuple[str, torch.Tensor]],
) -> bytes:
    """ra_backward_io of q, k, v, out, lse and of dout, dq, dk, dv."""
    flat: list[int] = [_BACKWARD.size]
    for name, tensor in inputs:
        flat += words(tensor, name)
    flat += _lse_words(lse)
    flat += _NOTHING + _NOTHING
    for name, tensor in gradients:
        flat += words(tensor, name)
    return _BACKWARD.pack(*flat)
