"""The PyTorchJob's command: it sets what the train script reads, and its overrides pass the check."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from titan_launch.cli import main

REPO = Path(__file__).parent.parent


def test_the_job_says_what_the_train_script_understands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPO)
    manifest = Path("scripts/kubernetes_pytorchjob.yaml").read_text()
    command = re.search(r">-\n(.*?)\n +env:", manifest, flags=re.DOTALL)
    assert command is not None
    assignments, _, overrides = command[1].partition("exec scripts/run_train.sh")
    variables = dict(word.split("=", 1) for word in shlex.split(assignments))
    read = Path("scripts/run_train.sh").read_text()
    assert all(f"${{{name}:-" in read for name in (*variables, "NPROC"))
    arguments = ["check", "--config", variables["CONFIG"], *shlex.split(overrides), "--world-size", "32"]
    assert main(arguments) == 0, capsys.readouterr().err
