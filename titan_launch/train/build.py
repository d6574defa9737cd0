"""Build the parts of a run from a job's configuration."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from titan_launch.checkpoint.state import Progress, TrainingState
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import format_key
from titan_launch.cpu.switch import cpu_speedups
from titan_launch.data.order import Order
from titan_launch.distributed.collectives import on_rank_0
from titan_launch.distributed.mesh import build_mesh
from titan_launch.distributed.process_group import Ranks, set_timeouts
from titan_launch.metrics.sinks import ConsoleSink
from titan_launch.models.weights.folder import WeightsFolder
from titan_launch.optim.ema import WeightEMA
from titan_launch.optim.registry import build_optimizer
from titan_launch.parallel.accumulation import build_strategy
from titan_launch.parallel.compile import cache_folder
from titan_launch.parallel.context_parallel import sequence_part
from titan_launch.parallel.float8 import scale_update
from titan_launch.parallel.pipeline import pipeline_of
from titan_launch.plan.report.unit_table import KeyLocator, describe_units
from titan_launch.train.batches import build_data, build_stream_batches, build_train_batches, build_validation_batches
from titan_launch.train.health.coordination import StepCoordinator, StopRequest
from titan_launch.train.health.flight_recorder import create_nccl_folder
from titan_launch.train.health.step_guard import StepGuard
from titan_launch.train.health.watchdog import Watchdog
from titan_launch.train.kernel_choice import attention_dtypes, use_kernels
from titan_launch.train.measure import MemoryCheck, StepMeasurements
from titan_launch.train.model import (
    AssembledModel,
    allocate_model,
    assemble_model,
    begin_with_weights,
    build_loss,
    weights_if_readable,
)
from titan_launch.train.resolve_job import ResolvedJob, resolve_job
from titan_launch.train.run import Run, build_meter, build_sinks, log_job, log_run
from titan_launch.train.run_folder.attempt import this_attempt
from titan_launch.train.run_folder.folder import OpenRunFolder, effective_load, new_attempt_folder, prepare_run_folder
from titan_launch.train.run_folder.logs import LogFile
from titan_launch.train.run_folder.records import record_run, record_units
from titan_launch.train.run_folder.resume import (
    Sources,
    advice_without_folder,
    load_run,
    open_checkpoints,
    training_state,
)
from titan_launch.train.step import TrainStep


def build_run(
    config: JobConfig,
    ranks: Ranks,
    stack: ExitStack,
    locate_key: KeyLocator = format_key,
    stop: StopRequest | None = None,
    log_file: LogFile | None = None,
    watchdog: Watchdog | None = None,
) -> Run:
    """Build everything that training needs. Collective. Closing `stack` closes all parts of the run.

    `locate_key` returns the file and line of a key. `stop` is checked for a signal after every step. `log_file` and
    `watchdog` write to the run folder as soon as it exists.

    Checks that need no memory run first: division of ranks, model, precision rules, data. Then memory is allocated.
    Files are written last.
    """
    watchdog = watchdog or Watchdog(config.comm, ranks)
    job = resolve_job(config, ranks, this_attempt())
    config = job.config
    log_job(job, locate_key)
    use_kernels(config, job.built, job.plan, job.layout, ranks.device, stack)
    stack.enter_context(cache_folder(config.compile))

    mesh = build_mesh(job.layout, ranks.device.type)
    data = build_data(config, job.layout, sequence_part(mesh.context, config.parallelism))
    model = assemble_model(config, job.built, job.plan, mesh, data)
    if ranks.device.type == "cpu":
        dtypes = attention_dtypes(config.data, job.built, job.plan)
        stack.enter_context(cpu_speedups(model.module, config.kernels, job.layout, config.training.seq_len, dtypes))
    set_timeouts(config.comm.init_timeout_seconds)
    allocate_model(model, config, ranks.device, stack)
    optimizer = build_optimizer(model.module, config.optimizer, job.built.head, config.training.seed)
    ema = None if config.ema.decay is None else WeightEMA(model.module, optimizer, config.ema)

    folder = open_run_folder(job, ranks, log_file, watchdog, stack)
    progress, guard = Progress(), StepGuard(config.debug, ranks.device)
    step = build_step(config, model, optimizer, guard, ranks, data.num_classes)
    stream = build_stream_batches(config, data, job.layout, ranks, stack)
    state = training_state(
        config, model.module, optimizer, progress, data.order, stream, guard, ema, step.statistics, mesh, ranks
    )
    weights = weights_if_readable(config.model)
    sources: Sources = data.sources if weights is None else {**data.sources, "model.weights": weights}
    checkpoints = open_checkpoints(job.requested, folder.path, state, progress, sources, ranks, stack)
    load_or_begin(job, folder.path, state, progress, sources, data.order, weights, model.module, ema, stack)
    on_rank_0(lambda: record_units(folder.path, describe_units(job.plan, job.layout, locate_key)))
    memory_check = MemoryCheck(config, job.layout, job.hardware, stack) if ranks.is_rank_0 else None
    log_run(job, ranks.device, memory_check, data, folder.path)
    first_step = progress.step + 1
    console = ConsoleSink(total_steps=config.training.steps) if ranks.is_rank_0 else None
    return Run(
        config=config,
        folder=folder.path,
        held_folder=folder,
        ranks=ranks,
        layout=job.layout,
        mesh=mesh,
        plan=job.plan,
        model=model.module,
        optimizer=optimizer,
        ema=ema,
        step=step,
        guard=guard,
        progress=progress,
        state=state,
        control=StepCoordinator(stop or StopRequest(), config.checkpoint.interval_minutes),
        first_step=first_step,
        order=data.order,
        train_batches=stream or build_train_batches(config, data, job.layout, ranks, progress.data_position, stack),
        validation_batches=build_validation_batches(config, data, job.layout, ranks, stack),
        checkpoints=checkpoints,
        meter=build_meter(job, ranks),
        measurements=StepMeasurements(
            config.comm, model.module, optimizer, ema, step, ranks.device, first_step, config.compile.enable, stack
        ),
        memory_check=memory_check,
        sinks=build_sinks(job, folder.path, progress, console, stack),
        console=console,
        watchdog=watchdog,
        locate_key=locate_key,
    )


def open_run_folder(
    job: ResolvedJob, ranks: Ranks, log_file: LogFile | None, watchdog: Watchdog, stack: ExitStack
) -> OpenRunFolder:
    """Prepare the run folder and a log folder for this attempt, and return the run folder. Collective.

    Rank 0 prepares the folders while the other ranks wait. The run folder is locked until `stack` is closed.
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
    state: TrainingState,
    progress: Progress,
    sources: Sources,
    order: Order,
    weights: WeightsFolder | None,
    model: nn.Module,
    ema: WeightEMA | None,
    stack: ExitStack,
) -> None:
    """Load the checkpoint from which the run starts, or else the weights that the job names, if any. Record the run in
    its folder. Collective."""
    load = on_rank_0(lambda: effective_load(folder, job.requested, job.attempt))
    is_loaded = load_run(job.requested, folder, load, state, progress, sources, order)
    if not is_loaded and job.config.model.weights is not None:
        begin_with_weights(model, job.config.model, job.plan.inventory, weights)
        if ema is not None:
            ema.load_state_dict({})  # the average begins with these weights
    on_rank_0(lambda: record_run(folder, job.requested, job.attempt, stack))


def build_step(
    config: JobConfig, model: AssembledModel, optimizer: Optimizer, guard: StepGuard, ranks: Ranks, num_classes: int
) -> TrainStep:
    """Return the training step. `num_classes`: number of classes of the data; for tokens, the vocabulary size."""
    accumulation = build_strategy(config.gradient_accumulation)
    pipeline, pipelined = pipeline_of(model.module), None
    if pipeline is not None:
        from titan_launch.train.pipeline_step import PipelinedStep  # importing PyTorch's schedules takes a second

        pipelined = PipelinedStep(pipeline, config.parallelism, accumulation, ranks.device)
    return TrainStep(
        model.module,
        optimizer,
        accumulation,
        guard,
        config.training.max_norm,
        model.mesh,
        ranks.device,
        build_loss(model.module, model.plan, config, num_classes),
        pipelined=pipelined,
        after_update=scale_update(model.module, config.float8),
    )
