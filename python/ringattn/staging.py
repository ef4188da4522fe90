"""Messages of the library as flat host tensors, which is what gloo moves.

A message is a list of strided blocks, of host memory or of a GPU's. Must not know peers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from ringattn import _c


class Staging(Protocol):
    def empty(self, count: int) -> torch.Tensor:
        """A flat buffer, [count] of uint8."""

    def pack(self, xfer: _c.Xfer, flat: torch.Tensor) -> None: ...

    def unpack(self, xfer: _c.Xfer, flat: torch.Tensor) -> None: ...

    def finish(self) -> None:
        """Returns when everything packed and unpacked so far is there."""


class HostStaging:
    """Blocks of host memory."""

    def empty(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device="cpu")

    def pack(self, xfer: _c.Xfer, flat: torch.Tensor) -> None:
        _c.lib.ra_xfer_pack(ctypes.byref(xfer), flat.data_ptr())

    def unpack(self, xfer: _c.Xfer, flat: torch.Tensor) -> None:
        _c.lib.ra_xfer_unpack(ctypes.byref(xfer), flat.data_ptr())

    def finish(self) -> None:
        pass


def rows_of(block: _c.Block, word: int, device: torch.device) -> torch.Tensor:
    """The memory of a block as a tensor, [count, width] in words of 8 bytes, or in bytes.

    From its address: torch.as_tensor on __cuda_array_interface__ says the same and leaks.
    """
    stride = block.stride if block.count > 1 else block.width
    size = (block.count - 1) * stride + block.width
    build: Any = torch._C
    storage = build._construct_storage_from_data_pointer(block.data, device, size)
    flat = torch.empty(0, dtype=torch.int64 if word == 8 else torch.uint8, device=device)
    return flat.set_(storage, 0, (block.count, block.width // word), (stride // word, 1))


def word_of(blocks: list[_c.Block]) -> int:
    """The unit that every block can be copied in."""
    odd = any(b.data % 8 or b.width % 8 or (b.count > 1 and b.stride % 8) for b in blocks)
    return 1 if odd else 8


class DeviceStaging:
    """Blocks of a GPU's memory: copied side by side there, then across in one piece.

    When the library asks for a message, the rows to send are there and the places of the rows to
    come are free, so a stream of its own has nothing to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cuda: Any = torch.cuda
        self.stream = cuda.Stream(device)
        self._flat = torch.empty(0, dtype=torch.uint8, device=device)

    def empty(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device="cpu", pin_memory=True)

    def _mirror(self, count: int) -> torch.Tensor:
        """A flat buffer on the device, as large as the largest message. One is enough: it is
        filled and emptied in the order of the stream."""
        if self._flat.numel() < count:
            self._flat = torch.empty(count, dtype=torch.uint8, device=self.device)
        return self._flat[:count]

    def _pairs(
        self, xfer: _c.Xfer, mirror: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each block's rows and their place in the mirror."""
        blocks = [b for b in xfer.blocks[: xfer.block_count] if b.count > 0 and b.width > 0]
        word = word_of(blocks)
        place = mirror.view(torch.int64) if word == 8 else mirror
        at = 0
        for block in blocks:
            rows = rows_of(block, word, self.device)
            yield rows, place[at : at + rows.numel()].view(rows.shape)
            at += rows.numel()

    def pack(self, xfer: _c.Xfer, flat: torch.Tensor) -> None:
        with torch.cuda.stream(self.stream):
            mirror = self._mirror(flat.numel())
            for rows, place in self._pairs(xfer, mirror):
                place.copy_(rows)
            flat.copy_(mirror, non_blocking=True)

    def unpack(self, xfer: _c.Xfer, flat: torch.Tensor) -> None:
        with torch.cuda.stream(self.stream):
            mirror = self._mirror(flat.numel())
            mirror.copy_(flat, non_blocking=True)
            for rows, place in self._pairs(xfer, mirror):
                rows.copy_(place)

    def finish(self) -> None:
        self.stream.synchronize()
