"""The training loop."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from titan_launch.checkpoint.manifest import checkpoint_name
from titan_launch.checkpoint.retention import best_steps, validation_losses
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import Stopped, format_key
from titan_launch.core.observer import Observer, StepResult, WatchedStep
from titan_launch.core.signals import RESTART_SIGNAL, RESTART_STATUS, signal_name
from titan_launch.data.order import MixtureOrder
from titan_launch.distributed.collectives import on_all_ranks, on_rank_0
from titan_launch.distributed.process_group import set_timeouts
from titan_launch.loss.build import losses_of_next_tokens
from titan_launch.metrics.tags import OTHER, TAGS
from titan_launch.optim.schedule import describe_clipping, lr_factor, set_lr
from titan_launch.parallel.batchnorm import largest_divergence
from titan_launch.parallel.expert_balance import describe_collapse
from titan_launch.plan.units.rule_assignment import is_mixture_of_experts
from titan_launch.train.health.skipped_steps import act_on_skipped_steps
from titan_launch.train.health.watchdog import TRAINING
from titan_launch.train.measure import MEASURED
from titan_launch.train.run import Run
from titan_launch.train.run_folder.folder import checkpoint_folder
from titan_launch.train.run_folder.resume import NOTHING_SAVED, SAME_COMMAND, how_to_resume
from titan_launch.train.step import validate


@contextmanager
def scheduled_garbage_collection(every_steps: int) -> Iterator[Callable[[int], object]]:
    """Disable automatic garbage collection during the block. Yield a function that takes the number of a step. If the
    number is a multiple of `every_steps`, the function collects the two younger generations.

    Automatic collection pauses each rank at a different moment, and every pause delays all ranks at the next
    collective. Objects made during start-up are frozen, so later collections skip them. If the caller had frozen
    objects before, all objects stay frozen after the block, because Python can only unfreeze all objects.
    """
    unfreezes = gc.get_freeze_count() == 0
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield lambda step: gc.collect(1) if step % every_steps == 0 else None
    finally:
        gc.enable()
        if unfreezes:
            gc.unfreeze()


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Due:
    """The work that follows a step, the same on all ranks."""

    report: bool
    """Report metrics. Due after the first step of this process, every `metrics.log_freq` steps, after the last step,
    and before a validation or a checkpoint."""

    validate: bool
    """Validate. With `validation.freq` above 0: due every `validation.freq` steps and after the last step. If a signal
    ends the run earlier, no validation is due, because the scheduler soon kills the run."""

    save: bool
    """Save a checkpoint. With `checkpoint.enable`: due every `checkpoint.interval` steps, every
    `checkpoint.interval_minutes`, after the last step, and if a signal ends the run. Without `checkpoint.enable`, but
    with `checkpoint.save_last`: due after the last step, and if a signal ends the run without a restart. See also
    `is_saved`."""

    pool: bool
    """Pool BatchNorm's running statistics over ranks. Due before a validation or a checkpoint, because both need equal
    statistics on all ranks."""

    restore_statistics: bool
    """After the save, restore each rank's own running statistics, which `pool` has averaged over ranks. Due if only
    `checkpoint.interval_minutes` or a signal causes the checkpoint, at a step without a regular validation. Such a
    checkpoint must not change later steps."""


def due_after_step(config: JobConfig, step: int, first_step: int, stop_signal: int, save_is_due: bool) -> Due:
    """Return the work that follows `step`. `first_step`: the first step of this process. `stop_signal`, `save_is_due`:
    see `StepCoordinator`."""
    checkpoint, freq = config.checkpoint, config.validation.freq
    is_last = step == config.training.total_steps
    regular_validation = freq > 0 and (is_last or step % freq == 0)
    if checkpoint.enable:
        regular_save = is_last or step % checkpoint.interval == 0
        save = regular_save or save_is_due or stop_signal != 0
    else:  # no save before a restart: without checkpoint.enable, the restart would not load it
        regular_save = checkpoint.save_last and is_last
        save = checkpoint.save_last and (is_last or stop_signal not in (0, RESTART_SIGNAL))
    validate = regular_validation and (is_last or not stop_signal)
    pool = validate or save
    return Due(
        report=pool or is_last or step == first_step or step % config.metrics.log_freq == 0,
        validate=validate,
        save=save,
        pool=pool,
        restore_statistics=pool and not (regular_validation or regular_save),
    )


def due_now(run: Run) -> Due:
    """Return the work that follows the run's last finished step. Call `StepCoordinator.agree` first."""
    control = run.control
    return due_after_step(run.config, run.progress.step, run.first_step, control.stop_signal, control.save_is_due)


