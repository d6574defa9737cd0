"""The launcher's branches for CUDA run on phantom GPUs: each row is a job, which must end well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.models.huggingface_folders import needs_transformers, write_config
from tests.models.parity import CASES
from tests.phantom_gpu.conftest import REPO, Phantom
from titan_launch.models.decoder.families import FAMILIES

DEBUG = "--config=configs/llama_debug.toml"
EXPERTS = "--config=configs/qwen3_moe_debug.toml"
SHORT = ("--training.steps=2", "--metrics.log_freq=1", "--lr_scheduler.warmup_steps=1")
COMPILED = ("--compile.enable=true", "--debug.audit_precision=false")  # an audited first step is not compiled
CHECKPOINTS = "--checkpoint.enable=true"
LORA = ("--lora.rank=8", '--lora.targets=["all-linear"]')
DOCUMENTS = ("--data.kind=jsonl", "--data.path={folder}/documents.jsonl", "--data.packing=documents")
FLOAT8 = (
    "--config=configs/llama3_8b_float8.toml",
    *("--model.args.n_layers=1", "--training.seq_len=1024", "--training.local_batch_size=1"),
    *("--checkpoint.enable=false", "--checkpoint.save_last=false"),
)
DPO = (
    *("--data.kind=preferences", "--data.path={folder}/pairs.jsonl", "--data.template=chatml"),
    *("--training.seq_len=512", "--loss.name=dpo"),
)


def of_family(name: str, num_layers: int = 2) -> tuple[str, ...]:
    """Return the options of a small model, on one rank with two microbatches. The last layer of Gemma 3 has no window,
    as that of Gemma 2 and of GPT-OSS with two layers."""
    every = (f"--model.args.full_attention_every={num_layers}",) if name == "gemma3" else ()
    small = (f"--model.args.n_layers={num_layers}", "--training.global_batch_size=8")
    return (DEBUG, f"--model.name={name}", *small, *every)


def of_schedule(name: str) -> tuple[str, ...]:
    """Return the options of a pipeline with four layers, at most two stages per rank and four microbatches."""
    small = ("--model.args.n_layers=4", "--training.global_batch_size=16")
    unsharded = ("--gradient_accumulation.keep_params_unsharded=true",) if "ZeroBubble" in name else ()
    return (
        *(DEBUG, *small, "--gradient_accumulation.mode=deferred", *unsharded),
        *("--parallelism.pipeline_parallel_degree=2", f"--parallelism.pipeline_parallel_schedule={name}"),
    )


BRANCHES: dict[str, tuple[int, tuple[str, ...]]] = {
    "experts, grouped products, expert parallelism": (2, (EXPERTS, "--parallelism.expert_parallel_degree=2")),
    "HSDP, deferred_all_reduce": (
        4,
        (DEBUG, "--parallelism.data_parallel_replicate_degree=2", "--gradient_accumulation.mode=deferred_all_reduce"),
    ),
}
"""Ranks and options of the jobs that run by default."""

SLOW_BRANCHES: dict[str, tuple[int, tuple[str, ...]]] = {
    "BatchNorm": (2, ("--config=configs/llama_bn.toml",)),
    "compiled, selective checkpointing": (
        1,
        (*of_family("llama3"), *COMPILED, "--activation_checkpoint.mode=selective"),
    ),
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
    "LoRA": (2, (DEBUG, *LORA)),
    "full checkpointing, loss in chunks, compiled": (
        2,
        (DEBUG, *COMPILED, "--activation_checkpoint.mode=full", "--loss.chunks=4"),
    ),
    "checkpoints by a process": (2, (DEBUG, CHECKPOINTS, "--checkpoint.async_mode=process")),
    "checkpoints by a thread": (2, (DEBUG, CHECKPOINTS, "--checkpoint.async_mode=thread")),
    "profiling": (2, (DEBUG, "--profiling.start_step=2", "--profiling.memory=true")),
    "float8": (2, FLOAT8),
    "float8 tensorwise, gathered in float8": (
        2,
        (*FLOAT8, "--float8.recipe=tensorwise", "--float8.all_gather=true"),
    ),
    **{f"family {name}": (1, of_family(name)) for name in FAMILIES},
    **{
        f"pipeline, {name}": (2, of_schedule(name))
        for name in ("1F1B", "GPipe", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble")
    },
    "documents, windows": (1, (*of_family("gemma3"), *DOCUMENTS)),
    "documents, sinks, checkpointing per op": (
        1,
        (*of_family("gpt_oss"), *DOCUMENTS, "--activation_checkpoint.mode=selective"),
    ),
    "documents, latent attention, compiled": (1, (*of_family("deepseek_v3"), *DOCUMENTS, *COMPILED)),
    "DPO, LoRA": (2, (DEBUG, *LORA, *DPO, "--loss.dpo.reference=base")),
    "HSDP 2x4": (8, (DEBUG, "--parallelism.data_parallel_replicate_degree=2")),
    "HSDP 2x2, sharded optimizer": (
        4,
        (
            *(DEBUG, "--parallelism.data_parallel_replicate_degree=2"),
            "--parallelism.shard_optimizer_over_replicas=true",
        ),
    ),
    "tensor parallelism 2, pipeline 2, FSDP 2": (8, (*of_schedule("1F1B"), "--parallelism.tensor_parallel_degree=2")),
    "tensor parallelism of windows, sinks and experts": (
        2,
        (*of_family("gpt_oss"), "--parallelism.tensor_parallel_degree=2"),
    ),
    "tensor parallelism of latent attention, whole sequences and logits": (
        2,
        (
            *(*of_family("deepseek_v3"), "--parallelism.tensor_parallel_degree=2"),
            *("--parallelism.sequence_parallel=false", "--parallelism.loss_parallel=false"),
        ),
    ),
    "context parallelism, alltoall, compiled": (
        2,
        (
            *(*of_family("llama3"), *COMPILED, "--parallelism.context_parallel_degree=2"),
            "--parallelism.context_parallel_rotate_method=alltoall",
        ),
    ),
    "accumulation and checkpointing by auto": (
        2,
        ("--config=configs/accumulation/auto.toml", "--activation_checkpoint.mode=auto"),
    ),
    "compiled model and loss, memory budget": (
        1,
        (
            *(*of_family("llama3"), *COMPILED, '--compile.components=["model", "loss"]'),
            *("--activation_checkpoint.mode=memory_budget", "--activation_checkpoint.memory_budget=0.3"),
        ),
    ),
    "deterministic, fp32, workers, traffic and profiles of communication": (
        2,
        (
            *(*of_family("llama3"), "--debug.deterministic=true", "--precision.param_dtype=float32"),
            *("--data.num_workers=1", "--comm.count_traffic=true", "--comm.profile_freq=2"),
        ),
    ),
    "own model": (2, ("--config=configs/custom_model.toml", "--training.global_batch_size=16")),
}
"""The same for jobs that run with `-m slow`."""


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    """Return a folder with documents of 100 tokens, and with pairs of answers."""
    texts = ["".join(chr(97 + (i * j + i) % 26) for j in range(100)) for i in range(200)]
    pairs = ({"prompt": text[:9], "chosen": text[:40], "rejected": text[40:60]} for text in texts)
    tables = {"documents": ({"text": text} for text in texts), "pairs": pairs}
    for name, rows in tables.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


@pytest.mark.phantom
@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_for_cuda_runs(phantom: Phantom, data_folder: Path, name: str) -> None:
    _run(phantom, data_folder, name)


@pytest.mark.phantom
@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("name", SLOW_BRANCHES)
def test_another_branch_for_cuda_runs(phantom: Phantom, data_folder: Path, name: str) -> None:
    _run(phantom, data_folder, name, timeout=900)


def _run(phantom: Phantom, folder: Path, name: str, timeout: float = 200) -> None:
    """Train two steps. A job with checkpoints is then resumed for a third step."""
    ranks, rows = (BRANCHES | SLOW_BRANCHES)[name]
    options = [option.format(folder=folder) for option in rows]
    output = phantom.train(ranks, folder, *options, *SHORT, timeout=timeout).stdout
    assert "phantom: done: 2 steps" in output, output
    if CHECKPOINTS in options:
        output = phantom.train(ranks, folder, *options, *SHORT, "--training.steps=3", timeout=timeout).stdout
        assert "phantom: resumed from" in output and "phantom: done: 3 steps" in output, output


def _write_config_of(folder: Path, model_type: str, keys: dict[str, Any]) -> str:
    """Write the `config.json` of a causal language model of `transformers`, and return the folder's path."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    config = AutoConfig.for_model(model_type, **keys)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.phantom
