"""The work of operations on fake tensors: sizes of matrix products, FLOPs, or bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from titan_launch.metrics.memory import tensors_in
from titan_launch.plan.speeds import Work
from titan_launch.precision.observation import dtype_of
from titan_launch.train.flops import FORMULAS, attention_flops

_aten = torch.ops.aten

_FACTORS = {_aten.mm: 0, _aten._scaled_mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}
"""Operations that multiply matrices, with the index of the first factor among their arguments."""

_NO_WORK = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.empty_permuted,
    _aten.new_empty,
    _aten.new_empty_strided,
    _aten.detach,
    _aten.lift_fresh,
}
_READS_ROWS = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather, _aten.nll_loss_forward}
"""Operations that read only a part of their first argument: as many bytes as they return."""


def work_of(operation: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Work | None:
    """Return the work of an operation. Return None for a view, for an allocation, and for an operation that is not of
    ATen."""
    packet = operation.overloadpacket
    if operation.namespace != "aten" or packet in _NO_WORK or _is_view(operation):
        return None
    if packet in _FACTORS:
        a, b = args[_FACTORS[packet] : _FACTORS[packet] + 2]  # matrices, or stacks of matrices
        *stacked, rows, inner = a.shape
        return Work("product", dtype_of(a), (prod(stacked), rows, inner, b.shape[-1]))
    if packet is _aten._grouped_mm:
        return _grouped_product(*args)
    formula = FORMULAS.get(packet)
    if formula is not None and "attention" in packet.__name__:
        is_backward = "backward" in packet.__name__  # the first argument of a backward is the gradient
        query, key, value = args[is_backward : is_backward + 3]
        sizes = (
            attention_flops(query, key, value) * (1 + is_backward),
            key.shape[2],
            query.shape[3],
            _is_causal(operation, args, kwargs),
        )
        return Work("attention_backward" if is_backward else "attention", dtype_of(query), sizes)
    if formula is not None:
        return Work("convolution", dtype_of(args[0]), (int(formula(*args, **kwargs, out_val=result)),))
    inputs, results = (sum(map(_num_bytes, tensors_in(value))) for value in ([*args, *kwargs.values()], result))
    return Work("memory", "", (2 * results if packet in _READS_ROWS else inputs + results,))


def _grouped_product(a: Tensor, b: Tensor, ends: Tensor | None = None, *_: Any) -> Work:
    """Return the work of a grouped product. Two stacks of matrices are multiplied in pairs. Otherwise the groups divide
    the rows, the columns or the inner dimension, and all groups are assumed to be of equal size."""
    groups = b.shape[0] if b.dim() == 3 else a.shape[0] if a.dim() == 3 else 1 if ends is None else ends.shape[0]
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    if a.dim() == 2 and b.dim() == 3:
        rows = -(-rows // groups)
    elif a.dim() == 3 and b.dim() == 2:
        columns = -(-columns // groups)
    elif a.dim() == 2:
        inner = -(-inner // groups)
    return Work("product", dtype_of(a), (groups, rows, inner, columns))


def _is_causal(operation: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    names = [argument.name for argument in operation._schema.arguments]
    place = names.index("is_causal")
    return int(args[place] if place < len(args) else kwargs.get("is_causal", False))


@cache
def _is_view(operation: OpOverload) -> bool:
    results = operation._schema.returns
    return bool(results) and all(r.alias_info is not None and not r.alias_info.is_write for r in results)


def _num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor in memory. An expanded tensor has the bytes of its storage, which are fewer than
    `nbytes`."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
