"""Pipeline stages: a model cut apart and wrapped, and what travels between the stages.

A rank may hold several stages (interleaved and zero-bubble schedules). Each is wrapped by FSDP2 as a model of its own,
and run as one. What is done to all that a rank holds (initial values, the optimizer, checkpoints) is done to the model
that they share, which has everything under its full name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_launch.core.errors import ConfigError, config_error
from titan_launch.distributed.mesh import Mesh
from titan_launch.distributed.torch_private import roots, set_roots
from titan_launch.models.stages import cut
from titan_launch.parallel.fsdp import cast_at_boundaries
from titan_launch.plan.pipeline import parts_on_rank, stage_part
from titan_launch.plan.types import ModelPlan, Stage
from titan_launch.precision.policy import torch_dtype


@dataclass(frozen=True)
class LocalStage:
    """A stage that this rank holds."""

    stage: Stage
    module: nn.Module
    """What is run: the model with nothing in the place of the other stages' modules."""


@dataclass(frozen=True)
class Pipeline:
    """The stages of a model, those of this rank among them, and what travels between them."""

    plan: ModelPlan
    """Of the whole model."""

    local: tuple[LocalStage, ...]
    """In order."""

    boundaries: Boundaries
    group: dist.ProcessGroup
    """The ranks along the pipeline."""

    @property
    def has_last(self) -> bool:
        """Whether this rank holds the last stage, and so computes the loss."""
        return self.local[-1].stage.index == len(self.plan.stages) - 1


def divide(
    model: nn.Module, plan: ModelPlan, mesh: Mesh, token_shards: int, wrap: Callable[[nn.Module, ModelPlan], None]
) -> None:
    """Leave of a whole model on the meta device what this rank holds, in place, and let `wrap` prepare each stage.

    `token_shards`: ranks that divide the tokens of the stream between layers (sequence parallelism).
    """
    assert mesh.pipeline is not None
    rank = mesh.pipeline.get_local_rank()
    boundaries = Boundaries(copy.deepcopy(model), plan, token_shards)
    own = [stage for stage in plan.stages if stage.rank == rank]
    others = [path for stage in plan.stages if stage.rank != rank for path in stage.modules]
    modules = cut(model, [stage.modules for stage in own], others)
    for stage, module in zip(own, modules, strict=True):
        wrap(module, stage_part(plan, stage))
    set_roots(model, modules)
    local = tuple(LocalStage(stage, module) for stage, module in zip(own, modules, strict=True))
    vars(model)[_PIPELINE] = Pipeline(plan, local, boundaries, mesh.pipeline.get_group())


_PIPELINE = "_titan_launch_pipeline"


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """The pipeline that a model was divided for; None where it is whole."""
    return vars(model).get(_PIPELINE)


def parts(model: nn.Module, plan: ModelPlan) -> list[tuple[nn.Module, ModelPlan]]:
    """What this rank runs, each with what of the whole model's plan is for it: one for each stage, or the model."""
    pipeline = pipeline_of(model)
    rank = 0 if pipeline is None else pipeline.local[0].stage.rank
    return list(zip(roots(model), parts_on_rank(plan, rank), strict=True))


class Boundaries:
    """What travels from stage to stage: shapes and dtypes, found by going through a copy of the model without numbers.

    Every rank finds the same for itself, so that nobody has to ask the others.
    """

    def __init__(self, model: nn.Module, plan: ModelPlan, token_shards: int = 1):
        """`model`: a copy on the meta device, not wrapped, which is given the dtypes that FSDP2 will compute in."""
        _compute_as_planned(model, plan)
        first = plan.units[-1].policy.input_dtype  # the root's
        self._first_dtype = None if first is None else torch_dtype(first)
        self._whole = model
        self._chain = [path for stage in plan.stages for path in stage.modules]
        self._stages = cut(model, [stage.modules for stage in plan.stages], ())
        self._token_shards = token_shards
        self._known: dict[tuple[torch.Size, torch.dtype], tuple[Tensor, ...]] = {}

    def of(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """The input of every stage, and the output of the last one, as tensors on the meta device.

        `inputs`: of the model, a microbatch on one rank; only shape and dtype count. Raises ConfigError for a model
        that is no chain.
        """
        key = (inputs.shape, inputs.dtype)
        if key not in self._known:
            self._known[key] = self._find(inputs)
        return self._known[key]

    @torch.no_grad()
    def _find(self, inputs: Tensor) -> tuple[Tensor, ...]:
        x = torch.empty_like(inputs, device="meta")
        if self._first_dtype is not None and x.is_floating_point():
            x = x.to(self._first_dtype)
        found = [x]
        for index, stage in enumerate(self._stages):
            found.append(self._run(stage, found[-1], f"stage {index}"))
        if not self._known:
            self._check_pipeline_order(x)
        return (found[0], *(self._on_one_rank(tensor) for tensor in found[1:-1]), found[-1])

    def _check_pipeline_order(self, x: Tensor) -> None:
        """Raise ConfigError unless the whole model runs the modules of its chain in order, each on what the one before
        has returned and nothing else, and returns what the last one does."""
        links = _Links(self._chain, x)
        with links.watched(self._whole):
            y = self._run(self._whole, x, "the model")
        links.end(y)

    def _run(self, module: nn.Module, x: Tensor, what: str) -> Tensor:
        try:
            y = module(x)
        except ConfigError:
            raise
        except Exception as error:
            reason = (
                f"pipeline parallelism goes through the model on the meta device, and {what} fails there: "
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}; see pipeline_order in "
                "docs/how_to/parallelism.md"
            )
            raise config_error(("model", "name"), reason) from error
        if not isinstance(y, Tensor):
            reason = f"{what} must return one tensor to go through a pipeline; it returns a {type(y).__name__}"
            raise config_error(("model", "name"), reason)
        return y

    def _on_one_rank(self, tensor: Tensor) -> Tensor:
        """What a rank has of what is between two stages, `(batch, tokens, features)` under sequence parallelism."""
        part = tensor if self._token_shards == 1 else tensor.chunk(self._token_shards, dim=1)[0]
        # PyTorch receives into a tensor with the same strides, and takes no others. `contiguous` would not change the
        # stride of a dimension of size 1.
        return torch.empty(part.shape, dtype=part.dtype, device=part.device)


