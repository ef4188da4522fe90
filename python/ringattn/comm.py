"""Who I exchange with: a torch.distributed group as the library's transport.

A NCCL group on GPUs becomes a NCCL communicator of the library's own, any other group the library's
five callbacks, in Python, over a Channel. Callbacks run on the library's communication thread,
which holds the interpreter lock only while one runs. No exception leaves a callback: it is kept in
`failure` and the library gets RA_E_COMM. Must not know what the bytes mean.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ringattn import _c
from ringattn.channel import Channel, agree
from ringattn.errors import CommError
from ringattn.staging import DeviceStaging, HostStaging, Staging


class _Callbacks:
    """The library's messages over a channel."""

    def __init__(self, channel: Channel, staging: Staging) -> None:
        self.channel = channel
        self.staging = staging
        self.failure: BaseException | None = None
        self.buffers: dict[tuple[int, bool], torch.Tensor] = {}
        self.table = _c.CommCallbacks(
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
                self.channel.check()
                call(*arguments)
                return _c.RA_OK
            except BaseException as error:
                self.failure = self.failure or error
                return _c.RA_E_COMM

        return guarded

    def _buffer(self, peer: int, send: bool, count: int) -> torch.Tensor:
        """A flat buffer that is kept for the next message of this direction."""
        buffer = self.buffers.get((peer, send))
        if buffer is None or buffer.numel() < count:
            buffer = self.staging.empty(count)
            self.buffers[peer, send] = buffer
        return buffer[:count]

    def _exchange(self, xfers: Any, count: int, timeout_ms: int) -> None:
        messages = [
            (xfer, self._buffer(xfer.peer, xfer.send, xfer.bytes))
            for xfer in xfers[:count]
            if xfer.bytes > 0
        ]
        for xfer, flat in messages:
            if xfer.send:
                self.staging.pack(xfer, flat)
        self.staging.finish()
        works = [
            (self.channel.send if xfer.send else self.channel.receive)(flat, xfer.peer)
            for xfer, flat in messages
        ]
        if works:
            self.channel.wait(works, timeout_ms, [xfer.peer for xfer, _ in messages])
        for xfer, flat in messages:
            if not xfer.send:
                self.staging.unpack(xfer, flat)
        self.staging.finish()

    def _gather(self, mine: int, count: int, everyone: int, timeout_ms: int) -> None:
        if count == 0:
            return
        own = torch.empty(count, dtype=torch.uint8, device="cpu")
        ctypes.memmove(own.data_ptr(), mine, count)
        gathered = self.channel.gather(own, timeout_ms)
        ctypes.memmove(everyone, gathered.data_ptr(), gathered.numel())

    def _barrier(self, timeout_ms: int) -> None:
        self.channel.gather(torch.zeros(1, dtype=torch.uint8, device="cpu"), timeout_ms)

    def _abort(self, _user: Any, why: bytes | None) -> None:
        try:
            self.channel.abort((why or b"aborted").decode(errors="replace"))
        except BaseException as error:
            self.failure = self.failure or error

    def _close(self, _user: Any) -> None:
        """The channel is closed with the Comm."""


class Comm:
    """An open ra_comm and the ranks it connects.

    transport: what carries the messages. in_call: does a forward or backward run?
    """

    def __init__(
        self,
        handle: ctypes.c_void_p,
        transport: str,
        channel: Channel | None = None,
        callbacks: _Callbacks | None = None,
    ) -> None:
        self.handle = handle
        self.transport = transport
        self._channel = channel
        self._callbacks = callbacks
        self.in_call = False
        self.rank = channel.rank if channel else 0
        self.size = channel.size if channel else 1

    def gather(self, mine: torch.Tensor, timeout_ms: int) -> torch.Tensor:
        """[size, *mine.shape], for what the Python side itself must agree on; host tensors."""
        if self._channel is None:
            return mine.unsqueeze(0)
        try:
            self._channel.check()
            return self._channel.gather(mine, timeout_ms)
        except Exception as error:
            self.abort(str(error))
            raise CommError(_c.RA_E_COMM, "RA_E_COMM", f"gather: {error}") from error

    def bytes_sent(self) -> int:
        """By exchanges, so far."""
        return int(_c.lib.ra_comm_bytes_sent(self.handle))

    def abort(self, why: str) -> None:
        """Makes every rank's pending and later calls fail soon."""
        _c.lib.ra_comm_abort(self.handle, why.encode())
        if self._channel is not None:
            self._channel.abort(why)

    def watch(self) -> None:
        """For a transport that does not bring a peer's abort by itself, during calls."""
        if self._channel is not None:

            def tell(why: str) -> None:
                _c.lib.ra_comm_abort(self.handle, why.encode())

            self._channel.watch(lambda: self.in_call, tell)

    def check_call(self, status: int) -> None:
        """check, of a forward or backward, whose failure ends the ring on every rank."""
        try:
            self.check(status)
        except Exception as error:
            if self._channel is not None:
                self._channel.abort(str(error))
            raise

    def check(self, status: int) -> None:
        """_c.check, with what the callbacks know of a failure."""
        try:
            _c.check(status)
        except CommError as error:
            failure = self._callbacks.failure if self._callbacks else None
            if failure is None or str(failure) in str(error):
                raise
            message = f"{_c.last_error()}: {failure}"
            raise CommError(error.status, error.name, message) from failure

    def close(self) -> None:
        if self._channel is not None:
            self._channel.end_watch()
        handle, self.handle = self.handle, ctypes.c_void_p()
        _c.lib.ra_comm_close(handle)
        if self._channel is not None:
            self._channel.close()


def is_nccl(group: dist.ProcessGroup) -> bool:
    """Does NCCL carry the group's CUDA tensors?"""
    return "cuda:nccl" in dist.get_backend_config(group)


def open_single() -> Comm:
    """One rank, no messages."""
    handle = ctypes.c_void_p()
    _c.check(_c.lib.ra_comm_open_threads(1, ctypes.byref(handle)))
    return Comm(handle, "single process")


def _open_callbacks(channel: Channel, device: torch.device) -> Comm:
    on_device = device.type == "cuda"
    staging: Staging = DeviceStaging(device) if on_device else HostStaging()
    callbacks = _Callbacks(channel, staging)
    handle = ctypes.c_void_p()
    _c.check(
        _c.lib.ra_comm_open_custom(
            channel.rank, channel.size, ctypes.byref(callbacks.table), ctypes.byref(handle)
        )
    )
    name = "gloo, staged in host memory" if on_device else "gloo"
    return Comm(handle, name, channel, callbacks)


_UUID_BYTES = 64


def _gpu_name(device: torch.device) -> bytes:
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", "")
    return str(uuid).encode().ljust(_UUID_BYTES, b"\0")[:_UUID_BYTES]


def _new_nccl_id(rank: int) -> bytes:
    """Rank 0's fresh id; the other ranks have none, but must have NCCL too."""
    if not _c.nccl_version():
        raise _c.unavailable(
            f"group: NCCL, but {_c.library_path} is built without nccl.h or finds no libnccl.so.2"
        )
    unique = _c.NcclId()
    if rank == 0:
        _c.check(_c.lib.ra_nccl_id_create(ctypes.byref(unique)))
    return bytes(unique)


def _check_one_process_per_gpu(names: list[bytes]) -> None:
    for rank, name in enumerate(names):
        first = names.index(name)
        if first < rank and name.strip(b"\0"):
            raise _c.unavailable(
                f"device: ranks {first} and {rank} use the same GPU, {name.decode().rstrip(chr(0))}"
                ", expected one process per GPU with a NCCL group; a gloo group can share one"
            )


def _open_nccl(channel: Channel, device: torch.device) -> Comm:
    unique, error = b"", None
    try:
        unique = _new_nccl_id(channel.rank)
    except Exception as caught:
        error = caught
    unique = unique.ljust(ctypes.sizeof(_c.NcclId), b"\0")
    mine = torch.frombuffer(bytearray(_gpu_name(device) + unique), dtype=torch.uint8)
    said = agree(lambda own: channel.gather(own, channel.timeout_ms), error, mine)
    names = [bytes(words[:_UUID_BYTES].tolist()) for words in said]
    _check_one_process_per_gpu(names)
    first = _c.NcclId.from_buffer_copy(bytes(said[0, _UUID_BYTES:].tolist()))
    handle = ctypes.c_void_p()
    _c.check(
        _c.lib.ra_comm_open_nccl(
            ctypes.byref(first), channel.rank, channel.size, device.index, ctypes.byref(handle)
        )
    )
    comm = Comm(handle, f"nccl {_c.nccl_version()}", channel)
    comm.watch()
    return comm


def open_group(group: dist.ProcessGroup, device: torch.device, timeout_ms: int) -> Comm:
    """Collective over the group. device: where the tensors of the messages are."""
    if not dist.is_gloo_available():
        raise _c.unavailable("group: this torch is built without gloo, which metadata travels by")
    channel = Channel(group, timeout_ms)
    try:
        if device.type == "cuda" and is_nccl(group):
            return _open_nccl(channel, device)
        return _open_callbacks(channel, device)
    except BaseException:
        channel.close()
        raise
