"""Runs whose length is a number of epochs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import run_command, run_ranks
from tests.packages import skip_without
from tests.tensors import assert_equal
from tests.train.jobs import read_metrics, run_job, run_job_until, tiny_job
from titan_launch.cli import main
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import load_job
from titan_launch.core.errors import ConfigError
from titan_launch.core.files import CACHE_VARIABLE
from titan_launch.data.epochs import known_samples, steps_of
from titan_launch.data.prepare import prepare
from titan_launch.data.sources.tokens import CORPORA
from titan_launch.data.tokenizers import ByteTokenizer
from titan_launch.plan.layout import plan_layout
from titan_launch.report.recorded_run import load_run
from titan_launch.train.batches import build_data, with_steps

EPOCHS, STEPS = 0.35, 4
"""Epochs of the 40 samples of a tiny job, and steps of 4 samples."""


def job(folder: Path, name: str, epochs: float | None = EPOCHS, **training: Any) -> dict[str, Any]:
    """Return a job whose learning rate depends on its last step, which validates and saves there."""
    checkpoint = {"enable": True, "interval": 2}
    validation = {"freq": 3, "data": {"kind": "synthetic", "vocab_size": 61, "num_samples": 4, "seed": 1}}
    schedule = {"kind": "cosine", "warmup_steps": 2}
    config = tiny_job(
        folder,
        job={"name": name},
        model={"args": {"n_layers": 1}},
        checkpoint=checkpoint,
        validation=validation,
        lr_scheduler=schedule,
    )
    config["training"] |= training
    if epochs is not None:
        del config["training"]["steps"]
        config["training"]["epochs"] = epochs
    return config


def train_all(whole: list[dict[str, Any]], resumed: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Train jobs to their ends, and one with an interruption after step 3, which is not saved."""
    states = [run_job(config) for config in whole]
    run_job_until(resumed, 3)
    return [*states, run_job(resumed)]


def recorded(folder: Path, name: str) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((folder / name / "config.json").read_text())["training"]
    return table


MEASURED = ("train/loss", "train/lr", "validation/loss", "train/epoch")


def curves(folder: Path, name: str) -> list[dict[str, float]]:
    return [{tag: report[tag] for tag in MEASURED if tag in report} for report in read_metrics(folder, name)]


def test_epochs_train_as_their_steps_on_any_number_of_ranks_and_after_a_resume(tmp_path: Path) -> None:
    """Equal bit for bit: epochs and steps; resumed and uninterrupted. Equal up to rounding: one rank and two."""
    jobs = [job(tmp_path, "epochs"), job(tmp_path, "steps", None, steps=STEPS)]
    whole, *others = run_ranks(train_all, 2, jobs, job(tmp_path, "resumed"))[0]
    for other in others:
        assert_equal(whole, other)
    assert curves(tmp_path, "epochs") == curves(tmp_path, "steps") == curves(tmp_path, "resumed")
    assert "validation/loss" in curves(tmp_path, "epochs")[STEPS - 1] and len(curves(tmp_path, "epochs")) == STEPS
    for name, tensor in run_ranks(run_job, 1, job(tmp_path, "alone"))[0].items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-5, atol=1e-6)
    assert [recorded(tmp_path, name)["steps"] for name in ("epochs", "alone")] == [STEPS, STEPS]
    assert recorded(tmp_path, "epochs")["epochs"] == EPOCHS
    assert (load_run(tmp_path / "epochs").total_steps, load_run(tmp_path / "epochs").state) == (STEPS, "finished")
    again = load_job(str(tmp_path / "epochs/config.json")).config.training
    assert (again.epochs, again.steps) == (EPOCHS, None), "a run computes the steps anew"


@pytest.mark.slow
def test_a_resume_with_more_epochs_or_another_batch_ends_where_it_should(tmp_path: Path) -> None:
    run_ranks(run_job, 1, job(tmp_path, "tiny", 0.5))
    run_ranks(run_job, 2, job(tmp_path, "tiny", 0.7))
    assert [report["step"] for report in read_metrics(tmp_path)] == list(range(1, 8))
    assert (recorded(tmp_path, "tiny")["epochs"], recorded(tmp_path, "tiny")["steps"]) == (0.7, 7)
    larger = job(tmp_path, "tiny", 1.5, global_batch_size=8)  # 28 of the 60 samples are used
    larger["checkpoint"]["accept_changes"] = True
    run_ranks(run_job, 1, larger)
    assert (recorded(tmp_path, "tiny")["steps"], read_metrics(tmp_path)[-1]["train/epoch"]) == (11, 1.5)


