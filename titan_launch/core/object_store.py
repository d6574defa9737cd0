"""Object stores (`s3://`, `gs://`) through fsspec, and local copies of their objects in the cache of the host."""

from __future__ import annotations

import errno
import hashlib
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

from titan_launch.core.files import is_name_inside, open_regular, remove, sync
from titan_launch.core.packages import is_installed, not_installed
from titan_launch.core.terminal import counted, one_line, say, short_name, shortened

Value = TypeVar("Value")

_MODULES = {"s3": "s3fs", "gs": "gcsfs"}
"""For each scheme of a URL, the module of `packages.PACKAGES` that reads such URLs."""

_OPTIONS: dict[str, dict[str, int]] = {"s3": {"max_concurrency": 2}, "gs": {}}
"""Options of the module's file system class, by scheme. s3fs holds `max_concurrency` parts of 50 MB of each large file
in memory."""

_WAITS_S = (1.0, 4.0)
"""Seconds before each repetition of a failed request. The libraries repeat requests as well."""

_CONNECTIONS = 4
"""Number of objects that are transferred at the same time."""

_STALLED_S = 600.0
"""Seconds without progress after which a request fails. Progress is a transferred byte or, in a large file, a
transferred part of 50 MB. The libraries have no timeout for a server that stops reading."""

_LOCAL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""Error numbers of the local disk. These errors are raised as OSError, not as StoreError."""


class StoreError(Exception):
    """Error of an object store. The message is a clause with the reason and a remedy."""

    def __init__(self, reason: str, is_final: bool = True, is_missing: bool = False):
        """`is_final`: True if a repetition of the request would fail too. `is_missing`: True if there is no such object
        or bucket."""
        super().__init__(reason)
        self.is_final, self.is_missing = is_final, is_missing


class StoredObject(NamedTuple):
    """Properties of an object in the listing of a store."""

    size: int
    """Size in bytes."""

    etag: str
    """A text that changes with the content. In S3 it is often the MD5 digest of the content."""


def is_url(text: str) -> bool:
    """Return True if a text is the URL of an object store."""
    scheme, _, rest = text.partition("://")
    return scheme in _MODULES and bool(rest.strip("/"))


CREDENTIALS = "a URL must have no credentials; set them in the environment"
"""Reason why a URL with credentials is refused."""


def has_credentials(url: str) -> bool:
    """Return True if a URL has credentials before its bucket: `s3://KEY:SECRET@BUCKET`. No name of a bucket has `@`."""
    return "@" in url.partition("://")[2].partition("/")[0]


def module_of(url: str) -> str:
    """Return the module of `packages.PACKAGES` that reads a URL."""
    return _MODULES[url.partition(":")[0]]


class ObjectStore:
    """The objects below a URL. Their names are relative to the URL, such as `step-1/manifest.json`; an object at the
    URL itself has the name "". All methods raise StoreError, and OSError for errors of the local disk."""

    def __init__(self, url: str):
        """Make the fsspec file system, without a request. Raises StoreError if the URL's package is not installed."""
        scheme, _, path = url.partition("://")
        if not is_installed(module_of(url)):
            raise StoreError(not_installed(module_of(url)))
        try:
            import fsspec  # takes 0.1 s, and the module for the URL more

            self._path, self._callback = path.strip("/"), fsspec.Callback
            self._files: Any = fsspec.filesystem(
                scheme, use_listings_cache=False, skip_instance_cache=True, **_OPTIONS[scheme]
            )
        except Exception as error:  # a damaged installation, or wrong settings of fsspec
            found = f"{type(error).__name__}: {shortened(one_line(str(error)), 200)}"
            raise StoreError(f"fsspec fails ({found}); check its installation and its settings") from error
        # Without a handler, a request whose connection is cut also logs a traceback.
        self._files.loop.set_exception_handler(lambda *_: None)

    def listing(self, folder: str = "") -> dict[str, StoredObject]:
        """Return the objects below `folder` by their names relative to it. By default, return all objects."""
        top = self._at(folder)

        def listed() -> dict[str, StoredObject]:
            found = self._result(self._files._find(top, detail=True), self._callback())
            return {
                name[len(top) + 1 :]: StoredObject(info["size"], str(info.get("ETag") or info.get("etag")).strip('"'))
                for name, info in found.items()
                if info["type"] == "file" and not name.endswith("/")  # some programs make an empty object for a folder
            }

        return _tried(listed)

    def get(self, name: str, target: Path) -> None:
        """Copy an object to a local file."""
        self._transfer(self._files._get_file, self._at(name), str(target))

    def put(self, source: Path, name: str) -> None:
        """Copy a local file to an object. The object has its old content, or none, until all bytes have arrived."""
        self._transfer(self._files._put_file, str(source), self._at(name))

    def delete(self, name: str) -> None:
        """Delete an object. If it does not exist, do nothing."""
        try:
            _tried(lambda: self._result(self._files._rm_file(self._at(name)), self._callback()))
        except StoreError as error:
            if not error.is_missing:
                raise

    def _transfer(self, function: Callable[..., Any], *names: str) -> None:
        """Call a coroutine function of fsspec that copies a file."""

        def transfer() -> None:
            progress = self._callback()
            self._result(function(*names, callback=progress), progress)

        _tried(transfer)

    def _result(self, coroutine: Any, progress: Any) -> Any:
        """Return the result of a coroutine of fsspec. The coroutine counts bytes in `progress`. Raises the coroutine's
        error, and TimeoutError if the number of bytes does not grow (see `_STALLED_S`)."""
        from asyncio import run_coroutine_threadsafe  # not needed to load a job without URLs

        future, before = run_coroutine_threadsafe(coroutine, self._files.loop), 0
        while True:
            try:
                return future.result(_STALLED_S)
            except TimeoutError:
                if future.done():
                    raise
                if progress.value == before:
                    future.cancel()
                    raise TimeoutError(f"no bytes in {_STALLED_S:g} s") from None
                before = progress.value

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}".rstrip("/")


