"""Matrix products of bfloat16 tensors through float32, for CPUs without AVX-512.

The file replaces PyTorch's CPU kernels of matrix products. oneDNN has bfloat16 kernels only for CPUs with AVX-512. On
other x86 CPUs, PyTorch uses loops of its own, which took up to 58 times as long as the float32 product of the same
shape (docs/verification/cpu.md). Here the factors are copied to float32, and the result is rounded to bfloat16 once, as
in PyTorch's loops. Tests compare both with the product in float64 (tests/cpu/test_bfloat16_products.py).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from titan_launch.cpu.kernels import Kernel, Replacement

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default)


def are_slow() -> bool:
    """Return True if PyTorch has no fast bfloat16 products on this CPU: an x86 CPU without AVX-512."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx2")) and not has.get("avx512_f")


def float32_products() -> AbstractContextManager[None]:
    """Compute bfloat16 matrix products through float32 until the `with` block ends.

    Autograd, activation checkpointing and tracing see the same operations as before. Other dtypes reach PyTorch's
    kernels. So do compiled graphs, whose products write into given tensors.
    """
    return _REPLACEMENT.active()


def _through_float32(operation: torch._ops.OpOverload) -> Kernel:
    inner = torch.library.get_kernel(operation, "CPU")

    def product(dispatch: Any, first: Tensor, *factors: Any, **scales: Any) -> Any:
        if first.dtype != torch.bfloat16:
            return inner.call_boxed(dispatch, first, *factors, **scales)
        widened = (factor.float() if isinstance(factor, Tensor) else factor for factor in factors)
        return inner.call_boxed(dispatch, first.float(), *widened, **scales).to(first.dtype)

    return product


_REPLACEMENT = Replacement(lambda: {operation: _through_float32(operation) for operation in _PRODUCTS})
