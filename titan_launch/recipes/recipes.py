"""The recipes of `titan-launch init`. For each recipe, `tables_of` returns the tables of a job file, with comments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from shlex import quote
from typing import Any

from titan_launch.config.paths import PYTHON_STDLIB, SKLEARN_DIGITS
from titan_launch.config.sections.data import DATA_KINDS
from titan_launch.config.sections.model import HUGGINGFACE
from titan_launch.core.errors import UserError
from titan_launch.core.terminal import counted
from titan_launch.data.epochs import known_samples, steps_of
from titan_launch.models.architectures import ALL_IN_ARGS, ARCHITECTURES
from titan_launch.models.huggingface.args import image_format
from titan_launch.models.huggingface.image_processor import FILE
from titan_launch.recipes.facts import DataFolder, ModelFolder, UnknownDataError, look_at_data
from titan_launch.recipes.sizes import Sizes
from titan_launch.recipes.writing import Row, Table

TEXT_KINDS = ("text", "jsonl", "parquet", "huggingface", "tokens")
CHAT_KINDS = ("chat", "preferences")
MODEL, CHATS, PAIRS = "MODEL_FOLDER", "CHATS.jsonl", "PAIRS.jsonl"
"""Placeholders for paths that the user did not give. `check` names the keys that have a placeholder."""


@dataclass(frozen=True)
class Recipe:
    """A kind of training, with its usual values. The defaults of the fields are the values of fine-tuning."""

    title: str
    about: str
    """The first line of the job file."""

    kinds: tuple[str, ...]
    """Kinds of data (`data.kind`) that suit the recipe. The first is the kind of the default data."""

    default_data: str
    """Data of the job if the user names none: data that every machine has, or a placeholder."""

    tokens_per_step: int
    """Largest number of tokens per step, but at most 8192 for a small model (`_is_small`). For images: largest number
    of samples per step. (Each rank has at least one sample, so a step may exceed these limits.)"""

    steps: int
    """Usual number of steps. With `prefers_steps`, this is the value of the key `steps`. Without `prefers_steps`, and
    if the number of samples is unknown, warm-up and intervals are computed from this number."""

    lr: float
    lr_comment: str
    needs_model: bool = True
    """True if the user must name a folder with weights."""

    longest: int = 2048
    """`training.seq_len`, unless the model takes only shorter sequences, or is the flavor `debug`. For images: 1."""

    warmup_steps: int = 20
    small_batch: int = 1
    """`training.local_batch_size` if no size is planned: without a GPU, without a needed model, or without torch."""

    prefers_steps: bool = False
    """True to write the key `steps` in place of `epochs`, unless this number of steps is at least `epochs` epochs."""

    epochs: int = 3
    epochs_from_random: int = 3
    """Number of epochs if the user names no model folder, and `needs_model` is False."""

    least_steps: int = 50
    """Smallest number of steps; 0 sets no limit. For a small data set, the global batch is reduced until the run has
    this number of steps, but not below one sample per rank."""

    lora_rank: int = 0
    """Rank of the adapters; 0 trains all parameters."""

    is_reward: bool = False
    """True for a reward model: a decoder with one output."""

    weight_decay: float | None = 0.0
    """`optimizer.weight_decay`. None: the optimizer's default."""

    min_lr_factor: float = 0.1


