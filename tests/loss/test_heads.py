"""Reward models and classifiers train as a plain loop in one process, on every division into ranks and microbatches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.loss.test_losses import (
    BYTES,
    CHATS,
    SEED,
    SEQ_LEN,
    STEPS,
    chats_in,
    check_divisions,
    fail_with,
    job_of,
    plain_model,
    run_named,
    train_plainly,
    write_pairs,
)
from tests.packages import needs
from tests.train.jobs import read_metrics, run_job
from titan_launch.cli import main
from titan_launch.config.sections.data import ClassificationData
from titan_launch.core.errors import ConfigError
from titan_launch.data.sources import build_source
from titan_launch.data.tokenizers import ByteTokenizer

LABELS = ("bad", "good", "so so")
TEXTS = [
    (f"{word} {index} times", LABELS.index(label))
    for index in range(6)
    for word, label in (("Awful", "bad"), ("Wonderful, a pleasure to use", "good"), ("Usable", "so so"))
]


def classification_job(folder: Path) -> dict[str, Any]:
    """Return a job of texts with labels, several of which are in each sample."""
    lines = [{"text": t, "label": label if index % 2 else LABELS[label]} for index, (t, label) in enumerate(TEXTS)]
    (folder / "texts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    data = {"kind": "classification", "path": str(folder / "texts.jsonl"), "labels": list(LABELS)}
    job = job_of(folder, {}, model={"args": {**BYTES, "num_labels": 3}}, data=data)
    job["data"] = data
    job["training"]["seq_len"] = 60
    job["validation"] = {"freq": STEPS, "data": data, "local_batch_size": 2}
    return job


def tokens_of(text: str) -> Tensor:
    return torch.tensor(list(text.encode()))


def texts_in(sample: tuple[Tensor, ...]) -> list[tuple[str, int]]:
    """Return the texts of a sample with their labels, by the numbers of their documents."""
    inputs, targets, documents = sample
    found = [(bytes(inputs[documents == index].tolist()).decode(), targets[documents == index]) for index in range(20)]
    return [(text, int(of[of != -100])) for text, of in found if (of != -100).any()]


def reward_job(folder: Path) -> dict[str, Any]:
    """Return a job of pairs of answers for a reward model."""
    path = str(write_pairs(folder / "pairs.jsonl"))
    data = {"kind": "preferences", "path": path, "template": "chatml", "train_on": "end"}
    job = job_of(folder, {"name": "reward"}, model={"args": {**BYTES, "num_labels": 1}}, data=data)
    job["data"] = data
    job["training"]["seq_len"] = SEQ_LEN
    job["validation"] = {"freq": STEPS, "data": data, "local_batch_size": 2}
    return job


def reward(model: nn.Module, question: str, answer: str) -> Tensor:
    """Return the output after the last token of a chat."""
    chat = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
    return model(tokens_of(chat)[None])[0, -1, 0]


@pytest.mark.filterwarnings("ignore")
def test_a_classifier_trains_as_a_plain_loop(tmp_path: Path) -> None:
    job, seen = classification_job(tmp_path), set[tuple[str, int]]()

    def mean_loss_of(model: nn.Module, samples: list[tuple[Tensor, ...]]) -> Tensor:
        texts = [text for sample in samples for text in texts_in(sample)]
        seen.update(texts)
        logits = torch.stack([model(tokens_of(text)[None])[0, -1] for text, _ in texts])
        return F.cross_entropy(logits, torch.tensor([label for _, label in texts]))

    expected, losses = train_plainly(job, {**BYTES, "num_labels": 3}, mean_loss_of)
    assert len(seen) > 8 and seen <= set(TEXTS)
    last = check_divisions(job, tmp_path, expected, losses, ["deferred"])[-1]
    model = plain_model(SEED, 60, **BYTES, num_labels=3)
    model.load_state_dict(expected, strict=False)
    with torch.no_grad():
        logits = torch.stack([model(tokens_of(text)[None])[0, -1] for text, _ in TEXTS])
    labels = torch.tensor([label for _, label in TEXTS])
    assert last["validation/loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-4)
    assert last["validation/accuracy"] == pytest.approx((logits.argmax(-1) == labels).float().mean().item())


class Scorer(nn.Module):
    """A model of the user, which returns `outputs` numbers for each token."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(257, 8), nn.Linear(8, outputs)

    def forward(self, inputs: Tensor, documents: Tensor | None = None) -> Tensor:
        logits: Tensor = self.head(self.embedding(inputs))
        return logits


