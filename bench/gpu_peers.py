#!/usr/bin/env python3
"""FlashAttention-4 (head_dim 256) and FFPA (head_dim 512) on the shapes of gpu_bench.

Wants `pip install flash-attn-4 ffpa-attn` beside PyTorch, and a Hopper GPU that nothing else uses.
Every shape is checked against a direct computation of its last rows, then timed sustained like
gpu_bench's: half a second warm, half a second measured, forward and backward. cuBLAS bf16 8192^3 is
timed the same way in the same process, before and after all shapes of a kind of mask. Prints a JSON
object for each shape: milliseconds, TFLOP/s of allowed pairs (4 D forward, 10 D backward), and the
ratio to the mean of both cuBLAS rates. A kind that cannot run is said on stderr; the others go on.
Must not know ringattn.
usage: gpu_peers.py [fa4-full|fa4-causal|fa4-window|ffpa-full|ffpa-causal]...    default: all
"""
from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]

KINDS = {  # lengths and windows
    "fa4-full": [(8192, 0)],
    "fa4-causal": [(8192, 0)],
    "fa4-window": [(8192, 1024), (8192, 512), (32768, 1024), (32768, 512)],
    "ffpa-full": [(8192, 0)],
    "ffpa-causal": [(8192, 0), (32768, 0)],
}
HEADS = {"fa4": (32, 16, 256), "ffpa": (32, 4, 512)}  # query heads, KV heads, head_dim
SECONDS = 0.5
SCALE = 1 / 16
LAST = 64  # rows that are checked
TOLERANCE = 0.05  # of the largest value: averages over thousands of keys are small


def sustained(call: Callable[[], object], guess: float | None = None) -> float:
    """Milliseconds of a call that follows others; guess: seconds that one takes."""
    if guess is None:
        call()
        torch.cuda.synchronize()
        start = time.time()
        call()
        torch.cuda.synchronize()
        guess = time.time() - start
    calls = max(2, math.ceil(SECONDS / max(guess, 1e-5)))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(calls):
        call()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls


def cublas() -> float:
    """TFLOP/s."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b, c = torch.randn_like(a), torch.empty_like(a)
    return 2 * 8192**3 / sustained(lambda: torch.mm(a, b, out=c), 1.6e-3) / 1e9


def attention(peer: str, mask: str, window: int) -> Callable[..., torch.Tensor]:
    if peer == "ffpa":
        from ffpa_attn import ffpa_attn_func

        return lambda q, k, v: ffpa_attn_func(
            q, k, v, is_causal=mask == "causal", scale=SCALE, enable_gqa=True, backend="cutedsl"
        )
    from flash_attn.cute.interface import flash_attn_func

    sides = (window - 1, 0) if window else (None, None)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result = flash_attn_func(
            q, k, v, softmax_scale=SCALE, causal=mask == "causal", window_size=sides
        )
        return result[0] if isinstance(result, tuple) else result

    return call


def inputs(peer: str, length: int) -> Tensors:
    """q, k, v and dout: [1, heads, length, D] for FFPA, [1, length, heads, D] for FA4."""
    q_heads, kv_heads, dim = HEADS[peer]
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(heads: int) -> torch.Tensor:
        shape = (1, heads, length, dim) if peer == "ffpa" else (1, length, heads, dim)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    q, k, v, dout = normal(q_heads), normal(kv_heads), normal(kv_heads), normal(q_heads)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def check(peer: str, mask: str, window: int, tensors: Tensors, out: Tensors) -> None:
    """The last rows of out and dq of the first head, directly in f32."""
    q, k, v, dout, result, dq = (
        (x if peer == "ffpa" else x.transpose(1, 2))[0, 0].detach().float()
        for x in (*tensors, *out)
    )
    rows = slice(q.shape[0] - LAST, None)
    index = torch.arange(q.shape[0], device="cuda")
    distance = index[rows, None] - index[None]
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if mask != "full":
        allowed = (distance >= 0) & (distance < (window or q.shape[0]))
    p = torch.softmax((q[rows] @ k.T * SCALE).masked_fill(~allowed, -math.inf), -1)
    dp = dout[rows] @ v.T
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * SCALE
    for name, wanted, got in (("out", p @ v, result[rows]), ("dq", ds @ k, dq[rows])):
        error = ((wanted - got).abs().max() / wanted.abs().max()).item()
        if not error < TOLERANCE:
            raise ValueError(f"{name} is off by {error:.3g} of its largest value")


def pairs(mask: str, length: int, window: int) -> float:
    if mask == "full":
        return length * length
    window = window or length
    return window * (window + 1) / 2 + (length - window) * window


def row(peer: str, mask: str, length: int, window: int) -> dict[str, Any]:
    call = attention(peer, mask, window)
    q, k, v, dout = tensors = inputs(peer, length)
    out = call(q, k, v)
    gradients = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    check(peer, mask, window, tensors, (out, gradients[0]))
    with torch.no_grad():
        forward = sustained(lambda: call(q, k, v))
    backward = sustained(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    q_heads, kv_heads, dim = HEADS[peer]
    work = pairs(mask, length, window) * q_heads * dim / 1e9
    return {
        "peer": peer,
        "shape": f"d{dim} {q_heads}/{kv_heads} {mask}{window or ''} b1 s{length}",
        "forward_ms": forward,
        "forward_tflops": 4 * work / forward,
        "backward_ms": backward,
        "backward_tflops": 10 * work / backward,
    }


def run(kind: str) -> None:
    peer, mask = kind.split("-")
    before = cublas()
    rows = [row(peer, mask, length, window) for length, window in KINDS[kind]]
    after = cublas()
    for values in rows:
        for direction in ("forward", "backward"):
            rate = values[f"{direction}_tflops"]
            values[f"{direction}_ratio"] = 2 * rate / (before + after)
        print(json.dumps({**values, "cublas": [before, after]}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    kinds = parser.parse_args().kinds or list(KINDS)
    for kind in kinds:
        if kind not in KINDS:
            parser.error(f"KIND: {kind}, expected one of {', '.join(KINDS)}")
    failed = 0
    for kind in kinds:
        try:
            run(kind)
        except Exception as error:  # of somebody else's package: whatever it is
            failed += 1
            print(f"{kind}: {type(error).__name__}: {str(error)[:400]}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
