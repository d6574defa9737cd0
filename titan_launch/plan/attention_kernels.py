"""PyTorch's kernels of plain causal attention on CUDA: their order on a device, and the shapes that each kernel
supports. This module does not import torch.

Runs and plans use `priority`. In a run, PyTorch itself checks which shapes a kernel supports (`train.kernel_choice`). A
plan has no device, so `takes` repeats PyTorch's checks (torch 2.15: `sdp_utils.cpp`).
"""

from __future__ import annotations

_HOPPER = 9
"""Major number of the compute capability of Hopper GPUs."""

_REDUCED = ("bfloat16", "float16")
WIDEST_FLASH = 256
"""Width of the widest head that flash attention supports."""

_WIDEST_CUDNN = 128
"""Width of the widest head that cuDNN supports on every GPU."""

_WIDE_CUDNN = ((192, 128), (256, 256))
"""Pairs (width of queries, width of values) above `_WIDEST_CUDNN` that cuDNN supports on Hopper and later GPUs."""


def priority(capability: tuple[int, int]) -> tuple[str, ...]:
    """Return the attention backends for a GPU of this compute capability, in order of preference. The names are those
    of `kernels.attention`. Only Hopper prefers cuDNN to flash attention."""
    # On later GPUs, cuDNN's results are wrong if there are fewer than 8 key/value heads (pytorch issue 193893).
    if capability[0] == _HOPPER:
        return "cudnn", "flash", "efficient", "math"
    return "flash", "cudnn", "efficient", "math"


def takes(name: str, dtype: str, widths: tuple[int, int], capability: tuple[int, int]) -> bool:
    """Return True if the attention backend `name` (as in `kernels.attention`) can compute in this dtype (such as
    `bfloat16`) on a GPU of this compute capability.

    `widths`: head widths of queries and values, in elements. The attention is causal, without any other mask, and has
    as many keys as queries.
    """
    is_reduced, widest = dtype in _REDUCED, max(widths)
    if name == "flash":
        return is_reduced and widths[0] == widths[1] <= WIDEST_FLASH
    if name == "cudnn":
        is_wide = capability[0] >= _HOPPER and widths in _WIDE_CUDNN
        return is_reduced and all(width % 8 == 0 for width in widths) and (widest <= _WIDEST_CUDNN or is_wide)
    if name == "efficient":
        return dtype in (*_REDUCED, "float32") and all(width % (8 if is_reduced else 4) == 0 for width in widths)
    return name == "math"
