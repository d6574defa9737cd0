"""Rules across sections for tensor, context and pipeline parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from math import gcd

from titan_launch.config.architectures import ARCHITECTURES, known_args
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.parallelism import ParallelismConfig
from titan_launch.config.sections.training import GradientAccumulationConfig
from titan_launch.core.errors import KeyPath, Problem, nearest_multiples

_TENSOR: KeyPath = ("parallelism", "tensor_parallel_degree")
_SEQUENCE: KeyPath = ("parallelism", "sequence_parallel")
_CONTEXT: KeyPath = ("parallelism", "context_parallel_degree")
_BALANCE: KeyPath = ("parallelism", "context_parallel_load_balance")
_SEQ_LEN: KeyPath = ("training", "seq_len")
_MODEL: tuple[KeyPath, ...] = (("model", "name"), ("model", "flavor"), ("model", "args"))

_OPTIONS = {
    "sequence_parallel": "tensor_parallel_degree",
    "loss_parallel": "tensor_parallel_degree",
    "context_parallel_load_balance": "context_parallel_degree",
    "context_parallel_rotate_method": "context_parallel_degree",
}
"""Options, and the degree that must be above 1 for each."""


def options_have_a_degree(config: JobConfig) -> Iterator[Problem]:
    """An option of a parallelism needs a degree above 1. (Defaults pass: a recorded job has them.)"""
    for name, value in config.parallelism.changed(*_OPTIONS):
        degree = _OPTIONS[name]
        if getattr(config.parallelism, degree) == 1:
            reason = f"is for parallelism.{degree} above 1; set that, or drop this key"
            yield Problem(("parallelism", name), reason, value, also=(("parallelism", degree),))


def matrices_can_be_divided(config: JobConfig) -> Iterator[Problem]:
    """The tensor-parallel degree divides every size that it must divide: heads, feed-forward, vocabulary."""
    degree, args = config.parallelism.tensor_parallel_degree, known_args(config.model)
    sizes = args and args.tensor_parallel_sizes()
    if degree == 1 or not sizes:
        return
    misfits = [f"{name} ({size})" for name, size in sizes.items() if size % degree]
    if misfits:
        remedy = f"set {_divisors(gcd(*sizes.values()))}"
        reason = f"each rank has a part of every matrix, and {degree} does not divide {', '.join(misfits)}; {remedy}"
        yield Problem(_TENSOR, reason, degree, also=_MODEL)


def models_can_be_divided(config: JobConfig) -> Iterator[Problem]:
    """The model supports tensor and context parallelism, where the job has them."""
    args, parallelism = known_args(config.model), config.parallelism
    if args is None:
        return
    for key, degree, is_supported in (
        (_TENSOR, parallelism.tensor_parallel_degree, args.tensor_parallel_sizes() is not None),
        (_CONTEXT, parallelism.context_parallel_degree, args.has_context_parallel()),
    ):
        if degree > 1 and not is_supported:
            reason = (
                f"the model {config.model.name} has no plan for it; set 1, and divide the data "
                "(data_parallel_shard_degree)"
            )
            yield Problem(key, reason, degree, also=_MODEL)


def context_is_of_sequences(config: JobConfig) -> Iterator[Problem]:
    """Context parallelism divides sequences of tokens; images are none, whatever a user's own model declares."""
    degree = config.parallelism.context_parallel_degree
    if degree > 1 and config.data.unit != "tokens" and config.model.name not in ARCHITECTURES:
        reason = f'divides sequences of tokens, and data.kind = "{config.data.kind}" gives {config.data.unit}; set 1'
        yield Problem(_CONTEXT, reason, degree, also=(("data", "kind"), *_MODEL))


def sequences_can_be_divided(config: JobConfig) -> Iterator[Problem]:
    """Ranks have equally many tokens."""
    parallelism, seq_len = config.parallelism, config.training.seq_len
    context, tensor = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    parts = 2 * context if parallelism.context_parallel_load_balance else context
    also: tuple[KeyPath, ...] = (_CONTEXT, _BALANCE, _TENSOR, _SEQUENCE)
    if config.data.unit != "tokens":
        return
    if context > 1 and seq_len % parts:
        of = f"twice parallelism.context_parallel_degree ({context}), for its load balance" if parts > context else ""
        reason = f"must be a multiple of {parts}, {of or 'parallelism.context_parallel_degree'}"
        yield Problem(_SEQ_LEN, f"{reason}; nearest: {nearest_multiples(seq_len, parts)}", seq_len, also=also)
    elif tensor > 1 and parallelism.sequence_parallel and seq_len // context % tensor:
        product, of = context * tensor, f"parallelism.tensor_parallel_degree ({tensor})"
        if context > 1:
            of = f"{product} = parallelism.context_parallel_degree ({context}) x {of}"
        reason = f"must be a multiple of {of}, since parallelism.sequence_parallel divides the tokens"
        reason = f"{reason}; nearest: {nearest_multiples(seq_len, product)}"
        yield Problem(_SEQ_LEN, reason, seq_len, also=also)


