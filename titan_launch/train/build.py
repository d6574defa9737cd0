"""Build the parts of a run from a job's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from titan_launch.checkpoint.state import ModelAndOptimizer, Part, Progress, TrainingState
from titan_launch.checkpoint.store import CheckpointStore
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import format_key
from titan_launch.cpu.switch import cpu_speedups
from titan_launch.distributed.collectives import on_rank_0
from titan_launch.distributed.mesh import build_mesh
from titan_launch.distributed.process_group import Ranks, set_timeouts
from titan_launch.distributed.random_state import RandomState, random_stream
from titan_launch.loss.build import build_loss
from titan_launch.metrics.learned import Learned
from titan_launch.metrics.sinks import import_sinks
from titan_launch.metrics.sinks.console import ConsoleSink
from titan_launch.metrics.timeline import Timeline
from titan_launch.metrics.traffic import communication_counted
from titan_launch.models.blocks import PassThrough
from titan_launch.models.lora import adapters_of
from titan_launch.models.weights.adapters import Adapter
from titan_launch.optim.ema import WeightEMA, build_ema
from titan_launch.optim.registry import build_optimizer, replicas_of
from titan_launch.optim.replica_shards import ReplicaShards
from titan_launch.parallel.accumulation import Accumulation
from titan_launch.parallel.compile import cache_folder
from titan_launch.parallel.context_parallel import sequence_part
from titan_launch.parallel.float8 import scale_update
from titan_launch.parallel.fsdp import Unfreezing
from titan_launch.parallel.pipeline import pipeline_of
from titan_launch.plan.mup import width_scales
from titan_launch.plan.proof.store import find
from titan_launch.plan.replica_shards import gradients_leave_early
from titan_launch.plan.report.unit_table import KeyLocator, describe_units
from titan_launch.plan.types import ModelPlan
from titan_launch.plan.units.rule_assignment import matched_modules
from titan_launch.train.base_weights import RunBase
from titan_launch.train.batches import (
    RunBatches,
    build_data,
    build_stream_batches,
    build_train_batches,
    build_validation_batches,
)
from titan_launch.train.early_stopping import build_early_stopping
from titan_launch.train.flops import flops_of_run
from titan_launch.train.health.coordination import StepCoordinator, StopRequest
from titan_launch.train.health.flight_recorder import create_nccl_folder
from titan_launch.train.health.step_guard import StepGuard
from titan_launch.train.health.watchdog import Watchdog
from titan_launch.train.kernel_choice import attention_dtypes, use_kernels
from titan_launch.train.measure import MemoryCheck, StepMeasurements
from titan_launch.train.model import AssembledModel, allocate_model, assemble_model
from titan_launch.train.observers import Observers
from titan_launch.train.output import build_output
from titan_launch.train.precision_audit import PrecisionAudit, is_audited
from titan_launch.train.profiling import StepProfiler
from titan_launch.train.resolve_job import ResolvedJob, resolve_job, resolve_steps
from titan_launch.train.run import Run, build_meter, log_job, log_run
from titan_launch.train.run_folder.attempt import this_attempt
from titan_launch.train.run_folder.folder import (
    OpenRunFolder,
    checkpoint_folder,
    effective_load,
    new_attempt_folder,
    prepare_run_folder,
)
from titan_launch.train.run_folder.logs import LogFile
from titan_launch.train.run_folder.records import record_proof, record_run, record_units
from titan_launch.train.run_folder.resume import (
    ConsumedSamples,
    Resumable,
    Sources,
    advice_without_folder,
    load_run,
    open_checkpoints,
    open_store,
)
from titan_launch.train.step import MicrobatchesInTurn, TrainStep, Update


@dataclass(frozen=True)
class Surroundings:
    """Objects of a rank's process that its run uses."""

    locate_key: KeyLocator = format_key
    """Function that returns the file and line of a key. The default returns only the key."""

    stop: StopRequest | None = None
    """The signals that this process received. The run reads them after every step."""

    log_file: LogFile | None = None
    """The log of this rank. Its file is opened in the run folder, as soon as the folder exists."""

    watchdog: Watchdog | None = None
    quiet: bool = False
    """True disables reports and progress on the console."""


