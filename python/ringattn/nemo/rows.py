"""Dense [B, H, S, D] and packed [T, H, D] rows, and the online-softmax merges.

The library's building blocks work on host memory; tensors of another device go there and back. Must
not know rings.
"""

from __future__ import annotations

import torch

from ringattn import _c
from ringattn.view import view

LIVE_ROW_MERGE_MAX_FRACTION = 0.25


def host(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """In host memory and of a dtype, without a copy where it already is."""
    return tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype)


def as_thd(packed: torch.Tensor) -> torch.Tensor:
    """[T, H, D] as the library's [1, H, T, D] view."""
    return packed.permute(1, 0, 2).unsqueeze(0)


def flat(index: torch.Tensor) -> torch.Tensor:
    return host(index, torch.int64).contiguous()


def gather_thd(t_bhsd: torch.Tensor, flat_index: torch.Tensor) -> torch.Tensor:
    """Dense rows at flat b * S + pos indices -> [T, H, D]."""
    dense, index = host(t_bhsd).contiguous(), flat(flat_index)
    packed = dense.new_empty(index.numel(), dense.shape[1], dense.shape[3])
    _c.check(
        _c.lib.ra_rows_gather(
            view(dense, "t_bhsd"), index.data_ptr(), index.numel(), view(as_thd(packed), "packed")
        )
    )
    return packed.to(t_bhsd.device)


def scatter_thd(
    packed: torch.Tensor, flat_index: torch.Tensor, B: int, H: int, S: int
) -> torch.Tensor:
    """[T, H, D] -> [B, H, S, D], 0 elsewhere."""
    source, index = host(packed).contiguous(), flat(flat_index)
    dense = source.new_empty(B, H, S, packed.shape[2])
    _c.check(
        _c.lib.ra_rows_scatter(
            view(as_thd(source), "packed"), index.data_ptr(), index.numel(), view(dense, "dense")
        )
    )
    return dense.to(packed.device)


def gather_lse(lse_dense: torch.Tensor, flat_index: torch.Tensor) -> torch.Tensor:
    """[B, Hq, S] -> [Hq, T]."""
    dense, index = host(lse_dense, torch.float32).contiguous(), flat(flat_index)
    rows, heads, seq = dense.shape
    packed = dense.new_empty(heads, index.numel())
    _c.check(
        _c.lib.ra_lse_gather(
            dense.data_ptr(), rows, heads, seq, index.data_ptr(), index.numel(), packed.data_ptr()
        )
    )
    return packed.to(lse_dense.device)


def scatter_lse(
    lse_pack: torch.Tensor, flat_index: torch.Tensor, B: int, Hq: int, S: int
) -> torch.Tensor:
    """[Hq, T] -> [B, Hq, S], -inf elsewhere."""
    packed, index = host(lse_pack, torch.float32).contiguous(), flat(flat_index)
    dense = packed.new_empty(B, Hq, S)
    _c.check(
        _c.lib.ra_lse_scatter(
            packed.data_ptr(), index.data_ptr(), index.numel(), B, Hq, S, dense.data_ptr()
        )
    )
    return dense.to(lse_pack.device)


def grad_add_live_(
    grad_bhsd: torch.Tensor, grad_pack: torch.Tensor, flat_index: torch.Tensor
) -> None:
    """grad_bhsd += grad_pack at the indexed rows; the sum is f32."""
    target, source, index = host(grad_bhsd), host(grad_pack).contiguous(), flat(flat_index)
    dense = target if target.stride(-1) == 1 else target.contiguous()
    _c.check(
        _c.lib.ra_rows_add(
            view(as_thd(source), "grad_pack"),
            index.data_ptr(),
            index.numel(),
            view(dense, "grad_bhsd"),
        )
    )
    if dense.data_ptr() != grad_bhsd.data_ptr():
        grad_bhsd.copy_(dense)


def merge(
    out_acc: torch.Tensor | None,
    lse_acc: torch.Tensor | None,
    out_step: torch.Tensor,
    lse_step: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The merged (out, lse) in f32, as new tensors; two empty parts stay empty: 0 and -inf."""
    part = host(out_step, torch.float32).contiguous()
    part_lse = host(lse_step, torch.float32).contiguous()
    if out_acc is None or lse_acc is None:
        return part.clone().to(out_step.device), part_lse.clone().to(out_step.device)
    out = host(out_acc, torch.float32).clone(memory_format=torch.contiguous_format)
    lse = host(lse_acc, torch.float32).clone(memory_format=torch.contiguous_format)
    _c.check(
        _c.lib.ra_merge(
            view(out), view(lse.unsqueeze(-1)), view(part), view(part_lse.unsqueeze(-1))
        )
    )
    return out.to(out_step.device), lse.to(out_step.device)


def merge_live_chunk_(
    out_acc: torch.Tensor,
    lse_acc: torch.Tensor,
    out_pack: torch.Tensor,
    lse_pack: torch.Tensor,
    flat_index: torch.Tensor,
) -> None:
    """merge at the indexed rows only, in place."""
    out, lse = host(out_acc).contiguous(), host(lse_acc).contiguous()
    part, part_lse = host(out_pack, torch.float32), host(lse_pack, torch.float32).contiguous()
    index = flat(flat_index)
    _c.check(
        _c.lib.ra_merge_rows(
            view(out, "out_acc"),
            view(lse.unsqueeze(-1), "lse_acc"),
            view(as_thd(part.contiguous()), "out_pack"),
            view(part_lse[None, :, :, None], "lse_pack"),
            index.data_ptr(),
            index.numel(),
        )
    )
    if out.data_ptr() != out_acc.data_ptr():
        out_acc.copy_(out)
    if lse.data_ptr() != lse_acc.data_ptr():
        lse_acc.copy_(lse)


def use_live_row_merge(num_live: int, num_rows: int) -> bool:
    """Is the pass over the live rows alone worth it? Up to a quarter of all rows."""
    return bool(_c.lib.ra_merge_rows_pays(num_live, num_rows))
