"""The examples run as their users run them, and say what they promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def torchrun(name: str, *arguments: str) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", "2", str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_train_gemma4_tiny() -> None:
    pytest.importorskip("transformers")
    said = torchrun("train_gemma4_tiny.py")
    assert "step 7  2 ranks" in said and "largest difference" in said


def test_long_context() -> None:
    said = torchrun("long_context_2gpu.py", "512")
    assert said.count("sliding") == said.count("global") == 2
