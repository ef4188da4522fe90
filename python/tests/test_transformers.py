"""A tiny Gemma 4 over 1, 2 and 4 processes against transformers' own attention.

The logits and the gradients of every parameter must be within twice the error that transformers'
own attention of the same dtype has against float64. One run of it is a poor measure of a parameter
with few elements, whose error may come from a token or two: by that of "eager", "sdpa" fails in
some. So the error, relative to the parameter's size, is the worst of a few runs: SAMPLES.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

import ringattn
import world
from world import DEVICE

transformers = pytest.importorskip("transformers")

SEQ, VOCABULARY = 24, 64
BATCHES = {
    "plain": {},
    "packed": {
        "positions": [
            list(range(9)) + list(range(7)) + list(range(8)),
            list(range(20)) + list(range(4)),
        ]
    },
    "padded": {"keep": [[1] * 24, [0] * 5 + [1] * 19]},
    "packed_and_padded": {"docs": [[1] * 10 + [2] * 11 + [0] * 3, [4] * 24]},
    "images": {"types": [[0] * 5 + [1] * 12 + [0] * 3 + [2] * 4, [0] * 24]},
}


# Implementation, and the rows of the batch that go through the model together.
ORDERS = {
    "together": ("eager", [[0, 1]]),
    "swapped": ("eager", [[1, 0]]),
    "one_by_one": ("eager", [[0], [1]]),
    "sdpa": ("sdpa", [[0, 1]]),
}


# Runs of transformers' own attention: one of ORDERS, and the seed of the tokens.
SEED = 5
SAMPLES = [(order, SEED) for order in ORDERS] + [
    (order, seed) for order in ("together", "sdpa") for seed in (6, 7, 8)
]


def tiny(implementation: str, dtype: torch.dtype, images: bool, shared: int = 2) -> Any:
    """Global and sliding layers, K = V on global ones, GQA, layers that share K and V."""
    config = transformers.Gemma4TextConfig(
        vocab_size=VOCABULARY,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        head_dim=16,
        global_head_dim=32,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
        attention_k_eq_v=True,
        num_kv_shared_layers=shared,
        use_bidirectional_attention="vision" if images else None,
        max_position_embeddings=64,
        initializer_range=0.08,
        attn_implementation=implementation,
    )
    torch.manual_seed(11)
    model = transformers.Gemma4ForCausalLM(config)
    return model.to(DEVICE, dtype).train()


def batch_of(name: str, seed: int = SEED) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (2, SEQ), generator=random).to(DEVICE)
    names = {
        "positions": "position_ids",
        "keep": "attention_mask",
        "docs": "packed_seq_ids",
        "types": "mm_token_type_ids",
    }
    return {"input_ids": ids, "labels": ids} | {
        names[k]: torch.tensor(v, device=DEVICE) for k, v in BATCHES[name].items()
    }


def eager_masks(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """4-D masks for the eager model, from the rule of the documentation; for images from
    transformers itself."""
    positions = torch.arange(SEQ, device=DEVICE)
    age = positions[:, None] - positions[None, :]
    real = torch.ones(2, SEQ, dtype=torch.bool, device=DEVICE)
    same = torch.ones(2, SEQ, SEQ, dtype=torch.bool, device=DEVICE)
    docs = batch.get("packed_seq_ids")
    if "position_ids" in batch:
        docs = (batch["position_ids"].diff(prepend=batch["position_ids"][:, :1] - 1) != 1).cumsum(
            1
        ) + 1
    if docs is not None:
        same, real = docs[:, :, None] == docs[:, None, :], docs > 0
    if "attention_mask" in batch:
        real = batch["attention_mask"] > 0
    allowed = same & real[:, None, :] & (age >= 0)
    masks = {"full_attention": allowed, "sliding_attention": allowed & (age < 6)}
    least = torch.finfo(model.dtype).min
    return {
        k: torch.zeros(m.shape, dtype=model.dtype, device=DEVICE).masked_fill(~m, least)[:, None]
        for k, m in masks.items()
    }


def image_masks(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.models.gemma4 import modeling_gemma4 as gemma

    embeds = model.model.embed_tokens(batch["input_ids"])
    blocks = gemma.get_block_sequence_ids_for_mask(batch["mm_token_type_ids"], embeds.device)
    masks: dict[str, torch.Tensor] = gemma.create_masks_for_vision_model(
        model.config, embeds, None, None, torch.arange(SEQ, device=DEVICE)[None], blocks
    )
    return masks


def real_rows(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if "packed_seq_ids" in batch:
        return batch["packed_seq_ids"] > 0
    return batch.get("attention_mask", torch.ones(2, SEQ, device=DEVICE)) > 0


def exact_attention(
    module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Eager attention without its float32 softmax."""
    k, v = (t.repeat_interleave(module.num_key_value_groups, 1) for t in (k, v))
    weights = (q @ k.transpose(2, 3) * scaling + attention_mask).softmax(-1)
    return (weights @ v).transpose(1, 2), None


def stay_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


Tensors = dict[str, torch.Tensor]
Result = tuple[torch.Tensor, Tensors]


