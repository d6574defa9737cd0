"""Tapes: records of what one rank allocates, frees, computes and sends in one microbatch, without FSDP2. This module
does not import torch.

`trace.recorder` records a tape with PyTorch. `plan.memory.replay` replays the tape and adds the memory and the
collectives of FSDP2. Usually, a tape depends neither on the mode of gradient accumulation nor on the number of shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby
from typing import Any, NamedTuple, TypeVar

from titan_launch.plan.memory.ledger import HELD, Category
from titan_launch.plan.speeds import Work
from titan_launch.plan.types import enclosing, is_within

T = TypeVar("T")

OF_FSDP = frozenset(
    {
        *HELD,
        Category.GRADIENTS,
        Category.UNSHARDED_GRADIENTS,
        Category.UNSHARDED_PARAMETERS,
        Category.ALL_GATHER,
        Category.REDUCE_SCATTER,
        Category.OPTIMIZER_TEMPORARIES,
    }
)
"""Categories of memory that a replay adds. They are not on a tape."""


SECOND = "@"
"""Prefix of the paths of modules of the loss's second model (reference or teacher)."""


def root_path(part: int | None) -> str:
    """Return the path of a root module of FSDP2. `part`: index of a pipeline stage among the stages of this rank; None
    for a whole model."""
    return "" if part is None else f"#{part}"


class Bytes(NamedTuple):
    """Memory that is allocated or freed at one time."""

    changes: tuple[tuple[Category, int], ...]
    """Pairs (category, bytes). A negative number of bytes is freed. Freed bytes come before allocated ones."""

    in_product: bool = False
    """True if a matrix product runs at the end of the change."""


class Step(NamedTuple):
    """A call of one of FSDP2's hooks."""

    name: str
    """Name of a method of `plan.memory.fsdp.ShardedUnit`, or of the `Context` of a root."""

    path: str
    """Path of a module of the unit; for the root module, the result of `root_path`."""

    number: int = 0
    """Argument of the method, if the method has an argument."""


class Gradient(NamedTuple):
    """A gradient that autograd has computed for a parameter. An earlier event has allocated the gradient's memory."""

    parameter: str
    """Full name of the parameter."""

    num_bytes: int
    dtype: str
    category: Category
    """Category of this memory."""


class Sent(NamedTuple):
    """A collective of tensor, context, pipeline or expert parallelism, but not of FSDP2."""

    axis: str
    """Name of an axis of model parallelism, such as `tensor`."""

    num_bytes: int


Event = Bytes | Step | Gradient | Sent | Work


@dataclass(frozen=True)
class Segment:
    """Consecutive events at one point of a step."""

    phase: str
    module: str
    """`phase` and `module` have the meaning of `StepPoint.phase` and `StepPoint.unit`."""

    events: tuple[Event, ...]
    microbatch: int = 0


@dataclass(frozen=True)
class Blocks:
    """The paths of the outer blocks of a model or of a pipeline stage, and a stand-in for each unrecorded block."""

    paths: tuple[str, ...]
    likes: Mapping[str, str] = field(default_factory=dict)
    """For each block that was not recorded: the recorded block that stands for it."""

    equals: Mapping[str, str] = field(default_factory=dict)
    """Pairs of recorded blocks of one kind that must have the same events (`is_uniform`): the second block and the last
    but one."""

    @classmethod
    def shortened(
        cls, paths: tuple[str, ...], kinds: Sequence[Hashable], variants: Mapping[str, Hashable] | None = None
    ) -> Blocks:
        """Return the blocks `paths`, and choose which blocks are recorded. `kinds`: the kind of each block. Blocks of
        one kind allocate the same memory. `variants`: the variant of a block, by path. Blocks of one kind and one
        variant also compute the same.

        Of each kind with more than four blocks, these are recorded: the first two blocks, the last two, and one block
        of each variant that the second block and the last but one lack. A recorded block of the same kind and
        variant stands for each unrecorded block. `is_uniform` checks that the second block equals the last but one. The
        blocks between these two are assumed to be alike.
        """
        variant_of = variants or {}
        members: dict[Hashable, list[str]] = {}
        for path, kind in zip(paths, kinds, strict=True):
            members.setdefault(kind, []).append(path)
        likes, equals = dict[str, str](), dict[str, str]()
        for of_kind in members.values():
            if len(of_kind) > 4:
                _, second, *others, last_but_one, _ = of_kind
                equals[second] = last_but_one
                recorded = {variant_of.get(last_but_one): last_but_one, variant_of.get(second): second}
                for path in others:
                    stand_in = recorded.setdefault(variant_of.get(path), path)
                    if stand_in != path:
                        likes[path] = stand_in
        return cls(paths, likes, equals)


