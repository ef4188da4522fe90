"""The NeMo drop-in: every documented name, its signature, and what it does."""

from __future__ import annotations

import gc
import inspect
import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import nemo_names
import ringattn
import world
from nemo_rank import RING_CASES, ctx_of, dout_of, module_of
from reference import Case, assert_close, attend, mask, plain, truth
from ringattn.nemo import cp_attention as cp
from ringattn.nemo import cp_local_ring as local
from world import DEVICE


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    """Tensors that a test makes are where the tests' tensors are."""
    with torch.device(DEVICE):
        yield


def signature_of(function: Any) -> str:
    words = []
    for p in inspect.signature(function).parameters.values():
        words.append(p.name if p.default is p.empty else f"{p.name}={p.default}")
    return " ".join(words)


@pytest.mark.parametrize("name", nemo_names.CP_ATTENTION)
def test_signatures_of_cp_attention(name: str) -> None:
    found: Any = cp
    for part in name.split("."):
        found = getattr(found, part)
    assert signature_of(found) == nemo_names.CP_ATTENTION[name]


@pytest.mark.parametrize("name", nemo_names.CP_LOCAL_RING)
def test_signatures_of_cp_local_ring(name: str) -> None:
    assert signature_of(getattr(local, name)) == nemo_names.CP_LOCAL_RING[name]


def test_data() -> None:
    code = "from ringattn.nemo import cp_attention as c\nfor n in {!r}: print(repr(getattr(c, n)))"
    names = list(nemo_names.CP_ATTENTION_DATA)
    said = subprocess.run(
        [sys.executable, "-c", code.format(names)], check=True, capture_output=True, text=True
    )
    assert said.stdout.splitlines() == [repr(v) for v in nemo_names.CP_ATTENTION_DATA.values()]
    assert isinstance(cp.logger, logging.Logger)
    assert issubclass(cp._Gemma4FFPAVarlenRingAttention, torch.autograd.Function)


def whole_ring(rank: int, size: int, group: Any, case: Case) -> list[torch.Tensor]:
    """Through the entry point; twice with the same metadata, which makes one step."""
    ctx = ctx_of(case, rank, size, group if size > 1 else None)
    dout = dout_of(case, ctx)
    for _ in range(2):
        leaves = [t.clone().requires_grad_() for t in (ctx.query, ctx.key, ctx.value)]
        now = replace(ctx, query=leaves[0], key=leaves[1], value=leaves[2])
        out = cp._run_gemma4_cp_ring_attention(ctx.module, now)
        results = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    forward = cp._run_gemma4_cp_ring_attention_forward(ctx.module, ctx)
    assert torch.equal(forward, results[0])
    sink: dict[int, Any] = {}
    out32, lse = cp._run_gemma4_cp_ffpa_varlen_ring_forward(ctx, sink)
    assert torch.equal(out32, results[0].float()) and lse.shape == out32.shape[:-1]
    assert set(sink) <= set(range(rank + 1)) and rank in sink
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", RING_CASES)
def test_whole_ring(name: str, size: int) -> None:
    case = RING_CASES[name]
    parts = world.run(size, whole_ring, case)
    for i, (a, b) in enumerate(zip(plain(case), truth(case))):
        assert_close(str(i), torch.cat([p[i] for p in parts], 2), a, b)


def own_ring(rank: int, size: int, group: Any, case: Case, how: str) -> list[torch.Tensor]:
    """The reference's own loop: collect, one chunk after the other, merge; or the neighbourhood and
    gradients routed to their owners."""
    ctx = ctx_of(case, rank, size, group if size > 1 else None)
    chunks = cp._collect_ring_kv_chunks(ctx)
    if how == "neighbourhood":
        out, saved = local.sliding_ring_compute_fa_fwd(ctx, chunks)
        dout = dout_of(case, ctx)
        dq, dk, dv = local.sliding_ring_compute_fa_bwd(saved, dout)
        return [out, dq, *cp._route_kv_grads_to_owners(dk, dv, group, rank, size)]
    acc = lse = None
    for owner, key, value, metadata in chunks:
        part, part_lse, empty, channels = cp._run_gemma4_flex_chunk(
            ctx.module, ctx, key, value, metadata, owner * ctx.seq_local
        )
        assert channels == case.head_dim
        if empty is not None:
            assert (part.transpose(1, 2)[empty] == 0).all()
        acc, lse = cp._merge_flex_chunk(acc, lse, part, part_lse)
    assert acc is not None
    return [acc]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ["global", "sliding", "images", "batch"])
