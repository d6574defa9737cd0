"""The twin of a job: a small copy with the same structure and without dropout, which `titan-launch prove` trains. This
module does not import torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from titan_launch.config.axes import AXES, TENSOR
from titan_launch.config.job import JobConfig
from titan_launch.config.rules.loss import frozen_job
from titan_launch.config.sections.checkpoint import CheckpointConfig
from titan_launch.config.sections.data import FactoryData, separates_documents
from titan_launch.config.sections.model import HUGGINGFACE, LoRAConfig, ModelConfig
from titan_launch.config.sections.parallelism import ParallelismConfig
from titan_launch.config.sections.precision import Float8Config, KernelsConfig, PrecisionConfig
from titan_launch.config.sections.run import CommConfig, DebugConfig, GeneralConfig, MetricsConfig, PlannerConfig
from titan_launch.config.sections.tokenizer import BYTES_VOCABULARY, TokenizerConfig
from titan_launch.config.sections.training import Constant, TrainingConfig
from titan_launch.core.errors import config_error, scalars
from titan_launch.models.architectures import ALL_IN_ARGS, images_taken, resolve_args, vocabulary_taken
from titan_launch.models.args import TwinNeeds

STEPS = 3
"""Number of steps of each run of a proof. One step is too few: in the first step, the gradients of some parameters are
0. These are LoRA's A, and layers whose outputs are multiplied by weights that are still 0."""

SEQ_LEN = 16
VOCABULARY = 64
SAMPLES = "titan_launch.prove.samples:Samples"

_UNKNOWN_SHARDS = 8
"""Number of shards to assume for `data_parallel_shard_degree = -1`. Usual numbers of GPUs are multiples of 8."""

SECOND = "TWIN_OF_SECOND_MODEL"
"""Placeholder for a folder: each proof writes the twin of the reference or the teacher of the loss to a new folder."""

NAMED_AXES = {axis.name if axis.sends else axis.ranks: axis for axis in AXES.values()}
"""The axes of a layout by their names in a certificate. The axes of data parallelism are `replicas` and `shards`."""


@dataclass(frozen=True)
class Twin:
    """The small twin of a job, with the job's axes of parallelism. Each axis has 2 ranks."""

    config: JobConfig
    """The twin in fp32."""

    precision: JobConfig | None
    """The same twin in the precision of the job; None if this precision is fp32."""

    unshrunk: tuple[str, ...]
    """Sentences about the parts of the job that have not been shrunk."""

    unproven: tuple[str, ...]
    """Sentences about the parts of the job that a proof does not cover."""

    second: ModelConfig | None = None
    """The twin of the loss's second model; None if the loss has no second model. In `config.loss`, its folder is
    `SECOND`."""


def twin_of(config: JobConfig) -> Twin:
    """Return the small twin of a job. Raises ConfigError for a model that cannot be shrunk."""
    unshrunk: list[str] = []
    training, parallelism = config.training, config.parallelism
    seq_len = SEQ_LEN * (1 if config.loss.kind.data_kind is None else 2)
    model = _model(config, seq_len, unshrunk)
    second = config.loss.frozen_model()
    loss, of_second = config.loss, None
    if second is not None:
        name, key = loss.name, second.key[-1]
        settings = getattr(loss, name).model_copy(update={key: SECOND, "dtype": None})
        loss = loss.model_copy(update={name: settings})
        of_second = _model(frozen_job(config, second), seq_len, unshrunk)
    lora = config.lora.model_copy(update={"dropout": 0.0, "adapter": None, **_small_ranks(config.lora)})
    own = config.optimizer
    optimizer = own.model_copy(update={"lr": max(own.lr, 1e-3), "eps": max(own.eps, 1e-5)})
    twin = JobConfig().model_copy(
        update={
            "job": GeneralConfig(name="twin", device="cpu"),
            "model": model,
            "lora": lora,
            "tokenizer": TokenizerConfig(),
            "data": _data(config, model, unshrunk),
            "training": _training(training, seq_len),
            "loss": loss,
            "precision": _in_fp32(config.precision),
            "batchnorm": config.batchnorm,
            "activation_checkpoint": config.activation_checkpoint.model_copy(update={"offload": False}),
            "gradient_accumulation": config.gradient_accumulation,
            "compile": config.compile.model_copy(update={"cache_folder": None}),
            "kernels": KernelsConfig(),
            "float8": Float8Config(),
            "parallelism": _smallest_degrees(parallelism, unshrunk),
            "optimizer": optimizer.model_copy(update=_EXACT_OPTIMIZER),
            "lr_scheduler": Constant(kind="constant"),
            "ema": config.ema.model_copy(update={"start_step": 0, "every_steps": 1, "validate_with": "both"}),
            "checkpoint": CheckpointConfig(save_last=False),
            "metrics": MetricsConfig(log_freq=STEPS, enable_tensorboard=False),
            "planner": PlannerConfig(),
            "comm": CommConfig(hang_seconds=0, flight_recorder_size=0),
            "debug": DebugConfig(audit_precision=False),
        }
    )
    of_job = {"precision": config.precision, "optimizer": optimizer}
    is_fp32 = twin.precision == config.precision and twin.optimizer == optimizer
    precision = None if is_fp32 else twin.model_copy(update=of_job)
    return Twin(twin, precision, tuple(dict.fromkeys(unshrunk)), tuple(_unproven(config, twin)), of_second)


