"""From a job's configuration to the finished parts of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from titan_launch.accumulation.strategies import build_strategy
from titan_launch.checkpoint.manager import CheckpointManager
from titan_launch.checkpoint.state import Progress, TrainingState
from titan_launch.collective import on_main
from titan_launch.config.architectures import images_taken
from titan_launch.config.job import JobConfig
from titan_launch.config.load import dump_job
from titan_launch.data.loader import Loader, build_train_loader, build_validation_loader
from titan_launch.data.order import SampleOrder
from titan_launch.data.sequence_part import SequencePart, part_of
from titan_launch.data.sources import SampleSource, build_source
from titan_launch.errors import format_key
from titan_launch.loss import loss_in_chunks
from titan_launch.metrics.meter import Meter
from titan_launch.metrics.sinks import ConsoleSink, JsonlSink, Sink, TensorBoardSink
from titan_launch.models.build import BuiltModel, build_model
from titan_launch.models.init import allocate, initialize
from titan_launch.optim.groups import check_param_groups
from titan_launch.optim.optimizer import build_optimizer
from titan_launch.parallel.apply import parallelize
from titan_launch.parallel.compile import compile_loss
from titan_launch.parallel.context_parallel import divide_buffers, ring_attention, sequence_part
from titan_launch.parallel.distributed import Ranks
from titan_launch.parallel.mesh import Mesh, build_mesh
from titan_launch.parallel.pipeline import divide, pipeline_of
from titan_launch.parallel.tensor_parallel import token_shards
from titan_launch.parallel.timeouts import set_timeouts
from titan_launch.plan.devices import find_device
from titan_launch.plan.layout import Layout, plan_layout
from titan_launch.plan.report import Place, describe_units, format_batches, format_plan
from titan_launch.plan.types import ModelPlan
from titan_launch.tokenizer import Tokenizer, build_tokenizer
from titan_launch.train.attempt import Attempt, this_attempt
from titan_launch.train.batches import TrainBatches
from titan_launch.train.control import Control
from titan_launch.train.flight_recorder import make_room_for_nccl
from titan_launch.train.folder import (
    METRICS_FILE,
    effective_load,
    new_attempt_folder,
    prepare_run_folder,
    record_run,
    record_units,
)
from titan_launch.train.guard import StepGuard
from titan_launch.train.logs import LogFile
from titan_launch.train.measure import StepMeasurements, check_profiling
from titan_launch.train.modes import hardware_of_run, settle_modes
from titan_launch.train.pipeline import PipelinedStep
from titan_launch.train.plan import plan_precision
from titan_launch.train.prediction import MemoryCheck
from titan_launch.train.resume import load_run, open_checkpoints, training_state
from titan_launch.train.signals import StopRequest
from titan_launch.train.step import Microbatch, TrainStep
from titan_launch.train.watchdog import Watchdog

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """The finished parts of a run."""

    config: JobConfig
    folder: Path
    ranks: Ranks
    layout: Layout
    mesh: Mesh
    plan: ModelPlan
    model: nn.Module
    optimizer: Optimizer
    step: TrainStep
    guard: StepGuard
    progress: Progress
    state: TrainingState
    """All that goes into a checkpoint."""

    control: Control
    first_step: int
    """The first step of this process: 1, or the one after the checkpoint it resumed from."""

    epoch_size: int
    """Samples in an epoch."""

    train_batches: TrainBatches
    """This rank's microbatches, without end."""

    validation_batches: Iterable[Microbatch] | None
    checkpoints: CheckpointManager | None
    meter: Meter
    measurements: StepMeasurements
    memory_check: MemoryCheck | None
    """On the main rank."""

    sinks: tuple[Sink, ...]
    console: ConsoleSink | None
    """The terminal, on the main rank; also among the sinks."""

    watchdog: Watchdog
    """Is told what this rank does."""

    place: Place
    """Where a key of the job was given."""


