"""`[model]`: the module to train."""

from __future__ import annotations

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
    """Globs of module paths. Each matching module becomes one FSDP2 unit (a `fully_shard` call). Default: the blocks of
    the model; with a factory, the entries of the model's outermost `nn.ModuleList`s. `*` matches within one segment of
    a module path, `**` crosses dots."""
