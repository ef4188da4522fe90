"""`python -m ringattn.info`: what this installation can do, and why it cannot do the rest."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ringattn.errors import UnavailableError


def _library_lines() -> list[tuple[str, str]]:
    try:
        from ringattn import _c
    except UnavailableError as error:
        return [("library", f"missing: {error}")]
    levels = []
    for index in range(64):
        name = _c.lib.ra_cpu_level_name(index)
        if name is None:
            break
        runs = "" if _c.lib.ra_cpu_level_runs(index) else " (not on this machine)"
        levels.append(name.decode() + runs)
    return [
        ("library", f"{_c.version()}, {_c.library_path}"),
        ("backend cpu", ", ".join(levels)),
        ("backend cuda", _cuda()),
        ("transport nccl", _nccl()),
        ("transport mpi", _part("ringattn-mpi")),
        ("transport", "single process"),
    ]


def _cuda() -> str:
    from ringattn import _c

    if not _c.HAS_CUDA:
        return "missing: this library is built without it"
    count = _c.lib.ra_cuda_device_count()
    return f"{count} devices" if count else "missing: no CUDA device or driver on this machine"


def _nccl() -> str:
    """Asked after torch is loaded, whose NCCL it is then."""
    from ringattn import _c

    version = _c.nccl_version()
    if not version:
        return "missing: the library is built without nccl.h, or there is no libnccl.so.2"
    return f"{version}, for NCCL groups"


def _part(stem: str) -> str:
    """An optional library: where it is, or why it is not."""
    from ringattn import _c

    try:
        return _c.load_library(stem)[1]
    except UnavailableError:
        return f"missing: lib{stem} is neither in the package nor installed"


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        return error


def _torch_lines() -> list[tuple[str, str]]:
    torch = _module("torch")
    if isinstance(torch, Exception):
        return [("torch", f"missing: {torch}")]
    lines = [("torch", torch.__version__)]
    distributed = _module("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        lines.append(("transport gloo", "missing: this torch is built without it"))
    else:
        lines.append(("transport gloo", "any other torch.distributed group"))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            lines.append((f"gpu {index}", torch.cuda.get_device_name(index)))
    else:
        lines.append(("gpu", "missing: torch sees no CUDA device"))
    return lines


def main() -> None:
    from ringattn import __version__

    torch_lines = _torch_lines()
    transformers = _module("transformers")
    found = f"missing: {transformers}" if isinstance(transformers, Exception) else ""
    lines = [
        ("ringattn", __version__),
        *torch_lines,
        *_library_lines(),
        ("transformers", found or transformers.__version__),
        ("python", sys.version.split()[0]),
    ]
    for name, text in lines:
        print(f"{name:16} {text}")


if __name__ == "__main__":
    main()
