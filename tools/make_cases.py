#!/usr/bin/env python3
"""Capture attention problems from transformers' Gemma 4 and write them as golden cases.

Q, K and V come from a forward pass of a small Gemma4TextModel with random weights (its own norms, RoPE,
K = V sharing and grouped heads), the mask from transformers' own mask builders. The expected tensors are
float64 attention under that mask, checked against transformers' eager attention. One safetensors file a
case, described in tests/golden/README.md; tools/strip_case.py makes the small ones of the repository.

usage: make_cases.py OUTDIR [NAME...] [--seed BASE]    (needs torch, transformers >= 5 and safetensors)
"""
import argparse
import math
import os

import torch
import transformers
from safetensors.torch import save_file
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

GLOBAL, SLIDING = "full_attention", "sliding_attention"

# layer; window of sliding layers; heads = (query, key of sliding, key of global layers); B rows of S tokens;
# docs = document lengths a row, what is left is padding; lead = padding before them;
# vision = (row, begin, end, token type) spans; rule = the vision rule.
CASES = {
    "global_causal": dict(layer=GLOBAL, window=64, heads=(2, 1, 1), B=1, S=84),
    "global_gqa4_batch2": dict(layer=GLOBAL, window=64, heads=(4, 1, 1), B=2, S=36),
    "global_tail_pad": dict(layer=GLOBAL, window=64, heads=(1, 1, 1), B=2, S=60, docs=[[43], [60]]),
    "global_packed": dict(layer=GLOBAL, window=64, heads=(2, 1, 1), B=1, S=84, docs=[[25, 22, 37]]),
    "global_packed_tail_pad": dict(layer=GLOBAL, window=64, heads=(2, 1, 1), B=2, S=60,
                                   docs=[[14, 28, 8], [45]]),
    "global_odd_length": dict(layer=GLOBAL, window=64, heads=(1, 1, 1), B=1, S=103, docs=[[40, 63]]),
    "sliding_causal": dict(layer=SLIDING, window=20, heads=(4, 2, 1), B=1, S=84),
    "sliding_window_gt_shard": dict(layer=SLIDING, window=60, heads=(2, 1, 1), B=1, S=126),
    "sliding_packed": dict(layer=SLIDING, window=16, heads=(2, 1, 1), B=1, S=126, docs=[[45, 21, 60]]),
    "sliding_packed_tail_pad": dict(layer=SLIDING, window=30, heads=(2, 1, 1), B=2, S=84,
                                    docs=[[18, 45], [84]]),
    "sliding_vision_within": dict(layer=SLIDING, window=20, heads=(2, 1, 1), B=1, S=126,
                                  vision=[(0, 30, 41, 1), (0, 60, 105, 1)], rule="within_window"),
    "sliding_vision_over": dict(layer=SLIDING, window=20, heads=(2, 1, 1), B=1, S=126,
                                vision=[(0, 30, 41, 1), (0, 60, 105, 2)], rule="over_window"),
    "sliding_vision_packed": dict(layer=SLIDING, window=16, heads=(2, 1, 1), B=2, S=84,
                                  docs=[[39, 45], [75]], rule="over_window",
                                  vision=[(0, 6, 36, 1), (0, 39, 50, 1), (1, 0, 15, 2), (1, 37, 63, 1)]),
    "sliding_vision_packed_within": dict(layer=SLIDING, window=16, heads=(4, 2, 1), B=1, S=84,
                                         docs=[[50, 34]], rule="within_window",
                                         vision=[(0, 4, 30, 1), (0, 55, 80, 2)]),
    "global_with_image": dict(layer=GLOBAL, window=16, heads=(1, 1, 1), B=1, S=60,
                              vision=[(0, 10, 40, 1)], rule="within_window"),
    "global_left_pad": dict(layer=GLOBAL, window=64, heads=(1, 1, 1), B=2, S=60,
                            docs=[[40], [25, 20]], lead=[20, 5]),
    "sliding_f16": dict(layer=SLIDING, window=20, heads=(2, 1, 1), B=1, S=84, dtype="float16"),
    "global_f32": dict(layer=GLOBAL, window=64, heads=(1, 1, 1), B=1, S=60, docs=[[27, 33]],
                       dtype="float32"),
}

