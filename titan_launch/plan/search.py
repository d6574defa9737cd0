"""The search for the layouts and modes with the shortest predicted step: `plan --search`. This module does not import
torch.

The jobs to try are grouped into families. Jobs of one family have the same degrees of tensor, context, pipeline and
expert parallelism, and the same pipeline schedule. Within a family, the search tries activation checkpointing modes,
chunks of the loss, microbatch sizes, replicas, a sharded optimizer and gradient accumulation modes. Jobs of one
family with the same chunks and microbatch size share recordings (`plan.memory`). The search is a branch and bound:

- Each family has a lower bound of its step time: computation with the pipeline bubble, plus the communication for which
  computation waits. This communication is predicted without a pipeline, once for all families with the same degrees of
  tensor, context and expert parallelism (`_Probe`). Families are tried in the order of their bounds. A family is
  skipped if its bound is not below the limit for results (`Search._limit`).
- Larger microbatches and more replicas take more memory. So after a value that does not fit, larger values are skipped.
  (Exception: the microbatch with which a step has no deferred reductions.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from operator import call
from typing import Any, NamedTuple

from titan_launch.config.axes import AXES, CONTEXT, EXPERT, MODEL_AXES, PIPELINE, SHARD, TENSOR
from titan_launch.config.job import JobConfig
from titan_launch.config.rules import first_problem
from titan_launch.config.rules.tables import with_effective_keys
from titan_launch.config.sections.parallelism import ONE_STAGE_SCHEDULES, ActivationCheckpointConfig, ParallelismConfig
from titan_launch.core.errors import ConfigError, config_error
from titan_launch.core.process import in_forks, usable_cores
from titan_launch.plan.auto_mode import possible_batch_sizes
from titan_launch.plan.communication import LinkTraffic, Ring, link_traffic_of_step
from titan_launch.plan.hardware import Hardware
from titan_launch.plan.job import (
    Choice,
    check_plan,
    configured_choice,
    plan_job,
    possible_choices,
    with_choice,
    with_local_batch_size,
    with_unsharded_parameters,
    with_values,
)
from titan_launch.plan.layout import Layout, plan_layout, with_global_batch_size
from titan_launch.plan.memory.ledger import HELD, Category, StepPoint
from titan_launch.plan.module_selection import check_shards
from titan_launch.plan.param_groups import check_stacks, matrix_stacks
from titan_launch.plan.report.modes import ComparedJob, PlanRow, predict_row
from titan_launch.plan.step_time import bubble_share, communication_seconds, estimate_step_time
from titan_launch.plan.types import Inventory, outermost

Key = tuple[str, str]
"""Section of the job file, and name of a key in it."""

SEARCHED: tuple[Key, ...] = (
    *(axis.key for axis in MODEL_AXES),
    ("parallelism", "pipeline_parallel_schedule"),
    ("parallelism", "data_parallel_replicate_degree"),
    ("parallelism", "shard_optimizer_over_replicas"),
    ("training", "local_batch_size"),
    ("training", "enable_cpu_offload"),
    ("loss", "chunks"),
    ("activation_checkpoint", "mode"),
    ("gradient_accumulation", "mode"),
    ("gradient_accumulation", "keep_params_unsharded"),
)
"""The keys that a search sets. A key that the user holds (`plan --hold`) keeps the value of the job instead."""

_SCHEDULE, _REPLICAS, _SHARDED, _BATCH, _OFFLOAD, _CHUNKS, *_MODES = SEARCHED[len(MODEL_AXES) :]
_CHECKPOINTING, _ACCUMULATION, _UNSHARDED = _MODES
_STAGES: Key = ("parallelism", "pipeline_parallel_stages_per_rank")
_SPLIT: Key = ("parallelism", "pipeline_parallel_split_points")
_SCHEDULES = ("1F1B", "Interleaved1F1B")
"""The schedules to try, besides the schedule of the job. Zero-bubble schedules are omitted: their bubble counts as 0,
the best case, so they would often come first."""

_OF_RECORDED = 0.97
"""At least this fraction of the computation time grows in proportion to the microbatch size. The remaining operations
only read weights."""

_LEAST_TOKENS = 4096
"""Smallest number of tokens of a sequence per context-parallel rank. (The degree in the job is always tried.)"""

SHOWN = 5
"""Largest number of jobs in the result. Each job has a different `Kind`."""

NEAR = 0.05
"""The search skips jobs whose step takes longer than the best step by more than this fraction. The result may have
slower jobs that were found before the best one."""

_SAME = 1e-3
"""Step times that differ by less than this fraction count as equal. The simpler layout then ranks first."""


class Kind(NamedTuple):
    """The degrees and the schedule of a layout. A `Result` has the best job of each kind."""

    degrees: tuple[int, ...]
    """Degrees of `MODEL_AXES`."""

    schedule: str
    """Empty without a pipeline."""


@dataclass(frozen=True)
class Found:
    """A job with its prediction. All jobs of a `Result` fit into memory."""

    config: JobConfig
    layout: Layout
    row: PlanRow

    @property
    def seconds(self) -> float:
        """Expected time of the step in seconds."""
        assert self.row.time.expected is not None
        return self.row.time.expected

    @property
    def kind(self) -> Kind:
        """The degrees and the schedule of the job."""
        schedule = self.config.parallelism.pipeline_parallel_schedule if self.layout.pipeline > 1 else ""
        return Kind(tuple(map(self.layout.degree, MODEL_AXES)), schedule)


@dataclass(frozen=True)
class Result:
    """The result of a search."""

    best: tuple[Found, ...]
    """The best job of each kind, the best kind first; at most `SHOWN`."""

    tried: int
    """Number of families that were searched without a ConfigError."""

    families: int
    """Number of families that are possible. A family that was not tried does not fit into memory, or its bound is not
    below the limit (`Search._limit`)."""

    refused: Mapping[str, int]
    """Reasons why families are not possible, each with the number of such families."""


_Degrees = tuple[int, ...]
"""Degrees of the axes of model parallelism except the pipeline's."""


