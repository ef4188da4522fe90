#!/usr/bin/env python3
"""PyTorch's CPU attention, timed on the shapes that cpu_bench.py names.

Reads one JSON object a line: a row of `ringattn bench --json`, with "skip", a list of variants that
are not wanted. Answers with JSON objects, one a line: for every variant

    {"begin": "sdpa"}
    {"variant": "sdpa", "forward": {"seconds": 0.5, "gflops": 80.0}, "backward": {...}}

the second with "failed": "why" where there was a failure, then {"end": true}. The first answer,
before any row, says which PyTorch this is. A variant is one way to ask PyTorch for the attention of
the row; its results are checked before they are timed. What crashes takes this process along, and
"begin" tells which variant it was.
What limits PyTorch's instructions is in the environment, which cpu_bench.py sets: PyTorch reads it
when it is loaded. Must not know ringattn.
"""
import json
import sys
import time

import torch
import torch.nn.functional as F

SECONDS = 0.5  # a measurement takes at least this long
CALLS = 3  # and has as many calls, of which one is undisturbed, unless they take
LONG = 2.0  # seconds together
NEAR = 1.5  # a variant this many times slower forward is not tried backward
FLOPS = {"forward": 4, "backward": 10}  # an allowed pair, channel and query head
TOLERANCE = {"f32": 1e-4, "bf16": 3e-2}  # of values of the order of 1
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


class Problem:
    """Inputs of one row and what they must give on its last rows."""

    def __init__(self, row):
        self.seq, self.window, self.causal = row["seq"], row["window"], row["causal"]
        self.scale = row["head_dim"] ** -0.5
        self.tolerance = TOLERANCE[row["dtype"]]
        generator = torch.Generator().manual_seed(0)

        def tensor(heads):
            shape = (1, heads, self.seq, row["head_dim"])
            return torch.randn(shape, generator=generator).to(DTYPES[row["dtype"]])

        self.q, self.dout = tensor(row["q_heads"]), tensor(row["q_heads"])
        self.k, self.v = tensor(row["kv_heads"]), tensor(row["kv_heads"])
        if self.window:
            full = min(self.window, self.seq)
            pairs = full * (full + 1) // 2 + (self.seq - full) * full
        else:
            pairs = self.seq * (self.seq + 1) // 2 if self.causal else self.seq**2
        self.work = pairs * row["q_heads"] * row["head_dim"]

    def allowed(self, queries, keys):
        """Boolean [queries, keys]: who sees whom."""
        distance = queries[:, None] - keys[None, :]
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.causal:
            seen &= distance >= 0
        if self.window:
            seen &= distance < self.window
        return seen

    def inputs(self):
        return [x.requires_grad_() for x in (self.q, self.k, self.v)]

    def check(self, out, dq=None):
        """Raises if the last rows of the first head are not those of a direct computation."""
        rows = slice(self.seq - 16, self.seq)
        positions = torch.arange(self.seq)
        q, k, v = (x[0, 0].detach().double() for x in (self.q, self.k, self.v))
        score = (q[rows] @ k.T) * self.scale
        score = score.masked_fill(~self.allowed(positions[rows], positions), float("-inf"))
        p = score.softmax(-1)
        error = (p @ v - out[0, 0, rows].double()).abs().max().item()
        if dq is not None:
            dp = self.dout[0, 0, rows].double() @ v.T
            ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * self.scale
            error = max(error, (ds @ k - dq[0, 0, rows].double()).abs().max().item())
        if not error <= self.tolerance:
            raise ArithmeticError(f"error {error:.2g}, expected at most {self.tolerance:.2g}")


def attend(problem, q, k, v, **mask):
    return F.scaled_dot_product_attention(q, k, v, scale=problem.scale, enable_gqa=True, **mask)


