"""The interface of a sink."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping


class Sink(ABC):
    """A destination of metrics. Only rank 0 has sinks."""

    @abstractmethod
    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the metrics of `step`: `scalars` maps tags to values. A step may have several calls."""

    def text(self, tag: str, text: str) -> None:  # noqa: B027
        """Store a Markdown text that describes the run. A sink that cannot show text does nothing."""

    def rewind(self, step: int) -> None:  # noqa: B027
        """Remove or set aside the metrics of steps after `step`, because the run rolled back to `step`."""

    def close(self) -> None:  # noqa: B027
        """Close the files that the sink has opened."""
