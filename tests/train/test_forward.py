"""A forward with a wrong signature or output ends a run with one sentence. An error in the user's code keeps its
traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.distributed import run_command
from tests.sampling import rest_is_slow
from titan_launch.core.errors import ConfigError
from titan_launch.data.sources import Batch
from titan_launch.loss.interface import Loss
from titan_launch.loss.outputs import logits_check
from titan_launch.train.forward import check_embeddings, check_signature, explain_forward, run_model

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn


class Output:
    def __init__(self, logits):
        self.logits = logits


class Model(nn.Module):
    def __init__(self, rows=257, classes=257, positions=16):
        super().__init__()
        self.embedding = nn.Embedding(rows, 8)
        self.positions = nn.Embedding(positions, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        self.output = nn.Linear(8, classes)

    def logits(self, tokens):
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = x + layer(x)
        return self.output(x)

    def loss(self, tokens, labels):
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), labels.flatten())

    def forward({signature}):
        {body}
"""

JOB = """
[job]
name = "tiny"
dump_folder = "."
device = "cpu"

[model]
name = "my_model:Model"
args = {{ {args} }}
{loss}

[data]
path = "text.txt"

[training]
seq_len = 16
local_batch_size = 2
steps = 1

[metrics]
enable_tensorboard = false

[validation]
freq = 1

[validation.data]
path = "held_out.txt"
"""

PLACE = "my_model.py:30"
"""Location of the body of the forward. The line before the body has the signature."""

IS_GIVEN = (
    "; forward(inputs) gets one tensor, token ids (batch, seq_len), and must return the logits, a tensor "
    "(batch, seq_len, classes); the launcher computes the loss, or, with model.loss = "
    '"mean" or "sum", forward(inputs, labels) returns it'
)
IS_GIVEN_LABELS = (
    "; with model.loss, forward(inputs, labels=targets) gets token ids (batch, seq_len) and must return its loss, a "
    'scalar: alone, first in a tuple, or as the attribute or entry "loss"'
)


def write(folder: Path, signature: str, body: str, args: str = "", loss: str = "") -> None:
    (folder / "my_model.py").write_text(MODEL.format(signature=signature, body=body))
    (folder / "job.toml").write_text(JOB.format(args=args, loss=loss and f'loss = "{loss}"'))
    for name in ("text.txt", "held_out.txt"):
        (folder / name).write_text(f"a short text of {name} " * 20)


def printed(folder: Path, *command: str) -> str:
    """Return the error of a command without its beginning, which names the key. Check that the error is one line."""
    status, _, reported = run_command([*command, "--config", "job.toml"], folder)
    start, line = "error: job.toml:8: model.name: the model's forward ", reported.splitlines()[-1]
    assert (status, line[: len(start)]) == (2, start), reported
    assert len(reported.splitlines()) <= 1 + (command[0] == "plan"), reported  # plan says that it records
    return line.removeprefix(start).replace(f"{folder}/", "")


def fails(error: str) -> str:
    return f"fails at {PLACE} ({error}){IS_GIVEN}"


