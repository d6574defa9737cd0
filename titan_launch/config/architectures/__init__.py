"""The models of this package as the config layer sees them: their arguments and size tables, without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from titan_launch.config.architectures import llama3, resnet
from titan_launch.config.sections.base import Section
from titan_launch.config.sections.data import ImageFormat, SampleUnit
from titan_launch.config.sections.model import ModelConfig


@dataclass(frozen=True)
class Architecture:
    """What can be written under `[model]` for one model."""

    args: type[Section]
    """The fields of `[model.args]`."""

    flavors: Mapping[str, Mapping[str, Any]]
    """The size table: values of those fields by flavor."""

    check: Callable[[Any], Iterable[tuple[tuple[str, ...], str]]]
    """What does not fit together in the arguments: those concerned, and the reason."""

    images: Callable[[Any], ImageFormat] | None = None
    """The images that the model takes, from its arguments; None for a model of tokens."""

    @property
    def unit(self) -> SampleUnit:
        """What the model takes."""
        return "tokens" if self.images is None else "images"


ARCHITECTURES = {
    "llama3": Architecture(llama3.Llama3Args, llama3.FLAVORS, llama3.check),
    "resnet": Architecture(resnet.ResNetArgs, resnet.FLAVORS, resnet.check, resnet.images),
}


def resolve_args(name: str, flavor: str, overrides: Mapping[str, Any]) -> Section:
    """The arguments of a model of this package: a flavor's row, with `[model.args]` over it.

    Raises pydantic's ValidationError for wrong arguments, KeyError for an unknown name or flavor.
    """
    architecture = ARCHITECTURES[name]
    return architecture.args.model_validate({**architecture.flavors[flavor], **overrides})


def known_args(model: ModelConfig) -> Section | None:
    """The arguments of a model, where they are this package's to know, and right; None elsewhere, for rules that leave
    it to others to say what is wrong with them."""
    try:
        return resolve_args(model.name, model.flavor, model.args)
    except (KeyError, ValidationError):
        return None


def images_taken(model: ModelConfig) -> ImageFormat | None:
    """The images that a model takes; None where it takes tokens, or is the user's own.

    Raises as `resolve_args` does.
    """
    architecture = ARCHITECTURES.get(model.name)
    if architecture is None or architecture.images is None:
        return None
    return architecture.images(resolve_args(model.name, model.flavor, model.args))