def test_own_ring_by_chunks(name: str, size: int) -> None:
    case = RING_CASES[name]
    if name == "images":
        case = replace(case, types=[[0] * 3 + [1, 1, 1] + [0, 0, 0, 2, 2, 0]])
        size = min(size, 2)
    found = torch.cat([p[0] for p in world.run(size, own_ring, case, "chunks")], 2)
    expected = attend(case, *(t.double() for t in case.inputs()[:3]))
    assert torch.allclose(found.double(), expected, atol=5e-6)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_own_ring_by_neighbourhood(size: int) -> None:
    case = RING_CASES["sliding"]
    parts = world.run(size, own_ring, case, "neighbourhood")
    for i, expected in enumerate(truth(case)):
        found = torch.cat([p[i] for p in parts], 2).double()
        assert torch.allclose(found, expected, atol=1e-5), i


def test_hop_count_is_not_one_too_many() -> None:
    for window, hops in ((1, 0), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3), (100, 3)):
        case = Case(seq=16, window=window)
        ctx = ctx_of(case, 3, 4, None)
        from ringattn.nemo import ring

        assert ring.n_prior(ctx.module, ctx) == hops, window


def test_dense_cross_compares_each_row_with_its_own() -> None:
    q = torch.tensor([[1, 1, 1], [2, 2, 2]])
    same = cp._build_packed_ring_segments(q, q)
    swapped = cp._build_packed_ring_segments(q, torch.tensor([[1, 1, 1], [1, 1, 1]]))
    assert same is not None and swapped is not None
    assert cp._chunk_dense_eligible(same, False) and cp._chunk_dense_eligible(same, True)
    assert not cp._chunk_dense_eligible(swapped, False)


def test_segments() -> None:
    seg = cp._build_packed_ring_segments(torch.tensor([[1, 1, 2, 0]]), torch.tensor([[1, 2, 2, 2]]))
    assert seg is not None
    found = {n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in seg.items()}
    assert found == {
        "q_index": [0, 1, 2],
        "k_index": [0, 1, 2, 3],
        "cu_q": [0, 2, 3],
        "cu_k": [0, 1, 4],
        "max_q": 2,
        "max_k": 3,
        "dense_local": False,
        "dense_cross": False,
        "pad_rows": [[False, False, False, True]],
    }
    assert cp._build_packed_ring_segments(torch.tensor([[1]]), torch.tensor([[2]])) is None
    assert cp._row_single_doc_prefix([3, 3, 0]) and not cp._row_single_doc_prefix([0, 0])
    assert not cp._row_single_doc_prefix([3, 0, 3]) and cp._row_single_doc_full([7, 7])
    assert not cp._row_single_doc_full([7, 0]) and not cp._row_single_doc_full([7, 8])


def test_caches_follow_the_tensor_not_its_address() -> None:
    q = torch.tensor([[1, 1]])
    first = cp._cached_ring_segments(q, q, 0, 0, 1)
    assert cp._cached_ring_segments(q, q, 0, 0, 1) is first
    assert cp._cached_ring_segments(q, torch.tensor([[5, 5]]), 0, 1, 2) is None
    assert None in cp._RING_SEGMENT_CACHE.values()
    q.fill_(0)
    assert cp._cached_ring_segments(q, q, 0, 0, 1) is None
    del q
    gc.collect()
    other = torch.tensor([[1, 1]])
    assert cp._cached_ring_segments(other, other, 0, 0, 1) is not None
    built = []
    cp._block_mask_set_generation(other)
    for key in range(300):
        cp._cached_block_mask(key, lambda: built.append(key))
    cp._cached_block_mask(299, lambda: built.append(-1))
    assert len(cp._BLOCK_MASK_CACHE) == 256 and built == list(range(300))
    cp._block_mask_set_generation(other)
    assert len(cp._BLOCK_MASK_CACHE) == 256
    cp._block_mask_set_generation(other.clone())
    assert not cp._BLOCK_MASK_CACHE
    ids = torch.tensor([[1, 1]])
    ctx = SimpleNamespace(metadata={"_packed_seq_ids": ids}, cp_rank=0, cp_size=1)
    assert local._cached_sliding_segments(ctx, ids, ids, 0) is local._cached_sliding_segments(
        ctx, ids, ids, 0
    )
    cp._ring_segment_set_generation(torch.zeros(1))
    assert not cp._RING_SEGMENT_CACHE
    kept = torch.zeros(1)
    for start, generation in (
        (cp._ring_segment_set_generation, cp._RING_SEGMENT_GEN),
        (cp._block_mask_set_generation, cp._BLOCK_MASK_GEN),
    ):
        start(kept)
        assert generation[0]() is kept


