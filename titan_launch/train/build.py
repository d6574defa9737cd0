"""Build the parts of a run from a job's configuration."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from titan_launch.checkpoint.state import ModelAndOptimizer, Progress, StatePart, TrainingState
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import format_key
from titan_launch.cpu.switch import cpu_speedups
from titan_launch.distributed.collectives import on_rank_0
from titan_launch.distributed.mesh import build_mesh
from titan_launch.distributed.process_group import Ranks, set_timeouts
from titan_launch.distributed.random_state import RandomState, random_stream
from titan_launch.metrics.sinks import import_sinks
from titan_launch.metrics.sinks.console import ConsoleSink
from titan_launch.metrics.timeline import Timeline
from titan_launch.metrics.traffic import communication_counted
from titan_launch.models.lora import adapters_of
from titan_launch.optim.ema import build_ema
from titan_launch.parallel.compile import cache_folder
from titan_launch.parallel.context_parallel import sequence_part
from titan_launch.parallel.fsdp import Unfreezing
from titan_launch.plan.proof.certificate import find_certificate
from titan_launch.plan.report.unit_table import KeyLocator, describe_units
from titan_launch.train.base_weights import RunBase
from titan_launch.train.batches import (
    RunBatches,
    build_data,
    build_stream_batches,
    build_train_batches,
    build_validation_batches,
)
from titan_launch.train.early_stopping import EarlyStopping
from titan_launch.train.flops import flops_of_run
from titan_launch.train.health.coordination import StepCoordinator, StopRequest
from titan_launch.train.health.watchdog import Watchdog
from titan_launch.train.kernel_choice import attention_dtypes, use_kernels
from titan_launch.train.measure import MemoryCheck, StepMeasurements
from titan_launch.train.model import AssembledModel, allocate_model, assemble_model, build_model_optimizer
from titan_launch.train.observers import Observers, build_learned
from titan_launch.train.output import build_output, open_run_folder
from titan_launch.train.precision_audit import PrecisionAudit, is_audited
from titan_launch.train.profiling import StepProfiler
from titan_launch.train.resolve_job import resolve_job, resolve_steps
from titan_launch.train.run import Run, build_meter, log_job, log_run
from titan_launch.train.run_folder.attempt import this_attempt
from titan_launch.train.run_folder.folder import checkpoint_folder
from titan_launch.train.run_folder.logs import LogFile
from titan_launch.train.run_folder.records import UNITS_FILE, record_proof, record_run, record_table
from titan_launch.train.run_folder.resume import ConsumedSamples, Resumable, load_or_begin, open_checkpoints, open_store
from titan_launch.train.step import build_step


@dataclass(frozen=True)
class Surroundings:
    """Objects that the process of a rank passes to the run."""

    locate_key: KeyLocator = format_key
    """Function that returns the file and line of a key, as text. The default returns only the key."""

    stop: StopRequest | None = None
    """The signals that this process received. The run reads them after every step."""

    log_file: LogFile | None = None
    """The log of this rank. The run opens its file as soon as the run folder exists."""

    watchdog: Watchdog | None = None
    quiet: bool = False
    """True disables reports and progress on the console."""


def build_run(config: JobConfig, ranks: Ranks, stack: ExitStack, process: Surroundings | None = None) -> Run:
    """Build everything that training needs. Collective. Closing `stack` closes all parts of the run.

    First come the checks that need no memory: division of ranks, model, precision rules, data. Then memory is
    allocated. Only after that, the run folder is written. Raises UserError if the job cannot run.
    """
    process = process or Surroundings()
    watchdog = process.watchdog or Watchdog(config.comm, ranks)
    certificate = on_rank_0(partial(find_certificate, config))  # of the job before `auto` is replaced
    job, built = resolve_job(config, ranks, this_attempt())
    config = job.config
    log_job(job, process.locate_key)
    on_rank_0(lambda: bool(import_sinks(config.metrics)))  # raises the errors of a missing package early
    store = open_store(job.requested, job.attempt)
    refusals = use_kernels(config, built, job.plan, job.layout, ranks.device, stack)
    stack.enter_context(cache_folder(config.compile))

    adapters = list(adapters_of(built.module))  # before pipeline stages divide the model
    mesh = build_mesh(job.layout, ranks.device.type)
    data = build_data(config, job.layout, sequence_part(mesh, config.parallelism))
    job = resolve_steps(job, data)
    config = job.config
    flops = flops_of_run(config, built, job.plan, data) if ranks.is_rank_0 else None  # only rank 0 reports
    model = assemble_model(config, built, job.plan, mesh, data.num_classes, data.meta_inputs)
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
    stream = build_stream_batches(config, data, ranks, stack)
    base = RunBase(model.module, config, job.plan.inventory)
    early_stopping: EarlyStopping | None = None
    if (patience := config.validation.patience) is not None:
        improvement = config.validation.min_improvement
        early_stopping = EarlyStopping(patience, improvement, checkpoint_folder(folder.path), progress)
    parts: dict[str, StatePart | None] = {
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
    second = {} if model.frozen is None else {format_key(model.frozen.key): model.frozen.load()}
    resumable = Resumable(state, progress, data.order, {**data.sources, **second}, base)
    checkpoints = open_checkpoints(job.requested, resumable, ranks, stack)
    load_or_begin(job.requested, job.attempt, resumable, store, adapters, ema)
    if checkpoints is not None:
        checkpoints.copy_to(store)
    job = resolve_steps(job, data, progress)
    config = job.config
    on_rank_0(lambda: record_run(job.requested, job.attempt, stack))
    on_rank_0(lambda: record_table(folder.path / UNITS_FILE, describe_units(job.plan, job.layout, process.locate_key)))
    on_rank_0(lambda: record_proof(folder.path, certificate))
    memory_check = MemoryCheck(config, job.layout, job.hardware, stack) if ranks.is_rank_0 else None
    log_run(job, ranks.device, memory_check, data, folder.path, certificate)
    train_batches = stream or build_train_batches(config, data, ranks, progress.data_position, stack)
    validation_batches = build_validation_batches(config, data, ranks, stack)
    meter = build_meter(job, ranks, timeline, flops)
    learned = build_learned(config, job.plan, model.module, ranks, stack, job.layout)
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
    """Apply the CPU speedups to a wrapped model. Closing `stack` undoes the speedups that can be undone."""
    plan, layout, seq_len = model.plan, model.mesh.layout, config.training.seq_len
    dtypes = attention_dtypes(config.data, model.built, plan)
    product_dtypes = {plan.unit_of[module.path].compute_dtype for module in plan.inventory.modules}
    stack.enter_context(cpu_speedups(model.module, config.kernels, layout, seq_len, dtypes, product_dtypes))
