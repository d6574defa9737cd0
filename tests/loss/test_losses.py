"""Each loss trains as a plain loop in one process does, on every division into ranks and microbatches."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.sampling import rest_is_slow, sampled
from tests.tensors import full_state
from tests.train.jobs import TINY_ARGS, read_metrics, run_job, run_job_until, run_measured, tiny_job
from tests.train.test_step import relative_error
from titan_launch.config.job import JobConfig
from titan_launch.config.rules import first_problem
from titan_launch.config.sections.data import TextData
from titan_launch.config.sections.loss import KTOConfig, ORPOConfig
from titan_launch.core.errors import ConfigError
from titan_launch.data.corpora.chat import UnpairedPreferenceCorpus
from titan_launch.data.corpora.text_files import TextCorpus
from titan_launch.data.order import SampleOrder
from titan_launch.data.prepare import prepare
from titan_launch.data.sources import build_source
from titan_launch.data.tokenizers import build_tokenizer
from titan_launch.loss.build import losses_of_next_tokens
from titan_launch.loss.kto import KTOLoss, answers_in, mismatched
from titan_launch.loss.preferences import orpo
from titan_launch.loss.second_model import Base
from titan_launch.loss.user_function import FunctionLoss
from titan_launch.models.build import build_model
from titan_launch.models.init import initialize
from titan_launch.plan.hardware import GIB
from titan_launch.plan.layout import plan_layout
from titan_launch.trace.step import TracedStep, trace_step
from titan_launch.train.measure import MEASURED
from titan_launch.train.model import build_job_model, plan_precision

STEPS, BATCH, SEED = 2, 4, 7
BYTES = {**TINY_ARGS, "vocab_size": 257}
"""A model of the tokens of `tokenizer.kind = "bytes"`."""

_IMMEDIATE = {"mode": "immediate", "keep_params_unsharded": True}
DIVISIONS: dict[str, dict[str, Any]] = {
    "deferred": {"gradient_accumulation": {"mode": "deferred"}},
    "immediate": {"gradient_accumulation": _IMMEDIATE},
    "deferred_all_reduce": {
        "gradient_accumulation": {"mode": "deferred_all_reduce"},
        "parallelism": {"data_parallel_replicate_degree": 2},
    },
}
"""Ways to divide the batch of a step over two ranks, each of which has two microbatches."""


def focal_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The focal loss (arXiv:1708.02002), summed over the valid targets."""
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).sum()


def sequence_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum over sequences of the largest loss of a token."""
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    return losses.amax(-1).square().sum()


def num_sequences(targets: Tensor) -> Tensor:
    """Return the number of sequences that are not padding, which validation adds."""
    return (targets != -100).any(-1).sum()


sequence_loss.count = num_sequences  # type: ignore[attr-defined]


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def losses_of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")


def constant_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return focal_loss(logits.detach(), targets)


def failing_loss(logits: Tensor, targets: Tensor) -> Tensor:
    raise ValueError("no such class")


def no_loss() -> None:
    """A function without arguments."""


def write_model(folder: Path, seed: int, **args: Any) -> Path:
    """Write a tiny model as `titan-launch export --format plain` does."""
    model = plain_model(seed, **args)
    folder.mkdir(parents=True)
    record = {"model": {"name": "llama3", "flavor": "debug", "args": args}, "training": {"seq_len": 16}}
    (folder / "config.json").write_text(json.dumps(record))
    save_file({name: tensor.detach() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    return folder


def plain_model(seed: int, seq_len: int = 16, **args: Any) -> nn.Module:
    config = JobConfig.model_validate({"model": {"args": args}})
    built = build_model(config.model, seq_len)
    built.module.to_empty(device="cpu")
    initialize(built.module, built.initializer, seed, torch.device("cpu"))
    return built.module


def job_of(folder: Path, loss: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a job of two steps with SGD at a constant learning rate."""
    return tiny_job(
        folder,
        **{
            "training": {
                "seq_len": 16,
                "local_batch_size": BATCH,
                "global_batch_size": BATCH,
                "steps": STEPS,
                "seed": SEED,
                "max_norm": 0.0,
            },
            "optimizer": {"name": "SGD", "lr": 0.1, "weight_decay": 0.0},
            "lr_scheduler": {"kind": "constant"},
            "loss": loss,
            **sections,
        },
    )


def run_named(jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Tensor]]:
    """Train jobs on this rank, each in a run folder with its name."""
    return {name: run_job({**job, "job": {**job["job"], "name": name}}) for name, job in jobs.items()}


