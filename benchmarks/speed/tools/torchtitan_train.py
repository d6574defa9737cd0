"""TorchTitan 0.2.2 and its Llama. TorchTitan expects CUDA, so this script replaces its device functions for the CPU.

A single process trains without FSDP2, under autocast. TorchTitan's own data need files, so the data are random tokens.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch._utils
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from benchmarks.speed.jobs import Job
from benchmarks.speed.tools.tokens import random_sequences


def pretend_cpu_is_a_gpu() -> None:
    """Replace functions of the device. Call this before TorchTitan is imported, because the import uses the device."""
    torch._utils._get_available_device_type = lambda: "cpu"
    answers: dict[str, Any] = {
        "get_device_name": lambda *_: "CPU",
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=2**34),
        "memory_stats": lambda *_: defaultdict(int),
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "current_device": lambda: 0,
    }
    for name, answer in answers.items():
        setattr(torch.cpu, name, answer)
    sys.modules["torchtitan.models.moe.kernels"] = MagicMock()  # needs Triton; this model has no experts
    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_and_sum(module: FSDPModule, factor: float) -> None:
        set_factor(module, factor)
        module.set_force_sum_reduction_for_comms(True)  # gloo does not have PREMUL_SUM

    FSDPModule.set_gradient_divide_factor = set_factor_and_sum  # type: ignore[method-assign,assignment]


def pretend_torchrun() -> None:
    """Set torchrun's environment variables for a single process, because TorchTitan needs them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})


class Batches:
    """The microbatches of a rank."""

    def __init__(self, job: Job, rank: int):
        self._tokens = random_sequences(job, rank).split(job.local_sequences)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        return (({"input": tokens[:, :-1]}, tokens[:, 1:]) for tokens in self._tokens)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, because no checkpoint is saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing, because no checkpoint is loaded."""


def main(job: Job) -> None:
    """Run the training of one rank."""
    pretend_cpu_is_a_gpu()
    with tempfile.TemporaryDirectory() as folder:
        options = command_line(job, folder)
        sys.argv = ["train.py", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
        from torchtitan import train  # the import reads the command line and uses the device
        from torchtitan.models import llama3
        from torchtitan.protocols.train_spec import register_train_spec

        spec = llama3.get_train_spec()
        shape = {name: getattr(job, name) for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size")}
        args = llama3.TransformerModelArgs(multiple_of=job.hidden_dim, rope_theta=500_000, **shape)
        spec.model_args = {"debug": args}
        spec.build_tokenizer_fn = None
        spec.build_dataloader_fn = lambda dp_rank, **_: Batches(job, dp_rank)
        spec.state_dict_adapter = None
        register_train_spec("speed", spec)
        train.main(train.Trainer)


def command_line(job: Job, folder: str) -> dict[str, Any]:
    """Return the job as options of TorchTitan. `folder`: for its output."""
    replicas = job.ranks if job.division == "replicated" else 1
    return {
        "job.dump_folder": folder,
        "model.name": "speed",
        "model.flavor": "debug",
        "optimizer.lr": job.lr,
        "lr_scheduler.warmup_steps": 2,
        "training.local_batch_size": job.local_sequences,
        "training.global_batch_size": job.sequences * job.microbatches,
        "training.seq_len": job.seq_len,
        "training.max_norm": job.max_norm,
        "training.steps": job.steps,
        "training.mixed_precision_param": job.precision,
        "parallelism.data_parallel_replicate_degree": replicas,
        "parallelism.data_parallel_shard_degree": job.ranks // replicas,
        "activation_checkpoint.mode": "none",
        "metrics.log_freq": 10,
    }


if __name__ == "__main__":
    if "RANK" not in os.environ:
        pretend_torchrun()
    main(Job.load(sys.argv[1]))
