"""Replay of one rank's step: the tape of a microbatch (`plan.memory.tape`), with FSDP2's memory and collectives. This
module does not import torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from titan_launch.config.axes import MODEL_AXES
from titan_launch.config.job import JobConfig
from titan_launch.config.optimizers import GroupSizes, ShardSize
from titan_launch.config.sections.section import DTYPE_BYTES
from titan_launch.config.sections.training import OptimizerConfig
from titan_launch.plan.communication import (
    Collectives,
    Exchange,
    Traffic,
    exchanged_units,
    shard_shape,
    traffic_of_microbatches,
    traffic_of_replicas,
)
from titan_launch.plan.hardware import Kernels
from titan_launch.plan.layout import Layout
from titan_launch.plan.memory.clock import Clock, Seconds
from titan_launch.plan.memory.fsdp import Context, ShardedUnit, Storage
from titan_launch.plan.memory.ledger import (
    MICROBATCHES,
    Category,
    Footprint,
    Ledger,
    StepPoint,
    book_update,
    ema_bytes,
    on_host,
    state_bytes,
    temporary_bytes,
)
from titan_launch.plan.memory.tape import SECOND, Bytes, Sent, Step, Tape, root_path
from titan_launch.plan.mup import WidthScales
from titan_launch.plan.param_groups import GroupSettings, trained_parameters
from titan_launch.plan.replica_shards import ExchangedUnit, chunk_numel, gradients_leave_early
from titan_launch.plan.speeds import Work
from titan_launch.plan.types import Inventory, ModelPlan, ModuleInfo, Unit, full_name, modules_by_unit, parent
from titan_launch.plan.units.order import plan_backward_prefetch, plan_forward_prefetch


@dataclass(frozen=True)
class ReplayedStep:
    """Memory, traffic and times of a replayed step."""

    footprint: Footprint
    traffic: Traffic
    seconds: Seconds


def local_plan(plan: ModelPlan, shapes: Mapping[str, tuple[int, ...]]) -> ModelPlan:
    """Return the plan in which each parameter that tensor parallelism divides has the shape of this rank's part.
    `shapes`: `Tape.shapes`."""
    if not shapes:
        return plan

    def local(module: ModuleInfo) -> ModuleInfo:
        names = [full_name(module.path, p.name) for p in module.parameters]
        if not any(name in shapes for name in names):
            return module
        pairs = zip(module.parameters, names, strict=True)
        return replace(module, parameters=tuple(replace(p, shape=shapes.get(n, p.shape)) for p, n in pairs))

    inventory: Inventory = replace(plan.inventory, modules=tuple(map(local, plan.inventory.modules)))
    return replace(plan, inventory=inventory)


def group_sizes(
    plans: Iterable[tuple[ModelPlan, ModelPlan]], config: OptimizerConfig, layout: Layout, scales: WidthScales
) -> list[GroupSizes]:
    """Return the sizes of the shards of the trained parameters, by optimizer group. If the optimizer is sharded over
    replicas, return the sizes of the chunks that a rank updates instead. `plans`: for each part of the model, its plan
    and the result of `local_plan`.

    A shared parameter is listed once, in the first group whose glob matches any of its paths.
    """
    groups: dict[str, tuple[GroupSettings, list[ShardSize]]] = {}
    for whole, local in plans:
        trained = trained_parameters(whole.inventory, config, scales)
        for name, parameter in local.inventory.parameters.items():
            if name in trained:
                unit = whole.unit_of[parent(name)]
                shape = shard_shape(parameter, unit, layout)
                num_elements = chunk_numel(shape, layout.optimizer_replicas)
                shard = ShardSize(trained[name].info.shape, num_elements, unit.storage_dtype)
                groups.setdefault(trained[name].group, (trained[name].settings, []))[1].append(shard)
    return [GroupSizes(*group) for group in groups.values()]


@dataclass(frozen=True)
class SecondModel:
    """The frozen second model of a loss: a reference, such as that of DPO, or the teacher of distillation."""

    config: JobConfig
    """Result of `config.rules.loss.frozen_job`."""

    plan: ModelPlan
    """Result of `plan.job.plan_untrained`."""


_WITH_NUMBER = {"post_forward", "complete_forward", "begin_microbatch", "pop_forward_order", "restore_forward_order"}
"""Values of `Step.name` whose methods take `Step.number` as an argument."""

_OF_CONTEXT = frozenset(dir(Context))
"""Values of `Step.name` that are methods of a root's `Context`. All other values are methods of `ShardedUnit`."""


def _joined(units: Mapping[Unit, ExchangedUnit], whole: ModelPlan) -> list[ExchangedUnit]:
    """Return the sizes of the units whose gradients a rank exchanges. Parts of one unit in several stages of the rank
    are added, because they are exchanged together. `whole`: the plan of all stages."""
    found: dict[Unit, ExchangedUnit] = {}
    for unit, part in units.items():
        own = whole.sharded_by[unit.modules[0]]
        if before := found.get(own):
            part = part._replace(numel=before.numel + part.numel, width=before.width + part.width)
        found[own] = part
    return list(found.values())


