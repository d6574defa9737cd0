"""Explanations of PyTorch's dtype errors: the module, the key of the job file, and the value to write there."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os.path import commonpath
from pathlib import Path

from torch import nn

from titan_launch.config.sections.precision import PrecisionConfig, PrecisionRule
from titan_launch.core.errors import UNSET, ConfigError, KeyPath, Problem, format_key
from titan_launch.core.globs import matches
from titan_launch.core.import_string import user_location
from titan_launch.distributed.torch_private import was_gathered
from titan_launch.plan.types import ModelPlan, ModuleInfo, Unit, full_name, is_within, parent
from titan_launch.plan.units.rule_assignment import BATCH_NORM_DEFAULT
from titan_launch.precision.observation import dtype_of

_MODEL, _ACCUMULATION_MODE = ("model", "name"), ("gradient_accumulation", "mode")


def explain_dtypes(
    error: BaseException, model: nn.Module, plan: ModelPlan, precision: PrecisionConfig
) -> ConfigError | None:
    """Return a ConfigError with a remedy for a known error of PyTorch in a forward or backward. Known errors are about
    dtypes, or come from FSDP2 because of the model's code, such as an in-place change of a unit's output. Return None
    for any other error, and if the cause is not found.

    `model`: the whole model or a pipeline stage. `plan`: the plan of `model`.
    """
    if not isinstance(error, (RuntimeError, ValueError, AssertionError, AttributeError)):
        return None
    failure = Failure(error, model, plan, precision)
    explain = next((found for pattern, found in _EXPLANATIONS.items() if re.search(pattern, failure.text)), None)
    text = failure.text.lower()
    if explain is None and "type" in text:
        floating = set(re.findall("bfloat16|half|float16|double|float64|float(?!ing|8)", text))
        explain = clash if len(floating) > 1 else None
    problem = None if explain is None else explain(failure)
    return None if problem is None else ConfigError([problem])


class Failure:
    """An error in a model's forward or backward, with the facts that explain it."""

    def __init__(self, error: Exception, model: nn.Module, plan: ModelPlan, precision: PrecisionConfig):
        self.text = re.split(r"\. |\n", str(error))[0].rstrip(".")
        """The first sentence of PyTorch's message."""

        self.plan, self.model = plan, model
        self._rules, self.error = precision.rules, error

    @property
    def path(self) -> str | None:
        """Path of the innermost module whose forward was running. None in backward, except during activation
        checkpointing."""
        paths = {id(self.model.get_submodule(m.path)): m.path for m in self.plan.inventory.distinct}
        frames = [frame for frame, _ in traceback.walk_tb(self.error.__traceback__)]
        running = [paths.get(id(f.f_locals.get("self"))) for f in reversed(frames) if f.f_code.co_name == "forward"]
        return next((path for path in running if path is not None), None)

    @property
    def line(self) -> str:
        """The innermost line of the user's code in the traceback, such as `model.py:42`. If the traceback has no such
        line, the innermost line of the launcher's code."""
        return Path(user_location(self.error, or_own=True) or "").name

    def problem(self, key: KeyPath, reason: str, value: object = UNSET) -> Problem:
        """Return a problem of a key. The text ends with PyTorch's message, so that users can search for the message."""
        return Problem(key, f"{reason} (PyTorch: {self.text})", value)

    def describe(self, path: str) -> str:
        """Return a module's path and class."""
        return f"{path or 'the model'} ({self.plan.inventory.by_path[path].class_name})"

    def rule(self, unit: Unit) -> PrecisionRule | None:
        """Return the precision rule that created a unit; None for a unit without a rule."""
        return None if unit.key is None else self._rules[int(unit.key[-1])]

    def buffers_in_another_dtype(self, module: ModuleInfo) -> dict[str, str]:
        """Return the dtypes of a module's floating buffers that differ from its compute dtype, by name."""
        dtypes = {
            b.name: self.plan.buffer_dtypes[full_name(module.path, b.name)] for b in module.buffers if b.is_floating
        }
        return {name: dtype for name, dtype in dtypes.items() if dtype != self.plan.unit_of[module.path].compute_dtype}

    def inside(self, path: str) -> list[ModuleInfo]:
        """Return the module at `path` and all modules inside it."""
        return [module for module in self.plan.inventory.modules if is_within(module.path, path)]

    def glob(self, path: str) -> str:
        """Return a glob that matches a module and the same module in all other blocks. Return the path itself if the
        module is not in a numbered block, or if the glob would match modules of other classes."""
        block = next((block for block in self.plan.inventory.blocks if is_within(path, block)), "")
        around, _, index = block.rpartition(".")
        if not index.isdigit():
            return path
        pattern = f"{around}.*{path.removeprefix(block)}"
        classes = {m.classes for m in self.plan.inventory.modules if matches(pattern, m.path)}
        return pattern if len(classes) == 1 else path

    def casting_rule(self, path: str, *dtypes: str) -> tuple[KeyPath, object, str]:
        """Return the key to change, the present value of the key (UNSET if there is none), and a remedy. With the
        remedy, the module at `path` computes in one of `dtypes`, and FSDP2 casts the module's inputs to this dtype."""
        unit, choice = self.plan.unit_of[path], " or ".join(f'"{dtype}"' for dtype in dtypes)
        rule, new = self.rule(unit), f'with match = "{self.glob(path)}" and param_dtype = {choice} (inputs are cast)'
        if rule is None or unit.key is None:
            return ("precision",), UNSET, f"add [[precision.rules]] {new}"
        if path not in unit.modules:
            return unit.key, UNSET, f"add [[precision.rules]] before {format_key(unit.key)} {new}"
        if not rule.cast_forward_inputs and rule.param_dtype in dtypes:
            return (*unit.key, "cast_forward_inputs"), False, "remove this key, so that inputs are cast"
        value = UNSET if rule.param_dtype is None else rule.param_dtype
        also = "" if rule.cast_forward_inputs else ", and remove cast_forward_inputs = false"
        return (*unit.key, "param_dtype"), value, f"set {choice}{also}, so that inputs are cast"


