"""Arguments and size tables of this package's models, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from titan_launch.config.image_format import ImageFormat
from titan_launch.config.sections.data import SampleUnit
from titan_launch.config.sections.model import HUGGINGFACE, ModelConfig
from titan_launch.core.errors import did_you_mean
from titan_launch.models.args import ModelArgs
from titan_launch.models.decoder.args import DecoderArgs
from titan_launch.models.decoder.families import FAMILIES
from titan_launch.models.huggingface.args import image_format, unit_of
from titan_launch.models.resnet.args import FLAVORS as RESNET_FLAVORS
from titan_launch.models.resnet.args import ResNetArgs
from titan_launch.models.vit.args import FLAVORS as VIT_FLAVORS
from titan_launch.models.vit.args import ViTArgs


@dataclass(frozen=True)
class Architecture:
    """The arguments and the size table of one model."""

    args: type[ModelArgs]
    """Class of the table `[model.args]`. Its methods describe the model; `ModelArgs` documents them."""

    flavors: Mapping[str, Mapping[str, Any]]
    """The size table: for each flavor, the arguments that it sets, with their values."""


ARCHITECTURES = {
    **{name: Architecture(DecoderArgs, flavors) for name, flavors in FAMILIES.items()},
    "resnet": Architecture(ResNetArgs, RESNET_FLAVORS),
    "vit": Architecture(ViTArgs, VIT_FLAVORS),
}
"""The models of this package, by their name in `[model]`. `models.build.SPECS` has the functions that build them."""


ALL_IN_ARGS = "none"
"""Name of the flavor that sets no arguments. Every model of this package has this flavor. With it, `[model.args]` must
set all arguments that have no default."""


def named_flavor(name: str, flavor: str | None) -> str:
    """Return the flavor to show with a model's name. Return "" for the flavors None and `none`, and for a model without
    flavors. (`config.json` in a run folder has a flavor even for a model without flavors.)"""
    return "" if flavor in (None, ALL_IN_ARGS) or name not in ARCHITECTURES else str(flavor)


def resolve_args(name: str, flavor: str, overrides: Mapping[str, Any]) -> ModelArgs:
    """Return the arguments of a model of this package: the values of its flavor, overridden by `[model.args]`.

    `overrides`: `[model.args]`. A table in `overrides`, such as `rope_scaling`, replaces only the keys that it has. A
    table that changes the key `kind` replaces the flavor's whole table.

    Raises pydantic's ValidationError for wrong arguments, and KeyError for an unknown name or flavor.
    """
    architecture = ARCHITECTURES[name]
    row = {} if flavor == ALL_IN_ARGS else architecture.flavors[flavor]
    return architecture.args.model_validate(_overridden(row, overrides))


def _overridden(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    pairs = {key: (table.get(key), change) for key, change in changes.items()}
    merged = {
        key: _overridden(own, change)
        for key, (own, change) in pairs.items()
        if isinstance(own, dict) and isinstance(change, dict) and change.get("kind", own.get("kind")) == own.get("kind")
    }
    return {**table, **changes, **merged}


def unknown_model(name: str) -> str:
    """Return the error text for a `model.name` that is neither a model of this package nor an import string."""
    known = (*ARCHITECTURES, HUGGINGFACE)
    names = ", ".join(f'"{each}"' for each in known)
    return f"unknown model; must be {names}, or package.module:factory for your own model{did_you_mean(name, known)}"


def unknown_flavor(name: str, flavor: str) -> str:
    """Return the error text for a `model.flavor` that the model `name` of this package does not have."""
    flavors = ARCHITECTURES[name].flavors
    return f"unknown flavor; {name} has {', '.join(flavors)}{did_you_mean(flavor, flavors)}"


def known_args(model: ModelConfig) -> ModelArgs | None:
    """Return the arguments of a model of this package; None for any other model. Also return None for an unknown flavor
    or wrong arguments, which other checks report."""
    try:
        return resolve_args(model.name, model.flavor, model.args)
    except (KeyError, ValidationError):
        return None


def unit_taken(model: ModelConfig) -> SampleUnit | None:
    """Return "tokens" or "images", the unit of a model's samples; None for an unknown name or a user's own model."""
    if model.name == HUGGINGFACE:
        return unit_of(model.args)
    return ARCHITECTURES[model.name].args.unit if model.name in ARCHITECTURES else None


def vocabulary_taken(model: ModelConfig) -> int | None:
    """Return the number of rows of a model's token embedding; None for a model of images, and if the number is unknown
    until the model is built."""
    size = model.args.get("vocab_size") if model.name == HUGGINGFACE else None
    return size if isinstance(size, int) else getattr(known_args(model), "vocab_size", None)


def labels_taken(model: ModelConfig) -> int | None:
    """Return `num_labels` of a decoder that is a classifier or a reward model; None for other models."""
    return getattr(known_args(model), "num_labels", None)


def selection_bias_rate(model: ModelConfig) -> float:
    """Return `experts.selection_bias_rate` of a decoder; 0 for a model without it."""
    experts = getattr(known_args(model), "experts", None)
    return getattr(experts, "selection_bias_rate", None) or 0.0


def images_taken(model: ModelConfig) -> ImageFormat | None:
    """Return the format of the images that a model takes. Return None for a model of tokens, for a user's own model,
    and for a class of `transformers` without a known number of channels. Raises the same errors as `resolve_args`."""
    if model.name == HUGGINGFACE:
        return image_format(model.args)
    if model.name not in ARCHITECTURES:
        return None
    return resolve_args(model.name, model.flavor, model.args).images_taken()
