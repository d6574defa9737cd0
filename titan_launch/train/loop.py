"""The training loop."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from titan_launch.checkpoint.manifest import checkpoint_name
from titan_launch.core.errors import Stopped
from titan_launch.core.signals import RESTART_SIGNAL, RESTART_STATUS, signal_name
from titan_launch.distributed.collectives import on_all_ranks
from titan_launch.distributed.process_group import set_timeouts
from titan_launch.models.parallel_plans import shapes_explained
from titan_launch.optim.schedule import describe_clipping, lr_factor, set_lr
from titan_launch.parallel.batchnorm import largest_divergence, pool_running_statistics
from titan_launch.parallel.pipeline import parts
from titan_launch.precision.diagnosis import dtype_failures_explained
from titan_launch.train.audit import audited_step, audits, is_audited
from titan_launch.train.health.skipped_steps import act_on_skipped_steps
from titan_launch.train.kernel_choice import attention_failures_explained
from titan_launch.train.measure import MEASURED
from titan_launch.train.run import Run
from titan_launch.train.run_folder.folder import checkpoint_folder
from titan_launch.train.run_folder.resume import NOTHING_SAVED, SAME_COMMAND, how_to_resume
from titan_launch.train.step import StepResult
from titan_launch.train.validate import validate


@contextmanager
def scheduled_garbage_collection(every_steps: int) -> Iterator[Callable[[int], None]]:
    """Switch automatic collection off and yield a function of the step that collects on every `every_steps`-th.

    Left to itself each rank collects at another moment, and every pause holds up all ranks at the next collective.
    What start-up has made is frozen, so that the collections have little to look at.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield lambda step: _collect_young(step, every_steps)
    finally:
        gc.enable()
        gc.unfreeze()


def _collect_young(step: int, every_steps: int) -> None:
    if step % every_steps == 0:
        gc.collect(1)


_log = logging.getLogger(__name__)


def fit(run: Run) -> None:
    """Train until `training.steps` are done, reporting, validating and saving on the way."""
    last = run.config.training.steps
    if run.progress.step >= last:
        _log.info("nothing to do: the run is at step %d of %d; raise training.steps to go on", run.progress.step, last)
        return
    if clipping := describe_clipping(run.config.lr_scheduler, last):
        _log.info("%s", clipping)
    with scheduled_garbage_collection(run.config.training.gc_freq) as collect_garbage:
        run.control.agree()  # a signal may have come while the run was built
        while run.progress.step < last and not run.control.stop_signal:
            result = train_one_step(run)
            run.watchdog.enter("agreeing and reporting", run.progress.step)
            run.control.agree()
            if is_settled_step(run) and act_on_skipped_steps(run):
                continue  # back at the step of a checkpoint
            scalars = report(run, result) if is_report_step(run) else {}
            if is_checkpoint_step(run):
                save(run, scalars.get("validation/loss"))
            elif run.checkpoints is not None:
                run.checkpoints.poll()
            if run.progress.step == last_warm_up_step(run):
                end_warm_up(run)
            collect_garbage(run.progress.step)
    run.watchdog.enter("ending", run.progress.step, is_slow=True)
    if run.checkpoints is not None:
        run.checkpoints.finish()
    clear_progress(run)
    _log.info("%s", ending(run))


def ending(run: Run) -> str:
    """Describe how the run ended. Raises Stopped where a signal has ended the run and that is not success: its steps
    are lost, since nothing is saved, or all ranks are to be started again."""
    step, last, number = run.progress.step, run.config.training.steps, run.control.stop_signal
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
    return f"{stopped}, which is saved; to resume, {how_to_resume(run.config)}"


def result(run: Run) -> str:
    """Describe where the result of a finished run is."""
    if run.checkpoints is None:
        return f"{NOTHING_SAVED}; the reports are in {run.folder}"
    return f"the result is {checkpoint_folder(run.folder) / checkpoint_name(run.progress.step)}"


