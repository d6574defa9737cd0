"""A report on the data of a job: its sources, documents, epochs, and first samples. Nothing is trained."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, groupby, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from titan_launch.config.job import JobConfig
from titan_launch.config.paths import describe_ends, files_left_out
from titan_launch.config.sections.data import IGNORED_TARGET, DataSource, FilesData
from titan_launch.config.sections.data import single_sources as single_sections
from titan_launch.data.epochs import too_many_epochs
from titan_launch.data.order import MixtureOrder
from titan_launch.data.sources import Sample, SampleSource, StreamSource, read_batch
from titan_launch.data.sources.interface import DetailedSource
from titan_launch.data.sources.mixture import single_sources
from titan_launch.data.tokenizers import Tokenizer
from titan_launch.plan.layout import Layout
from titan_launch.train.batches import RunData, build_data, with_steps

_DRAWN_SAMPLES = 64
"""Largest number of samples from which the fraction of ignored targets is computed."""


def describe_data(config: JobConfig, layout: Layout, num_samples: int) -> dict[str, Any]:
    """Return the report as a dict that JSON can represent. It contains the first `num_samples` samples of the run.
    Raises ConfigError as `build_data` and `with_steps` do."""
    data = build_data(config, layout, None)
    training = with_steps(config, data).training
    tokenizer, steps = data.tokenizer, training.total_steps
    report: dict[str, Any] = {
        "job": config.job.name,
        "epochs": training.epochs,
        "steps": steps,
        "global_batch_size": layout.global_batch_size,
        "seq_len": config.training.seq_len if config.data.unit == "tokens" else None,
        "world_size": layout.world_size,
    }
    if config.data.unit == "tokens":
        report["tokenizer"] = {
            "kind": config.tokenizer.kind,
            "path": config.tokenizer.path,
            "vocab_size": tokenizer.vocab_size,
            "digest": tokenizer.digest,
        }
    report["sources"] = list(_sources("data", config.data, data.train, tokenizer))
    for described, source in zip(report["sources"], single_sources(data.train).values(), strict=True):
        consumed = steps * layout.global_batch_size
        if isinstance(data.order, MixtureOrder):
            described["share"], described["epochs"] = data.order.progress(consumed)[described["name"]]
        elif not isinstance(source, StreamSource):
            described["epochs"] = consumed / len(source)
    # A stream has no epochs, so it gets no warning.
    report["warnings"] = [
        warning
        for source in (report["sources"] if training.epochs is None else [])
        if (warning := too_many_epochs(steps, source.get("epochs", 0), source.get("samples", 0), source["name"]))
    ]
    if config.validation.data is not None and data.validation is not None:
        for described in _sources("validation.data", config.validation.data, data.validation, tokenizer):
            used = len(data.validation_parts[described["name"]])
            report["sources"].append({**described, "validated_samples": used})
    shown = min(num_samples, steps * layout.global_batch_size)
    samples = _samples(data)
    report["samples"] = [{**place, **_contents(config, sample, tokenizer)} for place, sample in islice(samples, shown)]
    return report


def _sources(section: str, config: DataSource, source: SampleSource, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Yield a description of each source in `section` of the job file: `data` or `validation.data`."""
    sections = single_sections(config)
    for name, single in single_sources(source).items():
        yield {"section": section, "name": name, **_source(sections[name], single, tokenizer)}


def _source(section: DataSource, source: SampleSource, tokenizer: Tokenizer) -> dict[str, Any]:
    keys = {key: getattr(section, key) for key in ("kind", "path", "split", "packing") if hasattr(section, key)}
    if isinstance(source, StreamSource):
        return {**keys, "contents": source.describe()}
    found = {**keys, "samples": len(source)}
    if isinstance(section, FilesData) and (left_out := files_left_out(section.path, section.suffixes)):
        found["not_read"] = describe_ends(left_out)
    if isinstance(source, DetailedSource):
        details = source.details()
        found |= details.amounts
        if details.first_tokens is not None:
            num_bytes = len(tokenizer.decode(details.first_tokens).encode())
            found["bytes_per_token"] = num_bytes / max(1, len(details.first_tokens))
        if details.document_lengths is not None:
            found["document_lengths"] = _lengths(details.document_lengths)
    if section.unit == "tokens":
        found["ignored_targets"] = _ignored_share(source)
    return found


