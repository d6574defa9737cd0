"""The parameters as the optimizer groups them, from the table of a model's modules. No torch."""

from __future__ import annotations

from collections import defaultdict

from titan_launch.config.optimizer import OptimizerConfig
from titan_launch.plan.layout import Layout
from titan_launch.plan.optimizer_memory import GroupSizes, ShardSize
from titan_launch.plan.param_groups import (
    GroupSettings,
    first_match,
    group_name,
    is_inner_matrix,
    is_undecayed,
    settings_of,
)
from titan_launch.plan.traffic import padded_numel
from titan_launch.plan.types import ModelPlan, full_name


def group_sizes(plan: ModelPlan, config: OptimizerConfig, layout: Layout) -> list[GroupSizes]:
    """The trained parameters' shards, by the optimizer's group. A shared parameter has several paths."""
    paths: defaultdict[str, list[str]] = defaultdict(list)
    undecayed: defaultdict[str, bool] = defaultdict(bool)
    inner: defaultdict[str, bool] = defaultdict(lambda: True)
    shards: dict[str, ShardSize] = {}
    for module in plan.inventory.modules:
        classes = [name.rpartition(".")[2] for name in module.classes]
        for parameter in module.parameters if module.same_as is None else ():
            name = parameter.tied_to or full_name(module.path, parameter.name)
            num_axes = len(parameter.shape)
            paths[name].append(full_name(module.path, parameter.name))
            undecayed[name] |= is_undecayed(parameter.name, num_axes, classes)
            inner[name] &= is_inner_matrix(parameter.name, num_axes, classes, module.path, plan.inventory.head)
            if parameter.requires_grad:
                num_elements = padded_numel(parameter, layout.parameter_shards) // layout.parameter_shards
                dtype = plan.unit_of[module.path].storage_dtype
                shards.setdefault(name, ShardSize(parameter.shape, num_elements, dtype))
    groups: dict[str, tuple[GroupSettings, list[ShardSize]]] = {}
    for name, shard in shards.items():
        index = first_match(config.param_groups, paths[name])
        settings = settings_of(config, index, undecayed[name], inner[name])
        groups.setdefault(group_name(index, settings), (settings, []))[1].append(shard)
    return [GroupSizes(settings, group) for settings, group in groups.values()]