captured = {}


def capture(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """An attention implementation that keeps what each layer kind is given."""
    captured[module.layer_type] = (query.detach(), key.detach(), value.detach(), scaling)
    return gemma4.eager_attention_forward(module, query, key, value, attention_mask, scaling=scaling)


ALL_ATTENTION_FUNCTIONS.register("capture", capture)
ALL_MASK_ATTENTION_FUNCTIONS.register("capture", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def build_model(case, dtype):
    q_heads, kv_heads, kv_heads_global = case["heads"]
    config = Gemma4TextConfig(
        vocab_size=512, vocab_size_per_layer_input=512, hidden_size=192, intermediate_size=256,
        num_hidden_layers=2, num_attention_heads=q_heads, num_key_value_heads=kv_heads, head_dim=256,
        sliding_window=case["window"], attention_k_eq_v=True, hidden_size_per_layer_input=16,
        num_global_key_value_heads=kv_heads_global, layer_types=[SLIDING, GLOBAL],
        use_bidirectional_attention="vision" if "vision" in case else None)
    config._attn_implementation = "capture"
    return config, gemma4.Gemma4TextModel(config).to(dtype).eval()


def layout(case):
    """Document ids (0 = padding), positions inside documents, and the spans (row, begin, length)."""
    rows, seq = case["B"], case["S"]
    ids = torch.zeros(rows, seq, dtype=torch.long)
    positions = torch.zeros(rows, seq, dtype=torch.long)
    spans = []
    for row, lengths in enumerate(case.get("docs") or [[seq]] * rows):
        begin = case.get("lead", [0] * rows)[row]
        for number, length in enumerate(lengths):
            ids[row, begin:begin + length] = number + 1
            positions[row, begin:begin + length] = torch.arange(length)
            spans.append((row, begin, length))
            begin += length
        positions[row, begin:] = torch.arange(seq - begin)
    return ids, positions, spans


def token_types(case):
    if "vision" not in case:
        return None
    types = torch.zeros(case["B"], case["S"], dtype=torch.long)
    for row, begin, end, kind in case["vision"]:
        types[row, begin:end] = kind
    return types


def build_mask(case, config, embeddings, types, spans):
    """What transformers allows, one document at a time: its own packing rule is that positions restart."""
    rows, seq, layer = case["B"], case["S"], case["layer"]
    allowed = torch.zeros(rows, 1, seq, seq, dtype=torch.bool)
    groups = None if types is None else gemma4.get_block_sequence_ids_for_mask(types, types.device)
    for row, begin, length in spans:
        part = slice(begin, begin + length)
        inputs = dict(config=config, inputs_embeds=embeddings[row:row + 1, part], attention_mask=None,
                      past_key_values=None, position_ids=torch.arange(length)[None])
        if case.get("rule") == "within_window":
            masks = gemma4.create_masks_for_vision_model(
                block_sequence_ids=groups[row:row + 1, part], **inputs)
            mask = masks[layer]
        elif layer == GLOBAL:
            mask = gemma4.create_causal_mask(**inputs)
        else:
            mask = gemma4.create_sliding_window_causal_mask(**inputs)
        if mask is None:
            mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
        elif mask.dtype != torch.bool:
            mask = mask == 0
        if case.get("rule") == "over_window":
            group = groups[row, part]
            mask = mask | ((group[:, None] == group[None, :]) & (group[:, None] >= 0))[None, None]
        allowed[row, 0, part, part] = mask[0, 0]
    return allowed


def expected(query, key, value, grad_out, allowed, scale):
    """float64 attention and its gradients; rows that attend nothing give 0 and -inf."""
    query, key, value, grad_out = (t.double() for t in (query, key, value, grad_out))
    for tensor in (query, key, value):
        tensor.requires_grad_()
    ratio = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(ratio, 1).transpose(2, 3) * scale
    scores = scores.masked_fill(~allowed, -math.inf)
    live = allowed.any(-1, keepdim=True).expand(scores.shape[:-1] + (1,))
    lse = torch.logsumexp(scores.detach(), -1)
    weights = torch.softmax(scores.masked_fill(~live, 0.0), -1) * live
    out = weights @ value.repeat_interleave(ratio, 1)
    gradients = torch.autograd.grad(out, (query, key, value), grad_out)
    return (out.detach(), lse) + gradients


def eager_error(query, key, value, allowed, scale, pad, out):
    """How far transformers' own attention is from `out` on the rows that are not padding."""
    class Module:
        num_key_value_groups = query.shape[1] // key.shape[1]
        head_dim = query.shape[-1]
        training = False
    bias = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    eager, _ = gemma4.eager_attention_forward(Module, query.float(), key.float(), value.float(), bias,
                                              scaling=scale)
    difference = eager.transpose(1, 2).double() - out
    return difference.masked_fill(pad[:, None, :, None], 0).abs().max().item()


def make(name, case, seed, folder):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    dtype = getattr(torch, case.get("dtype", "bfloat16"))
    config, model = build_model(case, dtype)
    ids, positions, spans = layout(case)
    types = token_types(case)
    embeddings = torch.randn(case["B"], case["S"], config.hidden_size, generator=generator).to(dtype)
    tokens = torch.randint(0, 512, (case["B"], case["S"]), generator=generator)
    captured.clear()
    with torch.no_grad():
        model(input_ids=tokens, position_ids=positions, use_cache=False)
    query, key, value, scale = captured[case["layer"]]
    allowed = build_mask(case, config, embeddings, types, spans)
    pad = ids == 0
    grad_out = torch.randn(query.shape, generator=generator).to(dtype)
    grad_out = grad_out.masked_fill(pad[:, None, :, None], 0)
    out, lse, grad_query, grad_key, grad_value = expected(query, key, value, grad_out, allowed,
                                                          float(scale))
    tensors = dict(query=query, key=key, value=value, grad_out=grad_out, packed_seq_ids=ids.int(),
                   out=out.float(), lse=lse.float(), grad_query=grad_query.float(),
                   grad_key=grad_key.float(), grad_value=grad_value.float())
    if types is not None:
        tensors["mm_token_type_ids"] = types.int()
    if pad.any():
        tensors["padding_mask"] = pad.to(torch.uint8)
    sliding = case["layer"] == SLIDING
    metadata = dict(
        format="ringattn-case-v1", name=name, layer="sliding" if sliding else "global", causal="true",
        scale=repr(float(scale)), sliding_window=str(case["window"] if sliding else 0),
        vision_rule=case.get("rule", "none"), layout="BHSD",
        source=f"transformers {transformers.__version__} Gemma4TextModel, random weights, seed {seed}")
    path = os.path.join(folder, name + ".safetensors")
    save_file({k: t.contiguous().clone() for k, t in tensors.items()}, path, metadata=metadata)
    error = eager_error(query, key, value, allowed, scale, pad, out)
    print(f"{name:28s} q{tuple(query.shape)} kv{tuple(key.shape)} "
          f"live={allowed.any(-1).sum().item()} density={allowed.float().mean():.3f} "
          f"max|lse|={lse[torch.isfinite(lse)].abs().max():.1f} eager error={error:.2e}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("names", nargs="*", metavar="NAME", help="all cases by default")
    parser.add_argument("--seed", type=int, default=20261129, help="of the first case; the others count on")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(CASES))
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)}; known: {', '.join(CASES)}")
    os.makedirs(args.folder, exist_ok=True)
    for index, (name, case) in enumerate(CASES.items()):
        if not args.names or name in args.names:
            make(name, case, args.seed + index, args.folder)


if __name__ == "__main__":
    main()
