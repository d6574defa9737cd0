"""Tapes: what one rank allocates and frees while it trains one microbatch, without what FSDP2 allocates. No torch.

`trace.recorder` records a tape with PyTorch itself. `plan.memory.replay` plays it with FSDP2's own memory, under any
mode of gradient accumulation and any number of shards and blocks: the tape does not depend on them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from titan_launch.plan.memory.depth import Repeat, shorten
from titan_launch.plan.memory.ledger import Category
from titan_launch.plan.types import enclosing, is_within

T = TypeVar("T")

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


SECOND = "@"
"""Prefix of the paths of the loss's second model."""


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
    """Paths of the model's outer blocks."""

    repeat: Repeat | None
    """The repeated part of the blocks, of which only the first two periods and the last two were recorded. None: all
    blocks were recorded."""

    segments: tuple[Segment, ...]
    buffers: Mapping[str, int]
    """Bytes of the buffers on this rank during the whole step, by full name."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """This rank's part of each parameter that tensor parallelism divides, by full name."""


def compact(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events, with each run of allocations and frees reduced to its highest points and its end.

    Between two other events only these count: the highest total, the highest total in a matrix product, and the end.
    """
    run: list[Bytes] = []
    for event in events:
        if isinstance(event, Bytes) and all(category is not Category.OFFLOADED for category, _ in event.changes):
            run.append(event)
        else:
            yield from _states(run)
            yield event
            run = []
    yield from _states(run)


def _states(run: Sequence[Bytes]) -> Iterator[Bytes]:
    if not run:
        return
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


_PERIODS = 4
"""Periods of a repeated part that are recorded. The second and the third show whether the part is uniform; the first
and the last may differ from them."""


def omitted_blocks(blocks: Sequence[str], repeat: Repeat) -> tuple[str, ...]:
    """Return the blocks that need not be recorded."""
    kept = set(shorten(len(blocks), repeat, _PERIODS))
    return tuple(path for index, path in enumerate(blocks) if index not in kept)


def is_uniform(tape: Tape) -> bool:
    """Return True if the second and the third of the recorded periods have the same events."""
    if tape.repeat is None:
        return True
    period, end = tape.repeat.period, tape.repeat.end
    second, third = _second_period(tape), tape.blocks[end - 2 * period : end - period]
    for phase in ("forward", "backward"):
        for one, other in zip(second, third, strict=True):
            names = dict(zip(third, second, strict=True))
            own = [s for s in tape.segments if (s.phase, s.module) == (phase, one)]
            others = [_renamed(s, names) for s in tape.segments if (s.phase, s.module) == (phase, other)]
            if own != others:
                return False
    return True


def _second_period(tape: Tape) -> tuple[str, ...]:
    assert tape.repeat is not None
    start = tape.repeat.start + tape.repeat.period
    return tape.blocks[start : start + tape.repeat.period]


def with_blocks(tape: Tape, wanted: Sequence[str]) -> Tape:
    """Return the tape of a model with only some of its outer blocks. Blocks that were not recorded are like those of
    the second period."""
    second: tuple[str, ...] = ()
    like: dict[str, str] = {}
    if tape.repeat is not None:
        second, omitted = _second_period(tape), set(omitted_blocks(tape.blocks, tape.repeat))
        like = {
            path: second[(index - tape.repeat.start) % tape.repeat.period]
            for index, path in enumerate(tape.blocks)
            if path in omitted.intersection(wanted)
        }
    removed = set(tape.blocks).difference(wanted)
    segments: list[Segment] = []
    for (phase, is_second), run in groupby(tape.segments, lambda s: (s.phase, s.module in second)):
        own = list(run)
        copies = [
            [_renamed(segment, {model: path}) for segment in own if segment.module == model]
            for path, model in (like.items() if is_second else ())
        ]
        if phase == "forward":
            segments += own + [segment for copy in copies for segment in copy]
        else:
            segments += [segment for copy in reversed(copies) for segment in copy] + own
    return replace(
        tape,
        blocks=tuple(wanted),
        repeat=None,
        segments=tuple(segment for segment in segments if segment.module not in removed),
        buffers=_of_blocks(tape.buffers, like, removed),
        shapes=_of_blocks(tape.shapes, like, removed),
    )


def whole_shapes(tape: Tape) -> Mapping[str, tuple[int, ...]]:
    """Return `Tape.shapes` with the parameters of all blocks."""
    return with_blocks(replace(tape, segments=()), tape.blocks).shapes


def _of_blocks(by_name: Mapping[str, T], like: Mapping[str, str], removed: Collection[str]) -> dict[str, T]:
    """Return a table by full names without the `removed` blocks, and with those that are `like` others."""
    added = {
        _rename(name, {model: path}): value
        for path, model in like.items()
        for name, value in by_name.items()
        if is_within(name, model)
    }
    return {name: value for name, value in (*by_name.items(), *added.items()) if not enclosing(name, removed)}


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
        "repeat": tape.repeat and asdict(tape.repeat),
        "buffers": dict(tape.buffers),
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
    repeat = value["repeat"] and Repeat(**value["repeat"])
    return Tape(tuple(value["blocks"]), repeat, tuple(segments), dict(value["buffers"]), shapes)
