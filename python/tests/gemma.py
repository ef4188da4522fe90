"""A tiny Gemma 4, and transformers' own attention of it as the judge of ours.

The logits and the gradients of every parameter may err twice as much as transformers' own attention
of the same dtype does, against float64. How much it errs is the worst of a few runs, relative to
the tensor's size, because one run is a poor measure of a parameter with few elements, whose error
may come from a token or two: by that of "eager", "sdpa" fails in some. docs/testing.md has figures.
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
world.preload("transformers.models.gemma4.modeling_gemma4")

SEQ, VOCABULARY, WINDOW = 24, 64, 6
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

# The runs that measure: the batch that is judged in every order, others, by their seeds, in two.
SEED = 5
OTHER_SEEDS = range(6, 13)
SAMPLES = [(order, SEED) for order in ORDERS] + [
    (order, seed) for order in ("together", "sdpa") for seed in OTHER_SEEDS
]

Tensors = dict[str, torch.Tensor]
Result = tuple[torch.Tensor, Tensors]


def tiny(implementation: str, dtype: torch.dtype, images: bool, shared: int = 2) -> Any:
    """Global and sliding layers, K = V on global ones, GQA, layers that share K and V."""
    config = transformers.Gemma4TextConfig(
        vocab_size=VOCABULARY,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size=32,
        hidden_size_per_layer_input=32,  # of few, all may be nearly 0, which a norm blows up
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        head_dim=16,
        global_head_dim=32,
        sliding_window=WINDOW,
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
    tame(model)
    return model.to(DEVICE, dtype).train()


@torch.no_grad()
def tame(model: Any) -> None:
    """Norms as in a trained model: scores of order one, and layers that add to the stream rather
    than replace it, attention most. Fresh ones make a bfloat16 run err by a fifth, and hide what is
    wrong."""
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.fill_(layer.self_attn.head_dim**-0.5)
        layer.post_attention_layernorm.weight.fill_(0.3)
        layer.post_feedforward_layernorm.weight.fill_(0.1)
        layer.post_per_layer_input_norm.weight.fill_(0.1)


def batch_of(name: str, seed: int = SEED) -> Tensors:
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


def documents_of(batch: Tensors) -> torch.Tensor | None:
    """Document ids, by a rule of this file's own where positions restart."""
    positions = batch.get("position_ids")
    if positions is None:
        return batch.get("packed_seq_ids")
    return (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(1) + 1


def real_rows(batch: Tensors) -> torch.Tensor:
    if "packed_seq_ids" in batch:
        return batch["packed_seq_ids"] > 0
    return batch.get("attention_mask", torch.ones(2, SEQ, device=DEVICE)) > 0


def text_masks(model: Any, batch: Tensors, window: int) -> Tensors:
    """4-D masks from the rule of the documentation."""
    positions = torch.arange(SEQ, device=DEVICE)
    age = positions[:, None] - positions[None, :]
    allowed = real_rows(batch)[:, None, :] & (age >= 0)
    docs = documents_of(batch)
    if docs is not None:
        allowed = allowed & (docs[:, :, None] == docs[:, None, :])
    masks = {"full_attention": allowed, "sliding_attention": allowed & (age < window)}
    least = torch.finfo(model.dtype).min
    return {
        k: torch.zeros(m.shape, dtype=model.dtype, device=DEVICE).masked_fill(~m, least)[:, None]
        for k, m in masks.items()
    }


def image_masks(model: Any, batch: Tensors) -> Tensors:
    """From transformers itself."""
    from transformers.models.gemma4 import modeling_gemma4 as gemma4

    embeds = model.model.embed_tokens(batch["input_ids"])
    blocks = gemma4.get_block_sequence_ids_for_mask(batch["mm_token_type_ids"], embeds.device)
    masks: Tensors = gemma4.create_masks_for_vision_model(
        model.config, embeds, None, None, torch.arange(SEQ, device=DEVICE)[None], blocks
    )
    return masks


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


def targets_of(batch: Tensors) -> torch.Tensor:
    """Shifted labels; padding neither predicts nor is predicted."""
    target = ringattn.shift_labels(batch["labels"], documents_of(batch))
    return target.masked_fill(~real_rows(batch), -100)


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).to(torch.float64), target.flatten(), reduction="sum"
    )


@cache
def theirs(
    name: str,
    dtype: torch.dtype,
    shared: int,
    order: str = "together",
    seed: int = SEED,
    fault: str = "",
) -> Result:
    """Logits, and the gradients of all parameters. fault: what is wrong, for what must be found."""
    implementation, groups = ORDERS[order]
    batch = batch_of(name, seed)
    model = tiny("eager", dtype, name == "images", shared)
    window = WINDOW + 1 if fault == "window" else WINDOW
    masks = image_masks(model, batch) if name == "images" else text_masks(model, batch, window)
    exactly = dtype == torch.float64
    if exactly:
        transformers.AttentionInterface.register("exact", exact_attention)
    model.set_attn_implementation("exact" if exactly else implementation)
    if fault == "scale":
        for layer in model.model.layers:
            layer.self_attn.scaling *= 0.95 if dtype == torch.bfloat16 else 0.9999
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
    return tensors_of(name, theirs(name, torch.float64, shared, seed=seed))


def rms(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max())


NORMS = {"rms": rms, "largest": largest}


@cache
def usual(name: str, dtype: torch.dtype, shared: int) -> dict[tuple[str, str], float]:
    """The relative error of every tensor in each norm, the worst of the samples."""
    worst: dict[tuple[str, str], float] = {}
    for order, seed in SAMPLES:
        found = tensors_of(name, theirs(name, dtype, shared, order, seed))
        for tensor, truth in exact(name, shared, seed).items():
            for norm, size_of in NORMS.items():
                error = size_of(found[tensor].double() - truth) / (size_of(truth) or 1.0)
                worst[tensor, norm] = max(worst.get((tensor, norm), 0.0), error)
    return worst


def too_far(result: Result, name: str, dtype: torch.dtype, shared: int = 2) -> list[str]:
    """What errs more than twice as much as usual, with a rounding of the result; every tensor by
    itself."""
    found, unit = tensors_of(name, result), torch.finfo(dtype).eps / 2
    errors, worse = usual(name, dtype, shared), []
    for tensor, truth in exact(name, shared).items():
        for norm, size_of in NORMS.items():
            error = size_of(found[tensor].double() - truth)
            limit = 2 * (errors[tensor, norm] + unit) * size_of(truth)
            if not error <= limit:
                worse.append(f"{tensor}: {norm} error {error:.3e}, allowed {limit:.3e}")
    return worse