def batch_norm_sees_whole_sequences(config: JobConfig) -> Iterator[Problem]:
    """A BatchNorm over tokens has the statistics of all tokens of its microbatch."""
    args, parallelism = known_args(config.model), config.parallelism
    setting = args and args.batchnorm_over_tokens()
    if setting is None:
        return
    if parallelism.tensor_parallel_degree > 1 and parallelism.sequence_parallel:
        reason = f"model.args.{setting} would take its statistics from a part of the tokens; set false"
        yield Problem(_SEQUENCE, reason, True, also=(_TENSOR, *_MODEL))
    if parallelism.context_parallel_degree > 1 and config.batchnorm.statistics == "local":
        reason = (
            f"model.args.{setting} would take its statistics from a part of the tokens; set "
            'batchnorm.statistics = "synchronized", or 1'
        )
        key: KeyPath = ("batchnorm", "statistics")
        yield Problem(_CONTEXT, reason, parallelism.context_parallel_degree, also=(key, *_MODEL))


def ring_attention_is_on_gpus(config: JobConfig) -> Iterator[Problem]:
    """PyTorch's ring attention has no kernels for the CPU."""
    degree = config.parallelism.context_parallel_degree
    if degree > 1 and config.job.device == "cpu":
        reason = 'PyTorch\'s ring attention has no kernels for the CPU, and job.device is "cpu"; set 1'
        yield Problem(_CONTEXT, reason, degree, also=(("job", "device"),))


PARALLELISM_RULES = (
    options_have_a_degree,
    matrices_can_be_divided,
    models_can_be_divided,
    context_is_of_sequences,
    sequences_can_be_divided,
    batch_norm_sees_whole_sequences,
    ring_attention_is_on_gpus,
)
"""The rules for tensor and context parallelism."""


