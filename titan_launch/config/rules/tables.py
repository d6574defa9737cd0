"""The rules that are rows of tables: `NO_EFFECT`, `CONTRADICTIONS` and `NEEDS_GPU`.

To add a rule of this form, add a row. A rule that needs a loop, or that reports several problems for one condition, is
a function in the file of its topic. In the tables, keys are written with dots.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from titan_launch.config.job import JobConfig
from titan_launch.config.loading.provenance import toml_value
from titan_launch.config.optimizers import ALGORITHMS
from titan_launch.config.sections.checkpoint import LOAD_KEYWORDS
from titan_launch.config.sections.model import HUGGINGFACE
from titan_launch.config.sections.section import Section
from titan_launch.core.errors import KeyPath, Problem


class NoEffect(NamedTuple):
    """Keys that have no effect if another key has a certain value. A problem is then reported for each of these keys
    that is not at its default (see `Section.changed`)."""

    other: str
    """The key on which the effect of `keys` depends."""

    remedy: str
    """The remedy in the message "has no effect with OTHER = VALUE; REMEDY, or remove this key"."""

    keys: tuple[str, ...]
    """Dotted keys. The name of a section, such as `ema`, stands for all its keys."""

    values: tuple[object, ...] = ()
    """Values of `other` with which the keys have no effect. Empty: only the default of `other`."""


NO_EFFECT = (
    NoEffect("model.weights", "set weights to a folder", ("model.exclude_from_weights",)),
    NoEffect("lora.targets", 'set targets = ["layers.*.attention.w*"]', ("lora",)),
    NoEffect(
        "activation_checkpoint.mode",
        'set mode = "selective"',
        ("activation_checkpoint.selective_ac_option",),
        ("none", "full", "memory_budget", "auto"),
    ),
    NoEffect(
        "activation_checkpoint.mode",
        'set mode = "memory_budget"',
        ("activation_checkpoint.memory_budget",),
        ("none", "full", "selective", "auto"),
    ),
    NoEffect(
        "activation_checkpoint.mode",
        'set mode = "full", "selective" or "auto"',
        ("activation_checkpoint.modules",),
        ("none", "memory_budget"),
    ),
    NoEffect(
        "compile.enable",
        "set compile.enable = true",
        ("compile.backend", "compile.components", "compile.cache_folder"),
    ),
    NoEffect(
        "float8.enable",
        "set float8.enable = true",
        ("float8.recipe", "float8.modules", "float8.all_gather", "float8.emulate"),
    ),
    NoEffect(
        "parallelism.data_parallel_replicate_degree",
        "set a degree above 1",
        ("parallelism.shard_optimizer_over_replicas",),
    ),
    NoEffect(
        "parallelism.tensor_parallel_degree",
        "set a degree above 1",
        ("parallelism.sequence_parallel", "parallelism.loss_parallel"),
    ),
    NoEffect(
        "parallelism.context_parallel_degree",
        "set a degree above 1",
        ("parallelism.context_parallel_load_balance", "parallelism.context_parallel_rotate_method"),
    ),
    NoEffect(
        "parallelism.pipeline_parallel_degree",
        "set a degree above 1",
        (
            "parallelism.pipeline_parallel_schedule",
            "parallelism.pipeline_parallel_stages_per_rank",
            "parallelism.pipeline_parallel_split_points",
        ),
    ),
    NoEffect("parallelism.expert_parallel_degree", "set a degree above 1", ("planner.expert_load",)),
    NoEffect("ema.decay", "set a decay such as 0.999", ("ema",)),
    NoEffect("profiling.start_step", "set start_step to a step", ("profiling.num_steps", "profiling.ranks")),
    NoEffect("validation.patience", "set patience to a number of validations", ("validation.min_improvement",)),
    NoEffect("debug.spike_sigma", "set spike_sigma to a number such as 6.0", ("debug.spike_window",)),
    NoEffect("debug.on_repeated_skips", 'set on_repeated_skips = "rollback"', ("debug.max_rollbacks",)),
)


def keys_without_effect(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each key without effect (see `NO_EFFECT`)."""
    for row in NO_EFFECT:
        other = attrgetter(row.other)(config)
        is_off = other in row.values if row.values else not any(changed_keys(config, row.other))
        changed = (pair for key in row.keys for pair in changed_keys(config, key))
        for path, value in changed if is_off else ():
            cause = f"without {row.other}" if other in (None, ()) else f"with {_shown(config, row.other)}"
            reason = f"has no effect {cause}; {row.remedy}, or remove this key"
            yield Problem(path, reason, value, also=(_path(row.other),))


