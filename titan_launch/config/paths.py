"""The files that the `path` of a data source names. This module does not import torch."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from titan_launch.core.errors import listed, toml_string
from titan_launch.core.files import leads_out
from titan_launch.core.terminal import one_line

PYTHON_STDLIB = "python-stdlib"
SKLEARN_DIGITS = "sklearn-digits"

COMPRESSED = (".gz", ".zst")
"""Suffixes of compressed files."""

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""Suffixes of image files, in lower case."""


def expand_paths(path: str | tuple[str, ...], suffixes: tuple[str, ...] = ("",)) -> list[tuple[str, Path]]:
    """Return (name, file) for each file that `path` names. `path` is one entry or several, each a file, a folder, a
    glob or `python-stdlib`.

    `suffixes`: suffixes of the files that count in a folder. `.gz` or `.zst` may follow.

    The order is the same on every machine: the order of the entries, and by name within an entry. A file that several
    entries name is returned once. Names are relative to the folder, or to the folder in which a glob searches. So the
    same samples are held out for validation after the folder was moved. Raises FileNotFoundError(entry) for the first
    entry that matches no file, and LinkError for a link that leads out of a folder.
    """
    files: dict[Path, str] = {}
    for entry in (path,) if isinstance(path, str) else path:
        for name, file in _found(entry, suffixes):
            files.setdefault(file, name)
    return [(name, file) for file, name in files.items()]


def files_left_out(path: str | tuple[str, ...], suffixes: tuple[str, ...]) -> Counter[str]:
    """Return the number of files in the folders of `path` that are not read, because their suffix is not in `suffixes`.
    The numbers are by suffix, as `count_ends` returns them."""
    folders = [entry for entry in ((path,) if isinstance(path, str) else path) if os.path.isdir(entry)]
    if "" in suffixes:
        return Counter()
    names = (name for folder in folders for name, _ in _files_of(folder))
    return count_ends(name for name in names if not uncompressed(name).endswith(suffixes))


def first_names(folder: str, most: int) -> list[str]:
    """Return the names of at most `most` files below a folder, in no particular order. Subfolders that cannot be read
    are skipped. Return an empty list if the folders are nested too deeply, or if another OSError occurs."""
    with suppress(OSError, RecursionError):
        return [name for name, _ in itertools.islice(_files_of(folder), most)]
    return []


def count_ends(names: Iterable[str]) -> Counter[str]:
    """Return the number of files by suffix, such as `.txt` or `.jsonl.gz`, the most frequent suffix first."""
    found = Counter("".join(Path(name).suffixes[-1 - name.endswith(COMPRESSED) :]) for name in names)
    return Counter(dict(sorted(found.items(), key=lambda item: (-item[1], item[0]))))


def describe_ends(ends: Counter[str]) -> str:
    """Return the result of `count_ends` as text: `12 .txt, 3 .jsonl.gz`. At most four suffixes are named."""
    return listed([f"{number:,} {end or 'without a suffix'}" for end, number in ends.items()], most=4)


def glob_of_sort(path: str, end: str) -> str:
    """Return a glob for the files with the suffix `end`, as a TOML string: `"FOLDER/**/*.txt"` if `path` is a folder,
    else `"*.txt"`."""
    return toml_string(os.path.join(path, "**", f"*{end}") if os.path.isdir(path) else f"*{end}")


class LinkError(Exception):
    """The error for a link that is not followed. The message is a clause with a remedy: `has a link: ...`."""


def refuse_links_out(files: Iterable[Path], folder: Path) -> None:
    """Raise LinkError for the first file below a folder whose path has a link that leads out of the folder (see
    `leads_out`)."""
    inside: set[Path] = set()
    for file in files:
        if (file.parent not in inside and leads_out(file.parent, folder)) or (
            os.path.islink(file) and leads_out(file, folder)
        ):
            reason = f"has a link: {one_line(str(file))} leads out of the folder"
            raise LinkError(f"{reason}; replace the link by a copy of its target")
        inside.add(file.parent)


def _found(entry: str, suffixes: tuple[str, ...] = ("",)) -> list[tuple[str, Path]]:
    """Return the result of `_files_of`, sorted by name. Raises FileNotFoundError(entry) and LinkError."""
    found = sorted(_files_of(entry, suffixes))
    if not found:
        raise FileNotFoundError(entry)
    if entry != PYTHON_STDLIB and not os.path.isfile(entry):
        refuse_links_out((file for _, file in found), _folder_of(entry))
    return found


def _folder_of(entry: str) -> Path:
    """Return the entry itself if it is a folder, else the folder in which its glob searches."""
    folder = Path(entry)
    while not os.path.isdir(folder):
        folder = folder.parent
    return folder


def names_a_file(entry: str, suffixes: tuple[str, ...] = ("",)) -> bool:
    """Return True if an entry of a `path` names at least one file. The search stops at the first file. For
    `python-stdlib`, return True without a search."""
    return entry == PYTHON_STDLIB or next(_files_of(entry, suffixes), None) is not None


def _files_of(entry: str, suffixes: tuple[str, ...] = ("",)) -> Iterator[tuple[str, Path]]:
    """Return (name, file) for each file that one entry names, in no particular order. `suffixes` count in a folder."""
    if entry == PYTHON_STDLIB:
        import sysconfig  # imported here (like `glob` below), because most jobs do not need it

        stdlib = Path(sysconfig.get_paths()["stdlib"])
        files = _files_below(stdlib, without="site-packages")  # site-packages may hold 40,000 files
        return (found for found in files if found[0].endswith(".py"))
    if os.path.isdir(entry):
        return (found for found in _files_below(Path(entry)) if uncompressed(found[0]).endswith(suffixes))
    if os.path.isfile(entry):
        return iter([(Path(entry).name, Path(entry))])
    folder = _folder_of(entry)
    paths = (path for path in map(Path, _names_like(entry)) if path.is_file())
    return ((path.relative_to(folder).as_posix(), path) for path in paths)


