"""`[data]`, `[validation]` and `[validation.data]`: training data and validation data."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

from pydantic import AfterValidator, Discriminator, Field, GetCoreSchemaHandler, Tag
from pydantic_core import CoreSchema

from titan_launch.config.paths import (
    PYTHON_STDLIB,
    SKLEARN_DIGITS,
    count_ends,
    describe_ends,
    glob_of_sort,
    uncompressed,
)
from titan_launch.config.sections.section import Array, Positive, Section, Table
from titan_launch.core.errors import KeyPath, Problem, toml_string

if TYPE_CHECKING:
    from fractions import Fraction


SampleUnit = Literal["tokens", "images"]

IGNORED_TARGET = -100
"""Target at padding positions. Positions with this target count neither in the loss nor in the number of tokens. The
value is PyTorch's default of `ignore_index`."""


class DataSource(Section):
    """The keys that most kinds of data have. The value of a field of this type is an instance of a class in
    `DATA_KINDS`. The key `kind` selects the class."""

    unit: ClassVar[SampleUnit] = "tokens"
    """Unit of the samples, in which the throughput is reported."""

    kind: str
    """Kind of data source. The kind decides which other keys are valid."""

    shuffle: bool = True
    """Shuffle the samples of each epoch. The order depends only on `training.seed` and the epoch. `false`: the order of
    the source."""

    num_workers: Annotated[int, Field(ge=0)] = 0
    """Number of worker processes per rank that prepare samples. This number does not change the samples or their
    order."""

    def own_vocabulary(self) -> int | None:
        """Return the vocabulary size that the key `vocab_size` sets; None if this kind has no such key."""
        return None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of this class. For a class in `KINDS`, return the schema of the union of its kinds."""
        if cls not in KINDS:
            return handler(source)
        tagged = tuple(Annotated[kind, Tag(tag)] for tag, kind in KINDS[cls].items())
        any_kind: Any = Union[tagged]  # noqa: UP007 - the kinds are known at run time only
        return handler.generate_schema(Annotated[any_kind, Discriminator(_tag)])


FACTORY = "package.module:factory"
"""Key of `DATA_KINDS` for every `kind` that is an import string."""


def data_kind(kind: str) -> str:
    """Return the key of `DATA_KINDS` for a value of `kind`: `FACTORY` for an import string, else the value itself."""
    return FACTORY if ":" in kind else kind


def _tag(table: Any) -> Any:
    """Return the key of `DATA_KINDS` for a table of a job file, or for a section. If `kind` is not a string, return its
    value; None if there is no `kind`."""
    kind = table.get("kind") if isinstance(table, Mapping) else getattr(table, "kind", None)
    return data_kind(kind) if isinstance(kind, str) else kind


class TokenizedData(DataSource):
    """The keys of all kinds of data whose documents are packed into sequences of `training.seq_len` tokens."""

    packing: Literal["concat", "documents"] = "concat"
    """Division of the documents into samples. `concat`: all documents are one stream, which is cut every
    `training.seq_len` tokens. Tokens attend to earlier documents of their sample. `documents`: a sample has whole
    documents and, at its end, as little padding as possible. Documents do not attend to each other, and positions begin
    at 0 in each document. Only documents of more than `training.seq_len` + 1 tokens are cut."""


class CorpusData(TokenizedData):
    """The keys of all kinds of text. When a run starts, one process of each host tokenizes the text, and stores the
    tokens in the cache folder. Later runs on the same text read the tokens from the cache. The cache folder is
    `$TITAN_LAUNCH_CACHE`, or else `titan_launch` in `$XDG_CACHE_HOME` (by default `~/.cache`). With `streaming`,
    nothing is stored."""

    split: Literal["all", "train", "validation"] = "all"
    """Documents to use. `validation`: `validation_percent` of the documents, chosen by a hash of the names of files, or
    of the texts of lines and rows. `train`: all other documents. Training and validation can therefore use the same
    `path`."""

    validation_percent: Annotated[int, Field(ge=1, le=99)] = 5
    """Percentage of the documents that belong to the validation split."""

    path: str | Array[str]


class FilesData(CorpusData):
    """The keys of all kinds of text in files."""

    suffixes: ClassVar[tuple[str, ...]] = ("",)
    """Suffixes of the files that are read in a folder. `.gz` or `.zst` may follow the suffix."""


class TextData(FilesData):
    """Text files. Each file is one document."""

    kind: Literal["text"] = "text"

    path: str | Array[str] = PYTHON_STDLIB
    """A file, a folder (all files below it), a glob (`**` crosses folders), or an array of these, relative to the
    working directory. `python-stdlib` is the source code of the running Python's standard library: tens of MB of real
    text that every machine has. The name of a document is its path relative to the given folder. Files that end in
    `.gz` or `.zst` are decompressed. Files that are not text (valid UTF-8 without NUL bytes) are skipped; the log
    reports their number."""


class RecordsData(CorpusData):
    """The keys of all kinds of text in records: lines or rows. Each record is one document."""

    on_error: Literal["stop", "skip"] = "stop"
    """Reaction to a record that cannot be used, such as a record without text, or a line that is not valid JSON.
    `stop`: the run ends with an error that names the record. `skip`: the other records are used, and the log reports
    the number of skipped records."""


class LinesData(FilesData, RecordsData):
    """The keys of all kinds of data in JSON lines: files with one JSON object per line."""

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson", ".json")

    path: str | Array[str]
    """A file, a folder, a glob (`**` crosses folders), or an array of these, relative to the working directory. In a
    folder, all files below it that end in `.jsonl`, `.ndjson` or `.json` are read. If the name of a file also ends in
    `.gz` or `.zst`, the file is decompressed."""


class JsonlData(LinesData):
    """JSON lines: files with one JSON object per line. Each line is one document."""

    kind: Literal["jsonl"]

    field: str = "text"
    """Key of the text in each line's object. Dots select keys of inner objects: `meta.text`."""


