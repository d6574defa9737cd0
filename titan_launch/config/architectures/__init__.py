"""Arguments and size tables of this package's models, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from titan_launch.config.architectures import llama3, resnet, vit
from titan_launch.config.architectures.base import ModelArgs
from titan_launch.config.sections.data import ImageFormat
from titan_launch.config.sections.model import ModelConfig


@dataclass(frozen=True)
class Architecture:
    """The arguments and the size table of one model."""

    args: type[ModelArgs]
    """Class of the table `[model.args]`. Its methods describe the model; `ModelArgs` documents them."""

    flavors: Mapping[str, Mapping[str, Any]]
    """The size table: for each flavor, the values of arguments."""


ARCHITECTURES = {
    "llama3": Architecture(llama3.Llama3Args, llama3.FLAVORS),
    "resnet": Architecture(resnet.ResNetArgs, resnet.FLAVORS),
    "vit": Architecture(vit.ViTArgs, vit.FLAVORS),
}
"""The models of this package, by their name in `[model]`. `titan_launch.models.build.SPECS` has their modules."""


def resolve_args(name: str, flavor: str, overrides: Mapping[str, Any]) -> ModelArgs:
    """Return the arguments of a model of this package: the row of its flavor, overridden by `[model.args]`.

    Raises pydantic's ValidationError for wrong arguments, and KeyError for an unknown name or flavor.
    """
    architecture = ARCHITECTURES[name]
    return architecture.args.model_validate({**architecture.flavors[flavor], **overrides})


def known_args(model: ModelConfig) -> ModelArgs | None:
    """Return the arguments of a model of this package; None for a user's own model, and for wrong arguments. Other
    rules report wrong arguments."""
    try:
        return resolve_args(model.name, model.flavor, model.args)
    except (KeyError, ValidationError):
        return None


def images_taken(model: ModelConfig) -> ImageFormat | None:
    """Return the format of the images that a model takes; None for a model of tokens, and for a user's own model.

    Raises the same errors as `resolve_args`.
    """
    if model.name not in ARCHITECTURES:
        return None
    return resolve_args(model.name, model.flavor, model.args).images_taken()