def test_rows_there_and_back() -> None:
    dense, index = torch.randn(2, 3, 4, 8), torch.tensor([1, 4, 7])
    packed = cp._gather_thd(dense, index)
    assert torch.equal(packed, torch.stack([dense[0, :, 1], dense[1, :, 0], dense[1, :, 3]]))
    back = cp._scatter_thd(packed, index, 2, 3, 4)
    assert torch.equal(cp._gather_thd(back, index), packed) and (back != 0).sum() == packed.numel()
    lse = torch.randn(2, 3, 4)
    thin = cp._gather_lse(lse, index)
    assert torch.equal(thin[:, 1], lse[1, :, 0])
    wide = cp._scatter_lse(thin, index, 2, 3, 4)
    assert torch.equal(cp._gather_lse(wide, index), thin) and torch.isneginf(wide).sum() == 24 - 9
    grad = torch.ones(2, 3, 4, 8, dtype=torch.bfloat16)
    cp._grad_add_live_(grad, torch.full((3, 3, 8), 2.0), index)
    assert grad.float().sum() == 2 * 3 * 4 * 8 + 2 * 3 * 3 * 8


def test_merges() -> None:
    out, lse = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4)
    part, part_lse = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4)
    lse[0, 0, 0] = part_lse[0, 0, 0] = part_lse[0, 1, 1] = float("-inf")
    out[0, 0, 0] = part[0, 0, 0] = part[0, 1, 1] = 0
    for merge in (cp._merge_flex_chunk, cp._merge_ffpa_packed_chunk):
        first = merge(None, None, out, lse)
        assert torch.equal(first[0], out) and torch.equal(first[1], lse)
        merged, total = merge(*first, part, part_lse)
        assert torch.allclose(total, torch.logaddexp(lse, part_lse), atol=1e-6)
        assert (merged[0, 0, 0] == 0).all() and torch.isneginf(total[0, 0, 0])
        assert torch.equal(merged[0, 1, 1], out[0, 1, 1])
        assert merged.isfinite().all()
    index = torch.tensor([2, 3])
    live, live_lse = out.clone(), lse.clone()
    cp._merge_live_chunk_(
        live, live_lse, cp._gather_thd(part, index), cp._gather_lse(part_lse, index), index
    )
    assert torch.allclose(live[:, :, 2:], merged[:, :, 2:], atol=1e-6)
    assert torch.equal(live[:, :, :2], out[:, :, :2]) and torch.allclose(
        live_lse[:, :, 2:], total[:, :, 2:]
    )
    for live in range(9):
        assert cp._use_live_row_merge(live, 8) == (live <= 8 * cp._LIVE_ROW_MERGE_MAX_FRACTION)


def test_varlen_chunks() -> None:
    case = Case(docs=[[1] * 5 + [2] * 7])
    q, k, v, dout = (t.to(DEVICE) for t in case.inputs())
    ids = case.tensor("docs")
    assert ids is not None
    seg = cp._build_packed_ring_segments(ids, ids)
    assert seg is not None
    packed = [cp._gather_thd(t, seg["q_index"]) for t in (q, k, v, dout)]
    out, lse = cp._ffpa_varlen_forward_chunk(*packed[:3], seg, case.scale, True)
    gradients = cp._ffpa_varlen_backward_chunk(
        packed[3], *packed[:3], out, lse, seg, case.scale, True
    )
    for found, expected in zip((out, *gradients), truth(case)):
        wanted = cp._gather_thd(expected, seg["q_index"])
        assert torch.allclose(found.cpu().double(), wanted, atol=1e-5)