_EXACT_OPTIMIZER = {"state_dtype": None, "rounding": "nearest", "master_weights": False}
"""Values of `[optimizer]` for an update in fp32."""


def _in_fp32(precision: PrecisionConfig) -> PrecisionConfig:
    """Return the section with float32 in place of each dtype that it sets, and as `param_dtype`. Its rules stay, so
    that the FSDP2 units are the same."""

    def exact(section: Any) -> dict[str, Any]:
        return {name: "float32" for name, value in section.changed() if name.endswith("dtype") and value is not None}

    rules = tuple(rule.model_copy(update=exact(rule)) for rule in precision.rules)
    return precision.model_copy(update={**exact(precision), "param_dtype": "float32", "rules": rules})


def _training(training: TrainingConfig, seq_len: int) -> TrainingConfig:
    kept = {name: getattr(training, name) for name in ("max_norm", "trainable", "frozen", "seed")}
    unfreeze = tuple(entry.model_copy(update={"after_step": 1}) for entry in training.unfreeze)
    return TrainingConfig(seq_len=seq_len, steps=STEPS).model_copy(update={**kept, "unfreeze": unfreeze})


def _small_ranks(lora: LoRAConfig) -> dict[str, Any]:
    def small(rank: int | None) -> int | None:
        return None if rank is None else min(rank, 4)

    rules = tuple(rule.model_copy(update={"rank": small(rule.rank)}) for rule in lora.rules)
    return {"rank": small(lora.rank), "rules": rules}


def _smallest_degrees(parallelism: ParallelismConfig, unshrunk: list[str]) -> ParallelismConfig:
    """Return the section with 2 ranks on each axis that the job uses, and no split points. If the job has split points,
    append a sentence about them to `unshrunk`."""
    degrees = {axis.key[1]: 1 if parallelism.degree(axis) == 1 else 2 for axis in AXES.values()}
    if parallelism.pipeline_parallel_split_points:
        unshrunk.append("parallelism.pipeline_parallel_split_points: the twin's stages are divided evenly")
    return parallelism.model_copy(update={**degrees, "pipeline_parallel_split_points": ()})


def _stages_of_twin(parallelism: ParallelismConfig) -> int:
    """Return the number of pipeline stages that the twin of a job has; 1 without pipeline parallelism."""
    return 1 if parallelism.pipeline_parallel_degree == 1 else 2 * parallelism.stages_per_rank


def num_microbatches(config: JobConfig) -> int:
    """Return the number of microbatches of a step of a twin: 4 for a pipeline, else 2."""
    return 4 if config.parallelism.pipeline_parallel_degree > 1 else 2


# The model


def _model(config: JobConfig, seq_len: int, unshrunk: list[str]) -> ModelConfig:
    model, wanted = config.model, dict(config.prove.args)
    without_weights = model.model_copy(update={"weights": None, "exclude_from_weights": ()})
    if model.is_of_package:
        return _of_package(config, without_weights, wanted, seq_len, unshrunk)
    if model.name == HUGGINGFACE:
        return _of_transformers(config, without_weights, wanted, seq_len, unshrunk)
    if not wanted:
        unshrunk.append(f"the twin keeps the arguments of model {model.name}; set smaller arguments in [prove.args]")
    return without_weights.model_copy(update={"args": {**model.args, **wanted}})