RECIPES: dict[str, Recipe] = {
    "pretrain": Recipe(
        "pre-training: a decoder from random values, on text",
        "Pre-training from random values.",
        TEXT_KINDS,
        PYTHON_STDLIB,
        needs_model=False,
        longest=4096,
        tokens_per_step=2**19,
        steps=1000,
        lr=3e-4,
        lr_comment="larger models need lower rates: 1.5e-4 with 70B",
        warmup_steps=100,
        small_batch=4,
        prefers_steps=True,
        least_steps=0,
        weight_decay=None,
    ),
    "continued_pretrain": Recipe(
        "continued pre-training: published weights, on text of your field",
        "Continued pre-training: the weights of a folder, on text of another field.",
        TEXT_KINDS,
        PYTHON_STDLIB,
        longest=4096,
        tokens_per_step=2**18,
        steps=1000,
        lr=3e-5,
        lr_comment="a tenth of the rate of pre-training, so that the model keeps its knowledge",
        warmup_steps=50,
        prefers_steps=True,
        least_steps=0,
        weight_decay=None,
    ),
    "sft": Recipe(
        "supervised fine-tuning: all parameters, on chats or prompts with responses",
        "Supervised fine-tuning of all parameters. Only the turns of the assistant are targets.",
        ("chat",),
        CHATS,
        tokens_per_step=2**17,
        steps=500,
        lr=1e-5,
        lr_comment="usual for all parameters: 5e-6 to 2e-5",
    ),
    "lora": Recipe(
        "LoRA: low-rank adapters of a frozen model, on chats or text",
        "LoRA: adapters of a frozen model. `titan-launch export` merges them, or writes them alone.",
        ("chat", *TEXT_KINDS),
        CHATS,
        tokens_per_step=2**16,
        steps=500,
        lr=2e-4,
        lr_comment="usual for adapters: ten times the rate for all parameters",
        lora_rank=16,
    ),
    "dpo": Recipe(
        "DPO: direct preference optimization with adapters, on pairs of answers",
        "Direct preference optimization. The reference needs no memory: it is the model without its adapters.",
        ("preferences",),
        PAIRS,
        tokens_per_step=2**16,
        steps=200,
        lr=5e-6,
        lr_comment="higher rates soon move the model far from the reference",
        lora_rank=16,
    ),
    "reward": Recipe(
        "reward model: one number for each answer, learned from pairs of answers",
        "A reward model. Its output after the last token of a chat is the reward.",
        ("preferences",),
        PAIRS,
        tokens_per_step=2**17,
        steps=500,
        lr=1e-5,
        lr_comment="usual for all parameters",
        epochs=1,
        is_reward=True,
    ),
    "image_classification": Recipe(
        "image classification: a ResNet from random values, or a published classifier with --model",
        "Image classification.",
        ("images",),
        SKLEARN_DIGITS,
        needs_model=False,
        longest=1,
        tokens_per_step=256,
        steps=1000,
        lr=1e-3,
        lr_comment="with published weights: 1e-4",
        warmup_steps=50,
        small_batch=16,
        epochs_from_random=90,
        min_lr_factor=0.01,
        least_steps=0,
        weight_decay=None,
    ),
}


@dataclass(frozen=True)
class Inputs:
    """Everything that decides the text of a job file besides the recipe."""

    name: str
    model: ModelFolder | None
    data: DataFolder | None
    ranks: int
    device: str | None
    """The device to plan for, by its name in the device table. None: the device of this machine."""

    sizes: Sizes


def find_data(name: str, path: str | None) -> DataFolder | None:
    """Return the data at `path`. If `path` is None, return the default data of the recipe `name`, or None for a
    placeholder.

    Raises UserError if `look_at_data` fails, or if the recipe does not take data of this kind.
    """
    recipe = RECIPES[name]
    if path is None and recipe.default_data in (CHATS, PAIRS):
        return None
    try:
        data = look_at_data(path or recipe.default_data, (*recipe.kinds, *CHAT_KINDS, *TEXT_KINDS))
    except UnknownDataError as error:
        raise UserError(f"error: --data {path or recipe.default_data}: {error}") from None
    if data.kind not in recipe.kinds:
        others = [other for other, candidate in RECIPES.items() if data.kind in candidate.kinds]
        needs = " or ".join(f'"{kind}"' for kind in recipe.kinds)
        hint = f"; recipes for this data: {', '.join(others)}" if others else ""
        reason = f'has {data.description} (data.kind = "{data.kind}"), but the recipe {name} needs {needs}{hint}'
        raise UserError(f"error: --data {path}: {reason}")
    return data