class _Links:
    """What the modules of a chain hand on, one after the other."""

    def __init__(self, pipeline_order: Sequence[str], inputs: Tensor):
        self._next = list(pipeline_order)
        self._before = "the model's input"
        self._handed_on: Any = inputs

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """Follow a forward of a model, around the hooks that it has."""
        handles = []
        for path in self._next:
            module = model.get_submodule(path)
            handles.append(module.register_forward_pre_hook(partial(self._take, path), prepend=True))
            handles.append(module.register_forward_hook(partial(self._give, path)))
        yield
        for handle in handles:
            handle.remove()

    def _take(self, path: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        expected = self._next.pop(0) if self._next else "the end"
        if path != expected:
            raise _no_pipeline_order(f"the model runs {path} where {expected} comes next")
        if not args or args[0] is not self._handed_on:
            raise _no_pipeline_order(f"{path} is given something else than {self._before} as it is")

    def _give(self, path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._handed_on, self._before = output, f"the output of {path}"

    def end(self, output: Tensor) -> None:
        """The forward is over, and returned this."""
        if self._next:
            raise _no_pipeline_order(f"the model does not run {self._next[0]}")
        if output is not self._handed_on:
            raise _no_pipeline_order(f"the model returns something else than {self._before} as it is")


def _no_pipeline_order(reason: str) -> ConfigError:
    advice = "each module must take what the one before it returns, and nothing may be done to it on the way"
    return config_error(("model", "name"), f"its pipeline_order is not the order of its forward: {reason}; {advice}")


def _compute_as_planned(model: nn.Module, plan: ModelPlan) -> None:
    """Give a model the dtypes that FSDP2 gathers parameters in, and its casts at the boundaries of units."""
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                cast = parameter.detach().to(torch_dtype(plan.unit_of[path].compute_dtype))
                module._parameters[name] = nn.Parameter(cast, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                dtype = plan.buffer_dtypes.get(f"{path}.{name}" if path else name)
                module._buffers[name] = buffer if dtype is None else buffer.to(torch_dtype(dtype))
    for unit in plan.units[:-1]:
        for path in unit.modules:
            cast_at_boundaries(model.get_submodule(path), unit.policy)


def run_forward(pipeline: Pipeline, inputs: Tensor, device: torch.device) -> Tensor | None:
    """A forward through all stages without a backward, microbatch by microbatch; collective over the pipeline.

    `inputs`: a microbatch of the model, the same on the ranks along the pipeline. Returns the last stage's output on
    the rank that holds it, and None on the others, which go on as soon as theirs is taken.
    """
    rank_of = {stage.index: stage.rank for stage in pipeline.plan.stages}
    boundaries = pipeline.boundaries.of(inputs)
    x, last = inputs, len(rank_of) - 1
    for local in pipeline.local:
        index = local.stage.index
        if index and rank_of[index - 1] != local.stage.rank:
            x = torch.empty_like(boundaries[index], device=device)
            dist.recv(x, group=pipeline.group, group_src=rank_of[index - 1])
        x = local.module(x)
        if index < last and rank_of[index + 1] != local.stage.rank:
            dist.send(x.contiguous(), group=pipeline.group, group_dst=rank_of[index + 1])
    return x if pipeline.has_last else None