def _of_package(
    config: JobConfig, model: ModelConfig, wanted: dict[str, Any], seq_len: int, unshrunk: list[str]
) -> ModelConfig:
    args, parallelism = resolve_args(model.name, model.flavor, model.args), config.parallelism
    shards = parallelism.data_parallel_shard_degree
    keeps_depth = _names_layers(config)
    needs = TwinNeeds(
        shards=(_UNKNOWN_SHARDS if shards == -1 else shards) * parallelism.degree(TENSOR),
        is_tensor_parallel=parallelism.degree(TENSOR) > 1,
        stages=_stages_of_twin(parallelism),
        keeps_depth=keeps_depth,
        seq_len=config.training.seq_len,
        twin_seq_len=seq_len,
    )
    changes = args.twin(needs) | wanted
    if not changes:
        unshrunk.append(f"model {model.name} has no rule for a smaller size; set smaller arguments in [prove.args]")
    elif keeps_depth:
        unshrunk.append("the number of layers: globs of the job name layers by number")
    table = {**args.model_dump(mode="json"), **changes}
    small = {name: value for name, value in table.items() if value is not None}
    try:
        checked = type(args).model_validate(small)
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{first['msg']}; set a value that the twin accepts"
        raise config_error(("prove", "args", *first["loc"]), reason, first["input"]) from None
    for names, reason in checked.problems():
        text = f"the small twin of this model is not valid: {reason}; set prove.args.{names[0]} to a size that fits"
        raise config_error(("prove", "args", names[0]), text)
    return model.model_copy(update={"flavor": ALL_IN_ARGS, "args": small})


_GLOB_KEYS = ("lora", "training", "precision", "activation_checkpoint", "optimizer", "float8")
_NUMBERED = re.compile(r"[.\[]\d")


def _names_layers(config: JobConfig) -> bool:
    """Return True if a glob of the job may contain the number of a layer (a digit after `.` or `[`), which a twin with
    fewer layers may lack."""
    values = (value for name in _GLOB_KEYS for _, value in scalars(getattr(config, name).model_dump(mode="json")))
    return any(_NUMBERED.search(value) for value in values if isinstance(value, str))


