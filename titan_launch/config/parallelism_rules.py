"""Rules across sections for tensor and context parallelism. Part of `titan_launch.config.rules`."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from titan_launch.config.architectures import ARCHITECTURES, known_args
from titan_launch.config.architectures.llama3 import Llama3Args
from titan_launch.config.job import JobConfig
from titan_launch.errors import KeyPath, Problem, nearest_multiples

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
"""Keys that say how, and the degree without which there is nothing to say."""


def options_have_a_degree(config: JobConfig) -> Iterator[Problem]:
    """How a thing is divided is said only where it is. (Defaults are let pass: a record has them.)"""
    for name, value in config.parallelism.changed(*_OPTIONS):
        degree = _OPTIONS[name]
        if getattr(config.parallelism, degree) == 1:
            reason = f"is for parallelism.{degree} above 1; set that, or drop this key"
            yield Problem(("parallelism", name), reason, value, also=(("parallelism", degree),))


def matrices_can_be_divided(config: JobConfig) -> Iterator[Problem]:
    """Every rank has as many heads, and as much of the feed-forward and of the vocabulary, as any other."""
    degree, args = config.parallelism.tensor_parallel_degree, known_args(config.model)
    if degree == 1 or not isinstance(args, Llama3Args):
        return
    names = ("n_heads", "n_kv_heads", "hidden_dim", "vocab_size")
    sizes = {name: int(getattr(args, name)) for name in names}
    misfits = [f"{name} ({size})" for name, size in sizes.items() if size % degree]
    if misfits:
        remedy = f"set {_divisors(gcd(*sizes.values()))}"
        reason = f"each rank has a part of every matrix, and {degree} does not divide {', '.join(misfits)}; {remedy}"
        yield Problem(_TENSOR, reason, degree, also=_MODEL)


def models_can_be_divided(config: JobConfig) -> Iterator[Problem]:
    """A ResNet has neither heads nor tokens."""
    for key, degree in (
        (_TENSOR, config.parallelism.tensor_parallel_degree),
        (_CONTEXT, config.parallelism.context_parallel_degree),
    ):
        if config.model.name == "resnet" and degree > 1:
            reason = "the model resnet has no plan for it; set 1, and divide the data (data_parallel_shard_degree)"
            yield Problem(key, reason, degree, also=_MODEL)


def context_is_of_sequences(config: JobConfig) -> Iterator[Problem]:
    """An image is no sequence, whatever a model of the user's own declares."""
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
    """Statistics of a part of the tokens are others."""
    args, parallelism = known_args(config.model), config.parallelism
    if not isinstance(args, Llama3Args) or args.norm != "batchnorm":
        return
    if parallelism.tensor_parallel_degree > 1 and parallelism.sequence_parallel:
        reason = 'model.args.norm = "batchnorm" would take its statistics from a part of the tokens; set false'
        yield Problem(_SEQUENCE, reason, True, also=(_TENSOR, *_MODEL))
    if parallelism.context_parallel_degree > 1 and config.batchnorm.statistics == "local":
        reason = (
            'model.args.norm = "batchnorm" would take its statistics from a part of the tokens; set '
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
"""All of them."""


def _divisors(number: int) -> str:
    found = [str(each) for each in range(1, number + 1) if number % each == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"