def date_text(text: str) -> str:
    """Return a date as `YYYY-MM-DD`. Raises ValueError for any other text."""
    with suppress(ValueError):
        if date.fromisoformat(text).isoformat() == text:  # Python 3.11 also reads other formats
            return text
    raise ValueError('must be a date, such as "2024-07-26"')


class ChatData(LinesData):
    """Chats in JSON lines, for fine-tuning: one chat per line. Each chat is one document. A chat template turns each
    chat into text, and the assistant's turns are the targets. A line has one of four forms: `messages` with `role` and
    `content`; `conversations` with `from` and `value`; `prompt` and `response` (or `completion`); `instruction`,
    `input` (or `context`) and `output`. This kind needs `pip install 'titan-launch[chat]'`."""

    kind: Literal["chat"]

    packing: Literal["concat", "documents"] = "documents"
    """Division of the chats into samples. `documents`: a sample has whole chats and, at its end, as little padding as
    possible. Chats do not attend to each other, and positions begin at 0 in each chat. `concat`: all chats are one
    stream, which is cut every `training.seq_len` tokens. Tokens attend to earlier chats of their sample."""

    template: str | None = None
    """Chat template: `chatml`, or the path of a Jinja file. Default: the template of the tokenizer, in
    `chat_template.jinja` or `tokenizer_config.json` beside its `tokenizer.json`."""

    template_args: Table = Field(default_factory=dict)
    """Further variables of the template, such as `{ enable_thinking = false }`."""

    date: Annotated[str, AfterValidator(date_text), Field(json_schema_extra={"format": "date"})] = "2024-07-26"
    """Date that the template writes as today's date, as `"YYYY-MM-DD"`. The template's function `strftime_now` returns
    this date at midnight. A date other than the default also sets the variable `date_string` (`"26 Jul 2024"`) of Llama
    3's templates. The default is the date that these templates write if `date_string` is not set."""

    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Targets. `assistant`: all turns of the assistant, each with the token that ends the turn. `last`: the last turn
    of the assistant. `all`: all tokens. With `assistant` and `last`, a turn whose message has `"weight": 0` or
    `"train": false` is no target."""

    truncation: Literal["skip", "stop", "right", "left"] = "skip"
    """Action for a chat with more than `training.seq_len` + 1 tokens. `skip`: the chat is not used, and the log reports
    the number of such chats. `stop`: the run ends with an error that names the chat. `right`: tokens are removed at the
    end of the chat. `left`: tokens are removed at its beginning."""


class PreferenceData(ChatData):
    """Pairs of answers in JSON lines, for `dpo` and the other losses of pairs: a chosen answer and a rejected answer to
    the same prompt. A line has `chosen` and `rejected`. Either both are whole chats (arrays of messages), or both are
    only answers (texts, or arrays of messages). With only answers, the line also has `prompt`: the chat before the
    answer. A chat template turns each chat into text. This kind needs `pip install 'titan-launch[chat]'`.

    A pair is two documents of one sample, so `training.seq_len` must have room for both.
    """

    kind: Literal["preferences"]  # type: ignore[assignment]

    packing: ClassVar[Literal["documents"]] = "documents"  # type: ignore[misc] # removes the key

    train_on: Literal["assistant", "last", "all", "end"] = "last"  # type: ignore[assignment]
    """Tokens that count as the answer; the loss uses the probabilities of these tokens. `last`: the last turn of the
    assistant, with the token that ends it. `assistant`: all turns of the assistant. `all`: all tokens. `end`: no token;
    the loss uses the model's output after the last token of the chat. `loss.name = "reward"` needs `end`."""

    truncation: Literal["skip", "stop", "right", "left"] = "skip"
    """Action for a pair whose two chats do not fit into `training.seq_len` together. `skip`: the pair is not used, and
    the log reports the number of such pairs. `stop`: the run ends with an error that names the pair. `right`, `left`:
    each chat is cut to at most half of `training.seq_len`, plus one token, because the last token of a chat is never an
    input. Tokens are removed at the end of the chat (`right`) or at its beginning (`left`)."""


