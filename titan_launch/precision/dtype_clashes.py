"""Tensors of two dtypes met in one operation, or one that an operation does not take: who brought them there."""

from __future__ import annotations

from collections.abc import Sequence

from titan_launch.config.precision import PrecisionRule
from titan_launch.errors import UNSET, KeyPath, Problem, format_key
from titan_launch.plan.types import Unit, is_within
from titan_launch.precision.failure import Failure, Running


def clash(failure: Failure) -> Problem | None:
    """Tensors of two dtypes in one operation: by a rule's doing, or by the model's own."""
    running = failure.running()
    if not running:
        return None
    consumer = running[-1]
    module, unit = failure.plan.inventory.by_path[consumer.path], failure.plan.unit_of[consumer.path]
    if failure.is_leaf(consumer.path) and module.parameters:  # works on its inputs, parameters and buffers, and no more
        foreign = sorted(consumer.inputs - {unit.compute_dtype})
        if foreign:
            return _guilty_output(failure, consumer.path, foreign[0]) or _foreign_inputs(
                failure, consumer.path, foreign[0]
            )
        if failure.buffers_in_another_dtype(module):
            return _mixed_with_buffers(failure, consumer.path)
    return _guilty_output(failure, consumer.path, None) or _own_mixture(failure, running)


def _guilty_output(failure: Failure, consumer: str, dtype: str | None) -> Problem | None:
    """The rule, nearest to the consumer, with an `output_dtype` that the consumer does not compute in; where `dtype` is
    given, with that one."""
    computes_in = failure.plan.unit_of[consumer].compute_dtype
    found: list[tuple[int, Unit, PrecisionRule]] = []
    for unit in failure.plan.units:
        rule = failure.rule(unit)
        if rule is not None and rule.output_dtype not in (None, computes_in) and dtype in (None, rule.output_dtype):
            sources = [path for path in unit.modules if _may_feed(failure, path, consumer)]
            found += [(_num_common_segments(path, consumer), unit, rule) for path in sources]
    if not found:
        return None
    _, unit, rule = max(found, key=lambda candidate: candidate[0])
    reason = (
        f"an output dtype that the consumer, {failure.describe(consumer)}, cannot take: it computes in {computes_in}; "
        "drop this key"
    )
    return failure.problem((*(unit.key or ()), "output_dtype"), reason, rule.output_dtype)


def _may_feed(failure: Failure, source: str, consumer: str) -> bool:
    """Not the model's last module, whose output goes to the loss, nor one around the consumer."""
    return source not in failure.plan.inventory.head[-1:] and not is_within(consumer, source)


def _num_common_segments(a: str, b: str) -> int:
    pairs = list(zip(a.split("."), b.split("."), strict=False))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))


def _foreign_inputs(failure: Failure, path: str, dtype: str) -> Problem:
    """Inputs of another dtype than the weights, from nobody's `output_dtype`."""
    unit = failure.plan.unit_of[path]
    rule, gets = failure.rule(unit), f"{dtype} inputs with {unit.compute_dtype} weights"
    if rule is not None and unit.key is not None and not (rule.param_dtype and rule.cast_forward_inputs):
        if rule.param_dtype is None:
            key, value, remedy = (*unit.key, "param_dtype"), UNSET, "unset, which gives"
            return failure.problem(key, f"{remedy} {failure.describe(path)} {gets}; set it, so that inputs are cast")
        reason = f"gives {failure.describe(path)} {gets}; drop this key, so that inputs are cast"
        return failure.problem((*unit.key, "cast_forward_inputs"), reason, False)
    key, value, remedy = _casting_rule(failure, path, sorted({dtype, unit.compute_dtype}))
    source = f"by a cast, or by an operation with a {dtype} buffer, in the model's own code"
    return failure.problem(key, f"{failure.describe(path)} gets {gets}, {source}; {remedy} (it casts inputs)", value)


def _mixed_with_buffers(failure: Failure, path: str) -> Problem:
    """Running statistics in another dtype than the parameters beside them."""
    buffers = failure.buffers_in_another_dtype(failure.plan.inventory.by_path[path])
    dtype = next(iter(buffers.values()))
    has = f"has {failure.plan.unit_of[path].compute_dtype} parameters beside {dtype} buffers ({', '.join(buffers)})"
    key, value, remedy = _casting_rule(failure, path, [dtype])
    return failure.problem(key, f"{failure.describe(path)} {has}, which its operation does not take; {remedy}", value)


def batch_norm_clash(failure: Failure) -> Problem | None:
    """CUDA's BatchNorm kernels find out in backward, where no module is running."""
    modules = failure.plan.inventory.modules
    found = [m.path for m in modules if "running_mean" in failure.buffers_in_another_dtype(m)]
    return _mixed_with_buffers(failure, found[0]) if found else None


def _own_mixture(failure: Failure, running: Sequence[Running]) -> Problem:
    """The model's forward brings two dtypes together itself."""
    where = f"the forward of {failure.describe(running[-1].path)} mixes dtypes itself ({failure.line()})"
    return _in_float32(failure, running, f"{where}, by a cast or by a buffer; cast there")


def no_kernel(failure: Failure) -> Problem | None:
    """An operation that bfloat16 does not have."""
    running = failure.running()
    if not running:
        return None
    where = f"an operation in the forward of {failure.describe(running[-1].path)} ({failure.line()})"
    return _in_float32(failure, running, f"{where} does not take bfloat16; cast to float32 there")


def _in_float32(failure: Failure, running: Sequence[Running], reason: str) -> Problem:
    """`reason`, and as the other way out a rule for the innermost module that can have one."""
    paths = [r.path for r in running if r.path and failure.has_parameters(r.path)]
    if not paths:
        return failure.problem(("precision",), reason)
    key, value, remedy = _casting_rule(failure, paths[-1], ["float32"])
    return failure.problem(key, f"{reason}, or {remedy}", value)


def _casting_rule(failure: Failure, path: str, dtypes: Sequence[str]) -> tuple[KeyPath, object, str]:
    """What makes a module cast its inputs to one of `dtypes`: the key, its value now, and what to write."""
    unit, choice = failure.plan.unit_of[path], " or ".join(f'"{dtype}"' for dtype in dtypes)
    rule = failure.rule(unit)
    if unit.key is None or rule is None:
        remedy = f'add [[precision.rules]] with match = "{failure.glob(path)}" and param_dtype = {choice}'
        return ("precision",), UNSET, remedy
    if path in unit.modules:
        value = UNSET if rule.param_dtype is None else rule.param_dtype
        return (*unit.key, "param_dtype"), value, f"set param_dtype = {choice}"
    before = f"add [[precision.rules]] before {format_key(unit.key)}"
    return unit.key, UNSET, f'{before} with match = "{failure.glob(path)}" and param_dtype = {choice}'
