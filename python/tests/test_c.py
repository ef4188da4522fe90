"""The ctypes layer against the header, and errors as exceptions."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ringattn
from ringattn import _c, staging
from ringattn.view import ForwardLayout, backward_io, view

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
    names = "q k v out lse kept_k kept_v dout dq dk dv".split()
    heads = {"k": 2, "v": 2, "dk": 2, "dv": 2, "kept_k": 5, "kept_v": 7}
    tensors = {  # every one with strides of its own
        name: torch.zeros(2, heads.get(name, 4), 9 + i, 8)[:, :, :6] for i, name in enumerate(names)
    }
    lse = torch.zeros(2, 4, 7)[:, :, 1:]
    tensors["lse"] = lse.unsqueeze(-1)
    q, k, v, out, _, kept_k, kept_v, *gradients = tensors.values()
    for kept in ((), (kept_k, kept_v)):
        written = (q, k, v, out, lse, kept)
        forward = _c.ForwardIo.from_buffer_copy(ForwardLayout(*written).pack(*written))
        backward = _c.BackwardIo.from_buffer_copy(backward_io(q, k, v, out, lse, gradients, kept))
        for io in (forward, backward):
            assert io.size == ctypes.sizeof(io)
            for field, _ in io._fields_[1:]:
                if field.startswith("kept") and not kept:
                    assert not any(bytes(getattr(io, field))), field
                else:
                    assert bytes(view(tensors[field])) == bytes(getattr(io, field)), field


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


def info_of(code: str = "", **environment: str) -> str:
    """What `python -m ringattn.info` says after some code."""
    code += "\nimport runpy\nrunpy.run_module('ringattn.info', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_info_says_what_is_missing() -> None:
    said = info_of("import sys\nsys.modules['torch'] = sys.modules['transformers'] = None")
    for part in ("torch", "transformers"):
        assert f"{part:16} missing" in said
    assert "backend cpu      portable" in said


def test_info_names_a_library_that_is_none(tmp_path: Path) -> None:
    text = tmp_path / "library.so"
    text.write_text("no library")
    without = "import sys\nsys.modules['torch'] = sys.modules['transformers'] = None"
    assert "library          missing: RA_E_UNAVAILABLE: RINGATTN_LIBRARY" in info_of(
        without, RINGATTN_LIBRARY=str(text)
    )
    with pytest.raises(ringattn.UnavailableError, match="no ra_version, expected libringattn"):
        _c.declare(ctypes.CDLL(None), _c.PROTOTYPES)


@pytest.mark.parametrize("odd", [0, 2])
def test_blocks_as_tensors(odd: int) -> None:
    """What a GPU's messages are packed with, on host memory, against the library's own packing."""
    memory = torch.arange(4096, dtype=torch.int16).view(torch.uint8)
    blocks = (_c.Block * 2)(
        _c.Block(memory.data_ptr() + odd, 48, 80, 5), _c.Block(memory.data_ptr() + 1024, 640, 0, 1)
    )
    xfer = _c.Xfer(blocks=blocks, block_count=2, bytes=48 * 5 + 640)
    flat = torch.empty(xfer.bytes, dtype=torch.uint8)
    _c.lib.ra_xfer_pack(ctypes.byref(xfer), flat.data_ptr())
    word = staging.word_of(list(blocks))
    assert word == (1 if odd else 8)
    parts = [staging.rows_of(b, word, torch.device("cpu")).flatten() for b in blocks]
    assert torch.equal(torch.cat(parts).view(torch.uint8), flat)
