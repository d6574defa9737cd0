"""Reading of job files (TOML or JSON), with the files that they extend."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import tomli

import titan_launch
from titan_launch.config.loading.limits import MOST_BYTES, MOST_DEPTH, MOST_FILES, outside_of_limits
from titan_launch.config.loading.provenance import report, toml_value
from titan_launch.core.errors import KeyPath, UserError, did_you_mean, format_key, nearest
from titan_launch.core.files import read_regular
from titan_launch.core.terminal import shortened


class JobFile:
    """One file of a job, within the limits of `limits.py`. Its keys and values are not validated yet."""

    def __init__(self, path: str):
        self.path = path
        """Path from the command line, or from the `extends` of another file. A relative path is relative to the working
        directory. If the name of a job file in the package is given, this is the path of that file."""
        self._text = _read_text(path)
        self.table: dict[str, Any] = _parse(path, self._text)
        """Content of the file, without `extends`."""
        if found := outside_of_limits(self.table):
            key, reason = found
            place = self.find(key)[1] if len(key) <= MOST_DEPTH else path
            raise _FileError(f"{place}: {shortened(format_key(key), 200)}{': ' * bool(key)}{reason}")
        self.extends = self.table.pop("extends", [])

    def find(self, key: KeyPath) -> tuple[int, str]:
        """Return (line, `FILE:LINE`) of a key. If the key has no line, use the line of the nearest table around it. If
        there is no such line either, return (0, path)."""
        for length in range(len(key), 0, -1):
            line = self._lines.get(key[:length])
            if line is not None:
                return line, f"{self.path}:{line}"
        return 0, self.path

    @cached_property
    def _lines(self) -> dict[KeyPath, int]:
        if _is_json(self.path):
            return {}
        from titan_launch.config.loading.toml_positions import key_lines

        return key_lines(self._text)


@dataclass(frozen=True)
class FolderFile:
    """The `config.json` in a folder of a model, which is merged before the job files, so that all job files override
    its keys."""

    path: str
    table: dict[str, Any]

    def find(self, key: KeyPath) -> tuple[int, str]:
        """Return (0, path): the line is unknown."""
        return 0, self.path


def read_job(path: str) -> list[JobFile]:
    """Return a job file and all files that it extends, in the order in which they are merged. The job file is the last.

    `path`, and the paths in `extends`, may also be names of job files in the package (`llama_bn`). A file that several
    files extend is merged once, before the first of them. Raises UserError with the problems of all files.
    """
    reader = _Reader()
    reader.read(path, place=None)
    if reader.problems:
        raise UserError(report(reader.problems, path))
    return reader.files


class _FileError(Exception):
    """The error for a file that cannot be read. The message has the location and the reason."""


class _Reader:
    def __init__(self) -> None:
        self.files: list[JobFile] = []
        self.problems: list[str] = []
        self._chain: list[str] = []
        self._done: set[str] = set()

    def read(self, path: str, place: str | None) -> None:
        """Add to `files` the files that a file extends, and then the file itself. Add the problems of these files to
        `problems`. `place`: location of the `extends` that names the file; None for the job file."""
        try:
            path = _named(path)
        except _FileError as error:
            self.problems.append(f"{place}: {error}" if place else str(error))
            return
        identity = os.path.realpath(path)
        if path in self._chain or identity in map(os.path.realpath, self._chain):
            self.problems.append(
                f"{place}: files extend each other: {' -> '.join([*self._chain, path])}; remove one of the extends keys"
            )
        elif len(self._done) == MOST_FILES:
            raise UserError(f"error: {place}: the job has more than {MOST_FILES} files; merge some of them")
        elif identity not in self._done:
            self._done.add(identity)
            try:
                self._read(JobFile(path))
            except _FileError as error:
                self.problems.append(f"{place}: {error}" if place and not os.path.isfile(path) else str(error))

    def _read(self, file: JobFile) -> None:
        self._chain.append(file.path)
        for base, place in self._bases(file):
            self.read(base, place)
        self._chain.pop()
        self.files.append(file)

    def _bases(self, file: JobFile) -> list[tuple[str, str]]:
        """Return the path of each file that `file` extends, with the location of the `extends` key."""
        names = [file.extends] if isinstance(file.extends, str) else file.extends
        if names == []:
            return []
        _, place = file.find(("extends",))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            given = f"{place}: extends = {shortened(toml_value(names))}"
            self.problems.append(f"{given}: must be the path of a file, or an array of paths")
            return []
        folder = os.path.dirname(file.path)
        paths = [name if _is_plain(name) else os.path.normpath(os.path.join(folder, name)) for name in names]
        return [
            (path, f"{place}: extends = {shortened(toml_value(name))}") for path, name in zip(paths, names, strict=True)
        ]


_SUFFIXES = (".toml", ".json")


def _is_plain(name: str) -> bool:
    """Return True if a text is the name of a job file in the package, or looks like a name instead of a path."""
    return not name.endswith(_SUFFIXES) and (os.sep not in name or name in carried_configs())


_NEEDS_CHECKOUT = ("custom_model",)
"""Names of job files in the package that cannot be used, because they need files that only the repository has."""


@cache
def carried_configs() -> dict[str, Path]:
    """Return the path of each job file in the package, by its name without suffix, such as `llama_bn` or
    `precision/fp32`."""
    folder = Path(titan_launch.__file__).parent / "configs"
    found = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.toml")}
    names = sorted(found.keys() - {*_NEEDS_CHECKOUT}, key=lambda name: ("/" in name, name))
    return {name: found[name] for name in names}


def _named(path: str) -> str:
    """Return the path of a job file in the package, if `path` is its name, such as `llama_bn`. Return any other path,
    and the path of an existing file, unchanged. Raises _FileError for an unknown name."""
    if not _is_plain(path) or os.path.exists(path):
        return path
    known = carried_configs()
    if path not in known:
        names = ", ".join(name for name in known if "/" not in name)
        hint = _similar_file(path) or did_you_mean(path, known)
        shown = shortened(path, _MAX_PATH_LENGTH)
        raise _FileError(f"{shown}: no such file, and no job file of this package, which has {names}{hint}")
    return str(known[path])


def _is_json(path: str) -> bool:
    return path.endswith(".json")


def _read_text(path: str) -> str:
    shown = shortened(path, _MAX_PATH_LENGTH)
    if os.path.isdir(path):
        raise _FileError(f"{shown}: is a folder; name a job file in it")
    try:
        data = read_regular(Path(path), MOST_BYTES[".json" if _is_json(path) else ".toml"])
    except FileNotFoundError:
        raise _FileError(f"{shown}: no such file{_similar_file(path)}") from None
    except OSError as error:
        raise _FileError(f"{shown}: cannot be read: {error.strerror}; correct this, or name another file") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _FileError(f"{path}:{line}: not UTF-8 text (byte 0x{data[error.start]:02x}); save it as UTF-8") from None


_MAX_PATH_LENGTH = 300


def _similar_file(path: str) -> str:
    """Return a hint for a missing file: the most similar name in its folder, or that the folder is missing. Return ""
    if there is no hint."""
    folder = os.path.dirname(path)
    try:
        entries = os.listdir(folder or ".")
    except OSError:
        return "" if os.path.isdir(folder or ".") else f' (the folder "{shortened(folder)}" does not exist)'
    by_stem = {_stem(entry): os.path.join(folder, entry) for entry in entries if entry.endswith(_SUFFIXES)}
    near = nearest(_stem(path), by_stem)
    return f'; the folder has "{os.path.basename(by_stem[near])}"' if near else ""


def _stem(path: str) -> str:
    return os.path.splitext(os.path.basename(path))[0]


def _parse(path: str, text: str) -> dict[str, Any]:
    try:
        return _parse_json(path, text) if _is_json(path) else tomli.loads(text)
    except RecursionError:
        raise _FileError(f"{path}: nested too deeply; use only sections, keys, and arrays of tables") from None
    except tomli.TOMLDecodeError as error:
        from titan_launch.config.loading.toml_positions import explain_toml_error

        raise _FileError(explain_toml_error(path, text, error)) from None
    except ValueError:
        raise _FileError(f"{path}: not valid TOML: a number has thousands of digits; write a shorter number") from None


def _parse_json(path: str, text: str) -> dict[str, Any]:
    from titan_launch.core.json_files import JsonError, parse_json

    try:
        table = parse_json(text)
    except JsonError as error:
        place = f"{path}:{error.line}" if error.line else path
        raise _FileError(f"{place}: not valid JSON: {error}") from None
    if not isinstance(table, dict):
        raise _FileError(f"{path}: must contain a JSON object with the sections of a job")
    training = table.get("training")
    if isinstance(training, dict) and training.get("epochs") is not None:
        training.pop("steps", None)  # a run computes `steps` again from `epochs`
    return table