def train_one_step(run: Run) -> StepResult:
    """Fetch a step's microbatches, train on them, and advance the run."""
    step = run.progress.step + 1
    run.watchdog.enter("loading data", step)
    with run.meter.loading():
        microbatches = [next(run.train_batches) for _ in range(run.layout.num_microbatches)]
    run.watchdog.enter("forward, backward and update", step)
    set_lr(run.optimizer, run.config.optimizer.lr, current_lr_factor(run, step))
    with (
        failures_explained(run),
        run.measurements.watching(step, microbatches),
    ):
        result = audited_step(run, microbatches) if is_audited(run) else run.step(microbatches)
    run.progress.step = step
    run.progress.samples_seen += run.layout.global_batch_size
    run.meter.end_step(result.valid_global)
    if run.console is not None:
        run.console.progress(step)
    return result


def last_warm_up_step(run: Run) -> int:
    """The first step of this process, or the one after it where that compiles what an audited step has not."""
    return run.first_step + (run.config.compile.enable and audits(run))


@contextmanager
def failures_explained(run: Run) -> Iterator[None]:
    """Run forwards and backwards: errors that dtypes, divided matrices, or a backend of attention explain are raised
    as ConfigError."""
    with ExitStack() as stack:
        stack.enter_context(attention_failures_explained(run.config.kernels))
        stack.enter_context(shapes_explained(run.config.model, run.layout.tensor))
        for module, plan in parts(run.model, run.plan):
            stack.enter_context(dtype_failures_explained(module, plan, run.config.precision))
        yield


def end_warm_up(run: Run) -> None:
    """The first steps of this process are done on all ranks, and with them what takes longer than later."""
    if run.checkpoints is not None and run.config.checkpoint.enable:
        run.checkpoints.get_ready()
    set_timeouts(run.config.comm.timeout_seconds)
    run.watchdog.end_warm_up()


def current_lr_factor(run: Run, step: int) -> float:
    """The schedule's value at a step, as a fraction of the peak."""
    return lr_factor(run.config.lr_scheduler, step, run.config.training.steps)


def is_validation_step(run: Run) -> bool:
    """Return True every `validation.freq` steps, and for the last step. The step after which a signal ends the run is
    not validated: the time until the scheduler kills the run is short, and the checkpoint needs it."""
    freq, step = run.config.validation.freq, run.progress.step
    return freq > 0 and (is_last_step(run) or (step % freq == 0 and not run.control.stop_signal))


def is_report_step(run: Run) -> bool:
    """Return True for the first step of this process, every `metrics.log_freq` steps, the last step, and a step that is
    validated or saved."""
    step = run.progress.step
    regular = step % run.config.metrics.log_freq == 0 or is_last_step(run)
    return regular or step == run.first_step or needs_pooled_statistics(run)


def is_settled_step(run: Run) -> bool:
    """Where it is looked whether the step's update was left out: at every step on a CPU, where looking costs nothing;
    on CUDA, where it makes the host wait, at every report."""
    return run.ranks.device.type == "cpu" or is_report_step(run)


def is_checkpoint_step(run: Run) -> bool:
    """Return True for the last step, for the step after which a signal ends the run, and with `checkpoint.enable` also
    every `checkpoint.interval` steps or `interval_minutes`."""
    if run.checkpoints is None:
        return False
    if run.config.checkpoint.enable:
        return is_regular_checkpoint(run) or run.control.save_is_due or run.control.stop_signal != 0
    # Before a restart nothing is saved: a run without checkpoint.enable would not resume from it.
    return is_last_step(run) or run.control.stop_signal not in (0, RESTART_SIGNAL)


def is_regular_checkpoint(run: Run) -> bool:
    """Return True for a step that an undisturbed run saves whatever the clock says."""
    if run.checkpoints is None:
        return False
    config = run.config.checkpoint
    return is_last_step(run) or (config.enable and run.progress.step % config.interval == 0)


def is_last_step(run: Run) -> bool:
    """Return True at step `training.steps`."""
    return run.progress.step == run.config.training.steps


