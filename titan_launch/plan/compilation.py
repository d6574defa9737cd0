"""Which modules torch.compile makes a graph of. No torch.

A hook of FSDP2 cannot be in a graph: it runs collectives and changes parameters. So the largest modules are compiled
that have no unit inside of them, the blocks themselves where no rule reaches into them. A unit's own hooks run around
its forward, which is what is compiled.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property

from titan_launch.config.job import JobConfig
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig
from titan_launch.core.errors import ConfigError, KeyPath, Problem, config_error, listed
from titan_launch.plan.activation_checkpoint import selection
from titan_launch.plan.types import Inventory, ModuleInfo, Unit, enclosing, is_within, outermost, parent
from titan_launch.plan.units.rule_assignment import BATCH_NORM_DEFAULT

_ENABLE: KeyPath = ("compile", "enable")
_MODULES: KeyPath = ("activation_checkpoint", "modules")


def compiled_modules(
    config: JobConfig, inventory: Inventory, units: Sequence[Unit], recomputed: Collection[str]
) -> tuple[str, ...]:
    """Paths of the modules that are compiled, each once.

    Raises ConfigError where the model has no blocks, or one of which nothing can be compiled.
    """
    if not config.compile.enable or "model" not in config.compile.components:
        return ()
    if not inventory.blocks:
        raise ConfigError([Problem(_ENABLE, _no_blocks(config), True, also=(("model", "blocks"),))])
    tensor_degree = config.parallelism.tensor_parallel_degree
    outside = recomputed if checkpoints_compiled(config.activation_checkpoint, tensor_degree) else ()
    pieces = _Pieces(inventory, units, outside)
    found = {block: list(pieces.of_block(block)) for block in outermost(inventory.blocks)}
    empty = [block for block, paths in found.items() if not paths]
    if empty:
        raise ConfigError([_nothing_left(empty, units, outside)])
    compiled = tuple(dict.fromkeys(path for paths in found.values() for path in paths))
    if selection(config.activation_checkpoint) == "op":
        _check_seen_by_selection(compiled, recomputed)
    return compiled


def alike(paths: Sequence[str]) -> dict[str, int]:
    """The paths with `*` for the numbers in them, and how many each stands for."""
    return Counter(re.sub(r"\b\d+\b", "*", path) for path in paths)


def _check_seen_by_selection(compiled: Sequence[str], recomputed: Collection[str]) -> None:
    """What keeps the results of some operations must be a part of the graph, or see all of them."""
    hidden = [path for path in compiled if enclosing(parent(path), recomputed)]
    if hidden:
        globs = ", ".join(f'"{pattern}"' for pattern in alike(hidden))
        reason = (
            f'"op" keeps the results of operations, and of {hidden[0]}, which is a graph of its own, it sees none; '
            f"name what is compiled (activation_checkpoint.modules = [{globs}]), or take another mode"
        )
        raise config_error(("activation_checkpoint", "selective_ac_option"), reason, "op", also=(_ENABLE, _MODULES))


def checkpoints_compiled(recomputation: ActivationCheckpointConfig, tensor_degree: int) -> bool:
    """Whether recomputation runs a module's graphs again, instead of being a part of them.

    With tensor parallelism it must: a graph with a checkpoint in it would have to save a DeviceMesh. What keeps the
    results of some operations has to see them, and can be a part of the graph there too.
    """
    return tensor_degree > 1 and selection(recomputation) != "op"


class _Pieces:
    """The tree of a model's modules, with what cannot be inside of a graph."""

    def __init__(self, inventory: Inventory, units: Sequence[Unit], outside: Collection[str]):
        self._inventory = inventory
        self._boundaries = {path for unit in units for path in unit.modules if path} | set(outside)

    def of_block(self, path: str) -> Iterator[str]:
        """The block, or the largest modules in it, that have no boundary inside. A single layer is not worth one."""
        if self._is_whole(path):
            yield path
        else:
            yield from self._parts(path)

    def _parts(self, path: str) -> Iterator[str]:
        for child in self._children[path]:
            if not self._is_whole(child):
                yield from self._parts(child)
            elif self._children[child]:
                yield self._inventory.by_path[child].same_as or child

    def _is_whole(self, path: str) -> bool:
        return self._inventory.by_path[path].has_forward and not any(map(self._is_boundary, self._inside(path)))

    def _is_boundary(self, module: ModuleInfo) -> bool:
        return (module.same_as or module.path) in self._boundaries

    def _inside(self, path: str) -> Iterator[ModuleInfo]:
        for child in self._children[path]:
            yield self._inventory.by_path[child]
            yield from self._inside(child)

    @cached_property
    def _children(self) -> dict[str, list[str]]:
        children: dict[str, list[str]] = {module.path: [] for module in self._inventory.modules}
        for module in self._inventory.modules:
            if module.path:
                children[parent(module.path)].append(module.path)
        return children


def _no_blocks(config: JobConfig) -> str:
    remedy = "name them in model.blocks"
    if "loss" in config.compile.components:
        remedy += ', or leave "model" out of compile.components'
    return f"compiles the model's blocks, and none are known; {remedy}"


def _nothing_left(blocks: Sequence[str], units: Sequence[Unit], outside: Collection[str]) -> Problem:
    """Rules, or recomputation, that leave only single layers of a block."""
    inside = [u for u in units if any(p != blocks[0] and is_within(p, blocks[0]) for p in u.modules)]
    reasons = list(dict.fromkeys(unit.reason for unit in inside))
    keys = [unit.key for unit in inside if unit.key is not None]
    remedy = 'precision.param_dtype = "float32"' if BATCH_NORM_DEFAULT in reasons else "drop those rules"
    what = f"the units of {', '.join(reasons)}, whose hooks cannot be in a graph,"
    if not inside:
        what, remedy, keys = f"modules that are recomputed ({listed(sorted(outside))})", "leave them out", [_MODULES]
    reason = (
        f"nothing of {listed(blocks)} can be compiled: what lies between {what} are single layers; {remedy}, or set "
        "compile.enable = false"
    )
    return Problem(_ENABLE, reason, True, also=tuple(dict.fromkeys(keys)))
