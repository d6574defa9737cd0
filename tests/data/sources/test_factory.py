"""Samples of the user's own code. The factories of these tests are in this module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from titan_launch.config.image_format import ImageFormat
from titan_launch.config.sections.data import IGNORED_TARGET, FactoryData
from titan_launch.core.errors import ConfigError, UserError
from titan_launch.data.loader import Workers, build_train_loader
from titan_launch.data.order import SampleOrder
from titan_launch.data.sources import SampleSource, StreamSource, build_source, read_batch
from titan_launch.data.sources.interface import SourceContext
from titan_launch.data.tokenizers import ByteTokenizer
from titan_launch.plan.layout import Layout

SEQ_LEN = 4


class Sequences:
    """Sequences that count upwards."""

    def __init__(self, context: SourceContext, number: int = 10, vocab_size: int | None = None):
        self.number, self.seq_len = number, context.seq_len
        self.num_classes = vocab_size or context.tokenizer.vocab_size

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        tokens = (index + torch.arange(self.seq_len + 1)) % self.num_classes
        return tokens[:-1], tokens[1:]


class Batches(Sequences):
    """The same with `__getitems__`, a description and a fingerprint."""

    content = "one"

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, ...]]:
        return [self[index] for index in indices]

    def describe(self) -> str:
        return "a folder of mine"

    def fingerprint(self) -> str:
        return self.content


class Images:
    """Black images."""

    def __init__(self, context: SourceContext, size: int = 8):
        self.size = size

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, self.size, self.size), torch.tensor(index)


class Given:
    """Any samples."""

    samples: list[Any]

    def __init__(self, context: SourceContext, **attributes: Any):
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Stream:
    """The sequences as a stream without a state."""

    def __init__(self, context: SourceContext, number: int = 10):
        self.sequences = Sequences(context, number)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return map(self.sequences.__getitem__, range(len(self.sequences)))


class StatefulStream(Stream):
    """A stream that says where it is."""

    position = 0

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        while self.position < len(self.sequences):
            self.position += 1
            yield self.sequences[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class StreamOfTensors(StatefulStream):
    """A stream whose state is not plain data."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": torch.tensor(self.position)}


def fail(context: SourceContext, **args: Any) -> None:
    raise ValueError("no such shard")


def number(context: SourceContext) -> int:
    return 3


def build(name: str, images_taken: ImageFormat | None = None, **keys: Any) -> SampleSource:
    config = FactoryData(kind=f"tests.data.sources.test_factory:{name}", **keys)
    return build_source(config, ByteTokenizer(), SEQ_LEN, images_taken=images_taken)


def problem(name: str, **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(name, **keys)
    return str(caught.value)


def test_samples_come_from_the_object_that_the_factory_returns() -> None:
    source = build("Sequences", args={"number": 7})
    assert (len(source), source.num_classes) == (7, 257)
    assert source.describe() == "7 samples of tests.data.sources.test_factory:Sequences"
    assert [tensor.tolist() for tensor in source[5]] == [[5, 6, 7, 8], [6, 7, 8, 9]]
    batched = build("Batches", args={"number": 7})
    assert batched.describe() == "7 samples of a folder of mine"
    for of_one, of_batch in zip(read_batch(source, [3, 1]), read_batch(batched, [3, 1]), strict=True):
        assert torch.equal(of_one, of_batch)


def test_workers_read_the_samples_of_a_factory() -> None:
    layout = Layout(replicate=1, shard=1, local_batch_size=2, num_microbatches=1)
    batches = []
    for num_workers in (0, 2):
        source = build("Batches")
        order = SampleOrder(len(source), 0, shuffle=True)
        with build_train_loader(source, order, layout, 0, start=0, workers=Workers(num_workers)) as loader:
            batches.append([next(batch).inputs.tolist() for batch in [iter(loader)] for _ in range(6)])
    assert batches[0] == batches[1]


def test_the_fingerprint_follows_the_samples_or_the_objects_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before = build("Sequences").fingerprint(0)
    assert before is not None
    assert before.changed_to(build("Sequences").fingerprint(0)) == ""
    assert before.changed_to(build("Sequences", args={"vocab_size": 5}).fingerprint(0)) != ""
    own = build("Batches").fingerprint(0)
    assert own is not None
    assert own.changed_to(build("Batches", args={"vocab_size": 5}).fingerprint(0)) == ""
    monkeypatch.setattr(Batches, "content", "another")
    assert own.changed_to(build("Batches").fingerprint(0)) != ""


def test_images_have_the_classes_of_the_object_or_of_the_model() -> None:
    taken = ImageFormat(channels=1, height=8, width=8, num_classes=10)
    assert build("Images", taken, samples="images").num_classes == 10
    key = "data.kind: "
    reason = "returns an object with images, but without the attribute num_classes; add it"
    assert problem("Images", samples="images") == f"{key}{reason}"
    assert problem("Images", samples="images", images_taken=taken, args={"size": 9}) == (
        f"{key}holds images of 9 x 9 pixels, but the model takes 8 x 8; return images that fit the model, or change "
        "model.args"
    )
    assert problem("Sequences", samples="images", images_taken=taken) == (
        f"{key}sample 0 must be a pair of a float32 image [channels, height, width] and an int64 class, but is a tuple "
        "(a tensor [4] of torch.int64, a tensor [4] of torch.int64)"
    )


GOOD = (torch.arange(4), torch.arange(4))
LAST = torch.tensor([0, 0, 1, 2], dtype=torch.int32)


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        (GOOD[0], "must be a tuple (input, target), but is a tensor [4] of torch.int64"),
        ((*GOOD, LAST), "must be a tuple (input, target), but is a tuple of 3"),
        (([1, 2, 3, 4], GOOD[1]), "input must be a tensor [4] of torch.int64, but is a list"),
        ((GOOD[0][:3], GOOD[1]), "input must be a tensor [4] of torch.int64, but is a tensor [3] of torch.int64"),
        ((GOOD[0], GOOD[1].int()), "target must be a tensor [4] of torch.int64, but is a tensor [4] of torch.int32"),
        ((GOOD[0] - 1, GOOD[1]), "input has tokens outside of the vocabulary, 0 to 256"),
        ((GOOD[0], GOOD[1] + 254), "target must be 0 to 256, or -100 for a target that does not count"),
    ],
)
def test_a_sample_of_another_form_is_refused(sample: Any, reason: str) -> None:
    for index, samples in enumerate([[sample, GOOD], [GOOD, sample]]):
        assert problem("Given", args={"samples": samples}) == f"data.kind: sample {index}: {reason}"
    source = build("Given", args={"samples": [GOOD, sample, GOOD]})
    with pytest.raises(UserError) as caught:
        read_batch(source, [0, 1])
    assert str(caught.value) == f"tests.data.sources.test_factory:Given: sample 1: {reason}"


