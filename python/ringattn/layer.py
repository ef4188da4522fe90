"""A layer kind: what attention computes, without its tensors. Becomes one ra_layer.

Options that change the result and are not offered are refused here, all in one message, so that no
model silently trains with something else. Must not know ranks or steps.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import torch

from ringattn import _c
from ringattn.errors import UnsupportedError

Vision = Literal["off", "over_window", "within_window"]

VISION: dict[str, int] = {
    "off": _c.RA_VISION_OFF,
    "over_window": _c.RA_VISION_OVER_WINDOW,
    "within_window": _c.RA_VISION_WITHIN_WINDOW,
}
DTYPE: dict[torch.dtype, int] = {
    torch.float32: _c.RA_F32,
    torch.bfloat16: _c.RA_BF16,
    torch.float16: _c.RA_F16,
    torch.float64: _c.RA_F64,
}


def refuse(**options: Any) -> None:
    """Raises UnsupportedError that lists every option that is set (neither None, False nor 0)."""
    offending = [
        f"{name}: {value}"
        for name, value in options.items()
        if value is not None and (isinstance(value, torch.Tensor) or bool(value))
    ]
    if offending:
        message = ", ".join(offending) + ", expected none of them: not offered"
        raise UnsupportedError(_c.RA_E_UNSUPPORTED, "RA_E_UNSUPPORTED", message)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """An attention layer kind. `scale` is never guessed; Gemma 4 uses 1.0.

    window: query - key < window, the query itself counted; 0 = none, a global layer.
    vision: image blocks, on sliding layers only; "within_window" is the rule of transformers (5 and
    later), "over_window" that of NeMo AutoModel.
    dropout, softcap, sinks and alibi are here to be refused.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    causal: bool = True
    window: int = 0
    window_right: int = 0
    vision: Vision = "off"
    dropout: float = 0.0
    softcap: float | None = None
    sinks: Any = None
    alibi: Any = None

    def __post_init__(self) -> None:
        refuse(
            softcap=self.softcap,
            dropout=self.dropout,
            sinks=self.sinks,
            alibi=self.alibi,
        )
        if self.vision not in VISION:
            raise ValueError(f"vision: {self.vision!r}, expected one of {', '.join(VISION)}")
        if not isinstance(self.scale, Real):
            raise TypeError(f"scale: {self.scale!r}, expected a number")
        if self.dtype not in DTYPE or self.dtype == torch.float64:
            raise TypeError(f"dtype: {self.dtype}, expected float32, bfloat16 or float16")

    def to_c(self) -> _c.Layer:
        """The struct of the header. Whether its values make sense is the library's to say."""
        layer = _c.Layer()
        layer.size = ctypes.sizeof(layer)
        for name in ("q_heads", "kv_heads", "head_dim"):
            setattr(layer, name, _c.fit(getattr(self, name), name, ctypes.c_int))
        layer.dtype = DTYPE[self.dtype]
        layer.scale = self.scale
        layer.causal = self.causal
        layer.window = _c.fit(self.window, "window")
        layer.window_right = _c.fit(self.window_right, "window_right")
        layer.vision = VISION[self.vision]
        return layer
