"""Rules across sections for checkpoints, skipped steps and hang detection."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import KeyPath, Problem, did_you_mean
from titan_launch.core.files import weights_folder_around

_ENABLE: KeyPath = ("checkpoint", "enable")
_LOAD: KeyPath = ("checkpoint", "load")
_PATIENCE: KeyPath = ("validation", "patience")
_INITIAL, _EXCLUDE = ("checkpoint", "initial_load_path"), ("checkpoint", "exclude_from_loading")
_KEYWORDS = ("latest", "none")


def last_step_is_saved(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `save_last` is false but `checkpoint.enable` is true, which always saves the last step."""
    if config.checkpoint.enable and not config.checkpoint.save_last:
        reason = "checkpoint.enable = true always saves the last step; set true, or checkpoint.enable = false"
        yield Problem(("checkpoint", "save_last"), reason, config.checkpoint.save_last, also=(_ENABLE,))


def weights_are_never_written_to(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if the run folder or the cache of compiled kernels is inside of a folder with weights."""
    folders: list[tuple[KeyPath, str, Path]] = [(("job", "dump_folder"), config.job.dump_folder, config.job.run_folder)]
    if config.compile.cache_folder is not None:
        folders.append((("compile", "cache_folder"), config.compile.cache_folder, Path(config.compile.cache_folder)))
    for key, value, path in folders:
        if (found := weights_folder_around(path)) is not None:
            reason = f"{path} is in {found}, which holds weights, and is never written to; choose another folder"
            yield Problem(key, reason, value, also=(("job", "name"),))


def best_checkpoints_are_validated(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `keep_best` is set, but few or no steps are both validated and saved. With
    `validation.patience` the steps that count are always saved."""
    checkpoint, freq = config.checkpoint, config.validation.freq
    if not checkpoint.keep_best or not checkpoint.enable:
        return
    also = (("validation", "freq"), ("checkpoint", "interval"))
    if not freq:
        reason = (
            "requires the validation loss, but validation.freq is 0; set validation.freq above 0, or set keep_best = 0"
        )
        yield Problem(("checkpoint", "keep_best"), reason, checkpoint.keep_best, also=also)
    elif config.validation.patience is None and checkpoint.interval % freq and freq % checkpoint.interval:
        reason = (
            f"counts only steps that are both saved (checkpoint.interval = {checkpoint.interval}) and validated "
            f"(validation.freq = {freq}), which are few; make one number a multiple of the other"
        )
        yield Problem(("checkpoint", "keep_best"), reason, checkpoint.keep_best, also=also)


def early_stopping_has_a_result(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `validation.patience` is set, but there are no validations, or the best checkpoint is not
    kept. Also report a problem for `min_improvement` without `patience`."""
    validation, checkpoint = config.validation, config.checkpoint
    if validation.patience is None:
        if validation.min_improvement:
            reason = "has no effect without validation.patience; set patience to a number of validations"
            yield Problem(("validation", "min_improvement"), reason, validation.min_improvement, also=(_PATIENCE,))
        return
    requirements: list[tuple[KeyPath, bool, str]] = [
        (("validation", "freq"), validation.freq > 0, "validation.freq to the steps between validations"),
        (_ENABLE, checkpoint.enable, "checkpoint.enable = true"),
        (("checkpoint", "keep_best"), checkpoint.keep_best > 0, "checkpoint.keep_best = 1"),
    ]
    missing = [remedy for _, is_met, remedy in requirements if not is_met]
    if missing:
        needs = "ends the run with its best checkpoint as the result, which needs validations and checkpoints"
        reason = f"{needs}; set {', and '.join(missing)}"
        yield Problem(_PATIENCE, reason, validation.patience, also=tuple(key for key, *_ in requirements))


def loaded_step_is_resumable(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `checkpoint.load` is a step but `checkpoint.enable` is false. Without `checkpoint.enable` a
    run never resumes from its own run folder."""
    if isinstance(config.checkpoint.load, int) and not config.checkpoint.enable:
        reason = "resumes from a checkpoint of this run, but checkpoint.enable is false; set checkpoint.enable = true"
        yield Problem(_LOAD, reason, config.checkpoint.load, also=(_ENABLE,))


def load_is_a_word_or_a_path(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `checkpoint.load` is neither a keyword, nor a step, nor an existing path."""
    load = config.checkpoint.load
    if isinstance(load, int) and load < 1:
        yield Problem(_LOAD, 'must be "latest", "none", a step (at least 1), or a path', load)
    if isinstance(load, str) and load not in _KEYWORDS and os.sep not in load and not os.path.exists(load):
        reason = f'must be "latest", "none", a step, or an existing path{did_you_mean(load, _KEYWORDS)}'
        yield Problem(_LOAD, reason, load)


def one_checkpoint_is_loaded(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `initial_load_path` and `checkpoint.load` both name a checkpoint."""
    checkpoint = config.checkpoint
    if checkpoint.initial_load_path is not None and checkpoint.load not in _KEYWORDS:
        reason = "names a checkpoint to start from, but checkpoint.load also names one; remove one of the two keys"
        yield Problem(_INITIAL, reason, checkpoint.initial_load_path, also=(_LOAD,))


def excluded_parts_have_a_checkpoint(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `exclude_from_loading` is set, but no key names a checkpoint to load. A run that resumes from
    its own latest checkpoint loads all parts."""
    checkpoint = config.checkpoint
    if checkpoint.exclude_from_loading and checkpoint.initial_load_path is None and checkpoint.load in _KEYWORDS:
        reason = (
            f'requires a named checkpoint, but checkpoint.load is "{checkpoint.load}"; set checkpoint.load to a step '
            "or a path, set checkpoint.initial_load_path, or remove this key"
        )
        yield Problem(_EXCLUDE, reason, list(checkpoint.exclude_from_loading), also=(_LOAD, _INITIAL))


def steps_of_a_run_only_grow(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `exclude_from_loading` contains "step" and `checkpoint.load` is a step.

    The run would start at step 0, so its checkpoints would have lower steps than the loaded checkpoint. The next resume
    would then take the loaded checkpoint as the newest one.
    """
    checkpoint = config.checkpoint
    if isinstance(checkpoint.load, int) and "step" in checkpoint.exclude_from_loading:
        reason = (
            'contains "step", so the run would start at step 0 in a run folder with a checkpoint of step '
            f'{checkpoint.load}; set another job.name, and checkpoint.load = ".../checkpoints/step-{checkpoint.load}"'
        )
        yield Problem(_EXCLUDE, reason, list(checkpoint.exclude_from_loading), also=(_LOAD,))


CHECKPOINT_RULES = (
    last_step_is_saved,
    weights_are_never_written_to,
    best_checkpoints_are_validated,
    early_stopping_has_a_result,
    loaded_step_is_resumable,
    load_is_a_word_or_a_path,
    one_checkpoint_is_loaded,
    excluded_parts_have_a_checkpoint,
    steps_of_a_run_only_grow,
)


_REPEATED: KeyPath = ("debug", "on_repeated_skips")
_TIMEOUT: KeyPath = ("comm", "timeout_seconds")


def rollback_has_checkpoints(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `on_repeated_skips` is "rollback" but `checkpoint.enable` is false."""
    if config.debug.on_repeated_skips == "rollback" and not config.checkpoint.enable:
        remedy = 'set checkpoint.enable = true, or set on_repeated_skips = "stop"'
        reason = f"requires checkpoints, but checkpoint.enable is false; {remedy}"
        yield Problem(_REPEATED, reason, config.debug.on_repeated_skips, also=(_ENABLE,))


def rollback_can_be_reached(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `on_repeated_skips` is "rollback" but the first skipped step ends the run."""
    debug = config.debug
    if debug.on_repeated_skips == "rollback" and debug.on_nonfinite == "stop" and debug.spike_sigma is None:
        reason = (
            'has no effect: debug.on_nonfinite = "stop" ends the run at the first skipped step; '
            'set debug.on_nonfinite = "skip", or debug.spike_sigma'
        )
        also: tuple[KeyPath, ...] = (("debug", "on_nonfinite"), ("debug", "spike_sigma"))
        yield Problem(_REPEATED, reason, debug.on_repeated_skips, also=also)


def start_has_no_less_time(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `comm.init_timeout_seconds` is below `comm.timeout_seconds`. The first step takes the
    longest, so its timeout must not be shorter."""
    comm = config.comm
    if comm.init_timeout_seconds < comm.timeout_seconds:
        reason = f"must be at least comm.timeout_seconds ({comm.timeout_seconds}): the first step takes the longest"
        yield Problem(("comm", "init_timeout_seconds"), reason, comm.init_timeout_seconds, also=(_TIMEOUT,))


def hangs_are_seen_before_the_timeout(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `comm.hang_seconds` is not below `comm.timeout_seconds`."""
    comm = config.comm
    if comm.hang_seconds is not None and comm.hang_seconds >= comm.timeout_seconds:
        reason = (
            f"must be below comm.timeout_seconds ({comm.timeout_seconds}), which would end the run before the hang is "
            "detected; remove this key to use half of comm.timeout_seconds"
        )
        yield Problem(("comm", "hang_seconds"), reason, comm.hang_seconds, also=(_TIMEOUT,))


HEALTH_RULES = (
    rollback_has_checkpoints,
    rollback_can_be_reached,
    start_has_no_less_time,
    hangs_are_seen_before_the_timeout,
)
"""Rules for skipped steps and hang detection."""
