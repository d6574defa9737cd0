"""The tables whose keys depend on their `kind`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from titan_launch.config.base import Section
from titan_launch.config.data import DataConfig
from titan_launch.config.lr_scheduler import SchedulerConfig
from titan_launch.errors import KeyPath


class Kinds:
    """The kinds of one table."""

    def __init__(self, tagged_union: Any):
        union, *_ = get_args(tagged_union)
        self.variants: Mapping[str, type[Section]] = {_tag(variant): variant for variant in get_args(union)}
        """The section class of every kind."""
        self.default: str = next(iter(self.variants))
        """What a table without `kind` is: the first of the union."""

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


_DATA = Kinds(DataConfig)
TAGGED: Mapping[KeyPath, Kinds] = {
    ("data",): _DATA,
    ("validation", "data"): _DATA,
    ("lr_scheduler",): Kinds(SchedulerConfig),
}
"""The tables that have a `kind`."""
