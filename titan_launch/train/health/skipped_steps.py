"""Records of skipped steps and their samples, and the reaction of a run to too many skipped steps."""

from __future__ import annotations

import json
import logging
import math
from functools import partial
from typing import Any

from titan_launch.core.errors import RunError
from titan_launch.data.loader import samples_of_step
from titan_launch.distributed.collectives import on_all_ranks, on_rank_0
from titan_launch.distributed.process_group import set_timeouts
from titan_launch.metrics.sinks.jsonl import json_number
from titan_launch.train.health.step_guard import SkippedStep
from titan_launch.train.run import Run

_log = logging.getLogger(__name__)

FOLDER = "skipped_steps"
"""Folder of the records of skipped steps, in the run folder."""

MAX_RECORDS = 100
"""Maximum number of recorded steps. A step that ends the run, or starts a rollback, is recorded beyond this limit."""

_CAUSES = "Usual causes: optimizer.lr too high, training.max_norm = 0, a precision rule that computes sums in bfloat16"


def act_on_skipped_steps(run: Run) -> bool:
    """Record and count the steps skipped since the last call. If the job allows no further skipped step, stop the run
    or go back to a checkpoint. Return True if the run went back to a checkpoint. Raises RunError if the run stops. The
    host waits for the device. Collective if a step was skipped."""
    new_steps = run.step.guard.pop_skipped_steps(run.progress.step)
    if not new_steps:
        return False
    by_rank = on_all_ranks(lambda: [skipped.own_loss for skipped in new_steps])
    run.progress.skipped_steps += len(new_steps)
    for skipped, losses in zip(new_steps, map(list, zip(*by_rank, strict=True)), strict=True):
        recorded = on_rank_0(partial(_record, run, skipped, losses))
        if skipped.is_last:
            _stop_or_go_back(run, skipped, _describe(run, skipped, losses), recorded)
            return True
        if run.ranks.is_rank_0:
            _log.warning("%s; the step was skipped. %s", _describe(run, skipped, losses), recorded)
    return False


def _stop_or_go_back(run: Run, skipped: SkippedStep, what: str, recorded: str) -> None:
    """Go back to a checkpoint or raise RunError, as `[debug]` demands. `skipped`: the step with `is_last`. `what`:
    clause that says why the step was skipped. `recorded`: the result of `_record`."""
    debug = run.config.debug
    if skipped.reason == "nonfinite" and debug.on_nonfinite == "stop":
        raise RunError(
            f"{what}; the step was skipped on all ranks and the run stops "
            f'(debug.on_nonfinite = "skip" continues instead). {_CAUSES}. {recorded}'
        )
    what = f"{what}; the limit of skipped steps in a row is reached (debug.max_skips = {debug.max_skips})"
    if debug.on_repeated_skips == "stop":
        raise RunError(f"{what}, and the run stops. {_CAUSES}. {recorded}")
    if run.progress.rollbacks >= debug.max_rollbacks:
        times = "once" if debug.max_rollbacks == 1 else f"{debug.max_rollbacks} times"
        raise RunError(
            f"{what}, and the run stops: it has gone back to a checkpoint {times} already (debug.max_rollbacks = "
            f"{debug.max_rollbacks}). {_CAUSES}. {recorded}"
        )
    _go_back(run, f"{what}. {recorded}")


