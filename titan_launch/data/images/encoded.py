"""Images in files: folders of class folders and WebDataset shards, with an index that a host builds once.

The index has the file, offset and size of each image, so that any image can be read without a search. The index is an
uncompressed `.npz` file in the cache folder, and is mapped into memory: ranks and workers share its pages.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from titan_launch.config.image_format import resized_size
from titan_launch.config.paths import IMAGE_SUFFIXES, LinkError, class_folders, refuse_links_out, tar_shards
from titan_launch.core.cache import built_once
from titan_launch.core.errors import KeyPath, UserError, config_error, listed
from titan_launch.core.files import MIB, file_state, open_regular
from titan_launch.core.fingerprint import fingerprint_of_files
from titan_launch.core.json_files import parse_record
from titan_launch.core.packages import not_installed
from titan_launch.core.terminal import one_line
from titan_launch.data.images.arrays import MOST_CLASSES, Labels, map_npz
from titan_launch.data.images.pillow import CHANNELS, MOST_BYTES, PixelFormatError, decode, opened_image

_INDEX_VERSION = 3
_INDEX_FILE = "index.npz"

_MOST_LABEL = MIB
"""Largest size in bytes of KEY.cls and KEY.json."""

_MOST_EXTENSION = 1 << 16
"""Largest size in bytes of a tar member that only contains the name or other header fields of the next member."""

_MOST_GLOBAL = 1 << 10
"""Largest size in bytes of a tar member with header fields that tarfile copies to each later member."""


@dataclass
class _Listing:
    """The columns of an index that is being built. An image is a range of bytes in a file."""

    names: list[str] = field(default_factory=list)
    """Names of the files."""
    files: list[int] = field(default_factory=list)
    """File of each image, as an index into `names`."""
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    """Hash of each image's path (folders), or of its index (shards). The hash decides the split of the image."""
    skipped: list[str] = field(default_factory=list)
    """Names of files in class folders that are not used: hidden files, and files that are not images."""

    def add_image(self, offset: int, size: int, label: int, hashed: str) -> None:
        """Add an image of the last file in `names`. `offset`, `size`: its bytes. `hashed`: text for `hashes`."""
        self.files.append(len(self.names) - 1)
        self.offsets.append(offset)
        self.sizes.append(size)
        self.labels.append(label)
        self.hashes.append(zlib.crc32(os.fsencode(hashed)))

    def save(self, folder: Path) -> None:
        """Write the index into `folder`. All names are stored as one array of bytes, with the end of each name."""
        names = [os.fsencode(name) for name in self.names]
        arrays: dict[str, Any] = {
            name: np.array(getattr(self, name), np.int64) for name in ("offsets", "sizes", "labels")
        }
        np.savez(
            folder / _INDEX_FILE,
            **arrays,
            files=np.array(self.files, np.int32),
            hashes=np.array(self.hashes, np.uint32),
            names=np.frombuffer(b"".join(names), np.uint8),
            name_ends=np.cumsum([len(name) for name in names], dtype=np.int64),
            skipped=np.frombuffer(os.fsencode(self._skipped()), np.uint8),
        )

    def _skipped(self) -> str:
        if not self.skipped:
            return ""
        number = len(self.skipped)
        files = "1 file that is hidden or no image" if number == 1 else f"{number:,} files that are hidden or no images"
        return f"{files}, first: {one_line(self.skipped[0])}"