@cache
def theirs(name: str, dtype: torch.dtype, shared: int, order: str, seed: int) -> Result:
    """Logits, and the gradients of all parameters."""
    implementation, groups = ORDERS[order]
    batch = batch_of(name, seed)
    model = tiny("eager", dtype, name == "images", shared)
    masks = image_masks(model, batch) if name == "images" else eager_masks(model, batch)
    exactly = dtype == torch.float64
    if exactly:
        transformers.AttentionInterface.register("exact", exact_attention)
    model.set_attn_implementation("exact" if exactly else implementation)
    logits = torch.zeros((2, SEQ, VOCABULARY), dtype=dtype)
    gradients: Tensors = {}
    for rows in groups:
        inputs = {k: batch[k][rows] for k in ("input_ids", "position_ids") if k in batch}
        mask = {k: m.expand(2, -1, -1, -1)[rows] for k, m in masks.items()}
        model.zero_grad()
        # Norms go to float32 by themselves; those of the reference must stay in float64.
        with mock.patch.object(torch.Tensor, "float", stay_double) if exactly else nullcontext():
            found = model(**inputs, attention_mask=mask, use_cache=False).logits
        loss_of(found, targets_of(batch)[rows]).backward()
        logits[rows] = found.detach().cpu()
        for n, p in model.named_parameters():
            gradients[n] = gradients.get(n, 0) + p.grad.double().cpu()
    return logits, gradients


def tensors_of(name: str, result: Result) -> Tensors:
    """Logits of the rows that are no padding, and gradients."""
    logits, gradients = result
    return {"logits": logits[real_rows(batch_of(name)).cpu()], **gradients}


def exact(name: str, shared: int, seed: int = SEED) -> Tensors:
    return tensors_of(name, theirs(name, torch.float64, shared, "together", seed))


def rms(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max())


# As a largest element scatters more than a root mean square, half as much again is allowed there.
NORMS = {"rms": (rms, 2), "largest": (largest, 3)}


@cache
def usual(name: str, dtype: torch.dtype, shared: int) -> dict[str, dict[str, float]]:
    """The relative error of every tensor in each norm, the worst of the samples."""
    worst: dict[str, dict[str, float]] = {norm: {} for norm in NORMS}
    for order, seed in SAMPLES:
        found = tensors_of(name, theirs(name, dtype, shared, order, seed))
        for tensor, truth in exact(name, shared, seed).items():
            for norm, (size_of, _) in NORMS.items():
                error = size_of(found[tensor].double() - truth) / (size_of(truth) or 1.0)
                worst[norm][tensor] = max(worst[norm].get(tensor, 0.0), error)
    return worst


def targets_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Shifted labels; padding neither predicts nor is predicted."""
    docs = batch.get("packed_seq_ids")
    if "position_ids" in batch:
        docs = ringattn.documents_of_positions(batch["position_ids"])
    target = ringattn.shift_labels(batch["labels"], docs)
    return target.masked_fill(~real_rows(batch), -100)


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).to(torch.float64), target.flatten(), reduction="sum"
    )


def shared_layers(how: str) -> int:
    """Shared K and V reach later layers beside the arguments of a layer, where the reentrant kind
    of checkpoint loses their gradients, whatever the attention."""
    return 0 if how == "reentrant" else 2


def ours(
    rank: int, size: int, group: Any, name: str, dtype: torch.dtype, layout: str, how: str
) -> Result:
    from torch.distributed.fsdp import fully_shard

    ringattn.register()
    batch = batch_of(name)
    model = tiny("ringattn", dtype, name == "images", shared_layers(how))
    if how in ("reentrant", "non_reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
    ring = ringattn.Ring(model, group, timeout_ms=60_000)
    whole = {k: v for k, v in batch.items() if k != "labels"}
    inputs = ring.prepare(**whole, layout=layout)
    if how == "sharded_loader":
        local = {k: ringattn.shard(v, rank, size) for k, v in whole.items() if k != "input_ids"}
        inputs["ringattn_step"] = ring.step(tuple(inputs["input_ids"].shape), **local)
        inputs |= {k: v for k, v in local.items() if k == "attention_mask"}
    if how in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        # Four ranks that each compile everything keep two cores busy for minutes.
        few = size == 4 and how == "inductor"
        for layer in model.model.layers[: 2 if few else None]:
            layer.compile(fullgraph=True, backend=how)
    if how == "fsdp2":
        mesh = torch.distributed.DeviceMesh.from_group(group, DEVICE)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    logits = model(**inputs).logits
    target = ringattn.shard(targets_of(batch), rank, size, layout)
    loss_of(logits, target).backward()
    gradients = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()
    }
    if how == "fsdp2":  # which averages: every rank holds the sum over ranks, divided by them
        gradients = {n: g.full_tensor() for n, g in gradients.items()}
    ring.close()
    return logits.detach(), gradients


def compare(
    name: str, dtype: torch.dtype, size: int, layout: str = "contiguous", how: str = "plain"
) -> None:
    """Every tensor by itself."""
    ranks = world.run(size, ours, name, dtype, layout, how, limit=300.0)
    logits = ringattn.unshard([r[0] for r in ranks], layout)
    summed = {n: torch.stack([r[1][n].double() for r in ranks]).sum(0) for n in ranks[0][1]}
    found, shared = tensors_of(name, (logits, summed)), shared_layers(how)
    errors, unit = usual(name, dtype, shared), torch.finfo(dtype).eps / 2
    worse = []
    for tensor, truth in exact(name, shared).items():
        for norm, (size_of, factor) in NORMS.items():
            error = size_of(found[tensor].double() - truth)
            limit = factor * (errors[norm][tensor] + unit) * size_of(truth)
            if not error <= limit:
                worse.append(f"{tensor}: {norm} error {error:.3e}, allowed {limit:.3e}")
    assert not worse, worse


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_float32(name: str, size: int) -> None:
    compare(name, torch.float32, size)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_bfloat16(name: str, size: int) -> None:
    compare(name, torch.bfloat16, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zigzag(dtype: torch.dtype) -> None:
    compare("packed_and_padded", dtype, 4, "zigzag")


HOW = ["reentrant", "non_reentrant", "aot_eager", "inductor", "fsdp2"]


@pytest.mark.parametrize("how", HOW)
def test_checkpoints_compilers_and_fsdp2(how: str) -> None:
    compare("packed_and_padded", torch.float32, 2, how=how)


@pytest.mark.parametrize("how", HOW)
def test_the_same_with_images_in_bfloat16(how: str) -> None:
    compare("images", torch.bfloat16, 2, how=how)


@pytest.mark.parametrize("how", HOW)
def test_the_same_on_four_ranks(how: str) -> None:
    compare("packed", torch.float32, 4, how=how)


@pytest.mark.parametrize("name", ["packed", "padded"])
def test_a_loader_that_shards_by_itself(name: str) -> None:
    compare(name, torch.float32, 2, how="sharded_loader")


def trained(rank: int, size: int, group: Any) -> float:
    """The model's own loss, from prepare with labels."""
    ringattn.register()
    model = tiny("ringattn", torch.float32, False)
    ring = ringattn.Ring(model, group)
    loss = model(**ring.prepare(**batch_of("packed"))).loss
    ring.close()
    return float(loss)


