"""Pipeline parallelism: how a model's chain is cut into stages, and where each of them is. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from titan_launch.config.parallelism import ParallelismConfig
from titan_launch.config.pipeline_rules import num_stages, too_few_layers
from titan_launch.errors import ConfigError, KeyPath, Problem, config_error, did_you_mean, listed
from titan_launch.plan.balance import balance
from titan_launch.plan.types import (
    Inventory,
    Stage,
    enclosing,
    full_name,
    is_within,
    parent,
)

_DEGREE: KeyPath = ("parallelism", "pipeline_parallel_degree")
_SPLIT: KeyPath = ("parallelism", "pipeline_parallel_split_points")
_PER_RANK: KeyPath = ("parallelism", "pipeline_parallel_stages_per_rank")


def plan_stages(inventory: Inventory, parallelism: ParallelismConfig) -> tuple[Stage, ...]:
    """The stages of a model, in order; none without pipeline parallelism.

    They begin where `pipeline_parallel_split_points` says. Else the largest stage is as small as whole layers allow,
    counted in elements of matrices, which stand for the time that a layer takes; those of embeddings are only looked up
    and do not count. Raises ConfigError for a model that cannot be divided, or not so.
    """
    if parallelism.pipeline_parallel_degree == 1:
        return ()
    _check_chain(inventory, parallelism.pipeline_parallel_degree)
    starts = _given_starts(inventory, parallelism) or _balanced_starts(inventory, parallelism)
    parts = [inventory.chain[start:end] for start, end in pairwise((0, *starts, len(inventory.chain)))]
    stages = tuple(
        Stage(
            index=index,
            rank=place(index, parallelism),
            modules=part,
            num_parameters=sum(_elements(inventory, path, min_axes=0) for path in part),
        )
        for index, part in enumerate(parts)
    )
    _check_parameters(inventory, stages, parallelism.pipeline_parallel_degree)
    return stages


def place(stage: int, parallelism: ParallelismConfig) -> int:
    """Which rank along the pipeline holds a stage: in turns, or for ZBV there and back, so that the first rank has the
    last stage too."""
    degree = parallelism.pipeline_parallel_degree
    if parallelism.pipeline_parallel_schedule == "ZBVZeroBubble":
        return stage if stage < degree else 2 * degree - 1 - stage
    return stage % degree


def _check_chain(inventory: Inventory, degree: int) -> None:
    if not inventory.chain:
        reason = (
            "the model does not say which of its modules run one after another (an attribute pipeline_chain of the "
            "module: globs of them, in order; see docs/parallelism.md); declare it, or set 1"
        )
        raise config_error(_DEGREE, reason, degree)
    outside = [
        full_name(module.path, parameter.name)
        for module in inventory.modules
        for parameter in module.parameters
        if module.same_as is None and not enclosing(module.path, inventory.chain)
    ]
    if outside:
        reason = f"would leave out {listed(outside)}, in no module of the model's pipeline_chain; add these, or set 1"
        raise config_error(_DEGREE, reason, degree)


def _given_starts(inventory: Inventory, parallelism: ParallelismConfig) -> tuple[int, ...]:
    """Where in the chain the stages from the second on begin, as the job says."""
    points, chain = parallelism.pipeline_parallel_split_points, inventory.chain
    unknown = [
        Problem((*_SPLIT, index), f"is no module of the model's chain{did_you_mean(point, chain)}", point)
        for index, point in enumerate(points)
        if point not in chain
    ]
    if unknown:
        raise ConfigError(unknown)
    starts = tuple(map(chain.index, points))
    for index, (before, start) in enumerate(pairwise((0, *starts))):
        if start <= before:
            reason = f"does not come after {points[index - 1]}" if index else "is where the first stage begins anyway"
            advice = f"name modules in the order of the chain, each once ({listed(chain, most=8)})"
            raise config_error((*_SPLIT, index), f"{reason}; {advice}", points[index])
    return starts


def _balanced_starts(inventory: Inventory, parallelism: ParallelismConfig) -> tuple[int, ...]:
    """Where the stages begin that are as equal as can be, each with at least one layer: a block, or without blocks a
    module with parameters. What lies between layers goes with the one before it, and what is before the first with
    that one."""
    wanted = num_stages(parallelism)
    layers = _layers(inventory)
    if len(layers) < wanted:
        asks_for_more = (parallelism.pipeline_parallel_stages_per_rank or 1) > 1
        otherwise = "a smaller pipeline_parallel_stages_per_rank" if asks_for_more else "pipeline_parallel_split_points"
        raise config_error(
            _DEGREE,
            f"{too_few_layers(parallelism, len(layers))}, or {otherwise}",
            parallelism.pipeline_parallel_degree,
            also=(_PER_RANK, ("model", "args", "n_layers")),
        )
    starts = (0, *layers[1:])
    costs = [
        sum(_cost(inventory, path) for path in inventory.chain[start:end])
        for start, end in pairwise((*starts, len(inventory.chain)))
    ]
    return tuple(starts[layer] for layer in balance(costs, wanted))


def _layers(inventory: Inventory) -> list[int]:
    """The places in the chain of what no stage may be without."""
    blocks = [index for index, path in enumerate(inventory.chain) if _holds_block(inventory, path)]
    return blocks or [i for i, path in enumerate(inventory.chain) if _elements(inventory, path, min_axes=0)]


def _holds_block(inventory: Inventory, path: str) -> bool:
    return any(is_within(block, path) or is_within(path, block) for block in inventory.blocks)


def _cost(inventory: Inventory, path: str) -> int:
    return 0 if path in inventory.embeddings else _elements(inventory, path, min_axes=2)


def _elements(inventory: Inventory, path: str, min_axes: int) -> int:
    """Elements of the parameters in a module, of those with at least so many axes."""
    return sum(
        parameter.numel
        for module in inventory.modules
        for parameter in module.parameters
        if parameter.tied_to is None and len(parameter.shape) >= min_axes and is_within(module.path, path)
    )


def _check_parameters(inventory: Inventory, stages: Sequence[Stage], degree: int) -> None:
    """Raise ConfigError for stages with nothing to train, and for parameters that two stages share."""
    stage_of = {path: stage.index for stage in stages for path in stage.modules}
    trained = {
        stage_of[enclosing(module.path, stage_of)]
        for module in inventory.modules
        if any(parameter.requires_grad for parameter in module.parameters)
    }
    for stage in stages:
        if stage.index not in trained:
            reason = (
                f"stage {stage.index} would be {listed(stage.modules)}, with no parameters to train; name "
                "pipeline_parallel_split_points that give each stage some"
            )
            raise config_error(_DEGREE, reason, degree, also=(_SPLIT,))
    for module in inventory.modules:
        for parameter in module.parameters:
            first = parent(parameter.tied_to or "")
            own, other = (stage_of[enclosing(path, stage_of)] for path in (module.path, first or module.path))
            if own != other:
                reason = (
                    f"{module.path} and {first} share a parameter (tied), and would be on the stages {own} and "
                    f"{other}; untie them, or set 1 (tensor parallelism and FSDP2 take tied parameters)"
                )
                raise config_error(_DEGREE, reason, degree, also=(("model", "args"),))
