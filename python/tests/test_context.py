"""Contexts and steps over their lifetime: several at once, metadata that changes, errors,
memory."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringattn
import world
from reference import Case, assert_close, plain, truth
from ring import cut, layer_of, step_of

GLOBAL, SLIDING = Case(seq=12), Case(seq=12, window=3, seed=7)


def call(
    context: ringattn.Context, case: Case, step: ringattn.Step, layer: int
) -> list[torch.Tensor]:
    q, k, v, dout = (cut(context, case, t, 2) for t in case.inputs())
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = ringattn.attention(*leaves, step, layer)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def check(case: Case, parts: list[list[torch.Tensor]]) -> None:
    for i, (a, b) in enumerate(zip(plain(case), truth(case))):
        assert_close(str(i), torch.cat([part[i] for part in parts], 2), a, b)


def two_contexts(rank: int, size: int, group: Any) -> list[list[torch.Tensor]]:
    """All four ranks in one ring; at the same time the pairs {0, 1} and {2, 3} in rings of two."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    layers = [layer_of(GLOBAL), layer_of(SLIDING)]
    with (
        ringattn.Context(group, layers=layers) as four,
        ringattn.Context(mesh["cp"], layers=layers) as two,
    ):
        assert (two.rank, two.size) == (rank % 2, 2)
        steps = [(context, step_of(context, GLOBAL)) for context in (four, two)]
        results = []
        for layer, case in enumerate((GLOBAL, SLIDING)):
            results += [call(context, case, step, layer) for context, step in steps]
        with pytest.raises(ValueError, match="DeviceMesh of 2 dimensions"):
            ringattn.Context(mesh, layers=layers)
        return results


def test_two_contexts_with_different_groups() -> None:
    ranks = world.run(4, two_contexts)
    for i, case in enumerate((GLOBAL, GLOBAL, SLIDING, SLIDING)):
        parts = [rank[i] for rank in ranks]
        if i % 2 == 0:
            check(case, parts)
        else:
            check(case, parts[:2])
            check(case, parts[2:])


def interrupted(rank: int, size: int, group: Any) -> list[list[torch.Tensor]]:
    """Two models alternate, ids are refilled in place, a forward is left without a backward."""
    layers = [layer_of(GLOBAL), layer_of(SLIDING)]
    results = []
    with (
        ringattn.Context(group, layers=layers) as one,
        ringattn.Context(group, layers=layers) as other,
    ):
        ids = torch.ones(1, 12 // size, dtype=torch.int64)
        first = one.step(packed_seq_ids=ids)
        ids.fill_(-1)  # an early step must not see this
        second = other.step(packed_seq_ids=ids)
        try:
            call_without_backward(one, first)
            raise KeyError("between two layers")
        except KeyError:
            pass
        for layer, case in enumerate((GLOBAL, SLIDING)):
            nothing = call(other, case, second, layer)
            assert all(bool((t == 0).all()) for t in nothing)
            results.append(call(one, case, first, layer))
    return results


def call_without_backward(context: ringattn.Context, step: ringattn.Step) -> None:
    q, k, v = (cut(context, GLOBAL, t, 2).clone().requires_grad_() for t in GLOBAL.inputs()[:3])
    ringattn.attention(q, k, v, step, 0)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_alternating_models_refilled_metadata_and_an_exception(size: int) -> None:
    ranks = world.run(size, interrupted)
    for i, case in enumerate((GLOBAL, SLIDING)):
        check(case, [rank[i] for rank in ranks])


def wide(rank: int, size: int, group: Any) -> list[list[torch.Tensor]]:
    """Ids that agree in their low 32 bits, types that are 1 only after narrowing."""
    with ringattn.Context(
        group, layers=[layer_of(Case(window=4, vision="over_window"))]
    ) as context:
        ids = torch.tensor(
            [[5, 5, 5, 5, 5, 2**32 + 5, 2**32 + 5, 2**32 + 5, 7, 7, -(2**40), 2**40]]
        )
        types = torch.full((1, 12), 2**32 + 1)
        step = context.step(
            packed_seq_ids=cut(context, GLOBAL, ids, 1),
            mm_token_type_ids=cut(context, GLOBAL, types, 1),
        )
        return [call(context, GLOBAL, step, 0)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_wide_ids_are_renumbered_and_types_compared(size: int) -> None:
    case = Case(seq=12, window=4, docs=[[1] * 5 + [2] * 3 + [3] * 2 + [0, 4]])
    check(case, [rank[0] for rank in world.run(size, wide)])


def test_a_failed_context_says_why_and_another_one_works() -> None:
    for said in world.run(2, broken):
        assert "only ra_ctx_free" in said or "aborted" in said


def broken(rank: int, size: int, group: Any) -> str:
    layers = [layer_of(GLOBAL)]
    with ringattn.Context(group, layers=layers) as context:
        step = step_of(context, GLOBAL)
        with pytest.raises(ringattn.RingattnError):
            ringattn.attention(*(torch.zeros(1, 2, 6, 16),) * 3, step)
        with pytest.raises(ringattn.RingattnError) as caught:
            call(context, GLOBAL, step, 0)
    with ringattn.Context(group, layers=layers) as context:
        call(context, GLOBAL, step_of(context, GLOBAL), 0)
    return str(caught.value)


def late(rank: int, size: int, group: Any) -> str:
    """Rank 1 never calls: rank 0 must not wait for ever."""
    with ringattn.Context(group, layers=[layer_of(Case(causal=False))], timeout_ms=1500) as context:
        step = context.step((1, 6))
        if rank == 1:
            dist.barrier(group=group)
            return "waited"
        try:
            call(context, Case(seq=12, causal=False), step, 0)
            return "done"
        except ringattn.CommError as error:
            return str(error)
        finally:
            dist.barrier(group=group)


def test_a_rank_that_does_not_come_is_a_comm_error() -> None:
    said = world.run(2, late, limit=30.0)
    assert said[0].startswith("RA_E_COMM") and said[1] == "waited", said


def steady(rank: int, size: int, group: Any) -> tuple[int, int]:
    """Bytes that Python holds more after 1,000 further steps than after 200."""
    with ringattn.Context(group, layers=[layer_of(GLOBAL)]) as context:

        def steps(count: int) -> int:
            for _ in range(count):
                call(context, GLOBAL, step_of(context, GLOBAL), 0)
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        before = steps(200)
        after = steps(1000)
        tracemalloc.stop()
        return after - before, len(context._core.steps)


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_grows(size: int) -> None:
    for growth, steps in world.run(size, steady):
        assert steps == 0
        assert growth < 50_000


def test_closing_frees_everything_in_any_order() -> None:
    context = ringattn.Context(layers=[layer_of(GLOBAL)])
    step = step_of(context, GLOBAL)
    context.close()
    context.close()
    with pytest.raises(RuntimeError, match="closed"):
        context.step((1, 4))
    with pytest.raises(RuntimeError, match="closed"):
        call(context, GLOBAL, step, 0)
    del step, context
    gc.collect()


def test_unknown_layers_are_refused() -> None:
    with ringattn.Context(layers=[layer_of(GLOBAL)]) as context:
        step = step_of(context, GLOBAL)
        q = torch.zeros(1, 4, 12, 16)
        with pytest.raises(IndexError, match="layer: 1, expected 0 to 0"):
            ringattn.attention(q, q[:, :2], q[:, :2], step, 1)
        with pytest.raises(ValueError, match="expected one of the context's"):
            ringattn.attention(q, q[:, :2], q[:, :2], step, layer_of(SLIDING))
        assert step.plan_info()["pairs_total"] == 12 * 13 // 2