@pytest.mark.parametrize(
    ("epochs", "num_samples", "batch", "consumed", "steps"),
    [(3, 1120, 16, 0, 210), (1.1, 10, 1, 0, 11), (0.1, 3, 1, 0, 1), (1, 10, 4, 8, 1), (1, 10, 4, 12, 0)],
)
def test_steps_are_rounded_up_exactly(epochs: float, num_samples: int, batch: int, consumed: int, steps: int) -> None:
    assert steps_of(epochs, num_samples, batch, consumed) == steps


def write_lines(path: str, *records: dict[str, Any]) -> None:
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))


CHATS = [{"prompt": f"Say {n}.", "response": "a" * n} for n in range(1, 40)]
PAIRS = [{"prompt": "Say it.", "chosen": "a" * n, "rejected": "no"} for n in range(1, 40)]
TEMPLATE = {"template": "chatml"}
SYNTHETIC = {"kind": "synthetic", "vocab_size": 61}
LENGTHS: dict[str, tuple[dict[str, Any], int | None]] = {
    "text": ({"kind": "jsonl", "path": "text.jsonl"}, None),
    "packed": ({"kind": "jsonl", "path": "text.jsonl", "packing": "documents"}, None),
    "chats": ({"kind": "chat", "path": "chats.jsonl", **TEMPLATE}, None),
    "pairs": ({"kind": "preferences", "path": "pairs.jsonl", **TEMPLATE}, None),
    "huggingface": ({"kind": "huggingface", "path": "set"}, None),
    "tokens": ({"kind": "tokens", "path": "tokens"}, None),
    "packed tokens": ({"kind": "tokens", "path": "tokens", "packing": "documents"}, None),
    "images": ({"kind": "images", "path": "images.npz", "split": "train", "validation_percent": 30}, None),
    "digits": ({"kind": "images", "split": "train", "validation_percent": 20}, None),
    "factory": ({"kind": "tests.data.sources.test_factory:Sequences", "args": {"number": 10}}, 10),
    "synthetic": ({**SYNTHETIC, "num_samples": 13}, 13),
    "mixture": ({"sources": [{**SYNTHETIC, "weight": 9}, {"kind": "jsonl", "path": "text.jsonl"}]}, None),
}
COUNTED = ("tokens", "packed tokens", "images", "digits", "synthetic")
"""The data whose samples `check` counts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data of every kind."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        texts = [{"text": "word " * n} for n in range(1, 60)]
        write_lines("text.jsonl", *texts)
        write_lines("chats.jsonl", *CHATS)
        write_lines("pairs.jsonl", *PAIRS)
        config = JobConfig.model_validate({"data": {"kind": "jsonl", "path": "text.jsonl"}}).data
        assert config.kind == "jsonl"
        prepare(CORPORA["jsonl"](config, ByteTokenizer(), ("data",), 64), Path("tokens"))  # type: ignore[arg-type]
        images = np.zeros((70, 3, 8, 8), np.uint8)
        np.savez_compressed("images.npz", images=images, labels=np.arange(70) % 10)
    return folder


@pytest.mark.parametrize("name", LENGTHS)
def test_all_data_with_a_length_has_epochs(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what `check` counts without opening the data is its length."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv(CACHE_VARIABLE, str(folder / "cache"))
    if name in ("chats", "pairs"):
        pytest.importorskip("jinja2")
    if name == "digits":
        skip_without("sklearn")
    if name == "huggingface" and not Path("set").exists():
        pytest.importorskip("datasets").Dataset.from_dict({"text": ["word " * 60] * 20}).save_to_disk("set")
    data, length = LENGTHS[name]
    table: dict[str, Any] = {"data": data, "training": {"seq_len": 400, "epochs": 2.5, "local_batch_size": 3}}
    table |= {"loss": {"name": "dpo", "dpo": {"reference": "m"}}} if name == "pairs" else {}
    if data.get("kind") == "images":
        args = {} if name == "digits" else {"in_channels": 3}
        table["model"] = {"name": "resnet", "flavor": "debug", "args": args}
    config = JobConfig.model_validate(table if name != "mixture" else {**table, "data": {"kind": "mixture", **data}})
    layout = plan_layout(config.parallelism, config.training, 2)
    opened = build_data(config, layout, None)
    assert len(opened.train) > 1 and (not length or len(opened.train) == length)
    resolved = with_steps(config, opened)
    assert resolved.training.steps == math.ceil(2.5 * len(opened.train) / 6)
    assert known_samples(config.data, 400) == (len(opened.train) if name in COUNTED else None)


JOB = """
[job]
name = "tiny"
dump_folder = "out"
device = "cpu"

[data]
kind = "synthetic"
num_samples = 40