def clash(failure: Failure) -> Problem | None:
    """Explain an operation whose inputs have two different dtypes. Return None if no module was running."""
    path = failure.path
    if path is None:
        return None
    info = failure.plan.inventory.by_path[path]
    is_leaf = len(failure.inside(path)) == 1
    if is_leaf and info.parameters and failure.buffers_in_another_dtype(info):
        return _output_dtype(failure, path) or _beside_buffers(failure, path)
    # PyTorch's own layers do not cast, so their inputs had the wrong dtype. A rule with either dtype casts the inputs.
    dtypes = ("bfloat16", "float32") if is_leaf and info.classes[0].startswith("torch.nn.") else ("float32",)
    reason = (
        f"an operation in {failure.describe(path)} has inputs of two dtypes ({failure.line}); cast them to one dtype"
    )
    return _output_dtype(failure, path) or _with_casting_rule(failure, path, reason, dtypes)


def _output_dtype(failure: Failure, consumer: str) -> Problem | None:
    """Explain a precision rule whose `output_dtype` differs from the compute dtype of the module `consumer`. Return
    None if there is no such rule.

    If there are several such rules, the rule of the module nearest to `consumer` is named. The model's last module does
    not count, because its output goes to the loss.
    """
    computes_in = failure.plan.unit_of[consumer].compute_dtype
    sources = [
        (path, unit, rule.output_dtype)
        for unit in failure.plan.boundaries
        if (rule := failure.rule(unit)) is not None and rule.output_dtype not in (None, computes_in)
        for path in unit.modules
        if path not in failure.plan.inventory.head[-1:] and not is_within(consumer, path)
    ]
    if not sources:
        return None

    # The nearest module has the longest common path with the consumer.
    folders = [(commonpath([path.replace(".", "/") for path in (source[0], consumer)]), source) for source in sources]
    _, unit, dtype = max(folders, key=lambda pair: len(pair[0]))[1]
    reason = f"the consumer of this output, {failure.describe(consumer)}, computes in {computes_in}; remove this key"
    return failure.problem((*(unit.key or ()), "output_dtype"), reason, dtype)


