"""Shards of equal cost: the runs of every rank from a whole batch's documents, padding and images.

Every rank that asks with the same batch gets the same runs, so nothing is communicated. Must not
know tensors of a model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ringattn import _c
from ringattn.layer import Layer
from ringattn.metadata import (
    check_integers,
    check_mask,
    check_shape,
    host_mask,
    host_token_types,
    whole_documents,
)
from ringattn.shards import Runs


def balanced_runs(
    layers: Sequence[Layer],
    size: int,
    packed_seq_ids: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    mm_token_type_ids: torch.Tensor | None = None,
    *,
    seq: int | None = None,
    align: int = 1,
    equal_tokens: bool = False,
    weight: Sequence[float] | None = None,
) -> list[Runs]:
    """The runs of every rank: what `layout` takes in `shard`, `position_ids`, `step` and `prepare`.

    layers: the layer kinds that share the shards. The metadata are those of whole rows, [rows, seq],
    on every rank; without any, seq says how long a row of one document is. align: runs begin and
    end at multiples of it. equal_tokens: ranks own as many tokens as each other, or one align more,
    in fewer than two runs on average; else each owns one run. weight: what a pair costs in each
    layer kind, such as layers of that kind x q_heads x head_dim; the last two by default. The
    busiest rank has at most 3 % more than the mean if no align tokens cost more than 1 % of it.
    """
    given = [t for t in (packed_seq_ids, padding_mask, mm_token_type_ids) if t is not None]
    if not given and seq is None:
        raise ValueError("seq: missing, expected the length of a row or metadata of whole rows")
    if given and given[0].dim() != 2:
        raise ValueError(f"metadata: shape {tuple(given[0].shape)}, expected (rows, seq)")
    rows, length = given[0].shape if given else (1, _c.fit(seq, "seq"))
    if seq is not None and seq != length:
        raise ValueError(f"seq: {seq}, expected {length}, the length of the metadata's rows")
    if weight is not None and len(weight) != len(layers):
        raise ValueError(f"weight: {len(weight)} of them, expected one for each layer kind")
    check_integers(packed_seq_ids, "packed_seq_ids")
    check_integers(mm_token_type_ids, "mm_token_type_ids")
    check_mask(padding_mask, "padding_mask")
    desc = _c.StepDesc(size=ctypes.sizeof(_c.StepDesc), rows=rows, seq_local=length)
    check_shape(packed_seq_ids, "packed_seq_ids", (rows, length))
    check_shape(padding_mask, "padding_mask", (rows, length))
    check_shape(mm_token_type_ids, "mm_token_type_ids", (rows, length))
    host = {
        "doc_id": whole_documents(packed_seq_ids),
        "is_pad": host_mask(padding_mask),
        "token_type": host_token_types(mm_token_type_ids),
    }
    for name, tensor in host.items():
        if tensor is not None:
            setattr(desc, name, tensor.data_ptr())
    options = _c.BalanceOptions(
        size=ctypes.sizeof(_c.BalanceOptions),
        align=_c.fit(align, "align"),
        equal_tokens=equal_tokens,
    )
    size = _c.fit(size, "size", ctypes.c_int)
    if weight is not None:
        options.weight = (ctypes.c_double * len(weight))(*weight)
    kinds = (_c.Layer * len(layers))(*(layer.to_c() for layer in layers))
    result = _c.Balance()
    _c.check(_c.lib.ra_runs_balanced(desc, kinds, len(layers), size, options, result))
    first = result.run_first
    runs: list[Runs] = [
        [(int(r.start), int(r.count)) for r in result.run[first[rank] : first[rank + 1]]]
        for rank in range(size)
    ]
    _c.lib.ra_balance_free(result)
    return runs