def with_effective_keys(config: JobConfig) -> JobConfig:
    """Return the job with each key without effect (see `NO_EFFECT`) at its default."""
    for problem in keys_without_effect(config):
        section, key = problem.key
        own = getattr(config, str(section))
        default = type(own).model_fields[str(key)].get_default(call_default_factory=True)
        config = config.model_copy(update={str(section): own.model_copy(update={str(key): default})})
    return config


class Contradiction(NamedTuple):
    """A key that contradicts other keys."""

    key: str
    """The key for which the problem is reported."""

    when: Callable[[JobConfig], bool]
    """Returns True if the keys contradict each other."""

    reason: str
    """The reason why the value of `key` is wrong, and what to write instead. Other keys are in braces: in the message,
    `{compile.enable}` becomes `compile.enable = false`."""

    also: tuple[str, ...] = ()
    """Further keys on which the problem depends. The message does not show their values."""


CONTRADICTIONS = (
    Contradiction(
        "model.weights",
        lambda job: job.model.weights is not None and job.checkpoint.initial_load_path is not None,
        "names the initial weights, and so does {checkpoint.initial_load_path}; remove one of the two keys",
    ),
    Contradiction(
        "model.flavor",
        lambda job: not job.model.is_of_package and any(job.model.changed("flavor")),
        "is not used with {model.name}, which has no size table; remove this key, and set arguments in [model.args]",
    ),
    Contradiction(
        "model.path",
        lambda job: job.model.path is not None and job.model.name != HUGGINGFACE,
        f'applies only to model.name = "{HUGGINGFACE}", but the job has {{model.name}}; set that name, or remove this '
        "key",
    ),
    Contradiction(
        "training.local_batch_size",
        lambda job: job.training.local_batch_size == "auto" and job.training.global_batch_size is None,
        "requires {training.global_batch_size}, so that the chosen number does not change the training; set "
        "training.global_batch_size",
    ),
    Contradiction(
        "planner.mfu",
        lambda job: job.planner.mfu is not None and job.planner.speeds is not None,
        "replaces the times of single operations, which {planner.speeds} has; remove one of the two keys",
    ),
    Contradiction(
        "training.epochs",
        lambda job: job.training.epochs is not None and job.training.steps is not None,
        "sets the length of the run, and so does {training.steps}; remove one of the two keys",
    ),
    Contradiction(
        "training.frozen",
        lambda job: bool(job.training.frozen) and job.training.trainable is not None,
        "says which parameters are frozen, and so does {training.trainable}; remove one of the two keys",
    ),
    Contradiction(
        "training.frozen",
        lambda job: bool(job.training.frozen and job.lora.targets),
        "has no effect with {lora.targets}: every parameter of the base model that training.trainable does not name is "
        "frozen; remove this key",
    ),
    Contradiction(
        "training.unfreeze",
        lambda job: bool(job.training.unfreeze) and job.parallelism.pipeline_parallel_degree > 1,
        "is not supported with {parallelism.pipeline_parallel_degree}: PyTorch's stages agree in the first step on the "
        "gradients that they exchange; train all parameters from the start, or set pipeline_parallel_degree = 1",
    ),
    Contradiction(
        "kernels.attention",
        lambda job: job.kernels.attention == "math" and job.parallelism.context_parallel_degree > 1,
        "is not supported with {parallelism.context_parallel_degree}: ring attention requires a fused kernel; set "
        'attention = "auto"',
    ),
    Contradiction(
        "parallelism.context_parallel_degree",
        # If `job.device` is "auto", `parallel/context_parallel.py` checks this.
        lambda job: job.parallelism.context_parallel_degree > 1 and job.job.device == "cpu",
        "PyTorch's ring attention has no kernels for the CPU ({job.device}); set context_parallel_degree = 1",
    ),
    Contradiction(
        "parallelism.pipeline_parallel_schedule",
        lambda job: job.compile.enable and job.parallelism.splits_backward,
        "computes the gradients of weights later than those of activations, but with {compile.enable} the backward of "
        "a block is one graph; use Interleaved1F1B or 1F1B, or set compile.enable = false",
    ),
    Contradiction(
        "compile.components",
        lambda job: job.compile.enable and not job.compile.components,
        'must not be empty with {compile.enable}; name "model", "loss" or both, or set compile.enable = false',
    ),
    Contradiction(
        "compile.cache_folder",
        lambda job: job.compile.enable and bool(job.compile.cache_folder) and job.compile.backend != "inductor",
        'stores compiled kernels, but {compile.backend} compiles none; set compile.backend = "inductor", or remove '
        "this key",
    ),
    Contradiction(
        "activation_checkpoint.mode",
        lambda job: job.activation_checkpoint.mode == "memory_budget" and not _compiles_blocks(job),
        "requires compiled blocks, but the job has {compile.enable} and {compile.components}; set compile.enable = "
        'true with "model" in compile.components, or set mode = "selective"',
    ),
    Contradiction(
        "activation_checkpoint.mode",
        lambda job: (
            job.activation_checkpoint.mode == "memory_budget"
            and _compiles_blocks(job)
            and job.compile.backend == "eager"
        ),
        "requires a compiled backward, but {compile.backend} does not compile backward; set compile.backend = "
        '"inductor", or set mode = "selective"',
    ),
    Contradiction(
        "activation_checkpoint.mode",
        lambda job: job.activation_checkpoint.mode == "memory_budget" and job.parallelism.tensor_parallel_degree > 1,
        "is not supported with {parallelism.tensor_parallel_degree}: PyTorch's partitioner cannot determine the size "
        'of a DeviceMesh in the graph; set mode = "full" or "selective", or parallelism.tensor_parallel_degree = 1',
    ),
    Contradiction(
        "float8.enable",
        lambda job: job.float8.enable and job.parallelism.tensor_parallel_degree > 1,
        "is not supported with {parallelism.tensor_parallel_degree}: each rank would compute the scale of a matrix "
        "from its own shard only; set tensor_parallel_degree = 1 and a larger data_parallel_shard_degree, or set "
        "float8.enable = false",
    ),
    Contradiction(
        "float8.enable",
        lambda job: job.float8.enable and job.precision.param_dtype != "bfloat16",
        'is not supported with {precision.param_dtype}; set param_dtype = "bfloat16", or set float8.enable = false',
    ),
    Contradiction(
        "float8.all_gather",
        lambda job: job.float8.enable and job.float8.all_gather and job.float8.recipe != "tensorwise",
        "requires one scale per tensor, which {float8.recipe} does not have; set float8.recipe = "
        '"tensorwise", or set float8.all_gather = false',
    ),
    Contradiction(
        "float8.all_gather",
        lambda job: job.float8.enable and job.float8.all_gather and job.training.enable_cpu_offload,
        "is not supported with {training.enable_cpu_offload}: the copy of a weight to the device does not have the "
        "scale that is computed after each step; set one of the two keys to false",
    ),
    Contradiction(
        "optimizer.sgd.nesterov",
        lambda job: job.optimizer.sgd.nesterov and not job.optimizer.sgd.momentum,
        "requires momentum, but the job has {optimizer.sgd.momentum}; set momentum above 0, or nesterov = false",
    ),
    Contradiction(
        "optimizer.state_dtype",
        lambda job: (
            job.optimizer.state_dtype is not None
            and not any(ALGORITHMS[name].state(job.optimizer) for name in job.optimizer.algorithms())
        ),
        "is the dtype of the momentum, but the job has {optimizer.sgd.momentum}; remove this key, or set momentum "
        "above 0",
        also=("optimizer.name", "optimizer.param_groups"),
    ),
    Contradiction(
        "optimizer.master_weights",
        lambda job: job.optimizer.master_weights and not _stores_bfloat16(job),
        "keeps float32 copies of bfloat16 parameters, but the job has {precision.storage_dtype}, and no rule with "
        'bfloat16; set precision.storage_dtype = "bfloat16", or remove this key',
        also=("precision.rules",),
    ),
    Contradiction(
        "optimizer.rounding",
        lambda job: (
            job.optimizer.rounding == "stochastic"
            and job.optimizer.state_dtype != "bfloat16"
            and not _stores_bfloat16(job)
        ),
        "rounds to bfloat16, but the job has {precision.storage_dtype}, and stores neither parameters nor moments in "
        'bfloat16; set precision.storage_dtype or optimizer.state_dtype = "bfloat16", or set rounding = "nearest"',
        also=("optimizer.state_dtype", "optimizer.master_weights", "precision.rules"),
    ),
    Contradiction(
        "optimizer.rounding",
        lambda job: (
            job.optimizer.rounding == "stochastic"
            and job.optimizer.state_dtype not in (None, "bfloat16")
            and job.optimizer.master_weights
            and _stores_bfloat16(job)
        ),
        "rounds to bfloat16, but {optimizer.master_weights} updates float32 copies, and {optimizer.state_dtype} keeps "
        'the moments in another dtype; set rounding = "nearest", or remove one of these two keys',
        also=("precision.storage_dtype", "precision.rules"),
    ),
    Contradiction(
        "optimizer.state_dtype",
        lambda job: job.optimizer.state_dtype == "int8" and job.parallelism.tensor_parallel_degree > 1,
        "is not supported with {parallelism.tensor_parallel_degree}: tensor parallelism divides the rows of some "
        'matrices, whose elements share scales; set state_dtype = "bfloat16", or tensor_parallel_degree = 1',
    ),
    Contradiction(
        "ema.validate_with",
        lambda job: job.ema.decay is not None and job.ema.validate_with != "both" and not job.validation.freq,
        "has no effect with {validation.freq}; set validation.freq above 0, or remove this key",
    ),
    Contradiction(
        "checkpoint.save_last",
        lambda job: job.checkpoint.enable and not job.checkpoint.save_last,
        "the last step is always saved with {checkpoint.enable}; set save_last = true, or enable = false",
    ),
    Contradiction(
        "checkpoint.store",
        lambda job: job.checkpoint.store is not None and not (job.checkpoint.enable or job.checkpoint.save_last),
        "has no effect with {checkpoint.enable} and {checkpoint.save_last}, which save no checkpoint; set "
        "checkpoint.enable = true, or remove this key",
    ),
    Contradiction(
        "checkpoint.keep_best",
        lambda job: job.checkpoint.enable and job.checkpoint.keep_best > 0 and not job.validation.freq,
        "requires the validation loss, but the job has {validation.freq}; set freq above 0, or set keep_best = 0",
    ),
    Contradiction(
        "checkpoint.keep_best",
        lambda job: (
            job.checkpoint.enable
            and job.checkpoint.keep_best > 0
            and job.validation.patience is None  # with patience, the best steps are always saved
            and job.validation.freq > 0
            and job.validation.freq % job.checkpoint.interval > 0
            and job.checkpoint.interval % job.validation.freq > 0
        ),
        "compares only checkpoints of validated steps, but few steps are both saved ({checkpoint.interval}) and "
        "validated ({validation.freq}); make one number a multiple of the other",
    ),
    Contradiction(
        "checkpoint.load",
        lambda job: isinstance(job.checkpoint.load, int) and job.checkpoint.load > 0 and not job.checkpoint.enable,
        "resumes from a checkpoint of this run, but the job has {checkpoint.enable}; set checkpoint.enable = true",
    ),
    Contradiction(
        "checkpoint.initial_load_path",
        lambda job: job.checkpoint.initial_load_path is not None and job.checkpoint.load not in LOAD_KEYWORDS,
        "names a checkpoint to start from, and so does {checkpoint.load}; remove one of the two keys",
    ),
    Contradiction(
        "checkpoint.exclude_from_loading",
        lambda job: (
            bool(job.checkpoint.exclude_from_loading)
            and job.checkpoint.initial_load_path is None
            and job.checkpoint.load in LOAD_KEYWORDS
        ),
        "requires a named checkpoint, but the job has {checkpoint.load}; set checkpoint.load to a step or a path, or "
        "set {checkpoint.initial_load_path}, or remove this key",
    ),
    Contradiction(
        "checkpoint.exclude_from_loading",
        # The run would save steps below the loaded step. The next resume would still load that step, as the newest.
        lambda job: "step" in job.checkpoint.exclude_from_loading and isinstance(job.checkpoint.load, int),
        'contains "step", so the run would start at step 0, but {checkpoint.load} is a later step in its folder; set a '
        'different job.name, and checkpoint.load = ".../checkpoints/step-N"',
    ),
    Contradiction(
        "validation.freq",
        lambda job: job.validation.freq > 0 and job.validation.data is None,
        'requires {validation.data}; add [validation.data], for example with path and split = "validation"',
    ),
    Contradiction(
        "validation.patience",
        lambda job: (
            job.validation.patience is not None
            and not (job.validation.freq and job.checkpoint.enable and job.checkpoint.keep_best)
        ),
        "ends the run with its best checkpoint as the result, which needs validations and checkpoints, but the job has "
        "{validation.freq}, {checkpoint.enable} and {checkpoint.keep_best}; set freq above 0, enable = true, and "
        "keep_best above 0",
    ),
    Contradiction(
        "comm.init_timeout_seconds",
        lambda job: job.comm.init_timeout_seconds < job.comm.timeout_seconds,
        "must not be below {comm.timeout_seconds}, because the first step takes the longest",
    ),
    Contradiction(
        "comm.hang_seconds",
        lambda job: job.comm.hang_seconds is not None and job.comm.hang_seconds >= job.comm.timeout_seconds,
        "must be below {comm.timeout_seconds}, which would end the run before the hang is detected; remove this key to "
        "use half of comm.timeout_seconds",
    ),
    Contradiction(
        "debug.on_repeated_skips",
        lambda job: job.debug.on_repeated_skips == "rollback" and not job.checkpoint.enable,
        "requires checkpoints, but the job has {checkpoint.enable}; set checkpoint.enable = true, or set "
        'on_repeated_skips = "stop"',
    ),
    Contradiction(
        "debug.on_repeated_skips",
        lambda job: (
            job.debug.on_repeated_skips == "rollback"
            and job.debug.on_nonfinite == "stop"
            and job.debug.spike_sigma is None
        ),
        "has no effect, because {debug.on_nonfinite} ends the run at the first skipped step; set debug.on_nonfinite = "
        '"skip", or set {debug.spike_sigma}',
    ),
)


