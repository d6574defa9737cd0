"""Line numbers of the keys of a TOML document, which tomli does not report, and messages for tomli's syntax errors."""

from __future__ import annotations

import re
from contextlib import suppress

import tomli

from titan_launch.config.loading.limits import MOST_DEPTH
from titan_launch.core.errors import KeyPath, format_key

_GAP = re.compile(r"(?:\s|#[^\n]*)*")
_KEY_PART = re.compile(r"""[A-Za-z0-9_-]+|"(?:\\.|[^"\\\n])*"|'[^'\n]*'""")
_DOT = re.compile(r"[ \t]*\.[ \t]*")
_EQUALS = re.compile(r"[ \t]*=[ \t]*")
_HEADER_OPEN, _HEADER_CLOSE = re.compile(r"\[\[?[ \t]*"), re.compile(r"[ \t]*\]\]?")
_SCALAR = re.compile(r"[^,\]}#\n]+")
# Three quotes come first, because the first two would match as an empty string. `(?!")`: a string may end with quotes.
_STRING = re.compile(r'''"""(?:\\.|[^\\])*?"""(?!")|\'\'\'.*?\'\'\'(?!')|"(?:\\.|[^"\\\n])*"|'[^'\n]*\'''', re.DOTALL)


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line (from 1) of every key, table header and array item of a valid TOML document.

    A table without a header of its own, such as `a` in `a.b = 1`, has the line of its first key.
    """
    scanner = _Scanner(text)
    scanner.scan()
    return scanner.lines


def repeated_key(text: str) -> tuple[KeyPath, int] | None:
    """Return the first key or header that appears twice in a document, and the line of its first appearance. Return
    None if no key appears twice, or if the syntax is wrong before the repetition."""
    scanner = _Scanner(text)
    with suppress(ValueError):
        scanner.scan()
    return scanner.repeated


class _Scanner:
    """A scanner of a TOML document that records the line of each key. It raises ValueError if the syntax is wrong."""

    def __init__(self, text: str):
        self.text = text.replace("\r\n", "\n")
        self.at = 0
        self.lines: dict[KeyPath, int] = {}
        self.repeated: tuple[KeyPath, int] | None = None
        """The first key or header that appears twice, and the line of its first appearance."""
        self._named: dict[KeyPath, int] = {}
        self._line, self._line_at = 1, 0
        self._last_item: dict[KeyPath, int] = {}

    def scan(self) -> None:
        table: KeyPath = ()
        while self._skip_gap():
            if self.text[self.at] == "[":
                table = self._header()
            else:
                self._pair(table)

    def _header(self) -> KeyPath:
        is_item = self._take(_HEADER_OPEN).startswith("[[")
        *parents, name = self._key()
        key = (*self._resolve(parents), name)
        if is_item:
            self.lines.setdefault(key, self._current_line())
            self._last_item[key] = self._last_item.get(key, -1) + 1
        key = self._resolve([*parents, name])
        self._name(key)
        self._take(_HEADER_CLOSE)
        return key

    def _resolve(self, parts: list[str]) -> KeyPath:
        """Return the path of the table that a header names, with indices of arrays. In a header, the name of an array
        of tables stands for its last item so far."""
        key: KeyPath = ()
        for part in parts:
            key = (*key, part)
            if key in self._last_item:
                key = (*key, self._last_item[key])
        return key

    def _pair(self, table: KeyPath) -> None:
        key = (*table, *self._key())
        self._name(key)
        self._take(_EQUALS)
        self._value(key)

    def _key(self) -> list[str]:
        parts = [_unquote(self._take(_KEY_PART))]
        while _DOT.match(self.text, self.at):
            self._take(_DOT)
            parts.append(_unquote(self._take(_KEY_PART)))
        return parts

    def _value(self, key: KeyPath) -> None:
        if len(key) > MOST_DEPTH:
            raise ValueError("nested too deeply")
        first = self.text[self.at : self.at + 1]
        if first == "[":
            self._array(key)
        elif first == "{":
            self._inline_table(key)
        else:
            self._take(_STRING if first in ('"', "'") else _SCALAR)

    def _array(self, key: KeyPath) -> None:
        self.at += 1
        index = 0
        while self._skip_gap() and self.text[self.at] != "]":
            item = (*key, index)
            self.lines[item] = self._current_line()
            self._value(item)
            self._skip_comma()
            index += 1
        self.at += 1

    def _inline_table(self, key: KeyPath) -> None:
        self.at += 1
        while self._skip_gap() and self.text[self.at] != "}":
            self._pair(key)
            self._skip_comma()
        self.at += 1

    def _skip_comma(self) -> None:
        if self._skip_gap() and self.text[self.at] == ",":
            self.at += 1

    def _skip_gap(self) -> bool:
        """Skip blanks, line ends and comments. Return True if more text follows."""
        self._take(_GAP)
        return self.at < len(self.text)

    def _take(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        if found is None:
            raise ValueError(f"unexpected text in line {self._current_line()}")
        self.at = found.end()
        return found.group()

    def _name(self, key: KeyPath) -> None:
        """Record the line of a key, and of the tables that the key creates."""
        if len(key) > MOST_DEPTH:
            raise ValueError("nested too deeply")
        line = self._current_line()
        if key in self._named and self.repeated is None:
            self.repeated = key, self._named[key]
        self._named[key] = line
        for length in range(1, len(key)):
            self.lines.setdefault(key[:length], line)
        self.lines[key] = line

    def _current_line(self) -> int:
        self._line += self.text.count("\n", self._line_at, self.at)
        self._line_at = self.at
        return self._line


def _unquote(part: str) -> str:
    if part.startswith("'"):
        return part[1:-1]
    return str(tomli.loads(f"key = {part}")["key"]) if part.startswith('"') else part


_AT = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_REPETITIONS = ("Cannot overwrite a value", "Cannot declare", "Duplicate inline table key")


def explain_toml_error(path: str, text: str, error: tomli.TOMLDecodeError) -> str:
    """Return a message of one line, with the location of a syntax error, the reason, and the remedy if it is known."""
    what, line, column = _split_message(str(error), text)
    if what.startswith(_REPETITIONS):
        repeated = repeated_key(text)
        if repeated is not None:
            key, first_line = repeated
            return f"{path}:{line}: {format_key(key)}: is set twice, first in line {first_line}; remove one of the two"
    return f"{path}:{line}: not valid TOML: {what}{column}{_remedy(what, text, line)}"


def _split_message(message: str, text: str) -> tuple[str, int, str]:
    """Split tomli's message into (reason, line, note). The note names the column; it is "" if the column is unknown."""
    at = _AT.search(message)
    if at is None:
        return message, 1, ""
    what = message[: at.start()]
    if at[1] is None:
        return f"{what} before the end of the file", len(text.rstrip().splitlines()) or 1, ""
    return what, int(at[1]), f" (column {at[2]})"


def _remedy(what: str, text: str, line: int) -> str:
    """Return the remedy for one of the most common mistakes; "" for any other mistake."""
    if what == r"Illegal character '\n'":
        return "; close the string on the same line, with the quotes that open it"
    if what != "Invalid value":
        return ""
    value = text.splitlines()[line - 1].partition("=")[2].partition("#")[0].strip()
    if value in ("True", "False"):
        return f"; write {value.lower()}"
    return f'; a string needs quotes: "{value}"' if value[:1].isalpha() else ""