def divided(job: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a job in a division. `kto` cannot keep parameters unsharded."""
    job = {**job, **DIVISIONS[name], "training": {**job["training"], "local_batch_size": 1}}
    if job["loss"].get("name") == "kto" and name == "immediate":
        job["gradient_accumulation"] = {"mode": "immediate"}
    return job


def samples_of(job: dict[str, Any]) -> Iterator[list[tuple[Tensor, ...]]]:
    """Yield the samples of each step of a job."""
    config = JobConfig.model_validate(job)
    source = build_source(config.data, build_tokenizer(config.tokenizer), config.training.seq_len)
    order = SampleOrder(len(source), SEED, config.data.shuffle)
    for step in range(STEPS):
        yield [source[order(step * BATCH + index)] for index in range(BATCH)]


def train_plainly(
    job: dict[str, Any], args: dict[str, Any], mean_loss_of: Callable[[nn.Module, list[tuple[Tensor, ...]]], Tensor]
) -> tuple[dict[str, Tensor], list[float]]:
    """Train in one process with PyTorch's SGD. Return the parameters and the loss of each step."""
    model, losses = plain_model(SEED, job["training"]["seq_len"], **args), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for samples in samples_of(job):
        loss = mean_loss_of(model, samples)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return full_state(model), losses


def check_divisions(
    job: dict[str, Any], folder: Path, expected: dict[str, Tensor], losses: list[float], names: Sequence[str]
) -> list[dict[str, float]]:
    """Train a job as one batch, and in divisions on 2 ranks. Compare with plain training. Return the metrics."""
    for ranks, jobs in ((1, {"tiny": job}), (2, {name: divided(job, name) for name in names})):
        for name, state in run_ranks(run_named, ranks, jobs)[0].items():
            assert relative_error(state, expected) < 1e-5, name
    metrics = read_metrics(folder)
    assert [row["train/loss"] for row in metrics] == pytest.approx(losses, rel=1e-5)
    for name in names:
        of_division = read_metrics(folder, name)
        for row, own in zip(metrics, of_division, strict=True):
            compared = [
                tag
                for tag in row
                if tag.startswith(("train/", "validation/", "preference/", "distillation/")) and tag != "train/loss_max"
            ]
            assert [own[tag] for tag in compared] == pytest.approx([row[tag] for tag in compared], rel=1e-4, abs=1e-6)
    return metrics


def test_cross_entropy_with_its_options_trains_as_a_plain_loop(tmp_path: Path) -> None:
    job = job_of(tmp_path, {"z_loss": 0.02, "label_smoothing": 0.1})
    of_steps: list[list[float]] = []

    def mean_loss_of(model: nn.Module, samples: list[tuple[Tensor, ...]]) -> Tensor:
        inputs, targets = map(torch.stack, zip(*samples, strict=True))
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)
        z_loss = 0.02 * logits.logsumexp(-1).square().mean()
        of_steps.append([loss.item(), z_loss.item()])
        return loss + z_loss

    expected, _ = train_plainly(job, TINY_ARGS, mean_loss_of)
    metrics = check_divisions(job, tmp_path, expected, [loss for loss, _ in of_steps], ["deferred"])
    assert [row["train/z_loss"] for row in metrics] == pytest.approx([z_loss for _, z_loss in of_steps], rel=1e-5)


@pytest.mark.parametrize(("loss", "num_items"), rest_is_slow([(sequence_loss, BATCH), (focal_loss, BATCH * 16)]))
def test_a_function_of_the_user_trains_as_a_plain_loop(
    tmp_path: Path, loss: Callable[[Tensor, Tensor], Tensor], num_items: int
) -> None:
    held_out = {"freq": STEPS, "data": {"kind": "synthetic", "vocab_size": 61, "num_samples": 6, "seed": 1}}
    job = job_of(tmp_path, {"name": f"{__name__}:{loss.__name__}"}, validation=held_out)

    def mean_loss_of(model: nn.Module, samples: list[tuple[Tensor, ...]]) -> Tensor:
        inputs, targets = map(torch.stack, zip(*samples, strict=True))
        return loss(model(inputs), targets) / num_items

    expected, losses = train_plainly(job, TINY_ARGS, mean_loss_of)
    last = check_divisions(job, tmp_path, expected, losses, ["deferred_all_reduce"])[-1]

    model = plain_model(SEED, **TINY_ARGS)
    model.load_state_dict(expected, strict=False)
    source = build_source(JobConfig.model_validate(job).validation.data, build_tokenizer(JobConfig().tokenizer), 16)  # type: ignore[arg-type]
    inputs, targets = map(torch.stack, zip(*(source[index] for index in range(6)), strict=True))
    logits = model(inputs)
    assert last["validation/loss"] == pytest.approx(loss(logits, targets).item() / (num_items / BATCH * 6), rel=1e-4)
    assert last["validation/accuracy"] == pytest.approx((logits.argmax(-1) == targets).float().mean().item())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("losses_of_tokens", "returns a tensor of the shape (64,) instead of one sum, a scalar tensor"),
        ("mean_loss", "return a sum over samples, not a mean: the launcher divides the sum"),
        ("constant_loss", "returns a value without a gradient; compute it from the logits"),
        ("failing_loss", "failed:\nTraceback"),
        ("no_loss", "cannot be called with two arguments, logits and targets"),
        ("missing", 'has no attribute "missing"'),
    ],
)
def test_a_wrong_function_is_one_error(tmp_path: Path, name: str, message: str) -> None:
    run_ranks(fail_with, 1, job_of(tmp_path, {"name": f"{__name__}:{name}"}), ("loss", "name"), message)
    in_first_step = name not in ("no_loss", "missing")
    assert (tmp_path / "tiny").exists() == in_first_step, "a function that cannot be called is found before any file"


