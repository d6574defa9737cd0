"""`[model]`: the module to train."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from titan_launch.config.sections.base import Array, Section, Table


class ModelConfig(Section):
    """The module to train."""

    name: str = "llama3"
    """The model: one of this package (the reference lists them below `[model]`), or `package.module:factory` for a
    callable of your own that returns an `nn.Module`."""

    flavor: str = "debug"
    """Size of the model: a row of its size table (the reference shows the table after the model's arguments). Not used
    with a factory."""

    args: Table = Field(default_factory=dict)
    """Arguments of the model. They override the values of the flavor. With a factory: its keyword arguments."""

    blocks: Array[str] | None = None
    """Globs of module paths. Each matching module becomes one FSDP2 unit (a `fully_shard` call). `*` matches within one
    segment of a module path, `**` crosses dots. Default: the blocks of the model; with a factory, the entries of the
    outermost `nn.ModuleList`s, else the repeated modules in `nn.Sequential`s, else the instances of the most repeated
    class. A run logs the choice."""

    loss: Literal["mean", "sum"] | None = None
    """Use the loss that a model of your own computes when it is called as `model(inputs, labels=targets)`. `mean`: the
    loss is the mean over the valid targets of the call. `sum`: the loss is the sum over them. The launcher scales both
    so that every target of a step has the same weight. A model of `transformers` also gets `shift_labels=targets`,
    because the targets are already shifted. Unset: the launcher computes the cross-entropy of the logits."""