class EncodedImages:
    """Images that Pillow decodes: an implementation of `data.sources.images.Images`. Each read opens the file again, so
    processes share no open files."""

    def __init__(self, root: Path, index: Path, channels: int):
        """`root`: the folder to which the names in the index are relative. `index`: the file of the index. `channels`:
        number of channels of the decoded images: 1, 3 or 4."""
        arrays = map_npz(index, _ARRAYS)
        self.labels: Labels = arrays["labels"]
        self.skipped = os.fsdecode(arrays["skipped"].tobytes())
        self._root, self._index_file, self._channels = root, index, channels
        self._arrays = arrays

    def as_file(self, chosen: npt.NDArray[np.int64]) -> tuple[str, int]:
        """See `Images.as_file`. The name is a digest of the hashes, sizes and classes of the images."""
        digest = hashlib.blake2b(digest_size=16)
        for column in ("hashes", "sizes", "labels"):
            digest.update(self._arrays[column][chosen].tobytes())
        return digest.hexdigest(), int(self._arrays["sizes"][chosen].sum())

    def hashes(self) -> npt.NDArray[np.uint32]:
        return self._arrays["hashes"]

    def name(self, index: int) -> str:
        path = self._path(index)
        offset = int(self._arrays["offsets"][index])
        if not offset:
            return one_line(str(path))
        try:
            with open_regular(path) as file:
                file.seek(offset - tarfile.BLOCKSIZE)
                member = tarfile.TarInfo.frombuf(file.read(tarfile.BLOCKSIZE), "utf-8", "surrogateescape").name
        except (OSError, tarfile.TarError):
            member = f"the image at byte {offset}"
        return one_line(f"{member} in {path}")

    def content(self, index: int) -> bytes:
        """Return the encoded image. Raises UserError if the file cannot be read, if the image no longer has the size in
        the index, or if the image is too large."""
        size, offset = int(self._arrays["sizes"][index]), int(self._arrays["offsets"][index])
        if size > MOST_BYTES:
            limit = f"{MOST_BYTES // MIB} MiB, the limit of an image file"
            raise UserError(f"{self.name(index)} is larger than {limit}; make the image smaller")
        try:
            with open_regular(self._path(index)) as file:
                file.seek(offset)
                content = file.read(size if offset else size + 1)
        except OSError as error:
            path = one_line(str(self._path(index)))
            raise UserError(f"{path} cannot be read: {error.strerror or error}; restore the file") from None
        if len(content) != size:
            found = f"{len(content)} bytes" if len(content) < size else "more bytes"
            raise UserError(
                f"{self.name(index)} has {found}, but had {size} bytes when it was indexed; restore the file, "
                f"or delete the index {self._index_file.parent} and start again"
            )
        return content

    def pixels(self, index: int, resize: int | None) -> Tensor:
        """Return an image `[channels, height, width]`, upright: uint8, or float32 for 16-bit gray. Raises UserError if
        `content` fails, if Pillow cannot decode the image, or if `decode` refuses it.

        If the shorter side of a JPEG has at least four times `resize` pixels, decoding scales the JPEG by 1/2, 1/4 or
        1/8, which is much faster.
        """
        try:
            with opened_image(self.content(index)) as image:
                if resize is not None:
                    height, width = resized_size(image.height, image.width, 2 * resize)
                    image.draft(CHANNELS[self._channels], (width, height))
                return decode(image, self._channels)
        except PixelFormatError as error:
            raise UserError(f"{self.name(index)} {error}") from None

    def _path(self, index: int) -> Path:
        ends, file = self._arrays["name_ends"], int(self._arrays["files"][index])
        return self._root / os.fsdecode(self._arrays["names"][ends[file - 1] if file else 0 : ends[file]].tobytes())


_ARRAYS = ("labels", "files", "offsets", "sizes", "hashes", "names", "name_ends", "skipped")


def open_folder(path: str, channels: int, path_key: KeyPath) -> EncodedImages:
    """Return the images of a folder of class folders. Raises ConfigError on `path_key`, and UserError if the cache
    cannot be written."""
    root = Path(path).resolve()
    with _errors_on(path_key, path):
        classes = class_folders(path)
        if not classes:
            raise _ImagesError("contains no class folders; put the images of each class into a folder of its own")
        for name in classes:
            refuse_links_out([root / name], root)
        folders = [
            (str(below.relative_to(root)), *file_state(below)) for name in classes for below in _folders(root / name)
        ]

    def build(folder: Path) -> None:
        listing = _Listing()
        with _errors_on(path_key, path):
            for label, name in enumerate(classes):
                _list_class(root, name, label, listing)
            used = set(listing.labels)
            if empty := [one_line(name) for label, name in enumerate(classes) if label not in used]:
                which = "this class folder contains" if len(empty) == 1 else "these class folders contain"
                remedy = f"add images ({', '.join(IMAGE_SUFFIXES)}), or remove the folder"
                raise _ImagesError(f"{which} no image: {listed(empty)}; {remedy}")
        listing.save(folder)

    return _open(root, folders, build, channels, path, path_key)


