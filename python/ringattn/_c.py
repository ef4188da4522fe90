"""include/ringattn.h in ctypes: the structs and functions that this package calls, one to one.

Structs are written out, in the order of the header; python/tests/test_c.py compares their sizes and
offsets with a compiled C program. ctypes.CDLL releases the interpreter lock during every call and
takes it again for callbacks. Must not know torch.
"""

from __future__ import annotations

import ctypes
import operator
import os
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

from ringattn.errors import UnavailableError, error_of

RA_OK = 0
RA_E_ARG, RA_E_SHAPE, RA_E_UNSUPPORTED, RA_E_UNAVAILABLE = -1, -2, -3, -4
RA_E_NOMEM, RA_E_MISMATCH, RA_E_DEVICE, RA_E_COMM, RA_E_IO = -5, -6, -7, -8, -9

RA_F32, RA_BF16, RA_F16, RA_F64 = 1, 2, 3, 4
RA_ROW, RA_HEAD, RA_SEQ, RA_CHAN, RA_NDIM = 0, 1, 2, 3, 4
RA_VISION_OFF, RA_VISION_OVER_WINDOW, RA_VISION_WITHIN_WINDOW = 0, 1, 2


class Tensor(Structure):
    """ra_tensor"""

    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int),
        ("size", c_int64 * RA_NDIM),
        ("stride", c_int64 * RA_NDIM),
    ]


class Layer(Structure):
    """ra_layer"""

    _fields_ = [
        ("size", c_size_t),
        ("q_heads", c_int),
        ("kv_heads", c_int),
        ("head_dim", c_int),
        ("dtype", c_int),
        ("scale", c_float),
        ("causal", c_bool),
        ("window", c_int64),
        ("window_right", c_int64),
        ("vision", c_int),
        ("dropout", c_float),
        ("softcap", c_float),
    ]


class Token(Structure):
    """ra_token"""

    _fields_ = [("pos", c_int64), ("doc", c_int32), ("group", c_int32)]


class Run(Structure):
    """ra_run"""

    _fields_ = [("start", c_int64), ("count", c_int64)]


class Stream(Structure):
    """ra_stream"""

    _fields_ = [("handle", c_void_p)]


class Block(Structure):
    """ra_block"""

    _fields_ = [("data", c_void_p), ("width", c_size_t), ("stride", c_size_t), ("count", c_int64)]


class Xfer(Structure):
    """ra_xfer"""

    _fields_ = [
        ("peer", c_int),
        ("send", c_bool),
        ("blocks", POINTER(Block)),
        ("block_count", c_int64),
        ("bytes", c_uint64),
    ]


EXCHANGE = CFUNCTYPE(c_int, c_void_p, POINTER(Xfer), c_int, c_int)
GATHER = CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, c_void_p, c_int)
BARRIER = CFUNCTYPE(c_int, c_void_p, c_int)
ABORT = CFUNCTYPE(None, c_void_p, c_char_p)
CLOSE = CFUNCTYPE(None, c_void_p)


class CommCallbacks(Structure):
    """ra_comm_callbacks"""

    _fields_ = [
        ("size", c_size_t),
        ("user", c_void_p),
        ("exchange", EXCHANGE),
        ("gather", GATHER),
        ("barrier", BARRIER),
        ("abort", ABORT),
        ("close", CLOSE),
    ]


class CtxOptions(Structure):
    """ra_ctx_options"""

    _fields_ = [
        ("size", c_size_t),
        ("scratch_bytes_max", c_size_t),
        ("timeout_ms", c_int),
        ("forward_only", c_bool),
        ("no_overlap", c_bool),
        ("keep_kv", c_bool),
        ("plan_only", c_bool),
        ("trace", c_void_p),
    ]


