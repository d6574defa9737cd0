"""Names and texts from files reach the terminal only with escapes, and no part of them looks like a message."""

from __future__ import annotations

import io
import json
import logging
import os
import struct
import subprocess
import sys
import tarfile
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.hostile.runner import Ended, Runner
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import dump_job, load_job
from titan_launch.core.errors import UserError, did_you_mean, format_key, listed
from titan_launch.core.process import announce_once
from titan_launch.core.terminal import escape_warnings, say_data
from titan_launch.plan.report.table import aligned
from titan_launch.train.run_folder.logs import LogFile, console_log

EVIL = "a\nerror: fake\x1b[2K\x1b]0;title\x07\r\x9b31m\u202eb"
"""A name with a line of its own, and with what a terminal obeys."""

ESCAPED = "a\\nerror: fake\\x1b[2K\\x1b]0;title\\x07\\r\\x9b31m\\u202eb"
REST = ESCAPED.partition("\\n")[2]


def assert_says_nothing_false(ended: Ended) -> None:
    """Assert that a command has printed no control character, and that no line is from EVIL alone."""
    ended.assert_harmless()
    assert "\nerror: fake" not in ended.text, ended.text


def safetensors(path: Path, names: list[str]) -> None:
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4 * len(names)))


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with files of several kinds whose names and contents are EVIL."""
    found = tmp_path_factory.mktemp("files")
    weights = found / "weights"
    weights.mkdir()
    (weights / "config.json").write_text(json.dumps({**LLAMA, EVIL: 1}))
    safetensors(weights / "model.safetensors", [EVIL])
    (found / "weights.toml").write_text('[model]\nweights = "weights"\n')
    (found / "class.json").write_text(json.dumps({"model": {"name": EVIL}}))
    (found / "flavor.json").write_text(json.dumps({"model": {"flavor": EVIL}}))
    (found / "factory.json").write_text(json.dumps({"model": {"name": f"os:{EVIL}"}}))
    (found / "key.json").write_text(json.dumps({EVIL: {EVIL: EVIL}, "training": {EVIL: {EVIL: 1}}}))
    (found / "extends.json").write_text(json.dumps({"extends": EVIL + ".toml"}))
    (found / "rule.json").write_text(json.dumps({"precision": {"rules": [{"match": EVIL}]}}))
    (found / "source.json").write_text(json.dumps({"data": {"kind": "text", "path": [EVIL, EVIL + "*"]}}))
    (found / "torchtitan.json").write_text(
        json.dumps({"job": {"description": EVIL, EVIL: EVIL}, "model": {"name": EVIL}})
    )
    with tarfile.open(found / "images.tar", "w") as archive:
        member = tarfile.TarInfo(f"{EVIL}.png")
        member.size = 3
        archive.addfile(member, io.BytesIO(b"png"))
        archive.addfile(tarfile.TarInfo(f"{EVIL}.cls"), io.BytesIO())
    for split in ("classes", "others"):
        (found / split / EVIL).mkdir(parents=True)
        (found / split / EVIL / f"{EVIL}.png").write_bytes(b"png")
    (found / "classes" / "more").mkdir()
    (found / "text.txt").write_text(EVIL * 20)
    (found / EVIL).mkdir()
    (found / EVIL / "config.json").write_text("{")
    for name in ("run", f"run{EVIL}"):
        run = found / "runs" / name
        run.mkdir(parents=True)
        job = json.loads(dump_job(JobConfig()))
        job["model"]["flavor"] = EVIL
        (run / "config.json").write_text(json.dumps(job))
        records = [{"step": step, "loss": 1.0, EVIL + name: 2.0, "train/loss": 1.0} for step in (1, 2)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return found


IMAGES = ["--config=resnet_bn", "--data.kind=images"]
COMMANDS: dict[str, list[str]] = {
    **{
        f"check {name}": ["check", f"--config={name}"]
        for name in ("class.json", "flavor.json", "factory.json", "key.json")
    },
    **{f"check {name}": ["check", f"--config={name}"] for name in ("extends.json", "rule.json", "source.json")},
    "check tensors": ["check", "--config=weights.toml"],
    "plan tensors": ["plan", "--config=weights.toml"],
    "plan rule": ["plan", "--config=rule.json"],
    "train tensors": ["train", "--config=weights.toml"],
    "check file": ["check", f"--config={EVIL}.toml"],
    "check option": ["check", "--config=llama_debug", f"--{EVIL}=1"],
    "check override": ["check", "--config=llama_debug", f"--training.{EVIL}=1"],
    "check value": ["check", "--config=llama_debug", f"--training.steps={EVIL}"],
    "unknown command": [EVIL],
    "import": ["import", "weights", "--out", "out"],
    "import folder": ["import", EVIL, "--out", "out"],
    "export": ["export", EVIL, "--out", "out"],
    "generate": ["generate", EVIL, "--prompt", "a"],
    "generate tensors": ["generate", "weights", "--prompt", "a"],
    "migrate": ["migrate", "torchtitan.json", "--out", "new.toml"],
    "init model": ["init", "sft", "--out", "job1.toml", "--model", EVIL],
    "init data": ["init", "sft", "--out", "job2.toml", "--data", EVIL],
    "init name": ["init", EVIL],
    "init file": ["init", "sft", "--out", f"{EVIL}.toml", "--device=h100-80gb"],
    "runs": ["runs", "runs"],
    "runs of a damaged run": ["runs", "."],
    "report": ["report", f"runs/run{EVIL}"],
    "compare": ["compare", "runs/run", f"runs/run{EVIL}"],
    "launch": ["launch", "--config=llama_debug", f"--nnodes={EVIL}"],
    "data tar": ["data", *IMAGES, "--data.path=images.tar"],
    "data classes": ["data", *IMAGES, "--data.path=classes"],
    "check classes": [
        *["check", *IMAGES, "--data.path=classes", "--validation.freq=1"],
        *["--validation.data.kind=images", "--validation.data.path=others"],
    ],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_names_with_escapes(name: str, folder: Path, runner: Runner) -> None:
    assert_says_nothing_false(runner.run(COMMANDS[name], folder))


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "RANK", "MASTER_PORT"])
def test_variables_are_printed_with_escapes(variable: str, folder: Path, runner: Runner) -> None:
    environment: Mapping[str, str] = {"MASTER_ADDR": EVIL, variable: EVIL}
    ended = runner.run(["train", "--config=llama_debug"], folder, environment)
    ended.assert_one_sentence(f"environment variable {variable}")
    assert_says_nothing_false(ended)


def test_a_preview_of_text_shows_control_characters_as_escapes(folder: Path, runner: Runner) -> None:
    text = ["--data.kind=text", "--data.path=text.txt", "--training.seq_len=64"]
    ended = runner.run(["data", "--config=llama_debug", *text], folder)
    assert ended.status == 0, ended.text
    ended.assert_harmless()
    assert "\\x1b[2K\\x1b]0;title\\x07" in ended.stdout


def test_tables_and_lists_have_names_in_one_line() -> None:
    assert aligned([("a", EVIL), ("b", "c")]) == [f"a  {ESCAPED}", "b  c"]
    assert listed([EVIL, "b"]) == f"{ESCAPED}, b"
    assert did_you_mean("stepz", ["step\x1bz"]) == '; did you mean "step\\x1bz"?'


def test_a_key_in_a_message_is_toml(tmp_path: Path) -> None:
    import tomli

    key = format_key((EVIL, 'quote"', "\x7f", "plain"))
    assert key.isprintable() and key.isascii()
    assert tomli.loads(f"{key} = 1") == {EVIL: {'quote"': {"\x7f": {"plain": 1}}}}
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"training": {EVIL: EVIL}}))
    with pytest.raises(UserError) as caught:
        load_job(str(path))
    assert str(caught.value).isprintable()


def test_an_error_is_indented_and_a_traceback_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    announce_once(f"error: {EVIL}\nb", traceback="Traceback:\n  File\nValueError: \x1b")
    lines = capsys.readouterr().err.split("\n")
    assert lines[:3] == ["Traceback:", "  File", "ValueError: \\x1b"]
    assert lines[3:] == ["error: a", f"  {REST}", "  b", ""]


def test_logs_have_no_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, file = logging.getLogger("titan_launch"), LogFile()
    file.open(tmp_path / "rank_0.log")
    log.addHandler(file)
    try:
        with console_log(is_rank_0=True):
            log.warning("tensor %s", EVIL)
            try:
                raise ValueError(EVIL)
            except ValueError:
                log.exception("failed")
    finally:
        log.removeHandler(file)
        file.close()
    for text in (capsys.readouterr().out, (tmp_path / "rank_0.log").read_text()):
        assert not [character for character in text if not character.isprintable() and character != "\n"]
        assert "tensor a\n  error: fake\\x1b[2K" in text
        assert "\nTraceback (most recent call last):\n  File " in text


def test_warnings_have_no_control_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    escape_warnings()
    text = warnings.formatwarning(EVIL, UserWarning, "file.py", 1, "line")
    assert text == f"file.py:1: UserWarning: a\n  {REST}\n  line\n"


class _Stream(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, "a\n\t\\x1b[2K"), (False, "a\n\t\x1b[2K")])
def test_generated_text_is_verbatim_except_on_a_terminal(
    is_terminal: bool, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = _Stream(is_terminal)
    monkeypatch.setattr(sys, "stdout", stream)
    say_data("a\n\t\x1b[2K", end="")
    assert stream.getvalue() == shown


def test_a_closed_pipe_says_nothing(folder: Path) -> None:
    """`titan-launch init --list | true` ends with its status alone."""
    command = f"{sys.executable} -m titan_launch init --list; echo $? >&2"
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(["bash", "-c", command], stdout=writing, stderr=subprocess.PIPE, text=True, cwd=folder)
    os.close(writing)
    assert ended.stderr in ("0\n", "1\n")
