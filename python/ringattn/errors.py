"""The exceptions of the package: a C status and its sentence become one of these.

Every error that the C library reports is a RingattnError; the subclasses let a caller tell its own
mistake (ArgumentError, ShapeError) from the machine's (CommError, MemoryExhausted). Must not know
ctypes or torch.
"""

from __future__ import annotations


class RingattnError(RuntimeError):
    """A call of the C library failed. `status` is the ra_status, `name` its C name."""

    def __init__(self, status: int, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.status = status
        self.name = name


class ArgumentError(RingattnError, ValueError):
    """RA_E_ARG: argument missing or out of range."""


class ShapeError(RingattnError, ValueError):
    """RA_E_SHAPE: tensor shapes, strides or dtypes disagree."""


class UnsupportedError(RingattnError, NotImplementedError):
    """RA_E_UNSUPPORTED: a valid request that the backend cannot run."""


class UnavailableError(RingattnError):
    """RA_E_UNAVAILABLE: built or installed without this backend or transport."""


class MemoryExhausted(RingattnError, MemoryError):
    """RA_E_NOMEM: host or device memory exhausted, or a limit that the caller set."""


class MismatchError(RingattnError):
    """RA_E_MISMATCH: the ranks disagree about layers or step. Every rank gets it."""


class DeviceError(RingattnError):
    """RA_E_DEVICE: the device runtime failed."""


class CommError(RingattnError, ConnectionError):
    """RA_E_COMM: the transport failed, timed out or was aborted."""


STATUS: dict[int, tuple[str, type[RingattnError]]] = {
    -1: ("RA_E_ARG", ArgumentError),
    -2: ("RA_E_SHAPE", ShapeError),
    -3: ("RA_E_UNSUPPORTED", UnsupportedError),
    -4: ("RA_E_UNAVAILABLE", UnavailableError),
    -5: ("RA_E_NOMEM", MemoryExhausted),
    -6: ("RA_E_MISMATCH", MismatchError),
    -7: ("RA_E_DEVICE", DeviceError),
    -8: ("RA_E_COMM", CommError),
    -9: ("RA_E_IO", RingattnError),
}


def error_of(status: int, message: str) -> RingattnError:
    """The exception for a negative status."""
    name, kind = STATUS.get(status, (f"status {status}", RingattnError))
    return kind(status, name, message)
