"""Parts of long lists of cases: the default suite runs a part, `-m slow` runs all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def sampled(argument: str, cases: Sequence[Any], every: int = 2) -> pytest.MarkDecorator:
    """Run a test with every `every`-th of `cases`, and as a slow test with all of them.

    `argument`: name of the test's argument, which gets a tuple.
    """
    whole = pytest.param(tuple(cases), id="all", marks=[pytest.mark.slow, pytest.mark.timeout(600)])
    return pytest.mark.parametrize(argument, [pytest.param(tuple(cases)[::every], id="some"), whole])


def rest_is_slow(cases: Sequence[Any], every: int = 2) -> list[Any]:
    """Return all cases as parameters, a tuple as several. All but every `every`-th are slow."""
    several = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*case, marks=[pytest.mark.slow] * (index % every > 0)) for index, case in enumerate(several)]


def chosen(request: pytest.FixtureRequest, argument: str) -> set[Any]:
    """Return the values of an argument in the collected tests of this module, for which a fixture prepares results."""
    own = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    parameters = [item.callspec.params for item in own if hasattr(item, "callspec")]
    return {values[argument] for values in parameters if argument in values}
