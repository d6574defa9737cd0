"""URLs of object stores in a job: the path of a local copy replaces the URL of each file or folder that a run reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from titan_launch.core.errors import ConfigError, KeyPath, Problem, RunError, config_error, format_key, scalars
from titan_launch.core.object_store import CREDENTIALS, StoreError, has_credentials, is_url, local_copy

_DATA: tuple[KeyPath, ...] = (("data",), ("data", "sources"), ("validation", "data"), ("validation", "data", "sources"))

READ: frozenset[KeyPath] = frozenset(
    {
        ("model", "path"),
        ("model", "weights"),
        ("lora", "adapter"),
        ("tokenizer", "path"),
        *((*data, name) for data in _DATA for name in ("path", "template")),
        *(("loss", name, "reference") for name in ("dpo", "ipo", "kto")),
        ("loss", "distillation", "teacher"),
        ("checkpoint", "load"),
        ("checkpoint", "initial_load_path"),
        ("planner", "speeds"),
        ("prove", "certificate"),
    }
)
"""Keys of files and folders that a run reads, without the indices of arrays. URLs in other keys are not copied."""

WRITTEN: Mapping[KeyPath, str] = {
    ("job", "dump_folder"): "; to copy checkpoints to an object store, set checkpoint.store",
    ("compile", "cache_folder"): "",
}
"""Keys of local folders that a run writes, each with text for the end of the error about a URL."""

STORE: KeyPath = ("checkpoint", "store")
"""Key of a URL to which a run writes."""

_KNOWN = READ | {*WRITTEN, STORE}


def has_copies(table: Mapping[str, Any]) -> bool:
    """Return True if a key of `READ` has a URL."""
    return any(_name(key) in READ for key, _ in _urls(table))


def with_local_copies(table: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return (table, problems). In the returned table, the path of a local copy replaces each URL of `READ`. A URL that
    cannot be copied stays in the table, and is reported as a problem. If a key of `WRITTEN` has a URL, this URL is
    reported, and nothing is copied. Raises UserError if the cache cannot be written, and ConfigError, without the
    value, for a URL with credentials. Raises RunError if a store does not answer: after this error, `launch` may start
    the ranks again."""
    urls = list(_urls(table))
    for key, url in urls:
        if has_credentials(url):
            raise config_error(key, CREDENTIALS)
    reason = "must be a local folder, because the run writes to it"
    problems = [Problem(key, reason + WRITTEN[_name(key)], url) for key, url in urls if _name(key) in WRITTEN]
    copies: dict[KeyPath, str] = {}
    for key, url in () if problems else urls:
        if _name(key) in READ:
            try:
                copies[key] = str(local_copy(url))
            except StoreError as error:
                if not error.is_final:
                    raise RunError(f"{format_key(key)} = {url}: {error}") from None
                problems.append(Problem(key, str(error), url))

    def local(value: Any, key: KeyPath) -> Any:
        if isinstance(value, dict):
            return {name: local(item, (*key, name)) for name, item in value.items()}
        if isinstance(value, list):
            return [local(item, (*key, index)) for index, item in enumerate(value)]
        return copies.get(key, value)

    return local(dict(table), ()), problems


def local_sections(record: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the `config.json` of a run with local copies in the sections `names`. Raises ConfigError for a URL that
    cannot be copied."""
    sections, problems = with_local_copies({name: record[name] for name in names if name in record})
    if problems:
        raise ConfigError(problems)
    return {**record, **sections}


def _urls(table: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key, URL) for each URL of a key of `READ`, `WRITTEN` or `STORE`. A value may be an array of URLs."""
    for key, value in scalars(table):
        if isinstance(value, str) and is_url(value) and _name(key) in _KNOWN:
            yield key, value


def _name(key: KeyPath) -> KeyPath:
    """Return a key without the indices of arrays."""
    return tuple(part for part in key if isinstance(part, str))
