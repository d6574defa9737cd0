"""The output of a run: its folder, and the sinks that write its reports."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from titan_launch.checkpoint.state import Progress
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import dump_job
from titan_launch.config.loading.provenance import toml_value
from titan_launch.config.sections.data import MixtureData
from titan_launch.config.sections.section import Section
from titan_launch.core.errors import format_key
from titan_launch.core.phantom import TAG_PREFIX, is_phantom
from titan_launch.distributed.collectives import on_rank_0
from titan_launch.distributed.process_group import Ranks
from titan_launch.loss.build import losses_of_next_tokens
from titan_launch.metrics.sinks import Sink, SinkContext, open_sinks
from titan_launch.metrics.sinks.console import ConsoleSink
from titan_launch.metrics.sinks.interface import GuardedSink, RunDescription
from titan_launch.metrics.tags import BEST_LOSS, WITHOUT_IMPROVEMENT
from titan_launch.plan.report.unit_table import format_plan
from titan_launch.plan.units.rule_assignment import is_batch_norm
from titan_launch.train.health.flight_recorder import FOLDER as FLIGHT_RECORDER
from titan_launch.train.health.watchdog import Watchdog
from titan_launch.train.measure import MEASURED, PREDICTED
from titan_launch.train.resolve_job import ResolvedJob
from titan_launch.train.run_folder.folder import OpenRunFolder, new_attempt_folder, prepare_run_folder, run_id
from titan_launch.train.run_folder.logs import LogFile
from titan_launch.train.run_folder.records import table_of
from titan_launch.train.run_folder.resume import advice_without_folder


@dataclass(frozen=True)
class RunOutput:
    """The run folder, and the sinks of a rank. Only rank 0 has sinks."""

    folder: OpenRunFolder
    sinks: tuple[Sink, ...]
    console: ConsoleSink | None
    """The sink that writes to the terminal, which is also one of `sinks`. None with `--quiet`, and on all ranks except
    rank 0."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write metrics of a step to all sinks. Raises RunError if the run folder was deleted or moved."""
        self.folder.check()
        for sink in self.sinks:
            sink.write(step, scalars)

    def clear_progress(self) -> None:
        """Remove the progress bar before another line is printed."""
        if self.console is not None:
            self.console.clear()


def open_run_folder(
    job: ResolvedJob, ranks: Ranks, log_file: LogFile | None, watchdog: Watchdog, stack: ExitStack
) -> OpenRunFolder:
    """Prepare the run folder and a log folder for this attempt, and return the run folder. Collective.

    Rank 0 prepares the folders while the other ranks wait. Then each rank opens its log file, and lets its watchdog
    write to the run folder. The run folder is locked until `stack` is closed.
    """
    folder = job.requested.job.run_folder

    def prepare() -> Path:
        prepare_run_folder(job.requested, job.attempt, stack)
        return new_attempt_folder(folder)

    logs = on_rank_0(prepare)
    if log_file is not None:
        log_file.open(logs / f"rank_{ranks.rank}.log")
    watchdog.set_run_folder(folder)
    if ranks.device.type == "cuda":
        (folder / FLIGHT_RECORDER).mkdir(exist_ok=True)  # NCCL writes its records to this folder
    return stack.enter_context(OpenRunFolder(folder, advice_without_folder(job.requested)))


def build_output(
    job: ResolvedJob, folder: OpenRunFolder, progress: Progress, console: ConsoleSink | None, stack: ExitStack
) -> RunOutput:
    """Open the sinks on rank 0, and write the description of the run to them. Collective. Closing `stack` closes the
    sinks. Raises ConfigError if a sink cannot be opened."""
    sinks: list[Sink] = []
    logged = set[str]()

    def add(name: str, sink: Sink, fatal: tuple[type[Exception], ...] = (), tag_prefix: str = "") -> None:
        guarded = GuardedSink(name, sink, logged, fatal, tag_prefix)
        sinks.append(guarded)
        stack.push(lambda kind, *_: guarded.close(failed=kind is not None))

    def open_all() -> None:
        name, table = job.config.job.name, table_of(job.config)
        context = SinkContext(name, folder.path, run_id(folder.path), progress.step, table)
        for name, sink in open_sinks(job.config.metrics, context):
            add(name, sink, tag_prefix=TAG_PREFIX if is_phantom() else "")

    if console is not None:
        add("console", console, fatal=(BrokenPipeError,))  # the other end of a pipe is closed, as after `| head`
    on_rank_0(open_all)
    output = RunOutput(folder, tuple(sinks), console)
    if not sinks:
        return output
    description = RunDescription(settings_of(job.requested), frozenset(_later_metrics(job)))
    texts = {
        "config": f"```json\n{dump_job(job.config)}```",
        "units": f"```\n{format_plan(job.config, job.plan, job.layout, format_key)}\n```",
        **({} if job.reason is None else {"auto": job.reason}),
    }
    for sink in sinks:
        sink.describe(description)
        for tag, text in texts.items():
            sink.text(tag, text)
    return output


_NOT_SETTINGS = ("job", "metrics", "profiling", "planner", "comm")
"""Sections whose keys are not compared between runs, because they do not change the results."""

_LONGEST_SETTING = 100  # characters


def settings_of(config: JobConfig) -> dict[str, int | float | str]:
    """Return the settings that sinks compare between runs, by key. A long value is cut, and gets a checksum."""
    return {key: value for key, value in _settings(config) if key.partition(".")[0] not in _NOT_SETTINGS}


def _settings(section: Section, prefix: str = "") -> Iterator[tuple[str, int | float | str]]:
    """Yield the keys and values of a section and of its subsections. An unset key has the value "unset", because
    TensorBoard detects that runs differ in a key only if all runs have this key."""
    table = section.model_dump(mode="json", exclude_none=True)
    for name in type(section).model_fields:
        field = getattr(section, name)
        if isinstance(field, Section):
            yield from _settings(field, f"{prefix}{name}.")
            continue
        value = table.get(name, "unset")
        text = toml_value(value)
        if len(text) > _LONGEST_SETTING:  # the checksum distinguishes values that are equal up to the cut
            value = f"{text[: _LONGEST_SETTING - 13]} ... {zlib.crc32(text.encode()):08x}"
        yield f"{prefix}{name}", value if type(value) in (int, float, str) else text


def _later_metrics(job: ResolvedJob) -> Iterator[str]:
    """Yield the metric tags that the first report of the run may lack, and a later report may have."""
    config = job.config
    if config.validation.freq:
        kinds = ["loss", "accuracy", *(["perplexity"] if losses_of_next_tokens(config) else [])]
        if isinstance(config.validation.data, MixtureData):
            kinds += ["loss/<source>", "accuracy/<source>"]
        shown = config.ema.validate_with if config.ema.decay is not None else "parameters"
        prefixes = [prefix for prefix, other in (("", "ema"), ("ema_", "parameters")) if shown != other]
        yield from (f"validation/{prefix}{kind}" for prefix in prefixes for kind in kinds)
        if config.validation.patience is not None:
            yield from (BEST_LOSS, WITHOUT_IMPROVEMENT)
    has_norms = any(map(is_batch_norm, job.plan.inventory.modules))
    if has_norms and job.layout.world_size > 1 and (config.validation.freq or config.checkpoint.save_last):
        yield from ("batchnorm/running_mean_divergence", "batchnorm/running_var_divergence")
    if config.comm.profile_freq:
        yield "comm/exposed_s"
    if not (config.compile.enable or config.float8.enable):
        yield from (PREDICTED, MEASURED)
