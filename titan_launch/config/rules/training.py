"""Rules across sections for the optimizer, checkpoints and profiles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from titan_launch.config.job import JobConfig
from titan_launch.config.optimizers import ALGORITHMS
from titan_launch.config.rules.tables import changed_keys
from titan_launch.config.sections.checkpoint import LOAD_KEYWORDS
from titan_launch.core.errors import KeyPath, Problem, did_you_mean, format_key
from titan_launch.core.files import weights_folder_around
from titan_launch.core.terminal import counted
from titan_launch.models.architectures import ARCHITECTURES, known_args

_NAME: KeyPath = ("optimizer", "name")
_GROUPS: KeyPath = ("optimizer", "param_groups")
_LOAD: KeyPath = ("checkpoint", "load")


def profile_is_in_the_run(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if the profile would end after the last step of the run."""
    profiling, training, start = config.profiling, config.training, config.profiling.start_step
    if start is not None and training.steps is not None and start + profiling.num_steps - 1 > training.steps:
        length = f"the run ends after step {training.steps} ({format_key(training.length_key)})"
        remedy = "set a smaller start_step or num_steps"
        reason = f"begins a profile of {counted(profiling.num_steps, 'step')}, but {length}; {remedy}"
        yield Problem(("profiling", "start_step"), reason, start, also=(training.length_key,))


def profiled_ranks_exist(config: JobConfig, world_size: int) -> Iterator[Problem]:
    """Report a problem if `profiling.ranks` has a rank that the run never has. `world_size`: largest number of ranks.
    (RULES does not contain this rule, because a run may restart with fewer ranks.)"""
    for index, rank in enumerate(config.profiling.ranks):
        if rank >= world_size:
            reason = f"the run has at most {counted(world_size, 'rank')}; set a number from 0 to {world_size - 1}"
            yield Problem(("profiling", "ranks", index), reason, rank)


def weights_are_never_written_to(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if the run folder or the cache of compiled kernels is a folder with weights, or is inside of
    such a folder."""
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


def settings_are_of_a_used_algorithm(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each setting of an algorithm that updates no parameter of the job."""
    read = {setting for name in config.optimizer.algorithms() for setting in ALGORITHMS[name].settings}
    for algorithm, row in ALGORITHMS.items():
        reason = (
            f"is a setting of {algorithm}, which updates no parameter of this job; remove this key, set "
            f'optimizer.name = "{algorithm}", or set algorithm = "{algorithm}" in a parameter group'
        )
        for setting in row.settings:
            for key, value in changed_keys(config, f"optimizer.{setting}") if setting not in read else ():
                yield Problem(key, reason, value, also=(_NAME, _GROUPS))
        read |= {*row.settings}


def implementation_is_pytorchs(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `optimizer.implementation` is not the default, `fused`, and the job has a setting that
    PyTorch's optimizers do not support."""
    optimizer = config.optimizer
    chosen, _ = next(optimizer.changed("state_dtype", "rounding", "master_weights"), (None, None))
    if optimizer.implementation != "fused" and chosen is not None:
        reason = f"is PyTorch's implementation, which does not support {chosen}; remove one of the two keys"
        yield Problem(("optimizer", "implementation"), reason, optimizer.implementation, also=(("optimizer", chosen),))


def average_is_updated_in_the_run(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if the run ends before the first update of the moving average."""
    ema, training = config.ema, config.training
    if ema.decay is None or training.steps is None:
        return
    if ema.first_update > training.steps:
        name = "every_steps" if ema.every_steps > training.steps else "start_step"
        length = f"{counted(training.steps, 'step')} ({format_key(training.length_key)})"
        reason = f"is so large that the average is never updated in the run of {length}; set a smaller number"
        yield Problem(("ema", name), reason, getattr(ema, name), also=(training.length_key,))


def width_is_scaled(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if muP has no rule for the model, its width, its adapters or the optimizer of the job."""
    base, key, args = config.mup.base_width, ("mup", "base_width"), known_args(config.model)
    if base is None or (args is None and config.model.name in ARCHITECTURES):
        return
    width = None if args is None else args.width()
    if args is None or width is None:
        reason = f"is for the decoder families of this package, not for {config.model.name}; remove this key"
        yield Problem(key, reason, base, also=(("model", "name"),))
        return
    if width % base and base % width:
        reason = f"must be a divisor or a multiple of the model's width, {width}"
        yield Problem(key, reason, base, also=(("model", "args", "dim"), ("model", "flavor")))
    for what in args.beyond_mup():
        reason = f"muP has no rule for {what}{'' if ';' in what else '; remove this key'}"
        yield Problem(key, reason, base, also=(("model", "name"), ("model", "args")))
    if config.lora.targets:
        reason = "muP has no rule for adapters; remove lora.targets, or this key"
        yield Problem(key, reason, base, also=(("lora", "targets"),))
    if others := sorted(config.optimizer.algorithms() - {"AdamW"}):
        reason = (
            f'muP has no rule for {others[0]}; set optimizer.name = "AdamW", and remove algorithm from parameter groups'
        )
        yield Problem(key, reason, base, also=(_NAME, _GROUPS))


TRAINING_RULES = (
    profile_is_in_the_run,
    weights_are_never_written_to,
    load_is_a_word_or_a_path,
    settings_are_of_a_used_algorithm,
    implementation_is_pytorchs,
    average_is_updated_in_the_run,
    width_is_scaled,
)