def _lengths(lengths: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Return the extremes, the mean and percentiles of the lengths, and a histogram whose borders are powers of 2."""
    # The method "inverted_cdf" returns lengths that occur, and does not interpolate between them.
    found = np.percentile(lengths, (50, 90, 99), method="inverted_cdf").tolist()
    percentiles = dict(zip(("p50", "p90", "p99"), found, strict=True))
    counts = np.bincount(np.frexp(lengths)[1])  # 2^(e - 1) <= length < 2^e
    histogram = {
        str(low) if low >= high - 1 else f"{low:,} to {high - 1:,}": int(count)
        for exponent, count in enumerate(counts.tolist())
        for low, high in [((1 << exponent) >> 1, 1 << exponent)]
    }
    used = np.flatnonzero(counts)
    rows = list(histogram.items())[used[0] : used[-1] + 1]
    extremes = {"min": int(lengths.min()), "max": int(lengths.max()), "mean": float(lengths.mean())}
    return {**extremes, **percentiles, "histogram": dict(rows)}


def _ignored_share(source: SampleSource) -> float:
    """Return the fraction of targets that are ignored. Padding does not count. At most `_DRAWN_SAMPLES` samples are
    read, evenly spaced in the source."""
    ignored = total = 0
    for index in np.unique(np.linspace(0, len(source) - 1, _DRAWN_SAMPLES, dtype=np.int64)).tolist():
        sample = source[index]
        padding = _num_padding(sample)
        ignored += int((sample[1] == IGNORED_TARGET).sum()) - padding
        total += sample[1].numel() - padding
    return ignored / max(1, total)


def _samples(data: RunData) -> Iterator[tuple[dict[str, Any], Sample]]:
    """Yield (origin, sample) for the training samples in the order of the run. The origin is a dict with the position
    in this order, the name of the source, and the index in that source.

    For a stream, yield the samples that data-parallel rank 0 reads. The origin then has the position and the rank.
    """
    if isinstance(data.train, StreamSource):
        for position, sample in enumerate(data.train.open_part(0, data.layout.data_parallel)):
            yield {"position": position, "data_parallel_rank": 0}, sample
        return
    for position in count():
        index = data.order(position)
        name, index_of_source = _locate(data.train, index)
        sample = tuple(column[0] for column in read_batch(data.train, [index], [position]))
        yield {"position": position, "source": name, "index": index_of_source}, sample


def _contents(config: JobConfig, sample: Sample, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the contents of a sample: its decoded documents and the number of padding tokens, or the shape and class
    of its image."""
    if config.data.unit == "images":
        return {"shape": list(sample[0].shape), "class": int(sample[1])}
    return {"documents": decode_sample(sample, tokenizer), "padding": _num_padding(sample)}


def decode_sample(sample: Sample, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the documents of a sample of tokens, without its padding: for each document, the number of its inputs
    (`tokens`) and its `text`, a list of passages. A passage has the `text` of consecutive tokens, and `counts`: True if
    the loss counts these tokens as targets, False if it ignores them.

    The last token of a document is never an input. If the loss ignores this token, it is omitted. The first token is
    never a target. It belongs to the passage of the second token. A sample without document numbers is one document.
    """
    inputs, targets, *numbers = (column.tolist() for column in sample)
    number_of = numbers[0] if numbers else [0] * len(inputs)
    documents = []
    for _, group in groupby(range(len(inputs) - _num_padding(sample)), key=number_of.__getitem__):
        places = list(group)
        counts = [targets[place] != IGNORED_TARGET for place in places]
        tokens = [inputs[place] for place in places] + ([targets[places[-1]]] if counts[-1] else [])
        states = [counts[0], *counts][: len(tokens)]
        passages = [
            {"text": tokenizer.decode([token for token, _ in passage], keep_special=True), "counts": counted}
            for counted, passage in groupby(zip(tokens, states, strict=True), key=lambda pair: pair[1])
        ]
        documents.append({"tokens": len(places), "text": passages})
    return documents


def _num_padding(sample: Sample) -> int:
    """Return the number of positions at the end of a sample that are padding: a document of zeros without targets."""
    inputs, targets, *numbers = sample
    if not numbers:
        return 0
    is_last = numbers[0] == numbers[0][-1]
    is_padding = not inputs[is_last].any() and bool((targets[is_last] == IGNORED_TARGET).all())
    return int(is_last.sum()) if is_padding else 0


def _locate(source: SampleSource, index: int) -> tuple[str, int]:
    """Return the name of the source that holds a sample, and the index of the sample in that source. Without a mixture,
    the name is "" and the index is unchanged."""
    for name, single in single_sources(source).items():
        if index < len(single):
            return name, index
        index -= len(single)
    raise IndexError(index)