def test_losses_add_up_to_the_loss_of_the_batch() -> None:
    target = targets_of(batch_of("packed")).cpu()
    logits = theirs("packed", torch.float64, 2, "together", SEED)[0]
    expected = float(loss_of(logits, target)) / int((target != -100).sum())
    assert sum(world.run(2, trained)) == pytest.approx(expected, rel=1e-5)


def test_refusals_name_the_option() -> None:
    ringattn.register()
    model = tiny("ringattn", torch.float32, False)
    batch = {"input_ids": batch_of("plain")["input_ids"]}
    with pytest.raises(ValueError, match="ringattn_step: missing"):
        model(**batch)
    ring = ringattn.Ring(model)
    inputs = ring.prepare(**batch)
    with pytest.raises(ValueError, match="attention_mask"):
        model(**inputs, attention_mask=torch.ones(2, SEQ, device=DEVICE))
    with pytest.raises(ValueError, match="attention_mask"):
        model(**inputs, attention_mask=torch.zeros(2, 1, SEQ, SEQ, device=DEVICE))
    q = torch.zeros(2, 4, SEQ, 16)
    with pytest.raises(ringattn.UnsupportedError) as caught:
        ringattn.transformers.attention_forward(
            model,
            q,
            q,
            q,
            None,
            dropout=0.1,
            softcap=30.0,
            s_aux=torch.zeros(4),
            ringattn_step=inputs["ringattn_step"],
        )
    for option in ("dropout", "softcap", "sinks"):
        assert option in str(caught.value)
    with pytest.raises(ValueError, match="expected one of the step's layers"):
        ringattn.transformers.attention_forward(
            model, q, q, q, None, scaling=2.0, ringattn_step=inputs["ringattn_step"]
        )
    with pytest.raises(ValueError, match='no attention module uses "ringattn"'):
        ringattn.Ring(tiny("eager", torch.float32, False))
    model.config.attention_dropout = 0.1
    with pytest.raises(ringattn.UnsupportedError, match="attention_dropout: 0.1"):
        ringattn.Ring(model)


def other_model(implementation: str) -> Any:
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=7,
        attn_implementation=implementation,
    )
    torch.manual_seed(3)
    return transformers.MistralForCausalLM(config).to(DEVICE)


def other(rank: int, size: int, group: Any) -> torch.Tensor:
    ringattn.register()
    model = other_model("ringattn")
    ring = ringattn.Ring(model, group)
    logits = model(
        **ring.prepare(
            batch_of("packed")["input_ids"], position_ids=batch_of("packed")["position_ids"]
        )
    ).logits
    ring.close()
    return logits.detach()


def test_another_model() -> None:
    batch = batch_of("packed")
    expected = other_model("eager")(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
    ).logits
    found = torch.cat(world.run(2, other), 1)
    assert torch.allclose(found, expected.cpu(), atol=1e-5)
