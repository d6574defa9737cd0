"""Search for a model's blocks and its pipeline order, and division of a model into pipeline stages. Each block becomes
one FSDP2 unit."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from titan_launch.core.errors import ConfigError, Problem
from titan_launch.core.globs import matches
from titan_launch.plan.types import enclosing, full_name, outermost, parent
from titan_launch.plan.units.rule_assignment import nothing_matched


class ModelBlocks(NamedTuple):
    """The modules that become one FSDP2 unit each."""

    paths: tuple[str, ...]
    origin: str
    """The rule that chose these modules, in words, such as `by model.blocks`."""


def choose_blocks(module: nn.Module) -> ModelBlocks:
    """Return the blocks of a model that declares none.

    The blocks are the entries of the model's outermost `nn.ModuleList`s, except for entries without a matrix, such as
    norms. If there are no such entries, the blocks are repeated modules: entries of `nn.Sequential`s, or else the
    instances of one class. Repeated modules count only if they hold more than half of the parameters outside of
    embeddings. Otherwise, the model has no blocks.
    """
    entries = tuple(_list_entries(module))
    if entries:
        return ModelBlocks(entries, "the entries of nn.ModuleList")
    entries = _repeated(module, _sequential_entries(module))
    if _share(module, entries) > 0.5:
        return ModelBlocks(entries, "the repeated modules in nn.Sequential")
    by_class: dict[type[nn.Module], list[str]] = {}
    for path, child in module.named_modules():
        if path and has_forward(child) and _is_composite(child):
            by_class.setdefault(type(child), []).append(path)
    classes = [paths for names in by_class.values() if len(paths := outermost(names)) > 1]
    largest = max((_share(module, paths) for paths in classes), default=0)
    if largest > 0.5:
        almost = (paths for paths in classes if _share(module, paths) > 0.9 * largest)
        return ModelBlocks(max(almost, key=len), "the most repeated class")
    return ModelBlocks((), "")


def _list_entries(module: nn.Module, path: str = "") -> Iterator[str]:
    """Yield the paths of the entries of all outermost ModuleLists. Entries without a matrix, such as norms, are
    skipped. The search continues in an entry that is a container without a forward."""
    for name, child in module.named_children():
        child_path = full_name(path, name)
        if not isinstance(module, nn.ModuleList) or not has_forward(child):
            yield from _list_entries(child, child_path)
        elif any(parameter.ndim > 1 for parameter in child.parameters()):
            yield child_path


def _sequential_entries(module: nn.Module, path: str = "") -> Iterator[str]:
    """Yield the paths of the composite entries (see `_is_composite`) of the outermost Sequentials. If an entry is
    itself a Sequential with composite entries, yield its composite entries instead."""
    for name, child in module.named_children():
        child_path = full_name(path, name)
        is_container = isinstance(child, nn.Sequential) and any(map(_is_composite, child.children()))
        if is_container or not isinstance(module, nn.Sequential):
            yield from _sequential_entries(child, child_path)
        elif _is_composite(child):
            yield child_path


def _is_composite(module: nn.Module) -> bool:
    """Return True if any submodule of a module has parameters."""
    return any(True for child in module.children() for _ in child.parameters())


def _repeated(module: nn.Module, paths: Iterator[str]) -> tuple[str, ...]:
    """Return the paths of the modules whose class occurs at more than one of `paths`."""
    classes = {path: type(module.get_submodule(path)) for path in paths}
    counts = Counter(classes.values())
    return tuple(path for path, cls in classes.items() if counts[cls] > 1)


def _share(module: nn.Module, paths: Sequence[str]) -> float:
    """Return the fraction of a model's parameters that the modules at `paths` hold. Parameters of embeddings do not
    count."""
    embeddings = {p for child in module.modules() if isinstance(child, nn.Embedding) for p in child.parameters()}
    inside = {p for path in paths for p in module.get_submodule(path).parameters()}
    others = set(module.parameters()) - embeddings
    return sum(p.numel() for p in inside - embeddings) / max(1, sum(p.numel() for p in others))


def has_forward(module: nn.Module) -> bool:
    """Return True if a module has a forward; containers (`nn.ModuleList`, `nn.ModuleDict`) have none."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def find_blocks(module: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the paths of the modules that the globs match, in the order of `named_modules`.

    A ModuleList or ModuleDict cannot be a block, because it has no forward. Raise ConfigError with a problem on
    `model.blocks` for every glob that matches no module with a forward.
    """
    paths, containers = _paths(module)
    unused = [
        Problem(("model", "blocks", index), nothing_matched(pattern, paths, containers), pattern)
        for index, pattern in enumerate(patterns)
        if not any(matches(pattern, path) for path in paths)
    ]
    if unused:
        raise ConfigError(unused)
    return tuple(path for path in paths if any(matches(pattern, path) for pattern in patterns))


def find_pipeline_order(module: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the paths that the globs of `pipeline_order` match, glob by glob. The matches of one glob are in the order
    of `named_modules`.

    Raise ConfigError on `model.name` in three cases: a glob matches no module with a forward, a module is listed twice,
    or both a module and its submodule are listed.
    """
    paths, containers = _paths(module)
    pipeline_order: list[str] = []
    problems = []
    for pattern in patterns:
        found = [path for path in paths if matches(pattern, path)]
        if not found:
            problems.append(
                f'the model\'s pipeline_order has "{pattern}", which {nothing_matched(pattern, paths, containers)}'
            )
        pipeline_order += found
    problems += [
        f"the model's pipeline_order has {path} twice, or both {path} and a module that contains it; list each "
        "module once"
        for path in pipeline_order
        if pipeline_order.count(path) > 1 or enclosing(parent(path), pipeline_order)
    ]
    if problems:
        raise ConfigError(Problem(("model", "name"), reason) for reason in dict.fromkeys(problems))
    return tuple(pipeline_order)