def is_saved(run: Run, due: Due) -> bool:
    """Return True if a checkpoint of the run's last finished step must be saved: if `due.save`, or if early stopping
    needs a checkpoint after a validation. Call this function after `report`."""
    return due.save or (due.validate and run.early_stopping is not None and run.early_stopping.needs_checkpoint)


def fit(run: Run) -> None:
    """Train until all steps are done, or until early stopping or a signal ends the run. Report, validate and save
    checkpoints on the way. Raises Stopped as `ending` does, and RunError if skipped steps end the run."""
    last = run.config.training.total_steps
    if reason := nothing_to_do(run):
        _log.info("%s", reason)
        if run.checkpoints is not None:
            run.checkpoints.finish()  # copies the last checkpoint to `checkpoint.store` if an earlier copy failed
        return
    if clipping := describe_clipping(run.config.lr_scheduler, last):
        _log.info("%s", clipping)
    with scheduled_garbage_collection(run.config.training.gc_freq) as collect_garbage:
        run.control.agree()  # a signal may have arrived while the run was built
        while run.progress.step < last and not run.control.stop_signal and not has_ended_early(run):
            train_one_step(run)
            run.watchdog.enter("agreeing and reporting", run.progress.step)
            run.control.agree()
            due = due_now(run)
            if looks_for_skipped_steps(run, due) and act_on_skipped_steps(run):
                continue  # the run has gone back to a checkpoint
            scalars = report(run, due) if due.report else {}
            if is_saved(run, due):
                save(run, compared_loss(scalars))
            elif run.checkpoints is not None:
                run.checkpoints.poll()
            # An audited first step is not compiled, so the second step is slow, too.
            if run.progress.step == run.first_step + (run.config.compile.enable and run.observers.audit is not None):
                end_warm_up(run)
            collect_garbage(run.progress.step)
    run.watchdog.enter("ending", run.progress.step, is_slow=True)
    if run.checkpoints is not None:
        with run.observers.meter.paused("checkpoint"):
            # Before a restart, do not wait for copies to `checkpoint.store`, because the next start makes them.
            run.checkpoints.finish(copies=run.control.stop_signal != RESTART_SIGNAL)
    if pauses := run.observers.meter.late_pauses():
        run.output.write(run.progress.step, pauses)
    run.output.clear_progress()
    run.observers.profiler.finish()
    _log.info("%s", ending(run))


def nothing_to_do(run: Run) -> str:
    """Return a message that says why a run has no step left to train, and which key to increase; "" if there are steps.
    Collective if early stopping has ended the run."""
    step, last, key = run.progress.step, run.config.training.total_steps, format_key(run.config.training.length_key)
    if has_ended_early(run):
        keys = "validation.patience" if step < last else f"validation.patience and {key}"
        return f"nothing to do: {early_ending(run)}; increase {keys} to go on"
    return f"nothing to do: the run is at step {step} of {last}; increase {key} to go on" if step >= last else ""


def looks_for_skipped_steps(run: Run, due: Due) -> bool:
    """Return True if the host checks for skipped steps after this step: on a CPU after every step, and on CUDA only
    before a report, because the check waits for the device."""
    return due.report or run.ranks.device.type == "cpu"


def ending(run: Run) -> str:
    """Return a text that says how the run ended. Collective if early stopping has ended the run.

    Raises Stopped if all ranks will restart for a new host. Also raises Stopped if a signal ended the run after a step
    of this process, and the run saves no checkpoints."""
    step, last, number = run.progress.step, run.config.training.total_steps, run.control.stop_signal
    if has_ended_early(run):
        return early_ending(run)
    if step >= last or not number:
        return f"done: {last} steps; {result(run)}"
    if number == RESTART_SIGNAL:
        raise Stopped(f"ended after step {step} of {last}, to be started again with more hosts", RESTART_STATUS)
    if step < run.first_step:
        again = how_to_resume(run.config) if run.config.checkpoint.enable else SAME_COMMAND
        return f"stopped by {signal_name(number)} before step {run.first_step} of {last}; to go on, {again}"
    stopped = f"stopped by {signal_name(number)} after step {step} of {last}"
    if run.checkpoints is None:
        raise Stopped(f"{stopped}; {NOTHING_SAVED}", 128 + number)
    return f"{stopped}; a checkpoint of step {step} is saved; to resume, {how_to_resume(run.config)}"


def has_ended_early(run: Run) -> bool:
    """Return True if early stopping has ended the run after its last finished step."""
    return run.early_stopping is not None and run.early_stopping.has_ended


