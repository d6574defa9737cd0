"""What a model does that the boundaries of FSDP2's units do not allow."""

from __future__ import annotations

from titan_launch.errors import Problem, listed
from titan_launch.plan.claims import BATCH_NORM_DEFAULT
from titan_launch.plan.types import is_within
from titan_launch.precision.failure import Failure


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
