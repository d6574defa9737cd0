"""A walk over the job's schema: its tables, and the values that a key accepts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from titan_launch.config.sections.base import Section
from titan_launch.config.sections.data import DATA_KINDS, DataSource
from titan_launch.config.sections.training import SchedulerConfig
from titan_launch.core.errors import KeyPath


class TableSchema(NamedTuple):
    """A table that a job file may have."""

    header: str
    """As it is written: `[training]`, `[[precision.rules]]`."""

    key: KeyPath
    """Its path; an array of tables has the path of the array."""

    section: type[Section]
    """Its keys."""


def alternatives(annotation: Any) -> list[Any]:
    """The types that an annotation admits, None aside: `str | tuple[str, ...] | None` admits two."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for member in get_args(annotation) for kind in alternatives(member)]
    if annotation is DataSource:
        return list(DATA_KINDS.values())
    return [] if annotation is NoneType else [annotation]


def is_section(kind: Any) -> bool:
    """Whether a type is a table with known keys."""
    return isinstance(kind, type) and issubclass(kind, Section)


def item_types(kind: Any) -> list[Any]:
    """What the items of an array may be."""
    return alternatives(get_args(kind)[0]) if get_origin(kind) is tuple else []


def choices(kind: Any) -> tuple[str, ...]:
    """The values of a closed choice."""
    return get_args(kind) if get_origin(kind) is Literal else ()


def tables(section: type[Section], key: KeyPath = ()) -> Iterator[TableSchema]:
    """Every table below a section, outer ones first. Those with kinds come once for each kind."""
    for name, field in section.model_fields.items():
        path = (*key, name)
        dotted = ".".join(map(str, path))
        for kind in alternatives(field.annotation):
            for header, inner in ((f"[{dotted}]", [kind]), (f"[[{dotted}]]", item_types(kind))):
                for table in filter(is_section, inner):
                    yield TableSchema(header, path, table)
                    yield from tables(table, path)


def locate(location: Sequence[str | int], section: type[Section]) -> tuple[KeyPath, type[Section] | None, bool]:
    """A location as pydantic gives it, as a path into the job file.

    Pydantic also names the member of a union that it tried (`data.text.path`, `data.path.str`), which the file does
    not. Returns the path, the section that the last key belongs to, and whether a member of a plain union was named.
    """
    key: KeyPath = ()
    kinds: list[Any] = [section]
    owner: type[Section] | None = None
    in_union = False
    for part in location:
        if len(kinds) > 1:
            in_union = not all(map(is_section, kinds))
            kinds = [kind for kind in kinds if _names(part, kind)]
            continue
        (kind,) = kinds or [None]
        owner = kind if is_section(kind) else None
        kinds = _inside(kind, part)
        key = (*key, part)
    return key, owner, in_union


def _names(label: str | int, kind: Any) -> bool:
    """Whether pydantic's name of a union's member means this one: its tag, or its type."""
    if is_section(kind):
        return label in choices(kind.model_fields["kind"].annotation)
    return str(label).startswith("tuple") == (get_origin(kind) is tuple)


def _inside(kind: Any, part: str | int) -> list[Any]:
    """What may stand at a key of a table, or at an index of an array."""
    if not is_section(kind):
        return item_types(kind)
    field = kind.model_fields.get(part)
    return alternatives(field.annotation) if field else []


class Kinds:
    """The kinds of one table."""

    def __init__(self, variants: Mapping[str, type[Section]]):
        self.variants = variants
        """The section class of every kind."""
        self.default: str = next(iter(variants))
        """The kind of a table without `kind`: the first one."""

    def dropped_keys(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> set[str]:
        """Return the keys of a table that lose their meaning when another table, laid over it, changes its kind.

        A key keeps its meaning if both kinds inherit it from one class.
        """
        if "kind" not in new or new["kind"] == old.get("kind", self.default):
            return set()
        kinds = (str(table.get("kind", self.default)) for table in (old, new))  # str: a file may hold anything
        before, after = (self.variants.get(kind, Section) for kind in kinds)
        shared = [base for base in before.__mro__ if issubclass(base, Section) and issubclass(after, base)]
        return self.keys_of_some() & old.keys() - {key for base in shared for key in base.model_fields}

    def keys_of_some(self) -> set[str]:
        """The keys that belong to one kind or another, but not to all."""
        all_keys = [set(variant.model_fields) for variant in self.variants.values()]
        return {key for keys in all_keys for key in keys if not all(key in others for others in all_keys)}


def _tag(variant: type[Section]) -> str:
    (tag,) = get_args(variant.model_fields["kind"].annotation)
    return str(tag)


_DATA = Kinds(DATA_KINDS)
TAGGED: Mapping[KeyPath, Kinds] = {
    ("data",): _DATA,
    ("validation", "data"): _DATA,
    ("lr_scheduler",): Kinds({_tag(section): section for section in alternatives(SchedulerConfig)}),
}
"""The tables that have a `kind`."""
