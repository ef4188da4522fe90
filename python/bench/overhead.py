"""Host time of ringattn.attention over an autograd function that does nothing, and memory growth.

The empty function saves and allocates what ours does. "C" is the library's own part of a call;
"front" is what is left for Python: ours - empty - C. The three take turns in bursts, so that a
machine that changes its pace changes it for all; a burst begins with an idle device and does not
fill its queue. Medians over the bursts of medians of their calls. Fails if the front of a call,
forward or backward, takes more than --limit microseconds, or if memory grows; wants a quiet machine.
usage: overhead.py [--device cuda] [--limit 25]
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest import mock

import torch

import ringattn
from ringattn import _c

BURSTS, BURST = 100, 20
GROWTH_STEPS = 1000


class Empty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, _dlse: Any) -> Any:
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


Call = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def burst(call: Call, leaves: list[torch.Tensor], dout: torch.Tensor) -> list[float]:
    """Microseconds of a forward and of a backward."""
    times = []
    wait(dout.device)
    for _ in range(BURST):
        start = time.perf_counter()
        out, _ = call()
        middle = time.perf_counter()
        torch.autograd.grad(out, leaves, dout)
        times.append((middle - start, time.perf_counter() - middle))
    return [median(column) * 1e6 for column in zip(*times)]


class Stopwatch:
    """A C function that notes how long its calls take."""

    def __init__(self, function: Callable[..., int]) -> None:
        self.function = function
        self.times: list[float] = []

    def __call__(self, *arguments: Any) -> int:
        start = time.perf_counter()
        status = self.function(*arguments)
        self.times.append(time.perf_counter() - start)
        return status


def burst_in_c(call: Call, leaves: list[torch.Tensor], dout: torch.Tensor) -> list[float]:
    """Of those, what the library itself takes."""
    names = ("ra_attn_forward", "ra_attn_backward")
    watches = [Stopwatch(getattr(_c.lib, name)) for name in names]
    with (
        mock.patch.object(_c.lib, names[0], watches[0]),
        mock.patch.object(_c.lib, names[1], watches[1]),
    ):
        burst(call, leaves, dout)
    return [median(watch.times) * 1e6 for watch in watches]


def growth(call: Call, leaves: list[torch.Tensor], dout: torch.Tensor) -> tuple[int, int]:
    """Bytes of Python and of the device that every thousand steps add; the least of a few
    thousands, as caches fill up once."""

    def held() -> tuple[int, int]:
        for _ in range(GROWTH_STEPS):
            torch.autograd.grad(call()[0], leaves, dout)
        gc.collect()
        on_device = torch.cuda.memory_allocated() if dout.device.type == "cuda" else 0
        return tracemalloc.get_traced_memory()[0], on_device

    tracemalloc.start()
    seen = [held() for _ in range(4)]
    tracemalloc.stop()
    more = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(seen, seen[1:])]
    return min(python for python, _ in more), min(device for _, device in more)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=float, default=25.0)
    options = parser.parse_args()
    device = torch.device(options.device)
    layer = ringattn.Layer(q_heads=2, kv_heads=1, head_dim=8, scale=1.0, dtype=torch.float32)
    context = ringattn.Context(layers=[layer], device=device, threads=1)
    step = context.step((1, 8))
    leaves = [torch.randn(1, h, 8, 8, device=device, requires_grad=True) for h in (2, 1, 1)]
    dout = torch.ones_like(leaves[0])

    def empty() -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = Empty.apply(*leaves)
        return out, lse

    def ours() -> tuple[torch.Tensor, torch.Tensor]:
        return ringattn.attention_with_lse(*leaves, step, layer)

    rounds = []
    for _ in range(BURSTS):
        nothing, all_of_it = burst(empty, leaves, dout), burst(ours, leaves, dout)
        library = burst_in_c(ours, leaves, dout)
        front = [o - e - c for o, e, c in zip(all_of_it, nothing, library)]
        rounds.append((nothing, all_of_it, library, front))
    print(f"{'us per call':12} {'empty':>8} {'ours':>8} {'C':>8} {'front':>8}   {context.backend}")
    worst = 0.0
    for direction, name in enumerate(("forward", "backward")):
        columns = [median(kind[direction] for kind in kinds) for kinds in zip(*rounds)]
        worst = max(worst, columns[-1])
        print(f"{name:12}" + "".join(f" {value:8.1f}" for value in columns))
    python, memory = growth(ours, leaves, dout)
    print(f"growth in {GROWTH_STEPS} steps: {python} bytes of Python, {memory} of the device")
    return int(worst > options.limit or python > 10_000 or memory > 0)


if __name__ == "__main__":
    raise SystemExit(main())
