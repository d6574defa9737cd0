"""`[model]` and `[lora]`: the module to train, and its adapters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from titan_launch.config.sections.section import Array, Section, Table
from titan_launch.core.globs import matches

HUGGINGFACE = "huggingface"
"""Value of `model.name` for every class of the library `transformers`."""


class ModelConfig(Section):
    """The module to train."""

    name: str = "llama3"
    """The model: the name of a model of this package (the reference lists the names below `[model]`), or `huggingface`
    for a class of the library `transformers`. `package.module:factory` is a callable of your own that returns an
    `nn.Module`. With `weights`, this key may be omitted, because the folder contains the name of its model."""

    path: str | None = None
    """With `name = "huggingface"`: the folder with the `config.json` of the class, relative to the working directory;
    default: `weights`. The keys of this file become `[model.args]`. The `config.json` of the run records these keys. To
    read the weights in this folder, set `weights` to the same folder."""

    flavor: str = "debug"
    """Size of the model: a row of its size table (the reference shows the table after the model's arguments), or `none`
    if `[model.args]` has all arguments. Not used with a factory or `huggingface`. With `weights`, this key may be
    omitted."""

    args: Table = Field(default_factory=dict)
    """Arguments of the model, which override the values of the flavor. With a factory: its keyword arguments. With
    `huggingface`: keys that override the keys of `config.json`."""

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
    `name` and `args`. An argument of the job that differs from the argument in the folder is an error, with
    these exceptions. A larger `vocab_size` adds rows of zeros. A different `num_labels` needs a new head (see
    `exclude_from_weights`). The auxiliary losses of experts may differ, and so may `experts.selection_bias_rate` if the
    folder's model has selection biases. A run that resumes reads only the parameters that its checkpoint omits (see
    `checkpoint.save_frozen`)."""

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


ALL_LINEAR = "all-linear"
"""The entry of `lora.targets` that stands for all linear layers and experts of the blocks, except for routers."""


class LoRARule(Section):
    """A different rank or scale for some of the adapters."""

    match: Annotated[Array[str], Field(min_length=1)]
    """Globs of modules that `lora.targets` matches. If several rules match a module, the first rule applies."""

    rank: Annotated[int, Field(ge=1)] | None = None
    """Rank of these adapters. Unset: `lora.rank`."""

    alpha: Annotated[float, Field(gt=0)] | None = None
    """Alpha of these adapters, which sets their scale (see `lora.alpha`). Unset: `lora.alpha`."""


class LoRAConfig(Section):
    """Low-rank adapters (LoRA, arXiv:2106.09685). All other parameters are frozen, except those that
    `training.trainable` or `training.unfreeze` names. A module with an adapter multiplies by W + scale * B A instead of
    its weight W. A has `rank` rows, and B has `rank` columns. At the start, unless `adapter` is set, B A is 0, so the
    adapters do not change the outputs of the model."""

    targets: Array[str] = ()
    """The modules that get adapters: linear layers, embeddings, and the experts of a mixture of experts. An entry is a
    glob of module paths, such as `["layers.*.attention.w*"]`: `*` matches within one segment, `**` crosses dots. An
    entry that matches no whole path counts as a name as in `peft`, such as `["q_proj", "v_proj"]`. Such a name matches
    the ends of module paths: of the paths in this package, or of the paths in `transformers`. `["all-linear"]`: the
    linear layers and the experts of the blocks, but no routers. `plan` and a run print the paths of the modules with
    adapters. Other kinds of modules that an entry matches get no adapter. The adapter of a module is its child `lora`.
    Empty: no adapters."""

    rank: Annotated[int, Field(ge=1)] = 16
    """Rows of A, and columns of B. At most the smaller side of each target's weight."""

    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The scale of the adapters is `alpha / rank`, or `alpha / sqrt(rank)` with `rank_stabilized`."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability with which an element of an adapter's input is set to zero in training. Adapters of embeddings, whose
    inputs are token ids, have no dropout."""

    rank_stabilized: bool = False
    """Scale by `alpha / sqrt(rank)`, not `alpha / rank`, so that a large rank learns as fast as a small rank
    (arXiv:2312.03732)."""

    rules: Array[LoRARule] = ()
    """Exceptions to `rank` and `alpha`."""

    adapter: str | None = None
    """Folder of `peft` with the initial values of the adapters: `adapter_config.json` and `adapter_model.safetensors`,
    as `titan-launch export --adapter` and `peft` write them. Rank, scale and targets in the folder must equal the
    settings of the job. If the job does not set `lora.dropout`, the dropout in the folder must be 0. A key of
    `adapter_config.json` that this package does not understand is an error. A run that resumes does not read the
    folder."""

    def of(self, path: str) -> LoRAConfig:
        """Return the settings for the adapter of the module at `path`: the first rule that matches the module overrides
        `rank` and `alpha`."""
        index = self.rule_of(path)
        if index is None:
            return self
        return self.model_copy(update=self.rules[index].model_dump(include={"rank", "alpha"}, exclude_none=True))

    def rule_of(self, path: str) -> int | None:
        """Return the index in `rules` of the first rule that matches a module; None if no rule matches."""
        found = (i for i, rule in enumerate(self.rules) if any(matches(glob, path) for glob in rule.match))
        return next(found, None)

    @property
    def scale(self) -> float:
        """Number by which the product B A is multiplied."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)

    def alpha_of(self, scale: float, rank: int) -> float:
        """Return the `alpha` that gives an adapter of rank `rank` the scale `scale`. The result is rounded to 14
        digits, which removes rounding errors: 32.0, not 32.000000000000004."""
        return float(f"{scale * (rank**0.5 if self.rank_stabilized else rank):.14g}")
