"""Pipeline stages: division of a model into stages, shapes of the tensors between stages, and a forward through all
stages.

A rank may hold several stages (interleaved and zero-bubble schedules). FSDP2 wraps each stage separately, and each
stage has its own forward. All stages of a rank share their modules with the original model. Initialization, the
optimizer and checkpoints use this model, which has all parameters of the rank under their full names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_launch.config.axes import PIPELINE
from titan_launch.config.sections.parallelism import ParallelismConfig
from titan_launch.core.errors import ConfigError, config_error
from titan_launch.distributed.mesh import Mesh
from titan_launch.distributed.torch_private import roots, set_roots
from titan_launch.models.blocks import cut
from titan_launch.parallel.fsdp import cast_at_boundaries
from titan_launch.parallel.tensor_parallel import token_shards
from titan_launch.plan.pipeline import parts_on_rank, stage_part
from titan_launch.plan.types import ModelPlan, Stage
from titan_launch.precision.policy import cast_tensors, torch_dtype


@dataclass(frozen=True)
class LocalStage:
    """A pipeline stage of this rank."""

    stage: Stage
    module: nn.Module
    """The model's module tree, in which pass-through modules replace the modules of other stages. The tree is the model
    itself, or a copy if this rank has several stages."""


@dataclass(frozen=True)
class Pipeline:
    """The pipeline stages of this rank, and the shapes of the tensors between all stages."""

    plan: ModelPlan
    """The plan of the whole model."""

    local: tuple[LocalStage, ...]
    """The stages of this rank, in the order of the pipeline."""

    boundaries: Boundaries
    group: dist.ProcessGroup
    """The process group of the pipeline axis."""

    @property
    def has_last(self) -> bool:
        """Return True if this rank holds the last stage, and so computes the loss."""
        return self.local[-1].stage.index == len(self.plan.stages) - 1


def divide(
    model: nn.Module,
    plan: ModelPlan,
    mesh: Mesh,
    parallelism: ParallelismConfig,
    wrap: Callable[[nn.Module, ModelPlan], None],
) -> None:
    """Reduce a model on the meta device to the stages of this rank, in place. Call `wrap(module, plan)` for each of
    these stages, with the stage's module and plan."""
    ranks = mesh.along(PIPELINE)
    assert ranks is not None
    rank = ranks.get_local_rank()
    boundaries = Boundaries(copy.deepcopy(model), plan, token_shards(parallelism))
    own = [stage for stage in plan.stages if stage.rank == rank]
    others = [path for stage in plan.stages if stage.rank != rank for path in stage.modules]
    modules = cut(model, [stage.modules for stage in own], others)
    for stage, module in zip(own, modules, strict=True):
        wrap(module, stage_part(plan, stage))
    set_roots(model, modules)
    local = tuple(LocalStage(stage, module) for stage, module in zip(own, modules, strict=True))
    vars(model)[_PIPELINE] = Pipeline(plan, local, boundaries, ranks.get_group())


_PIPELINE = "_titan_launch_pipeline"


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """Return the pipeline of a model that `divide` has divided; None for a whole model."""
    return vars(model).get(_PIPELINE)


def parts(model: nn.Module, plan: ModelPlan) -> list[tuple[nn.Module, ModelPlan]]:
    """Return the modules that this rank runs, each with its plan: the stages of this rank, or the whole model."""
    pipeline = pipeline_of(model)
    rank = 0 if pipeline is None else pipeline.local[0].stage.rank
    return list(zip(roots(model), parts_on_rank(plan, rank), strict=True))