def in_parallel(action: Callable[[str], object], names: Iterable[str]) -> None:
    """Call `action` with each name, for several names at the same time. After an error, no further call begins, and the
    error is raised when the calls that run have ended."""
    from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait  # not needed to load a job without URLs

    pool = ThreadPoolExecutor(_CONNECTIONS)
    try:
        calls = [pool.submit(action, name) for name in names]
        wait(calls, return_when=FIRST_EXCEPTION)
    finally:
        pool.shutdown(cancel_futures=True)
    for call in calls:
        if not call.cancelled():
            call.result()


def _tried(request: Callable[[], Value]) -> Value:
    """Return the result of a request. A request that fails is repeated up to twice, except if its error is final."""
    for pause in (*_WAITS_S, None):
        try:
            return request()
        except Exception as error:  # each library has errors of its own
            if _is_local(error):
                raise
            explained = _explained(error)
            if explained.is_final or pause is None:
                raise explained from error
        time.sleep(pause)
    raise AssertionError


def _is_local(error: Exception) -> bool:
    if not isinstance(error, OSError):
        return False
    # Without a file name, EACCES is an error of the network: a firewall refuses the connection.
    return error.errno in _LOCAL_ERRORS or (error.errno == errno.EACCES and error.filename is not None)


def _explained(error: Exception) -> StoreError:
    """Return the StoreError for an error of fsspec, of the library below it, or of the system."""
    causes = list(islice(_causes(error), 10))
    text = shortened(one_line(str(error).partition(", Request ID")[0]), 200)
    if isinstance(error, PermissionError):
        return StoreError(f"access is denied ({text}); check the credentials, and the rights of their user")
    if isinstance(error, FileNotFoundError):
        return StoreError("there is no such object or bucket; check the name", is_missing=True)
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return StoreError(f"the name of the server does not resolve ({text}); check the endpoint and the network")
    if type(error).__name__ == "NoCredentialsError":
        return StoreError("there are no credentials; set them in the environment, or in the files of the store's tools")
    is_final = getattr(error, "errno", None) == errno.EINVAL or type(error).__name__ == "ParamValidationError"
    found = f"{type(error).__name__}: {text}"
    return StoreError(f"the request failed ({found}); check the URL and the network", is_final)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