@pytest.mark.slow
@pytest.mark.timeout(2000)
@needs_transformers
@pytest.mark.parametrize(
    "name", ["Llama 2", "Gemma 2", "GPT-OSS", "Qwen 3, experts", "DeepSeek-V3", "GPT-2", "vit", "resnet"]
)
def test_a_class_of_transformers_trains(phantom: Phantom, tmp_path: Path, name: str) -> None:
    """Language models and image classifiers. Windows, soft caps and sinks are its own code, and so are experts, whose
    grouped products need widths of a multiple of 16 bytes."""
    if name in ("vit", "resnet"):
        labels = {str(label): str(label) for label in range(10)}
        path = write_config(tmp_path / "model", name, image_size=8, patch_size=4, id2label=labels, label2id=labels)
        data = ("--data.kind=images", "--data.path=sklearn-digits", "--data.mean=0.3", "--data.std=0.4")
    else:
        model_type, keys = CASES[name]
        widths = {"moe_intermediate_size": 16} if "moe_intermediate_size" in keys else {}
        path = _write_config_of(tmp_path / "model", model_type, {**keys, **widths})
        data = ("--data.kind=synthetic", "--data.vocab_size=61", "--training.seq_len=24")
    training = ("--training.local_batch_size=2", "--training.global_batch_size=8")
    job = tmp_path / "job.toml"
    job.write_text(f'[model]\nname = "huggingface"\npath = "{path}"\n')
    output = phantom.train(2, tmp_path, f"--config={job}", *training, *data, *SHORT, timeout=900).stdout
    assert "phantom: done: 2 steps" in output, output


