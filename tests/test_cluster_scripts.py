"""The batch script for Slurm, with stand-ins for Slurm's commands, and the manifest for Kubernetes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from titan_launch.cli import main
from titan_launch.launch.options import plan_processes

REPO = Path(__file__).parent.parent

SRUN = """#!/usr/bin/env bash
trap 'exit "$STATUS_AFTER_SIGNAL"' USR1
echo "srun $*"
[[ -z "$STATUS" ]] || exit "$STATUS"
while true; do sleep 0.05; done
"""
SCONTROL = """#!/usr/bin/env bash
if [[ "$1" == show ]]; then printf 'node7\\nnode8\\n'; else echo "scontrol $*"; fi
"""


def submit(folder: Path, status: str = "", after_signal: str = "0", nodes: str = "1") -> tuple[int, list[str]]:
    """Run the batch script, and signal it once srun runs, unless srun ends by itself with `status`."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        path = folder / name
        path.write_text(text)
        path.chmod(0o755)
    slurm = {"SLURM_SUBMIT_DIR": str(REPO), "SLURM_JOB_ID": "4711", "SLURM_NNODES": nodes, "SLURM_JOB_NODELIST": "n"}
    environment = {
        **os.environ,
        **slurm,
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "STATUS": status,
        "STATUS_AFTER_SIGNAL": after_signal,
        "CONFIG": "job.toml",
    }
    command = ["bash", str(REPO / "scripts" / "slurm.sbatch"), "--training.steps=20"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        lines = [script.stdout.readline()]
        if not status:
            script.send_signal(signal.SIGUSR1)
        lines += script.stdout.readlines()
    return script.returncode, [line.rstrip() for line in lines]


def test_a_run_that_saved_at_its_time_limit_is_requeued(tmp_path: Path) -> None:
    status, lines = submit(tmp_path, nodes="2")
    assert status == 0 and lines[-1] == "scontrol requeue 4711"
    assert "-m titan_launch launch --config job.toml" in lines[0]
    assert lines[0].endswith(" --checkpoint.enable=true --training.steps=20")
    assert "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint node7:24711 --rdzv-id 4711.0" in lines[0]


@pytest.mark.parametrize(("status", "after_signal", "ends_with"), [("0", "", 0), ("2", "", 2), ("", "138", 138)])
def test_a_finished_or_failed_run_is_not_requeued(
    status: str, after_signal: str, ends_with: int, tmp_path: Path
) -> None:
    ended, lines = submit(tmp_path, status, after_signal)
    assert ended == ends_with and len(lines) == 1 and "--nnodes" not in lines[0]


def test_the_batch_script_uses_options_that_launch_has(tmp_path: Path) -> None:
    words = submit(tmp_path, status="0", nodes="2")[1][0].split()
    options = words[words.index("job.toml") + 1 : words.index("--checkpoint.enable=true")]
    processes = plan_processes(
        {name.removeprefix("--"): value for name, value in zip(*[iter(options)] * 2, strict=True)}
    )
    assert (processes.nodes, processes.shutdown_timeout_s) == ("2", 270)


def test_the_pytorchjob_sets_what_the_train_script_reads_and_its_overrides_pass_the_check(
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