class Boundaries:
    """Shapes and dtypes of the tensors between stages, found by a forward on the meta device.

    Every rank finds the same shapes, so no communication is needed.
    """

    def __init__(self, model: nn.Module, plan: ModelPlan, token_shards: int = 1):
        """Cast `model` to the dtypes in which FSDP2 will compute. `model`: an unwrapped copy on the meta device.
        `token_shards`: result of `parallel.tensor_parallel.token_shards`."""
        cast_tensors(model, plan, lambda unit: unit.compute_dtype)
        for path, policy in plan.policies.items():
            if path:
                cast_at_boundaries(model.get_submodule(path), policy)
        first = plan.units[-1].policy.input_dtype  # of the root unit
        self._first_dtype = None if first is None else torch_dtype(first)
        self._model = model
        self._pipeline_order = [path for stage in plan.stages for path in stage.modules]
        self._stages = cut(model, [stage.modules for stage in plan.stages], ())
        self._token_shards = token_shards
        self._known: dict[tuple[torch.Size, torch.dtype], tuple[Tensor, ...]] = {}

    def of(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the input of every stage, then the output of the last stage, as tensors on the meta device.

        `inputs`: a microbatch of one rank; only its shape and dtype are used. With sequence parallelism, tensors
        between stages have the shape of one rank's part. Raise ConfigError if a forward on the meta device fails, or if
        a stage does not return one tensor. The first call also raises ConfigError if the model does not run its modules
        in pipeline order.
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
        """Raise ConfigError unless the model runs its modules in pipeline order.

        Each module must take the output of the module before it, unchanged, and the model must return the output of the
        last module.
        """
        check = _OrderCheck(self._pipeline_order, x)
        with check.watched(self._model):
            y = self._run(self._model, x, "the model")
        check.end(y)

    def _run(self, module: nn.Module, x: Tensor, what: str) -> Tensor:
        try:
            y = module(x)
        except ConfigError:
            raise
        except Exception as error:
            reason = (
                f"pipeline parallelism runs the model on the meta device, and {what} fails there: "
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}; see pipeline_order in "
                "docs/how_to/parallelize_your_model.md"
            )
            raise config_error(("model", "name"), reason) from error
        if not isinstance(y, Tensor):
            reason = f"with pipeline parallelism, {what} must return one tensor, but returns a {type(y).__name__}"
            raise config_error(("model", "name"), reason)
        return y

    def _on_one_rank(self, tensor: Tensor) -> Tensor:
        """Return one rank's part of a tensor between stages. Sequence parallelism divides dimension 1, the tokens."""
        part = tensor if self._token_shards == 1 else tensor.chunk(self._token_shards, dim=1)[0]
        # PyTorch's stages require the strides of a new tensor. `contiguous` would keep the strides of dimensions of
        # size 1.
        return torch.empty(part.shape, dtype=part.dtype, device=part.device)


class _OrderCheck:
    """A check, in one forward, that each module of the pipeline order takes the output of the module before it."""

    def __init__(self, pipeline_order: Sequence[str], inputs: Tensor):
        self._next = list(pipeline_order)
        self._last_name = "the model's input"
        self._last_output: Any = inputs

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """Check the forward of `model` that runs in the `with` block. The input of a module is checked before the
        module's own hooks run. The module's output is noted after these hooks have run."""
        with ExitStack() as stack:
            for path in self._next:
                module = model.get_submodule(path)
                before = module.register_forward_pre_hook(partial(self._check_input, path), prepend=True)
                after = module.register_forward_hook(partial(self._note_output, path))
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def _check_input(self, path: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        expected = self._next.pop(0) if self._next else "no module"
        if path != expected:
            raise _no_pipeline_order(f"the model runs {path}, but pipeline_order has {expected} next")
        if not args or args[0] is not self._last_output:
            raise _no_pipeline_order(f"the input of {path} must be {self._last_name}, unchanged")

    def _note_output(self, path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._last_output, self._last_name = output, f"the output of {path}"

    def end(self, output: Tensor) -> None:
        """Raise ConfigError if a module did not run, or if `output` is not the last module's output."""
        if self._next:
            raise _no_pipeline_order(f"the model does not run {self._next[0]}")
        if output is not self._last_output:
            raise _no_pipeline_order(f"the model must return {self._last_name}, unchanged")


def _no_pipeline_order(reason: str) -> ConfigError:
    advice = "each module must take the output of the module before it, unchanged"
    return config_error(
        ("model", "name"), f"the model's pipeline_order is not the order of its forward: {reason}; {advice}"
    )


def run_forward(
    pipeline: Pipeline, inputs: Tensor, device: torch.device, arguments: Mapping[str, Tensor]
) -> Tensor | None:
    """Run the forward of one microbatch through all stages. Collective over the pipeline.

    Return the model's output on the rank of the last stage, and None on the other ranks. The output of each stage is
    sent to the rank of the next stage. On GPUs, the sender does not wait until the output is received.

    `inputs`: the input of the model, the same on all ranks of the pipeline. `arguments`: the keyword arguments of every
    stage.
    """
    rank_of = {stage.index: stage.rank for stage in pipeline.plan.stages}
    boundaries = pipeline.boundaries.of(inputs)
    x, last = inputs, len(rank_of) - 1
    for local in pipeline.local:
        index = local.stage.index
        if index and rank_of[index - 1] != local.stage.rank:
            x = torch.empty_like(boundaries[index], device=device)
            dist.recv(x, group=pipeline.group, group_src=rank_of[index - 1])
        x = local.module(x, **arguments)
        if index < last and rank_of[index + 1] != local.stage.rank:
            dist.send(x.contiguous(), group=pipeline.group, group_dst=rank_of[index + 1])
    return x if pipeline.has_last else None
