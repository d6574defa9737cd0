"""Results of the ranks that prove a layout, in types that a process without torch can read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Difference(NamedTuple):
    """The difference between a result of a step and the same result of one process."""

    step: int
    name: str
    error: float
    """Norm of the difference, divided by the norm of one process's result. The divisor is at least the argument `floor`
    of `prove.measure.difference`. 1e30 if a result is not finite."""

    cosine: float
    ratio: float
    """Norm of the result, divided by the norm of one process's result. 0 if that norm is 0."""


TOLERANCES = {"loss": 1e-5, "gradient": 1e-4, "update": 1e-3, "buffer": 1e-4, "average": 1e-4}
"""Largest relative differences that a proof allows in fp32, by kind of result. Sums in another order differ by 1e-7 to
1e-6."""


def kind_of(result: Difference) -> str:
    """Return the kind of a result, which is the first word of its name: a key of `TOLERANCES`, or `logits`."""
    return result.name.split(" ")[0]


def largest_by_kind(results: Iterable[Difference]) -> dict[str, float]:
    """Return the largest difference of each kind of result."""
    errors: dict[str, float] = {}
    for result in results:
        errors[kind_of(result)] = max(errors.get(kind_of(result), 0.0), result.error)
    return errors


def exceeding(results: Iterable[Difference], tolerances: Mapping[str, float]) -> list[Difference]:
    """Return the results that differ by more than the tolerance of their kind, in order."""
    return [result for result in results if not result.error <= tolerances[kind_of(result)]]


@dataclass(frozen=True)
class Reference:
    """Findings about the run of the twin (a small copy of the job) on one process, with which layouts are compared."""

    has_batch_norm: bool
    num_parameters: int
    names: frozenset[str]
    """Names of the gradients in the results of a step. Each of these gradients must be on at least one rank of every
    layout."""

    changed: tuple[Difference, ...]
    """The results that differed when the twin was trained a second time. Empty if none differed, or if the twin was
    trained only once."""

    dead: tuple[str, ...]
    """Trained parameters whose gradient is exactly 0 in every step."""

    rounding: tuple[str, ...]
    """Trained parameters whose gradient is a rounding error in every step."""

    constant: tuple[str, ...]
    """Trained parameters whose gradient does not depend on the data."""

    without_effect: tuple[str, ...]
    """Keys of the job's loss weights that have no effect: no gradient changes when the weight is set to 0."""

    rounding_errors: dict[str, float]
    """The largest difference, by kind of result, between the steps in the precision of the job and the same steps in
    fp32. Empty if the steps are in fp32."""

    files: tuple[str, ...]
    """Files of the user's own modules."""


OUTPUT, INPUT_GRADIENT, LOSS = "output", "input gradient", "gradient of the logits"
"""Kinds of traced tensors of a module. Only the whole model has `LOSS`."""


class Event(NamedTuple):
    """A tensor to trace: its kind, and the path of its module."""

    kind: str
    path: str


class Departure(NamedTuple):
    """A traced tensor that differs from the same tensor of one process."""

    order: int
    """Position of the tensor among all tensors that one process traces in the step, in the order of computation."""

    event: Event
    error: float
