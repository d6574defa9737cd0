"""Conversion of TorchTitan v0.2 job files. For keys that cannot be converted, most remedies come from
`TORCHTITAN_KEYS`.

As far as possible, the converted job trains like the old job. So if the old file omits a key whose default differs
here, the new file sets TorchTitan's default.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from titan_launch.config.axes import MODEL_AXES, REPLICATE, SHARD
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.foreign_keys import TORCHTITAN_KEYS, foreign_key
from titan_launch.config.loading.schema_walk import tables
from titan_launch.config.sections.model import HUGGINGFACE
from titan_launch.config.sections.parallelism import ParallelismConfig
from titan_launch.config.sections.tokenizer import read_settings
from titan_launch.core.errors import ConfigError, KeyPath, Problem, config_error, format_key, leaves
from titan_launch.core.terminal import counted
from titan_launch.models.architectures import ALL_IN_ARGS, ARCHITECTURES

DEFAULTS: dict[str, Any] = {
    "model.name": "llama3",
    "model.flavor": "debugmodel",
    "model.hf_assets_path": "./tests/assets/tokenizer",
    "model.converters": [],
    "training.dataset": "c4_test",
    "training.local_batch_size": 8,
    "training.global_batch_size": -1,
    "training.seq_len": 2048,
    "training.steps": 10_000,
    "optimizer.lr": 8e-4,
    "optimizer.weight_decay": 0.1,
    "lr_scheduler.warmup_steps": 200,
    "lr_scheduler.decay_type": "linear",
    "lr_scheduler.min_lr_factor": 0.0,
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "2",
    "metrics.enable_tensorboard": False,
    "metrics.enable_wandb": False,
    "profiling.enable_profiling": False,
    "profiling.enable_memory_snapshot": False,
    "profiling.profile_freq": 10,
    "profiling.profiler_active": 1,
    "parallelism.pipeline_parallel_degree": 1,
    "parallelism.pipeline_parallel_microbatch_size": 1,
    "parallelism.pipeline_parallel_schedule": "1F1B",
    "compile.enable": False,
    "compile.components": ["model", "loss"],
    "checkpoint.enable": False,
    "validation.enable": False,
    "validation.dataset": "c4_validation",
    "validation.freq": 10,
    "validation.steps": -1,
    "validation.local_batch_size": 8,
}
"""TorchTitan's defaults of keys that the conversion reads. The type of a default is also the type of its key."""

_DATASETS: dict[str, dict[str, Any]] = {
    "c4": {"kind": "huggingface", "path": "allenai/c4", "subset": "en", "streaming": True, "shuffle": False},
    "c4_test": {"kind": "jsonl", "path": "tests/assets/c4_test", "shuffle": False},
    "c4_validation": {"kind": "huggingface", "path": "allenai/c4", "subset": "en", "hf_split": "validation"},
}
"""The keys of `[data]` for each data set that TorchTitan knows by name."""

_SWITCHES = {
    "fault_tolerance": ("enable",),
    "memory_estimation": ("enable",),
    "experimental": ("custom_import", "custom_args_module"),
}
"""TorchTitan's sections without a counterpart here, each with the keys that switch the section on."""

_COSMETIC = (
    "job.print_config",
    "job.save_config_file",
    "metrics.save_for_all_ranks",
    "metrics.disable_color_printing",
    "model.print_after_conversion",
    "comm.save_traces_folder",
    "comm.save_traces_file_prefix",
    "training.dataloader.persistent_workers",
    "training.dataloader.pin_memory",
    "training.dataloader.prefetch_factor",
    "activation_checkpoint.visualize_memory_budget_pareto",
    "activation_checkpoint.debug",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
    "activation_checkpoint.determinism_check",
    "activation_checkpoint.early_stop",
    "activation_checkpoint.preserve_rng_state",
    "checkpoint.folder",
    "checkpoint.export_dtype",
    "checkpoint.last_save_model_only",
    "checkpoint.enable_first_step_checkpoint",
    "checkpoint.enable_ft_dataloader_checkpoints",
)
"""Keys of TorchTitan that are not converted and do not change the training. (Keys whose remedy begins with "not needed"
are not listed, but treated in the same way.)"""


