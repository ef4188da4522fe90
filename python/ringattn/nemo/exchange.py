"""Keys, values and metadata around the ranks of a process group, and gradients back to their
owners.

For callers that drive their own ring; ringattn.attention moves what is needed inside the library.
Must not know masks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ringattn.comm import is_nccl

Metadata = dict[str, "torch.Tensor | None"]
Chunk = tuple[int, torch.Tensor, torch.Tensor, Metadata]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Backends differ in the dtypes that they move; all of them move bytes."""
    return tensor.view(-1).view(torch.uint8)


def _moved_on(device: torch.device, group: Any) -> torch.device:
    """Where the group can move a tensor of a device: of a GPU's memory with NCCL alone."""
    if device.type == "cuda" and not is_nccl(group):
        return torch.device("cpu")
    return device


def direct_exchange(
    tensors: list[tuple[torch.Tensor, torch.Tensor]],
    cp_group: Any,
    cp_rank: int,
    send_cp_rank: int,
    recv_cp_rank: int,
) -> None:
    """Every (send, receive) pair: send to one rank, receive from another."""
    if send_cp_rank == cp_rank and recv_cp_rank == cp_rank:
        for source, target in tensors:
            target.copy_(source)
        return
    operations, landed = [], []
    for source, target in tensors:
        device = _moved_on(target.device, cp_group)
        flat = torch.empty(target.shape, dtype=target.dtype, device=device)
        landed.append((flat, target))
        if source.numel() > 0:
            sent = _as_bytes(source.detach().to(device).contiguous())
            operations.append(dist.P2POp(dist.isend, sent, group=cp_group, group_peer=send_cp_rank))
        if target.numel() > 0:
            operations.append(
                dist.P2POp(dist.irecv, _as_bytes(flat), group=cp_group, group_peer=recv_cp_rank)
            )
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    for flat, target in landed:
        target.copy_(flat)


def ring_exchange(
    tensors: list[tuple[torch.Tensor, torch.Tensor]], cp_group: Any, cp_rank: int, cp_size: int
) -> None:
    """One rotation: send to the next rank, receive from the one before."""
    direct_exchange(tensors, cp_group, cp_rank, (cp_rank + 1) % cp_size, (cp_rank - 1) % cp_size)


def metadata_like(metadata: Metadata) -> Metadata:
    """Empty tensors of the same kind."""
    return {k: None if t is None else torch.empty_like(t) for k, t in metadata.items()}


def detach_metadata(metadata: Metadata) -> Metadata:
    return {k: None if t is None else t.detach() for k, t in metadata.items()}


def collect(
    key: torch.Tensor,
    value: torch.Tensor,
    metadata: Metadata,
    n_prior: int,
    cp_group: Any,
    cp_rank: int,
    cp_size: int,
) -> list[Chunk]:
    """(owner, key, value, metadata) of this rank and of the n_prior ranks before it, nearest
    first."""
    chunks: list[Chunk] = [(cp_rank, key.detach(), value.detach(), detach_metadata(metadata))]
    for distance in range(1, n_prior + 1):
        _, old_key, old_value, old = chunks[-1]
        new_key, new_value, new = (
            torch.empty_like(old_key),
            torch.empty_like(old_value),
            metadata_like(old),
        )
        pairs = [(old_key, new_key), (old_value, new_value)]
        for name, tensor in old.items():
            target = new[name]
            if tensor is not None and target is not None:
                pairs.append((tensor, target))
        ring_exchange(pairs, cp_group, cp_rank, cp_size)
        chunks.append(((cp_rank - distance) % cp_size, new_key, new_value, new))
    return chunks


def zero_if_none(grad: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if grad is None else grad


def route_to_owners(
    grad_key_by_owner: dict[int, torch.Tensor],
    grad_value_by_owner: dict[int, torch.Tensor],
    cp_group: Any,
    cp_rank: int,
    cp_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's dK and dV: what every rank found for them, summed in f32.

    All ranks make cp_size - 1 exchanges whatever they attended, so that nobody waits for a message
    that another rank does not know of.
    """
    own = [grad_key_by_owner.get(cp_rank), grad_value_by_owner.get(cp_rank)]
    likes = [next(iter(grad_key_by_owner.values())), next(iter(grad_value_by_owner.values()))]
    sums = [zero_if_none(grad, like).float() for grad, like in zip(own, likes)]
    for distance in range(1, cp_size):
        owner, reader = (cp_rank - distance) % cp_size, (cp_rank + distance) % cp_size
        found = [grad_key_by_owner.get(owner), grad_value_by_owner.get(owner)]
        pairs = [
            (zero_if_none(grad, like).float(), torch.empty_like(total))
            for grad, like, total in zip(found, likes, sums)
        ]
        direct_exchange(pairs, cp_group, cp_rank, owner, reader)
        for total, (_, landed) in zip(sums, pairs):
            total += landed
    return sums[0].to(likes[0].dtype), sums[1].to(likes[1].dtype)
