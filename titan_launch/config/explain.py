"""Problems as the user reads them: one line each, with the place, the key, the value and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from titan_launch.config.provenance import Provenance
from titan_launch.errors import UNSET, Problem, format_key

_MAX_VALUE_LENGTH = 60


def render(problems: Iterable[Problem], provenance: Provenance) -> str:
    """All problems of a job, in the order of its files, lines and overrides."""
    ordered = sorted(problems, key=lambda problem: provenance.find(problem.key))
    return report([_line(problem, provenance) for problem in ordered], provenance.path)


def report(lines: Sequence[str], subject: str) -> str:
    """One problem in one line, or several below a line that counts them."""
    if len(lines) == 1:
        return f"error: {lines[0]}"
    return "\n  ".join([f"error: {len(lines)} problems in {subject}", *lines])


def _line(problem: Problem, provenance: Provenance) -> str:
    place = provenance.find(problem.key).text
    if problem.value is UNSET:
        return f"{place}: {format_key(problem.key)}: {problem.reason}"
    note = "" if provenance.is_given(problem.key) else " (default)"
    return f"{place}: {format_key(problem.key)} = {_shorten(toml_value(problem.value))}{note}: {problem.reason}"


def toml_value(value: Any) -> str:
    """A value as TOML writes it, in one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _toml_string(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{format_key((key,))} = {toml_value(item)}' for key, item in value.items())}}}"
    return "null" if value is None else str(value)


def _toml_string(text: str) -> str:
    import json  # its escapes are TOML's too

    return json.dumps(text, ensure_ascii=False)


def _shorten(text: str) -> str:
    if len(text) <= _MAX_VALUE_LENGTH:
        return text
    half = _MAX_VALUE_LENGTH // 2
    return f"{text[: half - 2]} ... {text[-half + 3 :]}"
