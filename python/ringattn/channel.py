"""The host side of a ring over a torch.distributed group: small tensors, and the news of an abort.

It is a gloo group of the ring's own, made over the store of the program's group, so that its
messages never meet the program's, whatever backend that has. Must not know what the bytes mean.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

_ABORT_KEY = "abort"
_POLL_SECONDS = 0.1
_WATCH_SECONDS = 0.25
_ANSWER_SECONDS = 0.05
_TELL_SECONDS = 1.0
_NAME_MAX = 400
_TEXT_BYTES = 384


Result = TypeVar("Result")


class TransportError(Exception):
    """Why a message did not arrive."""


_opened: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _own_store(parent: Any) -> Any:
    """A part of the parent's store for one context. torch.distributed.new_group would name its
    group by a count of groups that only agrees if every process of the program takes part."""
    count = _opened.get(parent, 0)
    _opened[parent] = count + 1
    store: Any = dist
    return store.PrefixStore(f"ringattn/{count}", parent.get_group_store())


class _Job(Generic[Result]):
    """Has it ended, and with what? error: None while it runs and when it went well."""

    def __init__(self, run: Callable[[], Result]) -> None:
        self._run = run
        self.done = threading.Event()
        self.result: Result | None = None
        self.error: Exception | None = None

    def __call__(self) -> None:
        try:
            self.result = self._run()
        except Exception as error:
            self.error = error
        self.done.set()


class _Worker:
    """Does jobs on a thread of its own: waits of backends and questions to a store cannot be
    interrupted, so the thread that must notice a time-out cannot be the one that waits."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job

    def start(self, run: Callable[[], Result]) -> _Job[Result]:
        job = _Job(run)
        self._jobs.put(job)
        return job

    def stop(self) -> None:
        self._jobs.put(None)


def _wait_all(works: Sequence[Any], peers: Sequence[int], timeout: timedelta) -> None:
    for at, work in enumerate(works):
        try:
            work.wait(timeout)
        except Exception as error:
            raise TransportError(f"rank {peers[at]}: {error}" if peers else str(error)) from error


class Channel:
    """Collective over the group. `why` says why it has ended, None while it works."""

    def __init__(self, parent: dist.ProcessGroup, timeout_ms: int) -> None:
        self.rank, self.size = dist.get_rank(parent), dist.get_world_size(parent)
        self.timeout_ms = timeout_ms
        self.why: str | None = None
        self._store: Any = _own_store(parent)
        timeout = timedelta(milliseconds=timeout_ms)
        self._group: Any = dist.ProcessGroupGloo(self._store, self.rank, self.size, timeout)
        self._waiter, self._asker = _Worker("ringattn-wait"), _Worker("ringattn-ask")
        self._asking = threading.Lock()
        self._question: _Job[str | None] | None = None
        self._watcher: threading.Thread | None = None
        self._closed = threading.Event()

    def check(self) -> None:
        if self.why is not None:
            raise TransportError(self.why)

    def _peer_abort(self) -> str | None:
        """What a peer said when it aborted."""
        try:
            if self._store.check([_ABORT_KEY]):
                return bytes(self._store.get(_ABORT_KEY)).decode(errors="replace")
        except Exception as error:
            return f"the group's store is gone: {error}"
        return None

    def _heard(self) -> str | None:
        """_peer_abort, if the store answers soon: the process that keeps it may have stopped. Else
        the next call looks for the answer."""
        with self._asking:
            if self._question is None:
                self._question = self._asker.start(self._peer_abort)
            if not self._question.done.wait(_ANSWER_SECONDS):
                return None
            answer, self._question = self._question.result, None
            return answer

    def wait(self, works: Sequence[Any], timeout_ms: int, peers: Sequence[int] = ()) -> None:
        """Until all are done. TransportError when one fails, is late, or a peer has aborted.

        peers: at the other ends, where each work has one; gloo names an address.
        """
        timeout = timedelta(milliseconds=timeout_ms)
        deadline = time.monotonic() + timeout.total_seconds() + 1.0
        job = self._waiter.start(lambda: _wait_all(works, peers, timeout))
        while not job.done.wait(_POLL_SECONDS):
            why = self.why or self._heard()
            if why is not None:
                raise TransportError(why)
            if time.monotonic() > deadline:
                raise TransportError(f"not done within {timeout_ms} ms")
        if job.error:
            raise TransportError(self.why or self._heard() or str(job.error)) from job.error

    def send(self, flat: torch.Tensor, peer: int) -> Any:
        return self._group.send([flat], peer, 0)

    def receive(self, flat: torch.Tensor, peer: int) -> Any:
        return self._group.recv([flat], peer, 0)

    def gather(self, mine: torch.Tensor, timeout_ms: int) -> torch.Tensor:
        """[size, *mine.shape]: every rank's tensor."""
        everyone = torch.empty((self.size, *mine.shape), dtype=mine.dtype, device="cpu")
        self.wait([self._group.allgather([list(everyone.unbind(0))], [mine])], timeout_ms)
        return everyone

    def _tell(self) -> None:
        self._store.set(_ABORT_KEY, f"rank {self.rank}: {self.why}"[:_NAME_MAX])
        # A set is not waited for; behind this answer peers find the reason before they find this
        # rank's connections closed.
        self._store.check([_ABORT_KEY])

    def abort(self, why: str) -> None:
        """Makes every rank's pending and later waits fail soon."""
        if self.why is None:
            self.why = why
            self._asker.start(self._tell).done.wait(_TELL_SECONDS)

    def watch(self, busy: Callable[[], bool], tell: Callable[[str], None]) -> None:
        """Starts to look for a peer's abort, now and then while busy; tells it once. For messages
        that take another way than this channel."""

        def look() -> None:
            while not self._closed.wait(_WATCH_SECONDS):
                why = self._heard() if busy() else None
                if why is not None:
                    tell(why)
                    return

        self._watcher = threading.Thread(target=look, name="ringattn-watch", daemon=True)
        self._watcher.start()

    def end_watch(self) -> None:
        """Nothing is told after it."""
        self._closed.set()
        if self._watcher is not None:
            self._watcher.join()

    def close(self) -> None:
        self.end_watch()
        self._waiter.stop()
        self._asker.stop()
        self._group = self._store = None


def agree(
    gather: Callable[[torch.Tensor], torch.Tensor], error: Exception | None, mine: torch.Tensor
) -> torch.Tensor:
    """Gives every rank every rank's bytes, [size, count], or every rank the first rank's error.

    Without it a rank whose arguments are refused in Python would leave the others waiting in the
    library. mine: uint8.
    """
    text = f"{type(error).__name__}: {error}".encode()[:_TEXT_BYTES] if error else b""
    said = torch.frombuffer(bytearray(text.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8)
    everyone = gather(torch.cat([mine, said]))
    if error is not None:
        raise error
    for rank, other in enumerate(everyone[:, mine.numel() :]):
        if other[0] != 0:
            words = bytes(other.tolist()).rstrip(b"\0").decode(errors="replace")
            raise ValueError(f"rank {rank}: {words}")
    return everyone[:, : mine.numel()].contiguous()
