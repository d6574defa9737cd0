"""The launcher's branches for CUDA run on phantom GPUs: each row is a job, which must end well."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.phantom_gpu.conftest import Phantom

DEBUG = "--config=configs/llama_debug.toml"
EXPERTS = "--config=configs/qwen3_moe_debug.toml"
SHORT = ("--training.steps=2", "--metrics.log_freq=1", "--lr_scheduler.warmup_steps=1")

BRANCHES: dict[str, tuple[int, tuple[str, ...]]] = {
    "BatchNorm": (2, ("--config=configs/llama_bn.toml",)),
    "experts, grouped products, expert parallelism": (2, (EXPERTS, "--parallelism.expert_parallel_degree=2")),
    "HSDP, deferred_all_reduce": (
        4,
        (DEBUG, "--parallelism.data_parallel_replicate_degree=2", "--gradient_accumulation.mode=deferred_all_reduce"),
    ),
    "compiled, selective checkpointing": (
        1,
        (DEBUG, "--compile.enable=true", "--activation_checkpoint.mode=selective"),
    ),
}
"""Ranks and options of the jobs that run by default."""

SLOW_BRANCHES: dict[str, tuple[int, tuple[str, ...]]] = {
    "ResNet": (2, ("--config=configs/resnet_bn.toml",)),
    "ViT": (2, ("--config=configs/vit_debug.toml",)),
    "synchronized BatchNorm": (2, ("--config=configs/batchnorm/synchronized.toml",)),
    "BatchNorm, checkpointing": (2, ("--config=configs/batchnorm/activation_checkpointing.toml",)),
    "experts": (2, (EXPERTS,)),
    "tensor parallelism": (2, (DEBUG, "--parallelism.tensor_parallel_degree=2")),
    "context parallelism": (2, (DEBUG, "--parallelism.context_parallel_degree=2")),
    "pipeline": (2, ("--config=configs/parallel/pipeline.toml",)),
    "sliding window, selective checkpointing": (
        1,
        (
            *(DEBUG, "--model.name=mistral", "--model.flavor=debug", "--model.args.sliding_window=64"),
            *("--training.seq_len=256", "--activation_checkpoint.mode=selective"),
        ),
    ),
    "offload of parameters": (2, ("--config=configs/parallel/offload.toml",)),
    "offload of activations": (
        2,
        (DEBUG, "--activation_checkpoint.mode=full", "--activation_checkpoint.offload=true"),
    ),
    "Muon": (2, ("--config=configs/optimizer/muon.toml",)),
    "stochastic rounding": (2, ("--config=configs/optimizer/bf16_stochastic.toml",)),
    "int8 state": (2, (DEBUG, "--optimizer.state_dtype=int8")),
    "immediate": (2, ("--config=configs/accumulation/immediate.toml",)),
    "deferred_zero2": (2, ("--config=configs/accumulation/deferred_zero2.toml",)),
    "EMA": (2, (DEBUG, "--ema.decay=0.9")),
    "LoRA": (2, (DEBUG, "--lora.rank=8", '--lora.targets=["all-linear"]')),
    "full checkpointing, loss in chunks, compiled": (
        2,
        (DEBUG, "--compile.enable=true", "--activation_checkpoint.mode=full", "--loss.chunks=4"),
    ),
    "checkpoints by a process": (2, (DEBUG, "--checkpoint.enable=true", "--checkpoint.async_mode=process")),
    "checkpoints by a thread": (2, (DEBUG, "--checkpoint.enable=true", "--checkpoint.async_mode=thread")),
    "profiling": (2, (DEBUG, "--profiling.start_step=2", "--profiling.memory=true")),
    "float8": (
        2,
        (
            "--config=configs/llama3_8b_float8.toml",
            *("--model.args.n_layers=1", "--training.seq_len=1024", "--training.local_batch_size=1"),
            *("--checkpoint.enable=false", "--checkpoint.save_last=false"),
        ),
    ),
}
"""The same for jobs that run with `-m slow`."""


@pytest.mark.phantom
@pytest.mark.parametrize("name", [*BRANCHES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_BRANCHES)])
def test_a_branch_for_cuda_runs(phantom: Phantom, tmp_path: Path, name: str) -> None:
    ranks, options = (BRANCHES | SLOW_BRANCHES)[name]
    lines = phantom.train(ranks, tmp_path, *options, *SHORT)
    assert any(line.startswith("phantom: done: 2 steps") for line in lines), lines