def test_a_model_of_the_user_is_a_reward_model_if_it_returns_one_number(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    for outputs in (1, 257):
        job = reward_job(tmp_path)
        job["model"] = {"name": f"{__name__}:Scorer", "args": {"outputs": outputs}}
        if outputs == 1:
            run_ranks(run_job, 1, job)
            assert all(row["train/loss"] > 0 for row in read_metrics(tmp_path))
        else:
            run_ranks(fail_with, 1, job, ("model", "name"), "returns 257 numbers for each token")


def test_a_reward_model_trains_as_a_plain_loop(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    job, margins = reward_job(tmp_path), list[float]()

    def mean_loss_of(model: nn.Module, samples: list[tuple[Tensor, ...]]) -> Tensor:
        chats = [chat for sample in samples for chat in chats_in(sample)]
        deltas = torch.stack([reward(model, q, good) - reward(model, q, bad) for q, good, bad in chats])
        margins.append(deltas.mean().item())
        return -deltas.sigmoid().log().mean()

    expected, losses = train_plainly(job, {**BYTES, "num_labels": 1}, mean_loss_of)
    rows = check_divisions(job, tmp_path, expected, losses, ["immediate"])
    assert [row["preference/reward_margin"] for row in rows] == pytest.approx(margins, rel=1e-4, abs=1e-6)
    model = plain_model(SEED, SEQ_LEN, **BYTES, num_labels=1)
    model.load_state_dict(expected, strict=False)
    deltas = torch.stack([reward(model, q, good) - reward(model, q, bad) for q, good, bad in CHATS]).detach()
    assert rows[-1]["validation/loss"] == pytest.approx(-F.logsigmoid(deltas).mean().item(), rel=1e-4)
    assert rows[-1]["validation/accuracy"] == pytest.approx((deltas > 0).float().mean().item())


BAD_LINES = (
    ({"text": "a"}, 'data.label: x.jsonl, line 2 is without the key "label" (its keys: text)'),
    ({"label": 1}, 'data.text: x.jsonl, line 2 is without the key "text" (its keys: label)'),
    (
        {"text": "a", "label": 3},
        "data.label: x.jsonl, line 2 is without a known label (it is 3; the labels are ",
    ),
    ({"text": "a", "label": "god"}, "line 2 is without a known label (it is 'god'; did you mean \"good\"?"),
    ({"text": "a", "label": True}, "line 2 is without a known label (it is True; "),
    ({"text": "", "label": 0}, "data.text: x.jsonl, line 2 is without a text"),
    ({"text": "a" * 61, "label": 0}, "data.truncation: x.jsonl, line 2 is longer than training.seq_len = 60 tokens"),
)


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_lines_without_text_or_label(tmp_path: Path, line: dict[str, Any], message: str) -> None:
    good = {"text": "Usable", "label": 2}
    (tmp_path / "x.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(line)}\n")
    data = ClassificationData(kind="classification", path=str(tmp_path), labels=LABELS, truncation="stop")
    with pytest.raises(ConfigError) as caught:
        build_source(data, ByteTokenizer(), 60)
    assert message in str(caught.value)
    skipping = data.model_copy(update={"on_error": "skip", "truncation": "skip"})
    assert build_source(skipping, ByteTokenizer(), 60).describe().startswith("1 file, 1 document, ")


def test_a_label_must_fit_the_vocabulary(tmp_path: Path) -> None:
    """The number of a label is stored as a token. The tokenizer `bytes` has 257 tokens."""
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "a", "label": 256}))
    data = {"kind": "classification", "path": str(tmp_path)}
    fitting = ClassificationData(**data, labels=[f"label {number}" for number in range(257)])
    assert build_source(fitting, ByteTokenizer(), 5)[0][1].tolist() == [256] + [-100] * 4
    with pytest.raises(ConfigError) as caught:
        build_source(ClassificationData(**data, labels=[*fitting.labels, "one more"]), ByteTokenizer(), 5)
    assert str(caught.value) == (
        "data.labels: has 258 labels, whose numbers are stored as tokens, but the tokenizer has 257 tokens; use a "
        "tokenizer with at least 258 tokens"
    )


@pytest.mark.parametrize(("truncation", "kept"), [("right", "abcde"), ("left", "fghij")])
def test_a_long_text_is_cut_but_keeps_its_label(tmp_path: Path, truncation: Any, kept: str) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "abcdefghij", "label": "good"}))
    data = ClassificationData(kind="classification", path=str(tmp_path), labels=LABELS, truncation=truncation)
    inputs, targets, _ = build_source(data, ByteTokenizer(), 5)[0]
    assert bytes(inputs.tolist()).decode() == kept and targets.tolist() == [-100] * 4 + [1]


def test_an_exported_classifier_is_that_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoModelForSequenceClassification

    job = classification_job(tmp_path)
    job["checkpoint"] = {"enable": True, "async_mode": "disabled"}
    state = run_ranks(run_named, 1, {"tiny": job})[0]["tiny"]
    assert main(["export", str(tmp_path / "tiny"), "--out", str(tmp_path / "exported")]) == 0
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported").eval()
    assert theirs.config.id2label == dict(enumerate(LABELS)) and theirs.config.label2id["so so"] == 2
    ours = plain_model(SEED, 60, **BYTES, num_labels=3)
    ours.load_state_dict(state, strict=False)
    tokens = tokens_of("Wonderful, a pleasure")[None]
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens)[:, -1], rtol=1e-4, atol=1e-5)
    assert main(["generate", str(tmp_path / "tiny"), "--prompt", "a"]) == 2
    assert main(["generate", str(tmp_path / "exported"), "--prompt", "a"]) == 2


pytestmark = needs("safetensors")
