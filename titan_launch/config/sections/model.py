"""`[model]`: the module to train."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from titan_launch.config.sections.section import Array, Section, Table

HUGGINGFACE = "huggingface"
"""Value of `model.name` for every class of the library `transformers`."""


class ModelConfig(Section):
    """The module to train."""

    name: str = "llama3"
    """The model: the name of one of this package (the reference lists them below `[model]`), or `huggingface` for a
    class of the library `transformers`. `package.module:factory` is a callable of your own that returns an `nn.Module`.
    With `weights`, this key may be omitted: the folder names its model."""

    path: str | None = None
    """With `name = "huggingface"`: the folder with the `config.json` of the class, relative to the working directory;
    default: `weights`. The keys of this file become `[model.args]`, and the `config.json` of the run records them. The
    weights in this folder are read only if `weights` names the folder, too."""

    flavor: str = "debug"
    """Size of the model: a row of its size table (the reference shows the table after the model's arguments), or `none`
    if `[model.args]` has all arguments. Not used with a factory or `huggingface`. With `weights`, this key may be
    omitted."""

    args: Table = Field(default_factory=dict)
    """Arguments of the model. They override the values of the flavor. With a factory: its keyword arguments. With
    `huggingface`: keys that override those of `config.json`."""

    blocks: Array[str] | None = None
    """Globs of module paths. Each matching module becomes one FSDP2 unit (a `fully_shard` call). `*` matches within one
    segment of a module path, `**` crosses dots. Default: the blocks of the model. With a factory or `huggingface`, the
    default is the first of three groups that the model has: 1. The entries of the outermost `nn.ModuleList`s, except
    for entries without a matrix, such as norms. 2. The repeated modules in `nn.Sequential`s. 3. The instances of the
    most repeated class. Groups 2 and 3 count only if they hold more than half of the parameters outside of embeddings.
    A run logs the chosen blocks."""

    weights: str | None = None
    """Folder with the initial values of the parameters: a Hugging Face folder (`config.json` and `*.safetensors`), or a
    folder that `titan-launch import` or `export --format plain` wrote. If `flavor` is not set, the folder also provides
    `name` and `args`. An argument of the job that differs from the folder's is an error, with two exceptions. A larger
    `vocab_size` adds rows of zeros. A different `num_labels` needs a new head (see `exclude_from_weights`). A run that
    resumes reads only the parameters that its checkpoint omits (see `checkpoint.save_frozen`)."""

    exclude_from_weights: Array[str] = ()
    """Globs of parameters that are not read from `weights` but keep the model's own initial values, such as `output.*`
    for a new head. Tensors in `weights` that the model does not have must also match one of these globs."""

    loss: Literal["mean", "sum"] | None = None
    """Use the loss that a model of your own computes when it is called as `model(inputs, labels=targets)`. `mean`: the
    loss is the mean over the valid targets of the call. `sum`: the loss is the sum over these targets. The launcher
    scales either loss so that every target of a step has the same weight. A model of `transformers` also gets
    `shift_labels=targets`, because the targets are already shifted. Unset: the launcher computes the loss of `[loss]`
    from the logits."""

    @property
    def is_of_package(self) -> bool:
        """False for the model of a factory, and for a class of `transformers`."""
        return ":" not in self.name and self.name != HUGGINGFACE
