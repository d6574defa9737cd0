"""`[model]`: which module is trained."""

from __future__ import annotations

from pydantic import Field

from titan_launch.config.sections.base import Array, Section, Table


class ModelConfig(Section):
    """Which module is trained."""

    name: str = "llama3"
    """A model of this package, as listed in the reference below `[model]`, or `package.module:factory` for any callable
    that returns an `nn.Module`."""

    flavor: str = "debug"
    """A row of the model's size table, which the reference shows after the model's arguments. Not used with a factory
    of your own."""

    args: Table = Field(default_factory=dict)
    """Overrides of the flavor's fields, or the keyword arguments of your own factory."""

    blocks: Array[str] | None = None
    """Globs of the modules that become one FSDP unit each. Default: the model's own blocks; for a factory of your own,
    the entries of its outermost `nn.ModuleList`s. `*` stays within one segment of a module path, `**` crosses dots."""
