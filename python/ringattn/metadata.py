"""A batch's metadata tensors as the library takes them: int32 ids, bytes, host memory.

Types are checked before values are narrowed: a document id beyond int32 is renumbered together with
all ranks, a token type is compared before it shrinks. Must not know layers.
"""

from __future__ import annotations

import torch

from ringattn.channel import agree
from ringattn.comm import Comm

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_INT32_MAX = 2**31 - 1
NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")


def check_tensor(tensor: torch.Tensor | None, name: str) -> None:
    if tensor is not None and not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: {type(tensor).__name__}, expected a tensor")


def check_mask(mask: torch.Tensor | None, name: str) -> None:
    """A padding mask is bool, true = padding: an integer mask may mean the opposite."""
    check_tensor(mask, name)
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"{name}: dtype {mask.dtype}, expected bool, true = padding")


def check_integers(ids: torch.Tensor | None, name: str) -> None:
    check_tensor(ids, name)
    if ids is not None and ids.dtype not in _INTEGERS:
        raise TypeError(f"{name}: dtype {ids.dtype}, expected integers")


def check_shape(tensor: torch.Tensor | None, name: str, shape: tuple[int, int]) -> None:
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected {shape}: rows and tokens")


def host_token_types(types: torch.Tensor | None) -> torch.Tensor | None:
    """1 where the token is of an image, 2 where of a video, 0 elsewhere."""
    if types is None:
        return None
    narrow = (types == 1).to(torch.int32) + 2 * (types == 2).to(torch.int32)
    return narrow.cpu().contiguous()


def host_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    return None if mask is None else mask.cpu().contiguous().view(torch.uint8)


def agree_counts(
    comm: Comm, error: Exception | None, counts: tuple[int, int], timeout_ms: int
) -> list[tuple[int, int]]:
    """Gives every rank every rank's two counts, or every rank the first rank's error."""
    mine = torch.tensor(counts, dtype=torch.int64, device="cpu").view(torch.uint8)
    everyone = agree(lambda own: comm.gather(own, timeout_ms), error, mine)
    return [(int(a), int(b)) for a, b in everyone.view(torch.int64)]


def _distinct(ids: torch.Tensor) -> torch.Tensor:
    """Sorted; torch.unique without its untyped wrapper."""
    result: torch.Tensor = torch.unique_consecutive(ids.flatten().sort().values)
    return result


def wide_ids(ids: torch.Tensor | None) -> torch.Tensor:
    """The distinct ids of this rank if one of them does not fit int32, else none."""
    if ids is None or ids.dtype != torch.int64 or ids.numel() == 0:
        return NO_IDS
    if int(ids.max()) <= _INT32_MAX:
        return NO_IDS
    return _distinct(ids.cpu())


def host_documents(
    ids: torch.Tensor | None, renumber: bool, comm: Comm, timeout_ms: int
) -> torch.Tensor | None:
    """int32 ids, padding 0. With renumber, because some rank has ids beyond int32, all ranks
    number their ids by the order among everyone's: the same id gets the same number."""
    positive = None if ids is None else ids.cpu().clamp(min=0)
    if not renumber:
        return None if positive is None else positive.to(torch.int32).contiguous()
    distinct = NO_IDS if positive is None else _distinct(positive.to(torch.int64))
    sizes = comm.gather(torch.tensor([distinct.numel()], device="cpu"), timeout_ms).flatten()
    mine = torch.zeros(int(sizes.max()), dtype=torch.int64, device="cpu")
    mine[: distinct.numel()] = distinct
    known = comm.gather(mine, timeout_ms).flatten()
    known = _distinct(known[known > 0])
    if positive is None:
        return None
    number = torch.searchsorted(known, positive.to(torch.int64)) + 1
    return number.masked_fill_(positive == 0, 0).to(torch.int32).contiguous()


def whole_documents(ids: torch.Tensor | None) -> torch.Tensor | None:
    """The same for whole rows, where one rank sees every id."""
    wide = wide_ids(ids)
    if ids is None or wide.numel() == 0:
        return None if ids is None else ids.cpu().clamp(min=0).to(torch.int32).contiguous()
    known = wide[wide > 0]
    number = torch.searchsorted(known, ids.cpu().clamp(min=0)) + 1
    return number.masked_fill_(ids.cpu() <= 0, 0).to(torch.int32).contiguous()
