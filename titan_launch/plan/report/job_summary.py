"""A job in about ten lines: the header of a run, and the job in the output of `plan`. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from titan_launch.config.job import JobConfig
from titan_launch.config.loading.provenance import toml_value
from titan_launch.plan.float8 import describe_float8
from titan_launch.plan.job import accumulation_label, activation_checkpoint_label
from titan_launch.plan.layout import Layout
from titan_launch.plan.report.table import aligned
from titan_launch.plan.types import ModelPlan

Line = tuple[str, str]
"""Name and value."""


def format_lines(lines: Iterable[Line]) -> str:
    """Return aligned lines `name: value`."""
    return "\n".join(aligned([(f"{name}:", value) for name, value in lines]))


def summary_of_job(config: JobConfig, plan: ModelPlan, layout: Layout) -> list[Line]:
    """Return the model, and how it is divided, computed and trained."""
    optimizer, schedule = config.optimizer, config.lr_scheduler
    compiled = f"{config.compile.backend}, {len(plan.compiled)} modules" if config.compile.enable else ""
    kernels = ", ".join(f"{name} = {toml_value(value)}" for name, value in config.kernels.changed())
    lines = [
        ("model", f"{model_name(config)}, {plan.inventory.num_parameters:,} parameters"),
        *summary_of_batch(layout),
        ("precision", _precision(config, plan)),
        ("float8", describe_float8(config.float8, plan) if plan.float8 else ""),
        ("gradient accumulation", accumulation_label(config.gradient_accumulation)),
        ("activation checkpointing", activation_checkpoint_label(config.activation_checkpoint)),
        ("torch.compile", compiled),
        ("kernels", kernels),
        ("optimizer", f"{optimizer.name}, learning rate {optimizer.lr:g}, {schedule.warmup_steps} warm-up steps"),
        ("steps", f"{config.training.steps:,}"),
    ]
    return [(name, value) for name, value in lines if value]


def model_name(config: JobConfig) -> str:
    """Return the model's name, with its flavor if the package defines the model."""
    return config.model.name if ":" in config.model.name else f"{config.model.name} {config.model.flavor}"


def summary_of_batch(layout: Layout) -> list[Line]:
    """Return how the ranks and the global batch are divided."""
    axes = (
        (layout.pipeline, "pipeline ranks"),
        (layout.replicate, "replicas"),
        (layout.shard, "shards"),
        (layout.context, "context-parallel ranks"),
        (layout.tensor, "tensor-parallel ranks"),
    )
    division = [f"{degree} {name}" for degree, name in axes if degree > 1]
    kind = "data-parallel rank" if layout.model_parallel > 1 else "rank"
    batch = " x ".join(
        (
            _count(layout.data_parallel, kind),
            _count(layout.local_batch_size, "sample"),
            _count(layout.num_microbatches, "microbatch", "microbatches"),
        )
    )
    return [
        ("ranks", " = ".join(filter(None, (str(layout.world_size), " x ".join(division))))),
        ("global batch", f"{_count(layout.global_batch_size, 'sample')} = {batch}"),
    ]


def _count(number: int, name: str, plural: str | None = None) -> str:
    return f"{number} {name if number == 1 else plural or name + 's'}"


def _precision(config: JobConfig, plan: ModelPlan) -> str:
    """Return the default dtypes, and how many modules with parameters compute in another dtype, with the rules."""
    precision = config.precision
    compute = precision.param_dtype
    others: Counter[tuple[str, str]] = Counter()
    for module in plan.inventory.modules:
        unit = plan.unit_of[module.path]
        if module.parameters and module.same_as is None and unit.compute_dtype != compute:
            others[unit.compute_dtype, unit.reason] += 1
    parts = [
        f"compute {compute}, storage {precision.storage_dtype}, gradient reduction {precision.reduce_dtype}",
        *(f"{_count(count, 'module')} in {dtype} ({reason})" for (dtype, reason), count in others.items()),
    ]
    return "; ".join(parts)
