"""A torch.distributed group as the library's transport: its five callbacks, in Python.

The ring gets a gloo group of its own, made over the store of the program's group, so that its
messages never meet the program's, whatever backend that has. Callbacks run on the library's
communication thread, which holds the interpreter lock only while one runs. No exception leaves a
callback: it is kept in `failure` and the library gets RA_E_COMM. Must not know what the bytes mean.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringattn import _c
from ringattn.errors import CommError

_ABORT_KEY = "abort"
_POLL_SECONDS = 0.1
_NAME_MAX = 400


class TransportError(Exception):
    """Why a callback failed."""


_opened: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _own_store(parent: Any) -> Any:
    """A part of the parent's store for one context. torch.distributed.new_group would name its
    group by a count of groups that only agrees if every process of the program takes part."""
    count = _opened.get(parent, 0)
    _opened[parent] = count + 1
    store: Any = dist
    return store.PrefixStore(f"ringattn/{count}", parent.get_group_store())


class _Waiter:
    """Waits for works on a thread of its own: the backends' waits cannot be interrupted, so the
    thread that must notice an abort cannot be the one that waits."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="ringattn-wait", daemon=True).start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job

    def start(
        self, works: Sequence[Any], timeout: timedelta
    ) -> tuple[threading.Event, list[Exception]]:
        done, errors = threading.Event(), list[Exception]()

        def wait() -> None:
            try:
                for work in works:
                    work.wait(timeout)
            except Exception as error:
                errors.append(error)
            done.set()

        self._jobs.put(wait)
        return done, errors

    def stop(self) -> None:
        self._jobs.put(None)


class _GroupTransport:
    """Callbacks over one process group."""

    def __init__(self, parent: dist.ProcessGroup, timeout: timedelta) -> None:
        self.rank, self.size = dist.get_rank(parent), dist.get_world_size(parent)
        self.store: Any = _own_store(parent)
        self.group: Any = dist.ProcessGroupGloo(self.store, self.rank, self.size, timeout)
        self.failure: BaseException | None = None
        self.why: str | None = None
        self.waiter = _Waiter()
        self.buffers: dict[tuple[int, bool], torch.Tensor] = {}
        self.callbacks = _c.CommCallbacks(
            size=ctypes.sizeof(_c.CommCallbacks),
            user=None,
            exchange=_c.EXCHANGE(self._guard(self._exchange)),
            gather=_c.GATHER(self._guard(self._gather)),
            barrier=_c.BARRIER(self._guard(self._barrier)),
            abort=_c.ABORT(self._abort),
            close=_c.CLOSE(self._close),
        )

    def _guard(self, call: Callable[..., None]) -> Callable[..., int]:
        """No exception may pass through C."""

        def guarded(_user: Any, *arguments: Any) -> int:
            try:
                if self.why is not None:
                    raise TransportError(self.why)
                call(*arguments)
                return _c.RA_OK
            except BaseException as error:
                self.failure = self.failure or error
                return _c.RA_E_COMM

        return guarded

    def _peer_abort(self) -> str | None:
        """What a peer said when it aborted."""
        try:
            if self.store.check([_ABORT_KEY]):
                return bytes(self.store.get(_ABORT_KEY)).decode(errors="replace")
        except Exception as error:
            return f"the group's store is gone: {error}"
        return None

    def _wait(self, works: Sequence[Any], timeout_ms: int) -> None:
        timeout = timedelta(milliseconds=timeout_ms)
        deadline = time.monotonic() + timeout.total_seconds() + 1.0
        done, errors = self.waiter.start(works, timeout)
        while not done.wait(_POLL_SECONDS):
            why = self.why or self._peer_abort()
            if why is not None:
                raise TransportError(why)
            if time.monotonic() > deadline:
                raise TransportError(f"not done within {timeout_ms} ms")
        if errors:
            raise TransportError(self.why or self._peer_abort() or str(errors[0])) from errors[0]

    def _buffer(self, peer: int, send: bool, count: int) -> torch.Tensor:
        """A flat buffer that is kept for the next message of this direction."""
        buffer = self.buffers.get((peer, send))
        if buffer is None or buffer.numel() < count:
            buffer = torch.empty(count, dtype=torch.uint8)
            self.buffers[peer, send] = buffer
        return buffer[:count]

    def _exchange(self, xfers: Any, count: int, timeout_ms: int) -> None:
        works, landed = [], []
        for xfer in sorted(xfers[:count], key=lambda x: x.send):
            if xfer.bytes == 0:
                continue
            flat = self._buffer(xfer.peer, xfer.send, xfer.bytes)
            if xfer.send:
                _c.lib.ra_xfer_pack(ctypes.byref(xfer), flat.data_ptr())
                works.append(self.group.send([flat], xfer.peer, 0))
            else:
                works.append(self.group.recv([flat], xfer.peer, 0))
                landed.append((xfer, flat))
        if works:
            self._wait(works, timeout_ms)
        for xfer, flat in landed:
            _c.lib.ra_xfer_unpack(ctypes.byref(xfer), flat.data_ptr())

    def gather_tensor(self, mine: torch.Tensor, timeout_ms: int) -> torch.Tensor:
        """[size, *mine.shape]: every rank's tensor."""
        everyone = torch.empty((self.size, *mine.shape), dtype=mine.dtype)
        self._wait([self.group.allgather([list(everyone.unbind(0))], [mine])], timeout_ms)
        return everyone

    def _gather(self, mine: int, count: int, everyone: int, timeout_ms: int) -> None:
        if count == 0:
            return
        own = torch.empty(count, dtype=torch.uint8)
        ctypes.memmove(own.data_ptr(), mine, count)
        gathered = self.gather_tensor(own, timeout_ms)
        ctypes.memmove(everyone, gathered.data_ptr(), gathered.numel())

    def _barrier(self, timeout_ms: int) -> None:
        self.gather_tensor(torch.zeros(1, dtype=torch.uint8), timeout_ms)

    def _abort(self, _user: Any, why: bytes | None) -> None:
        try:
            if self.why is None:
                self.why = (why or b"aborted").decode(errors="replace")
                self.store.set(_ABORT_KEY, f"rank {self.rank}: {self.why}"[:_NAME_MAX])
        except BaseException as error:
            self.failure = self.failure or error

    def _close(self, _user: Any) -> None:
        self.waiter.stop()
        self.group = self.store = None


