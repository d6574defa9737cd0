"""The modules of a model that are checkpointed, compiled or converted to float8, and the module that computes the loss.
This module does not import torch.

A hook of FSDP2 cannot be part of a compiled graph, because it runs collectives and changes parameters. So the largest
modules without an FSDP2 unit inside are compiled: a block, or parts of a block that has units inside. A compiled module
may be a unit itself: only its forward is compiled, and the unit's hooks run outside of the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from titan_launch.config.axes import TENSOR
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig
from titan_launch.config.sections.precision import Float8Config
from titan_launch.core.errors import ConfigError, KeyPath, Problem, config_error, format_key, listed
from titan_launch.core.globs import alike
from titan_launch.plan.freezing import ADAPTER
from titan_launch.plan.layout import Layout
from titan_launch.plan.types import (
    Inventory,
    ModelPlan,
    ModuleInfo,
    Unit,
    enclosing,
    full_name,
    outermost,
    outward,
    parent,
)
from titan_launch.plan.units.rule_assignment import BATCH_NORM_DEFAULT, is_mixture_of_experts, matched_modules

_MODE: KeyPath = ("activation_checkpoint", "mode")
_CHECKPOINTED_MODULES: KeyPath = ("activation_checkpoint", "modules")


def checkpointed_modules(inventory: Inventory, config: ActivationCheckpointConfig) -> tuple[str, ...]:
    """Return the paths of the modules with activation checkpointing; an empty tuple for modes that checkpoint no
    modules. Of nested modules, only the outer ones are returned.

    Raises ConfigError for every glob that matches nothing, and for a `selective_ac_option` above the number of modules.
    Also raises ConfigError if the mode works on blocks, and the model has no blocks. Raises ValueError for the mode
    `auto`.
    """
    if config.mode == "auto":
        raise ValueError("activation_checkpoint.mode is still `auto`: resolve `auto` first (plan.auto_mode)")
    if config.mode in ("none", "memory_budget"):  # with a memory budget, the compiler chooses single operations
        return ()
    if config.modules:
        candidates = outermost(matched_modules(inventory, config.modules, _CHECKPOINTED_MODULES))
        what, of = "modules", "that activation_checkpoint.modules matches"
    else:
        candidates, what, of = _blocks(inventory, config), "blocks", "of the model"
    option = selection(config)
    every = 1 if option is None or option == "op" else option
    if every > len(candidates):
        number = len(candidates)
        reason = f"exceeds the number of {what} {of}, {number}, so none would be checkpointed; set at most {number}"
        raise config_error(("activation_checkpoint", "selective_ac_option"), reason, every)
    return candidates[every - 1 :: every]


def selection(config: ActivationCheckpointConfig) -> Literal["op"] | int | None:
    """Return `selective_ac_option` in the mode `selective`; None in the other modes."""
    return config.selective_ac_option if config.mode == "selective" else None


def _blocks(inventory: Inventory, config: ActivationCheckpointConfig) -> tuple[str, ...]:
    if not inventory.blocks:
        reason = (
            "needs blocks, but the model's blocks are unknown; name the blocks in model.blocks, or name modules in "
            "activation_checkpoint.modules"
        )
        raise config_error(_MODE, reason, config.mode, also=(("model", "blocks"), _CHECKPOINTED_MODULES))
    return outermost(inventory.blocks)


_ENABLE: KeyPath = ("compile", "enable")


def compiled_modules(
    config: JobConfig, inventory: Inventory, units: Sequence[Unit], checkpointed: Collection[str]
) -> tuple[str, ...]:
    """Return the paths of the compiled modules, each once; an empty tuple if the model is not compiled. `checkpointed`:
    result of `checkpointed_modules`.

    Raises ConfigError if the model has no blocks, or if nothing of a block can be compiled. Also raises ConfigError if
    activation checkpointing is selective per operation, and a checkpointed module contains a compiled module.
    """
    if not config.compile.enable or "model" not in config.compile.components:
        return ()
    if not inventory.blocks:
        remedy = "name the blocks in model.blocks"
        if "loss" in config.compile.components:
            remedy += ', or remove "model" from compile.components'
        reason = f"compiles the model's blocks, but they are unknown; {remedy}"
        raise config_error(_ENABLE, reason, True, also=(("model", "blocks"),))
    outside = checkpointed if checkpoints_compiled(config) else ()
    found = _compilable(inventory, {path for unit in units for path in unit.modules} | set(outside))
    empty = [block for block, paths in found.items() if not paths]
    if empty:
        raise ConfigError([_nothing_left(config, empty, units, outside)])
    compiled = tuple(dict.fromkeys(path for paths in found.values() for path in paths))
    if selection(config.activation_checkpoint) == "op":
        _check_seen_by_selection(compiled, checkpointed)
    return compiled


def _check_seen_by_selection(compiled: Sequence[str], checkpointed: Collection[str]) -> None:
    """Raise ConfigError if a checkpointed module contains a compiled graph. Selective activation checkpointing per
    operation cannot see the operations inside a graph."""
    hidden = [path for path in compiled if enclosing(parent(path), checkpointed)]
    if hidden:
        globs = ", ".join(f'"{pattern}"' for pattern in alike(hidden))
        reason = (
            f"saves the results of single operations, but {hidden[0]} is a compiled graph, which hides its operations; "
            f"set activation_checkpoint.modules = [{globs}], or change activation_checkpoint.mode"
        )
        also = (_ENABLE, _CHECKPOINTED_MODULES)
        raise config_error(("activation_checkpoint", "selective_ac_option"), reason, "op", also=also)


def checkpoints_compiled(config: JobConfig) -> bool:
    """Return True if activation checkpointing, if any, must be around the compiled graphs, so that backward runs whole
    graphs again. Return False if activation checkpointing is compiled into the graphs."""
    # With tensor parallelism, a graph with a checkpoint inside would have to save a DeviceMesh. But with
    # `selective_ac_option = "op"`, the checkpoint must be inside, because it selects operations of the graph.
    return config.parallelism.degree(TENSOR) > 1 and selection(config.activation_checkpoint) != "op"


def _compilable(inventory: Inventory, boundaries: Collection[str]) -> dict[str, list[str]]:
    """Return the modules to compile in each outer block: the block itself, or else the largest modules inside the block
    that can be compiled as a whole. Modules without a forward, and single layers inside a block, are not compiled.
    `boundaries`: modules with hooks of FSDP2 or activation checkpointing, which must run outside of a graph."""
    found: dict[str, list[str]] = {block: [] for block in outermost(inventory.blocks)}
    around = {parent(module.path) for module in inventory.modules}
    # The number of tokens of an expert is known only in a step, so experts cannot be inside of a graph either.
    outside = [m.path for m in inventory.modules if m.has_experts or (m.same_as or m.path) in boundaries]
    divided = {path for inner in outside for path in outward(parent(inner))}
    whole = [m.path for m in inventory.modules if m.has_forward and m.path not in divided and enclosing(m.path, found)]
    for path in outermost(whole):
        if path in found:
            found[path].append(path)
        elif path in around:
            found[enclosing(path, found)].append(inventory.by_path[path].same_as or path)
    return found


def _nothing_left(
    config: JobConfig, blocks: Sequence[str], units: Sequence[Unit], checkpointed: Collection[str]
) -> Problem:
    """Return the problem of blocks in which only single layers could be compiled. The cause may be experts,
    checkpointed modules, or FSDP2 units inside the blocks: of precision rules, BatchNorm, nested blocks, adapters, or
    trained parameters in frozen blocks. `checkpointed`: checkpointed modules that must run outside of a graph."""
    inside = [unit for unit in units if any(enclosing(parent(path), blocks) for path in unit.modules)]
    trained = [unit for unit in inside if unit.reason.startswith("trained")]
    by_reason = {unit.reason: unit.key for unit in inside if unit not in trained}
    keys = [key for key in by_reason.values() if key is not None]
    causes, remedies = list(by_reason), ["remove those precision rules"] if keys else []
    if BATCH_NORM_DEFAULT in by_reason:
        remedies.append('set precision.param_dtype = "float32"')
    if trained:
        of_trained: dict[KeyPath, object] = {
            ("lora", "targets"): config.lora.targets,
            ("training", "trainable"): config.training.trainable,
            ("training", "frozen"): config.training.frozen,
            ("training", "unfreeze"): config.training.unfreeze,
        }
        given = [key for key, value in of_trained.items() if value]
        causes.append("trained parameters in frozen blocks")
        where = f" ({', '.join(map(format_key, given))})" if given else ""
        remedies.append(f"leave modules of each block without trained parameters{where}")
        keys += given
    parts = [f"the FSDP2 units of {', '.join(causes)}, whose hooks cannot be part of a graph"] if causes else []
    if hidden := sorted(path for path in checkpointed if enclosing(parent(path), blocks)):
        parts.append(f"the checkpointed modules ({listed(hidden)})")
        remedies.append("remove these modules from activation_checkpoint.modules")
        keys.append(_CHECKPOINTED_MODULES)
    besides = f"apart from {' and '.join(parts)}, " if parts else ""
    remedy = ", or ".join(filter(None, [" and ".join(remedies), "set compile.enable = false"]))
    reason = (
        f"no part of {listed(blocks)} can be compiled: {besides}there are only single layers, which are not compiled "
        f"on their own; {remedy}"
    )
    return Problem(_ENABLE, reason, True, also=tuple(dict.fromkeys(keys)))


_FLOAT8_MODULES: KeyPath = ("float8", "modules")
_LINEAR = "torch.nn.modules.linear.Linear"
_MULTIPLE = 16
"""The 8-bit kernels support only matrices whose numbers of rows and columns are multiples of this number."""


def float8_modules(config: Float8Config, plan: ModelPlan) -> tuple[str, ...]:
    """Return the paths of the linear layers that `[float8]` converts; an empty tuple if it is not enabled.

    Raises ConfigError for globs that match no module or that name experts, and for named layers that do not compute in
    bfloat16. Also raises ConfigError for matrices that the kernels do not support, and if no linear layer computes in
    bfloat16.
    """
    if not config.enable:
        return ()
    is_named = bool(config.modules)
    roots = matched_modules(plan.inventory, config.modules, _FLOAT8_MODULES) if is_named else plan.inventory.blocks
    linear = [m for m in plan.inventory.distinct if m.classes[0] == _LINEAR]  # no subclasses
    layers = [m for m in linear if enclosing(m.path, roots)]
    stacked = [path for path in roots if is_named and plan.inventory.by_path[path].has_experts]
    if stacked:
        reason = (
            f"names {listed(stacked)}, whose products cannot be 8-bit: torchao 0.18 has such products of experts only "
            "as a prototype, for numbers of tokens that are multiples of 16; name linear layers, such as "
            '"layers.*.attention"'
        )
        raise config_error(_FLOAT8_MODULES, reason, config.modules)
    if not is_named:
        mixtures = {m.path for m in plan.inventory.modules if is_mixture_of_experts(m)}
        layers = [m for m in layers if parent(m.path) not in mixtures]  # a router needs precision, as the head does
    reduced = [m for m in layers if plan.unit_of[m.path].compute_dtype == "bfloat16"]
    problems = [*(_in_other_dtypes(layers, plan, config) if is_named else ()), *_misshapen(reduced, config)]
    if problems:
        raise ConfigError(problems)
    if not reduced:
        place = "these modules" if is_named else "the model's blocks"
        reason = f"no linear layer of {place} computes in bfloat16; name other modules, or set float8.enable = false"
        raise config_error(_FLOAT8_MODULES, reason, config.modules)
    return tuple(module.path for module in reduced)


def describe_float8(config: Float8Config, plan: ModelPlan) -> str:
    """Return one line with the float8 recipe, its options, and the converted linear layers."""
    layers = ", ".join(f"{count} x {pattern}" for pattern, count in alike(plan.float8).items())
    options: list[str] = [config.recipe]
    options += ["all-gathers in 8 bits"] if config.all_gather else []
    options += ["emulated"] if config.emulate else []
    return f"{', '.join(options)}: {layers}"


def check_shards(config: Float8Config, plan: ModelPlan, layout: Layout) -> None:
    """Raise ConfigError if `float8.all_gather` is set and a converted layer cannot be sharded evenly. FSDP2 would pad
    the parameter, but not torchao's 8-bit copy of the parameter."""
    shards = layout.parameter_shards
    if not config.all_gather:
        return
    for path in plan.float8:
        rows = next(p.shape[0] for p in plan.inventory.by_path[path].parameters if p.name == "weight")
        if rows % shards:
            reason = (
                f"{path} has {rows} outputs, not a multiple of {shards} (data_parallel_shard_degree x "
                f"context_parallel_degree); set degrees whose product divides {rows}, name other modules in "
                "float8.modules, or set float8.all_gather = false"
            )
            also = (_FLOAT8_MODULES, ("parallelism", "data_parallel_shard_degree"))
            raise config_error(("float8", "all_gather"), reason, True, also=also)


