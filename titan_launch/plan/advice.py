"""Changes of a job that reduce its memory, with the predicted saving and the cost of each change. This module does not
import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain

from titan_launch.config.job import JobConfig
from titan_launch.config.loading.provenance import toml_value
from titan_launch.config.rules import first_problem
from titan_launch.core.errors import ConfigError
from titan_launch.plan.auto_mode import possible_batch_sizes
from titan_launch.plan.hardware import format_memory
from titan_launch.plan.job import with_local_batch_size, with_values
from titan_launch.plan.layout import Layout, plan_layout, with_global_batch_size

PredictBytes = Callable[[JobConfig, Layout], float]
"""A function that predicts the bytes that a job takes from a device (`PlanRow.reserved_bytes`)."""


@dataclass(frozen=True)
class Advice:
    """A change of the job file that saves memory."""

    lines: tuple[str, ...]
    """The keys to set, as TOML: `training.local_batch_size = 2`."""

    cost: str
    """Cost of the change, in words."""

    saved_bytes: float
    fits: bool
    """True if the changed job is predicted to fit."""

    def text(self) -> list[str]:
        """Return the keys as lines of TOML. The last line ends with a comment: the saving and the cost."""
        *before, last = self.lines
        fits = "" if self.fits else ", which is not enough"
        return [*before, f"{last}  # saves {format_memory(self.saved_bytes)}{fits}; cost: {self.cost}"]


@dataclass(frozen=True)
class _Change:
    values: Mapping[tuple[str, str], bool | int | str]
    """New values of keys, by (section, key)."""

    cost: str

    @property
    def lines(self) -> list[str]:
        """The keys to set, as TOML."""
        return [f"{section}.{key} = {toml_value(value)}" for (section, key), value in self.values.items()]


def advise(config: JobConfig, layout: Layout, limit_bytes: float, predict: PredictBytes) -> list[Advice]:
    """Return up to three changes, each of which saves more than 0.5 % of the memory. Changes with which the job fits
    into `limit_bytes` come first. If no single change suffices, the first entry combines several. If even they do not
    suffice, its `fits` is False. No mode of `config` may be `auto`.

    The time that a change costs is not predicted, so the kinds of changes have a fixed order. Kinds that usually cost
    the least time come first. Kinds that change the results of the training come last.
    """
    config = with_global_batch_size(config, layout)
    needed = predict(config, layout)
    found: list[Advice] = []
    for change in chain.from_iterable(_changes(config, layout, limit_bytes, predict)):
        predicted = _predicted(with_values(config, change.values), layout.world_size, predict)
        if predicted is not None and predicted < 0.995 * needed:
            found.append(Advice(tuple(change.lines), change.cost, needed - predicted, predicted <= limit_bytes))
    if found and not any(advice.fits for advice in found):
        combined = _combined(config, layout, limit_bytes, predict, needed)
        found = [combined, *(advice for advice in found if advice.lines != combined.lines)]
    return sorted(found, key=lambda advice: not advice.fits)[:3]  # the sort is stable, so the cheapest stays first


def smallest_sufficient(config: JobConfig, layout: Layout, limit_bytes: float, predict: PredictBytes) -> int | None:
    """Return the smallest number of ranks on which the job fits into `limit_bytes`; None if no tried number suffices.
    Only 2, 4, 8, ... 128 times the job's own number of ranks are tried. The added ranks shard the parameters."""
    config = with_values(config, {("parallelism", "data_parallel_shard_degree"): -1})
    for doublings in range(1, 8):
        world_size = layout.world_size * 2**doublings
        predicted = _predicted(config, world_size, predict)
        if predicted is not None and predicted <= limit_bytes:
            return world_size
    return None


