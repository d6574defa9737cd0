"""The line of each key of a TOML document, which tomli does not report, and tomli's syntax errors in plain words."""

from __future__ import annotations

import re

import tomli

from titan_launch.core.errors import KeyPath, format_key

_GAP = re.compile(r"(?:\s|#[^\n]*)*")
_KEY_PART = re.compile(r"""[A-Za-z0-9_-]+|"(?:\\.|[^"\\\n])*"|'[^'\n]*'""")
_DOT = re.compile(r"[ \t]*\.[ \t]*")
_EQUALS = re.compile(r"[ \t]*=[ \t]*")
_HEADER_OPEN, _HEADER_CLOSE = re.compile(r"\[\[?[ \t]*"), re.compile(r"[ \t]*\]\]?")
_SCALAR = re.compile(r"[^,\]}#\n]+")
# In this order: three quotes would also match as an empty string. `(?!")`: a string may end with quotes of its own.
_STRING = re.compile(
    r'''"""(?:\\.|[^\\])*?"""(?!")|\'\'\'.*?\'\'\'(?!')|"(?:\\.|[^"\\\n])*"|'[^'\n]*\'''',
    re.DOTALL,
)


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line (from 1) of every key, table header and array item of a valid TOML document.

    A table without a header of its own, as `a` in `a.b = 1`, has the line of its first key.
    """
    scanner = _Scanner(text)
    scanner.scan()
    return scanner.lines


def repeated_key(text: str) -> tuple[KeyPath, int] | None:
    """The first key or header that a document gives twice, and the line of its first appearance.

    The document need be valid only that far.
    """
    scanner = _Scanner(text, stop_at_repetition=True)
    try:
        scanner.scan()
    except _RepeatedKeyError as repeated:
        return repeated.key, scanner.named[repeated.key]
    except ValueError:
        pass
    return None


class _RepeatedKeyError(Exception):
    def __init__(self, key: KeyPath):
        self.key = key


class _Scanner:
    """Walks over a document and notes where keys are; ValueError where the syntax is wrong."""

    def __init__(self, text: str, stop_at_repetition: bool = False):
        self.text = text.replace("\r\n", "\n")
        self.at = 0
        self.lines: dict[KeyPath, int] = {}
        self.named: dict[KeyPath, int] = {}
        self._stop_at_repetition = stop_at_repetition
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
        """In a header, the name of an array of tables stands for its last item."""
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
        """Pass over blanks, line ends and comments. Whether anything follows."""
        self._take(_GAP)
        return self.at < len(self.text)

    def _take(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        if found is None:
            raise ValueError(f"unexpected text in line {self._current_line()}")
        self.at = found.end()
        return found.group()

    def _name(self, key: KeyPath) -> None:
        """Note the line of a key that is written out, and of tables that it brings into being."""
        line = self._current_line()
        if self._stop_at_repetition and key in self.named:
            raise _RepeatedKeyError(key)
        self.named[key] = line
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
    """One line: where a file stops being TOML, and why."""
    what, line, column = _take_apart(str(error), text)
    if what.startswith(_REPETITIONS):
        repeated = repeated_key(text)
        if repeated is not None:
            key, first_line = repeated
            return f"{path}:{line}: {format_key(key)}: given twice, first in line {first_line}; keep one of them"
    return f"{path}:{line}: not valid TOML: {what}{column}{_remedy(what, text, line)}"


def _take_apart(message: str, text: str) -> tuple[str, int, str]:
    """tomli's message as what is wrong, the line, and a note about the column."""
    at = _AT.search(message)
    if at is None:
        return message, 1, ""
    what = message[: at.start()]
    if at[1] is None:
        return f"{what} before the end of the file", len(text.rstrip().splitlines()) or 1, ""
    return what, int(at[1]), f" (column {at[2]})"


def _remedy(what: str, text: str, line: int) -> str:
    """What to do about the most common slips."""
    if what == r"Illegal character '\n'":
        return "; a string is closed, with the quotes that open it, on the same line"
    if what != "Invalid value":
        return ""
    value = text.splitlines()[line - 1].partition("=")[2].partition("#")[0].strip()
    if value in ("True", "False"):
        return f"; write {value.lower()}"
    return f'; a string needs quotes: "{value}"' if value[:1].isalpha() else ""
