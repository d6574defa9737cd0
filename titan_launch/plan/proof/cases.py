"""The runs of a proof: layouts of the twin (a small copy of the job, see `plan.proof.twin`), and the single process
with which these runs are compared. This module does not import torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from titan_launch.config.axes import PIPELINE, REPLICATE, SHARD, TENSOR
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig, CompileConfig, ParallelismConfig
from titan_launch.config.sections.training import ACCUMULATION_MODES, GradientAccumulationConfig
from titan_launch.plan.job import with_values
from titan_launch.plan.layout import smallest_world_size
from titan_launch.plan.proof.twin import NAMED_AXES, num_microbatches

MOST_RANKS = 8
"""Largest number of processes of a run. For a layout of more ranks, each run has only two axes of the layout, and the
axes that these two need."""

LAYOUT_PARTS = (*NAMED_AXES, "sharded optimizer")
"""Parts of a layout. Each run uses some of them. The part "sharded optimizer" needs the part "replicas"."""

MODES = ("accumulation", "checkpointing", "chunks", "compile")
"""Modes: other features of a job, by their names in a certificate. Each run uses some of them."""


@dataclass(frozen=True)
class Case:
    """A run of the twin that is compared with a single process."""

    config: JobConfig
    parts: tuple[str, ...]
    """The axes and modes by which the run differs from the single process (`reference`). In a bisection, the axes that
    `_with_needed` adds are not listed."""

    is_exact: bool = True
    """True if the run is in fp32, False if it is in the precision of the job."""

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return smallest_world_size(self.config.parallelism)

    @property
    def name(self) -> str:
        """The parts in words: `shards 2, tensor 2, accumulation deferred`."""
        return ", ".join(_in_words(self.config, part) for part in self.parts) or "one process"

    def reference(self, has_batch_norm: bool) -> JobConfig:
        """Return the job of the single process, which trains the same global batch without any axis or mode.
        `has_batch_norm`: True if the model has BatchNorm. The single process then uses microbatches with as many
        samples as the batch statistics of this case."""
        local, size = self.config.training.local_batch_size, GLOBAL_BATCH
        if has_batch_norm:
            assert local != "auto"
            is_synchronized = self.config.batchnorm.statistics == "synchronized"
            size = local * (data_ranks(self.config.parallelism) if is_synchronized else 1)
        return with_values(without(self.config, (*LAYOUT_PARTS, *MODES)), {("training", "local_batch_size"): size})


def cases(twin: JobConfig) -> Iterator[Case]:
    """Yield the runs of a twin. A choice is the twin with one pair of modes (`_choices`). The first run is one process
    with the first choice. The other runs are:

    - for a layout with one rank: one process for each other choice;
    - for a layout with at most `MOST_RANKS` ranks: this layout, once for each choice;
    - for a larger layout: one run for each pair of its axes, with the sharded optimizer if the pair includes replicas.
      The choices are used in turn.
    """
    choices = list(_choices(twin))
    axes = tuple(_axes(twin))
    own_modes = tuple(_modes(choices[0]))
    alone = without(choices[0], axes)
    yield Case(alone, own_modes)
    # Inductor takes a minute to compile kernels, so the graphs of all other runs run operation by operation.
    if twin.compile.enable and twin.compile.backend == "inductor":
        choices = [with_values(choice, {("compile", "backend"): "aot_eager"}) for choice in choices]
    if not axes:
        yield from (Case(choice, tuple(_modes(choice))) for choice in choices[1:])
        return
    if smallest_world_size(twin.parallelism) <= MOST_RANKS:
        yield from (Case(choice, (*axes, *_modes(choice))) for choice in choices)
        return
    for index, pair in enumerate(combinations([axis for axis in axes if axis in NAMED_AXES], 2)):
        kept = (*_with_needed(pair), "sharded optimizer")  # `without` removes it together with the replicas
        config = without(choices[index % len(choices)], tuple(axis for axis in axes if axis not in kept))
        yield Case(config, (*_axes(config), *_modes(config)))


def proven_layout(twin: JobConfig, runs: Sequence[Case]) -> str:
    """Return the layout that the runs of a twin cover, in words. With at most `MOST_RANKS` ranks, the text has the
    axes, and the modes of the last run: `shards 2, tensor 2, accumulation deferred`. For runs of pairs, the text has
    only the axes: `replicas 2, shards 2, tensor 2, context 2, in pairs`."""
    if smallest_world_size(twin.parallelism) <= MOST_RANKS:
        return runs[-1].name
    return ", ".join(_in_words(twin, axis) for axis in _axes(twin)) + ", in pairs"


def runs_with_parts(case: Case, number: int) -> list[Case]:
    """Return a run for each combination of `number` parts of a case, for a bisection. The run has these parts and the
    axes that they need."""
    found = []
    for parts in combinations(case.parts, number):
        kept = _with_needed(parts)
        config = without(case.config, tuple(other for other in case.parts if other not in kept))
        found.append(Case(config, parts, case.is_exact))
    return found


def _with_needed(parts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the parts, and the axes that they need."""
    added = list(parts)
    within = [axis for part in parts if (axis := NAMED_AXES.get(part)) is not None and axis.is_within_shards]
    if within and not any(axis.is_factor for axis in within):  # these axes have no ranks of their own
        added.append(SHARD.ranks)
    if "sharded optimizer" in parts:
        added.append(REPLICATE.ranks)
    return tuple(added)