def _combined(config: JobConfig, layout: Layout, limit_bytes: float, predict: PredictBytes, needed: float) -> Advice:
    """Return the advice that combines changes of several kinds. Precondition: at least one change saves memory.
    `needed`: predicted memory of the unchanged job, in bytes.

    First, the strongest valid change of each kind is applied, the cheapest kind first, until the job fits. If the
    job fits, each change is then replaced by the weakest change of its kind with which the job still fits. The
    microbatch is not enlarged again, even if later changes leave enough memory. Changes that save less than 0.5 % are
    skipped.
    """
    kinds: list[tuple[_Change, ...]] = []
    changed, predicted = config, needed
    while predicted > limit_bytes:
        layout = plan_layout(changed.parallelism, changed.training, layout.world_size)
        for kind in _changes(changed, layout, limit_bytes, predict):
            for length in range(len(kind), 0, -1):
                stronger = with_values(changed, kind[length - 1].values)
                size = _predicted(stronger, layout.world_size, predict)
                if size is not None:
                    break
            if size is not None and size < 0.995 * predicted:
                kinds.append(kind[:length])
                changed, predicted = stronger, size
                break
        else:
            break

    def sufficient(changes: Sequence[_Change]) -> float | None:
        changed = reduce(lambda config, change: with_values(config, change.values), changes, config)
        size = _predicted(changed, layout.world_size, predict)
        return size if size is not None and size <= limit_bytes else None

    chosen = [kind[-1] for kind in kinds]
    for index, kind in enumerate(kinds if predicted <= limit_bytes else ()):
        for weaker in kind[:-1]:
            changes = [*chosen[:index], weaker, *chosen[index + 1 :]]
            if (size := sufficient(changes)) is not None:
                chosen, predicted = changes, size
                break
    lines = tuple(line for change in chosen for line in change.lines)
    costs = "; ".join(change.cost for change in chosen)
    return Advice(lines, costs, needed - predicted, predicted <= limit_bytes)


def _predicted(config: JobConfig, world_size: int, predict: PredictBytes) -> float | None:
    """Return the predicted memory of a changed job in bytes; None if the job is not valid or cannot be planned."""
    if first_problem(config) is not None:
        return None
    try:
        return predict(config, plan_layout(config.parallelism, config.training, world_size))
    except ConfigError:
        return None


def _changes(
    config: JobConfig, layout: Layout, limit_bytes: float, predict: PredictBytes
) -> Iterator[tuple[_Change, ...]]:
    """Yield the changes that a job allows, a tuple for each kind of change. The cheapest kind comes first. Within a
    kind, the change that saves the least memory comes first."""
    accumulation, checkpointing = config.gradient_accumulation, config.activation_checkpoint
    if accumulation.keep_params_unsharded:
        yield (_Change({("gradient_accumulation", "keep_params_unsharded"): False}, "more all-gathers"),)
    mode = ("gradient_accumulation", "mode")
    if not accumulation.row.reduce_scatters_each and layout.num_microbatches > 1:
        yield (_Change({mode: "immediate"}, "a reduce-scatter for every microbatch"),)
    if layout.replicate > 1 and not layout.shards_optimizer:
        values: dict[tuple[str, str], bool | str] = {("parallelism", "shard_optimizer_over_replicas"): True}
        if accumulation.row.needs_all_reduces:  # a sharded optimizer has no all-reduces
            values[mode] = "immediate"
        yield (_Change(values, "all-gathers between the replicas follow each update"),)
    if config.loss.chunks < 16 and config.data.unit == "tokens" and config.model.loss is None:
        cost = "backward computes the output layer a second time"
        if config.loss.chunks > 1:  # the job already pays this cost
            cost = "more and smaller matrix products in the output layer"
        yield (_Change({("loss", "chunks"): 16}, cost),)
    if size := _smaller_batch(config, layout, limit_bytes, predict):
        batches = {"local_batch_size": size, "global_batch_size": config.training.global_batch_size}
        kept = {("training", key): value for key, value in batches.items() if value is not None}
        yield (_Change(kept, "more and smaller microbatches; the same global batch"),)
    stronger = {"none": ("selective", "full"), "selective": ("full",), "memory_budget": ("full",)}
    costs = {
        "selective": "some operations of forward run twice",
        "full": "forward runs twice, which takes about a third more time",
    }
    if modes := stronger.get(checkpointing.mode, ()):
        yield tuple(_Change({("activation_checkpoint", "mode"): mode}, costs[mode]) for mode in modes)
    if config.job.device != "cpu" and not config.training.enable_cpu_offload:
        cost = "parameters are copied from the host to the device in every microbatch"
        yield (_Change({("training", "enable_cpu_offload"): True}, cost),)
    if config.optimizer.state_dtype is None:
        cost = "less precise optimizer moments, which change the results of the training"
        yield tuple(_Change({("optimizer", "state_dtype"): dtype}, cost) for dtype in ("bfloat16", "int8"))


def _smaller_batch(config: JobConfig, layout: Layout, limit_bytes: float, predict: PredictBytes) -> int | None:
    """Return the largest possible microbatch size that is below the job's size and with which the job fits. If no
    smaller size makes the job fit, return the smallest size. Return None if no smaller size is possible."""
    sizes = [size for size in possible_batch_sizes(config, layout.world_size) if size < layout.local_batch_size]
    for size in reversed(sizes):
        predicted = _predicted(with_local_batch_size(config, size), layout.world_size, predict)
        if predicted is not None and predicted <= limit_bytes:
            return size
    return sizes[0] if sizes else None
