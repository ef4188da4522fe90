"""Rings over NCCL, one process per GPU: as many GPUs as there are, at most four."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringattn
import world
from reference import Case, assert_close, plain, truth
from ring import attend, layer_of, open_context, step_of, whole_of

GPUS = min(torch.cuda.device_count(), world.RANKS) if world.DEVICE == "cuda" else 0
pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs: a rank of NCCL has one to itself")

CASES = {
    "global": Case(),
    "sliding": Case(seq=17, window=5, docs=[[1] * 10 + [2] * 7]),
    "zigzag_bf16": Case(rows=2, seq=64, head_dim=64, layout="zigzag", dtype=torch.bfloat16),
    "tuned": Case(
        seq=512, head_dim=256, scale=1 / 16, window=100, dtype=torch.bfloat16, docs=[[1] * 512]
    ),
}


def over_nccl(rank: int, size: int, _: Any, name: str, mesh: bool) -> list[torch.Tensor]:
    """On a stream of its own, which nothing but torch's current stream names."""
    group = world.nccl[size]
    where: Any = dist.DeviceMesh.from_group(group, "cuda") if mesh else group
    case = CASES[name]
    with open_context(where, layer_of(case)) as context:
        assert context.transport.startswith("nccl 2.")
        with torch.cuda.stream(torch.cuda.Stream()):
            result = attend(context, case, step_of(context, case))
            torch.cuda.current_stream().synchronize()
        assert context.bytes_sent() > 0 or rank > 0
    return result


@pytest.mark.parametrize("mesh", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_results(name: str, mesh: bool) -> None:
    case = CASES[name]
    ours = whole_of(case, world.run(GPUS, over_nccl, name, mesh))
    for tensor, a, b, c in zip(("out", "dq", "dk", "dv"), ours, plain(case), truth(case)):
        assert_close(tensor, a, b, c)


def two_groups(rank: int, size: int, gloo: Any) -> list[torch.Tensor]:
    """A ring over NCCL and one over gloo, layer by layer, on the same tensors."""
    case = CASES["global"]
    with (
        open_context(world.nccl[size], layer_of(case)) as fast,
        open_context(gloo, layer_of(case)) as staged,
    ):
        steps = step_of(fast, case), step_of(staged, case)
        pairs = [(attend(fast, case, steps[0]), attend(staged, case, steps[1])) for _ in range(3)]
    for ours, theirs in pairs:
        for a, b in zip(ours, theirs):
            assert torch.equal(a, b)
    return pairs[0][0]


def test_nccl_and_gloo_give_the_same_bits() -> None:
    world.run(GPUS, two_groups)


def shared_gpu(rank: int, size: int, _: Any) -> tuple[str, bool]:
    """What is said, and whether torch's current device stays when the failed context is gone."""
    group, said, before = world.nccl[size], "opened", torch.cuda.current_device()
    try:
        open_context(group, layer_of(Case()), device="cuda:0").close()
    except ringattn.UnavailableError as error:
        said = str(error)
    gc.collect()
    return said, torch.cuda.current_device() == before


def test_two_ranks_on_one_gpu_are_named() -> None:
    for said, device_stays in world.run(2, shared_gpu):
        assert "ranks 0 and 1 use the same GPU" in said, said
        assert device_stays


def given_up(rank: int, size: int, _: Any) -> str:
    """Rank 1 gives up before the call that rank 0 makes; both can go on with another context."""
    group, case = world.nccl[size], CASES["global"]
    with open_context(group, layer_of(case)) as context:
        step = step_of(context, case)
        if rank == 1:
            context.abort("this rank has given up")
        try:
            attend(context, case, step)
            torch.cuda.synchronize()
            attend(context, case, step)
            said = "finished"
        except ringattn.CommError as error:
            said = str(error)
    with open_context(group, layer_of(case)) as context:
        attend(context, case, step_of(context, case))
    return said


def test_an_abort_reaches_the_other_rank() -> None:
    for said in world.run(2, given_up, limit=60.0):
        assert said.startswith("RA_E_COMM"), said


def elsewhere(rank: int, size: int, _: Any) -> tuple[int, int]:
    """The current device of torch before and after everything on another one."""
    other, case = (rank + 1) % size, CASES["global"]
    before = torch.cuda.current_device()
    with open_context(world.nccl[size], layer_of(case), device=f"cuda:{other}") as context:
        attend(context, case, step_of(context, case))
    return before, torch.cuda.current_device()


def test_the_current_device_stays() -> None:
    for before, after in world.run(2, elsewhere):
        assert before == after
