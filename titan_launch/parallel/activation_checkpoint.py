"""Activation checkpointing: modules whose backward computes their forward a second time instead of saving activations.

Only a module's `forward` is replaced. Parameters and buffers keep their names, so a checkpoint can be loaded in every
mode. FSDP2's hooks run outside of the replaced forward, so the second forward uses unsharded parameters and cast
inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
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
from titan_launch.models.mixture_of_experts import MixtureOfExperts
from titan_launch.parallel.fsdp import cast_at_boundaries
from titan_launch.plan.module_selection import selection
from titan_launch.plan.types import ModelPlan, is_within

_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""The contexts of the first and of the second forward."""

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
    _communication.all_to_all_single.default,
    _communication.reduce_scatter_tensor.default,
}
"""Operations whose results the option `op` saves: costly operations and collectives. Exception: of the matrix
products, only every second one is saved, beginning with the first."""


def checkpoint_activations(model: nn.Module, modules: Sequence[str], config: ActivationCheckpointConfig) -> None:
    """Replace the forwards of `modules` by checkpointed ones, in place. Call this before FSDP2 wraps the modules."""
    for path in modules:
        _checkpoint(model.get_submodule(path), selection(config) == "op")


current_forward: ContextVar[object | None] = ContextVar("current_forward", default=None)
"""The call of a checkpointed module whose first or second forward is running: an object that is the same in both. None
outside of checkpointed modules, and in compiled graphs."""

_Counting = _NormBase | MixtureOfExperts
"""Modules whose buffers count something in each training forward."""


def _checkpoint(block: nn.Module, selects_ops: bool) -> None:
    compute = block.forward
    counting = [module for module in block.modules() if isinstance(module, _Counting)]

    def contexts() -> _Contexts:
        inner = [_SavableOps(mode) for mode in _selective_modes()] if selects_ops else [nullcontext(), nullcontext()]
        call = object()
        return _Forward(call, inner[0]), _Forward(call, inner[1], counting)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return checkpoint(compute, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        # A graph writes buffers once, at its end, even if it computes their new values twice. So no copies are needed.
        options: dict[str, Any] = {"context_fn": _selective_modes} if selects_ops else {}
        return checkpoint(compute, *args, use_reentrant=False, **options, **kwargs)

    block.forward = forward


class _Forward:
    """Context of the first or second forward. In the second, modules that count in buffers update copies of them.

    So each microbatch counts only once in running statistics and in the load of experts, although the forward runs
    twice. The buffers cannot be overwritten and restored as in `RunningStatistics`, because autograd may have saved the
    buffers of a norm in eval mode.
    """

    def __init__(self, call: object, inner: AbstractContextManager[Any], counting: Sequence[nn.Module] = ()):
        """`counting`: the modules whose buffers are replaced by copies."""
        self._call = call
        self._inner = inner
        self._counting = counting
        self._own_buffers: list[dict[str, Tensor | None]] = []
        self._token: Token[object | None] | None = None

    def __enter__(self) -> None:
        self._token = current_forward.set(self._call)
        self._own_buffers = [dict(module._buffers) for module in self._counting]
        for module, own in zip(self._counting, self._own_buffers, strict=True):
            module._buffers.update({name: None if b is None else b.clone() for name, b in own.items()})
        self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inner.__exit__(kind, error, traceback)
        for module, own in zip(self._counting, self._own_buffers, strict=True):
            module._buffers.update(own)
        assert self._token is not None
        current_forward.reset(self._token)


def _selective_modes() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return two dispatch modes: the first forward saves the results of `SAVED_OPS`, and the second reuses them."""
    return create_selective_checkpoint_contexts(_SavePolicy())


class _SavableOps(TorchDispatchMode):
    """Dispatch mode that passes only the operations of `SAVED_OPS` on to a mode of `_selective_modes`.

    The inner mode requires that both forwards run the same operations. But if a block contains FSDP2 units, their hooks
    may all-gather in only one of the two forwards.
    """

    def __init__(self, mode: TorchDispatchMode):
        super().__init__()
        self._mode = mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: a compiled graph inside of the block counts as one operation, which is run a second time."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SAVED_OPS:
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class _SavePolicy:
    """Decision whether an operation's result is saved. Called for every operation of both forwards, in order."""

    def __init__(self) -> None:
        self._num_products: Counter[bool] = Counter()

    def __call__(self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        self._num_products[context.is_recompute] += op in _MATRIX_PRODUCTS
        is_every_second = op in _MATRIX_PRODUCTS and self._num_products[context.is_recompute] % 2 == 0
        keeps = op in SAVED_OPS and not is_every_second
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def cast_in_second_forward(model: nn.Module, plan: ModelPlan, modules: Sequence[str]) -> None:
    """Cast inputs and outputs of the FSDP2 units inside of checkpointed `modules`. Call this after wrapping.

    Before torch 2.13, FSDP2 does not cast in the second forward (pytorch issues 148831, 159359, 176650). Tensors that
    FSDP2 has already cast do not change.
    """
    units = {path: unit for unit in plan.units for path in unit.modules}
    inside = {  # a shared module has the path of its first parent, which may be outside of `modules`
        info.same_as or info.path
        for info in plan.inventory.modules
        if any(info.path != path and is_within(info.path, path) for path in modules)
    }
    for path in inside & units.keys():
        cast_at_boundaries(model.get_submodule(path), units[path].policy)
