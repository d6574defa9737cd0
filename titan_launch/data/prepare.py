"""Preparation of token files: each part of a corpus is tokenized into one shard, by several processes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from titan_launch.data.cache import built_once
from titan_launch.data.corpora.base import Corpus, Document, Part, Skipped, in_split
from titan_launch.data.token_files import VERSION, Encoded, Header, Shard, token_dtype, write_header, write_shard

_BATCH = 1000
"""Documents that are tokenized at a time."""


@dataclass
class Counts:
    """The files and skipped documents of a part."""

    files: dict[tuple[str, int], None] = field(default_factory=dict)
    """Name and size of each file, in order."""

    skipped: Counter[str] = field(default_factory=Counter)
    first_skipped: str = ""


def prepare(corpus: Corpus, folder: Path, report: Callable[[Part], None] = lambda part: None) -> Header:
    """Write the documents of a corpus, as far as its split contains them, as token files. Return the header.

    `report` is called after each part. Raises ConfigError for documents that stop the run.
    """
    shards, counts = [], []
    for index, part in enumerate(corpus.parts()):
        shard, found = prepare_part(corpus, part, folder, f"{index:05}")
        shards.append(shard)
        counts.append(found)
        report(part)
    vocab_size = corpus.tokenizer.vocab_size
    header = Header(
        token_dtype(vocab_size),
        vocab_size,
        corpus.tokenizer.digest,
        corpus.has_targets,
        tuple(shards),
        tuple(dict.fromkeys(itertools.chain.from_iterable(found.files for found in counts))),
        dict(sum((found.skipped for found in counts), Counter[str]())),
        next((found.first_skipped for found in counts if found.first_skipped), ""),
    )
    write_header(folder, header)
    return header


def prepare_part(corpus: Corpus, part: Part, folder: Path, name: str) -> tuple[Shard, Counts]:
    """Write the documents of a part as the shard `name`."""
    counts = Counts()
    documents = _encoded(corpus, _chosen(corpus, part, counts))
    shard = write_shard(folder, name, documents, token_dtype(corpus.tokenizer.vocab_size), corpus.has_targets)
    return shard, counts


def cached_token_files(corpus: Corpus) -> Path:
    """Return the folder of a corpus's token files in the cache, and write it if it does not exist."""
    files = [(file.name, str(file.path.resolve()), file.size, file.modified_ns) for file in corpus.files]
    keys = corpus.config.model_dump(mode="json", exclude=_ORDER)
    identity = [VERSION, corpus.tokenizer.digest, keys, files, *corpus.identity]
    return built_once("tokens", identity, partial(prepare, corpus))


_ORDER = {"shuffle", "num_workers", "name", "weight"}
"""Keys that do not change the tokens."""


def _chosen(corpus: Corpus, part: Part, counts: Counts) -> Iterator[Document]:
    """Yield the documents of the split, and count the others."""
    for document in corpus.documents(part):
        if not in_split(document.name, corpus.config):
            continue
        if isinstance(document, Skipped):
            counts.skipped[document.reason] += 1
            counts.first_skipped = counts.first_skipped or document.name
            continue
        counts.files[document.file] = None
        yield document


def _encoded(corpus: Corpus, documents: Iterator[Document]) -> Iterator[Encoded]:
    while batch := [document.content for document in itertools.islice(documents, _BATCH)]:
        yield from corpus.encode(batch)
