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
    with pytest.raises(ValueError, match="whole: 1 dimensions"):
        ringattn.shard(torch.zeros(8), 0, 2)
    assert ringattn.shard_runs(0, 2, 7) == [(0, 4)]
    assert ringattn.shard_runs(1, 2, 7) == [(4, 3)]
    assert ringattn.shard_runs(0, 2, 8, "zigzag") == [(0, 2), (6, 2)]
    assert ringattn.shard_runs(3, 4, 2) == []
    with pytest.raises(ValueError, match="layout"):
        ringattn.shard_runs(0, 1, 2, "spiral")
    with pytest.raises(ValueError, match="rank"):
        ringattn.shard_runs(2, 2, 2)


@pytest.mark.parametrize("runs", [[(0, 5)], [(6, 5)], [(4, 5)], [(5, 6)], [(5, 4)]])
def test_runs_that_are_not_the_row(runs: list[tuple[int, int]]) -> None:
    part = torch.ones(1, 5)
    with pytest.raises(ValueError, match="each once"):
        ringattn.unshard([part, part], [[(0, 5)], runs])


def test_runs_of_other_ranks() -> None:
    layout = [[(0, 5)], [(5, 5)]]
    for size in (1, 3):
        with pytest.raises(ValueError, match="runs of 2 ranks"):
            ringattn.shard_runs(0, size, 10, layout)
    with pytest.raises(ValueError, match="start"):
        ringattn.shard_runs(0, 1, 10, [[(2**64, 10)]])
    with pytest.raises(ValueError, match="size"):
        ringattn.shard_runs(0, 2**32 + 1, 10)


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


def pairs(docs: torch.Tensor, runs: list[tuple[int, int]]) -> int:
    """Causal pairs of a rank, from every token and those before it."""
    row = docs[0]
    owned = torch.cat([torch.arange(a, a + n) for a, n in runs]) if runs else torch.arange(0)
    return sum(int((row[: p + 1] == row[p]).sum()) for p in owned.tolist() if row[p] > 0)


@pytest.mark.parametrize("equal_tokens", [False, True])
def test_balanced_runs(equal_tokens: bool) -> None:
    layer = ringattn.Layer(q_heads=1, kv_heads=1, head_dim=8, scale=1.0, dtype=torch.float32)
    lengths, size = [900, 500, 300, 200], 4
    docs = torch.cat([torch.full((n,), 2**40 * i + 1) for i, n in enumerate(lengths)])
    docs = torch.cat([docs, torch.zeros(148, dtype=docs.dtype)]).view(1, -1)
    shards = ringattn.balanced_runs([layer], size, docs, align=2, equal_tokens=equal_tokens)
    loads = [pairs(docs, runs) for runs in shards]
    assert max(loads) * size <= 1.03 * sum(loads)
    assert sum(loads) == sum(n * (n + 1) // 2 for n in lengths)
    assert sum(map(len, shards)) <= (2 * size - 1 if equal_tokens else size)
    parts = [ringattn.shard(docs, r, size, shards) for r in range(size)]
    assert not equal_tokens or {p.shape[1] for p in parts} == {512}
    assert torch.equal(ringattn.unshard(parts, shards), docs)


def test_balanced_runs_refused() -> None:
    layer = ringattn.Layer(q_heads=1, kv_heads=1, head_dim=8, scale=1.0, dtype=torch.float32)
    assert ringattn.balanced_runs([layer], 1, seq=5) == [[(0, 5)]]
    assert ringattn.balanced_runs([layer, layer], 1, seq=5, weight=[1, 2]) == [[(0, 5)]]
    with pytest.raises(ValueError, match="seq"):
        ringattn.balanced_runs([layer], 2)
    with pytest.raises(ValueError, match="weight"):
        ringattn.balanced_runs([layer], 2, seq=4, weight=[1, 2])
    with pytest.raises(ringattn.ArgumentError, match="align"):
        ringattn.balanced_runs([layer], 2, seq=4, align=-1)
    with pytest.raises(ValueError, match="align"):  # not 1, which is what 64 bits leave of it
        ringattn.balanced_runs([layer], 2, seq=4, align=2**64 + 1)
    with pytest.raises(ValueError, match="size"):
        ringattn.balanced_runs([layer], 2**32 + 2, seq=4)
    with pytest.raises(ValueError, match="metadata: shape"):
        ringattn.balanced_runs([layer], 2, torch.ones(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="padding_mask: shape"):
        ringattn.balanced_runs([layer], 2, torch.ones(1, 4).int(), torch.ones(1, 3).bool())
    with pytest.raises(TypeError, match="padding_mask"):
        ringattn.balanced_runs([layer], 2, padding_mask=torch.ones(1, 4))
