"""Ranks for tests: four processes that stay, so that torch is imported once and not once a test.

run(n, function, ...) calls function(rank, size, group, ...) in the first n of them and returns what
each returned, tensors in host memory. A rank that raises makes run raise; one that is not done in
time has the whole world ended and the test failed: nothing may hang.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

# Where the tests' tensors are: RINGATTN_TEST_DEVICE=cuda for the second half of them.
DEVICE = os.environ.get("RINGATTN_TEST_DEVICE", "cpu")
RANKS = 4
PRELOAD = ["torch", "torch.distributed", "ringattn"]
nccl: dict[int, Any] = {}  # in a rank: NCCL groups of the first 2, 3, ... ranks, a GPU each
TIME_LIMIT = 120.0
LEAVE_LIMIT = 2.0


if DEVICE == "cpu":  # where a pool of compiling processes, for each rank, costs more than it saves
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def preload(*modules: str) -> None:
    """Has modules imported once for all ranks, if it is said before the first run."""
    PRELOAD.extend(modules)


class RankFailed(AssertionError):
    """What a rank raised, as text."""


def _serve(rank: int, port: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist
    from torch.utils._pytree import tree_map_only

    torch.set_num_threads(1)
    if DEVICE == "cuda":  # ranks share a GPU where there are fewer
        torch.cuda.set_device(rank % torch.cuda.device_count())
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    groups = {size: dist.new_group(list(range(size))) for size in range(1, RANKS + 1)}
    if DEVICE == "cuda":
        for size in range(2, min(RANKS, torch.cuda.device_count()) + 1):
            nccl[size] = dist.new_group(list(range(size)), backend="nccl")
    while True:
        job = pipe.recv()
        if job is None:
            break
        size, function, arguments = job
        try:
            torch.manual_seed(0)
            result = function(rank, size, groups[size], *arguments)
            pipe.send((True, tree_map_only(torch.Tensor, torch.Tensor.cpu, result)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class World:
    def __init__(self) -> None:
        self.ranks: list[tuple[Any, Connection]] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(RANKS):
            near, far = context.Pipe()
            process = context.Process(target=_serve, args=(rank, port, far), daemon=True)
            process.start()
            far.close()
            self.ranks.append((process, near))

    def end(self) -> None:
        """Ranks that wait for a job leave by themselves, all others are killed."""
        for _, pipe in self.ranks:
            with suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + LEAVE_LIMIT
        for process, pipe in self.ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
            pipe.close()
        self.ranks = []

    def run(
        self, size: int, function: Callable[..., Any], arguments: tuple[Any, ...], limit: float
    ) -> list[Any]:
        pipes = [pipe for _, pipe in self.ranks[:size]]
        for pipe in pipes:
            pipe.send((size, function, arguments))
        answers: dict[Connection, tuple[bool, Any]] = {}
        deadline = time.monotonic() + limit
        while len(answers) < size:
            left = [pipe for pipe in pipes if pipe not in answers]
            ready = wait(left, max(0.0, deadline - time.monotonic()))
            if not ready:
                late = [rank for rank, pipe in enumerate(pipes) if pipe not in answers]
                self.end()
                said = "".join(str(a[1]) for a in answers.values() if not a[0])
                raise RankFailed(f"ranks {late} not done after {limit} s\n{said}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    answers[pipe] = pipe.recv()
                except EOFError:
                    self.end()
                    raise RankFailed(f"rank {pipes.index(pipe)}: its process has ended") from None
        failed = [f"rank {r}: {answers[p][1]}" for r, p in enumerate(pipes) if not answers[p][0]]
        if failed:
            raise RankFailed("\n".join(failed))
        return [answers[pipe][1] for pipe in pipes]


_world: World | None = None


def start() -> World:
    """Starts the ranks, if they do not run; what they import, they import in the background."""
    global _world
    if _world is None or not _world.ranks:
        _world = World()
        atexit.register(_world.end)
    return _world


def run(
    size: int, function: Callable[..., Any], *arguments: Any, limit: float = TIME_LIMIT
) -> list[Any]:
    """What function(rank, size, group, *arguments) returned on each of size ranks."""
    return start().run(size, function, arguments, limit)
