"""Speed of causal attention on a CPU: the launcher's blocked kernel compared with PyTorch's kernel.

    python benchmarks/cpu_attention.py [--threads 1] [--write docs/verification/cpu.md]

The two kernels take turns, each with forward and backward of about 2,048 tokens. A ratio below 1 means that the blocked
kernel is faster. A ratio is bold if a run uses the blocked kernel for this length on this CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from publishing import publish
from torch import Tensor

from titan_launch.cpu.allocator import keep_freed_memory
from titan_launch.cpu.blocked_attention import attention, gradients, lengths

TOKENS = 2048
LENGTHS = (32, 64, 128, 256, 384, 512, 768, 1024, 2048)
HEADS = ((8, 8, 32), (8, 4, 32), (4, 4, 64), (8, 2, 64), (2, 2, 128), (8, 4, 128))
"""Number of query heads, number of key heads, and width of a head."""

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="The blocked attention kernel against PyTorch's kernel for CPUs.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", type=Path, help="Markdown file to put the table into, between its markers")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # a run does the same
    name = torch.cpu.get_capabilities().get("cpu_name", "CPU")
    threads = f"{options.threads} thread{'s' * (options.threads > 1)}"
    heads = [f"{queries}/{keys} x {width}" for queries, keys, width in HEADS]
    lines = [
        f"{name}, {threads}, torch {torch.__version__}; heads of queries/keys x width:",
        "",
        f"| dtype | tokens | {' | '.join(heads)} |",
        "|---|---|" + "---|" * len(HEADS),
    ]
    for dtype in (torch.bfloat16, torch.float32):
        for length in LENGTHS:
            form = "**{:.2f}**" if length in lengths().get(dtype, ()) else "{:.2f}"
            ratios = [form.format(ratio(length, *shape, dtype, options.rounds)) for shape in HEADS]
            lines.append(f"| {str(dtype).removeprefix('torch.')} | {length} | {' | '.join(ratios)} |")
    publish("\n".join(lines), f"cpu_attention_{options.threads}", options.write)


@torch.no_grad()
def ratio(length: int, heads: int, keys: int, width: int, dtype: torch.dtype, rounds: int) -> float:
    """Return the median seconds of the blocked kernel divided by those of PyTorch's kernel."""

    def made(heads: int) -> Tensor:
        return torch.randn(TOKENS // length, length, heads, width, dtype=dtype).transpose(1, 2)

    q, k, v, grad = made(heads), made(keys), made(keys), made(heads)

    def blocks() -> None:
        attention(q, k, v)
        gradients(grad, q, k, v)

    def kernel() -> None:
        result, sums = _FORWARD(q, k, v, 0.0, True)
        _BACKWARD(grad, q, k, v, result, sums, 0.0, True)

    ways: tuple[Callable[[], None], ...] = (blocks, kernel)
    times: dict[Callable[[], None], list[float]] = {way: [] for way in ways}
    for turn in range(1 + rounds):
        for way in ways[:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            way()
            times[way].append(time.perf_counter() - began)
    return median(times[blocks][1:]) / median(times[kernel][1:])


if __name__ == "__main__":
    main()
