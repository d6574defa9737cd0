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

    def is_changed(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
        """Whether a table laid over another one makes it another kind."""
        return "kind" in new and new["kind"] != old.get("kind", self.default)

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
