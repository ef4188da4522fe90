"""A tiny Gemma 4 over 1, 2 and 4 processes against transformers' own attention; other models,
losses, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ringattn
import world
from gemma import (
    BATCHES,
    SEQ,
    VOCABULARY,
    WINDOW,
    Result,
    batch_of,
    loss_of,
    targets_of,
    theirs,
    tiny,
    too_far,
    transformers,
)
from world import DEVICE

# What a GPU need not repeat: its own tests of the operation are elsewhere, and its time is short.
thorough = pytest.mark.thorough
CASES = [
    pytest.param(
        name, size, marks=() if name in ("packed_and_padded", "images") and size < 4 else thorough
    )
    for name in BATCHES
    for size in (1, 2, 4)
]


def shared_layers(how: str) -> int:
    """Shared K and V reach later layers beside the arguments of a layer, where the reentrant kind
    of checkpoint loses their gradients, whatever the attention."""
    return 0 if how == "reentrant" else 2


def ours(
    rank: int, size: int, group: Any, name: str, dtype: torch.dtype, layout: str, how: str
) -> Result:
    from torch.distributed.fsdp import fully_shard

    ringattn.register()
    if how == "fsdp2" and DEVICE == "cuda":
        group = world.nccl[size]
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
        # Inductor: a layer with K and V of its own and one without; all of them take minutes.
        for layer in model.model.layers[1:3] if how == "inductor" else model.model.layers:
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
    if how == "fsdp2" and DEVICE == "cuda" and torch.cuda.device_count() < size:
        pytest.skip("FSDP2 on GPUs goes through NCCL, which takes one GPU a rank")
    ranks = world.run(size, ours, name, dtype, layout, how, limit=300.0)
    logits = ringattn.unshard([r[0] for r in ranks], layout)
    summed = {n: torch.stack([r[1][n].double() for r in ranks]).sum(0) for n in ranks[0][1]}
    worse = too_far((logits, summed), name, dtype, shared_layers(how))
    assert not worse, worse


@pytest.mark.parametrize(("name", "size"), CASES)
def test_float32(name: str, size: int) -> None:
    compare(name, torch.float32, size)


@pytest.mark.parametrize(("name", "size"), CASES)
def test_bfloat16(name: str, size: int) -> None:
    compare(name, torch.bfloat16, size)


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [
        ("window", torch.float32),
        ("window", torch.bfloat16),
        ("scale", torch.float32),
        ("scale", torch.bfloat16),
    ],
)
def test_faults_are_too_far(fault: str, dtype: torch.dtype) -> None:
    """A window that is one too long, a scale that is a ten thousandth off, in bfloat16 a
    twentieth."""
    assert too_far(theirs("packed", dtype, 2, fault=fault), "packed", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zigzag(dtype: torch.dtype) -> None:
    compare("packed_and_padded", dtype, 4, "zigzag")


HOW = ["reentrant", "non_reentrant", "aot_eager", "inductor", "fsdp2"]


@pytest.mark.parametrize("how", HOW)
def test_checkpoints_compilers_and_fsdp2(how: str) -> None:
    compare("packed_and_padded", torch.float32, 2, how=how)


@thorough
@pytest.mark.parametrize("how", HOW)
def test_the_same_with_images_in_bfloat16(how: str) -> None:
    compare("images", torch.bfloat16, 2, how=how)


@thorough
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
    return float(loss.detach())


def test_losses_add_up_to_the_loss_of_the_batch() -> None:
    target = targets_of(batch_of("packed")).cpu()
    logits = theirs("packed", torch.float64, 2)[0]
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


def multimodal(text: str, vision: str) -> Any:
    """Without per-layer inputs, which need the ids."""
    layers = ["sliding_attention", "full_attention"]
    config = transformers.Gemma4Config(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": WINDOW,
            "layer_types": layers,
            "num_kv_shared_layers": 0,
            "use_bidirectional_attention": "vision",
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "global_head_dim": 8,
        },
        image_token_id=60,
        video_token_id=61,
        audio_token_id=62,
    )
    torch.manual_seed(3)
    known = {"text_config": text, "vision_config": vision}
    model = transformers.Gemma4ForConditionalGeneration._from_config(
        config, attn_implementation=known
    )
    return model.to(DEVICE)


def embedded() -> torch.Tensor:
    """A batch with images in it, as their tower leaves it in the stream."""
    return torch.randn(2, SEQ, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def seen(rank: int, size: int, group: Any) -> torch.Tensor:
    ringattn.register()
    model, batch = multimodal("ringattn", "sdpa"), batch_of("images")
    ring = ringattn.Ring(model, group)
    inputs = ring.prepare(batch["input_ids"], mm_token_type_ids=batch["mm_token_type_ids"])
    del inputs["input_ids"]
    logits = model(**inputs, inputs_embeds=ringattn.shard(embedded(), rank, size)).logits
    ring.close()
    return logits.detach()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_multimodal_model(size: int) -> None:
    types = batch_of("images")["mm_token_type_ids"]
    model = multimodal("eager", "eager")
    expected = model(inputs_embeds=embedded(), mm_token_type_ids=types, use_cache=False).logits
    causal = model(inputs_embeds=embedded(), use_cache=False).logits
    found = torch.cat(world.run(size, seen), 1)
    assert torch.allclose(found, expected.cpu(), atol=1e-5)
    assert not torch.allclose(found, causal.cpu(), atol=1e-3)