def build_run(
    config: JobConfig,
    ranks: Ranks,
    stack: ExitStack,
    place: Place = format_key,
    stop: StopRequest | None = None,
    log_file: LogFile | None = None,
    watchdog: Watchdog | None = None,
) -> Run:
    """Build everything that training needs; what must be closed is entered into `stack`. `place` says where a key of
    the job was given; `stop` is asked after every step whether a signal has arrived; `log_file` is told where to write,
    and so is `watchdog`.

    What can be wrong is found first (the division of ranks, the model, the precision rules, the data); then memory is
    allocated; only then is anything written.
    """
    watchdog = watchdog or Watchdog(config.comm, ranks)
    layout = plan_layout(config.parallelism, config.training, ranks.world_size)
    config = with_global_batch_size(config, layout)
    attempt = this_attempt()
    built = build_model(config.model, config.training.seq_len)
    check_param_groups(built.module, config.optimizer, built.head)
    check_profiling(config.comm, ranks.device)
    hardware = hardware_of_run(config, ranks)
    config, reason = settle_modes(config, layout, built, hardware, run_folder(config), attempt, ranks)
    plan = plan_precision(config, built)
    _log.info("%s", format_plan(config, plan, layout, place))
    mesh = build_mesh(layout, ranks.device.type)
    part = sequence_part(mesh.context, config.parallelism)
    if mesh.context is not None:
        stack.enter_context(ring_attention(mesh.context, config.parallelism, ranks.device))
    model = shard_model(config, built, plan, mesh)
    set_timeouts(config.comm.init_timeout_seconds)
    tokenizer = build_tokenizer(config.tokenizer)
    source = part_of(
        build_source(config.data, tokenizer, config.training.seq_len, ("data",), images_taken(config.model)), part
    )
    check_stages(model, source, layout)
    validation_batches = build_validation_batches(config, tokenizer, layout, part, ranks, stack)

    allocate(model, ranks.device, config.training.enable_cpu_offload)
    initialize(model, built.initializer, config.training.seed, ranks.device)
    if part is not None:
        divide_buffers(model, built.context_parallel or {}, part, config.training.seq_len)
    optimizer = build_optimizer(model, config.optimizer, built.head, config.training.seed)

    folder = open_run_folder(config, attempt, ranks, log_file, stack)
    watchdog.write_to(folder)
    if ranks.device.type == "cuda":
        make_room_for_nccl(folder)
    progress, guard = Progress(), StepGuard(config.debug, ranks.device)
    state = training_state(config, model, optimizer, progress, guard, mesh, ranks)
    checkpoints = open_checkpoints(config, folder, state, progress, ranks, stack)
    load_run(config, folder, on_main(lambda: effective_load(folder, config, attempt)), state)
    if ranks.is_main:
        record_run(folder, config, attempt, stack)
        record_units(folder, describe_units(plan, layout, place))
    step = build_step(config, model, optimizer, guard, mesh, ranks)
    first_step = progress.step + 1
    console = ConsoleSink(total_steps=config.training.steps) if ranks.is_main else None
    log_batches(config, layout, ranks, len(source), folder)
    return Run(
        config=config,
        folder=folder,
        ranks=ranks,
        layout=layout,
        mesh=mesh,
        plan=plan,
        model=model,
        optimizer=optimizer,
        step=step,
        guard=guard,
        progress=progress,
        state=state,
        control=Control(stop or StopRequest(), config.checkpoint.interval_minutes),
        first_step=first_step,
        epoch_size=len(source),
        train_batches=build_train_batches(config, source, layout, ranks, progress.data_position, stack),
        validation_batches=validation_batches,
        checkpoints=checkpoints,
        meter=build_meter(config, built, layout, ranks),
        measurements=StepMeasurements(
            config.comm, model, optimizer, step, ranks.device, first_step, config.compile.enable, stack
        ),
        memory_check=MemoryCheck(config, layout, hardware, stack) if ranks.is_main else None,
        sinks=build_sinks(config, reason, folder, progress, console, stack),
        console=console,
        watchdog=watchdog,
        place=place,
    )


def with_global_batch_size(config: JobConfig, layout: Layout) -> JobConfig:
    """The job with the batch that follows from the ranks where it names none: on other ranks it would be another one,
    and the run another experiment."""
    training = config.training.model_copy(update={"global_batch_size": layout.global_batch_size})
    return config.model_copy(update={"training": training})


def shard_model(config: JobConfig, built: BuiltModel, plan: ModelPlan, mesh: Mesh) -> nn.Module:
    """Wrap a model on the meta device as planned, of a pipeline this rank's stages; nothing is allocated."""
    group = None
    if config.batchnorm.statistics == "synchronized":
        group = mesh.statistics_group(config.comm.init_timeout_seconds)

    def wrap(module: nn.Module, plan: ModelPlan) -> None:
        parallelize(
            module,
            plan,
            mesh,
            styles=built.tensor_parallel,
            parallelism=config.parallelism,
            batchnorm=config.batchnorm,
            statistics_group=group,
            recomputation=config.activation_checkpoint,
            compilation=config.compile,
            offloads=config.training.enable_cpu_offload,
        )

    if plan.stages:
        divide(built.module, plan, mesh, token_shards(config.parallelism), wrap)
    else:
        wrap(built.module, plan)
    return built.module


def check_stages(model: nn.Module, source: SampleSource, layout: Layout) -> None:
    """Raise ConfigError for a model whose pipeline stages do not run one after another; nothing is allocated."""
    pipeline = pipeline_of(model)
    if pipeline is not None:
        sample, _ = source[0]
        pipeline.boundaries.of(sample.to("meta").expand(layout.local_batch_size, *sample.shape))


