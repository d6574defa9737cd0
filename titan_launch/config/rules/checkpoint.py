"""Rules across sections for checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import KeyPath, Problem, did_you_mean
from titan_launch.core.files import weights_folder_around

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


def load_is_a_word_or_a_path(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `checkpoint.load` is a number below 1, or a word that is neither a keyword nor an existing
    path. (A text with `/` is always taken as a path. The run reports a missing path when it loads the checkpoint.)"""
    load = config.checkpoint.load
    if isinstance(load, int) and load < 1:
        yield Problem(_LOAD, 'must be "latest", "none", a step (at least 1), or a path', load)
    if isinstance(load, str) and load not in LOAD_KEYWORDS and os.sep not in load and not os.path.exists(load):
        reason = f'must be "latest", "none", a step, or an existing path{did_you_mean(load, LOAD_KEYWORDS)}'
        yield Problem(_LOAD, reason, load)


CHECKPOINT_RULES = (weights_are_never_written_to, load_is_a_word_or_a_path)