def uncompressed(name: str) -> str:
    """Return the name of a file, or its suffixes, without a suffix of `COMPRESSED`."""
    return str(Path(name).with_suffix("")) if name.endswith(COMPRESSED) else name


def _files_below(root: Path, without: str = "") -> Iterator[tuple[str, Path]]:
    """Yield (name relative to `root`, file) for each file below a folder. Skip subfolders whose name is the value of
    `without`."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name != without]
        files = (Path(folder, name) for name in names)
        yield from ((file.relative_to(root).as_posix(), file) for file in files if file.is_file())


def _names_like(pattern: str) -> Iterator[str]:
    """Yield the paths that match a glob. `**` stands for a folder and all folders below it.

    Python's `glob` is not used: it follows every link to a folder, so it would not end if two links lead upwards.
    """
    *parts, last = pattern.split(os.sep)
    folders = [os.sep if pattern.startswith(os.sep) else ""]
    for part in (*filter(None, parts), *["**"] * (last == "**")):
        folders = _folders_like(folders, part)
    for folder in folders if last else ():
        yield from _entries_like(folder, last)


def _folders_like(folders: Iterable[str], part: str) -> list[str]:
    """Return the folders inside of `folders` that match `part`, one part of a glob. For `**`, return `folders` and all
    folders below them.

    Each folder is returned once. A link to a folder is followed only if no other path leads to this folder.
    """
    found, reached = list[str](), set[tuple[int, int]]()
    real, links = deque[str](), deque[str]()

    def add(names: Iterable[str]) -> None:
        for name in names:
            (links if os.path.islink(name) else real).append(name)

    for folder in folders:
        add([folder] if part == "**" else _entries_like(folder, part, only_folders=True))
    while real or links:
        folder = (real or links).popleft()
        try:
            state = os.stat(folder or os.curdir)
        except OSError:
            continue
        if (state.st_dev, state.st_ino) not in reached:
            reached.add((state.st_dev, state.st_ino))
            found.append(folder)
            if part == "**":
                add(_entries_like(folder, "*", only_folders=True))
    return found


def _entries_like(folder: str, part: str, only_folders: bool = False) -> list[str]:
    """Return the paths in a folder that match `part`, one part of a glob; an empty list if the folder cannot be read. A
    wildcard at the beginning does not match a dot."""
    import fnmatch
    import glob

    if not glob.has_magic(part):
        path = os.path.join(folder, part)
        return [path] if (os.path.isdir if only_folders else os.path.lexists)(path) else []
    try:
        with os.scandir(folder or os.curdir) as entries:
            names = sorted(entry.name for entry in entries if not only_folders or entry.is_dir())
    except OSError:
        return []
    shown = names if part.startswith(".") else [name for name in names if not name.startswith(".")]
    return [os.path.join(folder, name) for name in fnmatch.filter(shown, part)]


def images_named(path: str) -> Literal["digits", "folder", "shards", "npz"]:
    """Return the kind of storage that a `path` to images names; `npz` for any text that names no other kind."""
    if path == SKLEARN_DIGITS:
        return "digits"
    if os.path.isdir(path):
        return "folder"
    return "shards" if path.endswith(".tar") else "npz"


def class_folders(path: str) -> list[str]:
    """Return the sorted names of the class folders in a folder, except names that begin with a dot. Raises OSError."""
    with os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def tar_shards(path: str) -> list[Path]:
    """Return the files that a path with globs and braces names, in the order of the expanded braces. The files of one
    glob are sorted by name.

    Raises FileNotFoundError(entry) for the first entry that matches no file, LinkError, and ValueError for more than
    MOST_SHARDS files or for too many characters in their paths.
    """
    shards: list[Path] = []
    for entry in _expand_braces(path):
        shards += sorted(file for _, file in _found(entry))
        if len(shards) > MOST_SHARDS:
            raise ValueError(_TOO_MANY)
    return shards


MOST_SHARDS = 100_000
"""Largest number of files that a path with braces may name."""

_MOST_CHARACTERS = 16_000_000
"""Largest total number of characters in the paths that a path with braces stands for."""

_TOO_MANY = f"stands for more than {MOST_SHARDS:,} files"


def _expand_braces(text: str) -> list[str]:
    """Return the strings that a pattern like `{a,b}-{00..12}` stands for, as in a shell. Raises ValueError if there are
    too many strings, or if they are too long together."""
    strings: list[str] = []
    patterns = [text]
    while patterns:
        pattern = patterns.pop()
        found = next((braces for braces in _BRACES.finditer(pattern) if braces[2] or "," in braces[1]), None)
        if found is None:
            strings.append(pattern)
            continue
        if found[2]:
            bounds = (found[2], found[3])
            first, last = map(int, bounds)
            direction = 1 if first <= last else -1
            words: Sequence[int | str] = range(first, last + direction, direction)
            width = max(map(len, bounds)) if any(re.match("0.", bound) for bound in bounds) else 0
        else:
            words, width = found[1].split(","), 0
        count = len(words) + len(strings) + len(patterns)
        if count > MOST_SHARDS:
            raise ValueError(_TOO_MANY)
        if count * len(pattern) > _MOST_CHARACTERS:
            raise ValueError(f"stands for files whose paths have more than {_MOST_CHARACTERS:,} characters together")
        before, after = pattern[: found.start()], pattern[found.end() :]
        patterns += [f"{before}{str(word).zfill(width)}{after}" for word in reversed(words)]
    return strings


_BRACES = re.compile(r"\{((\d{1,9})\.\.(\d{1,9})|[^{}]*)\}")
