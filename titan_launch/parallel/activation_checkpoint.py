"""Activation checkpointing: modules whose backward computes their forward a second time instead of saving activations.

Only a module's `forward` is replaced. Parameters and buffers keep their names, so a saved checkpoint can be loaded with
every `activation_checkpoint.mode`. FSDP2's hooks run outside of the replaced forward, so the second forward uses
unsharded parameters and cast inputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titan_launch.config.sections.parallelism import ActivationCheckpointConfig
from titan_launch.distributed.torch_private import detached
from titan_launch.models.decoder.mixture_of_experts import MixtureOfExperts
from titan_launch.parallel.activation_offload import saved_for_backward
from titan_launch.parallel.fsdp import cast_at_boundaries
from titan_launch.plan.module_selection import selection
from titan_launch.plan.types import ModelPlan, is_within

_aten, _communication, _higher_order = torch.ops.aten, torch.ops._c10d_functional, torch.ops.higher_order
_MATRIX_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten._scaled_mm.default})
SAVED_OPS = _MATRIX_PRODUCTS | {
    _aten._grouped_mm.default,
    _aten.convolution.default,
    _aten.topk.default,
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
    _higher_order.flex_attention,
    _higher_order.inductor_compiled_code,
}
"""Operations whose results `selective_ac_option = "op"` saves: costly operations, collectives, and the `topk` that
chooses experts. Of the matrix products, only every second one is saved, beginning with the first. Outside of graphs,
attention with dropout is not saved (`_draws_random_numbers`). In a compiled block, FlexAttention is `flex_attention`;
elsewhere it is a compiled graph of its own, `inductor_compiled_code`
(`models.decoder.attention._compiled_flex_attention`)."""


def checkpoint_activations(model: nn.Module, modules: Sequence[str], config: ActivationCheckpointConfig) -> None:
    """Replace the forwards of the modules at the paths `modules` by checkpointed ones, before FSDP2 wraps the model."""
    for path in modules:
        _checkpoint(model.get_submodule(path), selection(config) == "op")


current_forward: ContextVar[object | None] = ContextVar("current_forward", default=None)
"""An object that identifies the running call of a checkpointed module. Both forwards of a call have the same object.
None outside of checkpointed modules, and in compiled graphs."""


def _checkpoint(block: nn.Module, selects_ops: bool) -> None:
    compute = block.forward
    # These modules update buffers in each training forward: running statistics, and the load of experts.
    counting = [module for module in block.modules() if isinstance(module, (_NormBase, MixtureOfExperts))]

    def contexts() -> tuple[_Forward, _Forward]:
        call, results = object(), deque[_Recall]()
        first, second = (
            _SelectiveMode(results, is_first) if selects_ops else nullcontext() for is_first in (True, False)
        )
        return _Forward(call, first), _Forward(call, second, counting)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return checkpoint(compute, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        # A graph updates buffers once, at its end, even if it contains both forwards. So no copies are needed.
        options: dict[str, Any] = {"context_fn": _selective_modes} if selects_ops else {}
        return checkpoint(compute, *args, use_reentrant=False, **options, **kwargs)

    block.forward = forward


class _Forward:
    """Context manager around the first or the second forward. In the second forward, modules update copies of their
    buffers.

    So each microbatch counts only once in running statistics and in the load of experts, although the forward runs
    twice. The buffers cannot be overwritten and restored as in `RunningStatistics`, because autograd may have saved the
    buffers of a norm in eval mode.
    """

    def __init__(self, call: object, inner: AbstractContextManager[Any], counting: Sequence[nn.Module] = ()):
        """`call`: value of `current_forward` in the forward. `inner`: a further context manager to enter. `counting`:
        the modules whose buffers are replaced by copies; empty for the first forward."""
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
    """Return two dispatch modes for a graph: the first forward saves the results of `SAVED_OPS`, and the second reuses
    them."""
    policies = {is_second: _SavePolicy() for is_second in (False, True)}

    def policy(context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_saved = policies[context.is_recompute].saves(op)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class _SelectiveMode(TorchDispatchMode):
    """Dispatch mode of a forward: in the first forward it saves results of `SAVED_OPS`, in the second it reuses them.

    This package uses PyTorch's own modes in graphs only. They require that both forwards run the same operations. But
    if a block contains FSDP2 units, their hooks may all-gather in only one of the two forwards. And before torch 2.15,
    PyTorch's own modes cannot offload the results.
    """

    supports_higher_order_operators = True

    def __init__(self, results: deque[_Recall], is_first: bool):
        """`results`: the saved results, which both modes share."""
        super().__init__()
        self._results = results
        self._is_first = is_first
        self._policy = _SavePolicy()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: a compiled graph inside of the block counts as one operation. A graph of inductor is the
        operation `inductor_compiled_code`, whose result is saved. Graphs of other backends run again in backward."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._policy.saves(func) or _draws_random_numbers(func, args, kwargs):
            return func(*args, **kwargs)
        if not self._is_first:
            return self._results.popleft()(args, kwargs)
        inputs = tuple(args[1]) if func is _higher_order.inductor_compiled_code else ()  # the graph empties this list
        result = func(*args, **kwargs)
        self._results.append(_saved_result(func, inputs, result))
        return result


def _draws_random_numbers(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return True for a call of attention with dropout. Both forwards must run this call, so that they draw the same
    numbers in later operations, too."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p", 0.0))


_Recall = Callable[[Any, Any], Any]
"""A function that returns the saved result of an operation in the second forward. Its arguments are the positional and
the keyword arguments of the operation."""


def _saved_result(func: Any, inputs: Sequence[Any], result: Any) -> _Recall:
    """Return a function that returns the result of an operation in the second forward.

    `inputs`: the inputs of a compiled graph; empty for other operations. The result of a graph contains the tensors
    that the graph saves for backward. If one of these tensors is an input of the graph, it is not saved: the second
    forward has the input when it calls the graph.
    """
    if func is _aten.topk.default:
        # Save only the indices: the values follow from the indices, and models may change the values in place.
        indices = _saved(result[1])
        return lambda args, kwargs: _largest(indices(), *args, **kwargs)
    is_complete = func.namespace != "_c10d_functional"
    places = {t.untyped_storage()._cdata: index for index, t in enumerate(inputs) if isinstance(t, Tensor)}

    def save(value: Any) -> Callable[[Any], Any]:
        place = places.get(value.untyped_storage()._cdata) if isinstance(value, Tensor) else None
        if place is not None:
            view = value.size(), value.stride(), value.storage_offset()
            return lambda args: args[1][place].detach().as_strided(*view)
        recall = _saved(value, is_complete)
        return lambda args: recall()

    recalls = tree_map(save, result)
    return lambda args, kwargs: tree_map(lambda recall: recall(args), recalls)


def _largest(indices: Tensor, x: Tensor, k: int, dim: int = -1, *options: Any, **others: Any) -> tuple[Tensor, Tensor]:
    """Return the result of `topk` from its known `indices`, without a search."""
    return x.gather(dim, indices), indices


def _saved(value: Any, is_complete: bool = True) -> Callable[[], Any]:
    """Return a function that returns `value`, a tensor or a number that an operation has returned.

    `is_complete`: False for the result of a collective that may still run. Such a result is not offloaded.
    """
    if not isinstance(value, Tensor):
        return lambda: value
    return saved_for_backward(detached(value), may_be_offloaded=is_complete)


class _SavePolicy:
    """The rule that decides which operations of a forward save their results. Call `saves` for every operation of the
    forward, in order."""

    def __init__(self) -> None:
        self._num_products = 0

    def saves(self, op: Any) -> bool:
        self._num_products += op in _MATRIX_PRODUCTS
        return op in SAVED_OPS and not (op in _MATRIX_PRODUCTS and self._num_products % 2 == 0)


def cast_in_second_forward(model: nn.Module, plan: ModelPlan) -> None:
    """Add hooks that cast inputs and outputs of the FSDP2 units inside of checkpointed modules. Call this after
    `apply_fsdp`.

    Before torch 2.13, FSDP2 does not cast in the second forward (pytorch issues 148831, 159359, 176650). Tensors that
    FSDP2 has already cast do not change.
    """
    units = {path: unit for unit in plan.units for path in unit.modules}
    inside = {  # a shared module has the path of its first parent, which may be outside of checkpointed modules
        info.same_as or info.path
        for info in plan.inventory.modules
        if any(info.path != path and is_within(info.path, path) for path in plan.checkpointed)
    }
    for path in inside & units.keys():
        cast_at_boundaries(model.get_submodule(path), units[path].policy)