class Comm:
    """An open ra_comm and the ranks it connects."""

    def __init__(self, handle: ctypes.c_void_p, transport: _GroupTransport | None) -> None:
        self.handle = handle
        self.transport = transport
        self.rank = transport.rank if transport else 0
        self.size = transport.size if transport else 1

    def gather(self, mine: torch.Tensor, timeout_ms: int) -> torch.Tensor:
        """[size, *mine.shape], for what the Python side itself must agree on."""
        if self.transport is None:
            return mine.unsqueeze(0)
        try:
            if self.transport.why is not None:
                raise TransportError(self.transport.why)
            return self.transport.gather_tensor(mine, timeout_ms)
        except Exception as error:
            self.abort(str(error))
            raise CommError(_c.RA_E_COMM, "RA_E_COMM", f"gather: {error}") from error

    def bytes_sent(self) -> int:
        """By exchanges, so far."""
        return int(_c.lib.ra_comm_bytes_sent(self.handle))

    def abort(self, why: str) -> None:
        """Makes every rank's pending and later calls fail soon."""
        _c.lib.ra_comm_abort(self.handle, why.encode())

    def check(self, status: int) -> None:
        """_c.check, with what the transport knows of a failure."""
        try:
            _c.check(status)
        except CommError as error:
            failure = self.transport.failure if self.transport else None
            if failure is None or str(failure) in str(error):
                raise
            message = f"{_c.last_error()}: {failure}"
            raise CommError(error.status, error.name, message) from failure

    def close(self) -> None:
        handle, self.handle = self.handle, ctypes.c_void_p()
        _c.lib.ra_comm_close(handle)


def open_single() -> Comm:
    """One rank, no messages."""
    handle = ctypes.c_void_p()
    _c.check(_c.lib.ra_comm_open_threads(1, ctypes.byref(handle)))
    return Comm(handle, None)


def open_group(group: dist.ProcessGroup, timeout_ms: int) -> Comm:
    """Collective over the group."""
    transport = _GroupTransport(group, timedelta(milliseconds=timeout_ms))
    handle = ctypes.c_void_p()
    _c.check(
        _c.lib.ra_comm_open_custom(
            transport.rank,
            transport.size,
            ctypes.byref(transport.callbacks),
            ctypes.byref(handle),
        )
    )
    return Comm(handle, transport)