def _llama4(**sizes: Any) -> tuple[str, str | None, dict[str, Any]]:
    """Return name, flavor and arguments for `[model]`: the class `Llama4ForCausalLM` of `transformers`, with the sizes
    of TorchTitan's Llama 4."""
    layers = sizes["num_hidden_layers"]
    full_attention = {"no_rope_layers": [1] * layers, "layer_types": ["full_attention"] * layers}
    common = {"model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], "num_experts_per_tok": 1}
    plain = {"use_qk_norm": False, "attn_temperature_tuning": False, "max_position_embeddings": 1_048_576}
    return HUGGINGFACE, None, {**common, **sizes, **plain, **full_attention}


_LLAMA4_17B: dict[str, Any] = {
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 202_048,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
}
_LLAMA4_DEBUG: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 16,
    "vocab_size": 2048,
    "intermediate_size": 512,
    "intermediate_size_mlp": 768,
    "num_local_experts": 8,
    "interleave_moe_layer_step": 2,
}
_LLAMA4_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}

_MODELS: dict[tuple[str, str], tuple[str, str | None, dict[str, Any]]] = {
    ("llama3", "debugmodel"): (
        "llama3",
        "debug",
        {"n_heads": 16, "n_kv_heads": 16, "vocab_size": 2048, "rope_scaling": {"factor": 8.0}},
    ),
    ("qwen3", "debugmodel"): (
        "qwen3",
        ALL_IN_ARGS,
        {
            "dim": 256,
            "n_layers": 8,
            "n_heads": 16,
            "n_kv_heads": 8,
            "head_dim": 128,
            "hidden_dim": 3072,
            "vocab_size": 2048,
            "tie_embeddings": True,
            "qk_norm": True,
            "norm_eps": 1e-6,
            "rope_theta": 1e6,
        },
    ),
    ("qwen3", "30B-A3B"): ("qwen3_moe", "30B-A3B", {}),
    ("qwen3", "235B-A22B"): ("qwen3_moe", "235B-A22B", {}),
    ("deepseek_v3", "671B"): ("deepseek_v3", "671B-A37B", {}),
    ("llama4", "debugmodel"): _llama4(**_LLAMA4_DEBUG, rope_parameters=_LLAMA4_ROPE),
    ("llama4", "17bx16e"): _llama4(
        **_LLAMA4_17B, num_local_experts=16, interleave_moe_layer_step=1, rope_parameters=_LLAMA4_ROPE
    ),
    ("llama4", "17bx128e"): _llama4(
        **_LLAMA4_17B,
        num_local_experts=128,
        interleave_moe_layer_step=2,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    ),
}
"""Name, flavor and arguments for `[model]`, by the (name, flavor) of TorchTitan. A model that has the same name and
flavor in both programs is not listed."""