def open_shards(path: str, label_field: str | None, channels: int, path_key: KeyPath) -> EncodedImages:
    """Return the images of WebDataset shards. `label_field`: field of KEY.json that contains the class; None: KEY.cls
    contains the class. Raises ConfigError on `path_key`, and UserError if the cache cannot be written."""
    try:
        shards = tar_shards(path)
    except FileNotFoundError as error:
        raise config_error(path_key, f"no file matches {error}; correct the path", path) from None
    except LinkError as error:
        raise config_error(path_key, f"{error}, or name the target", path) from None
    root = Path(os.path.commonpath([shard.resolve().parent for shard in shards]))
    names = [str(shard.resolve().relative_to(root)) for shard in shards]

    def build(folder: Path) -> None:
        listing = _Listing()
        for name in names:
            listing.names.append(name)
            try:
                _list_shard(root / name, label_field, listing)
            except _ImagesError as error:
                raise config_error(path_key, f"{one_line(name)} {error}", path) from None
            except OSError as error:
                raise config_error(path_key, _why_unread(error, name), path) from None
            except Exception as error:  # tarfile raises many types of errors for damaged headers
                found = one_line(str(error) or type(error).__name__)
                reason = f"is truncated, or not an uncompressed tar file ({found:.200}); write or copy it again"
                raise config_error(path_key, f"{one_line(name)} {reason}", path) from None
        if not listing.labels:
            found = listed([one_line(name) for name in names])
            label = "KEY.cls" if label_field is None else "KEY.json"
            raise config_error(path_key, f"contains no images ({found}); write KEY.jpg and {label}", path)
        listing.save(folder)

    with _errors_on(path_key, path):
        states = [(name, *file_state(root / name)) for name in names]
        sample = fingerprint_of_files([(name, root / name) for name in names]).content
    return _open(root, [label_field, states, sample], build, channels, path, path_key)


def _open(root: Path, identity: Any, build: Any, channels: int, path: str, path_key: KeyPath) -> EncodedImages:
    try:
        import PIL.Image  # noqa: F401 - optional; the error is raised before the index is built
    except ImportError:
        raise config_error(path_key, not_installed("PIL"), path) from None
    if channels not in CHANNELS:
        reason = f"image files have 1, 3 or 4 channels, but the model takes {channels}; save arrays in an .npz file"
        raise config_error(path_key, reason, path)

    folder = built_once("images", [_INDEX_VERSION, str(root), identity], build, f"{'indexing images:':26} {path}")
    return EncodedImages(root, folder / _INDEX_FILE, channels)


def _folders(folder: Path) -> Iterator[Path]:
    """Yield a folder and all folders below it, sorted by name. Hidden folders and links to folders are omitted."""
    rest = [folder]
    while rest:
        folder = rest.pop()
        yield folder
        with os.scandir(folder) as entries:
            below = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False) and entry.name[0] != "."]
        rest += (folder / name for name in sorted(below, reverse=True))


@contextmanager
def _errors_on(path_key: KeyPath, path: str) -> Iterator[None]:
    """Replace a LinkError, an _ImagesError or an OSError in the block by a ConfigError on `path_key`. `path`: value of
    the key."""
    try:
        yield
    except (LinkError, _ImagesError) as error:
        raise config_error(path_key, str(error), path) from None
    except OSError as error:
        raise config_error(path_key, _why_unread(error), path) from None


def _why_unread(error: OSError, name: str = "") -> str:
    """Return the reason why a file or folder cannot be read, with a remedy. `name`: name of the file or folder; ""
    means the name in `error`."""
    found = one_line(name or str(error.filename or "a file"))
    return f"{found} cannot be read: {error.strerror or error}; correct the permissions, or remove it"


def _list_class(root: Path, name: str, label: int, listing: _Listing) -> None:
    """Add the images of the class folder `name` to the listing. Raises OSError, and LinkError for a link that leads out
    of `root`."""
    for folder in _folders(root / name):
        with os.scandir(folder) as entries:
            files = sorted((entry for entry in entries if not entry.is_dir()), key=lambda entry: entry.name)
        for entry in files:
            path = str(Path(entry.path).relative_to(root))
            if entry.is_file() and entry.name.lower().endswith(IMAGE_SUFFIXES) and entry.name[0] != ".":
                if entry.is_symlink():
                    refuse_links_out([Path(entry.path)], root)
                size = entry.stat().st_size
                listing.names.append(path)
                listing.add_image(0, size, label, path)
            else:
                listing.skipped.append(path)


