"""Checks of the attributes by which a model declares tensor and context parallelism."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, get_args

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from titan_launch.config.axes import CONTEXT, TENSOR
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.parallelism import ParallelismConfig
from titan_launch.config.sections.precision import BatchNormConfig
from titan_launch.core.errors import ConfigError, KeyPath, Problem, config_error, did_you_mean
from titan_launch.core.globs import matches
from titan_launch.core.import_string import user_location
from titan_launch.models.blocks import PassThrough
from titan_launch.models.build import BuiltModel
from titan_launch.models.decoder.mixture_of_experts import Experts, MixtureOfExperts
from titan_launch.models.lora import LoRA
from titan_launch.models.spec import TensorStyle
from titan_launch.plan.freezing import ADAPTER
from titan_launch.plan.types import full_name
from titan_launch.plan.units.rule_assignment import nothing_matched

_SEQUENCE: KeyPath = ("parallelism", "sequence_parallel")
_NAME: KeyPath = ("model", "name")


class Division(NamedTuple):
    """The class of modules to which a style of tensor parallelism applies, and the dimension that the style shards."""

    cls: type[nn.Module] = nn.Module
    """The class that a module must have."""

    axis: int | None = None
    """The dimension along which the weight is sharded; None if the style shards nothing, except the weight of an
    `AllHeadsRMSNorm` (`heads`). For `experts`, it is the dimension of `w1`. For `by_head`, it is the dimension of every
    parameter."""

    what: str = ""
    """Name of the entries along this dimension in error messages, such as `output features`."""


DIVISIONS: dict[str, Division] = {
    **dict.fromkeys(("positions", "sequence", "input", "latent", "heads", "router"), Division()),
    "embedding": Division(nn.Embedding, 0, "rows"),
    "colwise": Division(nn.Linear, 0, "output features"),
    "by_head": Division(nn.Module, 0, "rows"),
    "rowwise": Division(nn.Linear, 1, "input features"),
    "head": Division(nn.Linear, 0, "output features"),
    "mixture": Division(MixtureOfExperts),
    "experts": Division(Experts, 1, "hidden features"),
    "shared_colwise": Division(nn.Linear, 0, "output features"),
    "shared_rowwise": Division(nn.Linear, 1, "input features"),
}
"""For each style: the modules to which it applies, and the dimension that it shards."""

_ABOUT_SHAPES = re.compile(r"\b(shapes?|sizes?|dimensions?)\b")


def explain_shapes(error: BaseException, config: JobConfig) -> ConfigError | None:
    """Return a ConfigError that explains `error`, if it is about shapes, and the job has tensor parallelism and a model
    that is not of this package. Otherwise, return None."""
    if not isinstance(error, (RuntimeError, ValueError)) or not _ABOUT_SHAPES.search(str(error)):
        return None
    model, degree = config.model, config.parallelism.degree(TENSOR)
    if degree == 1 or model.is_of_package:
        return None
    location, text = user_location(error), str(error).partition("\n")[0]
    reason = (
        f"the model fails{f' at {location}' if location else ''} with 1/{degree} of the heads and features on "
        "each rank; check that the model's attribute tensor_parallel has matching styles for connected layers, "
        "that reshapes use -1 in place of the number of heads, and that the number of heads is a multiple of the "
        "degree. See docs/how_to/parallelize_your_model.md "
        f"(PyTorch: {text})"
    )
    return config_error(_NAME, reason, model.name, also=(TENSOR.key,))


def style_by_module(model: nn.Module, styles: Mapping[str, TensorStyle]) -> dict[str, TensorStyle]:
    """Return the style of every module that a glob matches, by path. The first glob that matches decides.

    Modules of other pipeline stages are omitted.
    """
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, PassThrough):
            continue
        style = next((style for pattern, style in styles.items() if matches(pattern, path)), None)
        if style is not None:
            found[path] = style
    return found


def check_divisions(built: BuiltModel, config: JobConfig) -> None:
    """Raise ConfigError if a model on the meta device cannot be divided as it declares (`ModelSpec.tensor_parallel` and
    `ModelSpec.context_parallel`)."""
    for problems in (
        list(_tensor_problems(built.module, built.tensor_parallel, config.parallelism)),
        list(_context_problems(built.module, built.context_parallel, config)),
    ):
        if problems:
            raise ConfigError(problems)


def _tensor_problems(
    model: nn.Module, styles: Mapping[str, TensorStyle] | None, parallelism: ParallelismConfig
) -> Iterator[Problem]:
    degree = parallelism.degree(TENSOR)
    if degree == 1:
        return
    if not styles:
        reason = getattr(model, "no_tensor_parallel", None) or (
            "the model's attribute tensor_parallel is missing or empty; set it to a dict from globs of modules to "
            "styles (see docs/how_to/parallelize_your_model.md), or set tensor_parallel_degree = 1"
        )
        yield Problem(TENSOR.key, reason, degree)
        return
    unusable = [*_unknown_styles(styles), *_unmatched(model, styles)]
    if unusable:
        yield from unusable
        return
    found = style_by_module(model, styles)
    for path, style in found.items():
        yield from _misfits(path, model.get_submodule(path), style, degree)
        if style == "embedding" and ADAPTER in model.get_submodule(path)._modules:
            reason = (
                f"divides the rows of {path}, but the adapter of {path} needs all rows; set tensor_parallel_degree = "
                "1, or remove this module from lora.targets"
            )
            yield Problem(TENSOR.key, reason, degree, also=(("lora", "targets"),))
    yield from _unassigned(model, found)
    yield from _divided_ties(model, found)
    if "head" not in found.values():
        yield Problem(
            _NAME,
            'the model\'s tensor_parallel has no module of the style "head"; give this style to the layer that '
            "returns the logits",
        )
    if parallelism.sequence_parallel:
        yield from _not_by_sequence(model, found)


def _unknown_styles(styles: Mapping[str, TensorStyle]) -> Iterator[Problem]:
    known = get_args(TensorStyle)
    for pattern, style in styles.items():
        if style not in known:
            reason = f'tensor_parallel["{pattern}"] = {style!r} is not a style{did_you_mean(str(style), known)}'
            yield Problem(_NAME, f"{reason} (styles: {', '.join(known)})")


def _unmatched(model: nn.Module, styles: Mapping[str, TensorStyle]) -> Iterator[Problem]:
    paths = [path for path, _ in model.named_modules()]
    for pattern in styles:
        if not any(matches(pattern, path) for path in paths):
            yield Problem(_NAME, f'tensor_parallel["{pattern}"] {nothing_matched(pattern, paths)}')


def _misfits(path: str, module: nn.Module, style: TensorStyle, degree: int) -> Iterator[Problem]:
    division = DIVISIONS[style]
    if not isinstance(module, division.cls):
        library = "nn" if division.cls.__module__.startswith("torch.") else division.cls.__module__
        reason = f'{path} is a {type(module).__name__}, but its style in tensor_parallel, "{style}", requires '
        yield Problem(_NAME, f"{reason}the class {library}.{division.cls.__name__}; use another style")
        return
    if division.axis is None:
        return
    names = {"experts": ["w1"], "by_head": [name for name, _ in module.named_parameters(recurse=False)]}
    sizes = {module.get_parameter(name).shape[division.axis] for name in names.get(style, ["weight"])}
    for size in sorted(size for size in sizes if size % degree):
        reason = f'{path} ("{style}") has {size} {division.what}, which is not a multiple of {degree}'
        yield Problem(TENSOR.key, f"{reason}; set a degree that divides this number", degree, also=(("model", "args"),))


def _unassigned(model: nn.Module, found: Mapping[str, TensorStyle]) -> Iterator[Problem]:
    """Yield a problem if modules with parameters have no style, or a style for modules without parameters of their own
    (`input`, `mixture`). The reduction of the gradients of these parameters is then undefined."""
    owners = [
        path
        for path, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None and not isinstance(module, LoRA)
    ]
    for style in (None, "input", "mixture"):
        paths = [path for path in owners if found.get(path) == style]
        if not paths:
            continue
        more = f" (and for {len(paths) - 1} more)" if len(paths) > 1 else ""
        has, why = f'the style "{style}"', "it is for modules without parameters; use another style"
        if style is None:
            has, why = "no style", "each module with parameters needs one; add a style"
        reason = (
            f"the model's tensor_parallel has {has} for {paths[0] or 'the model itself'}{more}, but {why} "
            '("sequence" is for modules that process each token separately)'
        )
        yield Problem(_NAME, reason)


def _divided_ties(model: nn.Module, found: Mapping[str, TensorStyle]) -> Iterator[Problem]:
    """Yield a problem for each tied parameter whose modules have styles that shard it along different dimensions."""
    first: dict[int, str] = {}
    for path, style in found.items():
        for name, parameter in model.get_submodule(path)._parameters.items():
            if parameter is None:
                continue
            other = first.setdefault(id(parameter), path)
            if DIVISIONS[found[other]].axis != DIVISIONS[style].axis:
                reason = f'{other} ("{found[other]}") and {path} ("{style}") share the parameter {name}, but their '
                yield Problem(_NAME, f"{reason}styles shard it differently; use styles that shard the same dimension")


def _not_by_sequence(model: nn.Module, found: Mapping[str, TensorStyle]) -> Iterator[Problem]:
    """Yield a problem for each reason why a model cannot use sequence parallelism. The reasons: its forward needs all
    tokens, no module has the style `embedding`, or a BatchNorm needs all tokens for its statistics."""
    if getattr(model, "sequence_parallel", True) is False:
        reason = f"the forward of {type(model).__name__} needs all tokens between its layers"
        yield Problem(_SEQUENCE, f"{reason}; set sequence_parallel = false", True, also=(_NAME,))
        return
    if "embedding" not in found.values():
        reason = 'the model has no module of the style "embedding", whose output is divided by token'
        yield Problem(_SEQUENCE, f"{reason}; set sequence_parallel = false", True)
    norms = [path for path, style in found.items() if isinstance(model.get_submodule(path), _BatchNorm)]
    if norms:
        reason = f"{norms[0]} is a BatchNorm, whose statistics would cover only a part of the tokens"
        yield Problem(_SEQUENCE, f"{reason}; set sequence_parallel = false", True, also=(("model", "args"),))


Buffer = tuple[nn.Module, str, int]
"""A module, the name of one of its buffers, and the buffer's token axis."""


