"""Small inputs that break attention rings, with the right answers, on 1 to 4 processes.

MP: Q = K = 0 and V[j] = unit vector e_j, so a row of the output is 1/n on exactly the n keys that
it sees. GP: Q = K = 0 and a gradient of ones, so dV[j] is the sum of 1/n over the rows that see j.
"""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ringattn
import world
from reference import Case, assert_close, plain, truth
from ringattn.nemo import cp_attention
from ringattn.transformers import attention_forward
from ring import attend, cut, layer_of, open_context, run_case, step_of, whole_of
from world import DEVICE

SIZES = [1, 2, 3, 4]


def probe(rank: int, size: int, group: Any, case: Case) -> list[torch.Tensor]:
    """Visible counts n of this rank's rows and, by GP, dV of its keys: [rows, seq_local] each."""
    layer = layer_of(case)
    with open_context(group, layer) as context:
        step = step_of(context, case)
        eye = torch.eye(case.seq, case.head_dim).expand(case.rows, case.kv_heads, -1, -1)
        v = cut(context, case, eye, 2).clone().requires_grad_()
        k = torch.zeros_like(v)
        q = v.new_zeros(case.rows, case.q_heads, v.shape[2], case.head_dim)
        out = ringattn.attention(q, k, v, step)
        assert torch.isfinite(out).all()
        (dv,) = torch.autograd.grad(out.sum(), v)
        # The sum over channels counts a row once for each channel that can tell keys apart.
        return [(out > 0).sum(-1)[:, :1], dv[:, :1, :, 0]]


def probe_case(**values: Any) -> Case:
    return Case(**{"q_heads": 1, "kv_heads": 1, "head_dim": 16, **values})


