"""Which linear layers compute in 8-bit floating point. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from titan_launch.config.sections.precision import Float8Config
from titan_launch.core.errors import ConfigError, KeyPath, Problem, config_error, listed
from titan_launch.plan.compilation import alike
from titan_launch.plan.layout import Layout
from titan_launch.plan.types import ModelPlan, ModuleInfo, enclosing
from titan_launch.plan.units.rule_assignment import matched_modules

_MODULES: KeyPath = ("float8", "modules")
_LINEAR = "torch.nn.modules.linear.Linear"
_MULTIPLE = 16
"""The kernels take matrices whose numbers of rows and columns are multiples of this: 16 bytes of 8-bit numbers."""


def float8_modules(config: Float8Config, plan: ModelPlan) -> tuple[str, ...]:
    """Return the paths of the linear layers that `[float8]` converts.

    Raises ConfigError for globs that match no linear layer, for matched layers that a precision rule computes in
    another dtype than bfloat16, and for matrices that the kernels do not support.
    """
    if not config.enable:
        return ()
    is_named = bool(config.modules)
    roots = matched_modules(plan.inventory, config.modules, _MODULES) if is_named else plan.inventory.blocks
    layers = [m for m in plan.inventory.modules if _is_linear(m) and enclosing(m.path, roots)]
    reduced = [m for m in layers if plan.unit_of[m.path].compute_dtype == "bfloat16"]
    problems = [*(_in_other_dtypes(layers, plan, config) if is_named else ()), *_misshapen(reduced, config)]
    if problems:
        raise ConfigError(problems)
    if not reduced:
        reason = "matches no linear layer that computes in bfloat16; name others, or set float8.enable = false"
        raise config_error(_MODULES, reason, list(config.modules))
    return tuple(module.path for module in reduced)


def describe_float8(config: Float8Config, plan: ModelPlan) -> str:
    """Return the recipe and the converted linear layers in one line."""
    layers = ", ".join(f"{count} x {pattern}" for pattern, count in alike(plan.float8).items())
    options: list[str] = [config.recipe]
    options += ["all-gathers in 8 bits"] if config.all_gather else []
    options += ["emulated"] if config.emulate else []
    return f"{', '.join(options)}: {layers}"


def check_shards(config: Float8Config, plan: ModelPlan, layout: Layout) -> None:
    """Raise ConfigError if `float8.all_gather` is set and a converted layer cannot be sharded evenly.

    FSDP2 pads a short shard, but it does not pad torchao's 8-bit copy.
    """
    shards = layout.parameter_shards
    if not config.all_gather:
        return
    for path in plan.float8:
        rows = next(p.shape[0] for p in plan.inventory.by_path[path].parameters if p.name == "weight")
        if rows % shards:
            reason = (
                f"{path} has {rows} outputs, which {shards} shards (parallelism.data_parallel_shard_degree) do not "
                "divide; shard over a number of ranks that divides them, name other float8.modules, or set false"
            )
            also = (_MODULES, ("parallelism", "data_parallel_shard_degree"))
            raise config_error(("float8", "all_gather"), reason, True, also=also)


def _is_linear(module: ModuleInfo) -> bool:
    """Return whether a module is a plain Linear: a subclass may compute something else."""
    return module.classes[0] == _LINEAR and module.same_as is None


def _in_other_dtypes(layers: list[ModuleInfo], plan: ModelPlan, config: Float8Config) -> Iterator[Problem]:
    by_unit: dict[str, list[str]] = {}
    for module in layers:
        if plan.unit_of[module.path].compute_dtype != "bfloat16":
            by_unit.setdefault(plan.unit_of[module.path].reason, []).append(module.path)
    for reason, paths in by_unit.items():
        dtype = plan.unit_of[paths[0]].compute_dtype
        text = f"names {listed(paths)}, which {reason} computes in {dtype}; do not name them, or drop that rule"
        yield Problem(_MODULES, text, list(config.modules), also=(("precision",),))


def _misshapen(layers: list[ModuleInfo], config: Float8Config) -> Iterator[Problem]:
    for module in layers:
        rows, columns = next(p.shape for p in module.parameters if p.name == "weight")
        if rows % _MULTIPLE or columns % _MULTIPLE:
            text = (
                f"{module.path} has {columns} inputs and {rows} outputs, and the kernels support only multiples of "
                f"{_MULTIPLE}; name the other modules"
            )
            yield Problem(_MODULES, text, list(config.modules))
            return  # one problem is enough
