"""Tapes: what one rank allocates and frees while it trains one microbatch, without what FSDP2 allocates. No torch.

`trace.recorder` records a tape with PyTorch itself. `plan.memory.replay` plays it with FSDP2's own memory, under any
mode of gradient accumulation and any number of shards and blocks: the tape does not depend on them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

from titan_launch.plan.memory.ledger import Category
from titan_launch.plan.types import is_within

OF_FSDP = frozenset(
    {
        Category.PARAMETERS,
        Category.OPTIMIZER,
        Category.GRADIENTS,
        Category.UNSHARDED_GRADIENTS,
        Category.UNSHARDED_PARAMETERS,
        Category.ALL_GATHER,
        Category.REDUCE_SCATTER,
        Category.OPTIMIZER_TEMPORARIES,
        Category.EMA,
    }
)
"""The categories that a replay adds. A tape does not have them."""


class Bytes(NamedTuple):
    """Memory that is allocated or freed."""

    changes: tuple[tuple[Category, int], ...]
    """Bytes by category; negative if freed. They are freed before others are allocated."""

    in_product: bool = False
    """True if a matrix product runs at the end of the change."""


class Step(NamedTuple):
    """A call of FSDP2's hooks."""

    name: str
    """Name of a method of `plan.memory.fsdp.ShardedUnit`, or of `Context` for a whole model."""

    path: str
    """Path of a module of the unit. Empty: the root."""


class Gradient(NamedTuple):
    """A parameter takes its gradient from autograd, whose memory the tape has allocated."""

    parameter: str
    """Full name."""

    num_bytes: int
    category: Category
    """The category under which the tape has allocated the gradient."""


class Sent(NamedTuple):
    """A collective along an axis of the mesh that is not FSDP2's."""

    axis: str
    """A field of `plan.communication.Traffic`: `tensor`, `context`, `pipeline` or `expert`."""

    num_bytes: int


Event = Bytes | Step | Gradient | Sent


@dataclass(frozen=True)
class Segment:
    """The events between two points of a step."""

    phase: str
    module: str
    """`StepPoint.phase` and `StepPoint.unit`."""

    events: tuple[Event, ...]


@dataclass(frozen=True)
class Tape:
    """The events of one microbatch on one rank."""

    blocks: tuple[str, ...]
    """Paths of the blocks that were recorded."""

    segments: tuple[Segment, ...]
    held: Bytes
    """The model's buffers on this rank, and what else is there during the whole step."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """This rank's part of each parameter that tensor or expert parallelism divides, by full name."""


def compact(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events, with each run of allocations and frees reduced to its highest points and its end.

    Between two other events only these count: the highest total, the highest total in a matrix product, and the end.
    """
    for is_bytes, run in groupby(events, lambda event: isinstance(event, Bytes) and not _is_on_host(event)):
        yield from _states(run) if is_bytes else run  # type: ignore[arg-type]


def _is_on_host(event: Bytes) -> bool:
    return any(category is Category.OFFLOADED for category, _ in event.changes)


def _states(run: Iterable[Bytes]) -> Iterator[Bytes]:
    states: list[tuple[int, bool, Counter[Category]]] = []
    held: Counter[Category] = Counter()
    for event in run:
        held.update(dict(event.changes))
        states.append((held.total(), event.in_product, held.copy()))
    indices = range(len(states))
    marks = {max(indices, key=lambda index: states[index][0]): False}
    in_product = [index for index in indices if states[index][1]]
    if in_product:
        marks[max(in_product, key=lambda index: states[index][0])] = True
    marks.setdefault(len(states) - 1, False)
    before: Counter[Category] = Counter()
    for index in sorted(marks):
        now = states[index][2]
        changes = tuple((c, n) for c in Category if (n := now[c] - before[c]))
        if changes or marks[index]:
            yield Bytes(changes, marks[index])
        before = now


def are_periodic(tape: Tape, period: int) -> bool:
    """Return True if the second and the third of the four periods of a tape's blocks have the same events."""
    second, third = (tape.blocks[index * period : (index + 1) * period] for index in (1, 2))
    names = dict(zip(third, second, strict=True))
    own = [[s for s in tape.segments if s.module in blocks] for blocks in (second, third)]
    return _in_order(own[0], second) == _in_order([_renamed(segment, names) for segment in own[1]], second)


def _in_order(segments: Sequence[Segment], blocks: Sequence[str]) -> dict[tuple[str, str], list[Segment]]:
    return {
        (phase, block): [s for s in segments if (s.phase, s.module) == (phase, block)]
        for phase in ("forward", "backward")
        for block in blocks
    }


def with_blocks(tape: Tape, blocks: Sequence[str], period: int) -> Tape:
    """Return the tape of a deeper model, whose additional blocks are as the second of the tape's four periods."""
    more = [path for path in blocks if path not in tape.blocks]
    if not more:
        return tape
    second = tape.blocks[period : 2 * period]
    copies = [
        dict(zip(second, more[start : start + period], strict=True)) for start in range(0, len(more), period)
    ]
    segments: list[Segment] = []
    for (phase, is_second), group in groupby(tape.segments, lambda s: (s.phase, s.module in second)):
        own = list(group)
        if is_second and phase == "forward":
            segments += own + [_renamed(s, names) for names in copies for s in own]
        elif is_second:
            segments += [_renamed(s, names) for names in reversed(copies) for s in own] + own
        else:
            segments += own
    shapes = {_rename(name, names): shape for names in copies for name, shape in tape.shapes.items()}
    return replace(tape, blocks=tuple(blocks), segments=tuple(segments), shapes={**tape.shapes, **shapes})


def _renamed(segment: Segment, names: Mapping[str, str]) -> Segment:
    def renamed(event: Event) -> Event:
        if isinstance(event, Step):
            return event._replace(path=_rename(event.path, names))
        if isinstance(event, Gradient):
            return event._replace(parameter=_rename(event.parameter, names))
        return event

    return Segment(segment.phase, _rename(segment.module, names), tuple(map(renamed, segment.events)))


def _rename(path: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        if is_within(path, old):
            return new + path.removeprefix(old)
    return path


_KINDS: tuple[Callable[..., Event], ...] = (Bytes, Step, Gradient, Sent)


def to_json(tape: Tape) -> dict[str, Any]:
    """Return a tape as a value for JSON."""
    return {
        "blocks": tape.blocks,
        "held": tape.held.changes,
        "shapes": dict(tape.shapes),
        "segments": [
            [s.phase, s.module, [[_KINDS.index(type(event)), *event] for event in s.events]] for s in tape.segments
        ],
    }


def from_json(value: Mapping[str, Any]) -> Tape:
    """Return the tape that `to_json` has written. Raises KeyError, TypeError or ValueError for another value."""

    def changed(changes: Any, in_product: bool = False) -> Bytes:
        return Bytes(tuple((Category(c), int(n)) for c, n in changes), in_product)

    def event(kind: int, *fields: Any) -> Event:
        if kind == 0:
            return changed(*fields)
        if kind == 2:
            return Gradient(fields[0], fields[1], Category(fields[2]))
        return _KINDS[kind](*fields)

    segments = (Segment(phase, module, tuple(event(*e) for e in events)) for phase, module, events in value["segments"])
    shapes = {name: tuple(shape) for name, shape in value["shapes"].items()}
    return Tape(tuple(value["blocks"]), tuple(segments), changed(value["held"]), shapes)
