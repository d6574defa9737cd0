"""The job of a command line, checked as far as that is possible without torch."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import LoadedJob, load_job
from titan_launch.core.errors import ConfigError, Problem, UserError
from titan_launch.core.import_string import refuse_imports_from
from titan_launch.plan.hardware import planned_device_exists


def load(arguments: Namespace, world_size: int | None, is_elastic: bool = False) -> LoadedJob:
    """Return the checked job. With a world size, also check how ranks and batch divide.

    `is_elastic`: the number of ranks may change from one start to the next.
    """

    def elastic_rule(config: JobConfig) -> Iterator[Problem]:
        if is_elastic and config.training.global_batch_size is None:
            reason = "is missing: it would follow from the number of ranks, which may change with --nnodes min:max"
            yield Problem(("training", "global_batch_size"), reason)

    def layout_rule(config: JobConfig) -> Iterator[Problem]:
        if world_size is None:
            return
        from titan_launch.plan.layout import plan_layout

        try:
            plan_layout(config.parallelism, config.training, world_size)
        except ConfigError as error:
            yield from error.problems

    rules = (planned_device_exists, elastic_rule, layout_rule)
    loaded = load_job(arguments.config, arguments.overrides, rules, arguments.key_options)
    checkpoint = loaded.config.checkpoint
    named = [path for path in (checkpoint.load, checkpoint.initial_load_path) if os.sep in str(path)]
    refuse_imports_from(
        [loaded.config.job.run_folder, *map(Path, map(str, named))], Path(loaded.config.job.dump_folder)
    )
    return loaded


def load_to_train(arguments: Namespace, world_size: int | None, is_elastic: bool = False) -> LoadedJob:
    """Return the checked job. If its run folder is on this host, also check that the run may start in that folder.

    The global batch size is part of that check. Without a world size, a job that leaves it unset is not compared.
    """
    loaded = load(arguments, world_size, is_elastic)
    config = loaded.config
    if not config.job.run_folder.exists():
        return loaded
    from titan_launch.plan.layout import plan_layout, with_global_batch_size
    from titan_launch.train.run_folder.folder import check_earlier_run

    if world_size is not None:
        config = with_global_batch_size(config, plan_layout(config.parallelism, config.training, world_size))
    elif config.training.global_batch_size is None:
        return loaded
    try:
        with suppress(OSError):  # the run itself reports a folder that cannot be read when it opens the folder
            check_earlier_run(config.job.run_folder, config, config.checkpoint.load)
    except ConfigError as error:
        raise UserError(loaded.provenance.describe(error.problems)) from None
    return loaded
