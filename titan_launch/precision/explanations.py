"""What PyTorch says of dtypes that clash, translated: the module, the key of the job file, and what to write there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from titan_launch.config.precision import PrecisionConfig
from titan_launch.errors import ConfigError, Problem
from titan_launch.plan.types import ModelPlan
from titan_launch.precision.dtype_clashes import batch_norm_clash, clash, no_kernel
from titan_launch.precision.failure import Failure
from titan_launch.precision.unit_boundaries import (
    base_changed_in_place,
    changed_in_place,
    divide_factor,
    mixed_gradients,
    mixed_storage,
    never_gathered,
    not_gathered,
    used_without_a_call,
)


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