def _paths(module: nn.Module) -> tuple[list[str], list[str]]:
    """Return the paths of all submodules, in two lists: modules with a forward, and containers without one."""
    runnable: list[str] = []
    containers: list[str] = []
    for path, child in module.named_modules():
        if path:
            (runnable if has_forward(child) else containers).append(path)
    return runnable, containers


def remove_blocks(model: nn.Module, removed: Iterable[str]) -> None:
    """Remove blocks from their containers, in place. The other blocks keep their names, such as `0` and `3`. Raises
    ValueError for a block that is a plain attribute, because a forward reads the attribute by name."""
    for path in removed:
        container = model.get_submodule(parent(path))
        if not isinstance(container, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            reason = f"it is an attribute of a {type(container).__name__}, and a forward reads attributes by name"
            raise ValueError(f"{path} cannot be removed, because {reason}")
        delattr(container, path.rpartition(".")[2])


@contextmanager
def blocks_removed(model: nn.Module, removed: Collection[str]) -> Iterator[None]:
    """Remove blocks from their containers until the `with` block ends. Raises ValueError as `remove_blocks` does."""
    containers = [model.get_submodule(path)._modules for path in dict.fromkeys(map(parent, removed))]
    before = [dict(modules) for modules in containers]
    try:
        remove_blocks(model, removed)
        yield
    finally:
        for modules, own in zip(containers, before, strict=True):
            modules.clear()  # so that the blocks get their original order
            modules.update(own)


class PassThrough(nn.Module):
    """Replacement for a module that another stage holds. The forward returns the first input unchanged."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x


def cut(model: nn.Module, stages: Sequence[Collection[str]], others: Collection[str]) -> tuple[nn.Module, ...]:
    """Return one module for each pipeline stage of this rank: `model` itself for a single stage, else a shallow copy of
    its module tree for each stage. In each result, a `PassThrough` replaces every module of another stage. The modules
    of other ranks are replaced in `model` too. Module paths, names in checkpoints and initial values do not change.

    `stages`: the paths of the modules of each stage of this rank. `others`: the paths of the modules of other ranks.
    `stages` and `others` together contain the whole pipeline order. Modules outside of the pipeline order have no
    parameters, and are on every stage. The results share their modules with `model`.
    """
    pipeline_order = {path for stage in stages for path in stage} | set(others)
    views = [_view(model, set(stage), pipeline_order) for stage in stages] if len(stages) > 1 else [model]
    for path in others:
        model.set_submodule(path, PassThrough())
    return tuple(views)


def _view(module: nn.Module, kept: Collection[str], pipeline_order: Collection[str], path: str = "") -> nn.Module:
    """Return a copy of a module tree, in which pass-through modules replace the modules of `pipeline_order` that are
    not in `kept`. A module that is in `kept`, or that contains no module of `pipeline_order`, is not copied. `path`:
    the module's path in the model."""
    if path in pipeline_order:
        return module if path in kept else PassThrough()
    if not any(other.startswith(f"{path}.") or not path for other in pipeline_order):
        return module
    view = copy.copy(module)
    for name, value in vars(module).items():  # hooks that FSDP2 adds to one stage must not run in the others
        if isinstance(value, dict) and "hook" in name:
            vars(view)[name] = value.copy()
    vars(view)["_modules"] = {
        name: None if child is None else _view(child, kept, pipeline_order, full_name(path, name))
        for name, child in module._modules.items()
    }
    return view
