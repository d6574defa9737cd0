"""Modules whose activations are computed again in backward instead of kept: the blocks, or others.

A module's `forward` is replaced, not the module: parameters and buffers keep their names, so a checkpoint fits a run in
every mode. FSDP2's hooks stay outside, and what they cast and gather for a module is there when it is computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titan_launch.config.sections.parallelism import ActivationCheckpointConfig
from titan_launch.parallel.fsdp import cast_at_boundaries
from titan_launch.plan.activation_checkpoint import selection
from titan_launch.plan.types import ModelPlan, is_within

_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""What forward, and what its recomputation, run in."""

_aten, _communication = torch.ops.aten, torch.ops._c10d_functional
_MATRIX_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten._scaled_mm.default})
SAVED_OPS = _MATRIX_PRODUCTS | {
    _aten.convolution.default,
    _aten._scaled_dot_product_attention_math.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
    _communication.all_gather_into_tensor.default,
    _communication.all_reduce.default,
    _communication.reduce_scatter_tensor.default,
}
"""What the option `op` keeps: operations that cost much to compute, or communicate; of matrix products every second."""


def checkpoint_activations(model: nn.Module, modules: Sequence[str], config: ActivationCheckpointConfig) -> None:
    """Let `modules` compute their activations again in backward, in place, before FSDP2 wraps them."""
    for path in modules:
        _checkpoint(model.get_submodule(path), selection(config) == "op")


def _checkpoint(block: nn.Module, selects_ops: bool) -> None:
    compute = block.forward
    norms = [module for module in block.modules() if isinstance(module, _NormBase)]

    def contexts() -> _Contexts:
        if not selects_ops:
            return nullcontext(), _Recomputation(norms, nullcontext())
        in_forward, in_recomputation = (_SavableOps(mode) for mode in _selective_modes())
        return in_forward, _Recomputation(norms, in_recomputation)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return checkpoint(compute, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        # A graph needs no guard: it updates buffers once, at its end, however often it computes what goes into them.
        options: dict[str, Any] = {"context_fn": _selective_modes} if selects_ops else {}
        return checkpoint(compute, *args, use_reentrant=False, **options, **kwargs)

    block.forward = forward


class _Recomputation:
    """While a block is computed again, its norms have copies of their running statistics, which are then thrown away:
    a forward counts once."""

    def __init__(self, norms: Sequence[nn.Module], inner: AbstractContextManager[Any]):
        self._norms = norms
        self._inner = inner
        self._kept: list[dict[str, Tensor | None]] = []

    def __enter__(self) -> None:
        self._kept = [dict(norm._buffers) for norm in self._norms]
        for norm, kept in zip(self._norms, self._kept, strict=True):
            norm._buffers.update({name: None if b is None else b.clone() for name, b in kept.items()})
        self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inner.__exit__(kind, error, traceback)
        for norm, kept in zip(self._norms, self._kept, strict=True):
            norm._buffers.update(kept)


def _selective_modes() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """What one forward of a block, and its recomputation, run in, so that the results of costly operations are kept."""
    return create_selective_checkpoint_contexts(_SavePolicy())


class _SavableOps(TorchDispatchMode):
    """Shows a mode of `_selective_modes` only the operations that may be kept.

    It wants to meet the same ones in recomputation as in forward, but FSDP2's hooks on units inside a block do not
    gather again what is gathered already, or the other way round.
    """

    def __init__(self, mode: TorchDispatchMode):
        super().__init__()
        self._mode = mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A graph that was compiled inside is one operation here, and is run again."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SAVED_OPS:
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class _SavePolicy:
    """Decides about the operations of one forward, and of its recomputation, in the order in which they run."""

    def __init__(self) -> None:
        self._num_products: Counter[bool] = Counter()

    def __call__(self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        self._num_products[context.is_recompute] += op in _MATRIX_PRODUCTS
        is_every_second = op in _MATRIX_PRODUCTS and self._num_products[context.is_recompute] % 2 == 0
        keeps = op in SAVED_OPS and not is_every_second
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def cast_in_recomputation(model: nn.Module, plan: ModelPlan, modules: Sequence[str]) -> None:
    """Cast the inputs and outputs of units inside `modules`, which are computed again; after FSDP2 has wrapped them.

    Before torch 2.13 FSDP2 leaves these casts out of a recomputation (pytorch issues 148831, 159359, 176650). Where it
    has cast, these casts do nothing.
    """
    units = {path: unit for unit in plan.units for path in unit.modules}
    inside = {  # a module with several parents may be met first outside of them
        info.same_as or info.path
        for info in plan.inventory.modules
        if any(info.path != path and is_within(info.path, path) for path in modules)
    }
    for path in inside & units.keys():
        cast_at_boundaries(model.get_submodule(path), units[path].policy)
