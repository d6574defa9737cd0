"""URLs of object stores in a job: each is replaced by the path of a local copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from titan_launch.core.errors import ConfigError, KeyPath, Problem
from titan_launch.core.object_store import StoreError, is_url, local_copy

_STORE: KeyPath = ("checkpoint", "store")
"""The key whose URL stays, because a run writes there."""

_WRITTEN: Mapping[KeyPath, str] = {
    ("job", "dump_folder"): "; checkpoint.store copies checkpoints to an object store",
    ("compile", "cache_folder"): "",
}
"""Keys of folders that a run writes, each with a further remedy."""


def with_local_copies(table: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return a job's table with the path of a local copy in place of each URL, and a problem for each URL that cannot
    be copied. Such a URL stays. Raises UserError if the cache cannot be written."""
    problems: list[Problem] = []

    def local(value: Any, key: KeyPath) -> Any:
        if isinstance(value, dict):
            return {name: local(item, (*key, name)) for name, item in value.items()}
        if isinstance(value, list):
            return [local(item, (*key, index)) for index, item in enumerate(value)]
        if not isinstance(value, str) or not is_url(value) or key == _STORE:
            return value
        try:
            if key in _WRITTEN:
                raise StoreError(f"must be a local folder, because the run writes to it{_WRITTEN[key]}")
            return str(local_copy(value))
        except StoreError as error:
            problems.append(Problem(key, str(error), value))
            return value

    return local(dict(table), ()), problems


def local_sections(record: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the `config.json` of a run with local copies in the sections `names`. Raises ConfigError for a URL that
    cannot be copied."""
    sections, problems = with_local_copies({name: record[name] for name in names if name in record})
    if problems:
        raise ConfigError(problems)
    return {**record, **sections}