@pytest.mark.phantom
@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "deepseek_v3"])
def test_a_model_generates_and_is_evaluated(phantom: Phantom, tmp_path: Path, family: str) -> None:
    """Generation caches keys and values of windows, sinks, soft caps and latents."""
    pytest.importorskip("lm_eval")
    from tests.inference.test_evaluation import write_tasks

    phantom.train(1, tmp_path, *of_family(family), *SHORT, "--checkpoint.save_last=true", timeout=900)
    tasks = write_tasks(tmp_path)
    run = str(tmp_path / "llama_debug")
    for command in (
        ("generate", run, "--prompt=abc " + 100 * "a", "--max-new-tokens=8"),
        ("chat", run, "--template=chatml", "--max-new-tokens=8"),
        ("evaluate", run, f"--tasks={tasks}", f"--include-path={tmp_path}"),
    ):
        ended = phantom.run("-m", "titan_launch", *command, input="Hello\nHello again\n", timeout=900)
        assert ended.returncode == 0, ended.stderr
    assert "|capitals" in ended.stdout, ended.stdout


@pytest.mark.phantom
@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_weights_and_a_second_model_come_from_a_folder(phantom: Phantom, data_folder: Path) -> None:
    weights, job = data_folder / "weights", (*of_family("qwen3"), f"--job.dump_folder={data_folder / 'cpu'}")
    for command in (
        (*job, "--job.device=cpu", "--training.steps=1", "--lr_scheduler.warmup_steps=1"),
        ("export", str(data_folder / "cpu" / "llama_debug"), f"--out={weights}"),
    ):
        arguments = [sys.executable, "-m", "titan_launch", *command]
        subprocess.run(arguments, check=True, capture_output=True, cwd=REPO, timeout=900)
    losses = {
        "dpo": (*DPO, f"--loss.dpo.reference={weights}"),
        "distillation": ("--loss.name=distillation", f"--loss.distillation.teacher={weights}"),
    }
    for name, loss in losses.items():
        options = (*of_family("qwen3"), f"--model.weights={weights}", *loss, *SHORT)
        options = tuple(option.format(folder=data_folder) for option in options)
        output = phantom.train(2, data_folder / name, *options, timeout=900).stdout
        assert "phantom: done: 2 steps" in output, output
