"""The ctypes layer against the header, and errors as exceptions."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import ringattn
from ringattn import _c
from ringattn.view import WORDS, backward_io, forward_io, view

HEADER = Path(__file__).parents[2] / "include" / "ringattn.h"
STRUCTS = {
    "ra_tensor": _c.Tensor,
    "ra_layer": _c.Layer,
    "ra_token": _c.Token,
    "ra_run": _c.Run,
    "ra_stream": _c.Stream,
    "ra_block": _c.Block,
    "ra_xfer": _c.Xfer,
    "ra_comm_callbacks": _c.CommCallbacks,
    "ra_ctx_options": _c.CtxOptions,
    "ra_step_desc": _c.StepDesc,
    "ra_balance_options": _c.BalanceOptions,
    "ra_balance": _c.Balance,
    "ra_plan_info": _c.PlanInfo,
    "ra_forward_io": _c.ForwardIo,
    "ra_backward_io": _c.BackwardIo,
    "ra_segments": _c.Segments,
    "ra_varlen": _c.Varlen,
}
CONSTANTS = [name for name in vars(_c) if name.startswith("RA_")]


def test_structs_and_constants(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not HEADER.exists():
        pytest.skip("no C compiler or no header here")
    lines, expected = [], []
    for name, struct in STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(struct)}")
        for field, *_ in struct._fields_:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
            expected.append(f"{name}.{field} {getattr(struct, field).offset}")
    for name in CONSTANTS:
        lines.append(f'printf("{name} %d\\n", (int){name});')
        expected.append(f"{name} {getattr(_c, name)}")
    source = tmp_path / "layout.c"
    source.write_text(
        '#include <stdio.h>\n#include "ringattn.h"\nint main(void) {' + "\n".join(lines) + "}\n"
    )
    program = tmp_path / "layout"
    subprocess.run(
        [compiler, "-std=c17", f"-I{HEADER.parent}", str(source), "-o", str(program)], check=True
    )
    said = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    assert said.splitlines() == expected


def test_packed_structs() -> None:
    tensors = [(f"t{i}", torch.zeros(2, 3, 4, 8)[:, :, 1:, :]) for i in range(9)]
    lse = torch.zeros(2, 3, 5)[:, :, 1:]
    forward = _c.ForwardIo.from_buffer_copy(forward_io(tensors[:4], lse))
    backward = _c.BackwardIo.from_buffer_copy(backward_io(tensors[:4], lse, tensors[5:]))
    tensors[4] = ("lse", lse.unsqueeze(-1))
    assert forward.size == ctypes.sizeof(_c.ForwardIo)
    assert backward.size == ctypes.sizeof(_c.BackwardIo)
    names = ("q", "k", "v", "out", "lse")
    for io, fields in ((forward, names), (backward, (*names, "dout", "dq", "dk", "dv"))):
        for field, (_, tensor) in zip(fields, tensors):
            expected, found = view(tensor), getattr(io, field)
            assert bytes(expected) == bytes(found), field
    assert not any(bytes(forward.kept_k)) and not any(bytes(backward.kept_v))
    assert WORDS * 8 == ctypes.sizeof(_c.Tensor)


def test_version_matches() -> None:
    assert _c.version() == ringattn.__version__


def test_errors_are_exceptions() -> None:
    layer = ringattn.Layer(q_heads=3, kv_heads=2, head_dim=8, scale=1.0, dtype=torch.float32)
    with pytest.raises(ringattn.ShapeError, match="layer.q_heads: 3, expected a multiple"):
        ringattn.Context(layers=[layer])
    with pytest.raises(ringattn.ArgumentError, match="layer_count"):
        ringattn.Context(layers=[])
    with pytest.raises(ringattn.UnavailableError, match="device: meta"):
        ringattn.Context(layers=[layer], device="meta")


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    from ringattn import info

    info.main()
    said = capsys.readouterr().out
    for word in (
        "ringattn",
        _c.version(),
        "cpu",
        "cuda",
        "single process",
        "gloo",
        "nccl",
        "torch",
    ):
        assert word in said, word
