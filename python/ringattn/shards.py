"""Which positions a rank owns, and whole rows cut into shards and put together again.

Positions are global: in the whole row, before sharding. Every helper takes rank and size, so that
it also serves data loaders that know no process group. Must not know attention.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Literal

import torch

from ringattn import _c

Layout = Literal["contiguous", "zigzag"]
Runs = Sequence[tuple[int, int]]


def shard_runs(
    rank: int, size: int, seq: int, layout: Layout | Sequence[Runs] = "contiguous"
) -> Runs:
    """(start, count) of the runs of positions that a rank owns.

    layout: "contiguous" (the first seq mod size ranks hold one token more), "zigzag" (balanced for
    causal masks), or the runs of every rank.
    """
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"rank: {rank} of {size}, expected 0 to size - 1")
    if seq < 0:
        raise ValueError(f"seq: {seq}, expected 0 or more")
    if not isinstance(layout, str):
        if len(layout) != size:
            raise ValueError(f"layout: runs of {len(layout)} ranks, expected those of {size}")
        return [
            (_c.fit(start, "start of a run"), _c.fit(count, "count of a run"))
            for start, count in layout[rank]
        ]
    _c.fit(size, "size", ctypes.c_int)
    _c.fit(seq, "seq")
    runs = (_c.Run * 2)()
    if layout == "contiguous":
        count = _c.lib.ra_runs_contiguous(rank, size, seq, runs)
    elif layout == "zigzag":
        count = _c.lib.ra_runs_zigzag(rank, size, seq, runs)
    else:
        raise ValueError(f"layout: {layout!r}, expected contiguous, zigzag or runs of every rank")
    return [(int(run.start), int(run.count)) for run in runs[:count]]


def position_ids(
    rank: int,
    size: int,
    seq: int,
    layout: Layout | Sequence[Runs] = "contiguous",
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The global positions of a rank's tokens, [seq_local]: what rotary embeddings need."""
    runs = shard_runs(rank, size, seq, layout)
    parts = [torch.arange(start, start + count, device=device) for start, count in runs]
    return torch.cat(parts) if parts else torch.arange(0, device=device)


def shard(
    whole: torch.Tensor,
    rank: int,
    size: int,
    layout: Layout | Sequence[Runs] = "contiguous",
    dim: int = 1,
) -> torch.Tensor:
    """A rank's part of a whole tensor, along its sequence dimension."""
    if whole.dim() <= dim:
        raise ValueError(f"whole: {whole.dim()} dimensions, expected one numbered dim = {dim}")
    runs = shard_runs(rank, size, whole.shape[dim], layout)
    parts = [whole.narrow(dim, start, count) for start, count in runs]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else whole.narrow(dim, 0, 0)


def unshard(
    parts: Sequence[torch.Tensor],
    layout: Layout | Sequence[Runs] = "contiguous",
    dim: int = 1,
) -> torch.Tensor:
    """The whole tensor from all ranks' parts, in rank order: the inverse of shard.

    ValueError if the layout's runs are not the positions of the parts, each once.
    """
    seq = sum(part.shape[dim] for part in parts)
    ranks = range(len(parts))
    order = torch.cat([position_ids(rank, len(parts), seq, layout, "cpu") for rank in ranks])
    if not torch.equal(order.sort().values, torch.arange(seq, device="cpu")):
        raise ValueError(f"layout: its runs are not the {seq} positions of the parts, each once")
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(seq, device="cpu")
    return torch.cat(list(parts), dim).index_select(dim, inverse.to(parts[0].device))


def shift_labels(
    labels: torch.Tensor,
    packed_seq_ids: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Next-token targets of whole rows: target[i] = labels[i + 1], to be sharded afterwards.

    Shifting before sharding is what makes the last token of a shard predict the first one of the
    next shard. The last token of a row, and with packed_seq_ids the last one of every document,
    predicts nothing.
    """
    target = torch.full_like(labels, ignore_index)
    target[:, :-1] = labels[:, 1:]
    if packed_seq_ids is not None:
        following = packed_seq_ids[:, 1:]
        ends = (packed_seq_ids[:, :-1] != following) | (following <= 0)
        target[:, :-1].masked_fill_(ends, ignore_index)
    return target


def documents_of_positions(position_ids: torch.Tensor) -> torch.Tensor:
    """Document ids (1, 2, ...) of whole rows from position ids that restart.

    A document begins where a position is not its predecessor plus one: the rule of transformers.
    """
    jumps = torch.ones_like(position_ids, dtype=torch.int32)
    jumps[:, 1:] = (position_ids[:, 1:] != position_ids[:, :-1] + 1).to(torch.int32)
    return jumps.cumsum(1, dtype=torch.int32)


def run_array(runs: Runs) -> ctypes.Array[_c.Run]:
    """The runs as the library takes them."""
    return (_c.Run * max(len(runs), 1))(*(_c.Run(start, count) for start, count in runs))