def _beside_buffers(failure: Failure, path: str) -> Problem:
    """Explain an error of a module with buffers in another dtype than its compute dtype."""
    buffers = failure.buffers_in_another_dtype(failure.plan.inventory.by_path[path])
    dtype = next(iter(buffers.values()))
    has = f"computes in {failure.plan.unit_of[path].compute_dtype} with {dtype} buffers ({', '.join(buffers)})"
    key, value, remedy = failure.casting_rule(path, dtype)
    return failure.problem(
        key, f"{failure.describe(path)} {has}, but its operation requires one dtype; {remedy}", value
    )


def batch_norm_clash(failure: Failure) -> Problem | None:
    """Explain a dtype error of CUDA's BatchNorm kernels. Backward raises this error, so the module that failed is
    unknown. The first BatchNorm with running statistics in another dtype than its compute dtype is named. Return None
    if there is none."""
    modules = failure.plan.inventory.distinct
    found = [m.path for m in modules if "running_mean" in failure.buffers_in_another_dtype(m)]
    return _beside_buffers(failure, found[0]) if found else None


def no_kernel(failure: Failure) -> Problem | None:
    """Explain an operation that has no kernel for bfloat16, or for float16. Return None if no module was running."""
    path = failure.path
    if path is None:
        return None
    where = f"an operation in {failure.describe(path)} ({failure.line})"
    if "Half" in str(failure.error):  # a cast in the model's code: no key of the job has the value float16
        return failure.problem(_MODEL, f"{where} does not take float16; cast its inputs to float32")
    reason = f"{where} does not take bfloat16; cast its inputs to float32"
    return _with_casting_rule(failure, path, reason, ("float32",))


def _with_casting_rule(failure: Failure, path: str, reason: str, dtypes: Sequence[str]) -> Problem:
    """Return the problem of an operation in the module at `path`. Add a second remedy to `reason`: a precision rule for
    this module. If the module contains no parameters, the rule is for the nearest module around it with parameters. If
    there is no such module, add no remedy."""
    while path and not any(module.parameters for module in failure.inside(path)):
        path = parent(path)
    if not path:
        return failure.problem(("precision",), reason)
    key, value, remedy = failure.casting_rule(path, *dtypes)
    return failure.problem(key, f"{reason}, or {remedy}", value)


def mixed_storage(failure: Failure) -> Problem | None:
    """Explain parameters that the model's own code has cast after they were sharded."""
    for path, unit in failure.plan.unit_of.items():
        for name, parameter in failure.model.get_submodule(path)._parameters.items():
            if parameter is not None and dtype_of(parameter) != unit.storage_dtype:
                dtype = dtype_of(parameter)
                reason = (
                    f"{full_name(path, name)} was cast to {dtype} after it was sharded, and its unit is stored in "
                    f"{unit.storage_dtype}; remove that cast, or add [[precision.rules]] with match = "
                    f'"{failure.glob(path)}", storage_dtype = "{dtype}" and param_dtype = "{dtype}"'
                )
                return failure.problem(unit.key or ("precision",), reason)
    return None


def never_gathered(failure: Failure) -> Problem | None:
    """Explain a unit that did not run in the first microbatch. Deferred reduction requires that every unit runs."""
    for unit in failure.plan.units:
        if not was_gathered(failure.model.get_submodule(unit.modules[0])):
            reason = f"no module of unit {unit.name} ran in the first microbatch, so FSDP2 cannot defer its reduction"
            return failure.problem(_ACCUMULATION_MODE, f'{reason}; set mode = "immediate"')
    return None