def test_varlen_chunks_refuse_what_does_not_fit() -> None:
    """Each would have the library reach past the end of a tensor."""
    seg = {name: torch.tensor([0, 2, 6], dtype=torch.int32) for name in ("cu_q", "cu_k")}
    dout, q, k, v, out = (torch.randn(6, 2, 8, device=DEVICE) for _ in range(5))
    lse = torch.randn(2, 6, device=DEVICE)
    good = [dout, q, k, v, out, lse]
    cp._ffpa_varlen_backward_chunk(*good, seg, 1.0, True)
    for i in range(len(good)):
        short = list(good)
        short[i] = short[i][:3] if i < 5 else short[i][:, :3]
        with pytest.raises(ringattn.ShapeError, match="expected"):
            cp._ffpa_varlen_backward_chunk(*short, seg, 1.0, True)
    for wrong in (v.bfloat16(), v.int()):
        with pytest.raises(ringattn.ShapeError, match="v.*expected"):
            cp._ffpa_varlen_backward_chunk(dout, q, k, wrong, out, lse, seg, 1.0, True)
        with pytest.raises(ringattn.ShapeError, match="v.*expected"):
            cp._ffpa_varlen_forward_chunk(q, k, wrong, seg, 1.0, True)
    for i in (0, 2, 3, 4, 5):
        elsewhere = list(good)
        elsewhere[i] = elsewhere[i].to("meta")
        with pytest.raises(ringattn.ShapeError, match="on device meta, expected"):
            cp._ffpa_varlen_backward_chunk(*elsewhere, seg, 1.0, True)
        if i in (2, 3):
            with pytest.raises(ringattn.ShapeError, match="_pack: on device meta, expected"):
                cp._ffpa_varlen_forward_chunk(*elsewhere[1:4], seg, 1.0, True)
    seg["cu_k"] = seg["cu_k"][:2]
    with pytest.raises(ValueError, match="cu_k: 2 elements, expected 3"):
        cp._ffpa_varlen_forward_chunk(q, k, v, seg, 1.0, True)


def test_flash_attention_layouts() -> None:
    case = Case(rows=2, window=4)
    q, k, v, dout = (t.transpose(1, 2).contiguous().to(DEVICE) for t in case.inputs())
    out, state = local._fa_ll_dense_fwd(q, k, v, case.scale, (case.window - 1, 0))
    found = (out, *local._fa_ll_dense_bwd(dout, state, case.scale, (case.window - 1, 0)))
    for a, b in zip(found, truth(case)):
        assert torch.allclose(a.cpu().transpose(1, 2).double(), b, atol=1e-5)
    seg = {"cu_q": torch.tensor([0, 12, 24]), "cu_k": torch.tensor([0, 12, 24])}
    thd, st = local._fa_ll_varlen_fwd(
        *(t.flatten(0, 1) for t in (q, k, v)), seg, case.scale, (3, 0)
    )
    assert torch.equal(thd.view(out.shape), out)
    assert torch.equal(
        local._fa_ll_varlen_bwd(dout.flatten(0, 1), st, seg, case.scale, (3, 0))[0].view(out.shape),
        found[1],
    )


def test_masks_and_groups() -> None:
    types = torch.tensor([[0, 1, 2, 0, 2, 2**32 + 1], [1, 1, 0, 1, 0, 0]])
    assert cp.gemma4_vision_group_ids(types).tolist() == [
        [-1, 0, 0, -1, 1, -1],
        [0, 0, -1, 1, -1, -1],
    ]
    case = Case(window=4)
    ctx = ctx_of(case, 1, 2, None)
    i, j = torch.arange(6)[:, None], torch.arange(6)[None, :]
    allowed = mask(case)[0].to(DEVICE)
    assert torch.equal(cp._base_gemma4_cp_mask(ctx.module, ctx, i, j, 0), allowed[6:, :6])
    assert torch.equal(cp._base_gemma4_cp_mask(ctx.module, ctx, i, j, 6), allowed[6:, 6:])
    assert cp._base_gemma4_cp_mask(ctx.module, ctx, 0, 5, 0) and not cp._base_gemma4_cp_mask(
        ctx.module, ctx, 0, 1, 6
    )