class UnpairedPreferenceData(ChatData):
    """Answers with a label in JSON lines, for `loss.name = "kto"`. A line is a chat in one of the forms of `kind =
    "chat"`, with the key `label`: `true` for a desirable last answer, and `false` for an undesirable last answer. A
    chat template turns each chat into text. This kind needs `pip install 'titan-launch[chat]'`."""

    kind: Literal["unpaired_preferences"]  # type: ignore[assignment]

    packing: ClassVar[Literal["documents"]] = "documents"  # type: ignore[misc] # removes the key

    train_on: Literal["assistant", "last"] = "last"
    """Tokens that count as the answer; the loss uses the probabilities of these tokens. `last`: the last turn of the
    assistant, with the token that ends it. `assistant`: all turns of the assistant."""

    truncation: Literal["skip", "stop", "right", "left"] = "skip"
    """Action for a chat with more than `training.seq_len` tokens. `skip`: the chat is not used, and the log reports the
    number of such chats. `stop`: the run ends with an error that names the chat. `right`: tokens are removed at the end
    of the chat. `left`: tokens are removed at its beginning."""


class ClassificationData(LinesData):
    """Texts with labels in JSON lines, for a classifier (`model.args.num_labels`). Each line is one document. The only
    target of a document is its label, after the last token of the text."""

    kind: Literal["classification"]

    packing: ClassVar[Literal["documents"]] = "documents"  # type: ignore[misc] # removes the key

    text: str = "text"
    """Key of the text in each line's object. Dots select keys of inner objects: `meta.text`."""

    label: str = "label"
    """Key of the label in each line's object. Its value is one of `labels`, or the number of a label, counted from
    0."""

    labels: Annotated[Array[str], Field(min_length=2)]
    """Names of all labels, in the order of the model's outputs. `model.args.num_labels` must equal their number. An
    exported model has these names."""

    truncation: Literal["skip", "stop", "right", "left"] = "skip"
    """Action for a text with more than `training.seq_len` tokens. `skip`: the text is not used, and the log reports the
    number of such texts. `stop`: the run ends with an error that names the text. `right`: tokens are removed at the end
    of the text. `left`: tokens are removed at its beginning."""