class StepDesc(Structure):
    """ra_step_desc"""

    _fields_ = [
        ("size", c_size_t),
        ("rows", c_int64),
        ("seq_local", c_int64),
        ("run_count", c_int),
        ("runs", POINTER(Run)),
        ("doc_id", c_void_p),
        ("is_pad", c_void_p),
        ("token_type", c_void_p),
    ]


class BalanceOptions(Structure):
    """ra_balance_options"""

    _fields_ = [
        ("size", c_size_t),
        ("align", c_int64),
        ("equal_tokens", c_bool),
        ("weight", POINTER(c_double)),
    ]


class Balance(Structure):
    """ra_balance"""

    _fields_ = [
        ("ranks", c_int),
        ("run_first", POINTER(c_int64)),
        ("run", POINTER(Run)),
        ("imbalance", c_double),
    ]


class PlanInfo(Structure):
    """ra_plan_info"""

    _fields_ = [
        ("size", c_size_t),
        ("path", c_char_p),
        ("reason", c_char_p),
        ("hops", c_int),
        ("n_prior", c_int),
        ("seq_local", c_int64),
        ("seq_total", c_int64),
        ("tiles_full", c_int64),
        ("tiles_partial", c_int64),
        ("pairs", c_int64),
        ("pairs_total", c_int64),
        ("imbalance", c_double),
        ("flops_forward", c_double),
        ("flops_backward", c_double),
        ("forward_bytes_sent", c_uint64),
        ("forward_bytes_received", c_uint64),
        ("backward_bytes_sent", c_uint64),
        ("backward_bytes_received", c_uint64),
        ("rows_received", c_int64),
        ("kept_seq", c_int64),
        ("scratch_forward_bytes", c_uint64),
        ("scratch_backward_bytes", c_uint64),
        ("plan_bytes", c_uint64),
        ("metadata_bytes", c_uint64),
        ("local_halved", c_bool),
    ]


class ForwardIo(Structure):
    """ra_forward_io"""

    _fields_ = [("size", c_size_t)] + [
        (name, Tensor) for name in ("q", "k", "v", "out", "lse", "kept_k", "kept_v")
    ]


class BackwardIo(Structure):
    """ra_backward_io"""

    _fields_ = [("size", c_size_t)] + [
        (name, Tensor) for name in "q k v out lse kept_k kept_v dout dq dk dv".split()
    ]


class Segments(Structure):
    """ra_segments"""

    _fields_ = [
        ("count", c_int64),
        ("q_total", c_int64),
        ("k_total", c_int64),
        ("q_index", POINTER(c_int64)),
        ("k_index", POINTER(c_int64)),
        ("cu_q", POINTER(c_int32)),
        ("cu_k", POINTER(c_int32)),
        ("max_q", c_int32),
        ("max_k", c_int32),
        ("dense_local", c_bool),
        ("dense_cross", c_bool),
        ("pad_rows", POINTER(c_uint8)),
    ]


class Varlen(Structure):
    """ra_varlen"""

    _fields_ = [("size", c_size_t), ("cu_q", c_void_p), ("cu_k", c_void_p), ("segments", c_int64)]


class NcclId(Structure):
    """ra_nccl_id"""

    _fields_ = [("bytes", c_uint8 * 128)]


_HANDLE = c_void_p
_OUT = POINTER(c_void_p)
_TENSOR = POINTER(Tensor)