def window_by(rank: int, size: int, group: Any, entry: str) -> list[torch.Tensor]:
    """MP through one of the ways into the library."""
    case = probe_case(seq=16, window=4, layout="zigzag" if entry == "zigzag" else "contiguous")
    with open_context(group, layer_of(case), keep_kv=entry == "kept") as context:
        step = step_of(context, case)
        v = cut(context, case, torch.eye(16)[None, None], 2)
        q = torch.zeros_like(v)
        module = SimpleNamespace(is_causal=True, scaling=case.scale, sliding_window=4)
        if entry == "transformers":
            out, _ = attention_forward(
                module, q, q, v, None, scaling=case.scale, sliding_window=4, ringattn_step=step
            )
            out = out.transpose(1, 2)
        elif entry == "nemo":
            ring = group if size > 1 else None
            out = cp_attention._gemma4_cp_manual_attention(
                module, q, q, v, ring, None, 0.0, True, None, False, {}
            )
        elif entry == "compiled":
            torch._dynamo.reset()
            fast = torch.compile(ringattn.attention, fullgraph=True, backend="aot_eager")
            out = fast(q, q, v, step)
        else:
            out = ringattn.attention(q, q, v, step)
    return [(out > 0).sum(-1)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "entry", ["attention", "zigzag", "kept", "compiled", "transformers", "nemo"]
)
def test_p17_window_reaches_every_shard(entry: str, size: int) -> None:
    case = probe_case(seq=16, layout="zigzag" if entry == "zigzag" else "contiguous")
    (counts,) = whole_of(case, world.run(size, window_by, entry))
    assert counts.flatten().tolist() == [1, 2, 3] + [4] * 13


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"vision": "within_window", "window": 4}, [1, 7, 7, 7, 6, 5, 4, 4]),
        ({"vision": "over_window", "window": 4}, [1, 7, 7, 7, 6, 6, 6, 4]),
        ({"vision": "within_window", "window": 0}, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_p18_image_longer_than_the_window(
    size: int, changes: dict[str, Any], counts: list[int]
) -> None:
    case = probe_case(seq=8, types=[[0] + [1] * 6 + [0]], **changes)
    seen, _ = whole_of(case, world.run(size, probe, case))
    assert seen.flatten().tolist() == counts


@pytest.mark.parametrize("size", SIZES)
def test_p20_metadata_without_flag_is_causal(size: int) -> None:
    case = probe_case(seq=8, window=4, types=[[0] + [1] * 6 + [0]])
    seen, _ = whole_of(case, world.run(size, probe, case))
    assert seen.flatten().tolist() == [1, 2, 3, 4, 4, 4, 4, 4]


def test_p20_flag_without_metadata_is_causal_and_said(caplog: pytest.LogCaptureFixture) -> None:
    layer = layer_of(probe_case(window=4, vision="within_window"))
    with open_context(None, layer) as context:
        with caplog.at_level(logging.WARNING, "ringattn"):
            context.step((1, 8))
            context.step((1, 8))
    assert [r.message for r in caplog.records] == [
        "no mm_token_type_ids: every token of the step is text, also to layers with a vision rule"
    ]
    case = probe_case(seq=8, window=4, vision="within_window")
    assert probe(0, 1, None, case)[0].flatten().tolist() == [1, 2, 3, 4, 4, 4, 4, 4]


def padded_row(rank: int, size: int, group: Any, poison: bool) -> list[torch.Tensor]:
    """P04: rows 0 to 2 of one document; row 3 is padding full of NaN, or is not there at all."""
    layer = layer_of(Case(head_dim=8))
    cuts = [
        [[(0, 4)]],
        [[(0, 2)], [(2, 2)]],
        [[(0, 1)], [(1, 2)], [(3, 1)]],
        [[(0, 1)], [(1, 1)], [(2, 1)], [(3, 1)]],
    ][size - 1]
    if not poison:
        cuts = [[(s, min(s + c, 3) - s) for s, c in runs if s < 3] for runs in cuts]
    random = torch.Generator().manual_seed(4)
    tensors = [torch.randn(1, heads, 4, 8, generator=random) for heads in (4, 2, 2, 4)]
    for tensor in tensors:
        tensor[:, :, 3] = float("nan")
    positions = [p for start, count in cuts[rank] for p in range(start, start + count)]
    pad = torch.tensor([[p == 3 for p in positions]], dtype=torch.bool).view(1, -1)
    with open_context(group, layer) as context:
        step = context.step(padding_mask=pad, layout=cuts)
        q, k, v, dout = (t[:, :, positions].to(context.device) for t in tensors)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = ringattn.attention(*leaves, step)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("size", SIZES)
def test_p04_nan_in_a_padded_row(size: int) -> None:
    poisoned = world.run(size, padded_row, True)
    clean = world.run(size, padded_row, False)
    for with_pad, without in zip(zip(*poisoned), zip(*clean)):
        whole, short = torch.cat(with_pad, 2), torch.cat(without, 2)
        assert torch.equal(whole[:, :, :3], short)
        assert torch.equal(whole[:, :, 3], torch.zeros_like(whole[:, :, 3]))


def bad_layouts(rank: int, size: int, group: Any) -> list[str]:
    """P08 and P09: what each bad call says, and that nothing was sent."""
    good = {"q": (1, 4, 8, 16), "k": (1, 2, 8, 16), "v": (1, 2, 8, 16)}
    bad: list[dict[str, Any]] = [
        {"k": (1, 8, 2, 16)},
        {"v": (1, 2, 7, 16)},
        {"v": (1, 4, 8, 16)},
        {"v": (1, 2, 8, 24)},
        {"q": (4, 8, 16)},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float64},
    ]
    said = []
    for change in bad:
        with open_context(group, layer_of(Case())) as context:
            step = context.step((1, 8))
            shapes = {**good, **{n: s for n, s in change.items() if n != "dtype"}}
            q, k, v = (torch.zeros(shapes[n], device=context.device) for n in "qkv")
            try:
                ringattn.attention(q, k.to(change.get("dtype", k.dtype)), v, step)
                said.append("accepted")
            except ringattn.ShapeError as error:
                said.append(str(error))
            assert context.bytes_sent() == 0
    return said


@pytest.mark.parametrize("size", [1, 2, 4])
def test_p08_p09_layouts_and_dtypes_mixed_up(size: int) -> None:
    for said in world.run(size, bad_layouts):
        heads, seq, kv_heads, channels, dims, half, double = said
        assert "k" in heads and "heads" in heads, heads
        assert "v" in seq and "seq" in seq, seq
        assert "v" in kv_heads and "heads" in kv_heads, kv_heads
        assert "v" in channels and "chan" in channels, channels
        assert "q: 3 dimensions, expected 4" in dims, dims
        assert "k" in half and "bf16" in half and "f32" in half, half
        assert "k" in double and "f64" in double, double


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_p09_gradients_have_the_input_dtype(dtype: torch.dtype) -> None:
    case = Case(dtype=dtype, seq=16)
    ours = whole_of(case, world.run(2, run_case, case))
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), ours, plain(case), truth(case)):
        assert a.dtype == dtype
        assert_close(name, a, b, c)