@dataclass(frozen=True)
class RankModel:
    """The parts of a model on one rank, with their plans and their tape: the input of a `Replay`."""

    whole: ModelPlan
    """The plan of the model with all blocks and stages."""

    plans: tuple[ModelPlan, ...]
    """The plan of the model with only the blocks on the tape. With pipeline parallelism, one plan for each stage of the
    rank."""

    tape: Tape
    first: Tape | None
    """The tape of the first microbatch; None if it is the same as `tape`."""

    layout: Layout
    optimizer: OptimizerConfig
    scales: WidthScales

    @cached_property
    def local_plans(self) -> list[ModelPlan]:
        """The results of `local_plan` for `plans`."""
        return [local_plan(plan, self.tape.shapes) for plan in self.plans]

    @cached_property
    def groups(self) -> list[GroupSizes]:
        """Sizes of the shards of the trained parameters, by optimizer group (`group_sizes`)."""
        pairs = zip(self.plans, self.local_plans, strict=True)
        return group_sizes(pairs, self.optimizer, self.layout, self.scales)

    @cached_property
    def exchanged(self) -> dict[Unit, ExchangedUnit]:
        """Sizes of the gradients that the replicas exchange, by unit (`communication.exchanged_units`)."""
        return {unit: size for plan in self.local_plans for unit, size in exchanged_units(plan, self.layout).items()}