# name: (result, arguments). A c_int result of a name in _STATUS_FREE is no status.
PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "ra_version": (c_char_p, []),
    "ra_last_error": (c_char_p, []),
    "ra_status_name": (c_char_p, [c_int]),
    "ra_dtype_bytes": (c_size_t, [c_int]),
    "ra_mask_allows": (c_bool, [POINTER(Layer), Token, Token]),
    "ra_vision_groups": (c_int, [c_void_p, c_int64, c_int64, c_void_p]),
    "ra_runs_contiguous": (c_int, [c_int, c_int, c_int64, POINTER(Run)]),
    "ra_runs_zigzag": (c_int, [c_int, c_int, c_int64, POINTER(Run)]),
    "ra_runs_balanced": (
        c_int,
        [
            POINTER(StepDesc),
            POINTER(Layer),
            c_int,
            c_int,
            POINTER(BalanceOptions),
            POINTER(Balance),
        ],
    ),
    "ra_balance_free": (None, [POINTER(Balance)]),
    "ra_backend_open_cpu": (c_int, [c_int, c_char_p, _OUT]),
    "ra_cpu_level_name": (c_char_p, [c_int]),
    "ra_cpu_level_runs": (c_bool, [c_int]),
    "ra_backend_name": (c_char_p, [_HANDLE]),
    "ra_backend_level": (c_char_p, [_HANDLE]),
    "ra_backend_close": (None, [_HANDLE]),
    "ra_comm_open_threads": (c_int, [c_int, _OUT]),
    "ra_comm_open_custom": (c_int, [c_int, c_int, POINTER(CommCallbacks), _OUT]),
    "ra_comm_bytes_sent": (c_uint64, [_HANDLE]),
    "ra_comm_abort": (None, [_HANDLE, c_char_p]),
    "ra_comm_close": (None, [_HANDLE]),
    "ra_xfer_pack": (None, [POINTER(Xfer), c_void_p]),
    "ra_xfer_unpack": (None, [POINTER(Xfer), c_void_p]),
    "ra_ctx_create": (
        c_int,
        [_HANDLE, _HANDLE, POINTER(Layer), c_int, POINTER(CtxOptions), _OUT],
    ),
    "ra_ctx_status": (c_int, [_HANDLE]),
    "ra_ctx_free": (None, [_HANDLE]),
    "ra_step_create": (c_int, [_HANDLE, POINTER(StepDesc), _OUT]),
    "ra_step_free": (None, [_HANDLE]),
    "ra_step_plan": (_HANDLE, [_HANDLE, c_int]),
    "ra_plan_inspect": (c_int, [_HANDLE, POINTER(PlanInfo)]),
    "ra_path_for": (
        c_char_p,
        [POINTER(Layer), c_bool, c_bool, c_bool, POINTER(c_char_p)],
    ),
    "ra_attn_forward": (c_int, [_HANDLE, _HANDLE, c_void_p, Stream]),
    "ra_attn_backward": (c_int, [_HANDLE, _HANDLE, c_void_p, Stream]),
    "ra_oracle_forward": (c_int, [POINTER(StepDesc), POINTER(Layer), POINTER(ForwardIo)]),
    "ra_oracle_backward": (c_int, [POINTER(StepDesc), POINTER(Layer), POINTER(BackwardIo)]),
    "ra_segments_build": (
        c_int,
        [c_void_p, c_int64, c_void_p, c_int64, c_int64, POINTER(Segments)],
    ),
    "ra_segments_free": (None, [POINTER(Segments)]),
    "ra_rows_gather": (c_int, [_TENSOR, c_void_p, c_int64, _TENSOR]),
    "ra_rows_scatter": (c_int, [_TENSOR, c_void_p, c_int64, _TENSOR]),
    "ra_rows_add": (c_int, [_TENSOR, c_void_p, c_int64, _TENSOR]),
    "ra_lse_gather": (
        c_int,
        [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_void_p],
    ),
    "ra_lse_scatter": (
        c_int,
        [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p],
    ),
    "ra_merge": (c_int, [_TENSOR, _TENSOR, _TENSOR, _TENSOR]),
    "ra_merge_rows": (c_int, [_TENSOR, _TENSOR, _TENSOR, _TENSOR, c_void_p, c_int64]),
    "ra_merge_rows_pays": (c_bool, [c_int64, c_int64]),
    "ra_varlen_forward": (c_int, [_HANDLE, POINTER(Layer), POINTER(Varlen), POINTER(ForwardIo)]),
    "ra_varlen_backward": (
        c_int,
        [_HANDLE, POINTER(Layer), POINTER(Varlen), POINTER(BackwardIo)],
    ),
}

