"""`plan --search`: the layouts and modes with the shortest predicted step, and a job file for the best one."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from titan_launch.commands.parser import check_weights, load, recordings_of
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import load_job
from titan_launch.core.errors import UserError, did_you_mean
from titan_launch.core.process import run_and_exit
from titan_launch.core.terminal import counted, one_line, say, say_data
from titan_launch.plan.hardware import planned_hardware
from titan_launch.plan.job import with_values
from titan_launch.plan.layout import Layout, plan_layout, with_global_batch_size
from titan_launch.plan.memory.recordings import Recordings, recorded_job
from titan_launch.plan.report.found import describe_result, format_result, overlay
from titan_launch.plan.report.modes import ComparedJob
from titan_launch.plan.search import SEARCHED, Key, Result, Search
from titan_launch.recipes.writing import check_new, write_new


def run_search(arguments: Namespace) -> NoReturn:
    """Search, print the best layouts, write the job file that `--out` names, and end the process."""
    held = _held(arguments.hold)
    batches = _batches(arguments.global_batch)
    arguments.overrides += [f"--{entry}" for entry in arguments.hold if "=" in entry]
    out = arguments.out
    if out is not None:
        check_new(out, "plan")
    loaded = load(arguments, world_size=None)
    check_weights(loaded)

    def search() -> None:
        config = loaded.config
        if config.training.global_batch_size is None:
            layout = plan_layout(config.parallelism, config.training, arguments.world_size)
            config = with_global_batch_size(config, layout)  # so that the size is the same for every number of ranks
        sizes = [arguments.world_size >> halvings for halvings in range(arguments.world_size.bit_length())]
        results: dict[int, Result] = {}
        for world_size in sizes if arguments.max_gpus else sizes[:1]:
            results[world_size] = _best_batch(config, world_size, held, batches)
            if results[world_size].families and not results[world_size].best:
                break  # with fewer ranks, each rank holds more, so the job does not fit either
        _report(results, config, arguments)
        fitting = [size for size, result in results.items() if result.best]
        if not fitting:
            raise UserError("error: no layout fits; try more ranks, a smaller global batch or shorter sequences")
        if out is not None:
            best = results[fitting[-1]].best[0].config
            base = None
            with suppress(UserError):  # the file alone may be invalid: the overrides may set what it lacks
                base = load_job(arguments.config).config
            # The value of `extends` is a path relative to the new job file, or the name of a config of the package.
            is_file = Path(arguments.config).is_file()
            extended = os.path.relpath(arguments.config, Path(out).parent) if is_file else arguments.config
            write_new(out, overlay(base, best, extended))
            say(one_line(f"wrote {out}, for {counted(fitting[-1], 'rank')}"), file=sys.stderr)

    run_and_exit(search, loaded.provenance.describe)


def _batches(text: str | None) -> list[int]:
    """Return the global batch sizes to try: for `LOW:HIGH`, the sizes LOW, 2 LOW, 4 LOW, ... up to HIGH. For None,
    return an empty list, which stands for the size in the job. Raises UserError for any other text."""
    if text is None:
        return []
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high)):
        raise UserError(f"error: --global-batch {one_line(text)}: needs sample counts LOW <= HIGH, such as 256:1024")
    return [int(low) << doublings for doublings in range((int(high) // int(low)).bit_length())]


def _best_batch(config: JobConfig, world_size: int, held: Sequence[Key], batches: Sequence[int]) -> Result:
    """Search with each global batch size in `batches`, and return the result with the most samples per second. If
    `batches` is empty, search with the size in the job."""

    def samples_per_second(result: Result) -> float:
        return result.best[0].layout.global_batch_size / result.best[0].seconds if result.best else 0.0

    jobs = [with_values(config, {("training", "global_batch_size"): size}) for size in batches] or [config]
    return max((search_layouts(job, world_size, held) for job in jobs), key=samples_per_second)


def search_layouts(config: JobConfig, world_size: int, held: Sequence[Key] = ()) -> Result:
    """Return the best layouts of a job on `world_size` ranks. `held`: keys that keep the values of the job. Raises the
    ConfigErrors of `Search`."""
    hardware = planned_hardware(config, world_size)
    recordings: dict[str, Recordings] = {}

    def subject_of(config: JobConfig, layout: Layout) -> ComparedJob:
        key = recorded_job(config, layout).model_dump_json()
        if key not in recordings:
            recordings[key] = recordings_of(config, layout, hardware.kernels, is_silent=True)
        return ComparedJob.replayed(config, layout, hardware, recordings[key])

    return Search(config, world_size, hardware, held, subject_of, lambda text: say(text, file=sys.stderr)).run()


def _held(entries: Sequence[str]) -> list[Key]:
    """Return the keys that `--hold` names, as `KEY` or `KEY=VALUE`. Raises UserError for a key that a search does not
    change."""
    names = {".".join(key): key for key in SEARCHED}
    keys = [entry.partition("=")[0] for entry in entries]
    for key in keys:
        if key not in names:
            known = f"--hold takes one of {', '.join(names)}{did_you_mean(key, list(names))}"
            raise UserError(f"error: --hold {one_line(key)}: the search does not change this key; {known}")
    return [names[key] for key in keys]


def _report(results: dict[int, Result], config: JobConfig, arguments: Namespace) -> None:
    if arguments.json:
        say_data(json.dumps({str(size): describe_result(result) for size, result in results.items()}, indent=2))
        return
    for size, result in results.items():
        found = format_result(result, planned_hardware(config, size))
        say(f"{counted(size, 'rank')}\n\n{found}\n")
