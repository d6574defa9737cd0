"""The recorder of tapes (`plan.memory.tape`). A tape lists what one rank allocates and frees in forward and backward of
one microbatch. With pipeline parallelism, a tape has the microbatches of a step.

The model is built, wrapped and trained by the functions of a run, on fake tensors. In place of the memory that FSDP2
allocates, a tape has the calls of FSDP2's hooks. So the tape depends neither on the mode of gradient accumulation nor
on the number of shards (see `plan.memory.recordings.recorded_job`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from titan_launch.config.axes import MODEL_AXES
from titan_launch.config.job import JobConfig
from titan_launch.core.import_string import user_files
from titan_launch.core.patches import replaced
from titan_launch.distributed.dtensor import local_tensor
from titan_launch.distributed.torch_private import (
    divided_shapes,
    functions_wrapped,
    hooks_watched,
    roots,
    unsharded_gradients,
)
from titan_launch.loss.build import build_loss
from titan_launch.loss.second_model import build_frozen_model, errors_on
from titan_launch.metrics.memory import is_in_backward, unsharded_gradients_watched
from titan_launch.metrics.traffic import TrafficCount
from titan_launch.models.blocks import remove_blocks
from titan_launch.models.build import BuiltModel
from titan_launch.models.host_values import attributes_digest
from titan_launch.parallel import fsdp
from titan_launch.parallel.batchnorm import RunningStatistics
from titan_launch.parallel.fsdp import Accumulation
from titan_launch.parallel.pipeline import pipeline_of
from titan_launch.plan.communication import Traffic
from titan_launch.plan.hardware import Kernels
from titan_launch.plan.job import plan_job
from titan_launch.plan.layout import Layout
from titan_launch.plan.memory.depth import block_signatures, without_blocks
from titan_launch.plan.memory.ledger import Category, Ledger, StepPoint
from titan_launch.plan.memory.recordings import Recordings, Subject, layout_of_recording
from titan_launch.plan.memory.replay_engine import ReplayEngine
from titan_launch.plan.memory.tape import (
    OF_FSDP,
    SECOND,
    Blocks,
    Bytes,
    Event,
    Gradient,
    Segment,
    Sent,
    Step,
    Tape,
    compact,
    is_uniform,
    root_path,
)
from titan_launch.plan.pipeline import parts_on_rank
from titan_launch.plan.step_time import Flops
from titan_launch.plan.types import ModelPlan, outermost, parent
from titan_launch.precision.observation import dtype_of
from titan_launch.trace.observers import ExchangesCounted, StepPoints
from titan_launch.trace.pipeline_recorder import Note, PipelineRecorder
from titan_launch.trace.step import assembled_without_values, watched_memory, watched_parts
from titan_launch.trace.trace_engine import (
    check_release,
    failures_explained,
    log_whole_trace,
    whole_traced_on_error,
)
from titan_launch.trace.work import work_of
from titan_launch.train.flops import flops_of_job, unknown_if_it_fails
from titan_launch.train.measure import hold_frozen
from titan_launch.train.model import build_job_model, inspect_model
from titan_launch.train.step import forward_backward


class _Recorder(Ledger):
    """A ledger that notes all changes of memory, in order, instead of adding them up. Memory of FSDP2 (`OF_FSDP`) is
    not noted."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Note] = []
        self.taking: tuple[str, str] | None = None
        """Full name of the parameter whose gradient was set last, and the dtype of the gradient."""
        self.reducing: tuple[str, int] | None = None
        """While FSDP2 prepares a gradient for its reduction: the parameter's full name and the bytes per element."""
        self.reduced: dict[str, int] = {}
        """Content of `Tape.reduced`."""

    def allocate(self, num_bytes: int, category: Category) -> None:
        if category not in OF_FSDP:
            self.notes.append(Bytes(((category, num_bytes),)))

    def free(self, num_bytes: int, category: Category) -> None:
        self.allocate(-num_bytes, category)

    def move(self, num_bytes: int, old: Category, new: Category) -> None:
        if new is Category.UNSHARDED_GRADIENTS and old not in OF_FSDP:
            assert self.taking is not None
            name, dtype = self.taking
            self.notes.append(Gradient(name, num_bytes, dtype, old))
        elif old != new:
            assert new not in OF_FSDP or old in OF_FSDP, (old, new)
            self.free(num_bytes, old)
            self.allocate(num_bytes, new)

    def enter(self, point: StepPoint) -> None:
        self.notes.append(point)

    def product(self) -> None:
        self.notes.append(Bytes((), in_product=True))

    def note_work(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note the work of an operation, if it has any."""
        if (work := work_of(operation, args, kwargs, result)) is not None:
            self.notes.append(work)

    def segments(self) -> Iterator[Segment]:
        """Yield the notes as segments: one for each point of the step that has events."""
        point, events = StepPoint(0, "forward", ""), list[Event]()
        for note in (*self.notes, point):
            if not isinstance(note, StepPoint):
                events.append(note)
                continue
            if events:
                yield Segment(point.phase, point.unit, tuple(compact(events)), point.microbatch)
            point, events = note, []


class _Exchanges(TrafficCount):
    """A counter that notes each collective along an axis of model parallelism. Reductions of gradients before those of
    FSDP2 are noted in `_Recorder.reduced` instead."""

    def __init__(self, recorder: _Recorder):
        super().__init__()
        self._recorder = recorder

    def add(self, traffic: Traffic) -> None:
        for axis in MODEL_AXES:
            exchange = traffic.along(axis)
            if exchange.calls and self._recorder.reducing is not None:
                name, size = self._recorder.reducing
                self._recorder.reduced[name] = exchange.sent_bytes // size
            elif exchange.calls:
                self._recorder.notes.append(Sent(axis.name, exchange.sent_bytes))


class TorchRecorder:
    """A recorder of jobs that uses PyTorch (`plan.memory.recordings.Recorder`). The process must have no process
    group."""

    def subject(self, job: JobConfig) -> Subject:
        """Return the `Subject` of a job. Models are built on the meta device. Raises ConfigError as a run does."""
        built = build_job_model(job)
        second, frozen = None, build_frozen_model(job)
        if frozen is not None:
            with errors_on(frozen.key):
                second = inspect_model(frozen.config, frozen.built)
        return Subject(inspect_model(job, built), built.flops_per_sample, second)

    def flops(self, job: JobConfig) -> Flops | None:
        """Count the FLOPs of a sample. Return None if the model does not run on the meta device."""
        with unknown_if_it_fails():
            return flops_of_job(job)
        return None

    def tapes(
        self, job: JobConfig, kernels: Kernels, subject: Subject, pipeline_rank: int, counts: tuple[int, ...]
    ) -> list[Tape]:
        """Record a job, and return its tapes (see `plan.memory.recordings.Recordings.tapes`).

        If many blocks are alike, only some of them are recorded. All blocks are recorded if the tapes show that the
        recorded blocks differ, or if the model does not run without the other blocks.

        Raises ConfigError for most dtype errors, as a run does, and for a model that cannot be traced. Raises UserError
        on an untested release of PyTorch.
        """
        check_release()
        layout, plan = layout_of_recording(job), plan_job(job, subject.inventory)
        parts, whole = parts_on_rank(plan, pipeline_rank), build_job_model(job)

        def record(built: BuiltModel, blocks: tuple[Blocks, ...], elsewhere: tuple[Blocks, ...] = ()) -> list[Tape]:
            removed = [path for part in (*blocks, *elsewhere) for path in part.likes]
            remove_blocks(built.module, removed)
            tapes = _record(job, built, without_blocks(plan, removed), kernels, pipeline_rank, counts)
            return [replace(tape, parts=blocks) for tape in tapes]

        def kinds(part: ModelPlan) -> list[Hashable]:
            own = block_signatures(part)
            if job.model.is_of_package:
                return own
            # The kind of a block includes the kind of the block before it. If that block saves its output, this block
            # does not save the same tensor again as its input.
            return list(zip(own[:1] + own, own, strict=False))

        def shortened(rank: int) -> tuple[Blocks, ...]:
            own = [(outermost(part.inventory.blocks), kinds(part)) for part in parts_on_rank(plan, rank)]
            return tuple(Blocks.shortened(blocks, of_blocks, variants(blocks)) for blocks, of_blocks in own)

        def variants(blocks: Sequence[str]) -> dict[str, Hashable]:
            """Return a digest of each block's attributes, such as the window of a layer. Return an empty dict if the
            model is not of this package."""
            own = blocks if job.model.is_of_package else ()
            return {path: attributes_digest(whole.module.get_submodule(path)) for path in own}

        repeated = shortened(pipeline_rank)
        if any(part.likes for part in repeated):
            # The stages of other ranks only run to find the shapes between the stages.
            others = (part for rank in range(layout.pipeline) if rank != pipeline_rank for part in shortened(rank))
            with whole_traced_on_error():
                tapes = record(whole, repeated, tuple(others))
                if all(is_uniform(tape, compares_work=not job.model.is_of_package) for tape in tapes):
                    return tapes
                log_whole_trace("the model's blocks differ in their operations or in the memory that they allocate")
        with failures_explained(job.model):
            return record(build_job_model(job), tuple(Blocks(outermost(part.inventory.blocks)) for part in parts))

    def works_in_fork(self) -> bool:
        """Return True if this process can run a backward. Autograd refuses a backward in a fork of a process in which
        autograd has started threads."""
        try:
            torch.ones((), requires_grad=True).backward()
        except RuntimeError:
            return False
        return True

    def files(self) -> list[str]:
        """Return the files of the user's modules that this process has imported."""
        return user_files()


def _record(
    config: JobConfig, built: BuiltModel, plan: ModelPlan, kernels: Kernels, pipeline_rank: int, counts: tuple[int, ...]
) -> list[Tape]:
    """Return the tape of one microbatch on a pipeline rank. With pipeline parallelism, return a tape of a step for each
    number of microbatches in `counts`. `built` is on the meta device, and is wrapped in place."""
    layout = layout_of_recording(config)
    rank = pipeline_rank * layout.ranks_per_stage
    recorder = _Recorder()
    path_of: dict[nn.Module, str] = {}

    split: list[nn.Module] = []
    """The stages whose backward is split. PyTorch sets the gradients of their weights without calling hooks."""

    def on_hook(name: str, module: nn.Module) -> None:
        if name in ("post_backward", "finish_backward"):
            for stage in split:  # before FSDP2 converts the gradients
                take_gradients(stage)
        again = name in ("post_forward", "complete_forward") and is_in_backward()
        recorder.notes.append(Step(name, path_of[module], int(again)))

    def take_gradients(stage: nn.Module) -> None:
        for parameter, gradient in unsharded_gradients(stage):
            recorder.taking = name_of[id(parameter)], dtype_of(gradient)
            memory.hold([gradient], Category.UNSHARDED_GRADIENTS)

    end_forward = fsdp.end_forward

    def noted_end_forward(root: nn.Module) -> None:
        on_hook("end_forward", root)
        end_forward(root)

    with ExitStack() as stack:
        stack.enter_context(hooks_watched(on_hook))
        stack.enter_context(replaced(fsdp, "end_forward", noted_end_forward))
        without_values = assembled_without_values(config, built, plan, layout, kernels, rank, recorder.notes.append)
        assembled, batches = stack.enter_context(without_values)
        model, frozen, mesh = assembled.module, assembled.frozen, assembled.mesh
        path_of |= {module: path for path, module in model.named_modules()}
        if frozen is not None:
            path_of |= {module: SECOND + path for path, module in frozen.module.named_modules()}
        pipeline = pipeline_of(model)
        name_of = {id(parameter): name for name, parameter in model.named_parameters()}
        stack.enter_context(_gradients_named(recorder, name_of))
        steps = StepPoints(recorder)
        memory = stack.enter_context(watched_memory(model, recorder))
        memory.on_operation = recorder.note_work
        path_of |= {root: root_path(None if pipeline is None else index) for index, root in enumerate(roots(model))}
        stack.enter_context(watched_parts(config, model, plan, steps))
        stack.enter_context(ExchangesCounted(mesh, _Exchanges(recorder)))
        statistics = RunningStatistics(model)  # a run holds this copy during the whole step
        loss = build_loss(model, plan, config, batches.num_classes, has_values=False, frozen=frozen)
        hold_frozen(memory, loss)
        num_items = torch.ones((), dtype=torch.int64)
        buffers = _buffers(model, statistics.saved_bytes, "")
        shapes = _divided_shapes(model, plan, name_of)
        if frozen is not None:
            buffers |= _buffers(frozen.module, {}, SECOND)
            names = {id(parameter): name for name, parameter in frozen.module.named_parameters()}
            divided = _divided_shapes(frozen.module, frozen.plan, names)
            shapes |= {SECOND + name: shape for name, shape in divided.items()}

        def taped() -> Tape:
            return Tape((), tuple(recorder.segments()), buffers, shapes, recorder.reduced)

        if pipeline is None:
            recorder.notes.clear()
            steps.begin_microbatch(0)
            if config.gradient_accumulation.row.defers:
                Accumulation(config.gradient_accumulation).begin_microbatch(model, is_last=False)
            microbatch = batches.make()
            memory.hold(microbatch, Category.INPUTS)
            forward_backward(model, microbatch, torch.device("cpu"), lambda: num_items, loss)
            del microbatch
            return [taped()]
        microbatch = memory.paused(batches.make)()  # not counted, because a run keeps it in host memory
        if config.parallelism.splits_backward:
            split += [local.module for local in pipeline.local]
        schedule = PipelineRecorder(pipeline, config, recorder.notes, memory, take_gradients, path_of, kernels == "cpu")
        tapes = []
        for count in counts:
            schedule.run([microbatch] * count, loss, num_items)
            tapes.append(taped())
        return tapes


def _buffers(model: nn.Module, copied: Mapping[str, int], prefix: str) -> dict[str, int]:
    """Return the bytes of each buffer of a model, plus those of the buffer's copy, by full name. `copied`: bytes of the
    copies, by name without `prefix`."""
    return {prefix + name: local_tensor(buffer).nbytes + copied.get(name, 0) for name, buffer in model.named_buffers()}


@contextmanager
def _gradients_named(recorder: _Recorder, name_of: Mapping[int, str]) -> Iterator[None]:
    """Within the `with` block, update `recorder.taking` and `recorder.reducing` by hooks of autograd and FSDP2.
    `name_of`: full name of each parameter of the model, by its `id()`."""

    def name_taken(fsdp_param: Any, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        recorder.taking = name_of[id(fsdp_param.sharded_param)], dtype_of(parameter.grad)

    def reducing(gradient_to_reduce: Any) -> Any:
        def reduce(fsdp_param: Any, gradient: Tensor) -> Any:
            recorder.reducing = name_of[id(fsdp_param.sharded_param)], gradient.element_size()
            try:
                return gradient_to_reduce(fsdp_param, gradient)
            finally:
                recorder.reducing = None

        return reduce

    with unsharded_gradients_watched(name_taken), functions_wrapped({"gradient_to_reduce": reducing}):
        yield


def _divided_shapes(model: nn.Module, plan: ModelPlan, name_of: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    """Return the shape of this rank's part of each parameter that tensor parallelism divides, by full name. A division
    by expert parallelism does not count. `name_of`: as in `_gradients_named`."""
    shapes = {}
    for parameter, own in divided_shapes(model):
        name = name_of[id(parameter)]
        shape = plan.sharded_by[parent(name)].whole(own)
        if shape != tuple(parameter.shape):
            shapes[name] = shape
    return shapes


def recorded_engine(config: JobConfig, layout: Layout, kernels: Kernels) -> ReplayEngine:
    """Return the planner's engine for a job, which predicts no times. The engine records the tapes that are not in the
    cache. The process must have no process group."""
    return ReplayEngine(config, layout, kernels, Recordings(config, layout, kernels, TorchRecorder))