# Of include/ringattn_cuda.h, in libringattn-cuda only.
CUDA_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "ra_cuda_device_count": (c_int, []),
    "ra_backend_open_cuda": (c_int, [c_int, c_void_p, _OUT]),
    "ra_cuda_kernel": (c_char_p, [_HANDLE, c_bool]),
    "ra_nccl_id_create": (c_int, [POINTER(NcclId)]),
    "ra_comm_open_nccl": (c_int, [POINTER(NcclId), c_int, c_int, c_int, _OUT]),
    "ra_nccl_version": (c_char_p, []),
}


def _candidates(stem: str) -> list[str]:
    """Where a library of the project may be: inside the wheel, or installed."""
    folder = Path(__file__).parent / "lib"
    inside = sorted(folder.glob(f"lib{stem}.so*")) + sorted(folder.glob(f"lib{stem}.dylib"))
    return [*(str(path) for path in inside), f"lib{stem}.so.0", f"lib{stem}.dylib"]


def unavailable(message: str) -> UnavailableError:
    return UnavailableError(RA_E_UNAVAILABLE, "RA_E_UNAVAILABLE", message)


def load_library(stem: str) -> tuple[ctypes.CDLL, str]:
    """Loads lib<stem> and returns it with its path. Raises UnavailableError that says why not."""
    reasons: list[str] = []
    for place in _candidates(stem):
        try:
            return ctypes.CDLL(place), place
        except OSError as error:
            reasons.append(str(error))
    raise unavailable(f"lib{stem}: " + "; ".join(reasons))


def _load() -> tuple[ctypes.CDLL, str]:
    """RINGATTN_LIBRARY if it is set, else libringattn-cuda, which holds all of libringattn and
    more, else libringattn. Only one of them: contexts of one know nothing of the other's
    backends."""
    named = os.environ.get("RINGATTN_LIBRARY")
    if named:
        try:
            return ctypes.CDLL(named), named
        except OSError as error:
            raise unavailable(f"RINGATTN_LIBRARY: {error}") from None
    try:
        return load_library("ringattn-cuda")
    except UnavailableError:
        return load_library("ringattn")


def declare(library: ctypes.CDLL, prototypes: dict[str, tuple[Any, list[Any]]]) -> None:
    """Gives functions their types, so that a wrong argument is a TypeError and not a crash."""
    for name, (result, arguments) in prototypes.items():
        function = getattr(library, name, None)
        if function is None:
            raise unavailable(f"{library._name}: no {name}, expected libringattn of this version")
        function.restype = result
        function.argtypes = arguments


lib, library_path = _load()
declare(lib, PROTOTYPES)
HAS_CUDA = hasattr(lib, "ra_backend_open_cuda")
if HAS_CUDA:
    declare(lib, CUDA_PROTOTYPES)


def version() -> str:
    """The version of the C library."""
    return bytes(lib.ra_version()).decode()


def nccl_version() -> str:
    """Of the NCCL that the library uses: the one in the process; "" without NCCL."""
    return bytes(lib.ra_nccl_version()).decode() if HAS_CUDA else ""


def last_error() -> str:
    """This thread's last message."""
    return bytes(lib.ra_last_error()).decode(errors="replace")


def fit(value: Any, name: str, ctype: Any = c_int64) -> int:
    """The integer, if C's type holds it: ctypes would cut it off in silence."""
    try:
        whole = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: {value!r}, expected an integer") from None
    if ctype(whole).value != whole:
        bits = 8 * ctypes.sizeof(ctype)
        raise ValueError(f"{name}: {whole}, expected a number that fits {bits} bits")
    return whole


def check(status: int) -> None:
    """Raises the exception of a failed call; call it on the thread that made the call."""
    if status != RA_OK:
        raise error_of(status, last_error())
