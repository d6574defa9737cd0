"""Rules across sections for tensor, context, expert and pipeline parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from math import gcd, lcm

from titan_launch.config.axes import CONTEXT, EXPERT, PIPELINE, SHARD, TENSOR
from titan_launch.config.job import JobConfig
from titan_launch.config.rules.data import beyond_causal_attention
from titan_launch.config.sections.parallelism import ONE_STAGE_SCHEDULES, ParallelismConfig
from titan_launch.config.sections.training import GradientAccumulationConfig
from titan_launch.core.errors import KeyPath, Problem, nearest_multiples
from titan_launch.core.terminal import counted
from titan_launch.core.torch_release import SPLITS_BACKWARD_OF_EXPERTS
from titan_launch.models.architectures import ARCHITECTURES, known_args

_SEQUENCE: KeyPath = ("parallelism", "sequence_parallel")
_BALANCE: KeyPath = ("parallelism", "context_parallel_load_balance")
_SEQ_LEN: KeyPath = ("training", "seq_len")
_MODEL: tuple[KeyPath, ...] = (("model", "name"), ("model", "flavor"), ("model", "args"))


def matrices_can_be_divided(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if a size that tensor parallelism divides, such as the vocabulary size, is not a multiple of
    the degree (see `ModelArgs.tensor_parallel_sizes`)."""
    degree, args = config.parallelism.tensor_parallel_degree, known_args(config.model)
    if degree == 1 or args is None:
        return
    sizes = args.tensor_parallel_sizes()
    misfits = [f"{name} ({size})" for name, size in sizes.items() if size % degree]
    if misfits:
        remedy = f"set tensor_parallel_degree to {_divisors(gcd(*sizes.values()))}"
        reason = f"must divide {', '.join(misfits)}, because each rank holds a shard of every matrix; {remedy}"
        yield Problem(TENSOR.key, reason, degree, also=_MODEL)