def _in_other_dtypes(layers: list[ModuleInfo], plan: ModelPlan, config: Float8Config) -> Iterator[Problem]:
    by_unit: dict[str, list[str]] = {}
    for module in layers:
        if plan.unit_of[module.path].compute_dtype != "bfloat16":
            by_unit.setdefault(plan.unit_of[module.path].reason, []).append(module.path)
    for reason, paths in by_unit.items():
        dtype = plan.unit_of[paths[0]].compute_dtype
        text = f"names {listed(paths)}, whose compute dtype is {dtype} ({reason}); "
        text += "name layers that compute in bfloat16, or change [precision]"
        yield Problem(_FLOAT8_MODULES, text, config.modules, also=(("precision",),))


def _misshapen(layers: list[ModuleInfo], config: Float8Config) -> Iterator[Problem]:
    for module in layers:
        rows, columns = next(p.shape for p in module.parameters if p.name == "weight")
        if rows % _MULTIPLE or columns % _MULTIPLE:
            text = (
                f"{module.path} has {columns} inputs and {rows} outputs, and the kernels support only multiples of "
                f"{_MULTIPLE}; name only layers whose sizes are such multiples"
            )
            yield Problem(_FLOAT8_MODULES, text, config.modules)
            return  # one problem is enough


def loss_head(config: JobConfig, plan: ModelPlan) -> str | None:
    """Return the path of the output layer that computes the loss in chunks; None if the model returns logits."""
    return plan.inventory.output_layer if config.loss.chunks > 1 and _why_logits(plan) is None else None


def _why_logits(plan: ModelPlan) -> str | None:
    """Return the reason why the model returns logits although `loss.chunks` is above 1; None if an output layer can
    compute the loss."""
    path = plan.inventory.output_layer
    if path is None:
        return "the model has no known output layer (an nn.Linear that returns the logits)"
    if path in plan.float8:
        return f"{path} computes in float8"
    if full_name(path, ADAPTER) in plan.inventory.by_path:
        return f"{path} has an adapter"
    around = enclosing(path, plan.checkpointed)
    if around:
        return f"{path} is in {around}, which is checkpointed"
    around = enclosing(path, plan.compiled)
    return f"{path} is in {around}, which is compiled" if around else None


def describe_loss(config: JobConfig, plan: ModelPlan) -> str | None:
    """Return a log line: the module that computes the loss in chunks, or the reason why no module does. Return None for
    one chunk."""
    chunks = config.loss.chunks
    if chunks == 1:
        return None
    if plan.loss_head is not None:
        return f"computed by {plan.loss_head} in {chunks} chunks of classes; logits exist for only one chunk at a time"
    return f"computed in {chunks} chunks, but the logits of all classes exist at once, because {_why_logits(plan)}"