def needs_pooled_statistics(run: Run) -> bool:
    """Where there is a validation or a checkpoint, which are of one model."""
    return is_validation_step(run) or is_checkpoint_step(run)


def pools_anyway(run: Run) -> bool:
    """Return True if an undisturbed run pools at this step too, because it saves or validates there. A checkpoint by
    the clock, or before a signal's end, must not change the steps that follow."""
    freq = run.config.validation.freq
    return is_regular_checkpoint(run) or (freq > 0 and (is_last_step(run) or run.progress.step % freq == 0))


def clear_progress(run: Run) -> None:
    """Take the progress bar away before something else is printed."""
    if run.console is not None:
        run.console.clear()


def report(run: Run, result: StepResult) -> dict[str, float]:
    """Bring the step's numbers, and those of the window since the last report, to the host and to the writers. Returns
    them by tag; those of a single rank are this rank's."""
    step = run.progress.step
    scalars = run.meter.report(
        loss_sum=result.loss_sum,
        valid_local=result.valid_local,
        valid_global=result.valid_global,
        grad_norm=result.grad_norm,
        measured=run.measurements.take() | checkpoint_measurements(run),
    )
    if run.memory_check is not None:
        is_measured = run.measurements.is_steady or run.ranks.device.type == "cpu"
        scalars |= run.memory_check.scalars(scalars.get(MEASURED) if is_measured else None)
    scalars["train/lr"] = run.config.optimizer.lr * current_lr_factor(run, step)
    scalars["train/samples_seen"] = run.progress.samples_seen
    scalars["train/epoch"] = run.progress.data_position / run.epoch_size
    scalars["train/skipped_steps"] = run.progress.skipped_steps
    scalars["train/rollbacks"] = run.progress.rollbacks
    if needs_pooled_statistics(run):
        if not pools_anyway(run):
            run.state.local_statistics.keep()
        scalars |= pool_statistics(run)
    if is_validation_step(run):
        scalars |= validation_scalars(run)
    run.measurements.end_window(step, only_training=not needs_pooled_statistics(run))
    run.held_folder.check()
    for sink in run.sinks:
        sink.write(step, scalars)
    return scalars


def checkpoint_measurements(run: Run) -> dict[str, float]:
    """Return what checkpoints have cost since the last report; nothing for a run that saves only its last step."""
    return run.checkpoints.take_measurements() if run.checkpoints and run.config.checkpoint.enable else {}


def pool_statistics(run: Run) -> dict[str, float]:
    """Give all ranks the same running statistics, once a step; how far they were apart. The time does not count as
    training time."""
    with run.meter.paused():
        divergence = pool_running_statistics(run.model, run.mesh.data_group)
        if run.mesh.pipeline_group is not None:
            divergence = largest_divergence(on_all_ranks(lambda: divergence, run.mesh.pipeline_group))
    if divergence is None:
        return {}
    return {
        "batchnorm/running_mean_divergence": divergence.mean,
        "batchnorm/running_var_divergence": divergence.variance,
    }


def validation_scalars(run: Run) -> dict[str, float]:
    """Validate, with running statistics that are pooled; the time does not count as training time."""
    assert run.validation_batches is not None, "config.rules demands validation.data with validation.freq"
    batches = run.watchdog.each_batch_as_phase(run.validation_batches, "validating", run.progress.step)
    with run.meter.paused(), failures_explained(run):
        return validate(run.model, batches, run.ranks.device, run.step.loss)


def save(run: Run, validation_loss: float | None = None) -> None:
    """Begin a checkpoint of a step that was reported: its guard is settled, and its running statistics are pooled. The
    time that training waits for it does not count as training time."""
    assert run.checkpoints is not None
    clear_progress(run)
    run.watchdog.enter("saving a checkpoint", run.progress.step, is_slow=True)
    with run.meter.paused():
        run.checkpoints.save(validation_loss)
    run.state.local_statistics.restore()
    run.control.saved()
