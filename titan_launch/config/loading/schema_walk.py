"""Walk over the schema of a job: its tables, and the types that a key accepts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from titan_launch.config.sections.data import DATA_KINDS, FACTORY, KINDS, MIXED_KINDS, MixtureData, data_kind
from titan_launch.config.sections.section import Section
from titan_launch.config.sections.training import SchedulerConfig
from titan_launch.core.errors import KeyPath


class TableSchema(NamedTuple):
    """A table of the job file."""

    header: str
    """Header of the table in the file: `[training]`, or `[[precision.rules]]` for an array of tables."""

    key: KeyPath
    """Path of the table, or of the array of tables."""

    section: type[Section]
    """Section class that declares the keys of the table."""


def alternatives(annotation: Any) -> list[Any]:
    """Return the types that an annotation accepts, without None: two types for `str | tuple[str, ...] | None`."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for member in get_args(annotation) for kind in alternatives(member)]
    if isinstance(annotation, type) and annotation in KINDS:
        return list(KINDS[annotation].values())
    return [] if annotation is NoneType else [annotation]


def is_section(kind: Any) -> bool:
    """Return True if a type is a section: a table with known keys."""
    return isinstance(kind, type) and issubclass(kind, Section)


def item_types(kind: Any) -> list[Any]:
    """Return the types of the items of an array; an empty list for any other type."""
    return alternatives(get_args(kind)[0]) if get_origin(kind) is tuple else []


def choices(kind: Any) -> tuple[str, ...]:
    """Return the values of a literal type; an empty tuple for any other type."""
    return get_args(kind) if get_origin(kind) is Literal else ()


def tables(section: type[Section], key: KeyPath = ()) -> Iterator[TableSchema]:
    """Yield all tables in a section, outer tables first. A table with kinds is yielded once per kind."""
    for name, field in section.model_fields.items():
        path = (*key, name)
        dotted = ".".join(map(str, path))
        for kind in alternatives(field.annotation):
            for header, inner in ((f"[{dotted}]", [kind]), (f"[[{dotted}]]", item_types(kind))):
                for table in filter(is_section, inner):
                    yield TableSchema(header, path, table)
                    yield from tables(table, path)


def locate(location: Sequence[str | int], section: type[Section]) -> tuple[KeyPath, type[Section] | None, bool]:
    """Convert pydantic's location of an error to a path in the job file.

    Return (path, owner, in_union). Pydantic's locations contain names of union members (`text` in `data.text.path`,
    `str` in `data.path.str`); the path omits these names. `owner`: section class that contains the last key of the
    path; None if the last key is not in a section, for example an index. `in_union`: True if the location contains the
    name of a member of a union of plain types, such as `str`.
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
    """Return True if `label`, a part of pydantic's location, may be the union member `kind`. A section has its tags as
    labels. Other types are divided only into tuples and the rest."""
    if is_section(kind):
        return label in (choices(kind.model_fields["kind"].annotation) or (FACTORY,))
    return str(label).startswith("tuple") == (get_origin(kind) is tuple)


def _inside(kind: Any, part: str | int) -> list[Any]:
    """Return the types that a value of type `kind` accepts at `part`, a key of a table or an index of an array."""
    if not is_section(kind):
        return item_types(kind)
    field = kind.model_fields.get(part)
    return alternatives(field.annotation) if field else []


class Kinds:
    """The kinds that a table with a key `kind` may have."""

    def __init__(self, variants: Mapping[str, type[Section]]):
        self.variants = variants
        """Section class of each kind."""
        self.default: str = next(iter(variants))
        """Kind of a table without `kind`: the first kind."""

    def dropped_keys(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> set[str]:
        """Return the keys of the table `old` that must be removed before `new` is merged into it, because `new` changes
        the kind.

        A key stays if it has the same meaning in both kinds, that is, if both kinds inherit it from the same class.
        """
        if "kind" not in new and not self._is_mixture(new):
            return set()
        if self.kind_of(old) == self.kind_of(new):
            return set()
        before, after = (self.variants.get(self.kind_of(table), Section) for table in (old, new))
        shared = [base for base in before.__mro__ if issubclass(base, Section) and issubclass(after, base)]
        kept = {key for base in shared for key in base.model_fields} & after.model_fields.keys()
        dropped = self.keys_of_some() - kept
        return (dropped | {"kind"} - new.keys()) & old.keys()

    def kind_of(self, table: Mapping[str, Any]) -> str:
        """Return the kind of a table that is not validated yet: the value of the key `kind`, or else the default. For
        an import string, return `FACTORY`. A table of data without `kind` but with `sources` is a mixture."""
        return data_kind(str(table.get("kind", "mixture" if self._is_mixture(table) else self.default)))

    def _is_mixture(self, table: Mapping[str, Any]) -> bool:
        return "sources" in table and MixtureData in self.variants.values()

    def keys_of_some(self) -> set[str]:
        """Return the keys that some of the kinds have, but not all of them."""
        all_keys = [set(variant.model_fields) for variant in self.variants.values()]
        return {key for keys in all_keys for key in keys if not all(key in others for others in all_keys)}


_DATA, _MIXED = Kinds(DATA_KINDS), Kinds(MIXED_KINDS)
TAGGED: Mapping[KeyPath, Kinds] = {
    ("data",): _DATA,
    ("data", "sources"): _MIXED,
    ("validation", "data"): _DATA,
    ("validation", "data", "sources"): _MIXED,
    ("lr_scheduler",): Kinds(
        {choices(section.model_fields["kind"].annotation)[0]: section for section in alternatives(SchedulerConfig)}
    ),
}
"""The kinds of each table with a key `kind`, by the path of the table or of the array of tables."""


def kinds_of(table: KeyPath) -> Kinds | None:
    """Return the kinds of the table at a path; None if the table has no `kind`. The path may contain indices of
    arrays."""
    return TAGGED.get(tuple(part for part in table if isinstance(part, str)))
