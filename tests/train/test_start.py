"""Imports before the first step: only modules that the run needs by then."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.train.jobs import tiny_job

LATER = (
    "torch.distributed.checkpoint",  # the first checkpoint
    "torch.utils.tensorboard",  # the first report
    "tensorboard",
)
NOT_AT_ALL = (
    "torch.distributed.elastic",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.experimental",
    "titan_launch.trace",
    "titan_launch.launch.torchrun",
    "torchvision",
    "matplotlib",
)

FIRST_STEP = """
import json, sys
from contextlib import ExitStack
from titan_launch.config.job import JobConfig
from titan_launch.core.patches import without_garbage_collection

with without_garbage_collection():
    from titan_launch.distributed.process_group import process_group
    from titan_launch.train.build import build_run
    from titan_launch.train.loop import train_one_step
    import titan_launch.train.main

with ExitStack() as stack:
    ranks = stack.enter_context(process_group("cpu", 60))
    run = build_run(JobConfig.model_validate(json.loads(sys.argv[1])), ranks, stack)
    train_one_step(run)
    print(json.dumps(sorted(sys.modules)))
"""


def test_unneeded_modules_are_not_imported_before_the_first_step(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, metrics={"enable_tensorboard": True}, checkpoint={"enable": True})
    command = [sys.executable, "-c", FIRST_STEP, json.dumps(job)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    modules = json.loads(output.splitlines()[-1])
    assert "torch.distributed.fsdp" in modules
    assert [name for name in modules if name.startswith((*LATER, *NOT_AT_ALL))] == []
