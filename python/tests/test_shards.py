"""Shards, positions and labels: whole rows cut and put together."""

from __future__ import annotations

import pytest
import torch

import ringattn

LAYOUTS = ["contiguous", "zigzag", "runs"]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back(layout: str, size: int) -> None:
    seq = 13
    chosen = layout
    if layout == "runs":
        ends = [13 * r // size for r in range(size + 1)]
        pieces = [[(a, b - a)] for a, b in zip(ends, ends[1:])]
        chosen = pieces[1:] + pieces[:1]
    whole = torch.arange(2 * seq).view(2, seq)
    parts = [ringattn.shard(whole, r, size, chosen) for r in range(size)]
    positions = [ringattn.position_ids(r, size, seq, chosen) for r in range(size)]
    for part, position in zip(parts, positions):
        assert torch.equal(part[0], position)
    assert torch.equal(ringattn.unshard(parts, chosen), whole)


def test_known_runs() -> None:
    assert ringattn.shard_runs(0, 2, 7) == [(0, 4)]
    assert ringattn.shard_runs(1, 2, 7) == [(4, 3)]
    assert ringattn.shard_runs(0, 2, 8, "zigzag") == [(0, 2), (6, 2)]
    assert ringattn.shard_runs(3, 4, 2) == []
    with pytest.raises(ValueError, match="layout"):
        ringattn.shard_runs(0, 1, 2, "spiral")
    with pytest.raises(ValueError, match="rank"):
        ringattn.shard_runs(2, 2, 2)


def test_labels_cross_shards_and_stop_at_documents() -> None:
    labels = torch.tensor([[1, 2, 3, 4, 5, 6]])
    assert ringattn.shift_labels(labels).tolist() == [[2, 3, 4, 5, 6, -100]]
    docs = torch.tensor([[1, 1, 2, 2, 0, 0]])
    assert ringattn.shift_labels(labels, docs).tolist() == [[2, -100, 4, -100, -100, -100]]
    assert ringattn.shard(ringattn.shift_labels(labels), 0, 2).tolist() == [[2, 3, 4]]


def test_documents_of_restarting_positions() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [3, 4, 0, 1, 2, 3]])
    assert ringattn.documents_of_positions(positions).tolist() == [
        [1, 1, 1, 2, 2, 3],
        [1, 1, 2, 2, 2, 2],
    ]
