"""Maximal update parametrization (muP): how initial values, learning rate and weight decay of a parameter depend on the
width of the model. This module does not import torch.

The scales are those of table 3 of Tensor Programs V (Yang et al., arXiv:2203.03466) for Adam, relative to a model of
the base width. With these scales, the activations and their updates in a step have the same size at every width. So the
best learning rate of a narrow model is also the best learning rate of a wide model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from titan_launch.core.globs import alike, matches

if TYPE_CHECKING:
    from titan_launch.config.job import JobConfig

KINDS: Mapping[str, tuple[str, ...]] = {
    "input": ("tok_embeddings.weight", "pos_embeddings.weight"),
    "output": ("output.weight", "layers.*.moe.router.weight"),
    "hidden": (
        "layers.*.attention.w?.weight",
        "layers.*.feed_forward.w?.weight",
        "layers.*.moe.experts.w?",
        "layers.*.moe.shared_experts.w?.weight",
    ),
}
"""Globs of the parameters of decoders, by kind. `input`: matrices whose number of outputs grows with the width of the
model. `output`: matrices whose number of inputs grows. `hidden`: both grow. All other parameters are vectors."""


class Scale(NamedTuple):
    """The scales of a parameter, relative to a model of the base width."""

    kind: str
    """A key of `KINDS`, or `vector`."""

    std: float = 1.0
    """Factor of the standard deviation of the initial values."""

    lr: float = 1.0
    """Factor of the learning rate."""

    weight_decay: float = 1.0
    """Factor of the weight decay. With this factor, learning rate x weight decay is the same at every width (Wang and
    Aitchison, arXiv:2405.13698)."""


@dataclass(frozen=True)
class WidthScales:
    """The scales of all parameters of a model."""

    ratio: float = 1.0
    """Width of the model / base width. 1: no parameter is scaled."""

    def of(self, path: str) -> Scale:
        """Return the scales of a parameter. `path`: full name of the parameter."""
        kind = next((kind for kind, globs in KINDS.items() if any(matches(glob, path) for glob in globs)), "vector")
        of_kind = {
            "hidden": Scale(kind, self.ratio**-0.5, 1 / self.ratio, self.ratio),
            "output": Scale(kind, 1 / self.ratio, 1 / self.ratio, self.ratio),
        }
        return of_kind.get(kind, Scale(kind))


UNSCALED = WidthScales()
"""The scales without muP."""


def width_scales(config: JobConfig) -> WidthScales:
    """Return the scales that `[mup]` sets for a job's model; `UNSCALED` without `mup.base_width`, or if the model has
    no known width."""
    from titan_launch.models.architectures import known_args

    base, args = config.mup.base_width, known_args(config.model)
    width = None if args is None else args.width()
    return UNSCALED if base is None or width is None else WidthScales(width / base)


def describe_scales(config: JobConfig, paths: Iterable[str]) -> Iterator[Sequence[str]]:
    """Yield the titles and the rows of a table of all parameters and their scales; nothing without `mup.base_width`.
    `paths`: full names of all parameters. Names that differ only in numbers share a row."""
    scales = width_scales(config)
    if config.mup.base_width is None:
        return
    yield ("parameter", "tensors", "kind", "initial std", "learning rate", "weight decay")
    for pattern, number in alike(paths).items():
        scale = scales.of(pattern.replace("*", "0"))
        yield (pattern, str(number), scale.kind, *(f"x {factor:.4g}" for factor in scale[1:]))