class Duplicates(Sequences):
    """Sequences whose `__getitems__` drops repeated indices."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, ...]]:
        return [self[index] for index in {*indices}]


def test_another_number_of_samples_than_of_indices_is_refused() -> None:
    with pytest.raises(UserError, match=r"Duplicates: __getitems__ must return one .* the 3 indices, but returns 2"):
        read_batch(build("Duplicates"), [4, 4, 5])


def test_documents_are_a_third_tensor() -> None:
    ignored = torch.full((4,), IGNORED_TARGET)
    source = build("Given", samples="documents", args={"samples": [(GOOD[0], ignored, LAST)]})
    assert torch.equal(source[0][2], LAST)


@pytest.mark.parametrize("documents", [[2, 1, 0, 0], [1, 1, 2, 3], [0, 0, 2, 3], [-1, 0, 0, 1]])
def test_document_numbers_begin_at_0_and_rise_by_at_most_1(documents: list[int]) -> None:
    samples = [(*GOOD, torch.tensor(documents, dtype=torch.int32))]
    assert problem("Given", samples="documents", args={"samples": samples}) == (
        "data.kind: sample 0: documents must begin at 0 in each sample and rise by 0 or 1 from token to token"
    )


def test_errors_of_a_factory_name_it() -> None:
    failed = problem("fail", args={"shard": 3})
    assert failed.startswith("data.kind: failed:\nTraceback") and failed.endswith("ValueError: no such shard")
    assert "titan_launch/" not in failed
    wanted = "data.kind: must return an object with __len__ and __getitem__, or an iterable, but returns a int"
    assert problem("number") == wanted
    assert problem("Given", args={"samples": []}) == "data.kind: returns an object without samples: its length is 0"
    assert problem("Stream", shuffle=False, args={"number": 0}) == "data.kind: returns an iterable without samples"
    assert problem("Stream", num_workers=2) == (
        "data.shuffle: a stream is read in its own order; set shuffle = false, and shuffle the data in advance\n"
        "data.num_workers: a stream is read by at most one worker process per rank; set num_workers = 0 or 1"
    )
    assert problem("Sequence").startswith('data.kind: tests.data.sources.test_factory has no attribute "Sequence"; did')
    config = FactoryData(kind="tests.data.sources.test_factory:Stream", shuffle=False)
    with pytest.raises(ConfigError, match=r"validation.data.kind: is a stream, which can be neither validation data"):
        build_source(config, ByteTokenizer(), SEQ_LEN, ("validation", "data"))


def test_a_stream_shows_its_first_sample() -> None:
    source = build("Stream", shuffle=False)
    assert isinstance(source, StreamSource)
    assert torch.equal(source[0][0], torch.arange(4))
    assert source.describe() == (
        "stream of tests.data.sources.test_factory:Stream; its order depends on the number of data-parallel ranks"
    )
