"""Preparation of token files: each part of a corpus is tokenized into one shard, by several processes."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from titan_launch.core.cache import built_once
from titan_launch.core.errors import ConfigError, Problem, RunError, UserError, config_error
from titan_launch.core.files import file_state, read_regular, refuse_weights_folder, replace_text
from titan_launch.core.fingerprint import content_digest, fingerprint_of_files
from titan_launch.core.json_files import parse_record, read_json
from titan_launch.core.packages import is_installed
from titan_launch.core.process import usable_cores
from titan_launch.core.signals import signals_blocked, stop_with_parent
from titan_launch.core.terminal import counted
from titan_launch.data.corpora.interface import Corpus, Document, File, Part, Skipped, in_split
from titan_launch.data.token_files import (
    HEADER,
    MOST_LISTED,
    VERSION,
    Encoded,
    Header,
    TokenFilesError,
    TokenShard,
    read_header,
    shard_of,
    token_dtype,
    write_header,
    write_shard,
)

UNFINISHED = "unfinished.json"
"""Name of the file that identifies the corpus and the tokenizer in a folder that is not finished."""

_BATCH = 1000
"""Largest number of documents that are tokenized at a time."""

_BATCH_BYTES = 1 << 20
"""Bytes of text at which a batch of documents ends. The package tokenizers needs about 500 bytes for each token."""

_LARGE_CORPUS = 1 << 26
"""Bytes of text above which a run tokenizes the text in several processes, which take a second to start."""

_CODE = sorted(
    path
    for pattern in ("corpora/*.py", "chat_rendering.py", "*tokenizer*.py")
    for path in Path(__file__).parent.glob(pattern)
)
"""The modules that decide the tokens of a document."""

_NOT_IN_TOKENS = {"path", "packing", "shuffle", "num_workers", "name", "weight", "streaming"}
"""Keys of the section that `_source` ignores, because they do not change the tokens. In place of `path`, `_source` uses
the contents of the files."""


@dataclass
class Counts:
    """The files and skipped documents of a part."""

    files: dict[tuple[str, int], int] = field(default_factory=dict)
    """CRC-32 of the tokens and targets of each file, by (name, size) of the file."""

    skipped: Counter[str] = field(default_factory=Counter)
    first_skipped: str = ""

    def add(self, document: Document, encoded: Encoded) -> None:
        """Add a document to the checksum of its file."""
        checksum = zlib.crc32(np.ascontiguousarray(encoded.tokens).data, self.files.get(document.file, 0))
        if encoded.targets is not None:
            checksum = zlib.crc32(np.ascontiguousarray(encoded.targets).data, checksum)
        self.files[document.file] = checksum


def prepare(
    corpus: Corpus,
    folder: Path,
    num_workers: int = 1,
    report: Callable[[Part, bool], None] = lambda part, is_new: None,
    digests: Sequence[str] | None = None,
) -> Header:
    """Write token files with the documents of a corpus that belong to its split. Return the header.

    `num_workers` processes tokenize the parts. Their number does not change the files. If an earlier call for the same
    corpus was interrupted, its finished shards are kept. If an earlier call has completed the folder, nothing is
    written. `report(part, is_new)` is called for each finished part. `is_new` is False if an earlier call has finished
    the part. `digests`: the result of `file_digests`, if it is known.

    Raises ConfigError for documents that stop the run, and for files that cannot be read or that change meanwhile.
    Raises UserError if the folder has other content, is damaged, or is inside of a folder with weights, or if another
    process is writing it. Raises RunError if a worker process is killed, and OSError if the folder cannot be written.
    """
    digests = file_digests(corpus) if digests is None else digests
    source = _source(corpus, digests)
    header = _header_of(corpus, folder, source)
    if header is not None:
        return header
    parts = {f"{index:05}": part for index, part in enumerate(corpus.parts())}
    with _claimed(corpus, folder, source):
        header = _header_of(corpus, folder, source)
        if header is not None:  # another process completed the folder before this one locked it
            return header
        rest = {}
        for name, part in parts.items():
            if _record(folder, name).exists():
                report(part, False)
            else:
                rest[name] = part
        for part in _finish_parts(corpus, folder, rest, num_workers):
            report(part, True)
        _check_unchanged(corpus, digests)
        header = _combined(corpus, [_read_record(folder, name) for name in parts], source)
        write_header(folder, header)
        for name in parts:
            _record(folder, name).unlink()
        (folder / UNFINISHED).unlink()
    return header


def chosen_documents(corpus: Corpus, part: Part, counts: Counts) -> Iterator[Document]:
    """Yield the documents of a part that belong to the split. Add the skipped documents that belong to the split to
    `counts`."""
    for document in corpus.documents(part):
        if not in_split(document.name, corpus.config):
            continue
        if isinstance(document, Skipped):
            counts.skipped[document.reason] += 1
            counts.first_skipped = counts.first_skipped or document.name
        else:
            yield document


def training_texts(corpus: Corpus) -> Iterator[str]:
    """Yield texts of documents, on which a tokenizer is trained. All texts together have at most about 1 GiB, and each
    part has an equal share of this limit. Raises ConfigError if the documents are not plain text."""
    parts = corpus.parts()
    for part in parts:
        size = 0
        for document in chosen_documents(corpus, part, Counts()):
            if not isinstance(document.content, bytes):
                reason = "gives no plain text, on which a tokenizer is trained; name files of plain text"
                raise config_error((*corpus.key, "kind"), reason, corpus.config.kind)
            yield document.content.decode()
            size += len(document.content)
            if size * len(parts) >= 1 << 30:
                break


def cached_token_files(corpus: Corpus) -> Path:
    """Return the folder of a corpus's token files in the cache. Write the folder if it does not exist or is damaged.
    The name of the folder depends on the tokenizer, the keys of the section, the content of the files, and the code
    that tokenizes."""
    digests = _cached_digests(corpus)
    size = sum(file.size for file in corpus.files)
    num_workers = usable_cores() if size > _LARGE_CORPUS else 1
    task = f"{'tokenizing:':26} {counted(len(corpus.files), 'file')}, {size / 1e6:,.1f} MB"
    identity = _identity(corpus, _source(corpus, digests))

    def build(folder: Path) -> None:
        prepare(corpus, folder, num_workers, digests=digests)

    return built_once("tokens", identity, build, task)


def _identity(corpus: Corpus, source: str) -> list[object]:
    """Return everything that decides the tokens of a corpus. `source`: the result of `_source`."""
    releases = [version(name) if is_installed(name) else "" for name in ("tokenizers", "jinja2")]
    return [VERSION, corpus.tokenizer.digest, source, content_digest(_CODE), *releases]


def file_digests(corpus: Corpus) -> list[str]:
    """Return the digest of the content of each file of a corpus. Threads read the files. Raises ConfigError for a file
    that cannot be read."""

    def digest(file: File) -> str:
        try:
            return content_digest([file.path])
        except OSError as error:
            raise corpus.unopened(file, error) from None

    with ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(digest, corpus.files))


def _cached_digests(corpus: Corpus) -> list[str]:
    """Return the digest of the content of each file of a corpus.

    If the cache has digests for files with the same states and the same samples of their content, the files are not
    read again. Samples are compared because, in two versions of a read-only disk image, files with different content
    may have the same times and inodes. Raises ConfigError for a file that cannot be read.
    """
    places = [[str(file.path.resolve()), *file.state] for file in corpus.files]
    try:
        sample = fingerprint_of_files([("", file.path) for file in corpus.files])
    except OSError as error:
        broken = next((file for file in corpus.files if str(file.path) == str(error.filename)), corpus.files[0])
        raise corpus.unopened(broken, error) from None

    def build(folder: Path) -> None:
        (folder / "digests.json").write_text(json.dumps(file_digests(corpus)))

    size = sum(file.size for file in corpus.files)
    task = f"{'computing digests:':26} {counted(len(corpus.files), 'file')}, {size / 1e6:,.1f} MB"
    folder = built_once("digests", [places, sample.content], build, task if size > _LARGE_CORPUS else "")
    digests: list[str] = read_json(folder / "digests.json", MOST_LISTED, MOST_LISTED)
    return digests


def _check_unchanged(corpus: Corpus, digests: Sequence[str]) -> None:
    """Raise ConfigError if the content of a file no longer has its digest in `digests`. Only files whose state (size,
    times, inode) has changed are read."""
    for file, digest in zip(corpus.files, digests, strict=True):
        try:
            is_unchanged = file_state(file.path) == file.state or content_digest([file.path]) == digest
        except OSError as error:
            raise corpus.unopened(file, error) from None
        if not is_unchanged:
            raise corpus.unreadable(file, "it changed while it was tokenized; start again when it no longer changes")


def _source(corpus: Corpus, digests: Sequence[str]) -> str:
    """Return a digest of everything that decides the tokens of a corpus, except for the tokenizer: keys of the section,
    files, and `Corpus.identity`. `digests`: digest of the content of each file."""
    keys = corpus.config.model_dump(mode="json", exclude=_NOT_IN_TOKENS)
    files = [[file.name, file.size, digest] for file, digest in zip(corpus.files, digests, strict=True)]
    return hashlib.blake2b(json.dumps([keys, files, *corpus.identity]).encode(), digest_size=16).hexdigest()


def _header_of(corpus: Corpus, folder: Path, source: str) -> Header | None:
    """Return the header of a folder that an earlier call completed; None if the folder has no header. Raises UserError
    if the header is invalid, or if the folder has the tokens of another corpus or another tokenizer."""
    if not (folder / HEADER).exists():
        return None
    try:
        header = read_header(folder)
    except TokenFilesError as error:
        raise UserError(f"{folder}: {error}") from None
    if header.tokenizer != corpus.tokenizer.digest:
        digests = f"(digest {header.tokenizer}, now {corpus.tokenizer.digest})"
        raise UserError(f"{folder} has tokens of another tokenizer {digests}; delete it, or name another folder")
    if header.source != source:
        reason = "was prepared from different text, or with different keys of [data]"
        raise UserError(f"{folder} {reason}; delete it, or name another folder")
    return header


def make_folder(folder: Path, is_empty: bool = False) -> None:
    """Create a folder for token files, unless it exists. Raises UserError if the folder is inside of a folder with
    weights, or cannot be written. A folder with finished token files may be read-only. `is_empty`: True also refuses a
    folder with files, such as the tokens of an earlier tokenizer."""
    refuse_weights_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        has_files = any(entry.is_file() for entry in folder.iterdir())
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}; name another folder") from None
    if not (os.access(folder, os.W_OK) or (folder / HEADER).exists()):
        raise UserError(f"{folder} cannot be written by this user; name another folder")
    if is_empty and has_files:
        raise UserError(f"{folder} has files, but no tokens of the new tokenizer; name another folder, or delete them")


@contextmanager
def _claimed(corpus: Corpus, folder: Path, source: str) -> Iterator[None]:
    """Lock a folder for a corpus until the end of the block. Raises UserError if the folder has other files or cannot
    be written (`make_folder`), or if another process is writing it."""
    make_folder(folder)
    path = folder / UNFINISHED
    identity = json.dumps(_identity(corpus, source)).encode()
    # All processes lock the same file, because the file is created first and gets its content under the lock.
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is writing {folder}; wait for its end, or name another folder") from None
        found = file.read(len(identity) + 1)
        if (folder / HEADER).exists():  # another process has just completed the folder
            path.unlink(missing_ok=True)
        elif not found:  # no process has written into the folder
            if any(entry.is_file() and entry != path for entry in folder.iterdir()):
                path.unlink()
                raise UserError(f"{folder} has files that are not token files; name another folder, or delete them")
            os.write(file.fileno(), identity)
            os.fsync(file.fileno())
        elif found != identity:
            reason = "has unfinished token files of different text, keys of [data], tokenizer, code or packages"
            raise UserError(f"{folder} {reason}; delete it, or name another folder")
        yield


def _finish_parts(corpus: Corpus, folder: Path, parts: dict[str, Part], num_workers: int) -> Iterator[Part]:
    """Write the shard of each part, and yield each part when its shard is finished, in any order. `parts`: the parts by
    the names of their shards. Raises ConfigError for documents that stop the run, and RunError if a worker process is
    killed."""
    num_workers = min(num_workers, len(parts))
    if num_workers <= 1:
        for name, part in parts.items():
            _write_part(corpus, part, folder, name)
            yield part
        return
    pool = ProcessPoolExecutor(num_workers, get_context("spawn"), _start_worker, (corpus, folder))
    try:
        with signals_blocked():  # Ctrl-C reaches all processes; only this process handles it, and ends the others
            futures = {pool.submit(_work, part, name): part for name, part in parts.items()}
        for future in as_completed(futures):
            if problems := future.result():
                raise ConfigError(problems)
            yield futures[future]
    except BrokenProcessPool:
        reason = "a process that tokenized text was killed, probably because the host had no memory left"
        remedy = "run titan-launch prepare with a smaller --workers, or divide long documents"
        raise RunError(f"{reason}; {remedy}") from None
    except BaseException:
        for process in list(pool._processes.values()):
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_job: tuple[Corpus, Path]
"""The corpus and the folder of this worker process."""


def _start_worker(corpus: Corpus, folder: Path) -> None:
    global _job
    stop_with_parent(signal.SIGKILL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process has one core
    _job = corpus, folder


def _work(part: Part, name: str) -> tuple[Problem, ...]:
    """Write a shard in a worker process. Return the problems of a ConfigError; empty if there was none."""
    corpus, folder = _job
    try:
        _write_part(corpus, part, folder, name)
    except ConfigError as error:
        return error.problems
    return ()


def _write_part(corpus: Corpus, part: Part, folder: Path, name: str) -> None:
    """Write the documents of a part that belong to the split as the shard `name`. Then write the record of the shard,
    which marks the shard as finished. Raises ConfigError for documents that stop the run."""
    counts = Counts()

    def encoded() -> Iterator[Encoded]:
        for batch in _batches(chosen_documents(corpus, part, counts)):
            for document, result in zip(batch, corpus.encode([document.content for document in batch]), strict=True):
                counts.add(document, result)
                yield result

    shard = write_shard(folder, name, encoded(), token_dtype(corpus.tokenizer.vocab_size), corpus.has_targets)
    files = [[*file, checksum] for file, checksum in counts.files.items()]
    record = {"shard": asdict(shard), "files": files, "skipped": counts.skipped, "first_skipped": counts.first_skipped}
    replace_text(_record(folder, name), json.dumps(record))


def _record(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _read_record(folder: Path, name: str) -> tuple[TokenShard, Counts]:
    path = _record(folder, name)
    try:
        record = parse_record(read_regular(path, MOST_LISTED))
        files = {(str(file), int(size)): int(checksum) for file, size, checksum in record["files"]}
        skipped = Counter({str(reason): int(count) for reason, count in record["skipped"].items()})
        return shard_of(record["shard"]), Counts(files, skipped, str(record["first_skipped"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is damaged; delete {folder}, and prepare it again") from None


def _combined(corpus: Corpus, records: list[tuple[TokenShard, Counts]], source: str) -> Header:
    """Return the header of all shards. The checksum of a file combines the checksums of all shards that have documents
    of the file."""
    files: dict[tuple[str, int], int] = {}
    for _, counts in records:
        for file, checksum in counts.files.items():
            files[file] = zlib.crc32(checksum.to_bytes(4, "little"), files.get(file, 0))
    vocab_size = corpus.tokenizer.vocab_size
    return Header(
        token_dtype(vocab_size),
        vocab_size,
        corpus.tokenizer.digest,
        corpus.has_targets,
        tuple(shard for shard, _ in records),
        tuple((name, size, f"{checksum:08x}") for (name, size), checksum in files.items()),
        dict(sum((counts.skipped for _, counts in records), Counter[str]())),
        next((counts.first_skipped for _, counts in records if counts.first_skipped), ""),
        corpus.has_pairs,
        corpus.has_ratings,
        source,
    )


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Yield groups of documents that are tokenized together."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.content) if isinstance(document.content, bytes | str) else 0
        if len(batch) == _BATCH or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