def _divisors(number: int) -> str:
    found = [str(each) for each in range(1, number + 1) if number % each == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"


_PIPELINE: KeyPath = ("parallelism", "pipeline_parallel_degree")
_SCHEDULE: KeyPath = ("parallelism", "pipeline_parallel_schedule")
_PER_RANK: KeyPath = ("parallelism", "pipeline_parallel_stages_per_rank")
_SPLIT: KeyPath = ("parallelism", "pipeline_parallel_split_points")
_BATCH: KeyPath = ("training", "global_batch_size")

ONE_STAGE_SCHEDULES = ("1F1B", "GPipe")
"""Schedules for one stage on each rank."""

SPLIT_BACKWARD_SCHEDULES = ("InterleavedZeroBubble", "ZBVZeroBubble")
"""Schedules that compute the gradients of weights apart from those of activations, to fill the time in which a rank
would wait."""


def stages_per_rank(parallelism: ParallelismConfig) -> int:
    """Pipeline stages that each rank holds."""
    if parallelism.pipeline_parallel_stages_per_rank is not None:
        return parallelism.pipeline_parallel_stages_per_rank
    return 1 if parallelism.pipeline_parallel_schedule in ONE_STAGE_SCHEDULES else 2


def num_stages(parallelism: ParallelismConfig) -> int:
    """Pipeline stages of the whole model."""
    return parallelism.pipeline_parallel_degree * stages_per_rank(parallelism)


def too_few_layers(parallelism: ParallelismConfig, layers: int) -> str:
    """Why a model with so many layers cannot be divided into the stages."""
    per_rank, wanted = stages_per_rank(parallelism), num_stages(parallelism)
    times = f"times {per_rank} stages on each rank " if per_rank > 1 else ""
    return f"{times}makes {wanted} stages, and the model has {layers} layers; set at most {layers // per_rank}"


def misfit_of_microbatches(
    parallelism: ParallelismConfig, num_microbatches: int, samples_each: int | None = None
) -> str | None:
    """Why the schedule does not go with so many microbatches in a step, and which batches it goes with, or None.

    `samples_each`: of a microbatch, on all ranks, where they are known.
    """
    schedule, degree = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    if degree == 1:
        return None
    has = f"makes {num_microbatches} {'microbatch' if num_microbatches == 1 else 'microbatches'} a step"
    if schedule == "1F1B" and num_microbatches < degree:
        larger = "a larger one" if samples_each is None else f"at least {degree * samples_each}"
        return f"{has}, and 1F1B needs one for each of the {degree} stages; set {larger}, or take GPipe"
    if schedule in _INTERLEAVED and not _makes_equal_rounds(num_microbatches, degree):
        below = next(n for n in range(num_microbatches, 0, -1) if _makes_equal_rounds(n, degree))
        above = next(n for n in count(num_microbatches) if _makes_equal_rounds(n, degree))
        each, unit = (1, " microbatches") if samples_each is None else (samples_each, "")
        return (
            f"{has}, and {schedule} on {degree} ranks needs a multiple of {num_microbatches // degree} of them; "
            f"nearest: {below * each} or {above * each}{unit}"
        )
    return None


_INTERLEAVED = ("Interleaved1F1B", "InterleavedZeroBubble")
"""Schedules that go through the microbatches in rounds, of at least as many as there are ranks."""


def _makes_equal_rounds(num_microbatches: int, ranks: int) -> bool:
    return num_microbatches % max(1, num_microbatches // ranks) == 0


def pipeline_options_have_a_pipeline(config: JobConfig) -> Iterator[Problem]:
    """An option of pipelines needs a pipeline. (Defaults pass: a recorded job has them.)"""
    if config.parallelism.pipeline_parallel_degree > 1:
        return
    reason = "is for pipeline parallelism, and parallelism.pipeline_parallel_degree is 1; set that, or drop this key"
    for name, value in config.parallelism.changed(*(str(key[-1]) for key in (_SCHEDULE, _PER_RANK, _SPLIT))):
        yield Problem(("parallelism", name), reason, value, also=(_PIPELINE,))


def stages_suit_the_schedule(config: JobConfig) -> Iterator[Problem]:
    """Some schedules are for one stage on each rank, one for two."""
    parallelism = config.parallelism
    schedule, per_rank = parallelism.pipeline_parallel_schedule, stages_per_rank(parallelism)
    wanted = 1 if schedule in ONE_STAGE_SCHEDULES else 2 if schedule == "ZBVZeroBubble" else per_rank
    if parallelism.pipeline_parallel_degree > 1 and per_rank != wanted:
        others = '"Interleaved1F1B", "LoopedBFS" and "InterleavedZeroBubble" take any number'
        reason = f"{schedule} is for {wanted} on each rank; {others}"
        yield Problem(_PER_RANK, reason, per_rank, also=(_SCHEDULE,))


def split_points_make_the_stages(config: JobConfig) -> Iterator[Problem]:
    """Between so many stages there is one split point fewer."""
    parallelism = config.parallelism
    points, stages = parallelism.pipeline_parallel_split_points, num_stages(parallelism)
    if parallelism.pipeline_parallel_degree > 1 and points and len(points) != stages - 1:
        reason = (
            f"divides into {len(points) + 1} stages, and there are {stages} "
            f"({parallelism.pipeline_parallel_degree} ranks x {stages_per_rank(parallelism)} on each); "
            f"name {stages - 1}, or none for an even division"
        )
        yield Problem(_SPLIT, reason, list(points), also=(_PIPELINE, _PER_RANK, _SCHEDULE))


def layers_suffice_for_the_stages(config: JobConfig) -> Iterator[Problem]:
    """Every stage has a layer of its own, unless the job names the split points. Tied embeddings cannot be split."""
    degree, args = config.parallelism.pipeline_parallel_degree, known_args(config.model)
    if degree == 1 or args is None:
        return
    layers, tied_by = args.num_layers(), args.tied_by()
    also: tuple[KeyPath, ...] = (_SCHEDULE, _PER_RANK, ("model", "flavor"), ("model", "args"))
    is_even = not config.parallelism.pipeline_parallel_split_points
    if layers is not None and layers < num_stages(config.parallelism) and is_even:
        yield Problem(_PIPELINE, too_few_layers(config.parallelism, layers), degree, also=also)
    if tied_by is not None:
        reason = (
            f"puts the embeddings and the output layer, which share one weight ({tied_by}), on different stages; "
            f"set model.args.{tied_by} = false, or 1 (FSDP2 and tensor parallelism take tied weights)"
        )
        yield Problem(_PIPELINE, reason, degree, also=also)


def microbatches_suit_the_schedule(config: JobConfig) -> Iterator[Problem]:
    """The number of microbatches suits the schedule, where it is known without the number of ranks."""
    parallelism, training = config.parallelism, config.training
    shard, batch = parallelism.data_parallel_shard_degree, training.global_batch_size
    ranks = None if shard == -1 else shard * parallelism.data_parallel_replicate_degree
    samples_each = None if ranks is None else ranks * training.local_batch_size
    if batch is None:
        num_microbatches = 1
    elif samples_each is None or batch % samples_each:
        return  # said where ranks and batches are divided
    else:
        num_microbatches = batch // samples_each
    reason = misfit_of_microbatches(parallelism, num_microbatches, samples_each)
    if reason is not None:
        yield Problem(_BATCH, reason, batch, also=(_SCHEDULE, _PIPELINE))


def split_backward_is_reduced_once(config: JobConfig) -> Iterator[Problem]:
    """FSDP2 reduces gradients where a backward ends, and a backward in two parts has no such place."""
    accumulation, schedule = config.gradient_accumulation, config.parallelism.pipeline_parallel_schedule
    if config.parallelism.pipeline_parallel_degree == 1 or schedule not in SPLIT_BACKWARD_SCHEDULES:
        return
    why = f"{schedule} computes the gradients of weights apart, when others are under way"
    if accumulation.mode not in ("deferred", "auto"):
        kept = "" if accumulation.keep_params_unsharded else " and keep_params_unsharded = true"
        reason = f'{why}, so that they can only be reduced once a step; set "deferred"{kept}, or take Interleaved1F1B'
        yield Problem(("gradient_accumulation", "mode"), reason, accumulation.mode, also=(_SCHEDULE,))
    elif not accumulation.keep_params_unsharded and accumulation != GradientAccumulationConfig(mode="auto"):
        reason = f"{why}, for which the parameters must stay gathered; set true, or take Interleaved1F1B"
        key: KeyPath = ("gradient_accumulation", "keep_params_unsharded")
        value = bool(accumulation.keep_params_unsharded)
        yield Problem(key, reason, value, also=(_SCHEDULE, ("gradient_accumulation", "mode")))


def split_backward_checkpoints_whole_modules(config: JobConfig) -> Iterator[Problem]:
    """Selective activation checkpointing by operation returns a saved result once; these schedules need it twice."""
    checkpointing, schedule = config.activation_checkpoint, config.parallelism.pipeline_parallel_schedule
    if config.parallelism.pipeline_parallel_degree == 1 or schedule not in SPLIT_BACKWARD_SCHEDULES:
        return
    mode: KeyPath = ("activation_checkpoint", "mode")
    why = f"keeps results for one backward, and {schedule} goes through a module twice"
    if checkpointing.mode == "selective" and checkpointing.selective_ac_option == "op":
        key: KeyPath = ("activation_checkpoint", "selective_ac_option")
        yield Problem(key, f'{why}; set a number, mode = "full", or take Interleaved1F1B', "op", also=(_SCHEDULE, mode))
    elif checkpointing.mode == "auto":
        reason = f'may choose "selective" per operation, which {why}; name a mode, such as "none" or "full"'
        yield Problem(mode, reason, "auto", also=(_SCHEDULE,))


def split_backward_is_not_compiled(config: JobConfig) -> Iterator[Problem]:
    """The backward of a graph is one operation."""
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree == 1 or not config.compile.enable:
        return
    if parallelism.pipeline_parallel_schedule in SPLIT_BACKWARD_SCHEDULES:
        reason = (
            "computes the gradients of weights apart, and the backward of a compiled block is one graph; set "
            '"Interleaved1F1B" or "1F1B", or compile.enable = false'
        )
        yield Problem(_SCHEDULE, reason, parallelism.pipeline_parallel_schedule, also=(("compile", "enable"),))


SPLIT_BACKWARD_RULES = (split_backward_is_reduced_once, split_backward_checkpoints_whole_modules)
"""The rules for gradient accumulation and activation checkpointing with these schedules."""

PIPELINE_RULES = (
    pipeline_options_have_a_pipeline,
    stages_suit_the_schedule,
    split_points_make_the_stages,
    layers_suffice_for_the_stages,
    microbatches_suit_the_schedule,
    split_backward_is_not_compiled,
)
"""The other rules for pipelines."""