class ParquetData(FilesData, RecordsData):
    """Parquet files. Each row is one document. This kind needs `pip install 'titan-launch[parquet]'`."""

    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    kind: Literal["parquet"]

    path: str | Array[str]
    """A file, a folder (all files below it that end in `.parquet`), a glob (`**` crosses folders), or an array of
    these, relative to the working directory."""

    column: str = "text"
    """Name of the column with the text."""


class HuggingFaceData(RecordsData):
    """A data set of the package `datasets`. Each row is one document. This kind needs `pip install
    'titan-launch[datasets]'`."""

    kind: Literal["huggingface"]

    path: str
    """A folder that `save_to_disk` wrote, or a folder of data files (Parquet, JSON lines, CSV, text). Or the name of a
    data set of the Hugging Face Hub, such as `roneneldan/TinyStories`, which is downloaded."""

    column: str = "text"
    """Name of the column with the text."""

    subset: str | None = None
    """Name of the subset (configuration) of a data set that has several, such as `wikitext-2-raw-v1`."""

    hf_split: str = "train"
    """Split of the data set, as its publisher names it. (The key `split` divides the rows of this split into training
    and validation.)"""

    streaming: bool = False
    """Read the rows as a stream while the run trains, instead of tokenizing all rows at its start. A stream has no
    random order and no epochs: see docs/how_to/streams.md. Requires `shuffle = false`."""


class TokensData(TokenizedData):
    """Files of tokens that `titan-launch prepare` or another program wrote. The files are mapped into memory."""

    kind: Literal["tokens"]

    path: str
    """A folder of token files that `titan-launch prepare` wrote, or a file of another program, relative to the working
    directory. The files of other programs are: a `.bin` of Megatron-LM with its `.idx` beside it (the suffix may be
    omitted), a file of llm.c, an `.npy` file of NumPy, or a flat file of numbers as in nanoGPT. A glob of such files is
    also possible. `[tokenizer]` must describe the tokenizer that made the tokens."""

    dtype: Literal["uint16", "uint32"] | None = None
    """Dtype of the numbers in a flat file. Files in all other formats contain their dtype."""