@dataclass
class Migration:
    """A job file of TorchTitan, and the job file into which it is converted."""

    old: Mapping[str, Any]
    """The old job file as a table."""

    ranks: int | None = None
    """World size, from which numbers of samples are computed; None if it is unknown."""

    new: dict[KeyPath, tuple[Any, str]] = field(default_factory=dict)
    """Value and comment of each key of the new job file."""

    lost: list[Problem] = field(default_factory=list)
    """Keys of the old file that are not converted, or only approximately: why, and what to do instead."""

    needless: list[Problem] = field(default_factory=list)
    """Keys of the old file that are not converted, and have no effect on the training."""

    done: set[str] = field(default_factory=set)
    """Keys of the old file that are already converted, or are in `lost` or `needless`."""

    def value(self, key: str) -> Any:
        """Return the value of a key of the old file, or TorchTitan's default (None if `DEFAULTS` lacks it). Mark the
        key as converted. Raises the ConfigError of `_value`."""
        self.done.add(key)
        return _value(self.old, key, DEFAULTS.get(key))

    def is_given(self, key: str) -> bool:
        """Return True if the old file sets a key."""
        return _value(self.old, key) is not None

    def put(self, key: str, value: Any, comment: str = "") -> None:
        """Set a key of the new file."""
        self.new[tuple(key.split("."))] = (value, comment)

    def keep(self, *keys: str) -> None:
        """Copy the values of keys that have the same name and meaning in both files."""
        for key in keys:
            self.put(key, self.value(key))

    def drop(self, key: str, reason: str = "") -> None:
        """Add a key of the old file to `lost`, if the file sets the key. Mark the key as done. If `reason` is empty,
        the reason is the remedy of `foreign_key`, or says that the key is not supported."""
        self._note(self.lost, key, reason)

    def ignore(self, key: str, reason: str = "") -> None:
        """Add a key of the old file to `needless`, as `drop` adds a key to `lost`."""
        self._note(self.needless, key, reason)

    def _note(self, notes: list[Problem], key: str, reason: str) -> None:
        self.done.add(key)
        if self.is_given(key):
            path = tuple(key.split("."))
            remedy = foreign_key(path)
            text = reason or (remedy[0] if remedy else "not supported; remove this key")
            notes.append(Problem(path, text, _value(self.old, key)))

    @property
    def is_of_transformers(self) -> bool:
        """True if the model of the new job is a class of `transformers`. `_model` must have run before."""
        return self.new["model", "name"][0] == HUGGINGFACE

    def rest(self, section: str = "") -> list[tuple[str, Any]]:
        """Return (key, value) for each key of the old file, or of one section, that is not in `done` yet."""
        table = {section: self.old.get(section, {})} if section else self.old
        return [(key, value) for key, value in leaves(table) if key not in self.done]


def migrate(old: Mapping[str, Any], ranks: int | None = None) -> Migration:
    """Convert a job file of TorchTitan v0.2. `ranks`: the world size, if it is known. Raises ConfigError for a value
    that TorchTitan refuses (see `_value`)."""
    migration = Migration(old, ranks)
    for step in (_job, _model, _data, _batch, _optimizer, _schedule, _float8, _parallelism, _switches):
        step(migration)
    for step in (_blocks, _checkpoint, _validation, _profiling, _others):
        step(migration)
    return migration


