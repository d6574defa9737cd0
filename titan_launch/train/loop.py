"""The training loop."""

from __future__ import annotations

import logging

from titan_launch.optim.schedule import lr_factor, set_lr
from titan_launch.parallel.batchnorm import pool_running_statistics
from titan_launch.precision.explanations import dtype_failures_explained
from titan_launch.train.audit import audited_step, is_audited
from titan_launch.train.build import Run
from titan_launch.train.garbage import scheduled_garbage_collection
from titan_launch.train.prediction import MEASURED
from titan_launch.train.step import StepResult
from titan_launch.train.validate import validate

_log = logging.getLogger(__name__)


def fit(run: Run) -> None:
    """Train until `training.steps` are done, reporting, validating and saving on the way."""
    last = run.config.training.steps
    if run.progress.step >= last:
        _log.info("nothing to do: the run is at step %d of %d; raise training.steps to go on", run.progress.step, last)
        return
    with scheduled_garbage_collection(run.config.training.gc_freq) as collect_garbage:
        while run.progress.step < last:
            result = train_one_step(run)
            if is_report_step(run):
                report(run, result)
            if is_checkpoint_step(run):
                save(run)
            collect_garbage(run.progress.step)
    clear_progress(run)
    _log.info("done: %d steps; everything is in %s", last, run.folder)


def train_one_step(run: Run) -> StepResult:
    """Fetch a step's microbatches, train on them, and advance the run."""
    with run.meter.loading():
        microbatches = [next(run.train_batches) for _ in range(run.layout.num_microbatches)]
    step = run.progress.step + 1
    set_lr(run.optimizer, run.config.optimizer.lr, current_lr_factor(run, step))
    with (
        dtype_failures_explained(run.model, run.plan, run.config.precision),
        run.measurements.watching(step, microbatches),
    ):
        result = audited_step(run, microbatches) if is_audited(run) else run.step(microbatches)
    run.progress.step = step
    run.progress.samples_seen += run.layout.global_batch_size
    run.meter.end_step(result.valid_global)
    if run.console is not None:
        run.console.progress(step)
    if run.ranks.device.type == "cpu":  # looking costs nothing there; on CUDA it would make the host wait
        run.guard.raise_if_stopped(step)
    return result


def current_lr_factor(run: Run, step: int) -> float:
    """The schedule's value at a step, as a fraction of the peak."""
    return lr_factor(run.config.lr_scheduler, step, run.config.training.steps)


def is_validation_step(run: Run) -> bool:
    """Every `validation.freq` steps, and after the last."""
    freq, step = run.config.validation.freq, run.progress.step
    return freq > 0 and (step % freq == 0 or step == run.config.training.steps)


def is_report_step(run: Run) -> bool:
    """The first step of this process, every `metrics.log_freq` steps, the last, and where there is a validation or a
    checkpoint."""
    step = run.progress.step
    regular = step % run.config.metrics.log_freq == 0 or step == run.config.training.steps
    return regular or step == run.first_step or needs_pooled_statistics(run)


def is_checkpoint_step(run: Run) -> bool:
    """Every `checkpoint.interval` steps, and after the last."""
    step = run.progress.step
    due = step % run.config.checkpoint.interval == 0 or step == run.config.training.steps
    return run.checkpoints is not None and due


def needs_pooled_statistics(run: Run) -> bool:
    """Where there is a validation or a checkpoint, which are of one model."""
    return is_validation_step(run) or is_checkpoint_step(run)


def clear_progress(run: Run) -> None:
    """Take the progress bar away before something else is printed."""
    if run.console is not None:
        run.console.clear()


def report(run: Run, result: StepResult) -> None:
    """Bring the step's numbers, and those of the window since the last report, to the host and to the writers."""
    step = run.progress.step
    scalars = run.meter.report(
        loss_sum=result.loss_sum,
        valid_local=result.valid_local,
        valid_global=result.valid_global,
        grad_norm=result.grad_norm,
        measured=run.measurements.take(),
    )
    if run.memory_check is not None:
        is_measured = run.measurements.is_steady or run.ranks.device.type == "cpu"
        scalars |= run.memory_check.scalars(scalars.get(MEASURED) if is_measured else None)
    settle_guard(run)
    scalars["train/lr"] = run.config.optimizer.lr * current_lr_factor(run, step)
    scalars["train/samples_seen"] = run.progress.samples_seen
    scalars["train/epoch"] = run.progress.samples_seen / run.epoch_size
    scalars["train/skipped_steps"] = run.progress.skipped_steps
    if needs_pooled_statistics(run):
        scalars |= pool_statistics(run)
    if is_validation_step(run):
        scalars |= validation_scalars(run)
    run.measurements.end_window(step, only_training=not needs_pooled_statistics(run))
    for sink in run.sinks:
        sink.write(step, scalars)


def settle_guard(run: Run) -> None:
    """End the run if it was stopped, else count the steps that were left out. Waits for the device."""
    run.guard.raise_if_stopped(run.progress.step)
    run.progress.skipped_steps += run.guard.take_skipped()


def pool_statistics(run: Run) -> dict[str, float]:
    """Give all ranks the same running statistics, once a step; how far they were apart. The time does not count as
    training time."""
    with run.meter.paused():
        divergence = pool_running_statistics(run.model)
    if divergence is None:
        return {}
    return {
        "batchnorm/running_mean_divergence": divergence.mean,
        "batchnorm/running_var_divergence": divergence.variance,
    }


def validation_scalars(run: Run) -> dict[str, float]:
    """Validate, with running statistics that are pooled; the time does not count as training time."""
    assert run.validation_batches is not None, "config.rules demands validation.data with validation.freq"
    with run.meter.paused(), dtype_failures_explained(run.model, run.plan, run.config.precision):
        return validate(run.model, run.validation_batches, run.ranks.device, run.config.training.loss_chunks)


def save(run: Run) -> None:
    """Write a checkpoint of a step that was reported: its guard is settled, and its running statistics are pooled. The
    time does not count as training time."""
    assert run.checkpoints is not None
    clear_progress(run)
    with run.meter.paused():
        run.checkpoints.save()