def models_can_be_divided(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if the model does not support the tensor parallelism or the context parallelism of the job."""
    if config.model.name not in ARCHITECTURES:
        return
    args, parallelism = ARCHITECTURES[config.model.name].args, config.parallelism
    for key, degree, is_supported in (
        (TENSOR.key, parallelism.tensor_parallel_degree, args.supports_tensor_parallel),
        (CONTEXT.key, parallelism.context_parallel_degree, args.supports_context_parallel),
    ):
        if degree > 1 and not is_supported:
            reason = (
                f"is not supported by the model {config.model.name}; set {key[1]} = 1, and use data parallelism "
                "(data_parallel_shard_degree)"
            )
            yield Problem(key, reason, degree, also=_MODEL)


def ring_attention_is_causal(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if a job with context parallelism has a sliding window, a soft cap, attention sinks or packed
    documents, which ring attention does not support."""
    degree = config.parallelism.context_parallel_degree
    for what, also in beyond_causal_attention(config) if degree > 1 else ():
        reason = f"supports only plain causal attention, but the job has {what}; set context_parallel_degree = 1"
        yield Problem(CONTEXT.key, reason, degree, also)


def only_sequences_are_divided(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if the data consists of images and the job has context or sequence parallelism, which divides
    sequences of tokens. (`models_can_be_divided` reports a model that does not support the parallelism at all.)"""
    if config.data.unit == "tokens":
        return
    parallelism, architecture = config.parallelism, ARCHITECTURES.get(config.model.name)
    problems: list[tuple[KeyPath, int | bool, str]] = []
    if parallelism.context_parallel_degree > 1 and architecture is None:
        problems.append((CONTEXT.key, parallelism.context_parallel_degree, "context_parallel_degree = 1"))
    can_divide = architecture is None or architecture.args.supports_tensor_parallel
    if parallelism.tensor_parallel_degree > 1 and parallelism.sequence_parallel and can_divide:
        problems.append((_SEQUENCE, True, "sequence_parallel = false"))
    for key, value, remedy in problems:
        what = f'data.kind = "{config.data.kind}" gives {config.data.unit}'
        reason = f"divides sequences of tokens, but {what}; set {remedy}"
        yield Problem(key, reason, value, also=(("data", "kind"), TENSOR.key, *_MODEL))


def sequences_can_be_divided(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if the sequence length cannot be divided equally among the ranks."""
    parallelism, seq_len = config.parallelism, config.training.seq_len
    context, tensor = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    parts = 2 * context if parallelism.context_parallel_load_balance and context > 1 else context
    product = context * tensor if parallelism.sequence_parallel else context
    nearest = f"nearest: {nearest_multiples(seq_len, lcm(parts, product))}"
    also: tuple[KeyPath, ...] = (CONTEXT.key, _BALANCE, TENSOR.key, _SEQUENCE)
    if config.data.unit != "tokens":
        return
    if context > 1 and seq_len % parts:
        of = f"2 x context_parallel_degree ({context}), for context_parallel_load_balance" if parts > context else ""
        reason = f"must be a multiple of {parts} = {of or 'parallelism.context_parallel_degree'}"
        yield Problem(_SEQ_LEN, f"{reason}; {nearest}", seq_len, also=also)
    elif seq_len % product:
        of = f"parallelism.tensor_parallel_degree ({tensor})"
        if context > 1:
            of = f"{product} = parallelism.context_parallel_degree ({context}) x {of}"
        reason = f"must be a multiple of {of}, since parallelism.sequence_parallel divides the tokens"
        yield Problem(_SEQ_LEN, f"{reason}; {nearest}", seq_len, also=also)


def batch_norm_sees_whole_sequences(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if BatchNorm over tokens would compute its statistics from only a part of a microbatch's tokens,
    because several ranks share each sequence."""
    args, parallelism = known_args(config.model), config.parallelism
    setting = args and args.batchnorm_over_tokens()
    if setting is None:
        return
    if parallelism.tensor_parallel_degree > 1 and parallelism.sequence_parallel:
        reason = (
            f"the BatchNorms (model.args.{setting}) would see only a shard of the tokens; set sequence_parallel = false"
        )
        yield Problem(_SEQUENCE, reason, True, also=(TENSOR.key, *_MODEL))
    if parallelism.context_parallel_degree > 1 and config.batchnorm.statistics == "local":
        reason = (
            f"the BatchNorms (model.args.{setting}) would compute statistics from a shard of the tokens; set "
            'batchnorm.statistics = "synchronized", or set context_parallel_degree = 1'
        )
        key: KeyPath = ("batchnorm", "statistics")
        yield Problem(CONTEXT.key, reason, parallelism.context_parallel_degree, also=(key, *_MODEL))


def experts_can_be_divided(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if a job with expert parallelism has a model without experts. Also report a problem if the
    degree does not divide the number of experts, or the number of ranks over which FSDP2 shards parameters. (If
    `data_parallel_shard_degree` is -1, `plan_layout` checks the number of ranks.)"""
    parallelism, args = config.parallelism, known_args(config.model)
    degree, shard = parallelism.expert_parallel_degree, parallelism.data_parallel_shard_degree
    if degree == 1:
        return
    if args is not None:
        number = args.num_experts()
        reason = NO_EXPERTS if number is None else misfit_of_experts(degree, number, "the number of experts in a layer")
        if reason is not None:
            yield Problem(EXPERT.key, reason, degree, also=_MODEL)
    if shard != -1:
        reason = misfit_of_expert_ranks(degree, shard, parallelism.context_parallel_degree)
        if reason is not None:
            yield Problem(EXPERT.key, reason, degree, also=(SHARD.key, CONTEXT.key))


NO_EXPERTS = "divides experts over ranks, but the model has no experts; set expert_parallel_degree = 1"


def misfit_of_experts(degree: int, num_experts: int, experts: str) -> str | None:
    """Return the reason why `degree` does not suit `num_experts`; None if `degree` divides `num_experts`. `experts`:
    noun for these experts in the reason."""
    if num_experts % degree == 0:
        return None
    remedy = f"set expert_parallel_degree to {_divisors(num_experts)}"
    return f"must divide {experts} ({num_experts}), since each rank holds whole experts; {remedy}"


def misfit_of_expert_ranks(degree: int, shard: int, context: int) -> str | None:
    """Return the reason why `degree` does not suit the number of ranks over which FSDP2 shards parameters; None if
    `degree` divides this number. `shard`, `context`: the two degrees whose product is this number."""
    ranks = shard * context
    if ranks % degree == 0:
        return None
    product = f"data_parallel_shard_degree ({shard})"
    if context > 1:
        product = f"{ranks} = {product} x context_parallel_degree ({context})"
    return f"must divide {product}, whose ranks share the experts; nearest: {_nearest_divisors(degree, ranks)}"


PARALLELISM_RULES = (
    matrices_can_be_divided,
    models_can_be_divided,
    ring_attention_is_causal,
    only_sequences_are_divided,
    sequences_can_be_divided,
    batch_norm_sees_whole_sequences,
    experts_can_be_divided,
)
"""Rules for tensor, context and expert parallelism."""


def _divisors(number: int) -> str:
    found = [str(each) for each in range(1, number + 1) if number % each == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"


def _nearest_divisors(number: int, of: int) -> str:
    """Return the nearest divisors of `of` below and above `number`, as text: `2 or 4`. If no divisor is above, return
    only the divisor below."""
    divisors = [each for each in range(1, of + 1) if of % each == 0]
    below, above = (each for each in divisors if each < number), (each for each in divisors if each > number)
    return " or ".join(map(str, (max(below), *list(above)[:1])))


_SCHEDULE: KeyPath = ("parallelism", "pipeline_parallel_schedule")
_PER_RANK: KeyPath = ("parallelism", "pipeline_parallel_stages_per_rank")
_SPLIT: KeyPath = ("parallelism", "pipeline_parallel_split_points")
_BATCH: KeyPath = ("training", "global_batch_size")


def too_few_layers(parallelism: ParallelismConfig, layers: int) -> str:
    """Return the reason why `layers` layers are too few for the pipeline stages, with the remedy."""
    per_rank, wanted = parallelism.stages_per_rank, parallelism.num_stages
    times = f" ({per_rank} per rank)" if per_rank > 1 else ""
    remedy = f"set pipeline_parallel_degree to at most {max(1, layers // per_rank)}"
    return f"makes {wanted} stages{times}, but the model has only {counted(layers, 'layer')}; {remedy}"


def misfit_of_microbatches(
    parallelism: ParallelismConfig, num_microbatches: int, samples_each: int | None = None
) -> str | None:
    """Return the reason why the schedule does not support a number of microbatches per step, with the nearest valid
    global batch sizes. Return None if the schedule supports the number, and for a job without pipeline parallelism.

    `samples_each`: samples per microbatch, over all ranks; None if this number is unknown. Then the reason names
    numbers of microbatches in place of global batch sizes, or no number.
    """
    schedule, degree = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    if degree == 1:
        return None
    has = f"makes {num_microbatches} {'microbatch' if num_microbatches == 1 else 'microbatches'} per step"
    if schedule == "1F1B" and num_microbatches < degree:
        larger = "a larger value" if samples_each is None else f"at least {degree * samples_each}"
        remedy = f"set global_batch_size to {larger}, or use GPipe"
        return f"{has}, but 1F1B requires at least one per stage ({degree}); {remedy}"
    if schedule in _INTERLEAVED and not _makes_equal_rounds(num_microbatches, degree):
        below = next(n for n in range(num_microbatches, 0, -1) if _makes_equal_rounds(n, degree))
        above = next(n for n in count(num_microbatches) if _makes_equal_rounds(n, degree))
        each, unit = (1, " microbatches") if samples_each is None else (samples_each, "")
        return (
            f"{has}; {schedule} needs {num_microbatches // degree} rounds ({num_microbatches} // {degree} ranks) of "
            f"equal size; nearest: {below * each} or {above * each}{unit}"
        )
    return None


_INTERLEAVED = ("Interleaved1F1B", "InterleavedZeroBubble")
"""Schedules that process the microbatches in rounds of equal size. A round has at least as many microbatches as the
pipeline has ranks. If a step has fewer microbatches, they are one round."""


def _makes_equal_rounds(num_microbatches: int, ranks: int) -> bool:
    return num_microbatches % max(1, num_microbatches // ranks) == 0


def stages_suit_the_schedule(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if the schedule does not support the number of stages per rank."""
    parallelism = config.parallelism
    schedule, per_rank = parallelism.pipeline_parallel_schedule, parallelism.stages_per_rank
    wanted = 1 if schedule in ONE_STAGE_SCHEDULES else 2 if schedule == "ZBVZeroBubble" else per_rank
    if parallelism.pipeline_parallel_degree > 1 and per_rank != wanted:
        others = '"Interleaved1F1B", "LoopedBFS" and "InterleavedZeroBubble" support any number'
        reason = f"must be {wanted} for {schedule}; {others}"
        yield Problem(_PER_RANK, reason, per_rank, also=(_SCHEDULE,))


def split_points_make_the_stages(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if the number of split points is not the number of stages minus one."""
    parallelism = config.parallelism
    points, stages = parallelism.pipeline_parallel_split_points, parallelism.num_stages
    if parallelism.pipeline_parallel_degree > 1 and points and len(points) != stages - 1:
        reason = (
            f"divides the model into {len(points) + 1} stages instead of {stages} "
            f"({parallelism.pipeline_parallel_degree} ranks x {parallelism.stages_per_rank} per rank); "
            f"name {counted(stages - 1, 'module')}, or remove this key for an even division"
        )
        yield Problem(_SPLIT, reason, points, also=(PIPELINE.key, _PER_RANK, _SCHEDULE))


def layers_suffice_for_the_stages(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if a job with pipeline parallelism has tied embeddings, or more stages than layers. (If the job
    sets split points, the number of layers is not checked.)"""
    degree, args = config.parallelism.pipeline_parallel_degree, known_args(config.model)
    if degree == 1 or args is None:
        return
    layers, tied_by = args.num_layers(), args.tied_by()
    also: tuple[KeyPath, ...] = (_SCHEDULE, _PER_RANK, ("model", "flavor"), ("model", "args"))
    is_even = not config.parallelism.pipeline_parallel_split_points
    if layers is not None and layers < config.parallelism.num_stages and is_even:
        yield Problem(PIPELINE.key, too_few_layers(config.parallelism, layers), degree, also=also)
    if tied_by is not None:
        reason = (
            f"puts the embedding and the output layer, which share one weight ({tied_by}), on different stages; "
            f"set model.args.{tied_by} = false, or set pipeline_parallel_degree = 1 "
            "(FSDP2 and tensor parallelism support tied weights)"
        )
        yield Problem(PIPELINE.key, reason, degree, also=also)


def microbatches_suit_the_schedule(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if the schedule does not support the number of microbatches per step. (If the number of ranks or
    the local batch size is still unknown, `plan_layout` checks the number later.)"""
    parallelism, training = config.parallelism, config.training
    shard, batch = parallelism.data_parallel_shard_degree, training.global_batch_size
    ranks = None if shard == -1 else shard * parallelism.data_parallel_replicate_degree
    local = training.local_batch_size
    samples_each = None if ranks is None or local == "auto" else ranks * local
    if batch is None:
        num_microbatches = 1
    elif samples_each is None or batch % samples_each:
        return  # `plan_layout` reports the problem
    else:
        num_microbatches = batch // samples_each
    reason = misfit_of_microbatches(parallelism, num_microbatches, samples_each)
    if reason is not None:
        yield Problem(_BATCH, reason, batch, also=(_SCHEDULE, PIPELINE.key))


def split_backward_is_reduced_once(config: JobConfig) -> Iterator[Problem]:
    """For a schedule that splits backward, report a problem if gradients are reduce-scattered after every microbatch,
    or if parameters do not stay unsharded.

    In modes that reduce-scatter after every microbatch, FSDP2 reduces gradients at the end of each microbatch's
    backward. If backward is split, the gradients of weights are not yet complete at that point.
    """
    accumulation, schedule = config.gradient_accumulation, config.parallelism.pipeline_parallel_schedule
    if not config.parallelism.splits_backward:
        return
    why = f"{schedule} computes the gradients of weights later than those of activations"
    if accumulation.mode != "auto" and accumulation.row.reduce_scatters_each:
        kept = "" if accumulation.keep_params_unsharded else " and keep_params_unsharded = true"
        reason = f'{why}, and supports only one reduction per step; set mode = "deferred"{kept}, or use Interleaved1F1B'
        yield Problem(("gradient_accumulation", "mode"), reason, accumulation.mode, also=(_SCHEDULE,))
    elif not accumulation.keep_params_unsharded and accumulation != GradientAccumulationConfig(mode="auto"):
        reason = f"{why}, so parameters must stay unsharded; set keep_params_unsharded = true, or use Interleaved1F1B"
        key: KeyPath = ("gradient_accumulation", "keep_params_unsharded")
        value = bool(accumulation.keep_params_unsharded)
        yield Problem(key, reason, value, also=(_SCHEDULE, ("gradient_accumulation", "mode")))


def split_backward_checkpoints_whole_modules(config: JobConfig) -> Iterator[Problem]:
    """For a schedule that splits backward, report a problem if activation checkpointing is `auto` or selective by
    operation (`op`).

    A schedule that splits backward reads each saved result twice, but selective checkpointing by operation frees a
    result after it was read once.
    """
    checkpointing, schedule = config.activation_checkpoint, config.parallelism.pipeline_parallel_schedule
    if not config.parallelism.splits_backward:
        return
    mode: KeyPath = ("activation_checkpoint", "mode")
    why = f"frees each saved result after one read, but {schedule} reads each result twice"
    if checkpointing.mode == "selective" and checkpointing.selective_ac_option == "op":
        key: KeyPath = ("activation_checkpoint", "selective_ac_option")
        reason = f'{why}; set selective_ac_option to a number, or set mode = "full", or use Interleaved1F1B'
        yield Problem(key, reason, "op", also=(_SCHEDULE, mode))
    elif checkpointing.mode == "auto":
        reason = f'may choose selective checkpointing by operation, which {why}; set mode = "none" or "full"'
        yield Problem(mode, reason, "auto", also=(_SCHEDULE,))


def split_backward_supports_experts(config: JobConfig) -> Iterator[Problem]:
    """For a schedule that splits backward, report a problem if the model has experts and the installed PyTorch cannot
    split their backward."""
    args, schedule = known_args(config.model), config.parallelism.pipeline_parallel_schedule
    if SPLITS_BACKWARD_OF_EXPERTS or not config.parallelism.splits_backward or args is None:
        return
    if args.num_experts() is not None:
        reason = "splits the backward of experts, which needs torch 2.13 or later; use Interleaved1F1B or 1F1B"
        yield Problem(_SCHEDULE, reason, schedule, also=_MODEL)


SPLIT_BACKWARD_RULES = (split_backward_is_reduced_once, split_backward_checkpoints_whole_modules)
"""Rules for gradient accumulation and activation checkpointing with schedules that split backward."""

PIPELINE_RULES = (
    stages_suit_the_schedule,
    split_points_make_the_stages,
    layers_suffice_for_the_stages,
    microbatches_suit_the_schedule,
    split_backward_supports_experts,
)
"""The rules for pipeline parallelism that are not in SPLIT_BACKWARD_RULES."""