def early_ending(run: Run) -> str:
    """Return a text that says how early stopping ended the run, with its result. Collective."""
    assert run.early_stopping is not None
    folder, newest = checkpoint_folder(run.output.folder.path), run.progress.step
    best, *_ = on_rank_0(lambda: [*best_steps(validation_losses(folder)), newest])
    of_total = f"ended after step {newest} of {run.config.training.total_steps}"
    result = f"the result is {folder / checkpoint_name(best)}"
    return f"{of_total}: {run.early_stopping.describe(best)}; {result}"


def result(run: Run) -> str:
    """Return a text that names the checkpoint of a finished run, or the run folder if no checkpoint is saved."""
    if run.checkpoints is None:
        return f"{NOTHING_SAVED}; the reports are in {run.output.folder.path}"
    return f"the result is {checkpoint_folder(run.output.folder.path) / checkpoint_name(run.progress.step)}"


def train_one_step(run: Run, *more: Observer) -> StepResult:
    """Fetch a step's microbatches, train on them, and advance the run's progress. `more`: observers that come after
    those of the run."""
    number = run.progress.step + 1
    run.watchdog.enter("loading data", number)
    timeline = run.observers.meter.timeline
    timeline.begin("data")
    microbatches = [next(run.batches.train) for _ in range(run.job.layout.num_microbatches)]
    timeline.begin(OTHER)
    run.watchdog.enter(TRAINING, number)
    unfreeze(run)
    set_lr(run.optimizer, run.config.optimizer.lr, current_lr_factor(run, number))
    step = WatchedStep(number, due_after_step(run.config, number, run.first_step, 0, False).report, microbatches)
    observers = [*run.observers, *more]
    try:
        for observer in observers:
            observer.before_step(step)
        result = run.step(microbatches, observers)
        for observer in reversed(observers):
            observer.after_step(step, result)
    except BaseException as error:
        for observer in reversed(observers):
            observer.abandon_step(error)
        raise
    run.progress.step = number
    run.progress.samples_seen += run.job.layout.global_batch_size
    return result


def unfreeze(run: Run) -> None:
    """Freeze or unfreeze parameters for the next step, as `training.unfreeze` says, and log how many begin to train."""
    num_unfrozen = run.unfreezing.apply(run.progress.step)
    if num_unfrozen:
        run.output.clear_progress()
        _log.info("step %d: more parameters are trained from now on (tensors: %d)", run.progress.step + 1, num_unfrozen)


def end_warm_up(run: Run) -> None:
    """Prepare for checkpoints and set the timeouts of regular steps. Call this function after the slow first steps."""
    if run.checkpoints is not None and run.config.checkpoint.enable:
        run.checkpoints.get_ready()
    set_timeouts(run.config.comm.timeout_seconds)
    run.watchdog.end_warm_up()


def current_lr_factor(run: Run, step: int) -> float:
    """Return the learning rate at a step as a fraction of its peak."""
    return lr_factor(run.config.lr_scheduler, step, run.config.training.total_steps)


def report(run: Run, due: Due) -> dict[str, float]:
    """Write the metrics of the step, and of all steps since the last report, to all sinks. Return the metrics by tag.
    Collective.

    First pool BatchNorm's running statistics if `due.pool`, and validate if `due.validate`. The host waits for the
    device. A metric that is not combined over ranks has this rank's value.
    """
    step = run.progress.step
    meter, measurements = run.observers.meter, run.observers.measurements
    layers = [module.path for module in run.job.plan.inventory.modules if is_mixture_of_experts(module)]
    observed: dict[str, float | Tensor] = {**run.step.experts.take(layers)} if layers else {}
    for observer in run.observers:
        observed |= observer.take_metrics()
    if run.checkpoints is not None and run.config.checkpoint.enable:
        observed |= run.checkpoints.take_measurements()
    scalars = meter.report(observed | values_of_run(run))
    warn_of_collapse(run, scalars)
    if run.memory_check is not None:
        is_measured = measurements.is_steady or run.ranks.device.type == "cpu"
        is_measured &= run.unfreezing.is_finished  # the prediction is for steps after all of `training.unfreeze`
        scalars |= run.memory_check.scalars(scalars.get(MEASURED) if is_measured else None)
    scalars |= learning_rates(run, step)
    if due.pool:
        scalars |= pool_statistics(run, "validation" if due.validate else "checkpoint", due.restore_statistics)
    if due.validate:
        scalars |= validation_scalars(run)
        if run.early_stopping is not None and (loss := compared_loss(scalars)) is not None:
            scalars |= run.early_stopping.observe(loss)
    scalars |= perplexities(run, scalars)
    scalars |= meter.pauses()
    measurements.end_window(step, only_training=not due.pool)
    run.output.write(step, scalars)
    return scalars


