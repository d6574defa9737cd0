"""The interface of a sink, and the protection of a run from sinks that fail."""

from __future__ import annotations

import errno
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunDescription:
    """Facts about a run that a sink gets in addition to the metrics."""

    settings: Mapping[str, int | float | str]
    """Values of the job by key, such as `optimizer.lr`, for the comparison of runs. A value that is neither a number
    nor a string is given as TOML text, such as `true` or `["wq", "wv"]`. An unset key has the value `unset`. A long
    value is cut, and its checksum is appended."""

    later_metrics: frozenset[str]
    """Tags of the metrics that the first report of the run may lack, and a later report may have."""


class Sink(ABC):
    """A destination of metrics. Only rank 0 has sinks."""

    @abstractmethod
    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the metrics of `step`: `scalars` maps tags to values. The method may be called several times for one
        step."""

    def describe(self, description: RunDescription) -> None:  # noqa: B027
        """Receive facts about the run, before its first report. A sink that has no use for them does nothing."""

    def text(self, tag: str, text: str) -> None:  # noqa: B027
        """Store a Markdown text that describes the run. A sink that cannot show text does nothing."""

    def rewind(self, step: int) -> None:  # noqa: B027
        """Remove or set aside the metrics of steps after `step`, because the run rolled back to `step`."""

    def close(self, failed: bool = False) -> None:  # noqa: B027
        """Close the files that the sink has opened. `failed`: True if an error or a signal ends the run."""


@dataclass(frozen=True)
class SinkContext:
    """The facts about a run that the factory of a sink receives."""

    name: str
    """`job.name`."""

    folder: Path
    """The run folder."""

    run_id: str
    """Eight hexadecimal digits that tell this run from all others. They stay the same when the run resumes."""

    step: int
    """Step of the checkpoint from which the run resumes, or 0."""

    config: Mapping[str, Any]
    """The resolved job, as nested tables: the content of `config.json`."""


_log = logging.getLogger(__name__)


class GuardedSink(Sink):
    """A wrapper around a sink. Failures of the sink do not end the run.

    While the disk is full or a quota is exceeded, reports are lost. After any other error, the sink is closed and gets
    no more calls. Each of these failures is logged once.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        logged: set[str],
        fatal: tuple[type[Exception], ...] = (),
        tag_prefix: str = "",
    ):
        """`logged`: the warnings that are already logged, to which the wrapper adds its own; all sinks of a run share
        this set. `fatal`: types of errors that are raised again, and end the run. `tag_prefix`: text that the wrapper
        puts before all tags."""
        self._name, self._logged, self._fatal, self._prefix = name, logged, fatal, tag_prefix
        self._sink: Sink | None = sink

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        tagged = {self._prefix + tag: value for tag, value in scalars.items()}
        self._call(f"the report of step {step}", lambda sink: sink.write(step, tagged))

    def describe(self, description: RunDescription) -> None:
        metrics = frozenset(self._prefix + tag for tag in description.later_metrics)
        described = replace(description, later_metrics=metrics)
        self._call("the start of the run", lambda sink: sink.describe(described))

    def text(self, tag: str, text: str) -> None:
        self._call(f'the text "{tag}"', lambda sink: sink.text(self._prefix + tag, text))

    def rewind(self, step: int) -> None:
        self._call(f"the return to step {step}", lambda sink: sink.rewind(step))

    def close(self, failed: bool = False) -> None:
        self._call("the end of the run", lambda sink: sink.close(failed))

    def _call(self, at: str, action: Callable[[Sink], None]) -> None:
        if self._sink is None:
            return
        try:
            action(self._sink)
        except self._fatal:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                reason = f"{os.strerror(error.errno)}; training continues, and reports are lost until there is room"
                self._warn(f"reports cannot be written: {reason}")
                return
            sink, self._sink = self._sink, None
            text = f"{type(error).__name__}: {error}"
            failed = f"metrics: the sink {self._name} failed at {at}"
            self._warn(f"{failed} and gets no more reports; training is not affected. {text}")
            with suppress(Exception):
                sink.close(failed=True)

    def _warn(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            _log.warning("%s", text)
