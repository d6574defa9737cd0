"""Short training runs: the models and branches that the scripts for a borrowed GPU train, and their commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import FLOAT8_TENSORWISE, SMOKE, Shape
from benchmarks.gpu.processes import log_name
from benchmarks.gpu.runs import BASE, device_of, overrides, shape_of_job

Options = Mapping[str, Any]
"""Keys of the job file with their values."""

STEPS = 6
"""Steps of a short run."""

_SHAPE = Shape("1B, 2 layers", "1B", {"n_layers": 2}, 2048, 2)

COMPILED: Options = {"compile.enable": True}
DETERMINISTIC: Options = {"debug.deterministic": True}
FP32: Options = {"precision.param_dtype": "float32"}
FULL: Options = {"activation_checkpoint.mode": "full"}
ACTIVATION_OFFLOAD: Options = {"activation_checkpoint.offload": True}
CPU_OFFLOAD: Options = {"training.enable_cpu_offload": True}

_SMALL_VOCABULARY: Options = {"model.args.vocab_size": 8192}
SMALL: Options = {**_SMALL_VOCABULARY, "model.args.n_layers": 2}
"""A model whose checkpoint takes 2 GB."""

WINDOW: Options = {
    **_SMALL_VOCABULARY,
    "model.name": "mistral",
    "model.flavor": "7B",
    "model.args.sliding_window": 512,
}
GEMMA2: Options = {**_SMALL_VOCABULARY, "model.name": "gemma2", "model.flavor": "2B", "model.args.sliding_window": 512}
GEMMA3: Options = {"model.name": "gemma3", "model.flavor": "1B", "model.args.n_layers": 6}
GPT_OSS: Options = {
    **_SMALL_VOCABULARY,
    "model.name": "gpt_oss",
    "model.flavor": "20B",
    "model.args.experts.num_experts": 8,
}
EXPERTS: Options = {
    **_SMALL_VOCABULARY,
    "model.name": "qwen3_moe",
    "model.flavor": "30B-A3B",
    "model.args.experts.num_experts": 32,
}
"""Models with the widths of published ones. Their windows are shorter than a sequence, so that they mask something."""

_DOCUMENTS, _PAIRS = "documents.jsonl", "pairs.jsonl"
DOCUMENT_TOKENS = 300
"""Inputs of each document of `write_data`: no multiple of the 128 tokens in a block of FlexAttention."""

TEXT: Options = {"data.kind": "jsonl", "data.path": _DOCUMENTS, "data.shuffle": False}
DOCUMENTS: Options = {**TEXT, "data.packing": "documents"}
LORA: Options = {"lora.targets": '["all-linear"]'}
DPO: Options = {
    **LORA,
    "data.kind": "preferences",
    "data.path": _PAIRS,
    "data.template": "chatml",
    "training.seq_len": 1024,
    "loss.name": "dpo",
    "loss.dpo.reference": "base",
}

CHECKPOINTS: Options = {"checkpoint.enable": True, "checkpoint.interval": 3, "checkpoint.keep_latest": 1}

BRANCHES: Mapping[str, Options] = {
    "audit": {"debug.audit_precision": True},
    "profile": {"comm.profile_freq": 3, "comm.count_traffic": True},
    "profiling": {"profiling.start_step": 3, "profiling.num_steps": 2, "profiling.memory": True},
    "checkpoints by thread": {**CHECKPOINTS, "checkpoint.async_mode": "thread"},
    "checkpoints by process": {**CHECKPOINTS, "checkpoint.async_mode": "process"},
    "sliding window": WINDOW,
    "documents": DOCUMENTS,
    "soft cap": GEMMA2,
    "attention sinks": GPT_OSS,
    "experts": EXPERTS,
    "activation offload": ACTIVATION_OFFLOAD,
    "CPU offload": CPU_OFFLOAD,
    "chunked loss": {"loss.chunks": 8},
    "deterministic": DETERMINISTIC,
    "Muon": {"optimizer.name": "Muon"},
    "bf16 optimizer state": {"optimizer.state_dtype": "bfloat16"},
    "int8 optimizer state": {"optimizer.state_dtype": "int8"},
    "EMA": {"ema.decay": 0.99},
    "LoRA": LORA,
    "DPO": DPO,
    "fp32": FP32,
    "dataloader workers": {"data.num_workers": 2},
    "compiled, selective activation checkpointing": {**COMPILED, "activation_checkpoint.mode": "selective"},
    "compiled loss": {**COMPILED, "compile.components": '["loss"]'},
    "compiled model": {**COMPILED, "compile.components": '["model"]'},
    "compiled, float8 tensorwise, float8 all-gather": {**COMPILED, **FLOAT8_TENSORWISE, "float8.all_gather": True},
}
"""Every branch of the launcher that six steps on one GPU can reach."""

WAITS = ("experts", "documents", "activation offload", "CPU offload", "int8 optimizer state", "LoRA")
"""Branches whose waits for the device are counted."""

_SMOKE_VALUES: Options = {
    "model.flavor": SMOKE.flavor,
    "model.args.vocab_size": 320,
    "model.args.sliding_window": 16,
    "model.args.experts.num_experts": 4,
    "compile.backend": "aot_eager",  # inductor would compile C++ for a minute
    "profiling.memory": False,
    "float8.emulate": True,
}
"""Values of a run on a CPU. A value replaces that of a key which the run sets; the last two depend on CUDA."""


@dataclass(frozen=True)
class Setting:
    """The machine on which all steps run, and the folder of their files."""

    is_smoke: bool
    """True for tiny shapes on a CPU."""

    scratch: Path
    has_values: bool = True
    """False on a device that computes nothing: losses and times mean nothing, but memory and failures do."""

    ranks: int = 1
    """Number of GPUs that the steps use."""

    def sized(self, full: int, smoke: int) -> int:
        """Return a number of steps or tokens for this machine."""
        return smoke if self.is_smoke else full

    def run_folder(self, name: str) -> Path:
        """Return the folder of a run."""
        return self._dump_folder(name) / "gpu"

    def job(self, name: str, options: Options) -> dict[str, Any]:
        """Return the keys of the job file of a short run, which reports after its first and its last step. `options`
        override the defaults."""
        job = shape_of_job(_SHAPE, device_of(self.is_smoke), str(self._dump_folder(name)))
        job |= {"training.steps": STEPS, "metrics.log_freq": 100}
        job |= {"checkpoint.save_last": options.get("checkpoint.enable", False), **options}
        if "data.path" in job:
            job["data.path"] = self.scratch / job["data.path"]
        if self.is_smoke:
            job |= {"training.seq_len": options.get("training.seq_len", SMOKE.seq_len)}
            job |= {f"model.args.{name}": value for name, value in SMOKE.args.items()}
            job |= {key: value for key, value in _SMOKE_VALUES.items() if _is_set(key, job)}
        return job

    def training(
        self, name: str, options: Options, ranks: int = 1, program: Sequence[str] = ("titan_launch",)
    ) -> list[str]:
        """Return the command that trains a short run. `program`: the module that trains, with arguments of its own."""
        launch = ["launch", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        return [sys.executable, "-m", *program, *launch, "--config", BASE, *overrides(self.job(name, options))]

    def write_data(self) -> None:
        """Write the files of `DOCUMENTS` and `DPO`."""
        texts = ["".join(chr(97 + (i * j + i) % 26) for j in range(DOCUMENT_TOKENS)) for i in range(200)]
        (self.scratch / _DOCUMENTS).write_text(_json_lines({"text": text} for text in texts))
        pairs = ({"prompt": text[:9], "chosen": text[:40], "rejected": text[40:60]} for text in texts)
        (self.scratch / _PAIRS).write_text(_json_lines(pairs))

    def _dump_folder(self, name: str) -> Path:
        return self.scratch / "runs" / Path(log_name(name)).stem


def _is_set(key: str, job: Options) -> bool:
    """Return True if a run sets the key, or the switch of the key's section."""
    return key in job or f"{key.partition('.')[0]}.enable" in job


def _json_lines(rows: Iterable[Options]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


_CUDA_ONLY = {
    "comm.profile_freq": "CUDA only: it profiles CUDA kernels",
    "activation_checkpoint.offload": "CUDA only: it copies activations from a GPU",
    "parallelism.context_parallel_degree": "CUDA only: PyTorch's ring attention has no kernels for the CPU",
}


def obstacle(options: Options, is_smoke: bool) -> str:
    """Return the reason why this machine cannot train a run; empty if it can."""
    if "float8.enable" in options and find_spec("torchao") is None:
        return "torchao is not installed"
    return next((reason for key, reason in _CUDA_ONLY.items() if is_smoke and key in options), "")
