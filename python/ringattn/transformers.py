"""attn_implementation="ringattn" for transformers models: Gemma 4 and other decoders.

register() makes the name known. A Ring reads the layer kinds off a model and turns a batch into
this rank's inputs and a step; the step travels to the attention modules as the model's keyword
argument `ringattn_step`, so that a recomputed layer finds the step of its own forward. No mask
tensor is ever built. Must not know how attention is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ringattn.context import Context, Step
from ringattn.function import attention
from ringattn.layer import Layer, Vision, refuse
from ringattn.shards import (
    Layout,
    Runs,
    documents_of_positions,
    shard,
    shift_labels,
)
from ringattn.shards import (
    position_ids as shard_positions,
)

NAME = "ringattn"


def _layer_index(
    step: Step, query: torch.Tensor, key: torch.Tensor, scale: float, causal: bool, window: int
) -> int:
    for index, layer in enumerate(step.layers):
        if (
            layer.q_heads == query.shape[1]
            and layer.kv_heads == key.shape[1]
            and layer.head_dim == query.shape[3]
            and layer.scale == scale
            and layer.causal == causal
            and layer.window == window
        ):
            return index
    raise ValueError(
        f"attention of {query.shape[1]}/{key.shape[1]} heads of {query.shape[3]}, scale {scale}, "
        f"causal {causal}, window {window}: expected one of the step's layers, {step.layers}"
    )


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    ringattn_step: Step | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention interface of transformers: query, key, value [rows, heads, seq, channels] in,
    [rows, seq, heads, channels] out."""
    refuse(
        dropout=dropout,
        softcap=softcap,
        sinks=kwargs.get("s_aux"),
        alibi=kwargs.get("alibi"),
        position_bias=kwargs.get("position_bias"),
        head_mask=kwargs.get("head_mask"),
        output_attentions=kwargs.get("output_attentions"),
    )
    if ringattn_step is None:
        raise ValueError(
            "ringattn_step: missing. Build the inputs with ringattn.Ring(model, group).prepare(), "
            "or pass ringattn_step=ring.step(...) to the model"
        )
    if attention_mask is not None and not (attention_mask.dim() == 2 and ringattn_step.padded):
        raise ValueError(
            f"attention_mask: shape {tuple(attention_mask.shape)}, expected none: padding is given "
            "to Ring.prepare or Ring.step, custom masks are not offered"
        )
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"past_key_values: {key.shape[2]} keys for {query.shape[2]} queries, expected as many: "
            "caches are not offered, pass use_cache=False"
        )
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    index = _layer_index(ringattn_step, query, key, scale, causal, sliding_window or 0)
    out = attention(query, key, value, ringattn_step, index)
    return out.transpose(1, 2).contiguous(), None


def mask_interface(
    *_: Any, attention_mask: torch.Tensor | None = None, **__: Any
) -> torch.Tensor | None:
    """Hands the 2-D mask on instead of building a 4-D one; attention_forward checks that the step
    knows of it."""
    return attention_mask


