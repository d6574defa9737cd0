"""The interface of a sink."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping


class Sink(ABC):
    """A destination of metrics. Only rank 0 has sinks."""

    @abstractmethod
    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Keep `scalars` (tag -> value) of `step`. More than one call per step is fine, any tag may be missing."""

    def text(self, tag: str, text: str) -> None:  # noqa: B027
        """Store a Markdown text that describes the run, if the sink can show texts."""

    def rewind(self, step: int) -> None:  # noqa: B027
        """Replace what was written for steps after `step`: the run went back to that step."""

    def close(self) -> None:  # noqa: B027
        """Close what the sink has opened."""
