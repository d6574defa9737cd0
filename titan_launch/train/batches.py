"""The stream of microbatches that a run trains on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from titan_launch.data.loader import Loader
from titan_launch.train.step import Microbatch


class TrainBatches:
    """This rank's microbatches, without end, from a position in the data that can be moved.

    for microbatch in batches: ...
    batches.move_to(position)
    """

    def __init__(self, build: Callable[[int], Loader], position: int):
        """`build` makes a loader that begins at a position, in samples over all ranks."""
        self._build = build
        self._begin(position)

    def __iter__(self) -> Iterator[Microbatch]:
        return self

    def __next__(self) -> Microbatch:
        return next(self._batches)

    def move_to(self, position: int) -> None:
        """Go on from another position; data workers are started anew."""
        self.close()
        self._begin(position)

    def close(self) -> None:
        """End the data workers."""
        self._loader.close()

    def _begin(self, position: int) -> None:
        self._loader = self._build(position)
        self._batches = iter(self._loader)