_SIZES: tuple[tuple[str, int], ...] = (
    ("(num_hidden_layers|n_layer|n_layers|num_layers)", 2),
    ("(num_attention_heads|n_head|n_heads|num_heads)", 4),
    ("(num_key_value_heads|num_kv_heads)", 2),
    ("head_dim", 8),
    ("(hidden_size|n_embd|d_model|word_embed_proj_dim)", 32),
    ("(.*intermediate_size|n_inner|ffn_dim|d_ff)", 48),
    ("embedding_size", 16),
    ("vocab_size", VOCABULARY),
    ("(max_position_embeddings|n_positions|n_ctx)", 64),
    ("(num_experts|num_local_experts|n_routed_experts)", 4),
    ("(num_experts_per_tok|top_k_experts)", 2),
    ("sliding_window", SEQ_LEN // 2 - 1),
    ("(q_lora_rank|kv_lora_rank)", 16),
    ("(qk_nope_head_dim|v_head_dim)", 8),
    ("qk_rope_head_dim", 4),
    ("(n_group|topk_group|first_k_dense_replace)", 1),
)
"""Patterns of keys in `config.json`, with the sizes of a twin."""

_STAGES = {"depths": 1, "layer_depths": 1, "hidden_sizes": 16, "embed_dims": 16, "num_attention_heads": 2}
"""Keys of `config.json` whose lists have an entry for each stage of an image model, with the sizes of a twin."""

_LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Keys of `config.json` whose lists have an entry for each layer."""


def _of_transformers(
    config: JobConfig, model: ModelConfig, wanted: dict[str, Any], seq_len: int, unshrunk: list[str]
) -> ModelConfig:
    """Return the twin of a class of `transformers`, with the sizes of `_SIZES` and without dropout. The twin has 2
    layers, or more if there are more types of layers or pipeline stages. If globs of the job name layers by number,
    the sizes stay those of the job. `wanted`: values of `[prove.args]`, which replace all others. `unshrunk`: gets a
    sentence if sizes stay, or if the number of layers is unknown."""
    args = dict(model.args)
    if _names_layers(config):
        kept = f"the twin keeps the {'other ' * bool(wanted)}arguments of model {args.get('model_type')}"
        advice = "" if wanted else "; set smaller values in [prove.args]"
        unshrunk.append(f"{kept}, because globs of the job name layers by number{advice}")
        return model.model_copy(update={"args": {**_without_dropout(args), **wanted}})
    small: dict[str, Any] = {}
    for key, value in args.items():
        size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, key)), None)
        if size is not None and type(value) is int:
            small[key] = min(value, size)
    for key, size in _STAGES.items():
        if isinstance(args.get(key), list):
            small[key] = [min(value, size) for value in args[key]]
    image, patch = args.get("image_size"), args.get("patch_size")
    if isinstance(image, int) and isinstance(patch, int) and image > 2 * patch and "depths" not in args:
        small["image_size"] = 2 * patch  # later stages of a model make the image smaller
    numbers = [key for key, value in args.items() if type(value) is int and value > 0]
    depth, heads, kv_heads = (
        next((key for key in numbers if re.fullmatch(pattern, key)), None) for pattern, _ in _SIZES[:3]
    )
    if depth is not None:
        kinds = {key: list(dict.fromkeys(args[key])) for key in _LISTS if isinstance(args.get(key), list) and args[key]}
        needed = max(small[depth], _stages_of_twin(config.parallelism), *map(len, kinds.values()))
        small[depth] = min(args[depth], needed)
        small |= {key: [own[index % len(own)] for index in range(small[depth])] for key, own in kinds.items()}
    if heads is not None and kv_heads is not None:
        ratio = min(2, args[heads] // args[kv_heads])
        small[kv_heads] = min(2, args[kv_heads])
        small[heads] = small[kv_heads] * ratio
    if "vocab_size" in small and config.parallelism.degree(TENSOR) == 1 and args["vocab_size"] % 2:
        small["vocab_size"] = VOCABULARY - 1
    small |= {key: None for key in args if key.endswith("token_id") and isinstance(args[key], int)}
    if depth is None and "depths" not in small:
        unshrunk.append(f"model {args.get('model_type')}: its config.json has no known key for the number of layers")
    return model.model_copy(update={"args": {**_without_dropout(args), **small, **wanted}})


def _without_dropout(args: Mapping[str, Any]) -> dict[str, Any]:
    is_dropout = re.compile(".*(dropout|drop_rate|drop_path_rate|_pdrop|dropout_prob)")
    return {
        key: 0.0 if is_dropout.fullmatch(key) and isinstance(value, (int, float)) else value
        for key, value in args.items()
    }


# The data


def _data(config: JobConfig, model: ModelConfig, unshrunk: list[str]) -> Any:
    """Return a section `[data]` with random samples of the same form as those of the job. If the size of images is
    unknown, append a sentence to `unshrunk`, and return the job's own section without worker processes."""
    if config.data.unit == "images":
        taken = images_taken(model)
        if taken is None or taken.height is None or taken.width is None:
            unshrunk.append("[data]: the model does not tell the size of its images, so the job's own images are used")
            return config.data.model_copy(update={"num_workers": 0})
        args = {"shape": [taken.channels, taken.height, taken.width], "num_classes": taken.num_classes}
        return FactoryData(kind=SAMPLES, samples="images", shuffle=False, args=args)
    documents = config.loss.kind.data_kind or separates_documents(config.data)
    args = {"num_classes": _vocabulary(config, model), "documents": documents}
    return FactoryData(kind=SAMPLES, samples="documents" if documents else "tokens", shuffle=False, args=args)


def _vocabulary(config: JobConfig, model: ModelConfig) -> int:
    """Return the number of different tokens in the samples: `VOCABULARY`, or the vocabulary of the job if it is
    smaller. `prove.vocab_size` sets the vocabulary of the job. Without this key, the model or the data sets the
    vocabulary."""
    known = config.prove.vocab_size or vocabulary_taken(model) or model.args.get("vocab_size")
    known = known if isinstance(known, int) else config.data.own_vocabulary() or BYTES_VOCABULARY
    return min(known, VOCABULARY)


def _unproven(config: JobConfig, twin: JobConfig) -> Iterator[str]:
    """Yield a sentence for each part of the job that a proof with `twin` does not cover."""
    if config.job.device != "cpu":
        yield "kernels of CUDA and NCCL: all runs were on CPUs with gloo"
    if config.float8.enable:
        yield "[float8]: the twin computes the converted layers in the dtypes of [precision]"
    if config.compile.enable and config.compile.backend == "inductor":
        yield "compile.backend: at most one run, on one process, uses the kernels of inductor; other runs use aot_eager"
    if config.training.enable_cpu_offload:
        yield "training.enable_cpu_offload: the twin makes no copies between a host and a GPU"
    if config.activation_checkpoint.offload:
        yield "activation_checkpoint.offload: the twin makes no copies between a host and a GPU"
    if list(config.kernels.changed()):
        yield "[kernels]: the twin uses CPU kernels, so this section has no effect in a proof"
    if config.lora.dropout:
        yield "lora.dropout: the twin trains without dropout"
    if config.data.kind != "synthetic" and twin.data.kind == SAMPLES:
        yield f"[data]: random samples stand in for data of the kind {config.data.kind}"


def size_of(config: JobConfig) -> str:
    """Return the positive integers among the arguments of a twin's model, with their names, in one line."""
    sizes = {key: value for key, value in config.model.args.items() if type(value) is int and value > 0}
    return ", ".join(f"{key} {value}" for key, value in sizes.items())


def structure(config: JobConfig) -> str:
    """Return a job as text. Two jobs with the same values of all keys have the same text."""
    return json.dumps(config.model_dump(mode="json"), sort_keys=True)