def without(config: JobConfig, parts: tuple[str, ...]) -> JobConfig:
    """Return a twin without the given axes and modes, and without modes that need one of them. The batch is divided
    over the remaining ranks."""
    degrees: dict[str, Any] = {NAMED_AXES[part].key[1]: 1 for part in parts if part in NAMED_AXES}
    if {"sharded optimizer", "replicas"} & {*parts}:
        degrees["shard_optimizer_over_replicas"] = False
    parallelism = config.parallelism.model_copy(update=degrees)
    if parallelism.degree(TENSOR) == 1:
        parallelism = parallelism.model_copy(update={"sequence_parallel": True, "loss_parallel": True})
    changes: dict[str, Any] = {"parallelism": parallelism}
    immediate = GradientAccumulationConfig(mode="immediate")
    plain = {
        "accumulation": ("gradient_accumulation", _ONCE if parallelism.splits_backward else immediate),
        "checkpointing": ("activation_checkpoint", ActivationCheckpointConfig()),
        "chunks": ("loss", config.loss.model_copy(update={"chunks": 1})),
        "compile": ("compile", CompileConfig()),
    }
    changes |= dict(plain[part] for part in parts if part in plain)
    changed = config.model_copy(update=changes)
    accumulation = changed.gradient_accumulation
    if accumulation.mode != "auto" and accumulation.row.needs_all_reduces and not _all_reduces(parallelism):
        changed = changed.model_copy(update={"gradient_accumulation": immediate})
    if changed.activation_checkpoint.mode == "memory_budget" and not changed.compile.enable:
        changed = changed.model_copy(update={"activation_checkpoint": ActivationCheckpointConfig()})
    return with_batch(changed)


_ONCE = GradientAccumulationConfig(mode="deferred", keep_params_unsharded=True)
"""The only gradient accumulation mode that schedules with a split backward (zero-bubble) support."""


def with_batch(config: JobConfig) -> JobConfig:
    """Return a twin whose step has `GLOBAL_BATCH` samples, in at least two microbatches of equal size on each rank."""
    local = GLOBAL_BATCH // (data_ranks(config.parallelism) * num_microbatches(config))
    return with_values(
        config, {("training", "global_batch_size"): GLOBAL_BATCH, ("training", "local_batch_size"): local}
    )


GLOBAL_BATCH = 16


def data_ranks(parallelism: ParallelismConfig) -> int:
    """Return the number of data-parallel ranks of a twin."""
    return parallelism.data_parallel_replicate_degree * parallelism.data_parallel_shard_degree


def _axes(config: JobConfig) -> Iterator[str]:
    degrees = config.parallelism
    yield from (name for name, axis in NAMED_AXES.items() if degrees.degree(axis) > 1)
    if degrees.shard_optimizer_over_replicas and degrees.data_parallel_replicate_degree > 1:
        yield "sharded optimizer"


def _modes(config: JobConfig) -> Iterator[str]:
    """Yield the modes of a twin, by their names in `MODES`. Every run accumulates gradients."""
    yield "accumulation"
    if config.activation_checkpoint.mode != "none":
        yield "checkpointing"
    if config.loss.chunks > 1:
        yield "chunks"
    if config.compile.enable:
        yield "compile"


def _choices(twin: JobConfig) -> Iterator[JobConfig]:
    """Yield the twin with the accumulation and checkpointing modes that the job sets. With `auto`, each mode that
    `auto` may choose is in at least one yielded twin, except checkpointing `none`: the other modes run its operations,
    too."""
    accumulation, checkpointing = twin.gradient_accumulation, twin.activation_checkpoint
    if twin.parallelism.splits_backward:
        modes = [_ONCE]
    elif accumulation.mode == "auto":
        can_keep = accumulation.keep_params_unsharded is not False and not twin.loss.frees_parameters
        modes = [
            GradientAccumulationConfig(mode=name, keep_params_unsharded=can_keep and not row.reduce_scatters_each)
            for name, row in ACCUMULATION_MODES.items()
            if _all_reduces(twin.parallelism) or not row.needs_all_reduces
        ]
    else:
        modes = [accumulation.model_copy(update={"keep_params_unsharded": bool(accumulation.keep_params_unsharded)})]
    chosen = ("full", "selective") if checkpointing.mode == "auto" else (checkpointing.mode,)
    checkpointings = [checkpointing.model_copy(update={"mode": name}) for name in chosen]
    for index in range(max(len(modes), len(checkpointings))):
        changes = {
            "gradient_accumulation": modes[index % len(modes)],
            "activation_checkpoint": checkpointings[index % len(checkpointings)],
        }
        yield with_batch(twin.model_copy(update=changes))


def _all_reduces(parallelism: ParallelismConfig) -> bool:
    return parallelism.data_parallel_replicate_degree > 1 and not parallelism.shard_optimizer_over_replicas


def in_precision(case: Case, twin: JobConfig) -> Case:
    """Return a case with the dtypes of `twin`: an fp32 case in the precision of the job, or the reverse."""
    sections = {name: getattr(twin, name) for name in ("precision", "optimizer")}
    return replace(case, config=case.config.model_copy(update=sections), is_exact=not case.is_exact)


def has_compiler() -> bool:
    """Return True if this host has a C++ compiler, which inductor needs."""
    return any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name)


def _in_words(config: JobConfig, part: str) -> str:
    if part in NAMED_AXES:
        words = f"{part} {config.parallelism.degree(NAMED_AXES[part])}"
        if part == PIPELINE.name:
            words += f" ({config.parallelism.pipeline_parallel_schedule})"
        if part == TENSOR.name:
            off = [key for key in ("sequence_parallel", "loss_parallel") if not getattr(config.parallelism, key)]
            words += "".join(f" without {key}" for key in off)
        return words
    return {
        "accumulation": f"accumulation {config.gradient_accumulation.label}",
        "checkpointing": f"checkpointing {config.activation_checkpoint.mode}",
        "chunks": f"{config.loss.chunks} chunks of the loss",
        "compile": f"compile ({config.compile.backend})",
    }.get(part, part)
