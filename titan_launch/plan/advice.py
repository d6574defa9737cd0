"""Changes of a job that need less memory, with their predicted saving and their cost. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from titan_launch.config.job import JobConfig
from titan_launch.config.rules import RULES
from titan_launch.config.sections.section import Section
from titan_launch.core.errors import ConfigError
from titan_launch.plan.batch_size import possible_batch_sizes, with_local_batch_size
from titan_launch.plan.hardware import format_memory
from titan_launch.plan.layout import Layout, plan_layout, with_global_batch_size

Predict = Callable[[JobConfig, Layout], float]
"""Predicts the memory of a job in bytes, as `Row.reserved_bytes`."""


@dataclass(frozen=True)
class Advice:
    """A change of the job file."""

    lines: tuple[str, ...]
    """The keys to set, as TOML: `training.local_batch_size = 2`."""

    cost: str
    saved_bytes: float
    fits: bool
    """True if the changed job is predicted to fit."""

    def text(self) -> list[str]:
        """Return the keys, one on a line; the last one with saving and cost as a comment."""
        *before, last = self.lines
        fits = "" if self.fits else ", which is not enough"
        return [*before, f"{last}  # saves {format_memory(self.saved_bytes)}{fits}; costs {self.cost}"]


@dataclass(frozen=True)
class _Change:
    lines: tuple[str, ...]
    cost: str
    config: JobConfig


def advise(config: JobConfig, layout: Layout, limit_bytes: float, predict: Predict, most: int = 3) -> list[Advice]:
    """Return up to `most` changes that save memory. The first is the cheapest one that fits into `limit_bytes`.

    If no single change fits, the first combines them. `config` has no `auto`. The cost of a change is known by its kind
    only, so changes are in a fixed order: first those that cost the least time, last the ones that change the results.
    """
    config = with_global_batch_size(config, layout)
    needed = predict(config, layout)
    found: list[Advice] = []
    for change in _changes(config, layout, limit_bytes, predict):
        predicted = _predicted(change.config, layout.world_size, predict)
        if predicted is not None and predicted < 0.995 * needed:
            found.append(Advice(change.lines, change.cost, needed - predicted, predicted <= limit_bytes))
    if found and not any(advice.fits for advice in found):
        found.insert(0, _combined(config, layout, limit_bytes, predict, needed))
    return sorted(found, key=lambda advice: not advice.fits)[:most]  # stable: the cheapest first


def smallest_sufficient(config: JobConfig, layout: Layout, limit_bytes: float, predict: Predict) -> int | None:
    """Return the smallest number of ranks on which the job fits into `limit_bytes`, of 2, 4, 8, ... times its own;
    None if there is none. The added ranks shard the parameters; the global batch stays, if the job sets one."""
    sharded = config.parallelism.model_copy(update={"data_parallel_shard_degree": -1})
    config = config.model_copy(update={"parallelism": sharded})
    for doublings in range(1, _MOST_DOUBLINGS + 1):
        world_size = layout.world_size * 2**doublings
        predicted = _predicted(config, world_size, predict)
        if predicted is not None and predicted <= limit_bytes:
            return world_size
    return None


_MOST_DOUBLINGS = 7


def _combined(config: JobConfig, layout: Layout, limit_bytes: float, predict: Predict, needed: float) -> Advice:
    """Return the advice that applies one change after another, the cheapest first, until the job fits."""
    lines: dict[str, str] = {}
    costs: list[str] = []
    predicted = needed
    while predicted > limit_bytes:
        layout = plan_layout(config.parallelism, config.training, layout.world_size)
        changes = _changes(config, layout, limit_bytes, predict)
        candidates = ((change, _predicted(change.config, layout.world_size, predict)) for change in changes)
        found = next(((c, size) for c, size in candidates if size is not None and size < 0.995 * predicted), None)
        if found is None:
            break
        change, predicted = found
        lines |= {line.partition(" =")[0]: line for line in change.lines}
        costs.append(change.cost)
        config = change.config
    return Advice(tuple(lines.values()), "; ".join(costs), needed - predicted, predicted <= limit_bytes)


def _predicted(config: JobConfig, world_size: int, predict: Predict) -> float | None:
    """Return the predicted memory of a changed job; None if the job is not valid."""
    if any(problem for rule in RULES for problem in rule(config)):
        return None
    try:
        return predict(config, plan_layout(config.parallelism, config.training, world_size))
    except ConfigError:
        return None


def _changes(config: JobConfig, layout: Layout, limit_bytes: float, predict: Predict) -> Iterator[_Change]:
    """Yield the changes that a job allows, the cheapest first."""
    accumulation, checkpointing = config.gradient_accumulation, config.activation_checkpoint
    if accumulation.keep_params_unsharded:
        yield _set(config, "gradient_accumulation", "keep_params_unsharded", False, "more all-gathers")
    if not accumulation.row.reduce_scatters_each and layout.num_microbatches > 1:
        yield _set(config, "gradient_accumulation", "mode", "immediate", "a reduce-scatter for every microbatch")
    if layout.replicate > 1 and not layout.shards_optimizer:
        cost = "the exchange between replicas does not overlap with backward"
        change = _set(config, "parallelism", "shard_optimizer_over_replicas", True, cost)
        if accumulation.row.needs_all_reduces:  # they do not exist then
            other = _set(change.config, "gradient_accumulation", "mode", "immediate", cost)
            change = _Change((*change.lines, *other.lines), cost, other.config)
        yield change
    if config.loss.chunks < 16 and config.data.unit == "tokens" and config.model.loss is None:
        cost = "a second product of the output layer in backward"
        yield _set(config, "loss", "chunks", 16, cost)
    size = _smaller_batch(config, layout, limit_bytes, predict)
    if size is not None:
        change = _set(
            config, "training", "local_batch_size", size, "more and smaller microbatches; the same global batch"
        )
        if config.training.global_batch_size is not None:
            lines = (*change.lines, f"training.global_batch_size = {config.training.global_batch_size}")
            change = _Change(lines, change.cost, change.config)
        yield change
    stronger = {"none": ("selective", "full"), "selective": ("full",), "memory_budget": ("full",)}
    costs = {"selective": "some operations of forward run twice", "full": "forward runs twice, about a third more time"}
    for mode in stronger.get(checkpointing.mode, ()):
        yield _set(config, "activation_checkpoint", "mode", mode, costs[mode])
    if config.job.device != "cpu" and not config.training.enable_cpu_offload:
        yield _set(config, "training", "enable_cpu_offload", True, "parameters cross the bus in every microbatch")
    if config.optimizer.state_dtype is None:
        cost = "coarser moments: this changes the training"
        yield _set(config, "optimizer", "state_dtype", "bfloat16", cost)
        yield _set(config, "optimizer", "state_dtype", "int8", cost)


def _smaller_batch(config: JobConfig, layout: Layout, limit_bytes: float, predict: Predict) -> int | None:
    """Return the largest smaller microbatch that fits, or else the smallest one; None if there is no smaller one."""
    sizes = [size for size in possible_batch_sizes(config, layout.world_size) if size < layout.local_batch_size]
    for size in reversed(sizes):
        predicted = _predicted(with_local_batch_size(config, size), layout.world_size, predict)
        if predicted is not None and predicted <= limit_bytes:
            return size
    return sizes[0] if sizes else None


def _set(config: JobConfig, section: str, key: str, value: bool | int | str, cost: str) -> _Change:
    table: Section = getattr(config, section)
    shown = f'"{value}"' if isinstance(value, str) else str(value).lower()
    changed = config.model_copy(update={section: table.model_copy(update={key: value})})
    return _Change((f"{section}.{key} = {shown}",), cost, changed)
