"""One thread a process: the tests' tensors are tiny, and ranks and other tests run beside them.
Ranks start while the first test prepares."""

import pytest
import torch

import world

torch.set_num_threads(1)


def pytest_runtestloop(session: pytest.Session) -> None:
    needed = any(hasattr(item.module, "world") for item in session.items)
    if needed and not session.config.option.collectonly:
        world.start()