def build_train_batches(
    config: JobConfig, source: SampleSource, layout: Layout, ranks: Ranks, position: int, stack: ExitStack
) -> TrainBatches:
    """This rank's microbatches, from a position in the data on."""

    def build_loader(start: int) -> Loader:
        return build_train_loader(
            source,
            sample_order(config, len(source)),
            layout,
            layout.data_rank(ranks.rank),
            start=start,
            num_workers=config.data.num_workers,
            pin_memory=ranks.device.type == "cuda",
        )

    batches = TrainBatches(build_loader, position)
    stack.callback(batches.close)
    return batches


def sample_order(config: JobConfig, epoch_size: int) -> SampleOrder:
    """The order in which the run goes through its data."""
    return SampleOrder(epoch_size, config.training.seed, config.data.shuffle)


def build_validation_batches(
    config: JobConfig, tokenizer: Tokenizer, layout: Layout, part: SequencePart | None, ranks: Ranks, stack: ExitStack
) -> Iterable[Microbatch] | None:
    """This rank's validation batches, or None where there is no validation. `part`: the tokens that it has."""
    validation = config.validation
    if not validation.freq or validation.data is None:
        return None
    key = ("validation", "data")
    source = build_source(validation.data, tokenizer, config.training.seq_len, key, images_taken(config.model))
    loader = build_validation_loader(
        part_of(source, part),
        local_batch_size=validation.local_batch_size,
        dp_rank=layout.data_rank(ranks.rank),
        dp_size=layout.data_parallel,
        max_samples=validation.max_samples,
        num_workers=validation.data.num_workers,
        pin_memory=ranks.device.type == "cuda",
    )
    stack.callback(loader.close)
    return loader


def run_folder(config: JobConfig) -> Path:
    """Where everything goes that a run writes."""
    return Path(config.job.dump_folder, config.job.name)


def open_run_folder(
    config: JobConfig, attempt: Attempt, ranks: Ranks, log_file: LogFile | None, stack: ExitStack
) -> Path:
    """The run's folder, made ready by the main rank before any rank goes on, with the logs of this attempt."""
    folder = run_folder(config)

    def prepare() -> Path:
        prepare_run_folder(folder, config, attempt, stack)
        return new_attempt_folder(folder)

    logs = on_main(prepare)
    if log_file is not None:
        log_file.open(logs / f"rank_{ranks.rank}.log")
    return folder


def build_step(
    config: JobConfig, model: nn.Module, optimizer: Optimizer, guard: StepGuard, mesh: Mesh, ranks: Ranks
) -> TrainStep:
    """What trains on a step's microbatches."""
    accumulation = build_strategy(config.gradient_accumulation)
    training = config.training
    pipeline = pipeline_of(model)
    return TrainStep(
        model,
        optimizer,
        accumulation,
        guard,
        training.max_norm,
        mesh,
        ranks.device,
        compile_loss(loss_in_chunks(training.loss_chunks), config.compile),
        pipelined=None if pipeline is None else PipelinedStep(pipeline, config.parallelism, accumulation, ranks.device),
    )


def build_meter(config: JobConfig, built: BuiltModel, layout: Layout, ranks: Ranks) -> Meter:
    """The meter, which knows the FLOPs of a step and, on known hardware, the peak."""
    flops = built.flops_per_sample
    return Meter(
        device=ranks.device,
        world_size=ranks.world_size,
        unit=config.data.unit,
        flops_per_step_per_device=None if flops is None else flops * layout.global_batch_size / ranks.world_size,
        peak_flops=peak_flops(config, ranks.device),
    )


def peak_flops(config: JobConfig, device: torch.device) -> float | None:
    """FLOP/s that the MFU is relative to: as configured, else those of a known GPU, else none."""
    if config.metrics.peak_tflops_per_device is not None:
        return config.metrics.peak_tflops_per_device * 1e12
    known = find_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if known is None else known.peak_bf16_tflops * 1e12


def build_sinks(
    config: JobConfig,
    reason: str | None,
    folder: Path,
    progress: Progress,
    console: ConsoleSink | None,
    stack: ExitStack,
) -> tuple[Sink, ...]:
    """Where reports go; only the main rank, which has a console, writes. `reason`: why the modes are what they are,
    where the job left them open."""
    if console is None:
        return ()
    sinks: list[Sink] = [console, JsonlSink(folder / METRICS_FILE, resume_step=progress.step)]
    if config.metrics.enable_tensorboard:
        sinks.append(TensorBoardSink(folder / "tb", resume_step=progress.step))
    for sink in sinks:
        stack.callback(sink.close)
        sink.text("config", f"```json\n{dump_job(config)}```")
        if reason is not None:
            sink.text("auto", reason)
    return tuple(sinks)


def log_batches(config: JobConfig, layout: Layout, ranks: Ranks, epoch_size: int, folder: Path) -> None:
    """Say how the run divides its batch, and where it writes."""
    _log.info("%s; an epoch has %s samples", format_batches(config, layout), f"{epoch_size:,}")
    _log.info("device: %s", ranks.device.type)
    _log.info("folder: %s", folder)