def learning_rates(run: Run, step: int) -> dict[str, float]:
    """Return the learning rate of a step, by tag. If the optimizer's groups have different rates, also return the rate
    of each group."""
    lr = run.config.optimizer.lr * current_lr_factor(run, step)
    groups = {f"train/lr/{name}": lr * factor for name, factor in run.lr_factors.items()}
    return {"train/lr": lr} | (groups if len({*groups.values()}) > 1 else {})


def perplexities(run: Run, scalars: Mapping[str, float]) -> dict[str, float]:
    """Return the perplexities of a language model, by tag: the exponentials of its losses, limited to exp(700)."""
    found = [name for name in losses_of_next_tokens(run.config) if name in scalars]
    return {name.replace("loss", "perplexity"): math.exp(min(scalars[name], 700.0)) for name in found}


def values_of_run(run: Run) -> dict[str, float]:
    """Return the metrics that `TAGS` defines as functions of the run, by tag. Add the metrics of each source of a
    mixture."""
    found = {tag.name: tag.value(run) for tag in TAGS if tag.value is not None}
    values = {name: value for name, value in found.items() if value is not None}
    if isinstance(run.batches.order, MixtureOrder):
        for name, (share, epochs) in run.batches.order.progress(run.progress.data_position).items():
            values |= {f"data/share/{name}": share, f"data/epoch/{name}": epochs}
            if run.config.data.unit == "tokens":
                num_tokens = round(share * run.progress.data_position) * run.config.training.seq_len
                values[f"data/tokens/{name}"] = num_tokens
    return values


def warn_of_collapse(run: Run, scalars: Mapping[str, float]) -> None:
    """On rank 0, warn once of each mixture of experts that used less than half of its experts since the last report."""
    collapsed = run.step.experts.newly_collapsed(scalars)
    if collapsed and run.ranks.is_rank_0:
        run.output.clear_progress()
        _log.warning("%s", describe_collapse(run.progress.step, collapsed))


def pool_statistics(run: Run, purpose: str, temporarily: bool) -> dict[str, float]:
    """Pool BatchNorm's running statistics over all ranks that have the same parameters. Collective. Return the
    `batchnorm/*` metrics by tag; an empty dict without BatchNorm, or if no other rank has these parameters.
    `purpose`: argument of `Meter.paused`. `temporarily`: True if `save` restores each rank's own statistics."""
    with run.observers.meter.paused(purpose):
        divergence = run.step.statistics.pool(run.mesh.data_group, temporarily=temporarily)
        if run.mesh.pipeline_group is not None:
            divergence = largest_divergence(on_all_ranks(lambda: divergence, run.mesh.pipeline_group))
    if divergence is None:
        return {}
    return {
        "batchnorm/running_mean_divergence": divergence.mean,
        "batchnorm/running_var_divergence": divergence.variance,
    }


def validation_scalars(run: Run) -> dict[str, float]:
    """Validate the parameters, their moving average or both, and return the metrics by tag. Collective. Call this
    function after `pool_statistics`. The time of validation does not count as training time."""
    ema = run.observers.ema
    weights = "parameters" if ema is None else run.config.ema.validate_with
    scalars: dict[str, float] = {}
    with run.observers.meter.paused("validation"):
        if weights != "ema":
            scalars |= validated(run)
        if ema is not None and weights != "parameters":
            with ema.in_model(run.step.parameters_changed):
                of_average = validated(run)
            scalars |= {tag.replace("/", "/ema_", 1): value for tag, value in of_average.items()}
    return scalars


def compared_loss(scalars: Mapping[str, float]) -> float | None:
    """Return the validation loss that `checkpoint.keep_best` and `validation.patience` compare; None without a
    validation."""
    return scalars.get("validation/loss", scalars.get("validation/ema_loss"))


def validated(run: Run) -> dict[str, float]:
    """Validate the model with its present parameters, and return the `validation/*` metrics by tag. Collective."""
    assert run.batches.validation is not None, "config.rules demands validation.data with validation.freq"
    batches = run.watchdog.each_validation_batch(run.batches.validation, run.progress.step)
    return validate(run.model, batches, run.ranks.device, run.step.loss)


def save(run: Run, validation_loss: float | None = None) -> None:
    """Begin a checkpoint of the last finished step, and restore running statistics that were pooled temporarily.
    Collective. Call this function after `report`, which pools running statistics. `validation_loss`: validation loss of
    the step; None without a validation. The time for which training waits does not count as training time."""
    assert run.checkpoints is not None
    run.output.clear_progress()
    run.watchdog.enter("saving a checkpoint", run.progress.step, is_slow=True)
    with run.observers.meter.paused("checkpoint"):
        run.checkpoints.save(validation_loss)
    run.step.statistics.unpool()
    run.control.saved()