def buffers_along_sequence(model: nn.Module, axes: Mapping[str, int]) -> dict[str, Buffer]:
    """Return the buffers that a glob of `axes` matches, by full name. Buffers of a shared module appear once, by the
    module's first path. `axes`: the token axis of buffers, by glob of full names."""
    found = {}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            axis = next((axis for pattern, axis in axes.items() if matches(pattern, full_name(path, name))), None)
            if buffer is not None and axis is not None:
                found[full_name(path, name)] = (module, name, axis)
    return found


def _context_problems(model: nn.Module, axes: Mapping[str, int] | None, config: JobConfig) -> Iterator[Problem]:
    degree = config.parallelism.degree(CONTEXT)
    if degree == 1:
        return
    if axes is None:
        reason = (
            "the model has no attribute context_parallel, which declares how to divide its sequences; add this dict "
            "from globs of buffers with one row per position to the axis of the positions (see "
            "docs/how_to/parallelize_your_model.md), or set context_parallel_degree = 1"
        )
        yield Problem(CONTEXT.key, reason, degree)
        return
    yield from _wrong_buffers(model, axes, config.training.seq_len)
    yield from _local_statistics(model, degree, config.batchnorm)


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
            reason = f"{name} has the shape {tuple(buffer.shape)}, too small for {seq_len} tokens along axis {axis}"
            remedy = "correct the model's context_parallel, or give the buffer training.seq_len rows or more"
            yield Problem(_NAME, f"{reason}; {remedy}", also=(("training", "seq_len"),))
        elif own_name not in module._non_persistent_buffers_set:
            reason = f"{name} is divided like the sequence, so checkpoints would contain only one rank's part of it"
            yield Problem(_NAME, f"{reason}; register it with persistent=False")


def _local_statistics(model: nn.Module, degree: int, batchnorm: BatchNormConfig) -> Iterator[Problem]:
    norms = [path for path, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if norms and batchnorm.statistics == "local":
        reason = (
            f"the statistics of the BatchNorm {norms[0]} would cover only a part of every sequence; set "
            'batchnorm.statistics = "synchronized", or context_parallel_degree = 1'
        )
        yield Problem(CONTEXT.key, reason, degree, also=(("batchnorm", "statistics"),))
