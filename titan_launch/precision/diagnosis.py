"""PyTorch's dtype errors explained: the module, the key of the job file, and the value to write there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn

from titan_launch.config.sections.precision import PrecisionConfig, PrecisionRule
from titan_launch.core.errors import UNSET, ConfigError, KeyPath, Problem, format_key, listed
from titan_launch.plan.types import ModelPlan, Unit, is_within
from titan_launch.plan.units.rule_assignment import BATCH_NORM_DEFAULT
from titan_launch.precision.observation import Failure, Running


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


def mixed_storage(failure: Failure) -> Problem | None:
    """The model's own code has cast parameters after they were sharded."""
    for path, name, dtype in failure.stored_otherwise():
        unit = failure.plan.unit_of[path]
        reason = (
            f"{path}.{name} was cast to {dtype} after it was sharded, and its unit is stored in {unit.storage_dtype}; "
            f'drop that cast, or add [[precision.rules]] with match = "{failure.glob(path)}", '
            f'storage_dtype = "{dtype}" and param_dtype = "{dtype}"'
        )
        return failure.problem(unit.key or ("precision",), reason)
    return None


def mixed_gradients(failure: Failure) -> Problem | None:
    """Deferred reduction adds gradients up in the reduce dtype, but those of the last microbatch alone have the compute
    dtype: a module that runs now and then has such."""
    dtypes = failure.reduced_gradients()
    units = {failure.plan.unit_of[name.rpartition(".")[0]] for name in dtypes}
    late = [name.rpartition(".")[0] for name, dtype in dtypes.items() if any(dtype == u.compute_dtype for u in units)]
    if len(units) != 1 or not late:
        return None
    unit, paths = units.pop(), list(dict.fromkeys(late))
    reason = (
        f"{listed(paths)} got a gradient in the last microbatch only, in {unit.compute_dtype}, beside sums in "
        f'{unit.reduce_dtype} of the others in unit {unit.name}, and FSDP2 reduces one dtype; set "immediate"'
    )
    return failure.problem(("gradient_accumulation", "mode"), reason, "deferred")


def never_gathered(failure: Failure) -> Problem | None:
    """Deferred reduction looks for gradients in every unit, also in one that has not run yet."""
    name = failure.parameter_never_gathered()
    if name is None:
        return None
    unit = failure.plan.unit_of[name.rpartition(".")[0]]
    reason = f'nothing of unit {unit.name} ran in the first microbatch, which FSDP2 cannot defer; set "immediate"'
    return failure.problem(("gradient_accumulation", "mode"), reason, "deferred")


def divide_factor(failure: Failure) -> Problem:
    """The launcher sets one, and that FSDP2 sums only."""
    reason = (
        "the model sets a gradient divide factor, which gloo cannot apply, and the loss is divided already; drop "
        "set_gradient_divide_factor and set_force_sum_reduction_for_comms from it"
    )
    return failure.problem(("model", "name"), reason)


def changed_in_place(failure: Failure) -> Problem | None:
    """FSDP2 hands tensors into its units through an autograd function, whose outputs may not be changed."""
    running = failure.running()
    if not running:
        return None
    path = running[-1].path
    reason = (
        f"{failure.describe(path)} changes in place a tensor that it got through the boundary of an FSDP2 unit "
        f"({failure.line()}); write x = x + y for x += y, drop inplace=True, or change x.clone()"
    )
    return failure.problem(failure.plan.unit_of[path].key or ("model", "name"), reason)


def base_changed_in_place(failure: Failure) -> Problem:
    """The same from outside: the model's forward changes what it has handed to a unit, and backward finds out."""
    reason = (
        "the model changes in place a tensor that it has handed to an FSDP2 unit, as in x += block(x); write "
        "x = x + block(x), or change x.clone()"
    )
    return failure.problem(("model", "name"), reason)