def prepare_sdpa(problem):
    """One call; a window needs a mask of all pairs, which the kernel computes."""
    if not problem.window:
        return lambda q, k, v: attend(problem, q, k, v, is_causal=problem.causal)
    positions = torch.arange(problem.seq)
    mask = problem.allowed(positions, positions)
    return lambda q, k, v: attend(problem, q, k, v, attn_mask=mask)


def prepare_blocks(problem):
    """A call for every `window` queries, on the keys that one of them sees."""
    window, positions = problem.window, torch.arange(problem.seq)
    blocks = []
    for begin in range(0, problem.seq, window):
        queries = slice(begin, begin + window)
        keys = slice(max(0, begin - window), begin + window)
        blocks.append((queries, keys, problem.allowed(positions[queries], positions[keys])))

    def forward(q, k, v):
        parts = [attend(problem, q[:, :, queries], k[:, :, keys], v[:, :, keys], attn_mask=mask)
                 for queries, keys, mask in blocks]
        return torch.cat(parts, 2)

    return forward


def prepare_flex(problem):
    """Compiled flex_attention, which skips blocks of pairs; forward only on a CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    window, seq = problem.window, problem.seq
    mask = create_block_mask(lambda b, h, i, j: (j <= i) & (i - j < window), None, None, seq, seq,
                             device="cpu")
    # Compiled code keeps the number of threads that it was compiled for.
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)

    def forward(q, k, v):
        return compiled(q.detach(), k.detach(), v.detach(), block_mask=mask, scale=problem.scale,
                        enable_gqa=True)

    with torch.no_grad():
        forward(problem.q, problem.k, problem.v)  # compiles, which is not timed
    return forward


def variants_of(row):
    if not row["window"]:
        return {"sdpa": prepare_sdpa}
    return {"sdpa, window by window": prepare_blocks, "flex_attention": prepare_flex,
            "sdpa with a mask": prepare_sdpa}


def timed(call):
    """Seconds of the fastest call, and the first call's result."""
    fastest, total, first, calls = float("inf"), 0.0, None, 0
    while total < SECONDS or calls < CALLS and total < LONG:
        begin = time.perf_counter()
        result = call()
        took = time.perf_counter() - begin
        first = result if calls == 0 else first
        fastest, total, calls = min(fastest, took), total + took, calls + 1
    return fastest, first


def timing(problem, operation, seconds):
    return {"seconds": seconds, "gflops": FLOPS[operation] * problem.work / seconds * 1e-9}


def run_variant(problem, prepare, best_seconds):
    """Forward, then backward if the forward is not far slower than the best one so far."""
    result = {}
    try:
        forward = prepare(problem)
        inputs = problem.inputs()
        with torch.no_grad():
            seconds, out = timed(lambda: forward(*inputs))
        problem.check(out)
        result["forward"] = timing(problem, "forward", seconds)
        if seconds > NEAR * best_seconds:
            return result
        out = forward(*inputs)
        if not out.requires_grad:
            return result | {"failed": "no backward on a CPU"}
        seconds, grads = timed(
            lambda: torch.autograd.grad(out, inputs, problem.dout, retain_graph=True))
        problem.check(out, grads[0])
        result["backward"] = timing(problem, "backward", seconds)
    except Exception as error:  # whatever a variant fails with is what is reported of it
        result["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return result


def say(answer):
    print(json.dumps(answer), flush=True)


def run_row(row):
    torch.set_num_threads(row["threads"])
    problem = Problem(row)
    best_seconds = float("inf")
    for name, prepare in variants_of(row).items():
        if name in row["skip"]:
            continue
        say({"begin": name})
        result = run_variant(problem, prepare, best_seconds)
        best_seconds = min(best_seconds, result.get("forward", {}).get("seconds", best_seconds))
        say({"variant": name} | result)
    say({"end": True})


def main():
    say({"torch": torch.__version__, "capability": torch.backends.cpu.get_cpu_capability()})
    for line in sys.stdin:
        run_row(json.loads(line))


if __name__ == "__main__":
    main()
