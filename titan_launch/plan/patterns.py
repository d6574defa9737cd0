"""The modules that a list of globs in a job file names. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from titan_launch.errors import ConfigError, KeyPath, Problem, did_you_mean
from titan_launch.globs import matches
from titan_launch.plan.types import Inventory


def matched_modules(inventory: Inventory, patterns: Sequence[str], key: KeyPath) -> tuple[str, ...]:
    """Paths of the modules that can be run and that a glob matches, in order. A module with several parents, which is
    matched under any of its paths, stands under the first.

    Raises ConfigError at `key` and its index for every glob that matches nothing.
    """
    problems = list(_unused(inventory, patterns, key))
    if problems:
        raise ConfigError(problems)
    matched = {
        module.same_as or module.path
        for module in inventory.modules
        if module.path and module.has_forward and any(matches(pattern, module.path) for pattern in patterns)
    }
    return tuple(module.path for module in inventory.modules if module.path in matched)


def nothing_matched(pattern: str, paths: Sequence[str], containers: Sequence[str] = ()) -> str:
    """Why a glob names none of the modules it could, in words. `containers`: modules that it cannot name, since they
    have no forward."""
    container = next((path for path in containers if matches(pattern, path)), None)
    if container is not None:
        return f'matches only {container}, a container without a forward; did you mean "{container}.*"?'
    return f"matches no module of the model{did_you_mean(pattern, paths)}"


def _unused(inventory: Inventory, patterns: Sequence[str], key: KeyPath) -> Iterator[Problem]:
    containers = [module.path for module in inventory.modules if module.path and not module.has_forward]
    runnable = [module.path for module in inventory.modules if module.path and module.has_forward]
    for index, pattern in enumerate(patterns):
        if not any(matches(pattern, path) for path in runnable):
            yield Problem((*key, index), nothing_matched(pattern, runnable, containers), pattern)
