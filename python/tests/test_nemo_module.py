"""The NeMo drop-in inside a module: the swapped SDPA, the autograd functions, the FSDP guard."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import nemo_names
import world
from nemo_rank import RING_CASES, ctx_of, dout_of
from reference import Case, assert_close, plain, truth
from ringattn.nemo import cp_attention as cp


class Attention(torch.nn.Module):
    sliding_window, scaling, is_causal = 4, 0.25, True

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=0.25, enable_gqa=True
        )


CASE = Case(window=4, docs=[[1] * 6 + [2] * 6])


def attached(rank: int, size: int, group: Any) -> list[torch.Tensor]:
    case = CASE
    ctx = ctx_of(case, rank, size, group)
    module: Any = Attention()
    cp.attach_gemma4_cp_ring_attention(module, use_ffpa=True)
    module.setup_cp_attention(torch.distributed.DeviceMesh.from_group(group, "cpu"))
    usual = torch.nn.functional.scaled_dot_product_attention
    leaves = [t.clone().requires_grad_() for t in (ctx.query, ctx.key, ctx.value)]
    out = torch.utils.checkpoint.checkpoint(
        module, *leaves, _packed_seq_ids=ctx.metadata["_packed_seq_ids"], use_reentrant=False
    )
    assert torch.nn.functional.scaled_dot_product_attention is usual
    direct = module.run_cp_manual_attention(
        ctx.query,
        ctx.key,
        ctx.value,
        group,
        None,
        0.0,
        True,
        0.25,
        True,
        {"_packed_seq_ids": ctx.metadata["_packed_seq_ids"]},
    )
    assert torch.equal(direct, out)
    with pytest.raises(NotImplementedError, match="attn_mask.*dropout_p"):
        module.run_cp_manual_attention(*leaves, group, torch.ones(1), 0.1, True, 0.25, True, {})
    dout = dout_of(case, ctx)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def check(case: Case, parts: list[list[torch.Tensor]]) -> None:
    for i, (a, b) in enumerate(zip(plain(case), truth(case))):
        assert_close(str(i), torch.cat([p[i] for p in parts], 2), a, b)


@pytest.mark.parametrize("size", [1, 2])
def test_attached_module(size: int) -> None:
    check(CASE, world.run(size, attached))


def installed(rank: int, size: int, group: Any) -> list[torch.Tensor]:
    """Only the swapped SDPA, of a module that was never attached."""
    ctx, module = ctx_of(CASE, rank, size, group), Attention()
    cp._install_gemma4_cp_ring_sdpa(module, group)
    leaves = [t.clone().requires_grad_() for t in (ctx.query, ctx.key, ctx.value)]
    ids = {"_packed_seq_ids": ctx.metadata["_packed_seq_ids"]}
    out = module(*leaves, **ids)
    direct = (group, None, 0.0, True, 0.25, True, ids)
    assert torch.equal(cp._gemma4_cp_manual_attention(module, *leaves, *direct), out)
    assert cp._GEMMA4_CP_FLEX_RING_OK_LOGGED
    return [out.detach(), *torch.autograd.grad(out, leaves, dout_of(CASE, ctx))]


@pytest.mark.parametrize("size", [1, 2])
def test_installed_sdpa(size: int) -> None:
    check(CASE, world.run(size, installed))


def applied(rank: int, size: int, group: Any, kind: str, case: Case) -> list[torch.Tensor]:
    ctx = ctx_of(case, rank, size, group if size > 1 else None)
    leaves = [t.clone().requires_grad_() for t in (ctx.query, ctx.key, ctx.value)]
    out = getattr(cp, kind).apply(*leaves, ctx)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout_of(case, ctx))]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (cp._Gemma4FFPAVarlenRingAttention.__name__, "global"),
        (cp._Gemma4FlexRingAttention.__name__, "images"),
    ],
)
def test_autograd_functions(kind: str, name: str, size: int) -> None:
    case = RING_CASES[name]
    check(case, world.run(size, applied, kind, case))


def test_every_documented_name_is_in_a_test_of_what_it_does() -> None:
    used: set[str] = set()
    for file in Path(__file__).parent.glob("*nemo*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
    tables = nemo_names.CP_ATTENTION, nemo_names.CP_LOCAL_RING, nemo_names.CP_ATTENTION_DATA
    documented = {name.split(".")[0] for table in tables for name in table}
    assert not documented - used


def test_fsdp_guard_skips_parameters_without_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    parameter: Any = _fsdp_param.FSDPParam
    name, seen = "to_accumulated_grad_if_needed", []
    monkeypatch.setattr(
        parameter, name, lambda self: seen.append(self._unsharded_param), raising=False
    )
    cp._patch_fsdp_accumulated_grad_guard()
    guarded = getattr(parameter, name)
    guarded(SimpleNamespace())
    guarded(SimpleNamespace(_unsharded_param=3))
    assert seen == [3]
    cp._patch_fsdp_accumulated_grad_guard()
    assert getattr(parameter, name) is guarded
    monkeypatch.delattr(parameter, name)
    cp._patch_fsdp_accumulated_grad_guard()
    assert not hasattr(parameter, name)