class SyntheticData(DataSource):
    """Random token sequences with a structure that a model can learn. Each token is a fixed function of the previous
    token, or noise."""

    kind: Literal["synthetic"]

    num_samples: Annotated[int, Field(ge=1)] = 10_000
    """Sequences per epoch."""

    vocab_size: Annotated[int, Field(ge=2)] = 256
    """Number of different tokens, at most the vocabulary size of `[tokenizer]`. Tokens are from 0 to `vocab_size` -
    1."""

    noise: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Probability that a token is random. Otherwise the previous token determines it."""

    seed: int = 0
    """Seed of the sequences. Validation data needs a different seed than training data."""

    def own_vocabulary(self) -> int:
        """Return `vocab_size`."""
        return self.vocab_size


Augmentation = Literal["flip", "crop", "resized_crop"]


class ImageData(DataSource):
    """Images, each with a class. An image is read and decoded when a step needs it."""

    unit: ClassVar[SampleUnit] = "images"

    kind: Literal["images"]

    path: str = SKLEARN_DIGITS
    """The images, relative to the working directory. A folder: each folder in it is a class, and all image files below
    it belong to this class. The classes are numbered in the order of their names. A `.tar` file, a glob, or braces
    (`train-{000..099}.tar`): WebDataset shards with members KEY.jpg (or another image format) and KEY.cls. An `.npz`
    file: `images` of shape (N, height, width) or (N, channels, height, width), uint8 or floating point, and `labels` of
    shape (N), whole numbers from 0. `sklearn-digits`: 1,797 handwritten digits of 8x8 pixels from scikit-learn. The
    digits, folders and shards need `pip install 'titan-launch[images]'`."""

    label_field: str | None = None
    """Only for WebDataset shards: field of `KEY.json` that contains the class. Default: the class is in `KEY.cls`."""

    split: Literal["all", "train", "validation"] = "all"
    """Images to use. `validation`: `validation_percent` of the images, chosen by a hash of their names (in a folder) or
    of their indices. `train`: all other images. Training and validation can therefore use the same `path`."""

    validation_percent: Annotated[int, Field(ge=1, le=99)] = 5
    """Percentage of the images that belong to the validation split."""

    resize: Annotated[int, Field(ge=1)] | None = None
    """Length in pixels to which the shorter side of an image is scaled. The aspect ratio stays. Default: no scaling."""

    crop: Annotated[int, Field(ge=1)] | None = None
    """Height and width of a sample in pixels. The sample is the center of an image after `resize`. Exception: with
    `crop` or `resized_crop` in `augment`, a training sample is a random part of the image. Default: the whole image."""

    augment: Array[Augmentation] = ()
    """Random changes of training images, which differ in every epoch. `flip`: mirror an image left to right, with a
    probability of 1/2. `crop`: cut at a random place, after a border of `padding` pixels was added. `resized_crop`:
    scale a random part to `crop` x `crop` pixels. The part has 8 % to 100 % of the image's area and an aspect ratio of
    3/4 to 4/3."""

    padding: Annotated[int, Field(ge=0)] = 0
    """Width in pixels of the black border for `augment = ["crop"]`."""

    transform: str | None = None
    """`package.module:factory` of a transform of your own. `factory(train=True)` (for validation data: `train=False`)
    must return a callable, for example of `torchvision.transforms.v2`. The callable is called after `augment` with a
    tensor [channels, height, width]. The tensor is uint8, or float32 for 16-bit gray images and floating-point arrays.
    The callable must return a uint8 or floating-point tensor [channels, height, width]. The random generators of
    PyTorch, Python and NumPy are seeded for each image."""

    mean: float | Array[float] = 0.5
    """Value to subtract from the pixels: one number, or an array with one number per channel. Pixels of image files, of
    uint8 arrays and of the digits are first scaled to the range 0 to 1. Floating-point arrays are not scaled."""

    std: Positive | Array[Positive] = 0.5
    """Value by which the pixels are divided after the subtraction of `mean`: one number, or an array with one number
    per channel. If `mean` and `std` equal the mean and the standard deviation of the data, the model's inputs have mean
    0 and variance 1."""


Weight = Annotated[float, Field(ge=0)]


class FactoryData(DataSource):
    """Samples from a function or class of your own, which `kind` names, such as `my_data:Sequences`. The run calls the
    function with a context and `args`. docs/how_to/streams.md describes the object that it must return."""

    kind: Annotated[str, Field(pattern="^[^:]+:[^:]+$")]
    """Import string of the function or class. The working directory is importable."""

    samples: Literal["tokens", "documents", "images"] = "tokens"
    """Form of a sample. `tokens`: a pair of tensors, with `training.seq_len` tokens and with the target of each token.
    `documents`: the same, and a third tensor with the document number of each token. `images`: a pair of an image and
    its class."""

    args: Table = Field(default_factory=dict)
    """Keyword arguments of the function or class."""

    @property
    def unit(self) -> SampleUnit:  # type: ignore[override]
        """`images` if `samples` is `images`, else `tokens`."""
        return "images" if self.samples == "images" else "tokens"


def stream_problems(data: DataSource, key: KeyPath) -> Iterator[Problem]:
    """Yield a problem for each key that a stream does not support. `data`: the stream. `key`: path of its table."""
    if key != ("data",):
        reason = (
            "is a stream, which can be neither validation data nor one of several sources; use data that is not a "
            "stream (see docs/how_to/streams.md)"
        )
        yield Problem((*key, "kind"), reason, data.kind)
    if data.shuffle:
        reason = "a stream is read in its own order; set shuffle = false, and shuffle the data in advance"
        yield Problem((*key, "shuffle"), reason, True, also=((*key, "kind"),))
    if data.num_workers > 1:
        reason = "a stream is read by at most one worker process per rank; set num_workers = 0 or 1"
        yield Problem((*key, "num_workers"), reason, data.num_workers, also=((*key, "kind"),))


class MixtureEntry(DataSource):
    """A source of a mixture. It has the keys of its `kind` except `num_workers`, and the keys below."""

    num_workers: ClassVar[int] = 0  # type: ignore[misc] # removes the key: only the mixture itself has `num_workers`

    name: str = ""
    """Name of the source in metrics and log lines: letters, digits, `.`, `_` and `-`. Default: the last part of `path`,
    with `_` in place of all other characters. Default if `path` is missing or an array: `kind`."""

    weight: Weight | Array[Array[Weight]] = 1.0
    """Share of the training samples that come from this source, relative to the weights of the other sources. An array
    of `[step, weight]` pairs changes the weight during the run: `[[0, 3], [1000, 1]]` is 3 for the first 1,000 steps,
    then 1. The first step must be 0. With a weight of 0, the source is not used. Sources of validation data have no
    weights."""

    def weights(self) -> list[tuple[int, Fraction]]:
        """Return the (step, weight) pairs. Decimal fractions are exact: 0.1 is one tenth."""
        from fractions import Fraction  # imported here to save 3 milliseconds of every start

        pairs = self.weight if isinstance(self.weight, tuple) else ((0, self.weight),)
        return [(int(step), Fraction(str(weight))) for step, weight in pairs]

    def effective_name(self) -> str:
        """Return `name`. If `name` is not set, return its default."""
        path = getattr(self, "path", None)
        last_part = os.path.basename(path.rstrip("/")) if isinstance(path, str) else ""
        return self.name or re.sub(r"[^\w.-]+", "_", last_part) or self.kind


class MixtureData(DataSource):
    """Several sources, mixed by weights. Each source is a table `[[data.sources]]` (validation:
    `[[validation.data.sources]]`) with a `shuffle` of its own. A table with `sources` has this kind by default."""

    kind: Literal["mixture"]

    shuffle: ClassVar[bool] = True  # type: ignore[misc] # removes the key: every source has `shuffle`

    sources: Array[MixtureEntry]
    """The sources, whose samples must have the same shape."""

    @property
    def unit(self) -> SampleUnit:  # type: ignore[override]
        """Unit of the first source. A rule requires that all sources have the same unit."""
        return self.sources[0].unit if self.sources else "tokens"

    def own_vocabulary(self) -> int | None:
        """Return the largest vocabulary size of the sources; None if there are no sources, or if a source uses the
        tokenizer, whose vocabulary is at least as large."""
        sizes = [source.own_vocabulary() for source in self.sources]
        return max(size for size in sizes if size is not None) if sizes and None not in sizes else None

    def stages(self) -> list[tuple[int, list[Fraction]]]:
        """Return (step, weights) for step 0 and for each step at which a weight changes. `weights`: the weights of all
        sources from this step on."""
        pairs = [source.weights() for source in self.sources]
        steps = sorted({step for of_source in pairs for step, _ in of_source})
        return [(step, [[w for first, w in of_source if first <= step][-1] for of_source in pairs]) for step in steps]


DATA_KINDS: dict[str, type[DataSource]] = {
    "text": TextData,
    "jsonl": JsonlData,
    "chat": ChatData,
    "preferences": PreferenceData,
    "unpaired_preferences": UnpairedPreferenceData,
    "classification": ClassificationData,
    "parquet": ParquetData,
    "huggingface": HuggingFaceData,
    "tokens": TokensData,
    "synthetic": SyntheticData,
    "images": ImageData,
    "mixture": MixtureData,
    FACTORY: FactoryData,
}
"""The config class of each kind of data. The first kind is the default. `titan_launch.data.sources.SOURCES` has the
classes that read the data."""

MIXED_KINDS: dict[str, type[DataSource]] = {
    kind: type(
        f"Mixed{section.__name__}", (section, MixtureEntry), {"__doc__": section.__doc__, "__module__": __name__}
    )
    for kind, section in DATA_KINDS.items()
    if section is not MixtureData
}
"""The config class of each kind of data in a mixture."""

KINDS: dict[type[DataSource], dict[str, type[DataSource]]] = {DataSource: DATA_KINDS, MixtureEntry: MIXED_KINDS}
"""For each type of a field, the classes that its value may have, by `kind`."""


def single_sources(data: DataSource) -> dict[str, DataSource]:
    """Return the sources of a mixture by name. Data that is not a mixture is one source with the name ""."""
    if not isinstance(data, MixtureData):
        return {"": data}
    return {source.effective_name(): source for source in data.sources}


_RECORDS = (".jsonl", ".ndjson", ".parquet")
"""Suffixes of files that contain records. Reading such a file as text is a mistake. `.json` is not in the list, because
a `.json` file may be one document."""


def misread_as_text(path: str, names: Iterable[str]) -> str | None:
    """Return the reason why an entry of `path` must not be read as text; None if the entry may be read as text. Files
    with records must not be read as text, because the format of the records would become part of the text. `names`:
    names of the entry's files, or of the first of these files; for a glob, the glob itself is enough."""
    ends = count_ends(names)
    records = Counter({end: number for end, number in ends.items() if uncompressed(end) in _RECORDS})
    if not records:
        return None
    found = set(map(uncompressed, records))
    sections = {kind: section for kind, section in DATA_KINDS.items() if issubclass(section, FilesData)}
    *kinds, last = (toml_string(kind) for kind, section in sections.items() if found & {*section.suffixes})
    remedy = f"set kind = {', '.join(kinds)}{' or ' if kinds else ''}{last}"
    others, mistake = ends - records, 'and kind = "text" would read the JSON or Parquet encoding of records as text'
    if not others:
        has = f"has {describe_ends(records)}" if os.path.isdir(path) else f"ends in {next(iter(records))}"
        return f"{has}, {mistake}; {remedy}"
    mixed = f"has {describe_ends(records)} beside {describe_ends(others)}, {mistake}"
    if not (end := next(filter(None, others), "")):  # a glob cannot name files without a suffix only
        return f"{mixed}; move the files with records to another folder, or {remedy}"
    return (
        f"{mixed}; name the files of one suffix by a glob ({glob_of_sort(path, end)}), or {remedy}; to use both, write "
        "a table [[data.sources]] for each suffix"
    )