def _go_back(run: Run, reason: str) -> None:
    """Load the newest checkpoint and continue from it, but with the data that follows the current step. Collective.
    Raises RunError if there is no checkpoint. `reason`: text that says why the run goes back, without a full stop."""
    assert run.checkpoints is not None, "config.rules demands checkpoint.enable for debug.on_repeated_skips"
    progress = run.progress
    position, rollbacks = progress.data_position, progress.rollbacks
    run.watchdog.enter("returning to a checkpoint", progress.step, is_slow=True)
    with run.observers.meter.paused("checkpoint"):
        set_timeouts(run.config.comm.init_timeout_seconds)
        checkpoint = run.checkpoints.return_to_last()
        if run.watchdog.is_warm:
            set_timeouts(run.config.comm.timeout_seconds)
        if checkpoint is None:
            raise RunError(
                f"{reason}. The run stops, because it has saved no checkpoint since its start; set a smaller "
                "checkpoint.interval (a checkpoint loaded with checkpoint.exclude_from_loading does not count)"
            )
        # The checkpoint may be older than a start that excluded the position in the data from loading.
        progress.samples_seen = min(progress.samples_seen, position)
        progress.samples_skipped = position - progress.samples_seen
        progress.rollbacks = rollbacks + 1
        run.step.parameters_changed()
        run.step.guard.reset_skips()
        if run.batches.indexed is not None:  # a stream has not gone back, so it continues anyway
            run.batches.indexed.move_to(position)
    run.observers.meter.restart_window()
    run.step.experts.restart_window()
    for sink in run.output.sinks:
        sink.rewind(progress.step)
    run.observers.measurements.end_window(progress.step, only_training=False)
    if run.ranks.is_rank_0:
        _log.warning(
            "%s. The run goes back to %s and continues with the samples from position %d (rollback %d of at most %d)",
            reason,
            checkpoint,
            position,
            progress.rollbacks,
            run.config.debug.max_rollbacks,
        )


def _describe(run: Run, skipped: SkippedStep, losses: list[float]) -> str:
    """Return a clause that says why a step was skipped, without the reaction of the run. `losses`: each rank's part of
    the loss. The parts sum to the loss."""
    if skipped.reason == "nonfinite":
        ranks = [str(rank) for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        where = f", on rank {', '.join(ranks)}" if ranks else ""
        return (
            f"step {skipped.step}: the loss or the gradient is not finite "
            f"(loss {skipped.loss:g}{where}; gradient norm {skipped.grad_norm:g})"
        )
    over = [
        f"{name} {value:.4g} is above {limit:.4g}"
        for name, value, limit in (
            ("the loss", skipped.loss, skipped.loss_limit),
            ("the gradient norm", skipped.grad_norm, skipped.grad_norm_limit),
        )
        if value > limit
    ]
    debug = run.config.debug
    return (
        f"step {skipped.step} is a spike: {' and '.join(over)} "
        f"(mean + {debug.spike_sigma:g} standard deviations of at most {debug.spike_window} earlier steps)"
    )


def _record(run: Run, skipped: SkippedStep, losses: list[float]) -> str:
    """Write the numbers and samples of a step to the run folder, on one rank. Return a sentence that names the file, or
    says why no file was written."""
    folder = run.output.folder.path / FOLDER
    # After a rollback the same step has other samples, and another file.
    rollback = f".rollback-{run.progress.rollbacks}" if run.progress.rollbacks else ""
    path = folder / f"step-{skipped.step}{rollback}.json"
    content = "numbers" if run.batches.indexed is None else "samples"
    try:
        folder.mkdir(exist_ok=True)
        if not skipped.is_last and not path.exists() and sum(1 for _ in folder.iterdir()) >= MAX_RECORDS:
            return f"The {content} of the step are not recorded: {folder} has {MAX_RECORDS} files already"
        path.write_text(json.dumps(_to_json(run, skipped, losses), indent=2, allow_nan=False) + "\n")
    except OSError as error:
        return f"The {content} of the step could not be written to {path}: {error.strerror}"
    return f"The {content} of the step are in {path}"


def _to_json(run: Run, skipped: SkippedStep, losses: list[float]) -> dict[str, Any]:
    batch = run.job.layout.global_batch_size
    position = run.progress.data_position - (run.progress.step - skipped.step + 1) * batch
    samples: list[Any] = [None] * run.job.layout.data_parallel  # a stream has no sample indices
    if run.batches.indexed is not None:
        samples = samples_of_step(run.batches.order, run.job.layout, position)
    return {
        "step": skipped.step,
        "reason": skipped.reason,
        "loss": json_number(skipped.loss),
        "grad_norm": json_number(skipped.grad_norm),
        "loss_limit": json_number(skipped.loss_limit),
        "grad_norm_limit": json_number(skipped.grad_norm_limit),
        "data_position": position,
        "ranks": [
            {"rank": rank, "loss": json_number(loss), "samples": samples[run.job.layout.data_rank(rank)]}
            for rank, loss in enumerate(losses)
        ],
    }