def changed_in_place(failure: Failure) -> Problem | None:
    """Explain an in-place change of a unit's input, which is the output of an autograd function of FSDP2."""
    path = failure.path
    if path is None:
        return None
    reason = (
        f"{failure.describe(path)} changes in place a tensor that it got through the boundary of an FSDP2 unit "
        f"({failure.line}); write x = x + y in place of x += y, drop inplace=True, or change a copy, x.clone()"
    )
    return failure.problem(failure.plan.unit_of[path].key or _MODEL, reason)


def used_without_a_call(failure: Failure) -> Problem | None:
    """Explain a module that uses parameters while they are still sharded, because the module of their unit was not
    called."""
    user = failure.path
    if user is None:
        return None
    own = (user, failure.plan.sharded_by[user])
    inside = [(p, unit) for unit in failure.plan.units for p in unit.modules if p != user and is_within(p, user)]
    used, unit = next((pair for pair in inside if pair[1].key is not None), inside[0] if inside else own)
    parameters = f"the parameters of {failure.describe(used)}" if used != user else "its own parameters"
    reason = (
        f"{failure.describe(user)} uses {parameters} while they are sharded: FSDP2 gathers the parameters of a unit "
        f"when its module is called, and the module was not called ({failure.line})"
    )
    if unit.reason == BATCH_NORM_DEFAULT:
        key, value, remedy = failure.casting_rule(user, "float32")
        return failure.problem(key, f"{reason}; {remedy}", value)
    if unit.key is None:
        return failure.problem(
            ("model", "blocks"),
            f"{reason}; call the module, or set model.blocks to blocks that contain it and its caller",
        )
    remedy = f'match the module around it ("{failure.glob(user)}")' if user else "drop the module from the rule"
    return failure.problem(unit.key, f"{reason}; {remedy}")


def not_gathered(failure: Failure) -> Problem:
    """Explain a unit's output that is a view and is changed in place.

    The change replaces the view's autograd history, and so removes the hook by which FSDP2 all-gathers for backward. In
    wrapping order, the cause is in the last unit whose parameters have no gradient yet, or in a later unit.
    """
    waiting = [
        unit.modules[0]
        for unit in failure.plan.units
        if unit.modules[0] and unit.gradient_dtype is not None
        if all(p.grad is None for path in unit.modules for p in failure.model.get_submodule(path).parameters())
    ]
    whose = f"of {failure.describe(waiting[-1])} or of a unit after it " if waiting else ""
    reason = (
        f"backward used sharded parameters: most likely the output {whose}is a view (x.view, x[...]) that "
        "is then changed in place; write x = x + y in place of x += y, drop inplace=True, or return x.clone()"
    )
    return failure.problem(_MODEL, reason)


_EXPLANATIONS: Mapping[str, Callable[[Failure], Problem | None]] = {
    "FSDP expects uniform original parameter dtype": mixed_storage,
    # Deferred reduction adds the gradients of earlier microbatches in the reduce dtype. A gradient of the last
    # microbatch alone has the compute dtype.
    "FSDP reduce-scatter expects uniform gradient dtype": partial(
        Failure.problem,
        key=_ACCUMULATION_MODE,
        reason="FSDP2 reduces all gradients of a unit in one dtype. A module got gradients only in the last "
        "microbatch, and these have the compute dtype. The gradient sums of the other modules of the unit have the "
        'reduce dtype; set mode = "immediate"',
    ),
    "'FSDPParam' object has no attribute '_unsharded_param'": never_gathered,
    # The launcher sets the divide factor 1 (`parallel.fsdp`), with which FSDP2 only sums.
    "ReduceOp.PREMUL_SUM": partial(
        Failure.problem,
        key=_MODEL,
        reason="the model sets a gradient divide factor, which gloo cannot apply, and the loss is divided already; "
        "remove set_gradient_divide_factor and set_force_sum_reduction_for_comms from the model",
    ),
    "is a view and is being modified inplace": changed_in_place,
    "is a view and its base or another view of its base has been modified inplace": partial(
        Failure.problem,
        key=_MODEL,
        reason="the model changes a tensor in place after it was the input of an FSDP2 unit, as in x += block(x); "
        "write x = x + block(x), or change a copy, x.clone()",
    ),
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