def separates_documents(data: DataSource) -> bool:
    """Return True if samples have a document number for each token. The numbers keep attention and positions of
    documents apart."""
    values = ((getattr(s, "packing", None), getattr(s, "samples", None)) for s in single_sources(data).values())
    return any("documents" in pair for pair in values)


class ValidationConfig(Section):
    """Loss and accuracy on data held out from training, with the model in evaluation mode. Loss and accuracy are means
    over the targets of all ranks, with the same weight for each target. With a loss of pairs, they are means over the
    pairs. With `kto`, they are means over the answers."""

    freq: Annotated[int, Field(ge=0)] = 0
    """Steps between validations. With 0, the run does not validate: `max_samples` and `data` have no effect, and are
    not refused."""

    local_batch_size: Annotated[int, Field(ge=1)] = 8
    """Samples per batch on each data-parallel rank."""

    max_samples: Annotated[int, Field(ge=1)] | None = None
    """Number of samples to validate on: the first samples of the data, the same each time. With a mixture, this is the
    number for each source. Default: all samples."""

    patience: Annotated[int, Field(ge=1)] | None = None
    """Early stopping: the run ends when its validation loss has not improved for this many validations in a row. The
    result of the run is then the checkpoint with the lowest loss, which `export`, `generate` and `evaluate` use. A
    checkpoint is saved after each validation with the lowest loss so far. This key requires `checkpoint.enable = true`
    and a `checkpoint.keep_best` of at least 1, which ranks checkpoints by this loss. Unset: the run ends after
    `training.steps`."""

    min_improvement: Annotated[float, Field(ge=0)] = 0.0
    """With `patience`: a validation counts as an improvement if its loss is lower than the loss of the last improvement
    by more than this number. A loss that is not finite is no improvement."""

    data: DataSource | None = None
    """The held-out data. This table has the keys of `[data]`."""
