"""The switch for all CPU speedups: `cpu_speedups`, which only `train/build.py` calls.

Each other file of this folder, except for `kernels.py`, implements one speedup, and names the behaviour of PyTorch or
glibc that it replaces. A test compares both. A run without this folder has the same losses, up to rounding, but is
slower.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn

from titan_launch.config.sections.precision import KernelsConfig
from titan_launch.cpu import bfloat16_kernels
from titan_launch.cpu.allocator import keep_freed_memory
from titan_launch.cpu.blocked_attention import blocked_attention, lengths
from titan_launch.cpu.overlapped_all_reduce import overlap_all_reduces
from titan_launch.plan.layout import Layout

_log = logging.getLogger(__name__)


@contextmanager
def cpu_speedups(
    model: nn.Module,
    kernels: KernelsConfig,
    layout: Layout,
    seq_len: int,
    dtypes: Sequence[str],
    product_dtypes: Collection[str],
) -> Iterator[None]:
    """Speed up the training of a wrapped model on a CPU until the `with` block ends.

    Blocked attention replaces PyTorch's kernel if `kernels.attention` is `auto`, ranks have whole sequences, and the
    kernel supports `seq_len` tokens. `dtypes`: the dtypes in which the model's attention computes. If `dtypes` is
    empty, the dtypes are unknown, and each call of attention chooses its kernel. `product_dtypes`: the dtypes in which
    modules compute; bfloat16 goes through float32 on a CPU for which PyTorch has no fast bfloat16 kernels. After the
    block, the allocator and the model's all-reduces between replicas stay changed.
    """
    keep_freed_memory()
    overlap_all_reduces(model)
    with ExitStack() as stack:
        if "bfloat16" in product_dtypes and bfloat16_kernels.are_slow():
            _log.info("bfloat16: matrix products and attention run in float32, because this CPU has no AVX-512")
            stack.enter_context(bfloat16_kernels.float32_kernels())
        # Both replace the kernel of attention, but never on the same CPU: blocked attention is used only with AVX-512.
        if kernels.attention == "auto" and _uses_blocked_attention(layout, seq_len, dtypes):
            stack.enter_context(blocked_attention())
        yield


def _uses_blocked_attention(layout: Layout, seq_len: int, dtypes: Sequence[str]) -> bool:
    """Return True if blocked attention may compute a call. Log the kernel of each dtype."""
    blocked = {
        str(dtype).removeprefix("torch."): tokens
        for dtype, tokens in lengths().items()
        if layout.tokens_on_rank(seq_len) == seq_len and seq_len in tokens
    }
    for dtype in dtypes:
        tokens = blocked.get(dtype)
        own = f"blocked CPU kernel, for sequences of {tokens[0]} to {tokens[-1]} tokens" if tokens else None
        _log.info("attention (%s): %s", dtype, own or "PyTorch's CPU kernels")
    return bool(blocked.keys() & set(dtypes) if dtypes else blocked)
