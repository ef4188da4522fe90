"""torch.compile: no graph break, no recompilation for another step, opcheck, checkpoints,
autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ringattn
import world
from reference import Case
from ring import cut, layer_of, open_context, step_of
from world import DEVICE

CASE = Case(seq=12, window=5, docs=[[1] * 7 + [2] * 5])


def leaves_of(context: ringattn.Context, case: Case) -> list[torch.Tensor]:
    return [cut(context, case, t, 2).clone().requires_grad_() for t in case.inputs()[:3]]


def compiled(rank: int, size: int, group: Any, how: str) -> float:
    """The largest difference between compiled and eager, in output and gradients."""
    torch._dynamo.reset()
    layer = layer_of(CASE)
    options = {"timeout_ms": 60_000, "keep_kv": how == "kept"}
    with open_context(group, layer, **options) as context:

        def block(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: ringattn.Step
        ) -> torch.Tensor:
            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                return ringattn.attention(q * 2, k, v.tanh(), step, layer)

            if how != "checkpoint":
                return attend(q, k, v).sin()
            result = checkpoint(attend, q, k, v, use_reentrant=False)
            assert isinstance(result, torch.Tensor)
            return result.sin()

        backend = "inductor" if how == "inductor" else "aot_eager"
        fast = torch.compile(block, fullgraph=True, backend=backend)
        worst = 0.0
        for ids in ([[1] * 7 + [2] * 5], [[3] * 2 + [0] * 4 + [3] * 6]):
            step = context.step(packed_seq_ids=cut(context, CASE, torch.tensor(ids), 1))
            ours, usual = leaves_of(context, CASE), leaves_of(context, CASE)
            with torch._dynamo.config.patch(error_on_recompile=True):
                out = fast(*ours, step)
                del step.context  # the graph alone must keep the plans
                out.sum().backward()
            expected = block(*usual, step)
            expected.sum().backward()
            pairs = [(out, expected)] + [(a.grad, b.grad) for a, b in zip(ours, usual)]
            worst = max(
                worst,
                *(
                    float((a - b).detach().abs().max())
                    for a, b in pairs
                    if a is not None and b is not None
                ),
            )
        return worst


@pytest.mark.parametrize("how", ["plain", "checkpoint", "kept", "inductor"])
@pytest.mark.parametrize("size", [1, 2])
def test_compiled_equals_eager(size: int, how: str) -> None:
    assert max(world.run(size, compiled, how, limit=240.0)) < 1e-6


def test_the_graph_keeps_the_step() -> None:
    layer = layer_of(CASE)
    context = open_context(None, layer)
    fast = torch.compile(
        lambda q, k, v, step: ringattn.attention(q, k, v, step, layer),
        fullgraph=True,
        backend="aot_eager",
    )
    leaves = leaves_of(context, CASE)
    out = fast(*leaves, step_of(context, CASE))
    del context
    out.sum().backward()
    assert leaves[1].grad is not None and leaves[1].grad.isfinite().all()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype: torch.dtype, keep: bool) -> None:
    from ringattn import function

    case = Case(seq=8, dtype=dtype)
    with open_context(None, layer_of(case), keep_kv=keep) as context:
        step = step_of(context, case)
        q, k, v = leaves_of(context, case)
        # As a model hands them over: [rows, seq, heads, channels] in memory.
        q = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        torch.library.opcheck(function._attend, (q, k, v, step.handle, 0, keep))
        nothing = [t.detach() for t in (q, k, v)]
        torch.library.opcheck(function._attend, (*nothing, step.handle, 0, keep))


def test_a_step_that_is_gone_is_named() -> None:
    from ringattn import function

    q = torch.zeros(1, 4, 4, 16)
    with pytest.raises(ringattn.ArgumentError, match="step 123456789: it does not exist"):
        function._attend(q, q, q, torch.tensor([123456789]), 0, False)


def test_autocast_casts_to_the_layers_dtype() -> None:
    case = Case(dtype=torch.bfloat16)
    with open_context(None, layer_of(case)) as context:
        step = step_of(context, case)
        leaves = [t.detach().float().requires_grad_() for t in leaves_of(context, case)]
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            out = ringattn.attention(*leaves, step)
        out.sum().backward()
        assert out.dtype == torch.bfloat16
        assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in leaves)
        with pytest.raises(ringattn.ShapeError, match="q: dtype"):
            ringattn.attention(*leaves, step)
