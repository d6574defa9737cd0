"""Pipeline parallelism: the stages of a model, their ranks, and the part of the plan that each stage gets. This module
does not import torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise

from titan_launch.config.axes import PIPELINE
from titan_launch.config.rules.parallelism import too_few_layers
from titan_launch.config.sections.parallelism import ONE_STAGE_SCHEDULES, ParallelismConfig
from titan_launch.core.errors import ConfigError, KeyPath, Problem, config_error, did_you_mean, listed
from titan_launch.plan.layout import Layout
from titan_launch.plan.types import (
    Inventory,
    ModelPlan,
    ModuleInfo,
    Stage,
    enclosing,
    full_name,
    outward,
    parent,
    with_parameters,
    without_modules,
)

_SPLIT: KeyPath = ("parallelism", "pipeline_parallel_split_points")
_PER_RANK: KeyPath = ("parallelism", "pipeline_parallel_stages_per_rank")


def plan_stages(inventory: Inventory, parallelism: ParallelismConfig) -> tuple[Stage, ...]:
    """Return the stages of a model, in order; an empty tuple without pipeline parallelism.

    Without `pipeline_parallel_split_points`, whole layers are assigned to stages so that the largest stage is as small
    as possible. The size of a stage is the number of elements of its matrices without embeddings, as an estimate of its
    time. Raises ConfigError for split points that are unknown or out of order, and for a model that cannot be divided.
    """
    if parallelism.pipeline_parallel_degree == 1:
        return ()
    _check_pipeline_order(inventory, parallelism.pipeline_parallel_degree)
    starts = _given_starts(inventory, parallelism) or _balanced_starts(inventory, parallelism)
    order, elements = inventory.pipeline_order, _elements(inventory, min_axes=0)
    parts = [order[start:end] for start, end in pairwise((0, *starts, len(order)))]
    stages = tuple(
        Stage(index, _rank_of_stage(index, parallelism), part, num_parameters=sum(elements[path] for path in part))
        for index, part in enumerate(parts)
    )
    _check_parameters(inventory, stages, parallelism.pipeline_parallel_degree)
    return stages


def _rank_of_stage(stage: int, parallelism: ParallelismConfig) -> int:
    """Return the pipeline rank that runs a stage. Stages are assigned to the ranks in turn; with ZBVZeroBubble, the
    second stages in reverse order."""
    degree = parallelism.pipeline_parallel_degree
    if parallelism.pipeline_parallel_schedule == "ZBVZeroBubble":
        return stage if stage < degree else 2 * degree - 1 - stage
    return stage % degree


def _check_pipeline_order(inventory: Inventory, degree: int) -> None:
    if not inventory.pipeline_order:
        reason = (
            "the order of the model's modules is unknown; give the model an attribute pipeline_order (globs, in "
            "order; see docs/how_to/parallelize_your_model.md), or set the degree to 1"
        )
        raise config_error(PIPELINE.key, reason, degree)
    among = set(inventory.pipeline_order)
    outside = [
        full_name(module.path, parameter.name)
        for module in inventory.distinct
        for parameter in module.parameters
        if not enclosing(module.path, among)
    ]
    if outside:
        remedy = "add their modules to pipeline_order, or set the degree to 1"
        reason = f"would drop {listed(outside)}, which no module of the model's pipeline_order contains; {remedy}"
        raise config_error(PIPELINE.key, reason, degree)
    for module in inventory.modules:
        if module.parameters and not enclosing(module.path, among):
            reason = (
                f"{module.path} and {module.same_as} are the same module, and no module of the model's pipeline_order "
                f"contains {module.path}; remove one of the two names from the model, or set the degree to 1"
            )
            raise config_error(PIPELINE.key, reason, degree)


def _given_starts(inventory: Inventory, parallelism: ParallelismConfig) -> tuple[int, ...]:
    """Return the index in the pipeline order of each split point of the job; () if the job sets no split points. Raises
    ConfigError for split points that are unknown or out of order."""
    points, order = parallelism.pipeline_parallel_split_points, inventory.pipeline_order
    reason = "is not a module of the model's pipeline_order"
    unknown = [
        Problem((*_SPLIT, index), reason + (did_you_mean(point, order) or f" ({listed(order, most=8)})"), point)
        for index, point in enumerate(points)
        if point not in order
    ]
    if unknown:
        raise ConfigError(unknown)
    starts = tuple(map(order.index, points))
    for index, (before, start) in enumerate(pairwise((0, *starts))):
        if start <= before:
            reason = "already begins the first stage, so it cannot be a split point; name a later module"
            if index:
                reason = f"does not come after {points[index - 1]}; list the split points in the order of the model's "
                reason += "pipeline_order, each once"
            raise config_error((*_SPLIT, index), f"{reason} ({listed(order, most=8)})", points[index])
    return starts


def _balanced_starts(inventory: Inventory, parallelism: ParallelismConfig) -> tuple[int, ...]:
    """Return the indices in the pipeline order at which the second and later stages begin, so that the stages are as
    equal as possible.

    Each stage has at least one layer (see `_layers`). A module that is not a layer belongs to the stage of the layer
    before it, or to the first stage. Raises ConfigError if there are fewer layers than stages.
    """
    wanted, layers = parallelism.num_stages, _layers(inventory)
    if len(layers) < wanted:
        asks_for_more = (parallelism.pipeline_parallel_stages_per_rank or 1) > 1
        otherwise = "a smaller pipeline_parallel_stages_per_rank" if asks_for_more else "pipeline_parallel_split_points"
        raise config_error(
            PIPELINE.key,
            f"{too_few_layers(parallelism, len(layers))}, or set {otherwise}",
            parallelism.pipeline_parallel_degree,
            also=(_PER_RANK, ("model", "args", "n_layers")),
        )
    starts, costs = (0, *layers[1:]), _costs(inventory)
    of_layers = [
        sum(costs[path] for path in inventory.pipeline_order[start:end])
        for start, end in pairwise((*starts, len(inventory.pipeline_order)))
    ]
    return tuple(starts[layer] for layer in balance(of_layers, wanted))


def _costs(inventory: Inventory) -> Counter[str]:
    """Return an estimate of the time of each module of the pipeline order, in arbitrary units: the number of elements
    of its matrices; 0 for embeddings."""
    costs = _elements(inventory, min_axes=2)
    return Counter({path: cost for path, cost in costs.items() if path not in inventory.embeddings})


def _layers(inventory: Inventory) -> list[int]:
    """Return the indices of the layers in the pipeline order. Layers are the modules that are blocks, contain blocks or
    lie in blocks. In a model without blocks, layers are the modules with parameters."""
    inside, around = set(inventory.blocks), {path for block in inventory.blocks for path in outward(block)}
    blocks = [i for i, path in enumerate(inventory.pipeline_order) if path in around or enclosing(path, inside)]
    elements = _elements(inventory, min_axes=0)
    return blocks or [index for index, path in enumerate(inventory.pipeline_order) if elements[path]]


def _elements(inventory: Inventory, min_axes: int) -> Counter[str]:
    """Return the number of elements of the parameters in each module of the pipeline order. Parameters with fewer than
    `min_axes` axes do not count. A tied parameter counts only where it occurs first."""
    elements, among = Counter[str](), set(inventory.pipeline_order)
    for module in inventory.modules:
        own = (p.numel for p in module.parameters if p.tied_to is None and len(p.shape) >= min_axes)
        elements[enclosing(module.path, among)] += sum(own)
    return elements


def _check_parameters(inventory: Inventory, stages: Sequence[Stage], degree: int) -> None:
    """Raise ConfigError for stages without trained parameters, and for parameters that two stages share."""
    stage_of = {path: stage.index for stage in stages for path in stage.modules}
    trained = {
        stage_of[enclosing(module.path, stage_of)]
        for module in inventory.modules
        if any(parameter.requires_grad for parameter in module.parameters)
    }
    for stage in stages:
        if stage.index not in trained:
            reason = (
                f"stage {stage.index} ({listed(stage.modules)}) would have no parameters to train; set "
                "pipeline_parallel_split_points so that each stage has trained parameters"
            )
            raise config_error(PIPELINE.key, reason, degree, also=(_SPLIT,))
    for module in inventory.modules:
        for parameter in module.parameters:
            first = parent(parameter.tied_to or "")
            own, other = (stage_of[enclosing(path, stage_of)] for path in (module.path, first or module.path))
            if own != other:
                reason = (
                    f"{module.path} and {first} share a parameter (tied), and would be on the stages {own} and "
                    f"{other}; untie them, or set the degree to 1 (tensor parallelism and FSDP2 allow tied parameters)"
                )
                raise config_error(PIPELINE.key, reason, degree, also=(("model", "args"),))


def balance(costs: Sequence[int], num_parts: int) -> tuple[int, ...]:
    """Divide a sequence into `num_parts` non-empty parts. Return the indices at which the second and later parts begin.

    The cost of a part is the sum of the `costs` of its entries. The largest cost of a part is as small as possible. Of
    several such divisions, the division with the smallest sum of squared costs is returned.
    """
    ends, count = (0, *accumulate(costs)), len(costs)

    def next_starts(start: int, parts: int) -> range:
        return range(start + 1, count - parts + 2)

    @cache
    def largest(start: int, parts: int) -> int:
        if parts == 1:
            return ends[count] - ends[start]
        return min(max(ends[end] - ends[start], largest(end, parts - 1)) for end in next_starts(start, parts))

    limit = largest(0, num_parts)

    def square(start: int, end: int) -> float:
        cost = ends[end] - ends[start]
        return cost**2 if cost <= limit else math.inf

    @cache
    def best(start: int, parts: int) -> tuple[float, tuple[int, ...]]:
        if parts == 1:
            return square(start, count), ()
        rests = ((end, *best(end, parts - 1)) for end in next_starts(start, parts))
        return min((square(start, end) + squares, (end, *starts)) for end, squares, starts in rests)

    return best(0, num_parts)[1]


def stage_part(plan: ModelPlan, stage: Stage) -> ModelPlan:
    """Return the part of a model's plan for one stage: its modules, units and buffers.

    A unit with modules of several stages has a part on each of these stages. The root unit of the second and later
    stages does not cast its inputs, because these are activations from inside the model.
    """
    part = without_modules(
        plan, {path for other in plan.stages if other.index != stage.index for path in other.modules}
    )
    # A module with several parents has several paths. If its first path is on another stage, the next path becomes the
    # first one.
    modules, now_first = list[ModuleInfo](), dict[str, str]()
    buffer_dtypes: dict[str, str] = {}
    for module in part.inventory.modules:
        before = module.same_as or module.path
        owner = now_first.setdefault(before, module.path)
        same_as = None if owner == module.path else owner
        modules.append(module if same_as == module.same_as else replace(module, same_as=same_as))
        if same_as is None:
            floating = (buffer.name for buffer in module.buffers if buffer.is_floating)
            buffer_dtypes |= {full_name(owner, name): plan.buffer_dtypes[full_name(before, name)] for name in floating}
    inventory = replace(part.inventory, modules=tuple(modules))
    *inner, root = part.units
    if stage.index:
        root = replace(root, policy=replace(root.policy, cast_forward_inputs=False))
    units, in_place = with_parameters(inventory, [*inner, root], part.in_place)
    return replace(part, inventory=inventory, units=units, in_place=in_place, buffer_dtypes=buffer_dtypes, stages=())


def parts_on_rank(plan: ModelPlan, rank: int) -> tuple[ModelPlan, ...]:
    """Return the plans of the stages that a pipeline rank runs, in order; the whole plan if there are no stages."""
    if not plan.stages:
        return (plan,)
    return tuple(stage_part(plan, stage) for stage in plan.stages if stage.rank == rank)


def representative_ranks(plan: ModelPlan, *, with_times: bool) -> list[int]:
    """Return the pipeline ranks among which the planner looks for the highest peak memory and, `with_times`, for the
    longest step; `[0]` without stages.

    The first pipeline rank starts the most microbatches before a backward ends. The last pipeline rank has the logits
    (with ZBVZeroBubble, the first rank has them). Another candidate is the rank with the most parameters. `with_times`
    adds the rank whose matrices have the most elements, which is expected to be the slowest.
    """
    parameters, costs, cost_of = Counter[int](), Counter[int](), _costs(plan.inventory)
    for stage in plan.stages:
        parameters[stage.rank] += stage.num_parameters
        costs[stage.rank] += sum(cost_of[path] for path in stage.modules)
    largest = (rank for counts in (parameters, costs)[: 1 + with_times] for rank, _ in counts.most_common(1))
    return sorted({0, *largest, max(parameters, default=0)})


_HOLDS_ALL = ("GPipe", "LoopedBFS")
"""Schedules that run all forwards before the first backward."""


def counts_to_run(parallelism: ParallelismConfig, layout: Layout) -> tuple[int, ...]:
    """Return one or two numbers of microbatches. The memory, traffic and times of a pipeline's step are predicted from
    steps with these numbers (`growth_factor`).

    If the schedule holds the activations of all microbatches, or if a step has few microbatches, the result is the
    number of all microbatches. Otherwise the result has two numbers. Beyond the first number, more microbatches add no
    activations to the peak memory. The second number is larger: a comparison of the two steps shows all other growth.
    """
    schedule, every = parallelism.pipeline_parallel_schedule, layout.num_microbatches
    has_one_stage = schedule in ONE_STAGE_SCHEDULES
    # In 1F1B with p pipeline ranks, the first rank runs p forwards before its first backward. With several stages per
    # rank, a rank runs at most 3 rounds of forwards before its first backward. A round of torch's interleaved schedules
    # has p microbatches, or up to 2 p - 1 if p does not divide the number of all microbatches.
    in_round = 1 if has_one_stage else every // max(1, every // layout.pipeline)
    enough = layout.pipeline + 1 if has_one_stage else 3 * in_round
    if schedule in _HOLDS_ALL or enough >= every:
        return (every,)
    return enough, enough + in_round


def growth_factor(counts: Sequence[int], num_microbatches: int) -> float:
    """Return the factor of the linear extrapolation `first + factor * (last - first)` to a step of `num_microbatches`.
    `first` and `last` are values of steps of `counts[0]` and `counts[-1]` microbatches (`counts_to_run`). The factor is
    0 if `counts` has only one number."""
    first, last = counts[0], counts[-1]
    return 0.0 if first == last else (num_microbatches - first) / (last - first)