_URLS: dict[str, str] = {}
"""The URL of each local copy that this process uses, by the path of the copy."""


def local_copy(url: str) -> Path:
    """Copy the object at a URL, or all objects below the URL, to the cache of this host. Return the path of the copy.

    The objects are listed once per process, and are transferred if the cache has no copy of objects with these names,
    sizes and ETags. One process of the host transfers the objects, and the other processes wait. A transfer that was
    interrupted goes on with the objects that are missing. Slashes at the end of the URL have no effect. Raises
    StoreError, and UserError if the cache cannot be written.
    """
    from titan_launch.core.cache import built_once  # not needed to load a job without URLs

    url = url.rstrip("/")
    if has_credentials(url):
        raise StoreError(CREDENTIALS)
    for path, known in _URLS.items():
        if known == url:
            return Path(path)
    if any(character in url for character in "*?[{"):
        raise StoreError("a URL must have no wildcards; name one object, or the folder of the objects")
    store = ObjectStore(url)
    objects = store.listing()
    if not objects:
        raise StoreError("there is no such object, and no object below it; check the name")
    for name in objects:
        if name and not is_name_inside(name):
            raise StoreError(f"no file can have the name of the object {short_name(name)}; rename the object")
        for folder in PurePosixPath(name).parents:
            if (outer := "" if folder == PurePosixPath() else str(folder)) in objects:
                both = f"{short_name(outer or url)} and {short_name(name)}"
                raise StoreError(f"it has the objects {both}, but a file cannot also be a folder; rename one of them")
    last = url.rpartition("/")[2]

    def build(folder: Path) -> None:
        size = sum(found.size for found in objects.values())
        number = counted(len(objects), "object")
        say(f"copying {url} ({number}, {size / 1e6:,.1f} MB) to {folder}", file=sys.stderr, flush=True)
        partial = folder / "partial"

        def transfer(name: str) -> None:
            _transfer(store, name, objects[name], folder / "copy" / last / name, partial / last / name)

        in_parallel(transfer, objects)
        remove(partial)

    identity = [url, sorted([name, *found] for name, found in objects.items())]
    copy = built_once("objects", identity, build) / "copy" / last
    _URLS[str(copy)] = url
    return copy


def with_urls(value: Any) -> Any:
    """Return a value of a job in which URLs replace the paths of their local copies."""
    if isinstance(value, dict):
        return {name: with_urls(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_urls(item) for item in value]
    return _URLS.get(value, value) if isinstance(value, str) else value


def _transfer(store: ObjectStore, name: str, expected: StoredObject, target: Path, partial: Path) -> None:
    """Copy an object to the file `target`, unless an earlier call has done so. `partial`: path of the file until it is
    complete and on disk."""
    if target.exists():
        return
    for path in (target, partial):
        path.parent.mkdir(parents=True, exist_ok=True)
    before = ""
    for _ in range(3):
        store.get(name, partial)
        size = partial.stat().st_size
        with open_regular(partial) as file:
            digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        # With some encryption, an ETag of S3 looks like an MD5 digest, but is none. Two equal copies suffice then.
        is_whole = digest in (expected.etag, before) or len(expected.etag) != len(digest)
        if size == expected.size and is_whole:
            sync(partial)
            partial.rename(target)
            return
        before = digest
    found = f"the size or the digest was wrong (last size: {size:,} of {expected.size:,} bytes)"
    raise StoreError(f"{name or 'the object'} arrived damaged three times: {found}; check the network and the object")