WRONG = {
    "labels": (
        ("self, tokens, labels", "return self.loss(tokens, labels)"),
        f"at my_model.py:29 cannot be called with one argument (missing a required argument: 'labels'){IS_GIVEN}",
    ),
    "names": (
        ("self, *, input_ids, labels=None", "return self.logits(input_ids)"),
        f"at my_model.py:29 cannot be called with one argument (too many positional arguments){IS_GIVEN}",
    ),
    "a dict of inputs": (
        ("self, batch", 'return self.logits(batch["input_ids"])'),
        fails("IndexError: too many indices for tensor of dimension 2"),
    ),
    "an object": (
        ("self, batch", "return self.logits(batch.input_ids)"),
        fails("AttributeError: '{}' object has no attribute 'input_ids'"),
    ),
    "a mapping": (
        ("self, batch", "return self.loss(**batch)"),
        fails("TypeError: my_model.Model.loss() argument after ** must be a mapping, not {}"),
    ),
    "a tuple of inputs": (
        ("self, batch", "tokens, labels, mask = batch"),
        fails("ValueError: not enough values to unpack (expected 3, got 2)"),
    ),
    "any names": (
        ("self, *args, **kwargs", 'return self.logits(kwargs["input_ids"])'),
        fails("KeyError: 'input_ids'"),
    ),
    "optional labels": (
        ("self, tokens, labels=None", "return F.cross_entropy(self.logits(tokens).flatten(0, 1), labels)"),
        fails("TypeError: cross_entropy_loss(): argument 'target' (position 2) must be Tensor, not NoneType"),
    ),
    "a loss": (
        ("self, tokens", "return self.loss(tokens, tokens)"),
        f"returns a scalar, probably the loss, instead of logits{IS_GIVEN}",
    ),
    "a tuple": (
        ("self, tokens", "return None, self.logits(tokens)[:, 1:]"),
        f"returns a tuple without logits{IS_GIVEN}",
    ),
    "a dict": (
        ("self, tokens", 'return {"outputs": self.logits(tokens)}'),
        f'returns a dict without an entry "logits"{IS_GIVEN}',
    ),
    "no labels": (
        ("self, tokens", "return self.logits(tokens)", "", "mean"),
        f"at my_model.py:29 cannot be called with the arguments (inputs, labels=targets) (got an unexpected keyword "
        f"argument 'labels'){IS_GIVEN_LABELS}",
    ),
    "no loss": (
        ("self, tokens, labels", "return self.logits(tokens)", "", "sum"),
        f"returns a {{}} of the shape (2, 16, 257) instead of a loss{IS_GIVEN_LABELS}",
    ),
    "one axis": (
        ("self, tokens", "return self.logits(tokens).flatten(0, 1)"),
        f"returns a tensor of the shape (32, 257) for targets of the shape (2, 16){IS_GIVEN}",
    ),
    "few classes": (
        ("self, tokens", "return self.logits(tokens)", "classes = 256"),
        "returns logits of 256 classes, but the vocabulary of the data has 257 tokens; give the model's "
        "last layer 257 outputs",
    ),
    "few rows": (
        ("self, tokens", "return self.logits(tokens)", "rows = 256"),
        "looks up token ids in embedding (Embedding), which has 256 rows, but the vocabulary of the data has 257 "
        "tokens; give the Embedding 257 rows",
    ),
}


