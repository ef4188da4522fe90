"""Where math runs: opens the library's backend for a torch device.

The CPU backend is in every build of the library, the CUDA backend in libringattn-cuda. Must not
know ranks or steps.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_void_p

import torch

from ringattn import _c

_NO_STREAM = _c.Stream(None)
Function = Callable[[c_void_p, int, bytes, _c.Stream], int]


def _close(handle: c_void_p, device: torch.device) -> None:
    with current_device_stays(device):
        _c.lib.ra_backend_close(handle)


class Backend:
    """An open ra_backend; closed when the last user lets go of it."""

    def __init__(self, handle: c_void_p, device: torch.device) -> None:
        self.handle = handle
        self.device = device
        self._finalize = weakref.finalize(self, _close, handle, device)

    @property
    def name(self) -> str:
        return bytes(_c.lib.ra_backend_name(self.handle)).decode()

    @property
    def level(self) -> str:
        return bytes(_c.lib.ra_backend_level(self.handle)).decode()

    def run(self, function: Function, ctx: c_void_p, plan: int, io: bytes) -> int:
        """One of the two calls of the operation; its status."""
        return function(ctx, plan, io, _NO_STREAM)

    @contextmanager
    def default_stream(self) -> Iterator[Backend]:
        """For calls that take no stream: they run on the device's default one, behind what torch
        has queued, and what torch queues next runs behind them."""
        yield self

    def kernel(self, backward: bool = False) -> str:
        """The kernel that the last call ran, where the backend has several."""
        return ""

    def close(self) -> None:
        self._finalize()


class _CudaBackend(Backend):
    """Work goes to torch's current stream; torch's current device stays what it is, although the
    library sets the thread's own."""

    def run(self, function: Function, ctx: c_void_p, plan: int, io: bytes) -> int:
        index = self.device.index
        # torch.cuda.current_device() and current_stream().cuda_stream, at a tenth of the time.
        before = torch._C._cuda_getDevice()
        stream = torch._C._cuda_getCurrentRawStream(index)
        status = function(ctx, plan, io, _c.Stream(stream))
        if before != index:
            torch.cuda.set_device(before)
        return status

    @contextmanager
    def default_stream(self) -> Iterator[Backend]:
        with torch.cuda.device(self.device):
            current, default = torch.cuda.current_stream(), torch.cuda.default_stream()
            default.wait_stream(current)
            try:
                yield self
            finally:
                current.wait_stream(default)

    def kernel(self, backward: bool = False) -> str:
        return bytes(_c.lib.ra_cuda_kernel(self.handle, backward)).decode()


@contextmanager
def current_device_stays(device: torch.device) -> Iterator[None]:
    """Around calls of the library, which set the thread's current device to theirs."""
    if device.type != "cuda" or not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.current_device()
    try:
        yield
    finally:
        torch.cuda.set_device(before)


def _open_cuda(device: torch.device) -> Backend:
    if not _c.HAS_CUDA:
        raise _c.unavailable(
            f"device: {device}, but {_c.library_path} is built without the CUDA backend; "
            "pip install with -C cmake.define.RA_CUDA=ON adds it"
        )
    if not torch.cuda.is_available():
        raise _c.unavailable(f"device: {device}, but torch sees no CUDA device here")
    index = torch.cuda.current_device() if device.index is None else device.index
    handle = c_void_p()
    _c.check(_c.lib.ra_backend_open_cuda(index, None, ctypes.byref(handle)))
    return _CudaBackend(handle, torch.device("cuda", index))


def open_backend(device: torch.device, threads: int | None = None) -> Backend:
    """threads: of the CPU team, the caller included; None = as many as torch uses."""
    if device.type == "cuda":
        return _open_cuda(device)
    if device.type != "cpu":
        raise _c.unavailable(
            f"device: {device}, expected cpu or cuda: no backend of ringattn runs there"
        )
    handle = c_void_p()
    count = _c.fit(torch.get_num_threads() if threads is None else threads, "threads", ctypes.c_int)
    _c.check(_c.lib.ra_backend_open_cpu(count, None, ctypes.byref(handle)))
    return Backend(handle, torch.device("cpu"))


_shared: dict[torch.device, Backend] = {}
_shared_lock = threading.Lock()


def shared_backend(device: torch.device) -> Backend:
    """One backend a device for the building blocks, which have no context of their own."""
    with _shared_lock:
        if device not in _shared:
            _shared[device] = open_backend(device)
        return _shared[device]