def build_run(config: JobConfig, ranks: Ranks, stack: ExitStack, process: Surroundings | None = None) -> Run:
    """Build everything that training needs. Collective. Closing `stack` closes all parts of the run.

    Checks that need no memory run first: division of ranks, model, precision rules, data. Then memory is allocated.
    Files are written last.
    """
    process = process or Surroundings()
    watchdog = process.watchdog or Watchdog(config.comm, ranks)
    certificate = on_rank_0(partial(find, config))  # for the job as written, before modes replace `auto`
    job, built = resolve_job(config, ranks, this_attempt())
    config = job.config
    log_job(job, process.locate_key)
    on_rank_0(lambda: bool(import_sinks(config.metrics)))  # a missing package is an error before memory is allocated
    store = open_store(job.requested, job.attempt)
    refusals = use_kernels(config, built, job.plan, job.layout, ranks.device, stack)
    stack.enter_context(cache_folder(config.compile))

    adapters = list(adapters_of(built.module))  # before pipeline stages divide the model
    mesh = build_mesh(job.layout, ranks.device.type)
    data = build_data(config, job.layout, sequence_part(mesh.context, config.parallelism))
    job = resolve_steps(job, data)
    config = job.config
    flops = flops_of_run(config, built, job.plan, data) if ranks.is_rank_0 else None  # reported by rank 0
    model = assemble_model(config, built, job.plan, mesh, data)
    if ranks.device.type == "cpu":
        speed_up_on_cpu(config, model, stack)
    set_timeouts(config.comm.init_timeout_seconds)
    allocate_model(model, config, ranks.device, stack)
    optimizer = build_model_optimizer(config, model)
    unfreezing = Unfreezing(model.module, job.plan)
    ema = build_ema(config.ema, model.module, optimizer)

    folder = open_run_folder(job, ranks, process.log_file, watchdog, stack)
    progress = Progress()
    timeline = Timeline(ranks.device)
    stack.enter_context(communication_counted(model.module, timeline))
    step = build_step(config, model, optimizer, ranks.device, data.num_classes, timeline)
    stream = build_stream_batches(config, data, job.layout, ranks, stack)
    base = RunBase(model.module, config, job.plan.inventory)
    early_stopping = build_early_stopping(config.validation, checkpoint_folder(folder.path), progress)
    parts: dict[str, Part | None] = {
        "progress": progress,
        "consumed": ConsumedSamples(data.order, progress),
        "guard": step.guard,
        "stream": stream,
        "ema": ema,
        "early_stopping": early_stopping,
    }
    weights = ModelAndOptimizer(model.module, optimizer)
    random = RandomState(ranks.device, config.training.seed, random_stream(ranks.rank, config.parallelism))
    state = TrainingState(weights, parts, step.statistics, random, mesh.pipeline_group, base)
    second: Sources = {} if model.frozen is None else {format_key(model.frozen.key): model.frozen.load()}
    resumable = Resumable(state, progress, data.order, {**data.sources, **second}, base)
    checkpoints = open_checkpoints(job.requested, folder.path, resumable, ranks, stack)
    load_or_begin(job, folder.path, resumable, store, adapters, ema)
    if checkpoints is not None:
        checkpoints.copy_to(store)
    job = resolve_steps(job, data, progress)
    config = job.config
    on_rank_0(lambda: record_run(folder.path, job.requested, job.attempt, stack))
    on_rank_0(lambda: record_units(folder.path, describe_units(job.plan, job.layout, process.locate_key)))
    on_rank_0(lambda: record_proof(folder.path, certificate))
    memory_check = MemoryCheck(config, job.layout, job.hardware, stack) if ranks.is_rank_0 else None
    log_run(job, ranks.device, memory_check, data, folder.path, certificate)
    train_batches = stream or build_train_batches(config, data, job.layout, ranks, progress.data_position, stack)
    validation_batches = build_validation_batches(config, data, job.layout, ranks, stack)
    meter = build_meter(job, ranks, timeline, flops)
    learned = build_learned(config, job.plan, model.module, ranks, stack, job.layout.optimizer_replicas)
    profiler = StepProfiler(config.profiling, folder.path, ranks, timeline, stack)
    measurements = StepMeasurements(config, step, timeline, ema, stack)
    console = ConsoleSink(total_steps=config.training.total_steps) if ranks.is_rank_0 and not process.quiet else None
    output = build_output(job, folder, progress, console, stack)
    audit = PrecisionAudit(job, model.module, mesh, output, process.locate_key) if is_audited(config) else None
    return Run(
        job=job,
        ranks=ranks,
        mesh=mesh,
        model=model.module,
        optimizer=optimizer,
        unfreezing=unfreezing,
        step=step,
        progress=progress,
        first_step=progress.step + 1,
        state=state,
        checkpoints=checkpoints,
        batches=RunBatches(data.order, train_batches, validation_batches),
        observers=Observers(console, meter, profiler, measurements, audit, learned, ema),
        memory_check=memory_check,
        output=output,
        control=StepCoordinator(process.stop or StopRequest(), config.checkpoint.interval_minutes),
        early_stopping=early_stopping,
        watchdog=watchdog,
        refusals=refusals,
    )


