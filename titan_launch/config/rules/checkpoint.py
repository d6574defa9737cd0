"""Rules across sections for checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import KeyPath, Problem, did_you_mean
from titan_launch.core.files import weights_folder_around
from titan_launch.core.object_store import is_url

_LOAD: KeyPath = ("checkpoint", "load")

LOAD_KEYWORDS = ("latest", "none")
"""Values of `checkpoint.load` that name no checkpoint."""


def weights_are_never_written_to(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if the run folder or the cache of compiled kernels is a folder with weights, or is inside of
    one."""
    folders: list[tuple[KeyPath, str, Path]] = [(("job", "dump_folder"), config.job.dump_folder, config.job.run_folder)]
    if config.compile.cache_folder is not None:
        folders.append((("compile", "cache_folder"), config.compile.cache_folder, Path(config.compile.cache_folder)))
    for key, value, path in folders:
        if (found := weights_folder_around(path)) is not None:
            reason = (
                f"{path} is in {found}, a folder with weights (*.safetensors); nothing is written into such a folder; "
                "choose another folder"
            )
            yield Problem(key, reason, value, also=(("job", "name"),))


def early_stopping_has_a_result(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `validation.patience` is set, but the run has no validations, saves no checkpoints, or does
    not keep the best one."""
    validation, checkpoint = config.validation, config.checkpoint
    if validation.patience is None:
        return
    requirements: list[tuple[KeyPath, bool, str]] = [
        (("validation", "freq"), validation.freq > 0, "validation.freq to the steps between validations"),
        (("checkpoint", "enable"), checkpoint.enable, "checkpoint.enable = true"),
        (("checkpoint", "keep_best"), checkpoint.keep_best > 0, "checkpoint.keep_best = 1"),
    ]
    missing = [remedy for _, is_met, remedy in requirements if not is_met]
    if missing:
        needs = "ends the run with its best checkpoint as the result, which needs validations and checkpoints"
        reason = f"{needs}; set {', and '.join(missing)}"
        yield Problem(("validation", "patience"), reason, validation.patience, tuple(key for key, *_ in requirements))


def load_is_a_word_or_a_path(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `checkpoint.load` is a number below 1, or a word that is neither a keyword nor an existing
    path. (A text with `/` is always taken as a path. The run reports a missing one when it loads the checkpoint.)"""
    load = config.checkpoint.load
    if isinstance(load, int) and load < 1:
        yield Problem(_LOAD, 'must be "latest", "none", a step (at least 1), or a path', load)
    if isinstance(load, str) and load not in LOAD_KEYWORDS and os.sep not in load and not os.path.exists(load):
        reason = f'must be "latest", "none", a step, or an existing path{did_you_mean(load, LOAD_KEYWORDS)}'
        yield Problem(_LOAD, reason, load)


def store_is_a_url(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `checkpoint.store` is not the URL of an object store, or if the run saves no checkpoint."""
    store, key = config.checkpoint.store, ("checkpoint", "store")
    if store is None:
        return
    if not is_url(store):
        reason = "must be the URL of a folder in an object store: s3://BUCKET/FOLDER or gs://BUCKET/FOLDER"
        yield Problem(key, reason, store)
    if not config.checkpoint.enable and not config.checkpoint.save_last:
        reason = "has no effect without checkpoints; set checkpoint.enable = true, or remove this key"
        yield Problem(key, reason, store, also=(("checkpoint", "enable"), ("checkpoint", "save_last")))


CHECKPOINT_RULES = (
    weights_are_never_written_to,
    early_stopping_has_a_result,
    load_is_a_word_or_a_path,
    store_is_a_url,
)