@dataclass(frozen=True)
class _Probe:
    """Bounds for all jobs with the same degrees of tensor, context and expert parallelism, and the same activation
    checkpointing. One of these jobs, without a pipeline, is planned. Its prediction gives the bounds."""

    exposed: float
    """Lower bound of the seconds during which computation waits for communication in a step."""

    held: float
    """Bytes of parameters, optimizer state and EMA on a rank."""

    activations_per_sample: float
    """Lower bound of the bytes that the blocks save for backward, per sample of a microbatch; 0 if not known."""

    size: int
    """Samples in a microbatch of the planned job."""

    compute: tuple[float, float] | None
    """Seconds of the model's operations per sample: in microbatches of `size` samples, and a lower bound for larger
    microbatches. None: the speeds of the device are not known."""

    @classmethod
    def of(cls, found: Found, inventory: Inventory) -> _Probe:
        blocks, peaks = outermost(inventory.blocks), found.row.footprint.peaks
        at = [StepPoint(0, "forward", block) for block in (blocks[:1] + blocks[-1:])]
        held = sum(found.row.footprint.by_category.get(category, 0) for category in HELD)
        saved = 0.0
        if len(at) == 2 and all(point in peaks for point in at):
            first, last = (peaks[point].by_category[Category.ACTIVATIONS] for point in at)
            saved = max(0.0, last - first) / found.layout.local_batch_size  # temporaries cancel out
        samples, exposed, compute = found.layout.samples_per_rank, found.row.time.exposed, None
        if (times := found.row.time.replayed) is not None:
            exposed = times.least_exposed
            compute = times.recorded / samples, _OF_RECORDED * times.least_recorded / samples
        return cls(exposed, held, saved, found.layout.local_batch_size, compute)