OTHER_CAUSES = ("a dict of inputs", "a tuple of inputs", "names", "any names", "one axis")
"""Cases whose checks others of the same kind walk too."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in OTHER_CAUSES)) for kind in WRONG]
)
def test_a_wrong_forward_is_reported_in_one_sentence(tmp_path: Path, kind: str) -> None:
    model, expected = WRONG[kind]
    write(tmp_path, *model)
    assert printed(tmp_path, "train") == expected.format("Tensor")
    if kind in ("labels", "an object", "few rows", "no loss"):  # a trace has tensors without values
        assert printed(tmp_path, "plan") == expected.format("FakeTensor")


def test_logits_with_fewer_classes_than_the_images_are_an_error() -> None:
    check = logits_check("images", num_classes=10)
    with pytest.raises(ConfigError) as caught:
        check((4, 9), torch.zeros(4, dtype=torch.int64))
    reason = (
        "returns logits of 9 classes, but the images of the data have 10 classes; give the model's last layer 10 "
        "outputs"
    )
    assert str(caught.value) == f"model.name: the model's forward {reason}"


def test_a_model_without_a_forward_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model's forward is missing: ModuleList defines none; forward"):
        check_signature(nn.ModuleList(), "tokens")


@pytest.mark.slow
def test_the_error_of_a_wrong_forward_is_printed_once_with_auto_and_on_several_ranks(tmp_path: Path) -> None:
    """tests/test_cli.py has an error of two ranks in the default suite."""
    model, expected = WRONG["few classes"]
    write(tmp_path, *model)
    command = [sys.executable, "-m", "titan_launch", "launch", "--nproc-per-node", "2", "--config", "job.toml"]
    command.append("--gradient_accumulation.mode=auto")
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (2, f"error: job.toml:8: model.name: the model's forward {expected}\n")


def test_an_index_outside_of_another_embedding_is_named_with_its_line(tmp_path: Path) -> None:
    write(tmp_path, "self, tokens", "return self.logits(tokens)", "positions = 8")
    assert printed(tmp_path, "train") == (
        "looks up the index 15 in positions (Embedding), which has 8 rows (at my_model.py:21); add rows, or lower "
        "training.seq_len if the indices are positions"
    )


def test_a_negative_index_into_an_embedding_is_named(tmp_path: Path) -> None:
    write(tmp_path, "self, tokens", "return self.logits(tokens) + self.positions(tokens[0] * 0 - 2).sum()")
    assert printed(tmp_path, "train") == (
        f"looks up the index -2 in positions (Embedding), which has 16 rows (at {PLACE}); indices count from 0"
    )


def test_validation_checks_the_forward_too(tmp_path: Path) -> None:
    body = "return self.logits(tokens) if self.training else self.loss(tokens, tokens)"
    write(tmp_path, "self, tokens", body)
    assert printed(tmp_path, "train").startswith("returns a scalar")


RIGHT = {
    "an object": ("self, tokens, labels=None, **kwargs", "return Output(self.logits(tokens))"),
    "a dict": ("self, tokens", 'return {"logits": self.logits(tokens)}'),
    "a loss": ("self, tokens, labels=None", "return self.loss(tokens, labels)", "", "mean"),
    "any arguments": ("self, *args, **kwargs", "return self.logits(*args, **kwargs)"),
    "a tuple": ("self, tokens", "return None, torch.zeros(2), self.logits(tokens), tokens"),
    "a mask": ("self, tokens, mask=None", "return self.logits(tokens) if mask is None else self.logits(tokens * mask)"),
}


@pytest.mark.parametrize("kind", rest_is_slow(list(RIGHT)))
def test_a_forward_that_can_be_called_trains(tmp_path: Path, kind: str) -> None:
    write(tmp_path, *RIGHT[kind])
    status, printed, reported = run_command(["train", "--config", "job.toml"], tmp_path)
    assert (status, reported) == (0, "") and "validation loss" in printed


def test_a_callable_object_is_accepted_as_forward() -> None:
    model = nn.Module()
    model.forward = lambda tokens: tokens  # type: ignore[assignment]
    check_signature(model, "tokens")


class Hashed(nn.Embedding):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens % self.num_embeddings)


def test_an_embedding_with_a_forward_of_its_own_may_have_fewer_rows() -> None:
    tokens = torch.arange(8)
    for model in (nn.Sequential(Hashed(4, 2)), nn.Sequential(nn.Embedding(8, 2))):
        check_embeddings(model, vocab_size=8)
        model(tokens)
    small = nn.Sequential(nn.Embedding(4, 2))
    check_embeddings(small, vocab_size=8)
    with pytest.raises(ConfigError, match="has 4 rows"):
        small(tokens)


OWN_BUGS = {
    "a cache": ("self, tokens, mask=None", "self.cache = None; return self.cache.update(tokens)"),
    "a key": ("self, tokens, **options", "return self.logits({}[tokens.shape])"),
    "a keyword": ("self, tokens, scale=None", "return self.logits(tokens).view(1, 2, scale=3)"),
}


@pytest.mark.parametrize("kind", rest_is_slow(list(OWN_BUGS)))
def test_a_bug_in_a_forward_with_optional_arguments_keeps_its_traceback(tmp_path: Path, kind: str) -> None:
    write(tmp_path, *OWN_BUGS[kind])
    status, _, reported = run_command(["train", "--config", "job.toml"], tmp_path)
    assert status == 1 and "Traceback" in reported and "my_model.py" in reported, reported


def test_an_error_in_the_users_code_shows_the_users_frames(tmp_path: Path) -> None:
    write(tmp_path, "self, tokens", "return self.logits(tokens) @ torch.ones(3, 3)")
    status, _, reported = run_command(["train", "--config", "job.toml"], tmp_path)
    assert status == 1
    lines = [line for line in reported.splitlines() if set(line) - set(" ~^")]
    assert lines[:3] == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path}/my_model.py", line 30, in forward',
        "    return self.logits(tokens) @ torch.ones(3, 3)",
    ]
    assert lines[3].startswith("RuntimeError: ") and "shapes cannot be multiplied (32x257 and 3x3)" in lines[3]
    assert lines[4:] == ["error: the run failed; see the traceback above"]


class Masked(nn.Module):
    """A module that holds a tensor as a plain attribute on another device."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(2, 2)
        self.masks = [torch.ones(2), torch.ones(2, device="meta")]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(x) * self.masks[1]


def test_a_plain_attribute_on_another_device_is_named() -> None:
    model, inputs = nn.Sequential(Masked()), torch.ones(2, 2)
    with pytest.raises(RuntimeError) as caught:
        run_model(model, Batch(inputs, inputs), Loss())
    explained = str(explain_forward(caught.value))
    assert "the model's forward fails at" in explained and explained.endswith(
        "; Masked (0) holds a tensor on meta in the plain attribute masks, and the launcher moves only parameters and "
        'buffers to cpu; register it in __init__: self.register_buffer("masks", ..., persistent=False)'
    )
