"""`[model]`: the module to train."""

from __future__ import annotations

from pydantic import Field

from titan_launch.config.sections.base import Array, Section, Table


class ModelConfig(Section):
    """The module to train."""

    name: str = "llama3"
    """The model: one of this package (the reference lists them below `[model]`), or `package.module:factory` for a
    callable of your own that returns an `nn.Module`. With `weights` it may be omitted: the folder names its model."""

    flavor: str = "debug"
    """Size of the model: a row of its size table (the reference shows the table after the model's arguments), or `none`
    if `[model.args]` has all arguments. Not used with a factory. With `weights` it may be omitted."""

    args: Table = Field(default_factory=dict)
    """Arguments of the model. They override the values of the flavor. With a factory: its keyword arguments."""

    blocks: Array[str] | None = None
    """Globs of module paths. Each matching module becomes one FSDP2 unit (a `fully_shard` call). Default: the blocks of
    the model; with a factory, the entries of the model's outermost `nn.ModuleList`s. `*` matches within one segment of
    a module path, `**` crosses dots."""

    weights: str | None = None
    """Folder with the initial values of the parameters: a Hugging Face folder (`config.json` and `*.safetensors`), or a
    folder that `titan-launch import` or `export --format plain` wrote. If the job sets no `flavor`, `name` and `args`
    come from the folder. Other arguments than the folder's are an error, except for a larger `vocab_size`: the
    additional rows are zeros. A run that resumes does not read the folder."""

    exclude_from_weights: Array[str] = ()
    """Globs of parameters that keep the model's own initial values, such as `output.*` for a new head, and of tensors
    in `weights` that the model does not have."""