def used_without_a_call(failure: Failure) -> Problem | None:
    """Only calling a unit's modules gathers their parameters."""
    running = failure.running()
    if not running:
        return None
    user = running[-1].path
    inside = [u for u in failure.plan.units if any(p != user and is_within(p, user) for p in u.modules)]
    unit = next((u for u in inside if u.key is not None), inside[0] if inside else failure.plan.unit_of[user])
    used = next((path for path in unit.modules if path != user and is_within(path, user)), user)
    whose = f"the parameters of {failure.describe(used)}" if used != user else "parameters of its own"
    reason = (
        f"{failure.describe(user)} uses {whose} while they are sharded: FSDP2 gathers a unit's parameters when its "
        f"module is called, and here it is not ({failure.line()})"
    )
    remedy = f'match the module around it ("{failure.glob(user)}")' if user else "leave it out of the rule"
    if unit.reason == BATCH_NORM_DEFAULT:
        remedy = f'add [[precision.rules]] with match = "{failure.glob(user)}" and param_dtype = "float32"'
        return failure.problem(("precision",), f"{reason}; {remedy}")
    fallback = "call the module, or name blocks that hold both in model.blocks"
    return failure.problem(unit.key or ("model", "blocks"), f"{reason}; {remedy if unit.key else fallback}")


def not_gathered(failure: Failure) -> Problem:
    """Changing a view in place gives it another history, without the hook by which FSDP2 gathers for backward."""
    waiting = [unit.modules[0] for unit in failure.units_without_gradients() if unit.modules[0]]
    whose = f"of {failure.describe(waiting[-1])} or of a unit after it " if waiting else ""
    reason = (
        f"backward met parameters that are not gathered: most likely the output {whose}is a view (x.view, x[...]) that "
        "is then changed in place; write x = x + y for x += y, drop inplace=True, or return x.clone()"
    )
    return failure.problem(("model", "name"), reason)


@contextmanager
def dtype_failures_explained(model: nn.Module, plan: ModelPlan, precision: PrecisionConfig) -> Iterator[None]:
    """Run forwards and backwards of a wrapped model.

    Raises ConfigError in place of an error that dtypes, or the boundaries of units, explain; its cause is that error.
    Any other passes unchanged.
    """
    try:
        yield
    except (RuntimeError, ValueError, AssertionError, AttributeError) as error:
        problem = explain(Failure(error, model, plan, precision))
        if problem is None:
            raise
        raise ConfigError([problem]) from error


def explain(failure: Failure) -> Problem | None:
    """The problem behind an error, if it is one of those that are known."""
    for pattern, explanation in _EXPLANATIONS.items():
        if re.search(pattern, failure.text):
            return explanation(failure)
    if "type" in failure.text.lower() and len(failure.floating_dtypes()) > 1:
        return clash(failure)
    return None


_EXPLANATIONS: Mapping[str, Callable[[Failure], Problem | None]] = {
    "FSDP expects uniform original parameter dtype": mixed_storage,
    "FSDP reduce-scatter expects uniform gradient dtype": mixed_gradients,
    "'FSDPParam' object has no attribute '_unsharded_param'": never_gathered,
    "ReduceOp.PREMUL_SUM": divide_factor,
    "is a view and is being modified inplace": changed_in_place,
    "is a view and its base or another view of its base has been modified inplace": base_changed_in_place,
    "got mixed torch.Tensor and DTensor": used_without_a_call,
    "setStorage: .* out of bounds for storage of size 0": not_gathered,
    "Expected running_mean to have type": batch_norm_clash,
    "not implemented for '(BFloat16|Half)'": no_kernel,
    "[Uu]nsupported dtype (BFloat16|Half)": no_kernel,
    "[Ll]ow precision dtypes not supported": no_kernel,
    "is only supported for half, float and double tensors": no_kernel,
    r"mixed dtype \(CPU\)": clash,
    r"Expected self\.dtype to be equal to src\.dtype": clash,
    "both inputs should have same dtype": clash,
}