def speed_up_on_cpu(config: JobConfig, model: AssembledModel, stack: ExitStack) -> None:
    """Apply the CPU speedups to a wrapped model until `stack` is closed."""
    dtypes, layout = attention_dtypes(config.data, model.built, model.plan), model.mesh.layout
    stack.enter_context(cpu_speedups(model.module, config.kernels, layout, config.training.seq_len, dtypes))


def open_run_folder(
    job: ResolvedJob, ranks: Ranks, log_file: LogFile | None, watchdog: Watchdog, stack: ExitStack
) -> OpenRunFolder:
    """Prepare the run folder and a log folder for this attempt, and return the run folder. Collective.

    Rank 0 prepares the folders while the other ranks wait. Then each rank opens its log file, and its watchdog writes
    to the run folder. The run folder is locked until `stack` is closed.
    """
    folder = job.requested.job.run_folder

    def prepare() -> Path:
        prepare_run_folder(folder, job.requested, job.attempt, stack)
        return new_attempt_folder(folder)

    logs = on_rank_0(prepare)
    if log_file is not None:
        log_file.open(logs / f"rank_{ranks.rank}.log")
    watchdog.set_run_folder(folder)
    if ranks.device.type == "cuda":
        create_nccl_folder(folder)
    return stack.enter_context(OpenRunFolder(folder, advice_without_folder(job.requested)))


def load_or_begin(
    job: ResolvedJob,
    folder: Path,
    run: Resumable,
    store: CheckpointStore | None,
    adapters: Sequence[Adapter],
    ema: WeightEMA | None,
) -> None:
    """Load the checkpoint from which the run starts. If there is none, load the weights and the adapters that the job
    names, if any. Collective."""
    load = on_rank_0(lambda: effective_load(folder, job.requested, job.attempt))
    if not load_run(job.requested, folder, load, run, store):
        if job.config.model.weights is not None:
            run.base.begin()
        if job.config.lora.adapter is not None:
            run.base.begin_adapters(adapters, job.config.lora)
        if ema is not None:
            ema.load_state_dict({})  # the average begins with these weights


def build_learned(
    config: JobConfig, plan: ModelPlan, model: nn.Module, ranks: Ranks, stack: ExitStack, replicas: int
) -> Learned | None:
    """Return the measurements of the modules that `metrics.modules` names; None if it names none. `replicas`: see
    `Learned`. Raises ConfigError for a glob that matches no module."""
    if not config.metrics.modules:
        return None
    paths = matched_modules(plan.inventory, config.metrics.modules, ("metrics", "modules"))
    groups: dict[str, list[str]] = {}
    for unit in plan.boundaries:
        if unit.key is not None:
            groups.setdefault(format_key(unit.key), []).extend(unit.modules)
    modules = {path: module for path, module in model.named_modules() if not isinstance(module, PassThrough)}
    return Learned(modules, paths, None if config.compile.enable else groups, ranks.device, stack, replicas)


def build_model_optimizer(config: JobConfig, model: AssembledModel) -> Optimizer:
    """Return the optimizer of an allocated model. Dry runs and trials also call this function."""
    replicas = build_replica_shards(config, model)
    head, seed = model.built.head, config.training.seed
    return build_optimizer(model.module, config.optimizer, head, seed, replicas, width_scales(config))


def build_replica_shards(config: JobConfig, model: AssembledModel) -> ReplicaShards | None:
    """Return the exchange of gradients and parameters between replicas, if the optimizer is sharded over them; else
    None. Also used by traces."""
    if model.mesh.layout.optimizer_replicas == 1:
        return None
    return ReplicaShards(model.module, model.plan, model.mesh, gradients_leave_early(config.training))


def build_step(
    config: JobConfig,
    model: AssembledModel,
    optimizer: Optimizer,
    device: torch.device,
    num_classes: int,
    timeline: Timeline,
) -> TrainStep:
    """Return the training step. `num_classes`: number of classes of the data; for tokens, the vocabulary size.
    `timeline` counts the parts of the step's time."""
    accumulation = Accumulation(config.gradient_accumulation, replicas_of(optimizer))
    pipeline = pipeline_of(model.module)
    gradients: MicrobatchesInTurn | PipelinedStep
    if pipeline is None:
        gradients = MicrobatchesInTurn(model.module, accumulation, device, timeline)
    else:
        from titan_launch.train.pipeline_step import PipelinedStep  # importing PyTorch's schedules takes a second

        gradients = PipelinedStep(pipeline, config.parallelism, accumulation, device, timeline)
    loss = build_loss(model.module, model.plan, config, num_classes, frozen=model.frozen)
    guard, after = StepGuard(config.debug, device), scale_update(model.module, config.float8)
    update = Update(optimizer, guard, config.training.max_norm, after)
    return TrainStep(model.module, gradients, loss, update, model.mesh, device)
