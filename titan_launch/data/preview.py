"""Conversion of samples to text, for `titan-launch data`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from titan_launch.config.sections.data import IGNORED_TARGET
from titan_launch.data.sources.interface import Sample
from titan_launch.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Passage:
    """Text of consecutive tokens of a document. `counts`: True if all these tokens count as targets, False if none of
    them counts."""

    text: str
    counts: bool


@dataclass(frozen=True)
class ShownDocument:
    """Text of the tokens of a sample that have the same document number."""

    num_tokens: int
    """Number of inputs."""

    passages: list[Passage]


def decode_sample(sample: Sample, tokenizer: Tokenizer) -> list[ShownDocument]:
    """Return the documents of a sample of tokens, without its padding.

    The last token of a document is never an input. It is omitted if the loss ignores it. The first token is never a
    target, so it gets the `counts` of the second token. A sample without document numbers is one document.
    """
    inputs, targets, *numbers = (column.tolist() for column in sample)
    number_of = numbers[0] if numbers else [0] * len(inputs)
    documents = []
    for _, group in groupby(range(len(inputs) - num_padding(sample)), key=number_of.__getitem__):
        places = list(group)
        counts = [targets[place] != IGNORED_TARGET for place in places]
        tokens = [inputs[place] for place in places] + ([targets[places[-1]]] if counts[-1] else [])
        states = [counts[0], *counts][: len(tokens)]
        passages = [
            Passage(tokenizer.decode([token for token, _ in passage], keep_special=True), counted)
            for counted, passage in groupby(zip(tokens, states, strict=True), key=lambda pair: pair[1])
        ]
        documents.append(ShownDocument(len(places), passages))
    return documents


def num_padding(sample: Sample) -> int:
    """Return the number of positions at the end of a sample that are padding: a document of zeros without targets."""
    inputs, targets, *numbers = sample
    if not numbers:
        return 0
    is_last = numbers[0] == numbers[0][-1]
    is_padding = not inputs[is_last].any() and bool((targets[is_last] == IGNORED_TARGET).all())
    return int(is_last.sum()) if is_padding else 0