def test_small_parts() -> None:
    ids, pads = torch.tensor([[1, 2]]), torch.tensor([[False, True]])
    assert local._fold_pad(ids, None) is ids and local._fold_pad(ids, pads).tolist() == [[1, 0]]
    like = torch.ones(1)
    assert {k: float(v) for k, v in local._owner_grad_dict({1: like}, 1, 4, 2, like).items()} == {
        1: 1,
        0: 0,
        3: 0,
    }
    assert cp._zero_if_none(None, like) == 0 and cp._zero_if_none(like, like) is like
    metadata = {"a": torch.ones(2, requires_grad=True), "b": None}
    detached, empty = cp._detach_metadata(metadata), cp._metadata_like(metadata)
    assert detached["a"] is not None and not detached["a"].requires_grad and detached["b"] is None
    assert empty["a"] is not None and empty["a"].shape == (2,) and empty["b"] is None
    with cp._duck_shape_disabled():
        pass
    ctx = ctx_of(Case(), 0, 1, None)
    assert local._scale_of(ctx) == 0.25 and local._scale_of(replace(ctx, scale=2)) == 2.0
    with pytest.raises(ValueError, match="scale: None"):
        local._scale_of(replace(ctx, module=SimpleNamespace()))
    out = cp._compiled_flex_attention(ctx.module)(ctx, ctx.key, ctx.value, ctx.metadata, 0)[0]
    assert torch.allclose(out.cpu(), attend(Case(), *Case().inputs()[:3]), atol=1e-5)
    k_nb, _, nb_ids, owners = local._concat_neighborhood(
        replace(ctx, cp_rank=1),
        [(1, ctx.key, ctx.value, {}), (0, ctx.key, ctx.value, {}), (3, ctx.key, ctx.value, {})],
    )
    assert owners == [0, 1] and k_nb.shape[2] == 24 and nb_ids is None


def test_the_varlen_gate_depends_on_the_configuration() -> None:
    case = Case(head_dim=512, dtype=torch.bfloat16, docs=[[1] * 12])
    ctx = ctx_of(case, 0, 1, None, module_of(case, _cp_use_ffpa=True))
    assert cp._ffpa_varlen_ring_available() and cp._ring_use_ffpa_varlen(ctx.module, ctx)
    assert not cp._ring_use_ffpa_varlen(module_of(case), ctx)
    assert not cp._ring_use_ffpa_varlen(module_of(replace(case, window=4), _cp_use_ffpa=True), ctx)
    assert not cp._ring_use_ffpa_varlen(ctx.module, replace(ctx, metadata={}))
    assert not cp._ring_use_ffpa_varlen(ctx.module, replace(ctx, query=ctx.query.float()))


def exchanged(rank: int, size: int, group: Any) -> list[int]:
    mine, got, far = (
        torch.tensor([rank], device=DEVICE),
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
    )
    cp._ring_exchange([(mine, got)], group, rank, size)
    cp._direct_exchange([(mine, far)], group, rank, (rank + 2) % size, (rank - 2) % size)
    return [int(got), int(far)]


def test_exchanges() -> None:
    assert world.run(4, exchanged) == [[3, 2], [0, 3], [1, 0], [2, 1]]


def routed(rank: int, size: int, group: Any) -> list[torch.Tensor]:
    """Rank 0 found 256 for its own rows, every other rank 1; nobody else is owed anything."""
    found = torch.full((1, 1, 2, 8), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    found = found.to(DEVICE)
    return list(cp._route_kv_grads_to_owners({0: found}, {0: 2 * found}, group, rank, size))


def test_gradients_are_summed_in_f32() -> None:
    """256 + 1 is 256 in bfloat16, however often it is added; 259 is 260."""
    owner, *others = world.run(4, routed)
    for total, expected in zip(owner, (260, 520)):
        assert total.dtype == torch.bfloat16 and (total == expected).all()
    assert all((total == 0).all() for rank in others for total in rank)
