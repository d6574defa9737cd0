"""Recording of a pipeline's step. PyTorch's schedule runs with all microbatches, but stages run only a few of them.

Microbatches of one kind (`_Kind`) allocate the same memory. So each stage runs only the first microbatch of each kind.
For the other microbatches, a stand-in returns a tensor of the same shape. Memory that the schedule itself allocates and
holds is recorded for all microbatches.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Placement

from titan_launch.config.job import JobConfig
from titan_launch.core.patches import replaced
from titan_launch.data.sources import Batch
from titan_launch.distributed.dtensor import local_tensor
from titan_launch.loss.interface import Loss
from titan_launch.metrics.memory import LiveMemory
from titan_launch.parallel.fsdp import Accumulation, discard_pending
from titan_launch.parallel.pipeline import Pipeline
from titan_launch.plan.memory.ledger import Category, StepPoint
from titan_launch.plan.memory.tape import Bytes, Event, Gradient, Step
from titan_launch.train import pipeline_step
from titan_launch.train.pipeline_step import HiddenModule, PipelinedStep, ScheduledStage


class _Call(NamedTuple):
    """A call of a method of PyTorch's stage, such as `forward_one_chunk`, for one microbatch."""

    method: str
    stage: int
    microbatch: int

    @property
    def key(self) -> tuple[int, int]:
        """The stage and the microbatch."""
        return self.stage, self.microbatch


class _Kind(NamedTuple):
    """The properties that decide how much memory a microbatch allocates on a stage. Microbatches with equal properties
    allocate the same memory."""

    stage: int
    actions: tuple[str, ...]
    """The actions of the microbatch. A zero-bubble schedule may split a backward into two actions: one for inputs, one
    for weights. Empty if the schedule lists no actions. Such a schedule splits no backward."""

    adds: bool
    """True if a split backward adds to the gradients of an earlier microbatch, in place."""

    outlives: bool
    """True if the stage's output for the microbatch is still held after the backward of the microbatch."""


Note = StepPoint | Event


