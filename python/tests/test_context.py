"""Contexts and steps over their lifetime: several at once, metadata that changes, errors,
memory."""

from __future__ import annotations

import ctypes
import gc
import os
import queue
import signal
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringattn
import world
from reference import Case, assert_close, plain, truth
from ringattn.channel import Channel, TransportError
from ring import attend, cut, layer_of, open_context, step_of
from world import DEVICE

GLOBAL, SLIDING = Case(seq=12), Case(seq=12, window=3, seed=7)


def check(case: Case, parts: list[list[torch.Tensor]]) -> None:
    for i, (a, b) in enumerate(zip(plain(case), truth(case))):
        assert_close(str(i), torch.cat([part[i] for part in parts], 2), a, b)


def two_contexts(rank: int, size: int, group: Any) -> list[list[torch.Tensor]]:
    """All four ranks in one ring; at the same time the pairs {0, 1} and {2, 3} in rings of two."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    layers = [layer_of(GLOBAL), layer_of(SLIDING)]
    with (
        open_context(group, *layers) as four,
        open_context(mesh["cp"], *layers) as two,
    ):
        assert (two.rank, two.size) == (rank % 2, 2)
        steps = [(context, step_of(context, GLOBAL)) for context in (four, two)]
        results = []
        for layer, case in enumerate((GLOBAL, SLIDING)):
            results += [attend(context, case, step, layer) for context, step in steps]
        with pytest.raises(ValueError, match="DeviceMesh of 2 dimensions"):
            open_context(mesh, *layers)
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
        open_context(group, *layers) as one,
        open_context(group, *layers) as other,
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
            nothing = attend(other, case, second, layer)
            assert all(bool((t == 0).all()) for t in nothing)
            results.append(attend(one, case, first, layer))
    return results


def call_without_backward(context: ringattn.Context, step: ringattn.Step) -> None:
    q, k, v = (cut(context, GLOBAL, t, 2).clone().requires_grad_() for t in GLOBAL.inputs()[:3])
    ringattn.attention(q, k, v, step, 0)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_alternating_models_refilled_metadata_and_an_exception(size: int) -> None:
    ranks = world.run(size, interrupted)
    for i, case in enumerate((GLOBAL, SLIDING)):
        check(case, [rank[i] for rank in ranks])


def kept(rank: int, size: int, group: Any, keep: bool) -> tuple[int, list[torch.Tensor]]:
    """Bytes that a backward sends, and the results."""
    with open_context(group, layer_of(GLOBAL), keep_kv=keep) as context:
        results = attend(context, GLOBAL, step_of(context, GLOBAL))
        return context.bytes_sent(), results


@pytest.mark.parametrize("size", [2, 3])
def test_kept_rows_travel_once(size: int) -> None:
    once, again = (world.run(size, kept, keep) for keep in (True, False))
    assert sum(few for few, _ in once) < sum(many for many, _ in again)
    for (_, ours), (_, theirs) in zip(once, again):
        for a, b in zip(ours, theirs):
            assert torch.equal(a, b)


def defaults(rank: int, size: int, group: Any) -> list[torch.Tensor]:
    """A program whose new tensors are float64 and nowhere near the ring's."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), open_context(group, layer_of(GLOBAL)) as context:
            ids = torch.full((1, 12 // size), 2**40, device="cpu")
            step = context.step(packed_seq_ids=ids)
            whole = context.gather_rows(ids)
            assert whole.shape == (1, 12) and step.global_positions().device.type == "cpu"
            return attend(context, GLOBAL, step)
    finally:
        torch.set_default_dtype(usual)


@pytest.mark.parametrize("size", [1, 2])
def test_the_programs_defaults_do_not_matter(size: int) -> None:
    check(GLOBAL, world.run(size, defaults))


def wide(rank: int, size: int, group: Any) -> list[list[torch.Tensor]]:
    """Ids that agree in their low 32 bits, types that are 1 only after narrowing."""
    with open_context(group, layer_of(Case(window=4, vision="over_window"))) as context:
        ids = torch.tensor(
            [[5, 5, 5, 5, 5, 2**32 + 5, 2**32 + 5, 2**32 + 5, 7, 7, -(2**40), 2**40]]
        )
        types = torch.full((1, 12), 2**32 + 1)
        step = context.step(
            packed_seq_ids=cut(context, GLOBAL, ids, 1),
            mm_token_type_ids=cut(context, GLOBAL, types, 1),
        )
        return [attend(context, GLOBAL, step, 0)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_wide_ids_are_renumbered_and_types_compared(size: int) -> None:
    case = Case(seq=12, window=4, docs=[[1] * 5 + [2] * 3 + [3] * 2 + [0, 4]])
    check(case, [rank[0] for rank in world.run(size, wide)])


def test_a_failed_context_says_why_and_another_one_works() -> None:
    for said in world.run(2, broken):
        assert "only ra_ctx_free" in said or "aborted" in said


def broken(rank: int, size: int, group: Any) -> str:
    layers = [layer_of(GLOBAL)]
    with open_context(group, *layers) as context:
        step = step_of(context, GLOBAL)
        with pytest.raises(ringattn.RingattnError):
            ringattn.attention(*(torch.zeros(1, 2, 6, 16, device=context.device),) * 3, step)
        with pytest.raises(ringattn.RingattnError) as caught:
            attend(context, GLOBAL, step, 0)
    with open_context(group, *layers) as context:
        attend(context, GLOBAL, step_of(context, GLOBAL), 0)
    return str(caught.value)


def late(rank: int, size: int, group: Any) -> str:
    """Rank 1 never calls: rank 0 must not wait for ever."""
    with open_context(group, layer_of(Case(causal=False)), timeout_ms=1500) as context:
        step = context.step((1, 6))
        if rank == 1:
            dist.barrier(group=group)
            return "waited"
        try:
            attend(context, Case(seq=12, causal=False), step, 0)
            return "done"
        except ringattn.CommError as error:
            return str(error)
        finally:
            dist.barrier(group=group)


def test_a_rank_that_does_not_come_is_a_comm_error() -> None:
    said = world.run(2, late, limit=30.0)
    assert said[0].startswith("RA_E_COMM") and said[1] == "waited", said


def watched(rank: int, size: int, group: Any) -> str:
    """Rank 1 gives up in a channel that rank 0 only watches, first idle and then busy."""
    channel, told, busy = Channel(group, 20_000), queue.SimpleQueue[str](), threading.Event()
    channel.watch(busy.is_set, told.put)
    dist.barrier(group=group)
    if rank == 1:
        channel.abort("given up")
    dist.barrier(group=group)
    with pytest.raises(queue.Empty):
        told.get(timeout=1.0)
    busy.set()
    said = told.get(timeout=10.0)
    channel.close()
    return said


def test_a_watched_channel_brings_a_peers_abort() -> None:
    assert world.run(2, watched) == ["rank 1: given up"] * 2


def left(rank: int, size: int, group: Any) -> str:
    """What rank 0 hears of rank 1, which leaves without a word."""
    channel = Channel(group, 20_000)
    said = "left"
    if rank == 0:
        works = [channel.receive(torch.empty(4), 1)]
        with pytest.raises(TransportError) as caught:
            channel.wait(works, 20_000, [1])
        said = str(caught.value)
    channel.close()
    return said


def test_a_closed_connection_is_told_with_the_peers_rank() -> None:
    said = world.run(2, left, limit=30.0)
    assert said[0].startswith("rank 1: ") and said[1] == "left", said


def stopped(rank: int, size: int, group: Any) -> tuple[str, float]:
    """Rank 0, which keeps the group's store, stops for five seconds; what rank 1 hears, and when
    it has told everybody."""
    channel = Channel(group, 1_000)
    dist.barrier(group=group)
    start = time.monotonic()
    said = "stopped"
    if rank == 0:
        with subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {os.getpid()}"]):
            os.kill(os.getpid(), signal.SIGSTOP)
    else:
        with pytest.raises(TransportError) as caught:
            channel.wait([channel.receive(torch.empty(4), 0)], 1_000, [0])
        said = str(caught.value)
        channel.abort(said)
    channel.close()
    return said, time.monotonic() - start


def test_a_store_that_does_not_answer_delays_nobody() -> None:
    said = world.run(2, stopped, limit=30.0)
    assert said[1][0].startswith("rank 0: ") and said[1][1] < 3.0, said


class Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2"""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def held_by_malloc() -> int:
    """Bytes of the C heap that are in use; 0 where the C library does not say."""
    look: Any = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if look is None:
        return 0
    look.restype = Mallinfo
    info = look()
    return int(info.uordblks + info.hblkhd)


def held_outside() -> list[int]:
    return [held_by_malloc(), torch.cuda.memory_allocated() if DEVICE == "cuda" else 0]


def held_by_python() -> list[int]:
    return [tracemalloc.get_traced_memory()[0]]


def steady(rank: int, size: int, group: Any) -> tuple[list[float], int]:
    """Bytes that malloc, the GPU and Python hold more with each of 1,000 steps; and the steps that
    are still there. Caches fill now and then: what every step adds, every part of them adds."""
    with open_context(group, layer_of(GLOBAL)) as context:

        def growth(held: Callable[[], list[int]]) -> list[float]:
            seen = []
            for _ in range(5):
                for _ in range(200):
                    attend(context, GLOBAL, step_of(context, GLOBAL))
                gc.collect()
                seen.append(held())
            more = [[b - a for a, b in zip(*pair)] for pair in zip(seen, seen[1:])]
            return [min(column) / 200 for column in zip(*more)]

        outside = growth(held_outside)
        tracemalloc.start()
        inside = growth(held_by_python)
        tracemalloc.stop()
        return outside + inside, len(context._core.steps)


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_grows(size: int) -> None:
    for (in_malloc, on_gpu, in_python), steps in world.run(size, steady):
        assert steps == 0
        assert in_python < 40  # less than any object that holds others
        assert in_malloc < 64 and on_gpu == 0  # free blocks of a thread's own count as held


@pytest.mark.skipif(DEVICE != "cuda", reason="a CPU has no streams")
def test_calls_go_to_the_current_stream_and_return_before_it() -> None:
    """Behind a second of other work on a stream of the caller's, whose result they read."""
    with open_context(None, layer_of(GLOBAL)) as context, torch.cuda.stream(torch.cuda.Stream()):
        step = step_of(context, GLOBAL)
        attend(context, GLOBAL, step)  # memory and kernels are there now
        *late, dout = (cut(context, GLOBAL, t, 2) for t in GLOBAL.inputs())
        leaves = [torch.zeros_like(t).requires_grad_() for t in late]
        torch.cuda.current_stream().synchronize()
        torch.cuda._sleep(2_000_000_000)
        with torch.no_grad():
            for leaf, value in zip(leaves, late):
                leaf.copy_(value)
        out = ringattn.attention(*leaves, step)
        results = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        assert not torch.cuda.current_stream().query()
    check(GLOBAL, [results])


def test_closing_frees_everything_in_any_order() -> None:
    context = open_context(None, layer_of(GLOBAL))
    step = step_of(context, GLOBAL)
    context.close()
    context.close()
    with pytest.raises(RuntimeError, match="closed"):
        context.step((1, 4))
    with pytest.raises(RuntimeError, match="closed"):
        attend(context, GLOBAL, step, 0)
    del step, context
    gc.collect()


def test_unknown_layers_are_refused() -> None:
    with open_context(None, layer_of(GLOBAL)) as context:
        step = step_of(context, GLOBAL)
        q = torch.zeros(1, 4, 12, 16, device=context.device)
        with pytest.raises(IndexError, match="layer: 1, expected 0 to 0"):
            ringattn.attention(q, q[:, :2], q[:, :2], step, 1)
        with pytest.raises(ValueError, match="expected one of the context's"):
            ringattn.attention(q, q[:, :2], q[:, :2], step, layer_of(SLIDING))
        assert step.plan_info()["pairs_total"] == 12 * 13 // 2


def without_data(rank: int, size: int, group: Any) -> list[list[torch.Tensor]]:
    """One rank's metadata cannot be read: every rank hears of it at once, and the ring goes on."""
    with open_context(group, layer_of(GLOBAL)) as context:
        for name, dtype in (
            ("packed_seq_ids", torch.int32),
            ("padding_mask", torch.bool),
            ("mm_token_type_ids", torch.int64),
        ):
            device = "meta" if rank == 1 else "cpu"
            with pytest.raises(NotImplementedError if rank == 1 else ValueError, match="meta"):
                context.step(**{name: torch.ones(1, 12 // size, dtype=dtype, device=device)})
        return [attend(context, GLOBAL, step_of(context, GLOBAL), 0)]


def test_a_group_of_others() -> None:
    with pytest.raises(ValueError, match="group: this process is not in it"):
        ringattn.Context(dist.GroupMember.NON_GROUP_MEMBER, layers=[layer_of(GLOBAL)])


def test_values_of_other_types_are_named() -> None:
    layer = layer_of(GLOBAL)
    for changes in ({"window": None}, {"q_heads": 4.0}):
        with pytest.raises(TypeError, match=f"{next(iter(changes))}: .*, expected an integer"):
            open_context(None, layer_of(GLOBAL, **changes))
    with pytest.raises(TypeError, match="scale: None, expected a number"):
        layer_of(GLOBAL, scale=None)
    for layers in (layer, [{"q_heads": 4}]):
        with pytest.raises(TypeError, match="layers: .*expected a sequence"):
            ringattn.Context(layers=layers)
    with pytest.raises(TypeError, match="group: str, expected None, a ProcessGroup"):
        ringattn.Context("cp", layers=[layer])
    with open_context(None, layer) as context:
        with pytest.raises(TypeError, match="packed_seq_ids: list, expected a tensor"):
            context.step(packed_seq_ids=[[1, 1]])
        with pytest.raises(TypeError, match="padding_mask: list, expected a tensor"):
            context.step(padding_mask=[[True]])
        step = step_of(context, GLOBAL)
        q, k, v = (cut(context, GLOBAL, t, 2) for t in GLOBAL.inputs()[:3])
        with pytest.raises(TypeError, match="k: ndarray, expected a tensor"):
            ringattn.attention(q, k.cpu().numpy(), v, step)
        with pytest.raises(TypeError, match="step: Context, expected what Context.step"):
            ringattn.attention(q, k, v, context)


def test_a_launched_rank_without_a_group_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """dist.group.WORLD is None before init_process_group: the shard would be the sequence."""
    for size, said in (("1", 0), ("2", 1)):
        monkeypatch.setenv("WORLD_SIZE", size)
        open_context(dist.group.WORLD, layer_of(GLOBAL)).close()
        assert len(caplog.records) == said
    assert "WORLD_SIZE is 2" in caplog.text


def test_metadata_without_data() -> None:
    check(GLOBAL, [rank[0] for rank in world.run(2, without_data)])


def test_shapes_that_are_not_of_rows() -> None:
    with ringattn.Context(layers=[layer_of(GLOBAL)]) as context:
        with pytest.raises(ValueError, match="expected .rows, seq_local."):
            context.step((1, 2, 3))
        for shape in ((), (12,), (1, 1, 12)):
            with pytest.raises(ValueError, match="packed_seq_ids: shape .*, expected .rows"):
                context.step(packed_seq_ids=torch.ones(shape, dtype=torch.int64))