class _ImagesError(Exception):
    """Error for images that cannot be used. The message can follow the name of their folder or shard."""


class _Member(tarfile.TarInfo):
    """A member of a tar file. The file may come from other people, so its headers are checked."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        """Read the rest of a header. Raises _ImagesError for a header of many bytes, because tarfile reads the whole
        header into memory. Also raises _ImagesError for a negative size, because some releases of tarfile then loop
        forever."""
        is_global = self.type == tarfile.XGLTYPE
        is_extension = self.type in (*_EXTENSIONS, tarfile.XGLTYPE)
        if is_extension and self.size > (_MOST_GLOBAL if is_global else _MOST_EXTENSION):
            raise _ImagesError(f"has a header of {self.size:,} bytes at byte {self.offset:,}; {_REPACK}")
        found: tarfile.TarInfo = super()._proc_member(tar)  # type: ignore[misc]
        if tar.offset <= self.offset or found.size < 0:
            raise _ImagesError(f"has a member of negative size at byte {self.offset:,}; {_REPACK}")
        found.pax_headers = {}
        return found


_EXTENSIONS = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
"""Types of members that describe the next member."""

_REPACK = "write the file with tar again"


def _list_shard(path: Path, label_field: str | None, listing: _Listing) -> None:
    """Add the images of a tar file to the listing. Raises _ImagesError, OSError, and many other types for a damaged
    file."""
    label_end = "cls" if label_field is None else "json"
    with open_regular(path) as file, tarfile.open(fileobj=file, mode="r:", tarinfo=_Member) as tar:
        regular = [member for member in tar if member.isreg() and not member.issparse()]
        if os.pread(file.fileno(), tarfile.BLOCKSIZE, tar.offset) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("it has no end-of-archive block")
        for key, group in itertools.groupby(regular, lambda member: _key_and_end(member)[0]):
            shown = f"{one_line(key):.200}"
            members: dict[str, tarfile.TarInfo] = {}
            for member in group:
                if members.setdefault(_key_and_end(member)[1], member) is not member:
                    raise _ImagesError(f"has several members {one_line(member.name):.200}; give each image its own key")
            images = [end for end in members if f".{end.lower()}" in IMAGE_SUFFIXES]
            if len(images) != 1:
                raise _ImagesError(f"has {len(images)} images with the key {shown}; write one image for each key")
            if label_end not in members:
                remedy = "write it, or set label_field for KEY.json" if label_field is None else "write it"
                raise _ImagesError(f"has no member {shown}.{label_end} with the class of the image; {remedy}")
            image, label = members[images[0]], members[label_end]
            content = os.pread(file.fileno(), min(label.size, _MOST_LABEL + 1), label.offset_data)
            index = len(listing.labels)
            found = _label(content, label_field, f"{shown}.{label_end}")
            listing.add_image(image.offset_data, image.size, found, str(index))


def _key_and_end(member: tarfile.TarInfo) -> tuple[str, str]:
    """Return (key, extension): the name of a member, divided at the first dot of its last part, as in WebDataset."""
    folder, slash, name = member.name.rpartition("/")
    stem, _, end = name.partition(".")
    return f"{folder}{slash}{stem}", end


def _label(content: bytes, label_field: str | None, name: str) -> int:
    """Return the class in the content of KEY.cls or KEY.json. `name`: name of the member. Raises _ImagesError for
    content without a valid class."""
    if len(content) > _MOST_LABEL:
        raise _ImagesError(f"contains {name} of more than {_MOST_LABEL // MIB} MiB; write only the class")
    try:
        label = int(content) if label_field is None else parse_record(content)[label_field]
    except (ValueError, KeyError, TypeError):
        what = "a whole number" if label_field is None else f"a field {label_field}"
        raise _ImagesError(f"contains {name} without {what}; write the class as a whole number from 0") from None
    if type(label) is not int or label < 0:
        raise _ImagesError(f"contains {name} with the class {label!r:.40}; number the classes from 0")
    if label >= MOST_CLASSES:
        reason = f"beyond {MOST_CLASSES:,}, the limit of classes"
        raise _ImagesError(f"contains {name} with the class {label!r:.40}, {reason}; number the classes from 0")
    return label