@dataclass(frozen=True)
class Tape:
    """The events of one microbatch on one rank; with pipeline parallelism, of the microbatches of a step."""

    parts: tuple[Blocks, ...]
    """The blocks of the model, or of each pipeline stage of this rank."""

    segments: tuple[Segment, ...]
    buffers: Mapping[str, int]
    """Bytes of the buffers on this rank during the whole step, by full name."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shape of this rank's part of each parameter that tensor parallelism divides, by full name."""

    reduced: Mapping[str, int] = field(default_factory=dict)
    """By full name of a parameter: number of elements that this rank sends when tensor parallelism reduces the
    gradient, before FSDP2 reduces the gradient."""

    @cached_property
    def sent(self) -> Counter[str]:
        """Calls and bytes of the collectives outside of FSDP2, by axis: the keys are `tensor`, `tensor_bytes` and so
        on."""
        found = Counter[str]()
        for event in (event for segment in self.segments for event in segment.events if isinstance(event, Sent)):
            found[event.axis] += 1
            found[f"{event.axis}_bytes"] += event.num_bytes
        return found

    @cached_property
    def work(self) -> Counter[Work]:
        """The operations of the whole model, including blocks that were not recorded."""
        stands_for = Counter(like for part in self.parts for like in part.likes.values())
        found = Counter[Work]()
        for segment in self.segments:
            for event in segment.events:
                if isinstance(event, Work):
                    found[event._replace(times=1)] += event.times * (1 + stands_for[segment.module])
        return found


