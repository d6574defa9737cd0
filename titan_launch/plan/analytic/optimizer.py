"""What AdamW's update allocates beside its results. No torch."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from titan_launch.config.optimizer import OptimizerConfig
from titan_launch.plan.layout import Layout
from titan_launch.plan.param_groups import first_match, group_name, is_undecayed, settings_of
from titan_launch.plan.traffic import DTYPE_BYTES, padded_numel
from titan_launch.plan.types import ModelPlan, full_name


def temporary_bytes(plan: ModelPlan, config: OptimizerConfig, layout: Layout) -> int:
    """Of the largest parameter group: fused it works in place; foreach makes the roots of all second moments, the loop
    those of one parameter, twice, while the result of the one before is still there."""
    groups = _shards_by_group(plan, config, layout)
    if config.implementation == "fused" or not groups:
        return 0
    if config.implementation == "foreach":
        return max(map(sum, groups.values()))
    return max(2 * size + before for shards in groups.values() for before, size in pairwise([0, *shards]))


def _shards_by_group(plan: ModelPlan, config: OptimizerConfig, layout: Layout) -> dict[str, list[int]]:
    """Bytes of the trained parameters' shards, by the optimizer's group. A shared parameter has several paths."""
    paths: defaultdict[str, list[str]] = defaultdict(list)
    undecayed: defaultdict[str, bool] = defaultdict(bool)
    sizes: dict[str, int] = {}
    for module in plan.inventory.modules:
        classes = [name.rpartition(".")[2] for name in module.classes]
        for parameter in module.parameters if module.same_as is None else ():
            name = parameter.tied_to or full_name(module.path, parameter.name)
            paths[name].append(full_name(module.path, parameter.name))
            undecayed[name] |= is_undecayed(parameter.name, len(parameter.shape), classes)
            if parameter.requires_grad:
                size = DTYPE_BYTES[plan.unit_of[module.path].storage_dtype]
                sizes.setdefault(name, padded_numel(parameter, layout.shard) // layout.shard * size)
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for name, size in sizes.items():
        index = first_match(config.param_groups, paths[name])
        groups[group_name(index, settings_of(config, index, undecayed[name]))].append(size)
    return groups