def register() -> None:
    """Makes attn_implementation="ringattn" known to transformers. May be called again."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_interface)


def _window_of(module: Any, config: Any) -> int:
    """What the module will pass as sliding_window."""
    if hasattr(module, "sliding_window"):
        return int(module.sliding_window or 0)
    return int(getattr(config, "sliding_window", None) or 0)


def _vision_of(config: Any) -> Vision:
    return (
        "within_window"
        if getattr(config, "use_bidirectional_attention", None) == "vision"
        else "off"
    )


def layers_of(
    model: torch.nn.Module, dtype: torch.dtype | None = None, vision: Vision | None = None
) -> list[Layer]:
    """The distinct layer kinds of the attention modules that use "ringattn".

    dtype: of q, k and v, default the model's. vision: how sliding layers treat image blocks,
    default what the model's configuration says.
    """
    chosen = dtype or next(p.dtype for p in model.parameters() if p.is_floating_point())
    found: list[Layer] = []
    for module in model.modules():
        config = getattr(module, "config", None)
        uses = getattr(config, "_attn_implementation", None) == NAME
        if (
            not uses
            or not hasattr(module, "num_key_value_groups")
            or not hasattr(module, "scaling")
        ):
            continue
        refuse(
            attention_dropout=getattr(config, "attention_dropout", None),
            attn_logit_softcapping=getattr(config, "attn_logit_softcapping", None),
            sinks=getattr(module, "sinks", None),
            use_bidirectional_attention=getattr(config, "use_bidirectional_attention", None)
            == "all",
        )
        attributes: Any = module
        heads = int(attributes.config.num_attention_heads)
        layer = Layer(
            q_heads=heads,
            kv_heads=heads // int(attributes.num_key_value_groups),
            head_dim=int(attributes.head_dim),
            scale=float(attributes.scaling),
            dtype=chosen,
            causal=bool(getattr(module, "is_causal", True)),
            window=_window_of(module, config),
            vision=_vision_of(config) if vision is None else vision,
        )
        if layer not in found:
            found.append(layer)
    if not found:
        raise ValueError(
            'model: no attention module uses "ringattn"; call ringattn.register() and load the '
            'model with attn_implementation="ringattn" (a multimodal one with '
            '{"text_config": "ringattn", ...})'
        )
    return found


class Ring:
    """A model's context. Collective over the group; options as for ringattn.Context."""

    def __init__(
        self,
        model: torch.nn.Module,
        group: Any = None,
        *,
        dtype: torch.dtype | None = None,
        vision: Vision | None = None,
        **options: Any,
    ) -> None:
        device = next(model.parameters()).device
        layers = layers_of(model, dtype, vision)
        self.context = Context(group, layers=layers, **{"device": device, **options})

    def close(self) -> None:
        self.context.close()

    def step(
        self,
        shape: tuple[int, int] | None = None,
        *,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        packed_seq_ids: torch.Tensor | None = None,
        mm_token_type_ids: torch.Tensor | None = None,
        layout: Layout | Sequence[Runs] = "contiguous",
    ) -> Step:
        """The step of this rank's slices, for a data loader that shards by itself. Collective.

        Documents come from packed_seq_ids, or from position_ids that restart where there is neither
        packed_seq_ids nor attention_mask: the rule of transformers. attention_mask: [rows,
        seq_local], 1 = keep.
        """
        if position_ids is not None and packed_seq_ids is None and attention_mask is None:
            part = position_ids.detach().cpu()
            documents = documents_of_positions(self.context.gather_rows(part, layout))
            packed_seq_ids = shard(documents, self.context.rank, self.context.size, layout)
        step = self.context.step(
            shape,
            packed_seq_ids=packed_seq_ids,
            padding_mask=None if attention_mask is None else attention_mask == 0,
            mm_token_type_ids=mm_token_type_ids,
            layout=layout,
        )
        step.padded = attention_mask is not None
        return step

    def prepare(
        self,
        input_ids: torch.Tensor,
        *,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        packed_seq_ids: torch.Tensor | None = None,
        mm_token_type_ids: torch.Tensor | None = None,
        layout: Layout | Sequence[Runs] = "contiguous",
    ) -> dict[str, Any]:
        """Whole rows, the same on every rank, to the keyword arguments of this rank's model call.

        Labels are shifted before they are cut, and num_items_in_batch counts them over all ranks:
        the sum of all ranks' losses is the loss of the whole batch. Collective.
        """
        rows, seq = input_ids.shape
        if position_ids is not None and position_ids.shape[0] != rows:
            position_ids = position_ids.expand(rows, -1)
        if position_ids is not None and packed_seq_ids is None and attention_mask is None:
            packed_seq_ids = documents_of_positions(position_ids)

        def cut(whole: torch.Tensor | None) -> torch.Tensor | None:
            if whole is None:
                return None
            return shard(whole, self.context.rank, self.context.size, layout)

        ids = shard(input_ids, self.context.rank, self.context.size, layout)
        if position_ids is None:
            positions = shard_positions(
                self.context.rank, self.context.size, seq, layout, input_ids.device
            ).expand(rows, -1)
        else:
            positions = shard(position_ids, self.context.rank, self.context.size, layout)
        step = self.step(
            (rows, ids.shape[1]),
            attention_mask=cut(attention_mask),
            packed_seq_ids=cut(packed_seq_ids),
            mm_token_type_ids=cut(mm_token_type_ids),
            layout=layout,
        )
        inputs: dict[str, Any] = {
            "input_ids": ids,
            "position_ids": positions,
            "use_cache": False,
            "ringattn_step": step,
        }
        if labels is not None:
            target = shift_labels(labels, packed_seq_ids)
            ours = shard(target, self.context.rank, self.context.size, layout).contiguous()
            # A model computes a loss when it sees labels, from shift_labels where they are given.
            inputs["labels"] = inputs["shift_labels"] = ours
            inputs["num_items_in_batch"] = (target != -100).sum()
        return inputs
