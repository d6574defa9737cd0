"""Rules that pydantic cannot check: contradictions between keys, and names that must exist.

A rule is a function that yields a `Problem` for each error that it finds. `Problem.also` names the other keys on which
the problem depends. Three of the rules read the tables in `tables.py`; most new rules are a row in one of these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from titan_launch.config.job import JobConfig
from titan_launch.config.rules.data import DATA_RULES
from titan_launch.config.rules.images import IMAGE_RULES
from titan_launch.config.rules.loss import LOSS_RULES
from titan_launch.config.rules.model import MODEL_RULES, parameters_are_unfrozen_in_the_run
from titan_launch.config.rules.parallelism import PARALLELISM_RULES, PIPELINE_RULES
from titan_launch.config.rules.precision import PRECISION_RULES
from titan_launch.config.rules.tables import contradictions, keys_without_effect, settings_exist_on_the_device
from titan_launch.config.rules.training import TRAINING_RULES, average_is_updated_in_the_run, profile_is_in_the_run
from titan_launch.core.errors import Problem

Rule = Callable[[JobConfig], Iterator[Problem]]
"""A function that yields the problems of a job."""

RULES: tuple[Rule, ...] = (
    keys_without_effect,
    contradictions,
    settings_exist_on_the_device,
    *MODEL_RULES,
    *DATA_RULES,
    *LOSS_RULES,
    *IMAGE_RULES,
    *PRECISION_RULES,
    *TRAINING_RULES,
    *PIPELINE_RULES,
    *PARALLELISM_RULES,
)
"""The rules that a job file must pass, in the order in which they run. (`packages.py` has a rule that only `check`
uses. `prepare` uses only CORPUS_RULES.)"""


def first_problem(config: JobConfig) -> Problem | None:
    """Return the first problem that a rule reports for a job; None if the rules allow the job."""
    return next((problem for rule in RULES for problem in rule(config)), None)


STEP_RULES: tuple[Rule, ...] = (
    profile_is_in_the_run,
    parameters_are_unfrozen_in_the_run,
    average_is_updated_in_the_run,
)
"""The rules that compare a key with `training.steps`. A run with `training.epochs` checks them again when it knows the
number of steps."""