@dataclass
class PipelineRecorder:
    """A recorder that runs the step of a pipeline on one rank, and notes what the schedule and the stages do."""

    pipeline: Pipeline
    config: JobConfig
    notes: list[Note]
    memory: LiveMemory
    take_gradients: Callable[[nn.Module], None]
    """Function that notes the gradients of a stage's parameters after the action for weights of a split backward."""

    roots: dict[nn.Module, str]
    """Path of each stage's FSDP2 root on the tape."""

    holds_sends: bool
    """True if the work object of a send keeps the sent tensors (`fake_group.sends_held`)."""

    _kinds: dict[tuple[int, int], _Kind] = field(default_factory=dict)
    """The kind of each microbatch on each stage, by (stage, microbatch)."""

    _runs: set[tuple[int, int]] = field(default_factory=set)
    """The microbatches that stages run, as (stage, microbatch)."""

    _known: dict[tuple[str, _Kind], list[Note]] = field(default_factory=dict)
    """The notes of a stage, by the method that ran it (`_Call.method`) and the kind of the microbatch."""

    _parts: list[tuple[_Call | None, list[Note]]] = field(default_factory=list)
    """The notes of the step in order: those of each call of a stage, and with None those between two calls."""

    _shapes: dict[nn.Module, _Output] = field(default_factory=dict)
    """Shape and dtype of each stage's output, by the module of the stage."""

    _microbatch: int = 0

    def run(self, microbatches: list[Batch], loss: Loss, num_items: Tensor) -> None:
        """Run a step, and replace the content of `notes` by the notes of this step. Stages run only the microbatches of
        `_microbatches_to_run`. For the other microbatches, a stand-in runs."""
        outer = self

        class Noted(Accumulation):
            def begin_microbatch(self, model: nn.Module, is_last: bool) -> None:
                outer.notes.append(Step("begin_microbatch", outer.roots[model], int(is_last)))
                super().begin_microbatch(model, is_last)

        accumulation = Noted(self.config.gradient_accumulation)
        step = PipelinedStep(self.pipeline, self.config.parallelism, accumulation, torch.device("cpu"))
        for local in self.pipeline.local:
            discard_pending(local.module)
            local.module.zero_grad()
        gc.collect()  # frees objects that an earlier step has left
        with ExitStack() as stack:
            self._watch(stack)
            self._kinds = self._kinds_of(step.schedule_for(microbatches), len(microbatches))
            self._runs = self._microbatches_to_run()
            self.notes.clear()
            self._parts.clear()
            step(microbatches, loss, lambda: num_items)
            self._end_part(None)
        composed = list(self._composed())
        # The notes between the calls of stages are from this run, but the notes of a call may be those of another
        # microbatch, which freed other tensors. The difference in the bytes that stay allocated is added at the end.
        left = _left(note for _, own in self._parts for note in own)
        left.subtract(_left(composed))
        self.notes[:] = [*composed, Bytes(tuple((category, n) for category, n in left.items() if n))]

    def _kinds_of(self, schedule: Any, num_microbatches: int) -> dict[tuple[int, int], _Kind]:
        """Return the kind of each microbatch on each stage of this rank, in the order of the microbatches."""
        local = self.pipeline.local
        found: dict[tuple[int, int], tuple[str, ...]] = {
            (own.stage.index, microbatch): () for own in local for microbatch in range(num_microbatches)
        }
        order = getattr(schedule, "pipeline_order", None) or {}
        for action in order.get(local[0].stage.rank, ()):
            if action is not None and (key := (action.stage_index, action.microbatch_index)) in found:
                found[key] = (*found[key], str(action.computation_type))
        num_stages, first = len(self.pipeline.plan.stages), local[0].stage.index
        outliving = {(num_stages - 1, num_microbatches - 1)}  # the schedule keeps the model's last output
        if self.holds_sends and isinstance(schedule, Schedule1F1B):
            # The schedule keeps the work object of the last send before the first backward until all forwards are done.
            outliving.add((first, min(num_microbatches, num_stages - first) - 2))
        return {
            key: _Kind(key[0], actions, self.config.parallelism.splits_backward and key[1] > 0, key in outliving)
            for key, actions in found.items()
        }

    def _microbatches_to_run(self) -> set[tuple[int, int]]:
        """Return the first microbatch of each kind, without the kinds that an earlier call of `run` has run. With
        activation offloading, return all microbatches, because a forward completes the copies of the forward before
        it."""
        if self.config.activation_checkpoint.offload:
            return set(self._kinds)
        known, first = {kind for _, kind in self._known}, dict[_Kind, tuple[int, int]]()
        for key, kind in self._kinds.items():
            first.setdefault(kind, key)
        return {key for kind, key in first.items() if kind not in known}

    def _watch(self, stack: ExitStack) -> None:
        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            stack.enter_context(replaced(PipelineStage, name, self._marked(name, getattr(PipelineStage, name))))
        whole_backward = ScheduledStage.backward_one_chunk

        def backward_one_chunk(stage: ScheduledStage, microbatch: int, *args: Any, **kwargs: Any) -> None:
            self._microbatch = microbatch
            whole_backward(stage, microbatch, *args, **kwargs)

        stack.enter_context(replaced(ScheduledStage, "backward_one_chunk", backward_one_chunk))
        forward = HiddenModule.forward
        weight = torch.zeros((), requires_grad=True)

        def run(hidden: HiddenModule, *args: Any, **kwargs: Any) -> Any:
            stage = next(local.stage.index for local in self.pipeline.local if local.module is hidden.module)
            if (stage, self._microbatch) in self._runs:
                output = forward(hidden, *args, **kwargs)
                self._shapes[hidden.module] = _Output.of(output)
                return output
            leaf = None if args[0].requires_grad else weight  # in a split backward, only parameters may be leaves
            return _stand_in(args[0], leaf, self._shapes[hidden.module])

        stack.enter_context(replaced(HiddenModule, "forward", run))
        for name in ("pop_forward_order", "restore_forward_order"):
            stack.enter_context(replaced(pipeline_step, name, self._noted(name, getattr(pipeline_step, name))))
        accumulate = self.memory.allocating_for(Category.UNSHARDED_GRADIENTS, pipeline_step.accumulate_in_reduce_dtype)
        noted = self._noted("accumulate_in_reduce_dtype", accumulate)
        stack.enter_context(replaced(pipeline_step, "accumulate_in_reduce_dtype", noted))

    def _noted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(root: nn.Module, *args: Any) -> Any:
            self.notes.append(Step(name, self.roots[root], self._microbatch))
            return function(root, *args)

        return call

    def _marked(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(stage: ScheduledStage, microbatch: int, *args: Any, **kwargs: Any) -> Any:
            self._microbatch = microbatch
            self._end_part(None)
            result = function(stage, microbatch, *args, **kwargs)
            if name == "backward_weight_one_chunk":  # the schedule sets the gradients itself
                self.take_gradients(stage.submod)
            self._end_part(_Call(name, stage.stage_index, microbatch))
            return result

        return call

    def _end_part(self, call: _Call | None) -> None:
        """Move the content of `notes` to `_parts`. `call`: the call that has just ended; None between two calls."""
        own = self.notes.copy()
        del self.notes[: len(own)]  # not `clear`: a garbage collection may have freed a tensor, which adds a note
        self._parts.append((call, own))

    def _composed(self) -> Iterator[Note]:
        """Yield the notes of the whole schedule.

        For a microbatch that a stage has run, yield its own notes. For a microbatch that a stand-in ran, yield the
        notes of the first microbatch of the same kind that the stage has run.
        """
        for call, own in self._parts:  # a separate loop, because LoopedBFS runs the first microbatch's backward last
            if call is not None and call.key in self._runs:
                self._known.setdefault((call.method, self._kinds[call.key]), own)
        for call, own in self._parts:
            if call is None:
                yield from own
                continue
            kind = self._kinds[call.key]
            for note in own if call.key in self._runs else self._known[call.method, kind]:
                yield note._replace(microbatch=call.microbatch) if isinstance(note, StepPoint) else note


def _left(notes: Iterable[Note]) -> Counter[Category]:
    """Return the bytes that the notes allocate and do not free, by category. Unsharded gradients are not included."""
    left: Counter[Category] = Counter()
    for note in notes:
        if isinstance(note, Bytes):
            left.update(dict(note.changes))
        elif isinstance(note, Gradient):
            left[note.category] -= note.num_bytes
    return left


class _Output(NamedTuple):
    """Shape and dtype of this rank's part of a stage's output. For a DTensor, also its mesh and placements."""

    shape: torch.Size
    dtype: torch.dtype
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()

    @classmethod
    def of(cls, output: Tensor) -> _Output:
        if not isinstance(output, DTensor):
            return cls(output.shape, output.dtype)
        return cls(local_tensor(output).shape, output.dtype, output.device_mesh, output.placements)


def _stand_in(x: Tensor, weight: Tensor | None, output: _Output) -> Tensor:
    """Return a tensor like the output of a stage. The backward of this tensor does not run the stage.

    `x`: the input of the stage. `weight`: a scalar that requires a gradient, if `x` requires none; else None.
    """
    own = x.to_local() if isinstance(x, DTensor) else x
    y: Tensor = _StandIn.apply(own, weight, output.shape, output.dtype)
    if output.mesh is None:
        return y
    return DTensor.from_local(y, output.mesh, output.placements, run_check=False)


class _StandIn(torch.autograd.Function):
    """Stand-in for the computation of a stage: the output and the gradients are empty tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        ctx.given = x.shape, x.dtype
        return x.new_empty(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        shape, dtype = ctx.given
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        return (
            gradient.new_empty(shape, dtype=dtype) if needs_input else None,
            gradient.new_zeros(()).to(torch.float32) if needs_weight else None,
            None,
            None,
        )
