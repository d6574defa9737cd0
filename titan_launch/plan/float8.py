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
"""What the kernels want both sides of a matrix to be a multiple of: 16 bytes of 8-bit numbers."""


def float8_modules(config: Float8Config, plan: ModelPlan) -> tuple[str, ...]:
    """Paths of the linear layers that `[float8]` converts.

    Raises ConfigError for globs that match nothing, or no linear layer; for layers that a rule computes in another
    dtype than bfloat16, where a glob names them; and for matrices that the kernels do not take.
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
        reason = "there is no linear layer in bfloat16 in what it names; name others, or set float8.enable = false"
        raise config_error(_MODULES, reason, list(config.modules))
    return tuple(module.path for module in reduced)


def describe_float8(config: Float8Config, plan: ModelPlan) -> str:
    """Which linear layers are converted, and how: one line."""
    layers = ", ".join(f"{count} x {pattern}" for pattern, count in alike(plan.float8).items())
    options: list[str] = [config.recipe]
    options += ["gathered in 8 bits"] if config.all_gather else []
    options += ["emulated"] if config.emulate else []
    return f"float8 ({', '.join(options)}): {layers}"


def check_shards(config: Float8Config, plan: ModelPlan, layout: Layout) -> None:
    """Raise ConfigError for a converted layer that the ranks cannot share evenly, where its shards are gathered in 8
    bits: FSDP2 pads a shard that is too short, but not what torchao makes of it."""
    shards = layout.parameter_shards
    if not config.all_gather:
        return
    for path in plan.float8:
        rows = next(p.shape[0] for p in plan.inventory.by_path[path].parameters if p.name == "weight")
        if rows % shards:
            reason = (
                f"{path} has {rows} outputs, which {shards} ranks (parallelism.data_parallel_shard_degree) cannot "
                "share evenly; shard over a number of ranks that divides them, name other float8.modules, or set false"
            )
            also = (_MODULES, ("parallelism", "data_parallel_shard_degree"))
            raise config_error(("float8", "all_gather"), reason, True, also=also)


def _is_linear(module: ModuleInfo) -> bool:
    """A plain one: what a subclass computes is its own."""
    return module.classes[0] == _LINEAR and module.same_as is None


def _in_other_dtypes(layers: list[ModuleInfo], plan: ModelPlan, config: Float8Config) -> Iterator[Problem]:
    by_unit: dict[str, list[str]] = {}
    for module in layers:
        if plan.unit_of[module.path].compute_dtype != "bfloat16":
            by_unit.setdefault(plan.unit_of[module.path].reason, []).append(module.path)
    for reason, paths in by_unit.items():
        dtype = plan.unit_of[paths[0]].compute_dtype
        text = f"names {listed(paths)}, which {reason} computes in {dtype}; leave them out here, or drop that rule"
        yield Problem(_MODULES, text, list(config.modules), also=(("precision",),))


def _misshapen(layers: list[ModuleInfo], config: Float8Config) -> Iterator[Problem]:
    for module in layers:
        rows, columns = next(p.shape for p in module.parameters if p.name == "weight")
        if rows % _MULTIPLE or columns % _MULTIPLE:
            text = (
                f"{module.path} has {columns} inputs and {rows} outputs, and the kernels take multiples of {_MULTIPLE} "
                "only; name the other modules"
            )
            yield Problem(_MODULES, text, list(config.modules))
            return  # one stands for all of its like