class Search:
    """A search for the fastest layouts and modes of a job on `world_size` ranks."""

    def __init__(
        self,
        config: JobConfig,
        world_size: int,
        hardware: Hardware,
        held: Collection[Key],
        subject_of: Callable[[JobConfig, Layout], ComparedJob],
        say: Callable[[str], None] = lambda text: None,
    ):
        """`held`: keys of `SEARCHED` that keep the values of the job. `subject_of`: function that returns the model
        of a job, with the engine that predicts its memory. `say`: function that shows a line of progress.

        Raises ConfigError if the memory or the speed of the device is unknown, or if the model does not support the job
        (`plan_job`, `check_plan`). Also raises ConfigError if `activation_checkpoint.mode = "memory_budget"` is held.
        """
        self._world_size, self._hardware, self._held = world_size, hardware, frozenset(held)
        self._subject_of, self._say = subject_of, say
        if hardware.speeds is None:
            knows_times = None not in (hardware.peak_tflops, hardware.intra_node_gb_per_s, hardware.inter_node_gb_per_s)
        else:
            node = hardware.gpus_per_node
            links = [Ring(2, 0)] * (min(world_size, node) > 1) + [Ring(2, 2)] * (world_size > node)
            knows_times = hardware.speeds.knows(links)
        if hardware.memory_gib is None or not knows_times:
            reason = (
                "a search needs the memory and the speed of the device; set planner.device (plan: --device). If the "
                "planner does not know the device, set planner.memory_gib and planner.speeds, or set "
                "planner.memory_gib, planner.intra_node_gb_per_s, planner.inter_node_gb_per_s and "
                "metrics.peak_tflops_per_device"
            )
            raise config_error(("planner", "device"), reason, config.planner.device)
        if config.training.global_batch_size is None:
            config = with_global_batch_size(config, plan_layout(config.parallelism, config.training, world_size))
        self._config = config
        if config.activation_checkpoint.mode == "memory_budget" and not self._is_free(_CHECKPOINTING):
            reason = "the compiler chooses the checkpointed operations, so a search cannot predict the step time"
            reason += "; remove --hold activation_checkpoint.mode"
            raise config_error(_CHECKPOINTING, reason, config.activation_checkpoint.mode)
        one: dict[Key, Any] = dict.fromkeys((axis.key for axis in MODEL_AXES), 1)
        more: dict[Key, Any] = {_REPLICAS: 1, _SHARDED: False, _BATCH: 1, ("training", "global_batch_size"): None}
        self._on_one_rank = with_values(self._plain(config, one), more)
        self._inventory = self._subject(self._on_one_rank, world_size=1).inventory
        plain = with_values(self._on_one_rank, {_CHECKPOINTING: "none", _ACCUMULATION: "immediate"})
        self._plan = plan_job(plain, self._inventory)
        check_plan(plain, self._plan, plan_layout(plain.parallelism, plain.training, 1))
        self._stacks = matrix_stacks(self._plan.inventory, plain.optimizer)
        trained = self._plan.inventory.parameters.values()
        self._num_trained = sum(p.numel for p in trained if p.requires_grad and p.tied_to is None)
        self._flops: dict[tuple[ActivationCheckpointConfig, int], float] = {}
        self._shares: dict[tuple[int, str], float] = {}
        self._probes: dict[_Degrees, dict[ActivationCheckpointConfig, _Probe]] = {}

    def run(self) -> Result:
        """Return the best jobs. Unless `training.enable_cpu_offload` is held, CPU offload is tried only on GPUs, and
        only if no layout fits without CPU offload. Raises ConfigError if the FLOPs of the model cannot be counted."""
        if not self._is_free(_OFFLOAD):
            return self._run(self._config)
        result = self._run(with_values(self._config, {_OFFLOAD: False}))
        if not result.best and result.families and self._hardware.kernels == "cuda":
            self._say("no layout fits without CPU offload; searching with training.enable_cpu_offload = true")
            result = self._run(with_values(self._config, {_OFFLOAD: True}))
        return result

    def _run(self, config: JobConfig) -> Result:
        families, refused = [], Counter[str]()
        for family in self._families(config):
            problem = self._problem(family) or self._misfit(family)
            if problem is None:
                families.append(family)
            else:
                refused[problem] += 1
        self._probes = {}  # probes without CPU offload are not valid with it
        self._count_flops()
        number = len(families) + refused.total()
        waiting, found, tried = families, dict[Kind, Found](), 0
        while waiting:
            limit, bounds = self._limit(found), {id(family): self._bound_of_family(family) for family in waiting}
            waiting = [family for family in waiting if bounds[id(family)] < limit]
            waiting.sort(key=lambda family: (_rounded(bounds[id(family)]), _complexity(family.parallelism)))
            now = waiting[: 2 * usable_cores()]
            if new := {_without_pipeline(job): job for job in now if _without_pipeline(job) not in self._probes}:
                probes = in_forks(self._probed, [*new.values()], takes_part=False)
                self._probes |= zip(new, probes, strict=True)
                continue  # the probes make the bounds tighter
            tasks = [partial(self._of_family, family, limit) for family in now]
            for job, problem in in_forks(call, tasks, takes_part=False):
                if job is not None:
                    found[job.kind] = job
                if problem is None:
                    tried += 1
                else:
                    refused[problem] += 1
            waiting = waiting[len(tasks) :]
            best = min((job.seconds for job in found.values()), default=None)
            shown = "nothing fits yet" if best is None else f"best step {best:.3g} s"
            self._say(f"searched {tried} of {tried + len(waiting)} layouts: {shown}")
        ranked = sorted(found.values(), key=lambda job: (_rounded(job.seconds), _complexity(job.config.parallelism)))
        return Result(tuple(ranked[:SHOWN]), tried, number - refused.total(), refused)

    def _limit(self, found: Mapping[Kind, Found]) -> float:
        """Return the step time in seconds that a job must stay below to be a result; infinity if `found` is empty."""
        seconds = [*sorted(job.seconds for job in found.values()), *[math.inf] * SHOWN]
        return min(seconds[0] * (1 + NEAR), seconds[SHOWN - 1] * (1 + _SAME))

    # The jobs to try

    def _is_free(self, key: Key) -> bool:
        return key not in self._held

    def _values(self, key: Key, values: Sequence[Any]) -> Sequence[Any]:
        """Return the values to try for a key: `values`, or only the value in the job if the key is held."""
        return values if self._is_free(key) else [value_of(self._config, key)]

    def _plain(self, config: JobConfig, degrees: Mapping[Key, Any]) -> JobConfig:
        """Return `config` with `degrees`, with the number of replicas and the optimizer sharding of `_start`, and with
        all remaining ranks as shards. If the search sets a pipeline degree above 1, split points are removed, and a set
        number of stages per rank becomes 1 or 2, as the schedule needs."""
        replicas, sharded = self._start()
        values = {SHARD.key: -1, _REPLICAS: replicas, _SHARDED: sharded, **degrees}
        if degrees[PIPELINE.key] > 1 and self._is_free(PIPELINE.key):
            stages = 1 if values[_SCHEDULE] in ONE_STAGE_SCHEDULES else 2
            values |= {_SPLIT: (), _STAGES: None if value_of(config, _STAGES) is None else stages}
        return with_effective_keys(with_values(config, values))

    def _start(self) -> tuple[int, bool]:
        """Return the pair (number of replicas, True if the optimizer is sharded over them) with which the search
        begins. Of the pairs that the held keys allow, this pair needs the least memory."""
        own, sharded = value_of(self._config, _REPLICAS), value_of(self._config, _SHARDED)
        mode = self._config.gradient_accumulation
        needs_all_reduces = not self._is_free(_ACCUMULATION) and mode.mode != "auto" and mode.row.needs_all_reduces
        if not self._is_free(_REPLICAS):
            return own, self._values(_SHARDED, [own > 1 and not needs_all_reduces])[0]
        is_held = not self._is_free(_SHARDED) and sharded
        return (2 if needs_all_reduces or is_held else 1), is_held

    def _sizes(self, family: JobConfig) -> list[int]:
        """Return the microbatch sizes to try, the smallest first."""
        own = value_of(self._config, _BATCH)
        is_open = self._is_free(_BATCH) or own == "auto"
        return [size for size in possible_batch_sizes(family, self._world_size) if is_open or size == own]

    def _families(self, config: JobConfig) -> Iterator[JobConfig]:
        """Yield one job of every family. Some families are not possible (`_problem`, `_misfit`)."""
        node = self._hardware.gpus_per_node
        is_text = config.data.unit == "tokens"
        blocks = len(outermost(self._inventory.blocks))
        experts = max((p.shape[0] for m in self._inventory.modules if m.has_experts for p in m.parameters), default=1)
        most = {
            TENSOR: min(node, self._world_size),
            CONTEXT: config.training.seq_len // _LEAST_TOKENS if is_text else 1,
            PIPELINE: min(blocks, self._world_size),
            EXPERT: min(experts, self._world_size),
        }
        choices = (
            self._values(axis.key, sorted({*_powers(most[axis]), value_of(self._config, axis.key)}))
            for axis in MODEL_AXES
        )
        for degrees in product(*choices):
            values: dict[Key, Any] = {axis.key: degree for axis, degree in zip(MODEL_AXES, degrees, strict=True)}
            own = value_of(self._config, _SCHEDULE)
            schedules = dict.fromkeys([*_SCHEDULES, own]) if values[PIPELINE.key] > 1 else [own]
            for schedule in self._values(_SCHEDULE, [*schedules]):
                yield self._with_fewest_replicas(self._plain(config, {**values, _SCHEDULE: schedule}))

    def _with_fewest_replicas(self, family: JobConfig) -> JobConfig:
        """Return the family with the smallest number of replicas whose layout is possible (`_misfit`). Return it
        unchanged if there is no such number, or if the number of replicas is held."""
        numbers = _powers(self._world_size)[1:] if self._is_free(_REPLICAS) else []
        more = (with_values(family, {_REPLICAS: replicas}) for replicas in numbers)
        return next((job for job in chain([family], more) if self._misfit(job) is None), family)

    def _problem(self, family: JobConfig) -> str | None:
        """Return the first reason why a family is not possible, besides its `_misfit`; None if there is no reason."""
        try:
            sizes = self._sizes(family)
            if not sizes:
                return "no possible microbatch size divides the global batch evenly over the ranks"
            modes = self._modes(with_local_batch_size(family, sizes[0]))
            if not modes:
                return "no combination of gradient accumulation and activation checkpointing modes is possible"
            if problem := first_problem(modes[0]):
                return problem.reason
            plan_job(modes[0], self._inventory)
        except ConfigError as error:
            return error.problems[0].reason
        return None

    def _misfit(self, job: JobConfig) -> str | None:
        """Return the reason why a job's layout is not possible; None if it is possible. Of the checks of a plan
        (`check_plan`), only those that depend on the layout are repeated."""
        try:
            layout = self._layout(with_local_batch_size(job, 1))
            check_stacks(self._stacks, job.optimizer, layout)
            check_shards(job.float8, self._plan, layout)
        except ConfigError as error:
            return error.problems[0].reason
        return None

    def _modes(self, config: JobConfig) -> list[JobConfig]:
        """Return a job for each combination of modes that `config` and the held keys allow, ordered by the activation
        checkpointing mode from `none` to `full`."""
        layout = self._layout(config)
        held = [key for key in _MODES if not self._is_free(key) and value_of(config, key) not in ("auto", None)]
        choices, _ = possible_choices(config, layout, self._inventory)
        jobs = [with_choice(config, choice) for choice in _with_known_time(choices)]
        return [job for job in jobs if all(value_of(job, key) == value_of(config, key) for key in held)]

    def _layout(self, config: JobConfig) -> Layout:
        return plan_layout(config.parallelism, config.training, self._world_size)

    # Bounds

    def _count_flops(self) -> None:
        """Count the FLOPs of a sample for each activation checkpointing mode and number of chunks of the loss."""
        jobs = [with_values(self._on_one_rank, {_CHUNKS: chunks}) for chunks in self._chunks()]
        one = plan_layout(self._on_one_rank.parallelism, self._on_one_rank.training, 1)
        choices = _with_known_time(possible_choices(jobs[0], one, self._inventory)[0])
        own = value_of(self._config, _CHECKPOINTING)
        is_open = self._is_free(_CHECKPOINTING) or own == "auto"
        known = (choice.activation_checkpoint for choice in choices)
        modes = [mode for mode in dict.fromkeys(known) if is_open or mode.mode == own]
        tasks = {(mode, job.loss.chunks): partial(self._flops_of, job, mode) for job, mode in product(jobs, modes)}
        self._flops = dict(zip(tasks, in_forks(call, [*tasks.values()], takes_part=False), strict=True))

    def _flops_of(self, job: JobConfig, checkpointing: ActivationCheckpointConfig) -> float:
        counted = self._subject(job, world_size=1).flops_of(checkpointing)
        if counted is None:
            reason = (
                "the FLOPs of this model cannot be counted, so a search cannot compare step times; use plan without "
                "--search, one layout at a time"
            )
            raise config_error(("model", "name"), reason, job.model.name)
        return float(counted.per_sample)

    def _probed(self, family: JobConfig) -> dict[ActivationCheckpointConfig, _Probe]:
        """Return a `_Probe` for each activation checkpointing mode. The planned jobs have no pipeline, the smallest
        microbatch and the most chunks of the loss. If a plan fails, its mode and later modes are missing."""
        found: dict[ActivationCheckpointConfig, _Probe] = {}
        degrees = {axis.key: value_of(family, axis.key) for axis in MODEL_AXES}
        simple = self._plain(family, {**degrees, PIPELINE.key: 1})
        try:
            if self._problem(simple) is not None:
                return found
            for job in self._modes(with_values(simple, {_BATCH: self._sizes(simple)[0], _CHUNKS: self._chunks()[-1]})):
                if job.activation_checkpoint not in found:
                    found[job.activation_checkpoint] = _Probe.of(self._planned(job), self._inventory)
        except ConfigError:  # raised again when the family is planned
            pass
        return found

    def _bound_of_family(self, family: JobConfig) -> float:
        size = self._sizes(family)[0]
        jobs = [with_values(family, {_CHUNKS: chunks, _BATCH: size}) for chunks in self._chunks()]
        return min(self._bound(job, mode) for job in jobs for mode, _ in self._flops)

    def _bound(self, job: JobConfig, checkpointing: ActivationCheckpointConfig) -> float:
        """Return a lower bound of the step time of a job in seconds: its computation, plus the communication for which
        computation waits. Without a `_Probe`, the bound is the computation alone. The bound is infinite if a lower
        bound of the memory exceeds the limit."""
        layout, hardware = self._layout(job), self._hardware
        assert hardware.usable_bytes is not None
        probe = self._probes.get(_without_pipeline(job), {}).get(checkpointing)
        compute = self._least_compute(job, checkpointing, probe)
        if probe is None:
            return compute
        share = self._smallest_share(job)
        # With p stages, the first rank holds 1/p of the blocks, with the activations of up to p microbatches.
        in_flight = min(layout.pipeline, layout.num_microbatches) / layout.pipeline
        activations = probe.activations_per_sample * layout.local_batch_size * in_flight * share
        unsharded = 0.0
        if job.parallelism.splits_backward:
            # Zero-bubble schedules hold unsharded parameters and gradients, with at least two bytes per element.
            elements = self._inventory.num_parameters + self._num_trained
            divided = math.prod(layout.degree(axis) for axis in MODEL_AXES if axis.divides_parameters)
            unsharded = 2 * elements / divided * (layout.parameter_shards > 1)
        if hardware.reserved_bytes(probe.held + activations + unsharded) > hardware.usable_bytes:
            return math.inf
        # 0.9: the embedding and the output layer also communicate, but only on the first and the last pipeline rank.
        return compute + probe.exposed * share * (0.9 if layout.pipeline > 1 else 1.0)

    def _least_compute(self, job: JobConfig, checkpointing: ActivationCheckpointConfig, probe: _Probe | None) -> float:
        """Return a lower bound of the computation of a step in seconds, with the pipeline bubble."""
        layout, speeds = self._layout(job), self._hardware.speeds
        counted = self._flops.get((checkpointing, job.loss.chunks), 0.0)
        flops = counted * layout.samples_per_rank / layout.model_parallel
        bubble = bubble_share(job.parallelism, layout)
        if speeds is None:
            compute = estimate_step_time(flops, LinkTraffic(0, 0), self._hardware, bubble).compute
            assert compute is not None
            return compute
        seconds = flops / speeds.most_flops_per_s
        if probe is not None and probe.compute is not None:
            # A probe has the most chunks of the loss, with which the output layer runs twice.
            share = counted / self._flops.get((checkpointing, self._chunks()[-1]), counted) / layout.pipeline
            per_sample = probe.compute[layout.local_batch_size > probe.size]
            seconds = per_sample * layout.samples_per_rank * share * (_OF_RECORDED if share < 1 else 1.0)
        return seconds * (1 + speeds.idle_share(bubble))

    def _smallest_share(self, job: JobConfig) -> float:
        """Return the smallest number of blocks on a pipeline rank, divided by the mean over the pipeline ranks."""
        ranks = job.parallelism.pipeline_parallel_degree
        if ranks == 1:
            return 1.0
        key = (ranks, job.parallelism.pipeline_parallel_schedule)
        if key not in self._shares:
            blocks, counts = outermost(self._inventory.blocks), Counter[int]()
            modes = {_CHECKPOINTING: "none", _ACCUMULATION: "immediate"}
            for stage in plan_job(with_values(job, modes), self._inventory).stages:
                counts[stage.rank] += sum(path in stage.modules for path in blocks)
            self._shares[key] = min(counts[rank] for rank in range(ranks)) * ranks / max(1, len(blocks))
        return self._shares[key]

    def _chunks(self) -> Sequence[int]:
        """Return the numbers of chunks of the loss to try, the smallest first."""
        config = self._config
        can_chunk = config.data.unit == "tokens" and config.model.loss is None
        own = config.loss.chunks
        return self._values(_CHUNKS, [own, 16] if can_chunk and own < 8 else [own])

    # Jobs

    def _of_family(self, family: JobConfig, limit: float) -> tuple[Found | None, str | None]:
        """Return a pair: a job and a reason. The job is the fastest job of the family that fits and whose step takes
        less than `limit` seconds; None if there is no such job. The reason says why the family is not possible; None if
        it is possible."""
        best: Found | None = None
        sizes = self._sizes(family)
        too_large = set[tuple[ActivationCheckpointConfig, int, int]]()
        before_loss = {*self._inventory.blocks, *self._inventory.embeddings}
        try:
            modes = self._modes(with_local_batch_size(family, sizes[0]))
            checkpointings = dict.fromkeys(job.activation_checkpoint for job in modes)
            tries = [
                (self._bound(job, checkpointing), checkpointing, job)
                for checkpointing, chunks, size in product(checkpointings, self._chunks(), sizes)
                for job in [with_values(family, {_CHUNKS: chunks, _BATCH: size})]
            ]
            for bound, checkpointing, job in sorted(tries, key=lambda one: one[0]):
                size, chunks = job.training.local_batch_size, job.loss.chunks
                assert isinstance(size, int)
                if bound >= limit or (checkpointing, chunks, size) in too_large:
                    continue
                planned = list(self._until_best(job, checkpointing, limit))
                if not planned:
                    continue
                fitting = [found for found in planned if found.row.verdict == "fits"]
                for found in chain(fitting, self._with_replicas(fitting, limit)):
                    if found.seconds < limit:
                        best, limit = found, found.seconds * (1 - _SAME)
                if not fitting:
                    # Larger microbatches do not fit either. The largest one may fit if all planned modes defer
                    # reductions, because a step with a single microbatch defers none.
                    defers = all(found.config.gradient_accumulation.row.defers for found in planned)
                    larger = [other for other in (sizes[:-1] if defers else sizes) if other > size]
                    # More chunks of the loss do not help if the peak is in a block or an embedding.
                    also = self._chunks() if planned[0].row.footprint.peak_point.unit in before_loss else [chunks]
                    too_large |= {(checkpointing, n, other) for n in also for other in (size, *larger)}
        except ConfigError as error:
            return best, error.problems[0].reason
        return best, None

    def _until_best(self, job: JobConfig, checkpointing: ActivationCheckpointConfig, limit: float) -> Iterator[Found]:
        """Yield predictions for the job with each possible value of `shard_optimizer_over_replicas`, and with each
        gradient accumulation mode. Without replicas, only false is possible.

        Stop if no later prediction can be faster than `limit`, or than a yielded one that fits. If a mode that reduces
        gradients after every microbatch does not fit, skip the later modes, which take more memory.
        """
        for sharded in self._values(_SHARDED, (False, True) if value_of(job, _REPLICAS) > 1 else (False,)):
            way = with_values(job, {_SHARDED: sharded})
            if self._misfit(way):
                continue
            for one in self._modes(way):
                if one.activation_checkpoint != checkpointing:
                    continue
                found = self._planned(one)
                yield found
                if found.row.verdict == "fits":
                    limit = min(limit, found.seconds * (1 - _SAME))
                elif not one.gradient_accumulation.row.defers:
                    break
                if (found.row.time.least or 0.0) >= limit:
                    return

    def _with_replicas(self, without: Sequence[Found], limit: float) -> Iterator[Found]:
        """Yield variants of the jobs `without`, if they fit into memory. A variant has two or more replicas, and an
        optimizer that is or is not sharded over them. Yield nothing if the number of replicas is held. A variant is
        planned only if its step may be faster than `limit`, the jobs `without` and the yielded jobs."""
        if not self._is_free(_REPLICAS):
            return
        best = min([limit, *(job.seconds for job in without)])
        for sharded, job in product(self._values(_SHARDED, (False, True)), without):
            for replicas in _powers(job.layout.shard * job.layout.replicate)[1:]:
                other = with_values(job.config, {_REPLICAS: replicas, _SHARDED: sharded})
                if other == job.config or self._misfit(other) or first_problem(other):
                    continue
                # `row.traffic` lacks the traffic between more replicas, so it is a lower bound.
                layout = self._layout(other)
                traffic = link_traffic_of_step(job.row.traffic, layout, self._hardware.gpus_per_node)
                seconds = communication_seconds(traffic, self._hardware)
                bound = job.row.time.least_with_replicas(seconds or 0.0, layout.parameter_shards)
                if bound is None or bound >= best * (1 - _SAME):
                    continue
                found = [self._planned(one) for one in self._like(other, job.row)]
                fitting = [one for one in found if one.row.verdict == "fits"]
                if not fitting:
                    break  # more replicas take more memory
                yield from fitting
                best = min(best, *(one.seconds for one in fitting))

    def _like(self, job: JobConfig, row: PlanRow) -> Iterator[JobConfig]:
        """Yield `job` in each combination of modes with the same activation checkpointing and the same communication
        within a replica as in `row`."""
        own = row.choice.accumulation
        for other in self._modes(job):
            mode = other.gradient_accumulation
            is_alike = mode.row.reduce_scatters_each == own.row.reduce_scatters_each
            is_alike &= bool(mode.keep_params_unsharded) == bool(own.keep_params_unsharded)
            if is_alike and other.activation_checkpoint == row.choice.activation_checkpoint:
                yield other

    def _planned(self, job: JobConfig) -> Found:
        layout = self._layout(job)
        return Found(job, layout, predict_row(configured_choice(job), job, layout, self._subject(job), self._hardware))

    def _subject(self, job: JobConfig, world_size: int | None = None) -> ComparedJob:
        layout = plan_layout(job.parallelism, job.training, world_size or self._world_size)
        return self._subject_of(with_unsharded_parameters(job, layout), layout)


