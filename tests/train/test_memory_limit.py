"""A host with little memory: the microbatch that `auto` chooses, and the report of a run that is out of memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

LIMIT_KIB = 1_280_000
"""Memory besides that of the imported libraries, which differs between builds of PyTorch: 0.2 to 0.8 GiB. A microbatch
of 2 samples needs less than 1.1 GiB, and each further sample 0.4 GiB, most of it for logits."""

JOB = """
[job]
name = "limited"
dump_folder = "."
device = "cpu"

[model.args]
dim = 64
n_layers = 1
n_heads = 4
n_kv_heads = 4
hidden_dim = 64
vocab_size = 32768

[data]
kind = "synthetic"
vocab_size = 257
num_samples = 12

[training]
seq_len = 1024
local_batch_size = "auto"
global_batch_size = 6
steps = 1

[precision]
param_dtype = "float32"

[checkpoint]
save_last = false

[metrics]
enable_tensorboard = false
"""


def environment() -> dict[str, str]:
    """Return the environment of a limited process. With this threshold, freed memory is returned to the system at once,
    so that the limit is exact. Threads need memory of their own."""
    path = os.pathsep.join(sys.path)
    return {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


@cache
def memory_of_libraries() -> int:
    """Return the data segment of a process that has imported the launcher, in KiB: the memory that `ulimit -d`
    limits."""
    code = "import titan_launch.train.main; print(open('/proc/self/status').read())"
    status = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    (kib,) = re.findall(r"^VmData:\s+(\d+) kB$", status.stdout, re.MULTILINE)
    return int(kib)


def launch(folder: Path, *overrides: str) -> tuple[int, str]:
    """Train the job with a limit of memory. Return the exit status and the output."""
    (folder / "job.toml").write_text(JOB)
    limit = LIMIT_KIB + memory_of_libraries()
    command = f"ulimit -d {limit}; exec {sys.executable} -m titan_launch launch --nproc-per-node 1 --config job.toml"
    overrides = ("--checkpoint.load=none", *overrides)
    done = subprocess.run(
        ["bash", "-c", f'{command} "$@"', "bash", *overrides],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_auto_trains_where_one_sample_more_does_not_and_the_first_advice_helps(tmp_path: Path) -> None:
    status, output = launch(tmp_path)
    assert status == 0, output
    assert "auto: microbatches of 2 samples; a trial of three steps fitted into memory" in output
    status, output = launch(tmp_path, "--training.local_batch_size=3")
    assert status == 1
    assert output.count("out of memory") == 1
    assert re.search(
        r"out of memory on rank 0 in step 1: an allocation of 0.\d+ GiB failed in (forward|backward)", output
    )
    assert re.search(r"planned peak: 1.\d+ GiB \(loss in microbatch \d\): backward .* GiB, activations .* GiB", output)
    advice = re.findall(r"^  (\S+) = (\S+)  # saves .*; cost: .*$", output, re.MULTILINE)
    assert advice[0] == ("loss.chunks", "16") and ("training.global_batch_size", "6") in advice
    status, output = launch(tmp_path, "--training.local_batch_size=3", f"--{'='.join(advice[0])}")
    assert status == 0, output