def _value(table: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value of a key of the old file, or `default` if the file does not set it. Raises ConfigError if the
    value does not have the type that TorchTitan requires, or is below 1 where TorchTitan requires at least 1."""
    found: Any = table
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return default
        found = found[part]
    kind = _TYPES.get(key, object)
    is_right = isinstance(found, kind) and (isinstance(found, bool) <= (kind in (bool, object)))
    if not is_right or (kind is list and not all(isinstance(item, str) for item in found)):
        raise config_error(tuple(key.split(".")), f"must be {_NOUNS[kind]}", found)
    if kind is int and found < 1 and key in _POSITIVE:
        raise config_error(tuple(key.split(".")), "must be at least 1", found)
    return found


_NOUNS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    int | float: "a number",
    str: "a string",
    str | int: "a string",
    list: "an array of strings",
}
"""The name of each type in messages."""

_DEGREES = (*(".".join(axis.key) for axis in MODEL_AXES), "parallelism.expert_tensor_parallel_degree")
_STRINGS = (
    "job.description",
    "model.tokenizer_path",
    "training.dataset_path",
    "validation.dataset_path",
    "checkpoint.initial_load_path",
    "checkpoint.async_mode",
)
_TYPES: dict[str, Any] = {
    **{key: int | float if isinstance(default, float) else type(default) for key, default in DEFAULTS.items()},
    **dict.fromkeys((*_DEGREES, ".".join(SHARD.key), ".".join(REPLICATE.key)), int),
    **dict.fromkeys(_STRINGS, str),
    "training.dataloader.num_workers": int,
    "checkpoint.exclude_from_loading": list,
    "quantize.linear.float8.filter_fqns": list,
    "activation_checkpoint.selective_ac_option": str | int,
}
"""The type of each key that the conversion reads."""

_POSITIVE = (
    "training.steps",
    "training.local_batch_size",
    "training.seq_len",
    "profiling.profile_freq",
    "profiling.profiler_active",
    *_DEGREES,
)


def _job(job: Migration) -> None:
    description = job.value("job.description")
    name = "_".join("".join(c if c.isascii() and c.isalnum() else " " for c in description or "").split()).lower()
    job.put("job.name", name or "migrated", "name of the run folder")
    job.keep("metrics.enable_tensorboard")
    if job.value("metrics.enable_wandb"):
        job.put("metrics.sinks", ["wandb"])


def _model(job: Migration) -> None:
    name, flavor = job.value("model.name"), job.value("model.flavor")
    base, _, kernel = str(flavor).partition("_")
    packed = kernel if kernel in ("flex", "varlen", "flex_attn", "varlen_attn") else ""
    own, size, args = _MODELS.get((name, base if packed else flavor), (name, base if packed else flavor, {}))
    job.put("model.name", own, f"{name} {flavor} of TorchTitan")
    if size is not None:
        job.put("model.flavor", size)
    for key, value in args.items():
        job.put(f"model.args.{key}", value)
    if packed:
        remedy = 'to prevent this, set "data.packing" = "documents", which a stream does not support'
        job.drop("model.flavor", f"in the new job, documents of a sample attend to each other; {remedy}")
    elif own == HUGGINGFACE:
        reason = (
            "the new job uses the class of transformers; unlike the router of TorchTitan, the router of this class has "
            "no bias that balances the experts"
        )
        job.drop("model.name", reason)
    elif own not in ARCHITECTURES:
        reason = 'no model of this package; choose one in docs/reference/job_file.md, or set "model.name" to a factory'
        job.drop("model.name", reason)
    elif size not in (*ARCHITECTURES[own].flavors, ALL_IN_ARGS):
        job.drop("model.flavor", f"no flavor of {own} in this package; choose one in docs/reference/job_file.md")


def _data(job: Migration) -> None:
    folder = job.value("model.hf_assets_path")
    if job.is_given("model.tokenizer_path"):
        folder = job.value("model.tokenizer_path")
    job.put("tokenizer.kind", "huggingface")
    job.put("tokenizer.path", folder)
    with suppress(ConfigError):
        token = read_settings(Path(folder), ("tokenizer", "path"), folder).get("bos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token and isinstance(token, str):
            job.put("tokenizer.begin_of_document", token, "TorchTitan begins documents with the bos_token")
    _dataset(job, "training", "data")
    workers = job.value("training.dataloader.num_workers")
    if workers:
        is_stream = job.new.get(("data", "streaming"), (False,))[0]
        job.put("data.num_workers", min(workers, 1) if is_stream else workers)


def _dataset(job: Migration, section: str, table: str) -> None:
    """Convert `dataset` and `dataset_path` of the old section `section` to the new table `table`."""
    name, path = job.value(f"{section}.dataset"), job.value(f"{section}.dataset_path")
    keys = dict(_DATASETS.get(str(name).lower(), {"kind": "huggingface", "path": name}))
    if str(name).lower() not in _DATASETS:
        job.drop(f"{section}.dataset", f"not a data set of TorchTitan itself; check the keys of [{table}]")
    if path is not None:
        keys["path"] = path
    for key, value in keys.items():
        job.put(f"{table}.{key}", value)


def _data_parallel_ranks(job: Migration) -> int | None:
    """Return the number of data-parallel ranks of the old job; None if this number depends on the world size, and the
    world size is unknown."""
    shard = _value(job.old, ".".join(SHARD.key), -1)
    if shard > 0:
        return int(shard * _value(job.old, ".".join(REPLICATE.key), 1))
    return None if job.ranks is None else job.ranks // _ranks_of_a_replica(job)


def _ranks_of_a_replica(job: Migration) -> int:
    """Return the product of the old file's degrees of tensor, context and pipeline parallelism."""
    return math.prod(_value(job.old, ".".join(axis.key), 1) for axis in MODEL_AXES if axis.is_factor)


def _batch(job: Migration) -> None:
    """Convert the batch size and the number of steps. In TorchTitan, `local_batch_size` is divided into the
    microbatches of a pipeline. Here, `local_batch_size` is the size of one microbatch."""
    local, total = job.value("training.local_batch_size"), job.value("training.global_batch_size")
    job.keep("training.seq_len", "training.steps")
    pipeline, microbatch = "parallelism.pipeline_parallel_degree", "parallelism.pipeline_parallel_microbatch_size"
    divides, of_pipeline = job.value(pipeline) > 1 and not job.is_of_transformers, job.value(microbatch)
    further = _ranks_of_a_replica(job) if job.is_of_transformers and total <= 0 else 1  # they become data-parallel
    job.put("training.local_batch_size", of_pipeline if divides else max(1, local // further))
    if local % further:
        samples = counted(local, "sample")
        reason = f"{samples} cannot be divided among the {further} ranks that replace each data-parallel rank"
        job.drop("training.local_batch_size", f'{reason}; set "training.global_batch_size"')
    if divides:
        job.keep(pipeline)
    if total > 0:
        job.put("training.global_batch_size", total)
    elif divides:
        ranks = _data_parallel_ranks(job)
        if ranks is not None:
            job.put("training.global_batch_size", local * ranks)
        else:
            remedy = f"set training.global_batch_size to {local} x this number, or use --world-size of `migrate`"
            job.drop(pipeline, f"the number of data-parallel ranks is unknown; {remedy}")


def _optimizer(job: Migration) -> None:
    job.keep("optimizer.lr", "optimizer.weight_decay")
    if decay := job.value("optimizer.weight_decay"):
        groups = [{"match": "**", "weight_decay": decay}]
        job.put("optimizer.param_groups", groups, "TorchTitan also decays norms and embeddings")
    if job.value("optimizer.name") not in (None, "AdamW"):
        job.drop("optimizer.name", 'the new job uses AdamW; to use another algorithm, set "optimizer.name" in it')


def _schedule(job: Migration) -> None:
    """Convert the learning rate schedule. TorchTitan has only one schedule: warm-up, a plateau, and a decay. If
    `decay_ratio` is not set, the decay begins right after warm-up."""
    warmup, kind = job.value("lr_scheduler.warmup_steps"), job.value("lr_scheduler.decay_type")
    ratio, steps = job.value("lr_scheduler.decay_ratio"), job.value("training.steps")
    total = job.value("lr_scheduler.total_steps")
    if total not in (None, steps):
        job.drop("lr_scheduler.total_steps")
    if ratio is None and kind in ("linear", "cosine"):
        job.put("lr_scheduler.kind", kind)
    else:
        job.put("lr_scheduler.kind", "warmup_stable_decay")
        rest = max(0, steps - warmup) / steps
        job.put("lr_scheduler.decay_ratio", round(rest, 6) if ratio is None else ratio)
        job.put("lr_scheduler.decay_type", kind)
    job.keep("lr_scheduler.warmup_steps", "lr_scheduler.min_lr_factor")


def _float8(job: Migration) -> None:
    """Convert float8 training. In TorchTitan, `quantize.*` has an effect only for the converters that
    `model.converters` names."""
    converters = job.value("model.converters")
    section, tensor = "quantize.linear.float8", _value(job.old, "parallelism.tensor_parallel_degree", 1)
    is_wanted = "float8" in converters or section in converters
    if is_wanted and tensor > 1:
        reason = f"float8 is not supported with parallelism.tensor_parallel_degree = {tensor}; the job computes in bf16"
        job.drop("model.converters", f"{reason}. For float8, set the degree to 1, and float8.enable = true")
    elif is_wanted:
        recipe = job.value(f"{section}.recipe_name") or "tensorwise"
        job.put("float8.enable", True)
        job.put("float8.recipe", recipe)
        for name, key in (("enable_fsdp_float8_all_gather", "all_gather"), ("emulate", "emulate")):
            if (value := job.value(f"{section}.{name}")) and (key != "all_gather" or recipe == "tensorwise"):
                job.put(f"float8.{key}", value)
        precomputes = TORCHTITAN_KEYS["float8.precompute_float8_dynamic_scale_for_fsdp"]
        job.ignore(f"{section}.precompute_float8_dynamic_scale_for_fsdp", precomputes)
        skipped = [name for name in job.value(f"{section}.filter_fqns") or () if name not in ("output", "router.gate")]
        if skipped:
            job.drop(f"{section}.filter_fqns", TORCHTITAN_KEYS["float8.filter_fqns"])
    if others := [name for name in converters if name not in ("float8", section)]:
        job.drop("model.converters", f"only float8 of linear layers is supported, not {', '.join(others)}")
    for key, _ in job.rest("quantize"):
        job.ignore(key, "has no effect, because model.converters does not name this converter")


def _parallelism(job: Migration) -> None:
    if job.is_of_transformers:
        for axis in MODEL_AXES:
            key = ".".join(axis.key)
            if (_value(job.old, key) or 1) > 1:
                job.drop(key, "not supported for this class of transformers; FSDP2 shards over these ranks instead")
        if (shard := job.value(".".join(SHARD.key)) or -1) > 0:
            job.put(".".join(SHARD.key), shard * _ranks_of_a_replica(job))
    if job.is_given("parallelism.disable_loss_parallel"):
        job.put("parallelism.loss_parallel", not job.value("parallelism.disable_loss_parallel"))
    schedule = job.value("parallelism.pipeline_parallel_schedule").lower()
    schedules = get_args(ParallelismConfig.model_fields["pipeline_parallel_schedule"].annotation)
    known = {name.lower(): name for name in schedules}
    if job.value("parallelism.pipeline_parallel_degree") > 1:
        if schedule in known:
            job.put("parallelism.pipeline_parallel_schedule", known[schedule])
        else:
            job.drop("parallelism.pipeline_parallel_schedule", f"not supported; must be {', '.join(known.values())}")
    else:
        job.ignore("parallelism.pipeline_parallel_schedule", "has no effect without a pipeline")
    if job.is_given("parallelism.context_parallel_load_balancer"):
        balancer = job.value("parallelism.context_parallel_load_balancer")
        job.put("parallelism.context_parallel_load_balance", balancer == "headtail")
    tensor = _value(job.old, "parallelism.tensor_parallel_degree", 1)
    if _value(job.old, "parallelism.expert_tensor_parallel_degree", tensor) in (1, tensor):
        job.ignore("parallelism.expert_tensor_parallel_degree")


def _switches(job: Migration) -> None:
    for section, switches in _SWITCHES.items():
        for name in switches:
            if _value(job.old, f"{section}.{name}"):
                job.drop(f"{section}.{name}", TORCHTITAN_KEYS[section])
        for key, _ in job.rest(section):
            job.ignore(key, f"a setting of [{section}], which has no counterpart here")


def _blocks(job: Migration) -> None:
    """Convert activation checkpointing and compilation of the blocks."""
    job.keep("compile.enable", "activation_checkpoint.mode")
    components, option = job.value("compile.components"), job.value("activation_checkpoint.selective_ac_option")
    if job.value("compile.enable"):
        job.put("compile.components", components)
    if job.value("activation_checkpoint.mode") == "selective":
        job.put("activation_checkpoint.selective_ac_option", int(option) if str(option).isdecimal() else option)
    elif job.is_given("activation_checkpoint.selective_ac_option"):
        job.ignore("activation_checkpoint.selective_ac_option", 'only for "activation_checkpoint.mode" = "selective"')


def _checkpoint(job: Migration) -> None:
    job.keep("checkpoint.enable")
    if not job.value("checkpoint.enable"):
        job.put("checkpoint.save_last", False, "TorchTitan saves nothing without checkpoint.enable")
    modes = {"disabled": "disabled", "async": "thread", "async_with_pinned_mem": "process"}
    mode = job.value("checkpoint.async_mode")
    if mode in modes:
        job.put("checkpoint.async_mode", modes[mode])
    elif mode is not None:
        job.drop("checkpoint.async_mode", f"not a mode of TorchTitan; must be {', '.join(modes)}")
    step = job.value("checkpoint.load_step")
    if step not in (None, -1):
        job.put("checkpoint.load", step)
    path = job.value("checkpoint.initial_load_path")
    if path and _value(job.old, "checkpoint.initial_load_in_hf"):
        job.put("model.weights", path, "checkpoint.initial_load_path of TorchTitan")
        job.value("checkpoint.initial_load_in_hf")
    elif path:
        reason = "checkpoints of TorchTitan cannot be loaded; set model.weights to a folder in the Hugging Face format"
        job.drop("checkpoint.initial_load_path", reason)
    no_effect = "has no effect: the key is false, or checkpoint.initial_load_path is not set"
    for name in ("initial_load_model_only", "initial_load_in_hf", "initial_load_in_hf_quantized", "load_only"):
        if not path or not _value(job.old, f"checkpoint.{name}"):
            job.ignore(f"checkpoint.{name}", no_effect)
    if excluded := job.value("checkpoint.exclude_from_loading"):
        names = {"optimizer": "optimizer", "dataloader": "data", "train_state": "step", "lr_scheduler": "step"}
        parts = sorted({names[part] for part in excluded if part in names})
        remedy = f'set "checkpoint.load", and "checkpoint.exclude_from_loading" = {json.dumps(parts)}'
        job.drop("checkpoint.exclude_from_loading", remedy if parts else "no checkpoint here has these parts")


def _validation(job: Migration) -> None:
    if not job.value("validation.enable"):
        for key, _ in job.rest("validation"):
            job.ignore(key, "has no effect, because validation.enable is false")
        return
    job.keep("validation.freq", "validation.local_batch_size")
    local, steps = job.value("validation.local_batch_size"), job.value("validation.steps")
    ranks = _data_parallel_ranks(job)
    if steps > 0 and ranks is not None:
        job.put("validation.max_samples", steps * local * ranks)
    elif steps > 0:
        remedy = f"set validation.max_samples to {steps * local} x this number, or use --world-size of `migrate`"
        job.drop("validation.steps", f"the number of data-parallel ranks is unknown; {remedy}")
    _dataset(job, "validation", "validation.data")
    for key in ("streaming", "shuffle"):
        job.new.pop(("validation", "data", key), None)
    if _value(job.old, "validation.seq_len") not in (None, _value(job.old, "training.seq_len", 2048)):
        job.drop("validation.seq_len", "validation uses training.seq_len")
    job.value("validation.seq_len")


def _profiling(job: Migration) -> None:
    """Convert profiling. TorchTitan profiles the last `profiler_active` steps of every `profile_freq` steps, on all
    ranks. Here, a run makes one profile, by default on rank 0."""
    has_memory = job.value("profiling.enable_memory_snapshot")
    freq, active = job.value("profiling.profile_freq"), job.value("profiling.profiler_active")
    is_on = (job.value("profiling.enable_profiling") or has_memory) and freq <= job.value("training.steps")
    if is_on:
        first = max(1, freq - active + 1)
        job.put("profiling.start_step", first, "one profile; TorchTitan makes more")
        job.put("profiling.num_steps", freq - first + 1)
        reason = f'rank 0 makes one profile, which ends with step {freq}; to profile more ranks, set "profiling.ranks"'
        job.drop("profiling.profile_freq", reason)
    if is_on and has_memory:
        job.put("profiling.memory", True)
    for key, _ in leaves({"profiling": {} if is_on else job.old.get("profiling", {})}):
        job.ignore(key, "has no effect: profiling is off, or the first profile would end after the last step")


_KEYS = {format_key((*table.key, name)) for table in tables(JobConfig) for name in table.section.model_fields}


def _others(job: Migration) -> None:
    """Convert each remaining key that has a replacement or the same name here, and note every other key."""
    for key, value in job.rest():
        remedy = TORCHTITAN_KEYS.get(key)
        if remedy is not None and " " not in remedy:
            job.put(remedy, value)
        elif remedy is not None and value is False:
            job.ignore(key, "not needed, because the old file switches it off")
        elif remedy is not None:
            is_needless = remedy.startswith("not needed") or value in (0, None, "", []) or key in _COSMETIC
            (job.ignore if is_needless else job.drop)(key)
        elif key in _COSMETIC:
            job.ignore(key, "not needed here")
        elif key in _KEYS:
            job.put(key, value)
        else:
            job.drop(key, "unknown key of TorchTitan; look for a similar key in docs/reference/job_file.md")