def contradictions(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each contradiction (see `CONTRADICTIONS`)."""
    for row in CONTRADICTIONS:
        if row.when(config):
            reason = IN_BRACES.sub(lambda key: _shown(config, key[1]), row.reason)
            others = tuple(_path(key) for key in (*IN_BRACES.findall(row.reason), *row.also))
            yield Problem(_path(row.key), reason, attrgetter(row.key)(config), also=others)


NEEDS_GPU = {
    "activation_checkpoint.offload": "copies activations from a GPU to host memory",
    "comm.profile_freq": "profiles CUDA kernels",
    "kernels.bf16_reduced_precision_reduction": "is a setting for GPUs",
    "kernels.float32_precision": "is a setting for GPUs",
    "profiling.memory": "records allocations of a GPU",
}
"""Keys that must have their default on a CPU, each with the reason."""


def settings_exist_on_the_device(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each setting that a CPU does not support, if the device is "cpu". (If `job.device` is
    "auto", the run checks this at its start.)"""
    if config.job.device == "cpu":
        yield from missing_on_cpu(config)


def missing_on_cpu(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each setting that a CPU does not support, whatever `job.device` is."""
    device: KeyPath = ("job", "device")
    for key, why in NEEDS_GPU.items():
        reason = f'{why}, but the device is "cpu"; remove this key, or train on GPUs'
        yield from (Problem(path, reason, value, also=(device,)) for path, value in changed_keys(config, key))
    if config.kernels.attention in ("cudnn", "efficient"):
        reason = 'is for GPUs, but the device is "cpu"; set attention = "auto", "flash" or "math", or train on GPUs'
        yield Problem(("kernels", "attention"), reason, config.kernels.attention, also=(device,))
    if config.float8.enable and not config.float8.emulate:
        remedy = "set float8.emulate = true, or set float8.enable = false"
        reason = f'requires a GPU with FP8 tensor cores, but the device is "cpu"; {remedy}'
        yield Problem(("float8", "enable"), reason, True, also=(device, ("float8", "emulate")))


def changed_keys(config: JobConfig, key: str) -> Iterator[tuple[KeyPath, Any]]:
    """Yield (path, value) for the key if it is not at its default. For the name of a section, yield this pair for each
    key of the section that is not at its default."""
    path, value = _path(key), attrgetter(key)(config)
    if isinstance(value, Section):
        yield from (((*path, name), changed) for name, changed in value.changed())
    else:
        section, _, name = key.rpartition(".")
        yield from ((path, changed) for _, changed in attrgetter(section)(config).changed(name))


IN_BRACES = re.compile(r"\{([\w.]+)\}")
"""Pattern of a key in braces in the reason of a contradiction."""


def _shown(config: JobConfig, key: str) -> str:
    """Return `key = value`, or only the key if its value is unset or an empty array."""
    value = attrgetter(key)(config)
    return key if value in (None, ()) else f"{key} = {toml_value(value)}"


def _path(key: str) -> KeyPath:
    return tuple(key.split("."))


def _stores_bfloat16(job: JobConfig) -> bool:
    """Return True if any trained parameter may be stored in bfloat16."""
    return "bfloat16" in (job.precision.storage_dtype, *(rule.storage_dtype for rule in job.precision.rules))


def _compiles_blocks(job: JobConfig) -> bool:
    return job.compile.enable and "model" in job.compile.components
