"""What a model declares about its sequences for context parallelism, and whether it can be divided so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from titan_launch.config.batchnorm import BatchNormConfig
from titan_launch.errors import ConfigError, KeyPath, Problem, did_you_mean
from titan_launch.globs import matches
from titan_launch.plan.types import full_name

_DEGREE: KeyPath = ("parallelism", "context_parallel_degree")
_NAME: KeyPath = ("model", "name")

Buffer = tuple[nn.Module, str, int]
"""A module, the name of one of its buffers, and the axis of the tokens."""


def buffers_along_sequence(model: nn.Module, axes: Mapping[str, int]) -> dict[str, Buffer]:
    """The buffers that a glob of `axes` matches, by full name; a shared one once."""
    found = {}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            axis = next((axis for pattern, axis in axes.items() if matches(pattern, full_name(path, name))), None)
            if buffer is not None and axis is not None:
                found[full_name(path, name)] = (module, name, axis)
    return found


def check_context_plan(
    model: nn.Module, axes: Mapping[str, int] | None, degree: int, seq_len: int, batchnorm: BatchNormConfig
) -> None:
    """Raise ConfigError for everything that keeps a model on the meta device from having its sequences divided over
    `degree` ranks. `axes`: what it declares (`ModelSpec.context_parallel`)."""
    if degree == 1:
        return
    if axes is None:
        reason = (
            "the model does not say that its sequences can be divided (an attribute context_parallel of the module: "
            "globs of its buffers along the sequence, and the axis of the tokens in each; see docs/parallelism.md); "
            "declare it, or set 1"
        )
        raise ConfigError([Problem(_DEGREE, reason, degree)])
    problems = [*_wrong_buffers(model, axes, seq_len), *_local_statistics(model, degree, batchnorm)]
    if problems:
        raise ConfigError(problems)


def _wrong_buffers(model: nn.Module, axes: Mapping[str, int], seq_len: int) -> Iterator[Problem]:
    buffers = buffers_along_sequence(model, axes)
    for pattern in axes:
        if not any(matches(pattern, name) for name in buffers):
            known = [name for name, _ in model.named_buffers()]
            yield Problem(
                _NAME, f'context_parallel["{pattern}"] matches no buffer of the model{did_you_mean(pattern, known)}'
            )
    for name, (module, own_name, axis) in buffers.items():
        buffer = module._buffers[own_name]
        assert isinstance(buffer, Tensor)
        if not -buffer.ndim <= axis < buffer.ndim or buffer.shape[axis] < seq_len:
            reason = f"{name} has the shape {tuple(buffer.shape)}: no place for {seq_len} tokens along axis {axis}"
            yield Problem(_NAME, f"{reason}, which its context_parallel says", also=(("training", "seq_len"),))
        elif own_name not in module._non_persistent_buffers_set:
            reason = f"{name}, which is divided with the sequence, would go into checkpoints as one rank's part"
            yield Problem(_NAME, f"{reason}; register it with persistent=False")


def _local_statistics(model: nn.Module, degree: int, batchnorm: BatchNormConfig) -> Iterator[Problem]:
    norms = [path for path, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if norms and batchnorm.statistics == "local":
        reason = (
            f"the statistics of the BatchNorm {norms[0]} would be those of a part of every sequence; set "
            'batchnorm.statistics = "synchronized", or 1'
        )
        yield Problem(_DEGREE, reason, degree, also=(("batchnorm", "statistics"),))