def test_p13_padding_mask_is_bool() -> None:
    with open_context(None, layer_of(Case())) as context:
        for dtype in (torch.int64, torch.float32, torch.uint8):
            with pytest.raises(
                TypeError, match="padding_mask: dtype .*, expected bool, true = padding"
            ):
                context.step(padding_mask=torch.zeros(1, 8, dtype=dtype))
        with pytest.raises(TypeError, match="packed_seq_ids: dtype"):
            context.step(packed_seq_ids=torch.ones(1, 8))
        with pytest.raises(TypeError, match="mm_token_type_ids: dtype"):
            context.step(mm_token_type_ids=torch.ones(1, 8, dtype=torch.bool))
        with pytest.raises(ValueError, match="padding_mask: shape"):
            context.step((1, 8), padding_mask=torch.zeros(1, 7, dtype=torch.bool))


def disagree(rank: int, size: int, group: Any, how: str) -> tuple[str, str, float]:
    """P14: the kind and text of this rank's error and the seconds until it came."""
    last = rank == size - 1
    start = time.monotonic()
    try:
        layer = layer_of(
            Case(
                window=5 if how == "layers" and last else 4,
                vision="over_window" if how == "vision" and last else "off",
            )
        )
        with open_context(group, layer) as context:
            seq, layout = 4, "contiguous"
            if how == "runs":
                layout = [[(r * 4, 4)] for r in range(size)]
                layout[-1] = [(4 * size - 3, 4)]
                layout = layout if last else [[(r * 4, 4)] for r in range(size)]
            mask = torch.zeros(1, seq, dtype=torch.int64 if how == "types" and last else torch.bool)
            step = context.step((1, seq), padding_mask=mask, layout=layout)
            longer = seq + 2 if how == "shape" and last else seq
            q = torch.zeros(1, 4, longer, 16, device=context.device)
            dtype = torch.float64 if how == "dtype" and last else torch.float32
            k = torch.zeros(1, 2, longer, 16, dtype=dtype, device=context.device)
            if how == "exception" and last:
                context.abort("this rank has given up")
                raise KeyError("given up")
            ringattn.attention(q, k, k, step)
        return "nothing", "", 0.0
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("how", "own", "others"),
    [
        ("layers", "MismatchError", "MismatchError"),
        ("vision", "MismatchError", "MismatchError"),
        ("runs", "MismatchError", "MismatchError"),
        ("types", "TypeError", "ValueError"),
        ("shape", "ShapeError", "CommError"),
        ("dtype", "ShapeError", "CommError"),
        ("exception", "KeyError", "CommError"),
    ],
)
def test_p14_ranks_that_disagree(how: str, own: str, others: str, size: int) -> None:
    said = world.run(size, disagree, how, limit=60.0)
    kinds = [kind for kind, _, _ in said]
    # A window of 4 needs the rank before only: a rank that nobody waits for may finish in peace.
    assert kinds[-1] == own, said
    assert set(kinds[:-1]) <= {others, "nothing"}, said
    assert others in kinds[:-1] or size > 2 and others == "CommError", said
    assert max(seconds for _, _, seconds in said) < 10, said
    if others != "CommError":
        assert kinds[:-1] == [others] * (size - 1), said
        assert own == "TypeError" or len({text for _, text, _ in said}) == 1, said
    for kind, text, _ in said:
        if kind == "CommError":
            assert f"rank {size - 1}" in text or size > 2, said


def test_p23_unsupported_options_are_all_listed() -> None:
    with pytest.raises(ringattn.UnsupportedError) as caught:
        layer_of(Case(), softcap=30.0, dropout=0.1, sinks=torch.zeros(4), alibi=True)
    for option in ("softcap", "dropout", "sinks", "alibi"):
        assert option in str(caught.value)