class Replay:
    """A replay of one step on one rank: the parts of the model, with their FSDP2 units."""

    def __init__(self, config: JobConfig, model: RankModel, kernels: Kernels, second: SecondModel | None, clock: Clock):
        """`second`: the second model of the loss; None if the loss has none. `clock`: a new clock."""
        self._config = config
        self._model = model
        self._layout = layout = model.layout
        self._ledger = Ledger(on_host(config.training, kernels))
        self._clock = clock
        self._contexts: dict[str, Context] = {}
        """FSDP2's state of each root, by the path of the root on the tape."""
        self._units: dict[str, ShardedUnit] = {}
        """The unit of each module that FSDP2 wraps, by the path of the module on the tape."""
        self._places: dict[str, tuple[ShardedUnit, int]] = {}
        """For each parameter that FSDP2 manages, by full name: its unit, and its index in the unit's `parameters`."""
        for index, plan in enumerate(model.local_plans):
            self._add(root_path(index if layout.pipeline > 1 else None), config, plan)
        if second is not None:
            own = {name.removeprefix(SECOND): s for name, s in model.tape.shapes.items() if name.startswith(SECOND)}
            self._add(SECOND, second.config, local_plan(second.plan, own))
        for name, elements in model.tape.reduced.items():
            unit, index = self._places[name]
            unit.parameters[index].sent_elements = elements

    def _add(self, root: str, config: JobConfig, plan: ModelPlan) -> None:
        """Add the units of a model, or of a pipeline stage, whose root has the path `root` on the tape."""
        context = self._contexts[root] = Context(
            self._ledger,
            self._layout,
            self._config.gradient_accumulation,
            self._model.exchanged if gradients_leave_early(self._config.training) else {},
            self._config.parallelism.splits_backward,
            self._clock,
        )
        prefix, by_path = SECOND if root == SECOND else "", dict[str, ShardedUnit]()
        for unit, modules in zip(plan.units, modules_by_unit(plan.inventory, plan.units), strict=True):
            names, parameters = [], []
            for module in modules:
                policy = plan.unit_of[module.path]
                is_ignored = self._layout.is_ignored(policy, config.training.enable_cpu_offload)
                own = [parameter for parameter in module.parameters if parameter.tied_to is None]
                parameters += [(parameter, policy, is_ignored) for parameter in own]
                names += [full_name(module.path, parameter.name) for parameter in own if not is_ignored]
            sharded = ShardedUnit(context, unit, parameters)
            by_path |= dict.fromkeys(unit.modules, sharded)
            self._places |= {prefix + name: (sharded, index) for index, name in enumerate(names)}
        context.units = list(dict.fromkeys(by_path[m.path] for m in plan.inventory.modules if m.path in by_path))
        for path, ahead in plan_backward_prefetch(plan).items():
            by_path[path].prefetch = [by_path[other] for other in ahead]
        for path, ahead in plan_forward_prefetch(plan).items():
            by_path[path].forward_prefetch = [by_path[other] for other in ahead]
        self._units |= {prefix + path if path else root: unit for path, unit in by_path.items()}

    def step(self, num_microbatches: int) -> ReplayedStep:
        """Replay a step of `num_microbatches` microbatches. A `Replay` can replay only one step. Without pipeline
        parallelism, at most `MICROBATCHES` of them are replayed, and the traffic and the times of all microbatches of
        the layout follow from these."""
        self._ledger.enter(StepPoint(0, "forward", ""))
        self._allocate_state()
        count, layout, config = num_microbatches, self._layout, self._config
        if layout.pipeline > 1:
            self._play(0)
            self._clock.host("stage", count * config.parallelism.stages_per_rank)
            traffic, times = self._take_traffic(), [self._clock.seconds]
        else:
            count, seen, times = min(count, MICROBATCHES), [], [self._clock.seconds]
            for microbatch in range(count):
                for context in self._contexts.values():
                    context.begin_microbatch(microbatch == count - 1)
                self._play(microbatch)
                seen.append(self._take_traffic())
                times.append(self._clock.seconds)
            traffic = traffic_of_microbatches(seen, layout.num_microbatches)
        self._ledger.enter(StepPoint(count - 1, "optimizer", ""))
        for context in self._contexts.values():
            context.finish_exchange()
        temporaries = temporary_bytes(config.optimizer, self._model.groups, layout.optimizer_shards)
        units = _joined(self._model.exchanged, self._model.whole)
        book_update(self._ledger, temporaries, units, layout, gradients_leave_early(config.training))
        traffic += traffic_of_replicas(units, layout.optimizer_replicas)
        return ReplayedStep(self._ledger.footprint(), traffic, self._seconds(times, units))

    def _seconds(self, times: Sequence[Seconds], units: Iterable[ExchangedUnit]) -> Seconds:
        """Advance the clock by the update and by the collectives between replicas after backward. Return the times of
        the whole step.

        `times`: the times at the start of the step and after each replayed microbatch. With pipeline parallelism, only
        the times after all microbatches. `units`: the units whose gradients the replicas exchange.
        """
        replicas, every = self._layout.optimizer_replicas, self._layout.num_microbatches
        for unit in units:
            if not gradients_leave_early(self._config.training):
                self._clock.wait(self._clock.exchange_replicas("reduce_scatter", replicas * unit.reduced))
            self._clock.wait(self._clock.exchange_replicas("all_gather", replicas * unit.chunks))
        groups = self._model.groups
        trained = sum(shard.num_elements * DTYPE_BYTES[shard.dtype] for group in groups for shard in group.shards)
        self._clock.host("parameter", sum(len(group.shards) for group in groups))
        # Clipping reads the gradients twice and writes them once. The update reads the gradients, and it reads and
        # writes parameters and state.
        passes = 3 * (self._config.training.max_norm > 0) + 3
        self._clock.copy(passes * trained + 2 * state_bytes(self._config.optimizer, groups))
        self._clock.wait_for_all()
        seconds = self._clock.seconds
        if self._layout.pipeline > 1 or every < len(times):
            return seconds
        # The second-to-last replayed microbatch stands for the microbatches that are not replayed.
        unseen, one = every - len(times) + 1, zip(seconds, times[-3], times[-2], strict=True)
        return Seconds(*(total + unseen * (after - before) for total, before, after in one))

    def _take_traffic(self) -> Traffic:
        counts = sum((context.traffic for context in self._contexts.values()), start=Counter[str]())
        for context in self._contexts.values():
            context.traffic.clear()
        exchanges: dict[str, Any] = {
            axis.name: Exchange(counts[axis.name], counts[f"{axis.name}_bytes"]) for axis in MODEL_AXES
        }
        bytes_: dict[str, Any] = {f.name: counts[f.name] for f in fields(Traffic) if f.name.endswith("_bytes")}
        collectives = Collectives(counts["all_gathers"], counts["reduce_scatters"], counts["all_reduces"])
        return Traffic(collectives, **bytes_, **exchanges)

    def _allocate_state(self) -> None:
        """Allocate the memory that exists before the step."""
        for context in self._contexts.values():
            for unit in context.units:
                self._ledger.allocate(unit.shard_bytes, Category.PARAMETERS)
        self._ledger.allocate(state_bytes(self._config.optimizer, self._model.groups), Category.OPTIMIZER)
        self._ledger.allocate(ema_bytes(self._config.ema, self._model.groups), Category.EMA)
        self._ledger.allocate(sum(self._model.tape.buffers.values()), Category.BUFFERS)

    def _play(self, first_microbatch: int) -> None:
        tape = (first_microbatch == 0 and self._model.first) or self._model.tape
        ledger, allocate, free, clock = self._ledger, self._ledger.allocate, self._ledger.free, self._clock
        for segment in tape.segments:
            ledger.enter(StepPoint(first_microbatch + segment.microbatch, segment.phase, segment.module))
            for event in segment.events:
                if isinstance(event, Bytes):  # most events
                    for category, num_bytes in event.changes:
                        if num_bytes < 0:
                            free(-num_bytes, category)
                        else:
                            allocate(num_bytes, category)
                    if event.in_product:
                        ledger.product()
                elif isinstance(event, Work):
                    clock.work(event)
                elif isinstance(event, Sent):
                    clock.exchange(*event)
                elif isinstance(event, Step):
                    unit = self._units[event.path]
                    call = getattr(unit.context if event.name in _OF_CONTEXT else unit, event.name)
                    call(event.number) if event.name in _WITH_NUMBER else call()
                else:
                    unit, index = self._places[event.parameter]
                    category, dtype = event.category, event.dtype
                    unit.accumulate(index, Storage(ledger, event.num_bytes, category, dtype, taken_from=category))
        next(iter(self._contexts.values())).traffic.update(tape.sent)
