"""Matrix products and attention of bfloat16 tensors through float32, for CPUs without AVX-512.

The file replaces PyTorch's CPU kernels. oneDNN has bfloat16 kernels only for CPUs with AVX-512. On other x86 CPUs,
PyTorch multiplies matrices in loops of its own, which took up to 58 times as long as the float32 product of the same
shape (docs/verification/cpu.md). Here the inputs are copied to float32, and the results are rounded to bfloat16 once,
as in PyTorch's loops. Tests compare the results with those in float64 (tests/cpu/test_bfloat16_kernels.py).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from titan_launch.cpu.kernels import Kernel, Replacement

_aten = torch.ops.aten
_OPERATIONS = {
    _aten.mm.default: 2,
    _aten.addmm.default: 3,
    _aten.bmm.default: 2,
    _aten.baddbmm.default: 3,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 5,
}
"""The replaced operations, with the number of leading arguments that must be bfloat16. If one of these arguments has
another dtype, PyTorch's kernel runs, which refuses mixed dtypes."""

_FLOAT32_RESULT = {_aten._scaled_dot_product_flash_attention_for_cpu.default: 1}
"""Index of the result that is float32 also for bfloat16 inputs: the log-sum-exp of attention."""


def are_slow() -> bool:
    """Return True if PyTorch has no fast bfloat16 kernels on this CPU: an x86 CPU without AVX-512."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx2")) and not has.get("avx512_f")


def float32_kernels() -> AbstractContextManager[None]:
    """Compute bfloat16 matrix products and attention through float32 until the `with` block ends.

    Autograd, activation checkpointing and tracing see the same operations as before. PyTorch's kernels compute other
    dtypes, and matrix products of compiled graphs, which write into given tensors.
    """
    return _REPLACEMENT.active()


def _through_float32(operation: torch._ops.OpOverload) -> Kernel:
    inner, kept = torch.library.get_kernel(operation, "CPU"), _FLOAT32_RESULT.get(operation)
    num_alike = _OPERATIONS[operation]

    def widened(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value

    def compute(dispatch: Any, *inputs: Any, **options: Any) -> Any:
        if any(tensor.dtype != torch.bfloat16 for tensor in inputs[:num_alike]):
            return inner.call_boxed(dispatch, *inputs, **options)
        options = {name: widened(value) for name, value in options.items()}
        results = inner.call_boxed(dispatch, *map(widened, inputs), **options)
        if isinstance(results, Tensor):
            return results.bfloat16()
        return tuple(result if index == kept else result.bfloat16() for index, result in enumerate(results))

    return compute


_REPLACEMENT = Replacement(lambda: {operation: _through_float32(operation) for operation in _OPERATIONS})