def shared_tensors(rank: int, size: int, group: Any, how: str) -> torch.Tensor:
    """P26: dV by GP under checkpointing, two calls on one K and V, or V = K on random data."""
    from torch.utils.checkpoint import checkpoint

    case = probe_case(seq=4)
    with open_context(group, layer_of(case)) as context:
        step = step_of(context, case)
        if how == "aliased":
            q, k = (cut(context, case, t, 2) for t in case.inputs()[:2])
            one = k.clone().requires_grad_()
            two, three = k.clone().requires_grad_(), k.clone().requires_grad_()
            ringattn.attention(q, one, one, step).sum().backward()
            ringattn.attention(q, two, three, step).sum().backward()
            assert one.grad is not None and two.grad is not None and three.grad is not None
            assert torch.allclose(one.grad, two.grad + three.grad, rtol=1e-6, atol=1e-7)
            return one.grad
        v = cut(context, case, torch.ones(1, 1, 4, 16), 2).clone().requires_grad_()
        q = torch.zeros_like(v)

        def attend(value: torch.Tensor) -> torch.Tensor:
            return ringattn.attention(q, torch.zeros_like(value), value, step)

        if how == "twice":
            out = attend(v) + attend(v)
        elif how == "plain":
            out = attend(v)
        else:
            out = checkpoint(attend, v, use_reentrant=how == "reentrant")
        (dv,) = torch.autograd.grad(out.sum(), v) if how != "reentrant" else (None,)
        if dv is None:
            out.sum().backward()
            dv = v.grad
        assert dv is not None
        return dv[0, 0, :, 0].detach()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", ["plain", "reentrant", "non_reentrant", "twice", "aliased"])
def test_p06_p26_recompute_and_shared_tensors(how: str, size: int) -> None:
    parts = world.run(size, shared_tensors, how)
    if how == "aliased":
        assert torch.cat(parts, 2).isfinite().all()
        return
    once = torch.tensor([25 / 12, 13 / 12, 7 / 12, 1 / 4])
    expected = once * 2 if how == "twice" else once
    assert torch.allclose(torch.cat(parts), expected, rtol=1e-6)


P27 = [
    Case(
        rows=2,
        seq=24,
        q_heads=1,
        kv_heads=1,
        head_dim=256,
        scale=1 / 16,
        window=9,
        dtype=torch.bfloat16,
        seed=seed,
        pads=[[False] * 20 + [True] * 4, [False] * 24],
    )
    for seed in range(100)
]


def under_windows(rank: int, size: int, group: Any) -> list[list[torch.Tensor]]:
    with open_context(group, layer_of(P27[0])) as context:
        return [attend(context, case, step_of(context, case)) for case in P27]


def test_p27_bf16_under_a_sliding_mask() -> None:
    alone, pair = (world.run(size, under_windows) for size in (1, 2))
    for case, *parts in zip(P27, *alone, *pair):
        judges = plain(case), truth(case)
        for ranks in (parts[:1], parts[1:]):
            ours = whole_of(case, ranks)
            for name, a, b, c in zip(("out", "dq", "dk", "dv"), ours, *judges):
                assert_close(f"seed {case.seed}, {len(ranks)} ranks: {name}", a, b, c)


def elsewhere(rank: int, size: int, group: Any) -> str:
    with open_context(group, layer_of(Case())) as context:
        step = context.step((1, 4))
        try:
            meta = torch.zeros(1, 4, 4, 16, device="meta")
            ringattn.attention(meta, meta[:, :2], meta[:, :2], step)
        except ringattn.ShapeError as error:
            return str(error)
    return "accepted"


def test_p28_another_device_is_named() -> None:
    for said in world.run(2, elsewhere):
        assert f"q: on device meta, expected {DEVICE}" in said and f"({DEVICE}) runs" in said


def summed(rank: int, size: int, group: Any, case: Case) -> list[torch.Tensor]:
    """P29: gradients of loss = sum(out) on every rank."""
    with open_context(group, layer_of(case)) as context:
        step = step_of(context, case)
        leaves = [cut(context, case, t, 2).clone().requires_grad_() for t in case.inputs()[:3]]
        ringattn.attention(*leaves, step).sum().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]


def test_p29_gradients_are_those_of_the_global_sum() -> None:
    case = Case(seq=12)
    alone = whole_of(case, world.run(1, summed, case))
    for size in SIZES[1:]:
        for a, b in zip(whole_of(case, world.run(size, summed, case)), alone):
            assert torch.allclose(a, b, rtol=1e-5, atol=2e-6)
