"""Documents in one sample train like documents in samples of their own, at every parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import run_ranks
from tests.sampling import chosen, rest_is_slow
from tests.train.jobs import TINY_ARGS, step_and_report, this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.data import IGNORED_TARGET
from titan_launch.data.sources import Batch
from titan_launch.train.build import build_run
from titan_launch.train.step import validate

SEQ_LEN, VOCABULARY, STEPS = 16, 64, 2

LENGTHS = ((5, 8, 2), (16,), (1, 7, 6), (3, 3, 3, 3))
"""The lengths of the documents in each sample of a step. Padding follows them."""

NUM_ROWS = 12
"""Number of samples of a step if each has one document; the last sample is only padding."""

MODELS: dict[str, dict[str, Any]] = {
    "llama3": {"n_layers": 4},  # two stages on each of two ranks
    "gpt2": {"n_kv_heads": 4, "tie_embeddings": False},  # learned positions
    "gemma2": {"sliding_window": 4, "attention_soft_cap": 5.0},
    "gpt_oss": {"sliding_window": 4, "experts": {"hidden_dim": 20, "balance_loss": 0.0}},
}
TP, PP, REPLICAS = (
    {"parallelism": {f"{axis}_degree": 2}}
    for axis in ("tensor_parallel", "pipeline_parallel", "data_parallel_replicate")
)
DEFERRED = {"gradient_accumulation": {"mode": "deferred"}}
ZERO_BUBBLE = {
    "parallelism": {**PP["parallelism"], "pipeline_parallel_schedule": "InterleavedZeroBubble"},
    "gradient_accumulation": {"mode": "deferred", "keep_params_unsharded": True},
}

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "selective": ("llama3", 1, {"activation_checkpoint": {"mode": "selective"}, "loss": {"chunks": 3}}),
    "one rank": ("llama3", 1, {}),
    "checkpointed": ("llama3", 1, {"activation_checkpoint": {"mode": "full"}, **DEFERRED}),
    "window and soft cap": ("gemma2", 1, {}),
    "FSDP": ("gemma2", 2, DEFERRED),
    "replicas": ("llama3", 2, REPLICAS),
    "experts, TP": ("gpt_oss", 2, TP),
    "TP": ("llama3", 2, TP),
    "PP": ("gpt2", 2, PP),
    "PP, split backward": ("llama3", 2, ZERO_BUBBLE),
    "HSDP": ("llama3", 4, {**REPLICAS, "gradient_accumulation": {"mode": "deferred_all_reduce"}}),
    "TP x PP": ("llama3", 4, {"parallelism": {**TP["parallelism"], **PP["parallelism"]}}),
    "TP, learned positions": ("gpt2", 2, {**TP, "activation_checkpoint": {"mode": "full"}}),
}
"""The model, the number of ranks, and sections of a job."""


def documents_of(step: int, sample: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets of each document of a sample. About a third of the targets are ignored."""
    generator = torch.Generator().manual_seed(100 * step + sample)
    for length in LENGTHS[sample]:
        tokens = torch.randint(0, VOCABULARY, (length + 1,), generator=generator)
        is_ignored = torch.rand(length, generator=generator) < 0.3
        yield tokens[:-1], tokens[1:].masked_fill(is_ignored, IGNORED_TARGET)


def packed(step: int, sample: int) -> Batch:
    """Return a batch of one sample, which has several documents and padding."""
    inputs, targets = (torch.cat(parts) for parts in zip(*documents_of(step, sample), strict=True))
    numbers = torch.arange(len(LENGTHS[sample])).repeat_interleave(torch.tensor(LENGTHS[sample]))
    documents = padded(numbers.int(), len(LENGTHS[sample]))
    return Batch(padded(inputs, 0)[None], padded(targets, IGNORED_TARGET)[None], documents[None])


def alone(step: int) -> Batch:
    """Return the batch of all samples of a step, each with one document."""
    documents = [pair for sample in range(len(LENGTHS)) for pair in documents_of(step, sample)]
    rows = [(padded(x, 0), padded(y, IGNORED_TARGET)) for x, y in documents]
    empty = (torch.zeros(SEQ_LEN, dtype=torch.int64), torch.full((SEQ_LEN,), IGNORED_TARGET))
    return Batch(*map(torch.stack, zip(*rows, *[empty] * (NUM_ROWS - len(rows)), strict=True)))


def padded(tokens: Tensor, value: int) -> Tensor:
    return torch.nn.functional.pad(tokens, (0, SEQ_LEN - len(tokens)), value=value)


Measured = list[tuple[float, float]]
"""Loss and gradient norm of each step, and last the loss and accuracy of a validation."""


def train(model: str, sections: dict[str, Any], folder: Path, is_packed: bool) -> Measured:
    args = {**TINY_ARGS, "vocab_size": VOCABULARY, **MODELS[model]}
    training = {"seq_len": SEQ_LEN, "steps": STEPS, "global_batch_size": len(LENGTHS) if is_packed else NUM_ROWS}
    training["local_batch_size"] = 1 if is_packed else NUM_ROWS
    job = tiny_job(folder, training=training, optimizer={"eps": 1e-5}, checkpoint={"enable": False}, **sections)
    job["model"] = {"name": model, "args": args}
    measured = []
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        rank, ranks = run.job.layout.data_rank(run.ranks.rank), run.job.layout.data_parallel

        def batches(step: int) -> list[Batch]:
            whole = [packed(step, sample) for sample in range(len(LENGTHS))] if is_packed else [alone(step)]
            return whole[rank::ranks]

        of_steps = iter([batch for step in range(STEPS) for batch in batches(step)])
        run = replace(run, batches=replace(run.batches, train=of_steps))
        for _ in range(STEPS):
            scalars = step_and_report(run)
            measured.append((scalars["train/loss"], scalars["train/grad_norm"]))
        held_out = [("", batch) for batch in batches(STEPS)]
        found = validate(run.model, held_out, run.ranks.device, run.step.loss)
        measured.append((found["validation/loss"], found["validation/accuracy"]))
    return measured


def train_all(num_ranks: int, names: set[str], folder: Path) -> dict[str, Measured]:
    """Return the results of cases for a number of ranks. One rank also trains each document in a sample of its own."""
    found = {
        name: train(model, sections, folder / name, is_packed=True)
        for name, (model, ranks, sections) in CASES.items()
        if ranks == num_ranks and name in names
    }
    if num_ranks == 1:
        found |= {model: train(model, {}, folder / model, is_packed=False) for model in {CASES[n][0] for n in names}}
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Measured]:
    folder, names = tmp_path_factory.mktemp("runs"), chosen(request, "name")
    return {
        name: measured
        for ranks in sorted({1, *(CASES[name][1] for name in names)})
        for name, measured in run_ranks(train_all, ranks, ranks, names, folder / str(ranks))[0].items()
    }


@pytest.mark.parametrize("name", rest_is_slow(list(CASES), 8))
def test_packed_documents_train_like_documents_in_samples_of_their_own(name: str, trained: dict[str, Measured]) -> None:
    for measured, expected in zip(trained[name], trained[CASES[name][0]], strict=True):
        assert measured == pytest.approx(expected, rel=1e-5)
