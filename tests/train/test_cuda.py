"""The main job on a GPU in one process, run by the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from titan_launch.core.phantom import is_phantom, unmarked
from titan_launch.data.loader import copied_ahead
from titan_launch.data.sources import Batch

REPO = Path(__file__).parents[2]
CUDA_TAGS = {"memory/max_active_gib", "memory/max_reserved_gib", "memory/alloc_retries", "memory/ooms"}


def read_reports(folder: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [unmarked(line) for line in lines]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("mode", ["immediate", "deferred"])
def test_the_main_job_trains_on_cuda(tmp_path: Path, mode: str) -> None:
    overrides = ["--training.steps=12", "--validation.freq=6", "--metrics.log_freq=4", "--lr_scheduler.warmup_steps=2"]
    config = REPO / "configs" / "llama_bn.toml"
    command = [sys.executable, "-m", "titan_launch", "--config", str(config), f"--job.dump_folder={tmp_path}"]
    command += [*overrides, f"--gradient_accumulation.mode={mode}", "--checkpoint.enable"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPO, timeout=200)
    assert result.returncode == 0, result.stderr
    reports = read_reports(tmp_path / "llama_bn")
    assert is_phantom() or reports[-1]["train/loss"] < reports[0]["train/loss"] - 1
    assert reports[-1].keys() >= CUDA_TAGS
    assert (tmp_path / "llama_bn" / "checkpoints" / "step-12" / ".metadata").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("mode", ["immediate", "deferred"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_predicted_memory_equals_measured_memory(
    tmp_path: Path, checkpointing: str, mode: str, microbatches: int
) -> None:
    """The model has two blocks of the 8B model. Measured memory is slightly larger, because kernels use workspaces. The
    job is planned first: six steps of a GPU may end before the recording in the background."""
    overrides = ["--model.flavor=8B", "--model.args.n_layers=2", "--training.steps=6", "--training.seq_len=4096"]
    overrides += ["--checkpoint.enable=false", "--checkpoint.save_last=false", "--metrics.log_freq=2"]
    overrides += [f"--training.global_batch_size={microbatches}"]
    overrides += [f"--gradient_accumulation.mode={mode}", f"--activation_checkpoint.mode={checkpointing}"]
    overrides += ["--lr_scheduler.warmup_steps=1", "--validation.freq=0", f"--job.dump_folder={tmp_path}"]
    command, job = [sys.executable, "-m", "titan_launch"], ["--config", "configs/llama3_8b.toml", *overrides]
    for part in (["plan", "--rows=own"], []):
        result = subprocess.run([*command, *part, *job], capture_output=True, text=True, cwd=REPO, timeout=230)
        assert result.returncode == 0, result.stderr
    reports = read_reports(tmp_path / "llama3_8b")
    predicted, measured = (reports[-1][f"memory/{name}_active_gib"] for name in ("predicted", "max"))
    assert 0.98 * predicted < measured < 1.1 * predicted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_batches_that_are_copied_ahead_arrive_unchanged() -> None:
    device = torch.device("cuda")
    host = [Batch(torch.full((64, 1 << 16), i).pin_memory(), torch.tensor([i]).pin_memory()) for i in range(8)]
    sums = []
    for batch in copied_ahead(host, device):
        torch.cuda._sleep(1_000_000)  # the copy of the next batch overtakes the computation
        sums.append(batch.inputs.sum() + batch.targets.sum())
    assert [int(total) for total in sums] == [i * ((64 << 16) + 1) for i in range(8)]
