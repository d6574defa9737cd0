"""Strict JSON parsers with size limits, also for files that somebody else wrote. For an invalid text, the parsers raise
only JsonError."""

from __future__ import annotations

import json
import re
from json.decoder import JSONDecodeError
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from titan_launch.core.files import MIB, read_regular
from titan_launch.core.terminal import one_line

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_T = TypeVar("_T")

MOST_BYTES = 16 * MIB
"""Default limit of the size of a file in bytes."""

MOST_VALUES = 2_000_000
"""Default limit of the number of values in a text. Each value takes about 100 bytes of memory. Each comma and each
opening bracket counts as a value, also in strings."""

MOST_DEPTH = 64
"""Limit of the depth of nested arrays and objects, because code that processes a value may be recursive."""

MOST_DIGITS = 300
"""Limit of the digits of a whole number. Any whole number within this limit is in the range of float64."""


_LONGEST_PLACE = 200
"""Number of characters after which the path to a value (`a.b.0`) is cut in a message, because keys may be long."""


class JsonError(ValueError):
    """Error for a text that is not JSON or exceeds a limit. The message can follow `not valid JSON: `."""

    def __init__(self, reason: str, line: int = 0):
        """`line`: line of the error in the text; 0 if the error has no line."""
        super().__init__(reason)
        self.line = line


def read_json(path: Path, most_bytes: int = MOST_BYTES, most_values: int = MOST_VALUES) -> Any:
    """Return the value in a JSON file. Raises OSError and JsonError."""
    return parse_json(read_regular(path, most_bytes), most_values)


def parse_json(content: bytes | str, most_values: int = MOST_VALUES, most_keys: int | None = None) -> Any:
    """Return the value in a JSON text.

    `most_keys`: limit of the number of keys; None: no limit. A key takes twice the memory of a value. Colons in strings
    count as keys.

    Raises JsonError for a text that is not JSON or exceeds a limit. Equal keys in one object, NaN, infinities, numbers
    outside of the range of float64, and halves of surrogate pairs are errors, too.
    """
    text = _decoded(content)
    del content  # a file may have 64 MiB
    _check_number_of_values(text, most_values)
    if most_keys is not None and text.count(":") > most_keys:
        raise JsonError(f"more than {most_keys:,} keys")
    value = _parsed(_STRICT, text)
    if text.count("[") + text.count("{") > MOST_DEPTH:
        _check_depth(value)
    if _ESCAPED_SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise JsonError("a string with half of a surrogate pair") from None
    return value


def parse_record(line: bytes) -> Any:
    """Return the value in a line of a data set. Raises JsonError.

    NaN, infinities and halves of surrogate pairs are allowed: a record may have fields that nothing reads.
    """
    value = _parsed(_OF_DATA, _decoded(line))
    if line.count(b"[") + line.count(b"{") > MOST_DEPTH:
        _check_depth(value)
    return value


def parse_as(adapter: TypeAdapter[_T], content: bytes, allows_nan: bool = False) -> _T:
    """Return the value in a JSON text as the type of `adapter`. Raises JsonError, also if the value has another type.

    `allows_nan`: allow NaN and infinities where the type has floating-point numbers.
    """
    from pydantic import ValidationError  # imported here, because it takes longer than the rest of this module

    if allows_nan:
        _check_number_of_values(_decoded(content), MOST_VALUES)
        parse_record(content)
    else:
        parse_json(content)
    try:
        return adapter.validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = one_line(".".join(map(str, first["loc"])))[:_LONGEST_PLACE]
        raise JsonError(f"{place}: {first['msg']}" if place else first["msg"]) from None


def reason_of(error: OSError | JsonError) -> str:
    """Return a clause that says why a file cannot be read. The clause does not name the file."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _decoded(content: bytes | str) -> str:
    try:
        return content if isinstance(content, str) else content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        assert isinstance(content, bytes)
        line = content.count(b"\n", 0, error.start) + 1
        raise JsonError(f"not UTF-8 text (byte 0x{content[error.start]:02x})", line) from None


def _parsed(decoder: json.JSONDecoder, text: str) -> Any:
    try:
        return decoder.decode(text)
    except JSONDecodeError as error:
        raise JsonError(f"{error.msg} at line {error.lineno}, column {error.colno}", error.lineno) from None
    except RecursionError:
        raise JsonError(_TOO_DEEP) from None


def _check_number_of_values(text: str, most_values: int) -> None:
    if text.count(",") + text.count("[") + text.count("{") > most_values:
        raise JsonError(f"more than {most_values:,} values")


_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

_TOO_DEEP = f"more than {MOST_DEPTH} nested arrays and objects"


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_DEPTH):
        groups = (container.values() if isinstance(container, dict) else container for container in level)
        level = [item for items in groups for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise JsonError(_TOO_DEEP)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise JsonError(f"the key {json.dumps(twice)} occurs twice in an object")
    return found


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise JsonError(f"a number of more than {MOST_DIGITS} digits")
    return int(digits)


def _real(digits: str) -> float:
    value = float(digits)
    if isinf(value):
        raise JsonError(f"the number {digits[:20]} is outside the range of float64")
    return value


def _constant(name: str) -> float:
    raise JsonError(f"{name} is not a JSON value")


_STRICT = json.JSONDecoder(object_pairs_hook=_object, parse_int=_whole, parse_float=_real, parse_constant=_constant)
_OF_DATA = json.JSONDecoder(object_pairs_hook=_object, parse_int=_whole, parse_float=_real)
