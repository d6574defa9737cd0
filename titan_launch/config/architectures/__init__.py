"""The models of this package as the config layer sees them: their arguments and size tables, without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from titan_launch.config.architectures import llama3
from titan_launch.config.base import Section


@dataclass(frozen=True)
class Architecture:
    """What can be written under `[model]` for one model."""

    args: type[Section]
    """The fields of `[model.args]`."""

    flavors: Mapping[str, Mapping[str, Any]]
    """The size table: values of those fields by flavor."""

    check: Callable[[Any], Iterable[tuple[tuple[str, ...], str]]]
    """What does not fit together in the arguments: those concerned, and the reason."""


ARCHITECTURES = {"llama3": Architecture(llama3.Llama3Args, llama3.FLAVORS, llama3.check)}


def resolve_args(name: str, flavor: str, overrides: Mapping[str, Any]) -> Section:
    """The arguments of a model of this package: a flavor's row, with `[model.args]` over it.

    Raises pydantic's ValidationError for wrong arguments, KeyError for an unknown name or flavor.
    """
    architecture = ARCHITECTURES[name]
    return architecture.args.model_validate({**architecture.flavors[flavor], **overrides})