def compact(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events, but replace each series of allocations and frees by at most three events. They lead to the
    highest total, to the highest total in a matrix product, and to the end of the series.

    A series ends at the next hook call, gradient or offloaded tensor. Computation and collectives do not end a series,
    because they hold no memory. Computation is moved to the next hook call. Collectives are moved to the end of all
    events.
    """
    run, sent, work = list[Bytes](), list[Sent](), Counter[Work]()
    for event in events:
        if isinstance(event, Sent):
            sent.append(event)
        elif isinstance(event, Work):
            work[event._replace(times=1)] += event.times
        elif isinstance(event, Bytes) and all(category is not Category.OFFLOADED for category, _ in event.changes):
            run.append(event)
        else:
            yield from _states(run)
            run.clear()
            if isinstance(event, Step):
                yield from (one._replace(times=times) for one, times in work.items())
                work.clear()
            yield event
    yield from _states(run)
    yield from (one._replace(times=times) for one, times in work.items())
    yield from sent


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
        changes = [(category, n) for category in Category if (n := now[category] - before[category])]
        if changes or marks[index]:
            yield Bytes(tuple(sorted(changes, key=lambda change: change[1] > 0)), marks[index])
        before = now


_Visits = dict[tuple[int, str, str], list[list[Segment]]]
"""The segments of each call of a module, by microbatch, phase and module. A loss may call the model twice."""


def _visits(tape: Tape) -> _Visits:
    found: _Visits = {}
    for place, run in groupby(tape.segments, lambda s: (s.microbatch, s.phase, s.module)):
        found.setdefault(place, []).append(list(run))
    return found


def is_uniform(tape: Tape, compares_work: bool) -> bool:
    """Return True if the blocks of each pair in `Blocks.equals` have the same events, and if all recorded blocks run
    equally often. Entries of `Tape.parts` whose blocks were all recorded are not checked. `compares_work`: True if the
    blocks of a pair must also have the same computation."""
    visits = _visits(tape)
    phases = {(microbatch, phase) for microbatch, phase, _ in visits}

    def compared(segment: Segment, names: Mapping[str, str]) -> Segment:
        events = (event for event in segment.events if compares_work or not isinstance(event, Work))
        return _renamed(replace(segment, events=tuple(events)), names)

    def events(block: str, phase: tuple[int, str], names: Mapping[str, str]) -> list[list[Segment]]:
        return [[compared(segment, names) for segment in visit] for visit in visits.get((*phase, block), ())]

    return all(
        all(events(one, phase, {}) == events(other, phase, {other: one}) for one, other in part.equals.items())
        and len({len(visits.get((*phase, path), ())) for path in part.paths if path not in part.likes}) == 1
        for phase in phases
        for part in tape.parts
        if part.likes
    )


def with_blocks(tape: Tape, removed: Collection[str] = ()) -> Tape:
    """Return the tape of a model with all outer blocks except the `removed` ones. Each block that was not recorded gets
    a copy of the events of its stand-in (`Blocks.likes`)."""
    like = {path: model for part in tape.parts for path, model in part.likes.items() if path not in removed}
    after = dict[str, list[str]]()  # for each recorded block, the blocks up to the next recorded block
    for part in tape.parts:
        for path in part.paths:
            if path not in part.likes:
                followers = after[path] = list[str]()
            else:
                followers.append(path)  # the first block of a kind is recorded
    visits, seen = _visits(tape), Counter[tuple[int, str, str]]()
    segments: list[Segment] = []
    for (microbatch, phase, block), run in groupby(tape.segments, lambda s: (s.microbatch, s.phase, s.module)):
        own, visit = list(run), seen[microbatch, phase, block]
        seen[microbatch, phase, block] += 1
        copies = [
            [_renamed(segment, {like[path]: path}) for segment in visits[microbatch, phase, like[path]][visit]]
            for path in after.get(block, ())
            if path in like
        ]
        blocks = [own, *copies] if phase == "forward" else [*reversed(copies), own]
        segments += chain.from_iterable(blocks)
    left = (tuple(path for path in part.paths if path not in removed) for part in tape.parts)
    return replace(
        tape,
        parts=tuple(map(Blocks, left)),
        segments=tuple(segment for segment in segments if segment.module not in removed),
        buffers=_of_blocks(tape.buffers, like, removed),
        shapes=_of_blocks(tape.shapes, like, removed),
        reduced=_of_blocks(tape.reduced, like, removed),
    )


def _of_blocks(by_name: Mapping[str, T], like: Mapping[str, str], removed: Collection[str]) -> dict[str, T]:
    """Return the table `by_name` (by full names) without the `removed` blocks. Each block in `like` gets copies of the
    entries of its stand-in."""
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

    if not names:
        return segment
    return replace(segment, module=_rename(segment.module, names), events=tuple(map(renamed, segment.events)))


def _rename(path: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        if is_within(path, old):
            return new + path.removeprefix(old)
    return path


_KINDS: tuple[Callable[..., Event], ...] = (Bytes, Step, Gradient, Sent, Work)


def to_json(tape: Tape) -> dict[str, Any]:
    """Return a tape as a value for JSON."""
    return {
        "parts": [[part.paths, dict(part.likes), dict(part.equals)] for part in tape.parts],
        "buffers": dict(tape.buffers),
        "shapes": dict(tape.shapes),
        "reduced": dict(tape.reduced),
        "segments": [
            [s.microbatch, s.phase, s.module, [[_KINDS.index(type(event)), *event] for event in s.events]]
            for s in tape.segments
        ],
    }


def from_json(value: Mapping[str, Any]) -> Tape:
    """Return the tape from a result of `to_json`."""
    categories = {int(category): category for category in Category}

    def changed(changes: Any, in_product: bool) -> Bytes:
        return Bytes(tuple([(categories[category], num_bytes) for category, num_bytes in changes]), in_product)

    def event(kind: int, *fields: Any) -> Event:
        if kind == 0:
            return changed(*fields)
        if kind == 2:
            name, num_bytes, dtype, category = fields
            return Gradient(name, num_bytes, dtype, categories[category])
        if kind == 4:
            name, dtype, sizes, times = fields
            return Work(name, dtype, tuple(sizes), times)
        return _KINDS[kind](*fields)

    parts = (Blocks(tuple(paths), likes, equals) for paths, likes, equals in value["parts"])
    segments = (
        Segment(phase, module, tuple(event(*fields) for fields in events), microbatch)
        for microbatch, phase, module, events in value["segments"]
    )
    shapes = {name: tuple(shape) for name, shape in value["shapes"].items()}
    return Tape(tuple(parts), tuple(segments), dict(value["buffers"]), shapes, dict(value["reduced"]))