[training]
seq_len = 16
global_batch_size = 4
local_batch_size = 2
{length}
"""


def written(folder: Path, length: str, more: str = "") -> Path:
    path = folder / "job.toml"
    path.write_text(JOB.format(length=length) + more)
    return path


@pytest.mark.parametrize(
    ("length", "overrides", "expected"),
    [
        ("", [], (100, None)),
        ("epochs = 3", [], (None, 3.0)),
        ("epochs = 3", ["--training.steps=5"], (5, None)),
        ("steps = 3", ["--training.epochs=0.5"], (None, 0.5)),
        ("epochs = 3", ["--training.epochs", "2"], (None, 2.0)),
    ],
)
def test_a_later_layer_replaces_steps_by_epochs(
    length: str, overrides: Sequence[str], expected: tuple[int | None, float | None], tmp_path: Path
) -> None:
    base = written(tmp_path, length)
    training = load_job(str(base), overrides).config.training
    assert (training.steps, training.epochs) == expected
    (tmp_path / "other.toml").write_text('extends = "job.toml"\n[training]\nepochs = 7\n')
    training = load_job(str(tmp_path / "other.toml")).config.training
    assert (training.steps, training.epochs) == (None, 7.0)


@pytest.mark.parametrize(
    ("length", "overrides", "message"),
    [
        ("epochs = 3\nsteps = 5", [], "job.toml:15: training.epochs = 3.0: sets the length of the run, and so does"),
        ("", ["--training.steps=5", "--training.epochs=3"], "command line: --training.epochs=3: training.epochs = 3.0"),
        ("epochs = 0", [], "job.toml:15: training.epochs = 0: must be more than 0"),
        ("num_train_epochs = 3", [], 'training.num_train_epochs = 3: unknown key; use "training.epochs"'),
        (
            "epochs = 3",
            ["--data.kind=huggingface", "--data.path=a/b", "--data.streaming=true", "--data.shuffle=false"],
            "training.epochs = 3.0: the data is a stream, whose length is unknown; set training.steps instead",
        ),
    ],
)
def test_bad_lengths_are_one_error(
    length: str, overrides: Sequence[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--config", str(written(tmp_path, length)), *overrides]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        run_job(config)
    return str(caught.value)


def test_what_the_steps_contradict_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    """The keys that a job with steps is refused for, once the number of steps is known."""
    config = job(tmp_path, "tiny")
    config["training"]["unfreeze"] = [{"match": "output.*", "after_step": STEPS}]
    config |= {"profiling": {"start_step": STEPS, "num_steps": 2}, "ema": {"decay": 0.9, "start_step": STEPS}}
    assert run_ranks(refusal, 1, config)[0].splitlines() == [
        "profiling.start_step: begins a profile of 2 steps, but the run ends after step 4 (training.epochs); set a "
        "smaller start_step or num_steps",
        "training.unfreeze.0.after_step: unfreezes the parameters only after the last step, 4 (training.epochs); set a "
        "smaller number, or remove this entry and set training.frozen or training.trainable",
        "ema.start_step: is so large that the average is never updated in the run of 4 steps (training.epochs); set a "
        "smaller number",
    ]
    config = job(tmp_path, "stream")
    config["data"] = {"kind": "tests.data.sources.test_factory:Stream", "shuffle": False, "args": {"number": 11}}
    config["model"]["args"]["vocab_size"] = 257
    stream = "training.epochs: the data is a stream, whose length is unknown; set training.steps instead"
    assert run_ranks(refusal, 1, config) == [stream]
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_commands_take_epochs_and_warn_of_many(tmp_path: Path) -> None:
    written(tmp_path, "epochs = 30")
    command = ["--config", "job.toml"]
    assert run_command(["check", *command], tmp_path)[2] == "", "30 epochs are what the job asks for"
    printed = run_command(["data", *command, "--samples=0", "--world-size=2"], tmp_path)[1]
    assert "300 steps of 4 samples (2 ranks): 1,200 samples of 16 tokens, 30 epochs" in printed
    assert "warning" not in printed
    assert "epochs:                    30\n" in run_command(["plan", *command], tmp_path)[1]
    warning = "training.steps = 300 is 30 epochs of the 40 training samples; set fewer steps, or set training.epochs"
    many = [*command, "--training.steps=300"]
    assert warning in run_command(["check", *many], tmp_path)[2]
    assert f"warning                 {warning}" in run_command(["data", *many, "--samples=0"], tmp_path)[1]
    assert run_command(["check", *command, "--training.steps=200"], tmp_path)[2] == ""
    source = "\n[[data.sources]]\nkind = 'synthetic'\nnum_samples = {}\nname = '{}'\nweight = {}\n"
    mixture = source.format(10, "few", 1) + source.format(1000, "many", 3)
    (tmp_path / "mixed.toml").write_text(JOB.format(length="steps = 300").partition("[data]")[0] + mixture)
    mixed = ["data", "--config=mixed.toml", "--training.seq_len=16", "--training.steps=300", "--samples=0", "--json"]
    (found,) = json.loads(run_command(mixed, tmp_path)[1])["warnings"]
    assert "epochs of the 10 training samples of the source few; set fewer steps, or a smaller weight" in found
