"""Rules across sections for checkpoints, skipped steps and hang detection."""

from __future__ import annotations

import os
from collections.abc import Iterator

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import KeyPath, Problem, did_you_mean

_ENABLE: KeyPath = ("checkpoint", "enable")
_LOAD: KeyPath = ("checkpoint", "load")
_INITIAL, _EXCLUDE = ("checkpoint", "initial_load_path"), ("checkpoint", "exclude_from_loading")
_KEYWORDS = ("latest", "none")


def checkpoints_include_the_last(config: JobConfig) -> Iterator[Problem]:
    """A run with `checkpoint.enable` always saves its last step."""
    if config.checkpoint.enable and not config.checkpoint.save_last:
        reason = "checkpoint.enable = true always saves the last step; set this to true, or checkpoint.enable = false"
        yield Problem(("checkpoint", "save_last"), reason, config.checkpoint.save_last, also=(_ENABLE,))


def best_checkpoints_are_validated(config: JobConfig) -> Iterator[Problem]:
    """Only a step that is validated and saved can be among the best."""
    checkpoint, freq = config.checkpoint, config.validation.freq
    if not checkpoint.keep_best or not checkpoint.enable:
        return
    also = (("validation", "freq"), ("checkpoint", "interval"))
    if not freq:
        reason = "needs the validation loss, and validation.freq = 0 never validates"
        yield Problem(("checkpoint", "keep_best"), reason, checkpoint.keep_best, also=also)
    elif checkpoint.interval % freq and freq % checkpoint.interval:
        reason = (
            "counts steps that are both saved and validated, which with checkpoint.interval = "
            f"{checkpoint.interval} and validation.freq = {freq} few are; make one a multiple of the other"
        )
        yield Problem(("checkpoint", "keep_best"), reason, checkpoint.keep_best, also=also)


def a_step_is_loaded_from_checkpoints(config: JobConfig) -> Iterator[Problem]:
    """Without `checkpoint.enable` the run's folder is never resumed from."""
    if isinstance(config.checkpoint.load, int) and not config.checkpoint.enable:
        reason = "resumes the run's own checkpoints, and checkpoint.enable is false; set it"
        yield Problem(_LOAD, reason, config.checkpoint.load, also=(_ENABLE,))


def load_is_a_word_or_a_path(config: JobConfig) -> Iterator[Problem]:
    """A misspelt word would be taken for a path."""
    load = config.checkpoint.load
    if isinstance(load, int) and load < 1:
        yield Problem(_LOAD, 'there is "latest", "none", a step (at least 1), or a path', load)
    if isinstance(load, str) and load not in _KEYWORDS and os.sep not in load and not os.path.exists(load):
        reason = f'there is "latest", "none", a step, or a path, and no such path exists{did_you_mean(load, _KEYWORDS)}'
        yield Problem(_LOAD, reason, load)


def a_run_begins_in_one_place(config: JobConfig) -> Iterator[Problem]:
    """`initial_load_path` is for runs that nothing else is loaded for."""
    checkpoint = config.checkpoint
    if checkpoint.initial_load_path is not None and checkpoint.load not in _KEYWORDS:
        reason = "is where a new run's parameters come from, but checkpoint.load already names a checkpoint; drop one"
        yield Problem(_INITIAL, reason, checkpoint.initial_load_path, also=(_LOAD,))


def something_is_loaded_to_exclude_from(config: JobConfig) -> Iterator[Problem]:
    """A run that goes on from its own latest checkpoint takes everything."""
    checkpoint = config.checkpoint
    if checkpoint.exclude_from_loading and checkpoint.initial_load_path is None and checkpoint.load in _KEYWORDS:
        reason = (
            "is for a checkpoint that checkpoint.initial_load_path, or checkpoint.load with a step or a path, names; "
            f'with load = "{checkpoint.load}" there is none'
        )
        yield Problem(_EXCLUDE, reason, list(checkpoint.exclude_from_loading), also=(_LOAD, _INITIAL))


def steps_of_a_folder_only_grow(config: JobConfig) -> Iterator[Problem]:
    """Checkpoints of steps before the one that was loaded would pass for newer ones than those of this start."""
    checkpoint = config.checkpoint
    if isinstance(checkpoint.load, int) and "step" in checkpoint.exclude_from_loading:
        reason = (
            'has "step", so the run would count from 0 in a folder that has a checkpoint of step '
            f'{checkpoint.load}; begin in another with checkpoint.load = ".../checkpoints/step-{checkpoint.load}"'
        )
        yield Problem(_EXCLUDE, reason, list(checkpoint.exclude_from_loading), also=(_LOAD,))


CHECKPOINT_RULES = (
    checkpoints_include_the_last,
    best_checkpoints_are_validated,
    a_step_is_loaded_from_checkpoints,
    load_is_a_word_or_a_path,
    a_run_begins_in_one_place,
    something_is_loaded_to_exclude_from,
    steps_of_a_folder_only_grow,
)


_REPEATED: KeyPath = ("debug", "on_repeated_skips")
_TIMEOUT: KeyPath = ("comm", "timeout_seconds")


def rollback_has_checkpoints(config: JobConfig) -> Iterator[Problem]:
    """Without checkpoints there is none to go back to."""
    if config.debug.on_repeated_skips == "rollback" and not config.checkpoint.enable:
        reason = 'goes back to the last checkpoint; set checkpoint.enable = true, or "stop"'
        yield Problem(_REPEATED, reason, config.debug.on_repeated_skips, also=(_ENABLE,))


def rollback_can_be_reached(config: JobConfig) -> Iterator[Problem]:
    """Several steps are skipped in a row only if the first skipped step does not end the run."""
    debug = config.debug
    if debug.on_repeated_skips == "rollback" and debug.on_nonfinite == "stop" and debug.spike_sigma is None:
        reason = (
            'is never reached: debug.on_nonfinite = "stop" ends the run at the first skipped step; '
            'set that to "skip", or debug.spike_sigma'
        )
        also: tuple[KeyPath, ...] = (("debug", "on_nonfinite"), ("debug", "spike_sigma"))
        yield Problem(_REPEATED, reason, debug.on_repeated_skips, also=also)


def start_has_no_less_time(config: JobConfig) -> Iterator[Problem]:
    """The first step includes all that others do."""
    comm = config.comm
    if comm.init_timeout_seconds < comm.timeout_seconds:
        reason = f"must be at least comm.timeout_seconds ({comm.timeout_seconds}): the first step takes the longest"
        yield Problem(("comm", "init_timeout_seconds"), reason, comm.init_timeout_seconds, also=(_TIMEOUT,))


def hangs_are_seen_before_the_timeout(config: JobConfig) -> Iterator[Problem]:
    """What a rank waits for is found out while it still waits."""
    comm = config.comm
    if comm.hang_seconds is not None and comm.hang_seconds >= comm.timeout_seconds:
        reason = (
            f"must be below comm.timeout_seconds ({comm.timeout_seconds}), which ends the run before anybody looks; "
            "leave it out for half of that"
        )
        yield Problem(("comm", "hang_seconds"), reason, comm.hang_seconds, also=(_TIMEOUT,))


FAULT_RULES = (
    rollback_has_checkpoints,
    rollback_can_be_reached,
    start_has_no_less_time,
    hangs_are_seen_before_the_timeout,
)
"""All of them."""
