"""Planned memory is what PyTorch's allocator takes on a phantom GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.loss.test_losses import write_model
from tests.phantom_gpu.conftest import Phantom

TEACHER = ("--loss.name=distillation", "--loss.distillation.teacher={teacher}")
JOBS = {
    "120 MiB, 2 ranks": ("configs/llama_debug.toml", 2, ()),
    "120 MiB, 2 ranks, average of the weights": ("configs/llama_debug.toml", 2, ("--ema.decay=0.9",)),
    "120 MiB, 2 ranks, teacher": ("configs/llama_debug.toml", 2, TEACHER),
    "8B, 8 ranks": ("configs/llama3_8b.toml", 8, ()),
    "8B, 8 ranks, z-loss": ("configs/llama3_8b.toml", 8, ("--loss.z_loss=1e-4",)),
    "70B, 64 ranks": ("configs/llama3_70b.toml", 64, ()),
    "experts, 64 ranks": ("configs/qwen3_30b_a3b.toml", 64, ()),
}


OTHERS = [name for name in JOBS if name != "120 MiB, 2 ranks, teacher"]


@pytest.mark.phantom
@pytest.mark.parametrize(
    "name", ["120 MiB, 2 ranks, teacher", *(pytest.param(job, marks=pytest.mark.slow) for job in OTHERS)]
)
def test_planned_memory_is_measured_memory(phantom: Phantom, tmp_path: Path, name: str) -> None:
    config, ranks, options = JOBS[name]
    if options is TEACHER:
        teacher = write_model(tmp_path / "teacher", 3, n_layers=6)
        options = tuple(option.format(teacher=teacher) for option in options)
    command = ["-m", "titan_launch", "plan", "--config", config, f"--world-size={ranks}", "--rows=own", *options]
    ended = phantom.run(*command, "--device=h100-80gb", "--measure", "--json")
    assert ended.returncode == 0, ended.stderr
    plan = json.loads(ended.stdout)
    planned, trial = plan["rows"][0]["active_bytes"], plan["trial"]
    assert abs(trial["requested"] - planned) < 0.003 * planned
    pools = 2**26  # the allocator takes at least 20 MiB at a time, for each size of blocks and each stream
    estimated = plan["rows"][0]["reserved_bytes_estimated"] - plan["assumptions"]["overhead_gib"] * 2**30
    assert trial["requested"] <= trial["active"] < trial["reserved"] < estimated + pools


LATENT = """
[model]
name = "deepseek_v3"

[training]
seq_len = 1024
local_batch_size = 4
global_batch_size = 8
"""


@pytest.mark.phantom
@pytest.mark.parametrize(
    ("device", "section"),
    [
        ("a100-80gb", ""),  # flash attention needs padded values
        pytest.param("h100-80gb", "", marks=pytest.mark.slow),  # cuDNN takes values that are narrower than queries
        pytest.param("h100-80gb", 'kernels = {attention = "flash"}', marks=pytest.mark.slow),
        pytest.param("a100-80gb", 'kernels = {attention = "efficient"}', marks=pytest.mark.slow),
        pytest.param("a100-80gb", 'precision = {param_dtype = "float32"}', marks=pytest.mark.slow),
        pytest.param("h100-80gb", 'activation_checkpoint = {mode = "full"}', marks=pytest.mark.slow),
        pytest.param("h100-80gb", 'activation_checkpoint = {mode = "selective"}', marks=pytest.mark.slow),
    ],
)
def test_values_of_latent_attention_are_planned_as_padded_where_they_are(
    phantom: Phantom, tmp_path: Path, device: str, section: str
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(section + LATENT)
    command = ["-m", "titan_launch", "plan", f"--config={job}", "--world-size=2", "--rows=own", "--json", "--measure"]
    ended = phantom.run(*command, f"--device={device}")
    assert ended.returncode == 0, ended.stderr
    plan = json.loads(ended.stdout)
    planned = plan["rows"][0]["active_bytes"]
    assert abs(plan["trial"]["requested"] - planned) < 0.003 * planned


@pytest.mark.phantom
def test_a_job_that_does_not_fit_runs_out_of_memory(phantom: Phantom) -> None:
    command = ["-m", "titan_launch", "plan", "--config", "configs/llama3_8b.toml", "--world-size=8", "--measure"]
    ended = phantom.run(*command, "--device=h100-80gb", "--memory-gib=30")
    assert ended.returncode == 1 and "out of memory" in ended.stderr and "Traceback" not in ended.stderr, ended.stderr
    ended = phantom.run("-m", "titan_launch", "plan", "--config", "configs/llama_debug.toml", "--measure")
    assert ended.returncode == 2 and ended.stderr.startswith("error: --measure needs --device, one of a100-40gb")
    both = phantom.run("-m", "titan_launch", "plan", "--config", "configs/llama_debug.toml", "--measure", "--trial=0")
    assert both.returncode == 2 and "--measure and --trial" in both.stderr
    absent = phantom.run("-m", "titan_launch", "plan", "--config", "configs/llama_debug.toml", "--trial=1")
    assert absent.returncode == 2 and absent.stderr.startswith("error: --trial 1: must be a rank below"), absent.stderr
