"""A step's tensors from call to call: what a call finds kept of the last one must fit its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

import ringattn
from reference import Case, assert_close, plain, truth
from ring import cut, layer_of, open_context, step_of

CASE = Case(seq=12)
Tensors = list[torch.Tensor]


def inputs(context: ringattn.Context, case: Case = CASE) -> Tensors:
    return [cut(context, case, t, 2) for t in case.inputs()]


def check(case: Case, found: Tensors) -> None:
    for i, (one, a, b) in enumerate(zip(found, plain(case), truth(case))):
        assert_close(str(i), one, a, b)


def layouts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same values with other strides; the last ones with channels apart."""
    yield tensor
    yield tensor.transpose(1, 2).contiguous().transpose(1, 2)
    yield torch.nn.functional.pad(tensor, (0, 5, 0, 1))[..., :-1, :-5]
    yield tensor.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_any_strides_in_turn(which: int) -> None:
    with open_context(None, layer_of(CASE)) as context:
        step = step_of(context, CASE)
        *tensors, dout = inputs(context)
        order = list(layouts(tensors[which]))
        for tensors[which] in order + order[::-1]:
            with torch.no_grad():
                alone = ringattn.attention(*tensors, step)
            leaves = [t.detach().requires_grad_() for t in tensors]
            out = ringattn.attention(*leaves, step)
            assert torch.equal(alone, out)
            check(CASE, [out.detach(), *torch.autograd.grad(out, leaves, dout)])


def test_alike_tensors_share_what_is_kept() -> None:
    with open_context(None, layer_of(CASE)) as context:
        step = step_of(context, CASE)
        q, k, v, _ = inputs(context)
        ringattn.attention(q, k, v, step)
        kept = step.calls[0]
        ringattn.attention(q.clone().requires_grad_(), k.clone(), v.clone(), step)
        assert step.calls[0] is kept is not None
        ringattn.attention(q, k, v.transpose(1, 2).contiguous().transpose(1, 2), step)
        assert step.calls[0] is not kept


@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize(
    "change, why",
    [
        (lambda t: t.to("meta"), "{}: on device meta"),
        (lambda t: t.bfloat16(), "{}: dtype bf16"),
        (lambda t: t.int(), "{}: dtype torch.int32"),
        (lambda t: t[0], "{}: 3 dimensions"),
        (lambda t: t.sum(), "{}: 0 dimensions"),
        (lambda t: t[:, :, 1:], "{}: size of axis 2"),
    ],
    ids=["device", "bfloat16", "integers", "dimensions", "scalar", "size"],
)
def test_others_are_refused_after_right_ones(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], why: str
) -> None:
    with open_context(None, layer_of(CASE)) as context:
        step = step_of(context, CASE)
        named = dict(zip("qkv", inputs(context)))
        ringattn.attention(**named, step=step)
        named[name] = change(named[name])
        with pytest.raises(ringattn.ShapeError, match=why.format(name)):
            ringattn.attention(**named, step=step)


def test_layers_and_steps_of_one_shape_in_turn() -> None:
    cases = [CASE, replace(CASE, window=3)]
    packed = [[1] * 5 + [2] * 7]
    with open_context(None, *map(layer_of, cases)) as context:
        steps = [(docs, step_of(context, replace(CASE, docs=docs))) for docs in (None, packed)]
        *tensors, dout = inputs(context)
        leaves = [t.requires_grad_() for t in tensors]
        for _ in range(2):
            for docs, step in steps:
                for index, case in enumerate(cases):
                    out = ringattn.attention(*leaves, step, index)
                    found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
                    check(replace(case, docs=docs), found)


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse"])
@pytest.mark.parametrize(
    "change", [lambda t: t.to(torch.bfloat16), lambda t: t[:, :, :3]], ids=["bfloat16", "size"]
)
def test_a_backward_refuses_what_a_hook_changed(
    name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    saved = iter(["q", "k", "v", "out", "lse"])

    def unpack(packed: tuple[str, torch.Tensor]) -> torch.Tensor:
        return change(packed[1]) if packed[0] == name else packed[1]

    with open_context(None, layer_of(CASE)) as context:
        step = step_of(context, CASE)
        *tensors, dout = inputs(context)
        leaves = [t.requires_grad_() for t in tensors]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (next(saved), t), unpack):
            out = ringattn.attention(*leaves, step)
        with pytest.raises(ringattn.ShapeError, match="expected"):
            torch.autograd.grad(out, leaves, dout)