def test_a_mean_is_found_once_two_samples_have_items() -> None:
    def mean(logits: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return losses / (targets != -100).sum().clamp(min=1)

    loss = FunctionLoss("my_loss:mean", lambda shape, targets: None, lambda function: function, mean)
    outputs, targets = torch.randn(3, 4, 5, requires_grad=True), torch.ones(3, 4, dtype=torch.int64)
    for ignored in (0, slice(1, None)):
        loss.sums(outputs, targets.index_fill(0, torch.arange(3)[ignored].reshape(-1), -100))
    for value in (math.nan, math.inf):
        loss.sums(outputs + value, targets)  # `debug.on_nonfinite` decides what follows
    with pytest.raises(ConfigError, match="return a sum over samples, not a mean"):
        loss.sums(outputs, targets)


@pytest.mark.parametrize(("count", "reason"), [(lambda targets: None, "NoneType"), (lambda targets: 1 // 0, "by zero")])
def test_a_count_that_fails_is_one_error(count: Callable[[Tensor], Any], reason: str) -> None:
    def counted(logits: Tensor, targets: Tensor) -> Tensor:
        return logits.sum()

    counted.count = count  # type: ignore[attr-defined]
    loss = FunctionLoss("my_loss:counted", lambda shape, targets: None, lambda function: function, counted)
    with pytest.raises(ConfigError, match=f"(?s)the function's count failed, or returned no integer:\n.*{reason}"):
        loss.counts(torch.ones(3, 4, dtype=torch.int64), None)


def fail_with(job: dict[str, Any], key: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_job(job)
    (problem,) = caught.value.problems
    assert problem.key == key and message in problem.reason


def test_distillation_trains_as_a_plain_loop(tmp_path: Path) -> None:
    """The teacher is wider than the student, and has other initial values."""
    args = {**TINY_ARGS, "dim": 48, "hidden_dim": 64}
    folder = write_model(tmp_path / "teacher", 3, **args)
    held_out = {"freq": STEPS, "data": {"kind": "synthetic", "vocab_size": 61, "num_samples": 6, "seed": 1}}
    table = {"teacher": str(folder), "temperature": 2.0, "weight": 0.75}
    job = job_of(tmp_path, {"name": "distillation", "distillation": table}, validation=held_out)
    teacher = plain_model(3, **args).eval()

    def mean_loss_of(model: nn.Module, samples: list[tuple[Tensor, ...]]) -> Tensor:
        total = torch.zeros(())
        for inputs, targets in samples:  # one sample at a time, by the definition
            logits, soft = model(inputs[None])[0], teacher(inputs[None])[0].detach()
            log_p, log_q = (soft / 2).log_softmax(-1), (logits / 2).log_softmax(-1)
            divergence = (log_p.exp() * (log_p - log_q)).sum()
            total = total + 0.75 * 4 * divergence + 0.25 * F.cross_entropy(logits, targets, reduction="sum")
        return total / (BATCH * 16)

    expected, losses = train_plainly(job, TINY_ARGS, mean_loss_of)
    metrics = check_divisions(job, tmp_path, expected, losses, ["immediate"])
    for row in metrics:
        total = 0.75 * 4 * row["distillation/kl_divergence"] + 0.25 * row["distillation/cross_entropy"]
        assert row["train/loss"] == pytest.approx(total, rel=1e-5)
    student = plain_model(SEED, **TINY_ARGS)
    student.load_state_dict(expected, strict=False)
    source = build_source(JobConfig.model_validate(job).validation.data, build_tokenizer(JobConfig().tokenizer), 16)  # type: ignore[arg-type]
    inputs, targets = map(torch.stack, zip(*(source[index] for index in range(6)), strict=True))
    cross_entropy = F.cross_entropy(student(inputs).flatten(0, 1), targets.flatten()).item()
    assert metrics[-1]["validation/loss"] == pytest.approx(cross_entropy, rel=1e-5)


SEQ_LEN = 400
"""Places of two short pairs, or of a long one."""

CHATS = [("Add 2 and 3.", "5", "It is 6."), ("Name a color.", "Blue.", "Dog"), ("Hi", "Hello!", "Go away, please.")]
CHATS = [(f"{question} ({index})", *answers) for index in range(4) for question, *answers in CHATS]
CHATS[5] = (f"{'Which word is missing? ' * 4}(1)", "I do not know.", "Yes.")


def write_pairs(file: Path) -> Path:
    """Write pairs of answers, in each of the layouts in use in turn."""
    rows: list[dict[str, Any]] = []
    for number, (question, *answers) in enumerate(CHATS):
        prompt = [{"role": "user", "content": question}]
        chosen, rejected = ([{"role": "assistant", "content": answer}] for answer in answers)
        rows.append(
            [
                {"prompt": question, "chosen": answers[0], "rejected": answers[1]},
                {"prompt": prompt, "chosen": chosen, "rejected": rejected},
                {"chosen": prompt + chosen, "rejected": prompt + rejected},
                {"prompt": question, "chosen": prompt + chosen, "rejected": prompt + rejected, "score": 1.5},
            ][number % 4]
        )
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def dpo_job(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a job of whole pairs, several of which are in each sample."""
    reference = folder / "reference"
    if not reference.exists():
        write_model(reference, 3, **BYTES)
    pairs = {"kind": "preferences", "path": str(write_pairs(folder / "pairs.jsonl")), "template": "chatml"}
    table = {"reference": str(reference), "beta": 0.4, "label_smoothing": 0.1}
    job = job_of(folder, {"name": "dpo", "dpo": table}, **{"data": pairs, "model": {"args": BYTES}, **sections})
    job["data"] = {**pairs, **sections.get("data", {})}
    job["training"] |= {"seq_len": SEQ_LEN}
    return job


def token_log_probs(model: nn.Module, question: str, answer: str) -> Tensor:
    """Return the log-probabilities of an answer's tokens and the token that ends it, without packing and masks."""
    before = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    tokens = torch.tensor(list(f"{before}{answer}<|im_end|>".encode()))
    log_probs = model(tokens[None, :-1])[0].log_softmax(-1)
    start = len(before.encode()) - 1
    return log_probs[torch.arange(start, len(tokens) - 1), tokens[start + 1 :]]


def rewards_by_definition(model: nn.Module, reference: nn.Module, chat: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Return beta times the log-ratios of both answers, as in equation 7 of arXiv:2305.18290."""
    question, *answers = chat
    with torch.no_grad():
        of_reference = [token_log_probs(reference, question, answer).sum() for answer in answers]
    chosen, rejected = (
        0.4 * (token_log_probs(model, question, answer).sum() - base)
        for answer, base in zip(answers, of_reference, strict=True)
    )
    return chosen, rejected


def chats_in(sample: tuple[Tensor, ...]) -> list[tuple[str, ...]]:
    """Return the pairs of a sample, found by the text of their questions."""
    text = bytes(sample[0].tolist()).decode()
    return [chat for chat in CHATS if f"user\n{chat[0]}<" in text]


@sampled("divisions", ("immediate", "deferred", "deferred_all_reduce"), 3)
def test_dpo_trains_as_a_plain_loop(divisions: tuple[str, ...], tmp_path: Path) -> None:
    """The plain loop runs each answer alone, and follows the paper's formula."""
    pytest.importorskip("jinja2")
    job = dpo_job(tmp_path)
    job["validation"] = {"freq": STEPS, "data": job["data"], "local_batch_size": 2}
    reference = plain_model(3, SEQ_LEN, **BYTES).eval()
    counts, margins = [], []

    def mean_loss_of(model: nn.Module, samples: list[tuple[Tensor, ...]]) -> Tensor:
        chats = [chat for sample in samples for chat in chats_in(sample)]
        rewards = [rewards_by_definition(model, reference, chat) for chat in chats]
        deltas = torch.stack([chosen - rejected for chosen, rejected in rewards])
        counts.append([len(chats_in(sample)) for sample in samples])
        margins.append(deltas.mean().item())
        return (-0.9 * deltas.sigmoid().log() - 0.1 * (-deltas).sigmoid().log()).mean()

    expected, losses = train_plainly(job, BYTES, mean_loss_of)
    assert len({count for step in counts for count in step}) > 1, "samples must have different numbers of pairs"
    metrics = check_divisions(job, tmp_path, expected, losses, list(divisions))
    assert [row["preference/reward_margin"] for row in metrics] == pytest.approx(margins, rel=1e-4)
    for row in metrics:
        assert row["preference/reward_chosen"] - row["preference/reward_rejected"] == pytest.approx(
            row["preference/reward_margin"], rel=1e-4
        )
        assert 0 <= row["preference/accuracy"] <= 1

    model = plain_model(SEED, SEQ_LEN, **BYTES)
    model.load_state_dict(expected, strict=False)
    rewards = [rewards_by_definition(model, reference, chat) for chat in CHATS]
    deltas = torch.stack([chosen - rejected for chosen, rejected in rewards]).detach()
    assert metrics[-1]["validation/loss"] == pytest.approx(-F.logsigmoid(deltas).mean().item(), rel=1e-4)
    assert metrics[-1]["validation/accuracy"] == pytest.approx((deltas > 0).float().mean().item())


RATED = [(question, answer, not index) for question, *both in CHATS for index, answer in enumerate(both)][:-5]
"""Answers with labels, more of which are desirable."""


def kto_job(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a job of answers with labels, several of which are in each sample."""
    rows = [
        {"prompt": question, "completion": answer, "label": label}
        if number % 2
        else {"messages": [{"role": "user", "content": question}, assistant(answer)], "label": label}
        for number, (question, answer, label) in enumerate(RATED)
    ]
    (folder / "rated.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {"kind": "unpaired_preferences", "path": str(folder / "rated.jsonl"), "template": "chatml"}
    if not (folder / "reference").exists():
        write_model(folder / "reference", 5, **BYTES)  # with this seed, the baselines are above 0
    job = dpo_job(folder, **sections)
    table = {"reference": job["loss"]["dpo"]["reference"], "beta": 0.3, "undesirable_weight": 1.5}
    return {**job, "data": data, "loss": {"name": "kto", "kto": table}}


def assistant(answer: str) -> dict[str, str]:
    return {"role": "assistant", "content": answer}


def rated_in(sample: tuple[Tensor, ...]) -> list[tuple[str, str, bool]]:
    """Return the answers of a sample in their order, found by their texts."""
    text = bytes(sample[0].tolist()).decode()
    places = {text.find(f"user\n{row[0]}<|im_end|>\n<|im_start|>assistant\n{row[1]}<"): row for row in RATED}
    return [row for place, row in sorted(places.items()) if place >= 0]


def test_kto_trains_as_a_plain_loop(tmp_path: Path) -> None:
    """The plain loop runs each answer alone, and follows the paper's formulas."""
    pytest.importorskip("jinja2")
    job = kto_job(tmp_path)
    job["validation"] = {"freq": STEPS, "data": job["data"], "local_batch_size": 2}
    reference = plain_model(5, SEQ_LEN, **BYTES).eval()
    counts, baselines, signed = [], [], []

    def log_ratio(model: nn.Module, question: str, answer: str) -> Tensor:
        base = token_log_probs(reference, question, answer).sum().detach()
        return token_log_probs(model, question, answer).sum() - base

    def loss_of(model: nn.Module, row: tuple[str, str, bool], baseline: float) -> Tensor:
        question, answer, label = row
        reward = 0.3 * log_ratio(model, question, answer)
        return (1 - (reward - baseline).sigmoid()) if label else 1.5 * (1 - (baseline - reward).sigmoid())

    def mean_loss_of(model: nn.Module, samples: list[tuple[Tensor, ...]]) -> Tensor:
        rows = [rated_in(sample) for sample in samples]
        counts.append([len(own) for own in rows])
        with torch.no_grad():
            other = [
                0.3 * log_ratio(model, row[0], own[index - 1][1])
                for own in rows
                if len(own) > 1
                for index, row in enumerate(own)
            ]
            baselines.append(max(0.0, torch.stack(other).mean().item()))
            flat = [row for own in rows for row in own]
            rewards = [(1 if row[2] else -1) * 0.3 * log_ratio(model, *row[:2]).item() for row in flat]
            signed.append(sum(rewards) / len(rewards))
        return torch.stack([loss_of(model, row, baselines[-1]) for row in flat]).mean()

    expected, losses = train_plainly(job, BYTES, mean_loss_of)
    assert len({count for step in counts for count in step}) > 1, "samples must have different numbers of answers"
    assert max(baselines) > 0
    metrics = check_divisions(job, tmp_path, expected, losses, ["deferred_all_reduce"])
    assert [row["preference/baseline"] for row in metrics] == pytest.approx(baselines, rel=1e-4)
    assert [row["preference/signed_reward"] for row in metrics] == pytest.approx(signed, rel=1e-4)

    model = plain_model(SEED, SEQ_LEN, **BYTES)
    model.load_state_dict(expected, strict=False)
    held_out = torch.stack([loss_of(model, row, 0.0) for row in RATED]).mean().item()
    assert metrics[-1]["validation/loss"] == pytest.approx(held_out, rel=1e-4)


def test_mismatched_chats_have_every_prompt_and_every_answer_once() -> None:
    """Three chats, a document without a label, and padding. Prompts are below 20, and answers from 20 on."""
    chats = [([1, 2, 3], [20, 21]), ([4], [22, 23, 24]), ([5, 6], [25])]
    inputs, targets, documents = [], [], []
    for number, (prompt, answer) in enumerate([*chats, ([7, 8], [])]):
        tokens = prompt + answer
        inputs += tokens
        targets += [-100] * (len(prompt) - 1) + answer + [number % 2 if answer else -100]
        documents += [number] * len(tokens)
    batch = torch.tensor([[*inputs, 0, 0]]), torch.tensor([[*targets, -100, -100]]), torch.tensor([[*documents, 4, 4]])
    answers = answers_in(batch[1], batch[2])
    assert answers.exist[0, :5].tolist() == [True, True, True, False, False]
    assert answers.labels[0, :3].tolist() == [0, 1, 0]
    found = mismatched(batch[0], answers)
    assert found.inputs.tolist() == [[1, 2, 3, 25, 4, 20, 21, 5, 6, 22, 23, 24, 7, 8, 0, 0]]
    assert found.documents.tolist() == [[0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 4, 4]]
    ignored = -100
    assert found.targets.tolist() == [
        [*[ignored] * 2, 25, ignored, 20, 21, ignored, ignored, 22, 23, 24, *[ignored] * 5],
    ]


def test_samples_with_one_chat_or_none_keep_their_tokens() -> None:
    """A chat, padding alone, and a document without an answer between two chats."""
    inputs = torch.tensor([[1, 2, 20, 21, 0, 0, 0], [0] * 7, [1, 20, 2, 3, 4, 22, 23]])
    no = -100
    targets = torch.tensor([[no, 20, 21, 1, no, no, no], [no] * 7, [20, 1, no, no, 22, 23, 0]])
    documents = torch.tensor([[0] * 4 + [1] * 3, [0] * 7, [0, 0, 1, 1, 2, 2, 2]], dtype=torch.int32)
    answers = answers_in(targets, documents)
    assert answers.exist.sum(1).tolist() == [1, 0, 2]
    found = mismatched(inputs, answers)
    assert found.inputs.tolist() == [inputs[0].tolist(), [0] * 7, [1, 22, 23, 2, 3, 4, 20]]
    assert found.targets.tolist() == [[no, 20, 21, no, no, no, no], [no] * 7, [22, 23, no, no, no, 20, no]]
    assert found.documents.tolist() == [documents[0].tolist(), [0] * 7, [0, 0, 0, 1, 1, 2, 2]]


@pytest.mark.slow
def test_kto_with_the_base_of_adapters_is_kto_with_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    folder = write_model(tmp_path / "reference", 3, **BYTES)
    lora = {"targets": ["layers.*.attention.w*", "layers.*.feed_forward.*"], "rank": 4, "dropout": 0.0}
    job = kto_job(tmp_path, model={"args": BYTES, "weights": str(folder)}, lora=lora)
    expected = run_ranks(run_job, 1, job)[0]
    of_folder = read_metrics(tmp_path)
    base = {**job, "loss": {"name": "kto", "kto": {**job["loss"]["kto"], "reference": "base"}}}
    for name, state in run_ranks(run_named, 2, {"base": divided(base, "immediate")})[0].items():
        assert relative_error(state, expected) < 1e-5, name
    for row, own in zip(of_folder, read_metrics(tmp_path, "base"), strict=True):
        assert [own[tag] for tag in ("train/loss", "preference/baseline")] == pytest.approx(
            [row[tag] for tag in ("train/loss", "preference/baseline")], rel=1e-4, abs=1e-6
        )


def test_a_base_whose_statistics_change_is_no_reference() -> None:
    key, model = ("loss", "kto", "reference"), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(ConfigError, match=r'changes running statistics of 1; set batchnorm.of_frozen = "fixed", or'):
        Base(model, key)
    Base(model.eval(), key)  # as with batchnorm.of_frozen = "fixed"
    with pytest.raises(ConfigError, match=r"running statistics of 0; name a folder"):
        Base(nn.Sequential(nn.BatchNorm1d(2, affine=False)), key)


def test_documents_without_labels_are_refused_by_kto(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    job = kto_job(tmp_path)
    source = {"kind": "chat", "path": str(tmp_path / "rated.jsonl"), "template": "chatml"}
    problem = first_problem(JobConfig.model_validate({**job, "data": source}))
    assert problem is not None and problem.key == ("data", "kind")
    assert problem.reason.startswith('has no answers with a label, which loss.name = "kto" needs; set kind = ')
    config = JobConfig.model_validate(job)
    corpus = UnpairedPreferenceCorpus(config.data, build_tokenizer(config.tokenizer), ("data",), SEQ_LEN)  # type: ignore[arg-type]
    prepare(corpus, tmp_path / "tokens")
    tokens = {"kind": "tokens", "path": str(tmp_path / "tokens"), "packing": "documents"}
    reason = (
        'has answers with a label, which loss.name = "cross_entropy" does not read; name token files without them, '
        "or set another loss.name"
    )
    run_ranks(fail_with, 1, {**job, "loss": {}, "data": tokens}, ("data", "path"), reason)
    (tmp_path / "text.txt").write_text("some text " * 400)
    text = TextData(kind="text", path=str(tmp_path / "text.txt"))
    prepare(TextCorpus(text, build_tokenizer(config.tokenizer), ("data",), SEQ_LEN), tmp_path / "plain")
    plain = {"kind": "tokens", "path": str(tmp_path / "plain")}
    reason = 'has no answers with a label, which loss.name = "kto" needs; name token files prepared with kind = '
    reason += '"unpaired_preferences"'
    run_ranks(fail_with, 1, {**job, "data": plain}, ("data", "path"), reason)
    targets, documents = torch.tensor([[-100, 65, 7]]), torch.zeros(1, 3, dtype=torch.int32)
    model = nn.Linear(1, 1)
    loss = KTOLoss(lambda *_: None, lambda function: function, KTOConfig(reference="base"), model, Base(model, ()))
    with pytest.raises(ConfigError, match=r"but a document has another last target; set data.kind = "):
        loss.counts(targets, documents)


def ipo_by_definition(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Equation 17 of arXiv:2310.12036, of mean log-ratios."""
    return (chosen - rejected - 1 / (2 * 0.4)) ** 2


def simpo_by_definition(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Equation 6 of arXiv:2405.14734."""
    return -(1.5 * chosen - 1.5 * rejected - 0.3).sigmoid().log()


def orpo_by_definition(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Equations 4 to 7 of arXiv:2403.07691."""
    odds_chosen, odds_rejected = (log_prob.exp() / (1 - log_prob.exp()) for log_prob in (chosen, rejected))
    return -chosen - 0.7 * (odds_chosen / odds_rejected).log().sigmoid().log()


PAIR_LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float, dict[str, float]]] = {
    "ipo": (ipo_by_definition, 0.4, {"beta": 0.4}),
    "simpo": (simpo_by_definition, 1.5, {"beta": 1.5, "gamma": 0.3}),
    "orpo": (orpo_by_definition, 0.7, {"weight": 0.7}),
}
"""Losses of the mean log-probabilities of both answers: the definition, the factor of rewards, and the settings."""


def pairs_by_definition(
    name: str, reference: nn.Module | None, margins: list[float]
) -> Callable[[nn.Module, list[tuple[Tensor, ...]]], Tensor]:
    """Return a function that computes the mean loss of the pairs in samples, one answer at a time, and adds the mean
    margin to `margins`."""
    loss_of_pair, factor, _ = PAIR_LOSSES[name]

    def mean_loss_of(model: nn.Module, samples: list[tuple[Tensor, ...]]) -> Tensor:
        losses, differences = [], []
        for question, *answers in (chat for sample in samples for chat in chats_in(sample)):
            means = [token_log_probs(model, question, answer).mean() for answer in answers]
            if reference is not None:
                bases = [token_log_probs(reference, question, answer).mean().detach() for answer in answers]
                means = [own - base for own, base in zip(means, bases, strict=True)]
            losses.append(loss_of_pair(*means))
            differences.append(factor * (means[0] - means[1]).item())
        margins.append(sum(differences) / len(differences))
        return torch.stack(losses).mean()

    return mean_loss_of


def test_other_losses_of_pairs_train_as_a_plain_loop(tmp_path: Path) -> None:
    """In microbatches on 2 ranks. `ipo` has a reference model."""
    pytest.importorskip("jinja2")
    reference = plain_model(3, SEQ_LEN, **BYTES).eval()
    jobs, expected = {}, {}
    for name, (_, _, settings) in PAIR_LOSSES.items():
        job, margins = dpo_job(tmp_path), list[float]()
        folder = {"reference": job["loss"]["dpo"]["reference"]} if name == "ipo" else {}
        job["loss"] = {"name": name, name: {**settings, **folder}}
        job["validation"] = {"freq": STEPS, "data": job["data"], "local_batch_size": 2}
        loss = pairs_by_definition(name, reference if folder else None, margins)
        expected[name] = (*train_plainly(job, BYTES, loss), margins)
        jobs[name] = divided(job, "deferred")
    for name, state in run_ranks(run_named, 2, jobs)[0].items():
        parameters, losses, margins = expected[name]
        assert relative_error(state, parameters) < 1e-5, name
        rows = read_metrics(tmp_path, name)
        assert [row["train/loss"] for row in rows] == pytest.approx(losses, rel=1e-5), name
        assert [row["preference/reward_margin"] for row in rows] == pytest.approx(margins, rel=1e-4), name
        assert math.isfinite(rows[-1]["validation/loss"]) and 0 <= rows[-1]["validation/accuracy"] <= 1


def test_a_certain_answer_has_a_finite_loss() -> None:
    """The odds of an answer with the probability 1 are infinite."""
    log_probs = torch.tensor([[0.0, -0.5], [-0.5, 0.0], [0.0, 0.0]], requires_grad=True)
    losses = orpo(log_probs, ORPOConfig()).losses
    losses.sum().backward()
    assert losses.isfinite().all() and log_probs.grad is not None and log_probs.grad.isfinite().all()


def test_dpo_from_the_reference_begins_without_margins_and_resumes_exactly(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    reference = write_model(tmp_path / "reference", 3, **BYTES)
    rules = {"param_dtype": "bfloat16", "rules": [{"type": "RMSNorm", "param_dtype": "float32"}]}
    sections = {"model": {"args": BYTES, "weights": str(reference)}, "precision": rules}
    whole, parts = (
        dpo_job(tmp_path, **sections, checkpoint={"enable": True, "interval": 1, "async_mode": "disabled"})
        for _ in range(2)
    )
    parts["job"] = {**parts["job"], "name": "parts"}
    ((expected, resumed),) = run_ranks(run_whole_and_in_parts, 1, whole, parts)
    for name, tensor in expected.items():
        assert torch.equal(tensor, resumed[name]), name
    first = read_metrics(tmp_path)[0]
    assert first["preference/reward_margin"] == 0.0 and first["preference/accuracy"] == 0.0
    assert read_metrics(tmp_path, "parts")[-1]["train/loss"] == read_metrics(tmp_path)[-1]["train/loss"]
    shutil.rmtree(reference)
    parts["training"] |= {"steps": STEPS + 1}
    run_ranks(fail_with, 1, parts, ("loss", "dpo", "reference"), "there is no such folder")
    write_model(reference, 4, **BYTES)
    del parts["model"]["weights"]
    run_ranks(fail_with, 1, parts, ("loss", "dpo", "reference"), "the folder has changed since ")


def run_whole_and_in_parts(whole: dict[str, Any], parts: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    expected = run_job(whole)
    run_job_until(parts, 1)
    return expected, run_job(parts)


def test_the_base_of_adapters_is_the_reference(tmp_path: Path) -> None:
    """The reference is the model in the folder that training starts from, so both ways give the same run."""
    pytest.importorskip("jinja2")
    folder = write_model(tmp_path / "reference", 3, **BYTES)
    lora = {"targets": ["layers.*.attention.w*", "layers.*.feed_forward.*"], "rank": 4, "dropout": 0.0}
    sections = {"model": {"args": BYTES, "weights": str(folder)}, "lora": lora}
    job = dpo_job(tmp_path, **sections)
    expected = run_ranks(run_job, 1, job)[0]
    of_folder = read_metrics(tmp_path)
    base = {**job, "loss": {"name": "dpo", "dpo": {**job["loss"]["dpo"], "reference": "base"}}}
    for name, state in run_ranks(run_named, 2, {"base": divided(base, "immediate")})[0].items():
        assert relative_error(state, expected) < 1e-5, name
        for row, own in zip(of_folder, read_metrics(tmp_path, name), strict=True):
            tags = ("train/loss", "preference/reward_chosen", "preference/reward_rejected")
            assert [own[tag] for tag in tags] == pytest.approx([row[tag] for tag in tags], rel=1e-4, abs=1e-6)
    assert of_folder[0]["preference/reward_margin"] == 0.0 != of_folder[-1]["preference/reward_margin"]


def traced(job: dict[str, Any], ranks: int) -> TracedStep:
    """Trace a step of a job on a rank."""
    config = JobConfig.model_validate(job)
    layout = plan_layout(config.parallelism, config.training, ranks)
    built = build_job_model(config)
    return trace_step(config, built, plan_precision(config, built), layout, "cpu")


@pytest.mark.parametrize("loss", rest_is_slow(["dpo", "distillation", "base", "kto"], 4))
def test_measured_memory_and_traffic_are_those_of_the_trace(tmp_path: Path, loss: str) -> None:
    sections: dict[str, Any] = {
        "comm": {"count_traffic": True},
        "precision": {"param_dtype": "bfloat16", "rules": [{"type": "RMSNorm", "param_dtype": "float32"}]},
        "gradient_accumulation": {"mode": "deferred"},
    }
    if loss == "distillation":
        folder = write_model(tmp_path / "teacher", 3, **{**TINY_ARGS, "dim": 64, "n_layers": 4})
        table = {"name": loss, loss: {"teacher": str(folder)}}
        job = job_of(tmp_path, table, **sections)
    else:
        pytest.importorskip("jinja2")
        adapters = {"lora": {"targets": ["layers.*.attention.w*"], "rank": 4}} if loss == "base" else {}
        job = dpo_job(tmp_path, **sections, **adapters)
        job["loss"]["dpo"] |= {"reference": "base"} if loss == "base" else {}
        job = kto_job(tmp_path, **sections) if loss == "kto" else job
    job["training"] |= {"local_batch_size": 1, "global_batch_size": 4, "steps": 3}  # step 3 is measured
    step = traced(job, 2)
    last = run_measured(job, 2, 0.02, planned=step.footprint.peak_bytes / GIB)[-1]
    assert last[MEASURED] * GIB == pytest.approx(step.footprint.peak_bytes, rel=0.02)
    assert last["comm/collectives"] == step.traffic.collectives.total
    assert last["comm/all_gather_gib"] * GIB == step.traffic.all_gather_bytes
    assert last["comm/reduce_scatter_gib"] * GIB == step.traffic.reduce_scatter_bytes


@sampled("names", ("focal", "distillation", "dpo", "kto"), 4)
def test_losses_under_tensor_parallelism_and_in_a_pipeline(names: tuple[str, ...], tmp_path: Path) -> None:
    """Logits are gathered for the losses. A pipeline runs functions of the user alone."""
    pytest.importorskip("jinja2")
    args = {**TINY_ARGS, "vocab_size": 64}
    data = {"kind": "synthetic", "vocab_size": 64, "num_samples": 40}
    teacher = {"teacher": str(write_model(tmp_path / "teacher", 5, **args))}
    focal = job_of(tmp_path, {"name": f"{__name__}:focal_loss"}, model={"args": args}, data=data)
    distillation = {**focal, "loss": {"name": "distillation", "distillation": teacher}}
    dpo = dpo_job(tmp_path, model={"args": {**BYTES, "vocab_size": 258}})
    dpo["loss"]["dpo"]["reference"] = str(write_model(tmp_path / "other", 3, **{**BYTES, "vocab_size": 258}))
    jobs = {"focal": focal, "distillation": distillation, "dpo": dpo}
    jobs["kto"] = kto_job(tmp_path, model={"args": {**BYTES, "vocab_size": 258}})
    jobs["kto"]["loss"]["kto"]["reference"] = dpo["loss"]["dpo"]["reference"]
    jobs = {name: jobs[name] for name in names}
    expected = run_ranks(run_named, 1, jobs)[0]
    losses = {name: [row["train/loss"] for row in read_metrics(tmp_path, name)] for name in jobs}
    by_tensor = {"parallelism": {"tensor_parallel_degree": 2, "loss_parallel": False}}
    staged = {"parallelism": {"pipeline_parallel_degree": 2}, "training": {**focal["training"], "local_batch_size": 1}}
    in_parts = {name: {**job, **by_tensor} for name, job in jobs.items()} | {"pipeline": {**focal, **staged}}
    first, second = run_ranks(run_named, 2, in_parts)
    for name in jobs:
        assert relative_error(first[name], expected[name]) < 1e-5, name
        assert [row["train/loss"] for row in read_metrics(tmp_path, name)] == pytest.approx(losses[name], rel=1e-5)
    whole = {**first["pipeline"], **second["pipeline"]}
    assert relative_error(whole, expected["focal"]) < 1e-5
    assert [row["train/loss"] for row in read_metrics(tmp_path, "pipeline")] == pytest.approx(losses["focal"], rel=1e-5)


def test_the_functions_of_the_docs_train(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/how_to/losses.md").read_text()
    (code,) = re.findall(r"^```python\n# my_losses.py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "my_losses.py").write_text(code)
    jobs = {name: job_of(tmp_path, {"name": f"my_losses:{name}"}) for name in ("focal", "hardest_token")}
    run_ranks(run_in_folder, 1, tmp_path, jobs)
    for name in jobs:
        first, *_, last = read_metrics(tmp_path, name)
        assert last["train/loss"] < first["train/loss"], name


def run_in_folder(folder: Path, jobs: dict[str, dict[str, Any]]) -> None:
    os.chdir(folder)
    run_named(jobs)


@pytest.mark.parametrize(
    ("sections", "tags"),
    [
        ({}, ("train/loss", "validation/loss", "validation/ema_loss")),
        ({"loss": {"label_smoothing": 0.1}}, ("validation/loss", "validation/ema_loss")),
        ({"loss": {"name": "distillation"}}, ("validation/loss", "validation/ema_loss")),
        ({"loss": {"name": "simpo"}}, ()),
        ({"model": {"args": {"num_labels": 3}}}, ()),
        ({"model": {"name": "resnet"}, "data": {"kind": "images"}}, ()),
    ],
)
def test_only_the_cross_entropy_of_next_tokens_has_a_perplexity(
    sections: dict[str, Any], tags: tuple[str, ...]
) -> None:
    assert losses_of_next_tokens(JobConfig.model_validate(sections)) == tags
