"""Replay of one optimizer step of one rank: the tape of a microbatch, with the memory of FSDP2 around it. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from titan_launch.config.job import JobConfig
from titan_launch.config.optimizers import GroupSizes, ShardSize
from titan_launch.config.sections.training import OptimizerConfig
from titan_launch.plan.communication import Exchange, Traffic, exchanged_units, shard_shape
from titan_launch.plan.hardware import Kernels
from titan_launch.plan.layout import Layout
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
from titan_launch.plan.memory.tape import Bytes, Event, Gradient, Sent, Step, Tape
from titan_launch.plan.param_groups import (
    GroupSettings,
    first_match,
    group_name,
    is_inner_matrix,
    is_undecayed,
    settings_of,
)
from titan_launch.plan.replica_shards import chunk_numel, gradients_leave_early
from titan_launch.plan.types import Inventory, ModelPlan, ModuleInfo, TensorInfo, Unit, full_name
from titan_launch.plan.units.order import plan_backward_prefetch, plan_forward_prefetch


@dataclass(frozen=True)
class ReplayedStep:
    """Memory of a replayed step, and its traffic along the axes that are not FSDP2's."""

    footprint: Footprint
    traffic: Traffic


def local_plan(plan: ModelPlan, tape: Tape) -> ModelPlan:
    """Return the plan with the shapes of this rank's parts of the parameters, as tensor and expert parallelism leave
    them to it."""
    if not tape.shapes:
        return plan

    def local(module: ModuleInfo) -> ModuleInfo:
        names = [full_name(module.path, p.name) for p in module.parameters]
        if not any(name in tape.shapes for name in names):
            return module
        pairs = zip(module.parameters, names, strict=True)
        return replace(module, parameters=tuple(replace(p, shape=tape.shapes.get(n, p.shape)) for p, n in pairs))

    inventory: Inventory = replace(plan.inventory, modules=tuple(map(local, plan.inventory.modules)))
    return replace(plan, inventory=inventory)


def group_sizes(whole: ModelPlan, local: ModelPlan, config: OptimizerConfig, layout: Layout) -> list[GroupSizes]:
    """Return the shards of the trained parameters by optimizer group; with an optimizer that is sharded over replicas,
    the chunks that this rank updates. A shared parameter is listed once. It belongs to a group if any of its paths
    matches the glob of the group. `local`: result of `local_plan`."""
    paths: defaultdict[str, list[str]] = defaultdict(list)
    undecayed: defaultdict[str, bool] = defaultdict(bool)
    inner: defaultdict[str, bool] = defaultdict(lambda: True)
    shards: dict[str, ShardSize] = {}
    for module, part in zip(whole.inventory.modules, local.inventory.modules, strict=True):
        classes = [name.rpartition(".")[2] for name in module.classes]
        for parameter, own in zip(module.parameters, part.parameters, strict=True) if module.same_as is None else ():
            name = parameter.tied_to or full_name(module.path, parameter.name)
            num_axes = len(parameter.shape) - parameter.is_stacked
            paths[name].append(full_name(module.path, parameter.name))
            undecayed[name] |= is_undecayed(parameter.name, num_axes, classes)
            inner[name] &= is_inner_matrix(parameter.name, num_axes, classes, module.path, whole.inventory.head)
            if parameter.requires_grad:
                unit = whole.unit_of[module.path]
                shape = shard_shape(own, layout.shards_of(unit))
                num_elements = chunk_numel(shape, layout.optimizer_replicas)
                shards.setdefault(name, ShardSize(parameter.shape, num_elements, unit.storage_dtype))
    groups: dict[str, tuple[GroupSettings, list[ShardSize]]] = {}
    for name, shard in shards.items():
        index = first_match(config.param_groups, paths[name])
        settings = settings_of(config, index, undecayed[name], inner[name])
        groups.setdefault(group_name(index, settings), (settings, []))[1].append(shard)
    return [GroupSizes(settings, group) for settings, group in groups.values()]


