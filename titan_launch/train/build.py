"""From a job's configuration to the finished parts of a run."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from titan_launch.checkpoint.state import Progress
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import format_key
from titan_launch.data.context_shard import SequencePart
from titan_launch.data.tokenizers import build_tokenizer
from titan_launch.distributed.collectives import on_main
from titan_launch.distributed.mesh import Mesh, build_mesh
from titan_launch.distributed.process_group import Ranks, set_timeouts
from titan_launch.metrics.sinks import ConsoleSink
from titan_launch.models.loss import loss_in_chunks
from titan_launch.optim.registry import build_optimizer
from titan_launch.parallel.accumulation import build_strategy
from titan_launch.parallel.compile import cache_folder, compile_loss
from titan_launch.parallel.context_parallel import ring_attention, sequence_part
from titan_launch.parallel.float8 import scale_update
from titan_launch.parallel.pipeline import pipeline_of
from titan_launch.plan.report.unit_table import KeyLocator, describe_units
from titan_launch.train.batches import (
    build_train_batches,
    build_train_source,
    build_validation_batches,
    build_validation_source,
)
from titan_launch.train.forward import check_embeddings, checked_loss
from titan_launch.train.health.coordination import StepCoordinator, StopRequest
from titan_launch.train.health.flight_recorder import make_room_for_nccl
from titan_launch.train.health.step_guard import StepGuard
from titan_launch.train.health.watchdog import Watchdog
from titan_launch.train.kernel_choice import use_kernels
from titan_launch.train.measure import MemoryCheck, StepMeasurements
from titan_launch.train.model import check_stages, fill_model, shard_model
from titan_launch.train.pipeline_step import PipelinedStep
from titan_launch.train.resolve_job import resolve_job
from titan_launch.train.run import Run, build_meter, build_sinks, log_summary
from titan_launch.train.run_folder.attempt import Attempt, this_attempt
from titan_launch.train.run_folder.folder import HeldFolder, effective_load, new_attempt_folder, prepare_run_folder
from titan_launch.train.run_folder.logs import LogFile
from titan_launch.train.run_folder.records import record_run, record_units
from titan_launch.train.run_folder.resume import load_run, open_checkpoints, training_state, what_to_do_without_folder
from titan_launch.train.step import TrainStep

_log = logging.getLogger(__name__)


def build_run(
    config: JobConfig,
    ranks: Ranks,
    stack: ExitStack,
    locate_key: KeyLocator = format_key,
    stop: StopRequest | None = None,
    log_file: LogFile | None = None,
    watchdog: Watchdog | None = None,
) -> Run:
    """Build everything that training needs. Resources that must be closed are entered into `stack`.

    `locate_key` returns the file and line of a key. `stop` is asked after every step whether a signal has arrived.
    `log_file` and `watchdog` are given the run's folder.

    Errors that need no memory are found first: division of ranks, model, precision rules, data. Then memory is
    allocated, and only then are files written.
    """
    watchdog = watchdog or Watchdog(config.comm, ranks)
    attempt = this_attempt()
    settled = resolve_job(config, ranks, config.job.run_folder, attempt)
    config, recorded, layout, built = settled.config, settled.recorded, settled.layout, settled.built
    use_kernels(config, built, settled.plan, layout, ranks.device, stack)
    stack.enter_context(cache_folder(config.compile))
    mesh = build_mesh(layout, ranks.device.type)
    part = own_tokens(config, mesh, ranks, stack)
    model = shard_model(config, built, settled.plan, mesh)
    set_timeouts(config.comm.init_timeout_seconds)
    tokenizer = build_tokenizer(config.tokenizer)
    source = build_train_source(config, tokenizer, part)
    check_stages(model, source, layout)
    held_out = build_validation_source(config, tokenizer, part)
    sources = {"data": source} | ({"validation.data": held_out} if held_out is not None else {})
    num_classes = max(data.num_classes for data in sources.values())

    fill_model(config, built, model, part, ranks)
    if config.data.unit == "tokens":
        check_embeddings(model, num_classes)
    optimizer = build_optimizer(model, config.optimizer, built.head, config.training.seed)

    folder = open_run_folder(recorded, attempt, ranks, log_file, watchdog, stack)
    held_folder = stack.enter_context(HeldFolder(folder, what_to_do_without_folder(recorded)))
    progress, guard = Progress(), StepGuard(config.debug, ranks.device)
    state = training_state(config, model, optimizer, progress, guard, mesh, ranks)
    checkpoints = open_checkpoints(recorded, folder, state, progress, sources, ranks, stack)
    load = on_main(lambda: effective_load(folder, recorded, attempt))
    load_run(recorded, folder, load, state, progress, sources)
    on_main(lambda: record_run(folder, recorded, attempt, stack))
    on_main(lambda: record_units(folder, describe_units(settled.plan, layout, locate_key)))
    memory_check = MemoryCheck(config, layout, settled.hardware, stack) if ranks.is_main else None
    log_summary(settled, ranks, memory_check, source, held_out, folder, locate_key)
    step = build_step(config, model, optimizer, guard, mesh, ranks, num_classes)
    first_step = progress.step + 1
    console = ConsoleSink(total_steps=config.training.steps) if ranks.is_main else None
    return Run(
        config=config,
        folder=folder,
        held_folder=held_folder,
        ranks=ranks,
        layout=layout,
        mesh=mesh,
        plan=settled.plan,
        model=model,
        optimizer=optimizer,
        step=step,
        guard=guard,
        progress=progress,
        state=state,
        control=StepCoordinator(stop or StopRequest(), config.checkpoint.interval_minutes),
        first_step=first_step,
        epoch_size=len(source),
        train_batches=build_train_batches(config, source, layout, ranks, progress.data_position, stack),
        validation_batches=build_validation_batches(config, held_out, layout, ranks, stack),
        checkpoints=checkpoints,
        meter=build_meter(config, built, layout, ranks),
        measurements=StepMeasurements(
            config.comm, model, optimizer, step, ranks.device, first_step, config.compile.enable, stack
        ),
        memory_check=memory_check,
        sinks=build_sinks(config, settled.reason, folder, progress, console, stack),
        console=console,
        watchdog=watchdog,
        locate_key=locate_key,
    )


def own_tokens(config: JobConfig, mesh: Mesh, ranks: Ranks, stack: ExitStack) -> SequencePart | None:
    """The part of every sequence that this rank has, with attention over the ranks of the others until `stack` is
    closed; None where each rank has whole sequences."""
    if mesh.context is not None:
        stack.enter_context(ring_attention(mesh.context, config.parallelism, ranks.device))
    return sequence_part(mesh.context, config.parallelism)


def open_run_folder(
    config: JobConfig,
    attempt: Attempt,
    ranks: Ranks,
    log_file: LogFile | None,
    watchdog: Watchdog,
    stack: ExitStack,
) -> Path:
    """The run's folder, made ready by the main rank before any rank goes on, with the logs of this attempt."""
    folder = config.job.run_folder

    def prepare() -> Path:
        prepare_run_folder(folder, config, attempt, stack)
        return new_attempt_folder(folder)

    logs = on_main(prepare)
    if log_file is not None:
        log_file.open(logs / f"rank_{ranks.rank}.log")
    watchdog.write_to(folder)
    if ranks.device.type == "cuda":
        make_room_for_nccl(folder)
    return folder


def build_step(
    config: JobConfig,
    model: nn.Module,
    optimizer: Optimizer,
    guard: StepGuard,
    mesh: Mesh,
    ranks: Ranks,
    num_classes: int,
) -> TrainStep:
    """What trains on a step's microbatches. `num_classes`: of the data."""
    accumulation = build_strategy(config.gradient_accumulation)
    training = config.training
    pipeline = pipeline_of(model)
    loss_sum = compile_loss(loss_in_chunks(training.loss_chunks), config.compile)
    return TrainStep(
        model,
        optimizer,
        accumulation,
        guard,
        training.max_norm,
        mesh,
        ranks.device,
        checked_loss(loss_sum, config.data.unit, num_classes),
        pipelined=None if pipeline is None else PipelinedStep(pipeline, config.parallelism, accumulation, ranks.device),
        after_update=scale_update(model, config.float8),
    )
