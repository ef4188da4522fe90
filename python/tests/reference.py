"""The judge of the Python tests: dense attention by autograd, the mask rule element by element.

In float64 it is the reference; in the dtype of a test it is the plain computation whose error is
the measure for ours. Shares nothing with the package. It computes in host memory, also for results
of a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ORDERS = 8
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass
class Case:
    """Whole rows. None: no such metadata."""

    rows: int = 1
    seq: int = 12
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    scale: float = 0.25
    causal: bool = True
    window: int = 0
    vision: str = "off"
    docs: list[list[int]] | None = None
    pads: list[list[bool]] | None = None
    types: list[list[int]] | None = None
    layout: str = "contiguous"
    dtype: torch.dtype = torch.float32
    seed: int = 1

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        values = getattr(self, name)
        return None if values is None else torch.tensor(values, dtype=dtype, device="cpu")

    def inputs(self) -> list[torch.Tensor]:
        """q, k, v and dout, of the case's dtype."""
        random = torch.Generator("cpu").manual_seed(self.seed)
        heads = (self.q_heads, self.kv_heads, self.kv_heads, self.q_heads)
        return [
            torch.randn(
                (self.rows, h, self.seq, self.head_dim),
                generator=random,
                dtype=torch.float32,
                device="cpu",
            ).to(self.dtype)
            for h in heads
        ]


def groups(types: torch.Tensor) -> torch.Tensor:
    """Image block numbers of whole rows, -1 for text."""
    vision = (types == 1) | (types == 2)
    before = torch.zeros_like(vision)
    before[:, 1:] = vision[:, :-1]
    number = (vision & ~before).int().cumsum(1) - 1
    return torch.where(vision, number, -1)


def mask(case: Case) -> torch.Tensor:
    """[rows, seq, seq] of bool: may query i attend key j?"""
    pos = torch.arange(case.seq, device="cpu")
    age = pos[:, None] - pos[None, :]
    order = age >= 0 if case.causal else torch.ones_like(age, dtype=torch.bool)
    inside = age < case.window if case.window else torch.ones_like(order)
    allowed = (order & inside).expand(case.rows, -1, -1)
    types = case.tensor("types")
    if types is not None and case.vision != "off" and case.window:
        g = groups(types)
        same = (g[:, :, None] == g[:, None, :]) & (g[:, :, None] >= 0)
        allowed = (order | same) & inside if case.vision == "within_window" else allowed | same
    docs, pads = case.tensor("docs"), case.tensor("pads")
    real = torch.ones(case.rows, case.seq, dtype=torch.bool, device="cpu")
    if docs is not None:
        allowed = allowed & (docs[:, :, None] == docs[:, None, :])
        real &= docs > 0
    if pads is not None:
        real &= ~pads
    return allowed & real[:, :, None] & real[:, None, :]


def attend(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Rows that attend nothing are 0."""
    allowed = mask(case)[:, None]
    group = case.q_heads // case.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2) * case.scale).masked_fill(~allowed, float("-inf"))
    top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = (scores - top.detach()).exp()
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1) @ v


def truth(case: Case) -> list[torch.Tensor]:
    """out, dq, dk, dv in float64, the gradients by autograd."""
    q, k, v, dout = (t.double() for t in case.inputs())
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = attend(case, *leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def plain(case: Case) -> list[torch.Tensor]:
    """out, dq, dk, dv of ordinary computations, [orders, ...]: the same sums in several orders.

    One order alone is a poor measure on tensors this small: against it, another one fails in two of
    a thousand tensors, because scores and lse of a row may happen to err alike.
    """
    random = torch.Generator("cpu").manual_seed(case.seed)
    orders = []
    for _ in range(ORDERS):
        keys = torch.randperm(case.seq, generator=random, device="cpu")
        channels = torch.randperm(case.head_dim, generator=random, device="cpu")
        orders.append(plain_in_order(case, keys, channels))
    return [torch.stack(results) for results in zip(*orders)]


def plain_in_order(case: Case, keys: torch.Tensor, channels: torch.Tensor) -> list[torch.Tensor]:
    """Inputs of the case's dtype, sums in float32, P and dS rounded to the dtype, the backward from
    out and lse."""
    dtype, group = case.dtype, case.q_heads // case.kv_heads
    q, k, v, dout = (t.float()[..., channels] for t in case.inputs())
    k, v = (t[:, :, keys].repeat_interleave(group, 1) for t in (k, v))
    allowed = mask(case)[:, None, :, keys]
    scores = (q @ k.transpose(-1, -2) * case.scale).masked_fill(~allowed, float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0)).exp()
    rounded = weights.to(dtype).float()
    out = (rounded @ v).to(dtype)
    delta = (out.float() * dout).sum(-1, keepdim=True)
    ds = (weights * (dout @ v.transpose(-1, -2) - delta) * case.scale).to(dtype).float()
    back, home = channels.argsort(), keys.argsort()

    def by_kv_head(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.unflatten(1, (case.kv_heads, group)).sum(2).to(dtype)[:, :, home]

    dk, dv = ds.transpose(-1, -2) @ q, rounded.transpose(-1, -2) @ dout
    results = out, (ds @ k).to(dtype), by_kv_head(dk), by_kv_head(dv)
    return [result[..., back] for result in results]


def assert_close(name: str, ours: torch.Tensor, usual: torch.Tensor, exact: torch.Tensor) -> None:
    """The tolerance rule: twice the error of the plain computation, and two roundings. usual:
    [orders, ...], of which the worst counts."""
    ours = ours.cpu()
    u = UNIT[ours.dtype]
    assert ours.isfinite().all(), name
    if exact.numel() == 0:
        return
    error = (ours.double() - exact).abs()
    usual_error = (usual.double() - exact).abs()
    allowed = 2 * usual_error.max() + 2 * u * exact.abs().max()
    assert error.max() <= allowed, f"{name}: error {error.max():.3e}, allowed {allowed:.3e}"
    rms = error.square().mean().sqrt()
    usual_rms = usual_error.square().flatten(1).mean(1).max().sqrt()
    allowed = 1.5 * usual_rms + 0.5 * u * exact.square().mean().sqrt()
    assert rms <= allowed, f"{name}: rms error {rms:.3e}, allowed {allowed:.3e}"