class Replay:
    """A model with its FSDP2 units, for one step."""

    def __init__(self, config: JobConfig, plan: ModelPlan, layout: Layout, kernels: Kernels, tape: Tape):
        """`plan`: plan of the blocks on the tape."""
        self._config = config
        self._plan = local_plan(plan, tape)
        self._layout = layout
        self._tape = tape
        self._ledger = Ledger(on_host(config.training, kernels))
        self._context = Context(self._ledger, layout)
        self._groups = group_sizes(plan, self._plan, config.optimizer, layout)
        self._exchanged = exchanged_units(plan, layout)
        self._unit_of_module = self._make_units()
        self._place = self._places()
        self._traffic = Traffic()

    def step(self) -> ReplayedStep:
        """Run the step. May be called only once."""
        self._ledger.enter(StepPoint(0, "forward", ""))
        self._allocate_state()
        count = min(self._layout.num_microbatches, MICROBATCHES)
        for microbatch in range(count):
            self._begin_microbatch(is_last=microbatch == count - 1)
            self._play(microbatch)
        self._ledger.enter(StepPoint(count - 1, "optimizer", ""))
        self._context.finish_exchange()
        temporaries = temporary_bytes(self._config.optimizer, self._groups, self._layout.optimizer_shards)
        leave_early = gradients_leave_early(self._config.training)
        book_update(self._ledger, temporaries, self._exchanged.values(), self._layout, leave_early)
        return ReplayedStep(self._ledger.footprint(), self._traffic)

    def _make_units(self) -> dict[str, ShardedUnit]:
        """Return the FSDP2 unit of each module, by path. Also store the units in FSDP2's context, in the order of the
        model's modules."""
        plan, offloads = self._plan, self._config.training.enable_cpu_offload

        def parameters(module: ModuleInfo) -> Iterator[tuple[TensorInfo, Unit, bool]]:
            policy = plan.unit_of[module.path]
            is_ignored = self._layout.is_ignored(policy, offloads)
            return ((p, policy, is_ignored) for p in module.parameters if p.tied_to is None)

        units = [
            ShardedUnit(self._context, unit, [p for module in modules for p in parameters(module)])
            for unit, modules in zip(plan.units, plan.modules_by_unit(), strict=True)
        ]
        by_path = {path: unit for unit in units for path in unit.unit.modules}
        in_order = (by_path[m.path] for m in plan.inventory.modules if m.path in by_path)
        self._context.units = list(dict.fromkeys(in_order))
        for path, ahead in plan_backward_prefetch(plan).items():
            by_path[path].prefetch = [by_path[other] for other in ahead]
        for path, ahead in plan_forward_prefetch(plan).items():
            by_path[path].forward_prefetch = [by_path[other] for other in ahead]
        return by_path

    def _places(self) -> dict[str, tuple[ShardedUnit, int]]:
        """Return the unit of each parameter that FSDP2 manages, and its index there, by its full name."""
        places: dict[str, tuple[ShardedUnit, int]] = {}
        for unit, modules in zip(self._plan.units, self._plan.modules_by_unit(), strict=True):
            offloads, index = self._config.training.enable_cpu_offload, 0
            for module in modules:
                is_ignored = self._layout.is_ignored(self._plan.unit_of[module.path], offloads)
                for parameter in module.parameters:
                    if parameter.tied_to is None and not is_ignored:
                        name = full_name(module.path, parameter.name)
                        places[name] = self._unit_of_module[unit.modules[0]], index
                        index += 1
        return places

    def _allocate_state(self) -> None:
        """Allocate the memory that exists before the step: parameter shards, optimizer state and buffers."""
        for unit in self._context.units:
            self._ledger.allocate(unit.shard_bytes, Category.PARAMETERS)
        self._ledger.allocate(state_bytes(self._config.optimizer, self._groups), Category.OPTIMIZER)
        self._ledger.allocate(ema_bytes(self._config.ema, self._groups), Category.EMA)
        self._change(self._tape.held)

    def _begin_microbatch(self, is_last: bool) -> None:
        accumulation = self._config.gradient_accumulation
        for unit in self._context.units:
            unit.reduce_grads = is_last or accumulation.mode != "deferred"
            unit.all_reduce_grads = is_last or accumulation.mode == "immediate"
            unit.reshard_after_backward = is_last or not accumulation.keep_params_unsharded
            if is_last and gradients_leave_early(self._config.training):
                unit.exchanged = self._exchanged.get(unit.unit)

    def _play(self, microbatch: int) -> None:
        for segment in self._tape.segments:
            self._ledger.enter(StepPoint(microbatch, segment.phase, segment.module))
            for event in segment.events:
                self._do(event)

    def _do(self, event: Event) -> None:
        match event:
            case Bytes():
                self._change(event)
            case Step():
                self._step(event)
            case Gradient():
                unit, index = self._place[event.parameter]
                category = event.category
                unit.accumulate(index, Storage(self._ledger, event.num_bytes, category, taken_from=category))
            case Sent():
                self._traffic += Traffic(**{event.axis: Exchange(1, event.num_bytes)})

    def _change(self, event: Bytes) -> None:
        for category, num_bytes in event.changes:
            if num_bytes < 0:
                self._ledger.free(-num_bytes, category)
        for category, num_bytes in event.changes:
            if num_bytes > 0:
                self._ledger.allocate(num_bytes, category)
        if event.in_product:
            self._ledger.product()

    def _step(self, event: Step) -> None:
        if event.name == "finish_backward":
            self._context.finish_backward()
            return
        step, _, again = event.name.partition(" ")
        call = getattr(self._unit_of_module[event.path], step)
        call(in_backward=True) if again else call()