def tables_of(name: str, inputs: Inputs) -> Iterator[Table]:
    """Yield the tables of a job file of the recipe `name`. Raises UserError for a reward model of a class of
    `transformers`."""
    recipe, model, data = RECIPES[name], inputs.model, inputs.data
    is_images = "images" in recipe.kinds
    batch, length = _batch_and_length(recipe, inputs)
    yield Table("job", [Row("name", inputs.name)])
    if is_images and data is not None:
        yield from _image_model(model, data)
    else:
        yield from _text_model(recipe, model)
    yield Table("data", [*_data(recipe, inputs), *(data.training_rows if data is not None else ())])
    yield Table("training", [*_training(recipe, inputs, batch), length.row])
    if recipe.lora_rank:
        yield Table("lora", list(_lora(recipe, model)))
    if recipe.is_reward:
        yield Table("loss", [Row("name", "reward")])
    elif "preferences" in recipe.kinds:
        yield Table("loss", [Row("name", "dpo")])
        reference = Row("reference", "base", "the model without its adapters; without [lora], name a folder")
        yield Table("loss.dpo", [reference, Row("beta", 0.1, "larger values keep the model closer to the reference")])
    elif not is_images and model is not None and _size(model, "vocab_size") >= 100_000:
        yield Table("loss", [Row("chunks", 8, "logits exist for one eighth of the classes at a time")])
    frozen = Row("frozen_storage_dtype", "bfloat16", "the base, which is not trained; adapters are in float32")
    computed = Row("param_dtype", "bfloat16", "dtype of computation; trained parameters are stored in float32")
    yield Table("precision", [computed, *([frozen] if recipe.lora_rank else [])])
    mode = inputs.sizes.activation_checkpoint
    if not is_images or mode != "none":
        comment = '"none" is faster, if the job then fits into memory'
        if mode == "none":
            comment = '"selective" and "full" save memory, but take more time'
        yield Table("activation_checkpoint", [Row("mode", mode, comment)])
    yield Table("optimizer", list(_optimizer(recipe, model)))
    yield Table(
        "lr_scheduler",
        [
            Row("kind", "cosine"),
            Row("warmup_steps", min(recipe.warmup_steps, max(1, length.steps // 10))),
            Row("min_lr_factor", recipe.min_lr_factor),
        ],
    )
    yield from _validation(recipe, inputs, length)
    yield Table(
        "checkpoint",
        [
            Row("enable", True, "the same command resumes after a stop"),
            Row("interval", max(1, length.steps // 5)),
            Row("keep_latest", 2),
        ],
    )
    yield Table("planner", [Row("device", inputs.device)] if inputs.device else [])


def _batch_and_length(recipe: Recipe, inputs: Inputs) -> tuple[int, _Length]:
    """Return the number of samples per step, and the length of the run.

    The number of samples per rank and step is the largest power of two that meets two conditions. A step has at most
    the recipe's `tokens_per_step`, and the run has at least the recipe's `least_steps`. A rank always has at least one
    sample.
    """
    model, data, seq_len = inputs.model, inputs.data, seq_len_of(recipe, inputs.model)
    tokens = min(recipe.tokens_per_step, 2**13) if _is_small(recipe, model) else recipe.tokens_per_step
    per_step = recipe.tokens_per_step if "images" in recipe.kinds else max(1, tokens // seq_len)
    epochs = recipe.epochs if model is not None or recipe.needs_model else recipe.epochs_from_random
    samples = None
    if data is not None:
        rows = [*_data(recipe, inputs), *data.training_rows]
        has_tokenizer = recipe.needs_model or model is not None
        samples = _count_samples(data, {row.key: row.value for row in rows}, seq_len, has_tokenizer)
    if samples is not None and recipe.least_steps:
        per_step = min(per_step, max(1, epochs * samples.number // recipe.least_steps))
    batch = inputs.ranks * 2 ** max(0, (per_step // inputs.ranks).bit_length() - 1)
    return batch, _length_of(recipe, epochs, samples, batch)


def _text_model(recipe: Recipe, model: ModelFolder | None) -> Iterator[Table]:
    if model is None and not recipe.needs_model:
        names = ", ".join(ARCHITECTURES["llama3"].flavors)
        flavor = Row("flavor", "debug", f"{names}; or the shape of `--model FOLDER`")
        yield Table("model", [Row("name", "llama3"), flavor])
        yield Table("tokenizer", [Row("kind", "bytes", '"huggingface" with a path for a real vocabulary')])
        return
    path = MODEL if model is None else model.path
    if recipe.needs_model or model is None:
        comment = "REPLACE: a Hugging Face folder" if model is None else "decides name and arguments of the model"
        rows = [Row("weights", path, comment)]
        if model is not None and model.name == HUGGINGFACE:
            if recipe.is_reward:
                raise UserError(f"error: --model {path}: a reward model needs a decoder of this package, such as Llama")
            rows = [Row("name", HUGGINGFACE, "the class of `transformers`"), Row("weights", path)]
        if recipe.is_reward:
            rows.append(Row("exclude_from_weights", ["output.weight"], "a new output layer, from random values"))
        yield Table("model", rows)
        if recipe.is_reward:
            yield Table("model.args", [Row("num_labels", 1, "the reward")])
    elif model.name == HUGGINGFACE:
        name = Row("name", HUGGINGFACE, "the class of `transformers`")
        yield Table("model", [name, Row("path", path, "only its config.json is read")])
    else:
        flavor = Row("flavor", model.flavor or ALL_IN_ARGS, f"the shape of {path}, with random values")
        yield Table("model", [Row("name", model.name), flavor])
        yield Table("model.args", [Row(key, value) for key, value in model.args.items()])
    yield Table("tokenizer", [Row("kind", "huggingface"), Row("path", path)])


def _image_model(model: ModelFolder | None, data: DataFolder) -> Iterator[Table]:
    size, channels, classes = (data.facts.get(name) for name in ("size", "channels", "classes"))
    if model is not None:
        rows: list[Row] = [Row("weights", model.path)]
        if model.name == HUGGINGFACE:
            rows = [Row("name", HUGGINGFACE, "the class of `transformers`"), *rows]
            if classes is not None:
                taken = image_format(model.config)
                if taken is None or classes != taken.num_classes:
                    rows.append(Row("args", {"num_labels": classes}))
                    rows.append(Row("exclude_from_weights", ["classifier.*"], "a new output layer, from random values"))
        yield Table("model", rows)
        return
    if data.path == SKLEARN_DIGITS:
        flavor = Row("flavor", "debug", "resnet18, resnet50, ... for larger images")
        yield Table("model", [Row("name", "resnet"), flavor])
        return
    args: dict[str, Any] = {"image_size": size, "in_channels": channels}
    if size is not None and size <= 64:
        args["stem"] = "small"
    if classes is not None:
        args["num_classes"] = classes
    rows = [Row("name", "resnet"), Row("flavor", "resnet18", 'or resnet34, resnet50; name = "vit" for a transformer')]
    yield Table("model", rows)
    known = [Row(key, value) for key, value in args.items()]
    unknown = [] if classes is not None else [Row("num_classes", 1000, "REPLACE: larger than the largest label")]
    yield Table("model.args", known + unknown)


def _lora(recipe: Recipe, model: ModelFolder | None) -> Iterator[Row]:
    """Yield the keys of `[lora]`. For a model of this package, the targets are the linear layers of attention and, if
    the model has no experts, of the feed-forward layers. For a class of `transformers`, the targets are `**.*_proj`."""
    targets = ["layers.*.attention.*", "layers.*.feed_forward.*"]
    comment = "modules that match: linear layers, embeddings, experts"
    if model is not None and model.name == HUGGINGFACE:
        targets, comment = ["**.*_proj"], "the usual names in `transformers`"
    elif model is not None and "experts" in model.args:
        targets, comment = targets[:1], 'add "layers.*.moe.experts" for adapters of experts'
    yield Row("targets", targets, comment)
    yield Row("rank", recipe.lora_rank)
    yield Row("alpha", 2.0 * recipe.lora_rank, "scale of the adapters: alpha / rank")


def _data(recipe: Recipe, inputs: Inputs, is_validation: bool = False) -> Iterator[Row]:
    data, model = inputs.data, inputs.model
    if data is None:
        yield Row("kind", recipe.kinds[0])
        yield Row("path", recipe.default_data, "REPLACE: JSON lines")
    else:
        path = data.path if not is_validation or data.validation is None else data.validation
        yield Row("kind", data.kind, "" if is_validation else data.description)
        yield Row("path", path)
    if data is not None and data.is_split:
        yield Row("split", "validation" if is_validation else "train")
    if recipe.kinds[0] in CHAT_KINDS and (data is None or data.kind in CHAT_KINDS):
        if model is not None and not model.has_chat_template:
            yield Row("template", "chatml", "the folder has no chat template of its own")
        if not is_validation and recipe.kinds[0] == "chat":
            yield Row("train_on", "assistant", 'targets: the turns of the assistant; other values: "last", "all"')
        if recipe.is_reward:
            yield Row("train_on", "end", "the reward is the output after the last token")
        if not is_validation:
            comment = 'examples longer than seq_len are skipped; other values: "right", "left", "stop"'
            yield Row("truncation", "skip", comment)
    own = {} if model is None else model.image_keys
    for row in data.rows if data is not None else ():
        is_size = row.key in ("resize", "crop")
        comment = f"size as in {FILE}; the aspect ratio is kept" if is_size else f"as in {FILE} of the model"
        yield Row(row.key, own[row.key], comment) if row.key in own else row


def _training(recipe: Recipe, inputs: Inputs, batch: int) -> Iterator[Row]:
    if "images" not in recipe.kinds:
        longest = inputs.model.longest if inputs.model is not None else None
        yield Row("seq_len", seq_len_of(recipe, inputs.model), f"the model takes up to {longest}" if longest else "")
    local = min(inputs.sizes.local_batch_size, batch // inputs.ranks)
    yield Row("local_batch_size", local, "samples of a rank in a microbatch")
    microbatches = batch // (local * inputs.ranks)
    division = f"{microbatches} microbatch{'es' * (microbatches > 1)} on {counted(inputs.ranks, 'rank')}"
    yield Row("global_batch_size", batch, f"samples of a step: {division}")


def seq_len_of(recipe: Recipe, model: ModelFolder | None) -> int:
    """Return `training.seq_len`: at most the longest sequence that the model takes; 256 for the flavor `debug`."""
    if model is None:
        return recipe.longest if recipe.needs_model else 256
    return min(recipe.longest, model.longest or recipe.longest)


def _optimizer(recipe: Recipe, model: ModelFolder | None) -> Iterator[Row]:
    lr = recipe.lr
    if "images" in recipe.kinds and model is not None:
        lr /= 10
    elif model is None and not recipe.needs_model and "images" not in recipe.kinds:
        lr = 1e-3
    yield Row("lr", lr, recipe.lr_comment)
    if recipe.weight_decay is not None:
        yield Row("weight_decay", recipe.weight_decay)


def _validation(recipe: Recipe, inputs: Inputs, length: _Length) -> Iterator[Table]:
    data = inputs.data
    if data is None or not (data.is_split or data.validation):
        return
    yield Table(
        "validation",
        [
            Row("freq", max(1, length.steps // 10), "steps between validations"),
            Row("max_samples", 512),
            Row("local_batch_size", max(1, inputs.sizes.local_batch_size)),
        ],
    )
    yield Table("validation.data", list(_data(recipe, inputs, is_validation=True)))


def _size(model: ModelFolder, *names: str) -> int:
    """Return the first integer among the values of `names` in a model's `config.json`; 0 if there is none."""
    return next((size for name in names if isinstance(size := model.config.get(name), int)), 0)


def _is_small(recipe: Recipe, model: ModelFolder | None) -> bool:
    """Return True for the flavor `debug`, and for a model folder whose hidden size is at most 256."""
    if model is None:
        return not recipe.needs_model
    return 0 < _size(model, "hidden_size", "n_embd") <= 256


def head_of(name: str, inputs: Inputs, file: str) -> Iterable[str]:
    """Return the comment lines at the head of a job file `file` of the recipe `name`."""
    ranks, file = f" --world-size {inputs.ranks}", quote(file)
    return (
        RECIPES[name].about,
        *inputs.sizes.comments,
        "",
        f"  titan-launch check --config {file}{ranks}",
        f"  titan-launch data --config {file} --samples 2",
        f"  titan-launch plan --config {file}{ranks}",
        f"  titan-launch launch --config {file}",
    )


_BYTES_PER_TOKEN = 4
"""Approximate bytes of text per token of a published tokenizer."""


@dataclass(frozen=True)
class _Samples:
    """The training samples of an epoch."""

    number: int
    is_exact: bool
    """False for an estimate from the sizes of files, or from the percentage of the validation split."""


def _count_samples(data: DataFolder, keys: Mapping[str, Any], seq_len: int, has_tokenizer: bool) -> _Samples | None:
    """Return the number of training samples of an epoch; None if this number is unknown before the data is read.

    `keys`: the keys of `[data]`. `has_tokenizer`: False if each byte is a token.
    """
    known = known_samples(DATA_KINDS[data.kind].model_validate(keys), seq_len)
    if known is not None:
        return _Samples(known, is_exact=True)
    share = 1 - keys.get("validation_percent", 5) / 100 if data.is_split else 1.0
    if data.num_images is not None:
        number = data.num_images * share
    elif data.num_bytes is not None:
        number = data.num_bytes * share / (_BYTES_PER_TOKEN if has_tokenizer else 1) / seq_len
    else:
        return None
    return _Samples(max(1, round(number)), is_exact=data.num_images is not None and not data.is_split)


@dataclass(frozen=True)
class _Length:
    """The length of a run."""

    row: Row
    """The key `epochs` or `steps` of `[training]`."""

    steps: int
    """Approximate number of steps, from which warm-up and intervals are computed."""


def _length_of(recipe: Recipe, epochs: int, samples: _Samples | None, batch: int) -> _Length:
    """Return the length of a run with `batch` samples per step."""
    steps = recipe.steps
    if samples is None:
        name, value, other = ("steps", steps, "epochs") if recipe.prefers_steps else ("epochs", epochs, "steps")
        return _Length(Row(name, value, f"`titan-launch data` shows how many {other} these are"), steps)
    needed = steps_of(epochs, samples.number, batch)
    about, note = ("", "") if samples.is_exact else ("about ", "; `titan-launch data` counts them")
    size = f"{counted(samples.number, 'sample')}{note}"
    if recipe.prefers_steps and steps < needed:
        return _Length(Row("steps", steps, f"{about}{steps * batch / samples.number:.2g} epochs of {size}"), steps)
    comment = f"{about}{counted(needed, 'step')}; an epoch has {about}{size}"
    return _Length(Row("epochs", epochs, comment), needed)
