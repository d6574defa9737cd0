"""The modules that torch.compile compiles into graphs. No torch.

A hook of FSDP2 cannot be part of a graph, because it runs collectives and changes parameters. So the largest modules
without an FSDP2 unit inside are compiled: the blocks, unless a precision rule makes a unit inside a block. The hooks of
a unit run around its forward, and only the forward is compiled.
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
    """Return the paths of the compiled modules, each once.

    Raises ConfigError if the model has no blocks, or a block without anything to compile.
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
    """Return the paths with `*` instead of numbers, and how many paths each of them stands for."""
    return Counter(re.sub(r"\b\d+\b", "*", path) for path in paths)


def _check_seen_by_selection(compiled: Sequence[str], recomputed: Collection[str]) -> None:
    """Raise ConfigError if a checkpoint per operation contains a whole graph, whose operations it cannot see."""
    hidden = [path for path in compiled if enclosing(parent(path), recomputed)]
    if hidden:
        globs = ", ".join(f'"{pattern}"' for pattern in alike(hidden))
        reason = (
            f'"op" saves the results of single operations and cannot see those of {hidden[0]}, which is compiled into '
            f"a graph; name the compiled modules (activation_checkpoint.modules = [{globs}]), or set another mode"
        )
        raise config_error(("activation_checkpoint", "selective_ac_option"), reason, "op", also=(_ENABLE, _MODULES))


def checkpoints_compiled(recomputation: ActivationCheckpointConfig, tensor_degree: int) -> bool:
    """Return whether activation checkpointing runs whole graphs again, instead of being part of the graphs.

    With tensor parallelism it runs whole graphs again, because a graph with a checkpoint inside would have to save a
    DeviceMesh. `selective_ac_option = "op"` needs the operations, so it is always part of the graph.
    """
    return tensor_degree > 1 and selection(recomputation) != "op"


class _Pieces:
    """The tree of a model's modules, and the modules that cannot be inside of a graph."""

    def __init__(self, inventory: Inventory, units: Sequence[Unit], outside: Collection[str]):
        self._inventory = inventory
        self._boundaries = {path for unit in units for path in unit.modules if path} | set(outside)

    def of_block(self, path: str) -> Iterator[str]:
        """Yield the block, or the largest modules in it without a boundary inside. Single layers are not compiled."""
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
    return f"compiles the model's blocks, and they are unknown; {remedy}"


def _nothing_left(blocks: Sequence[str], units: Sequence[Unit], outside: Collection[str]) -> Problem:
    """Return the problem of blocks in which rules or activation checkpointing leave only single layers to compile."""
    inside = [u for u in units if any(p != blocks[0] and is_within(p, blocks[0]) for p in u.modules)]
    reasons = list(dict.fromkeys(unit.reason for unit in inside))
    keys = [unit.key for unit in inside if unit.key is not None]
    remedy = 'precision.param_dtype = "float32"' if BATCH_NORM_DEFAULT in reasons else "drop those rules"
    what = f"the units of {', '.join(reasons)}, whose hooks cannot be part of a graph"
    if not inside:
        what, remedy = f"checkpointed modules ({listed(sorted(outside))})", "do not checkpoint them"
        keys = [_MODULES]
    reason = (
        f"nothing of {listed(blocks)} can be compiled: only single layers are outside of {what}; {remedy}, or set "
        "compile.enable = false"
    )
    return Problem(_ENABLE, reason, True, also=tuple(dict.fromkeys(keys)))
