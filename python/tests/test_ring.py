"""Output and gradients of the ring on 1 to 4 processes against dense attention in float64."""

from __future__ import annotations

import pytest
import torch

import world
from reference import Case, assert_close, plain, truth
from ring import run_case, whole_of

CASES = {
    "global": Case(),
    "not_causal": Case(causal=False),
    "documents": Case(
        rows=2, seq=13, docs=[[1] * 5 + [9] * 5 + [1] * 3, [2] * 7 + [0] * 2 + [3] * 4]
    ),
    "padding": Case(rows=2, pads=[[False] * 9 + [True] * 3, [True] * 4 + [False] * 8]),
    "sliding": Case(seq=17, window=5, docs=[[1] * 10 + [2] * 7]),
    "zigzag": Case(seq=19, layout="zigzag", docs=[[1] * 8 + [2] * 11]),
    "images_within": Case(
        seq=16, window=4, vision="within_window", types=[[0] * 3 + [1, 1, 2, 1] + [0] * 4 + [1] * 5]
    ),
    "images_over": Case(
        seq=16, window=4, vision="over_window", types=[[0] * 2 + [1] * 7 + [0] * 7]
    ),
    "fewer_tokens_than_ranks": Case(seq=3),
    "one_token": Case(seq=1),
    "gqa_8": Case(q_heads=8, kv_heads=1, head_dim=24),
    "bf16": Case(seq=24, window=7, dtype=torch.bfloat16),
    "f16": Case(seq=24, dtype=torch.float16),
}


def check(case: Case, size: int, options: dict[str, bool] | None = None) -> None:
    ours = whole_of(case, world.run(size, run_case, case, options))
    for tensor, a, b, c in zip(("out", "dq", "dk", "dv"), ours, plain(case), truth(case)):
        assert a.dtype == case.dtype
        assert_close(f"{tensor} on {size} ranks", a, b, c)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_results(name: str, size: int) -> None:
    check(CASES[name], size)


@pytest.mark.parametrize("option", [{"keep_kv": True}, {"overlap": False}])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ["global", "documents", "sliding", "zigzag", "one_token", "bf16"])
def test_options_do_not_change_results(name: str, size: int, option: dict[str, bool]) -> None:
    check(CASES[name], size, option)
