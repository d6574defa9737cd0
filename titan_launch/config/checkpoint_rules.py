"""What keys of `[checkpoint]` must go with: part of `titan_launch.config.rules`."""

from __future__ import annotations

import os
from collections.abc import Iterator

from titan_launch.config.job import JobConfig
from titan_launch.errors import Problem, did_you_mean

_ENABLE, _LOAD = ("checkpoint", "enable"), ("checkpoint", "load")
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
