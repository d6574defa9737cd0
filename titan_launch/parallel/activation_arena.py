"""Page-locked host memory for offloaded activations: one contiguous buffer, as large as a step needs.

PyTorch's own allocator of pinned memory rounds each tensor up to a power of two, and never frees memory.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque
from contextlib import ExitStack

import torch
from torch import Tensor

from titan_launch.checkpoint.snapshot import page_locked

_ALIGNMENT = 64  # bytes
_ENDLESS = 1 << 62


class ActivationArena:
    """Memory for tensors that live until backward. A place is a range of its bytes that holds one tensor. The place is
    free again when the tensor is dropped.

    At first the arena is empty. A tensor that does not fit is in ordinary memory, whose copies are slower, until `fit`
    enlarges the arena. A free place may be used again at once, so the caller must order the copies.
    """

    def __init__(self, device: torch.device):
        """`device`: the device whose tensors are copied."""
        self._device = device
        self._gaps = [(0, _ENDLESS)]
        """Start and end of each gap (free range of bytes), in order. The last gap has no end."""
        self._dropped = deque[tuple[int, int]]()
        """Start and end of the places whose tensors have been dropped. Tensors may be dropped in any thread."""
        self._locks = ExitStack()
        weakref.finalize(self, self._locks.close).atexit = False
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.needed = 0
        """Size in bytes of an arena that would have had room for all tensors so far."""

    def place(self, num_bytes: int) -> Tensor:
        """Return a new one-dimensional tensor of bytes: in the arena if it has a free place, else in ordinary
        memory."""
        self._take_back()
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        index = next(index for index, (start, end) in enumerate(self._gaps) if end - start >= size)
        start, gap_end = self._gaps[index]
        end = start + size
        self._gaps[index : index + 1] = [(end, gap_end)] if end < gap_end else []
        self.needed = max(self.needed, end)
        is_inside = end <= len(self.memory)
        place = self.memory[start : start + num_bytes] if is_inside else torch.empty(num_bytes, dtype=torch.uint8)
        weakref.finalize(place, self._dropped.append, (start, end)).atexit = False
        return place

    def fit(self) -> None:
        """Replace the arena's buffer by a larger one if more memory was needed and no tensor is in use. The host then
        waits for the copies."""
        self._take_back()
        if self.needed > len(self.memory) and self._gaps == [(0, _ENDLESS)]:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._locks.close()
            self.memory = torch.empty(self.needed, dtype=torch.uint8)
            self._locks.enter_context(page_locked(self.memory, self._device))

    def _take_back(self) -> None:
        """Make the places of dropped tensors free, and join neighbouring gaps."""
        while self._dropped:
            start, end = self._dropped.popleft()
            index = bisect_left(self._gaps, (start, end))
            if index and self._gaps[index - 1][1] == start:
                index -= 1
                start = self._gaps.pop(index)[0]
            if self._gaps[index][0] == end:
                end = self._gaps.pop(index)[1]
            self._gaps.insert(index, (start, end))