def _with_known_time(choices: Iterable[Choice]) -> list[Choice]:
    """Return the choices except those of the mode `memory_budget`, in which the compiler decides the FLOPs."""
    return [choice for choice in choices if choice.activation_checkpoint.mode != "memory_budget"]


def _rounded(seconds: float) -> int:
    """Return a number by which step times are sorted. Usually, the number is the same for times that differ by less
    than the fraction `_SAME`."""
    return round(math.log(seconds) / _SAME) if seconds > 0 else 0


def _complexity(parallelism: ParallelismConfig) -> tuple[int, ...]:
    """Return a key by which layouts are sorted, the simplest first: the number of degrees above 1, then the degrees."""
    degrees = [parallelism.degree(axis) for axis in AXES.values() if axis in MODEL_AXES]
    return (sum(degree > 1 for degree in degrees), *degrees)


def _powers(limit: int) -> list[int]:
    """Return the powers of two up to a limit; `[1]` if the limit is below 1."""
    return [2**exponent for exponent in range(max(1, limit).bit_length())]


def value_of(config: JobConfig, key: Key) -> Any:
    return getattr(getattr(config, key[0]), key[1])


def _without_pipeline(job: JobConfig) -> _Degrees:
    return tuple(job.parallelism.degree(axis) for axis in MODEL_AXES if axis is not PIPELINE)
