"""litgpt's `pretrain` with its own model: autocast; several processes use DDP, because its FSDP1 needs GPUs.

Its `torch.compile` of the whole model is switched off (TORCHDYNAMO_DISABLE), because no tool compiles here. litgpt
disables the fused AdamW on a CPU; this script enables it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from lightning.fabric.strategies import DDPStrategy
from litgpt import pretrain
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule
from torch.utils.data import DataLoader

from benchmarks.speed.jobs import Job
from benchmarks.speed.tools.tokens import random_sequences


class Sequences(DataModule):
    """Random tokens. litgpt divides them over the ranks."""

    def __init__(self, job: Job):
        super().__init__()
        self._job = job

    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None) -> None:
        """Do nothing: the data do not depend on the tokenizer."""

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        """Return a loader of the samples of all ranks."""
        tokens = torch.cat([random_sequences(self._job, rank) for rank in range(self._job.ranks)])
        return DataLoader([*tokens], batch_size=self._job.local_sequences)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        """Return a loader of one batch: litgpt validates before training."""
        tokens = random_sequences(self._job, 0)[: self._job.local_sequences]
        return DataLoader([*tokens], batch_size=self._job.local_sequences)  # type: ignore[arg-type]


class Replicated:
    """A replacement of the FSDP1 strategy that creates a DDP strategy, for any arguments."""

    def __new__(cls, **_: Any) -> Any:
        return DDPStrategy()


def main(job: Job) -> None:
    """Run the training of one rank."""
    pretrain.FSDPStrategy = Replicated
    build = pretrain.instantiate_torch_optimizer
    pretrain.instantiate_torch_optimizer = lambda optimizer, parameters, **_: build(optimizer, parameters, fused=True)
    config = Config(
        name="debug",
        block_size=job.seq_len,
        vocab_size=job.vocab_size,
        padded_vocab_size=job.vocab_size,
        n_layer=job.n_layers,
        n_head=job.n_heads,
        n_query_groups=job.n_kv_heads,
        n_embd=job.dim,
        intermediate_size=job.hidden_dim,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        rope_base=500_000,
    )
    with tempfile.TemporaryDirectory() as folder:
        pretrain.setup(
            "debug",
            model_config=config,
            out_dir=Path(folder),
            precision="bf16-mixed" if job.precision == "bfloat16" else "32-true",
            data=Sequences(job),
            train=TrainArgs(
                save_interval=None,
                log_interval=10,
                global_batch_size=job.sequences * job.microbatches,
                micro_batch_size=job.local_sequences,
                max_tokens=job.steps * job.tokens,
                max_norm=job.max_norm,
                lr_warmup_steps=0,
            ),
            eval=EvalArgs(interval=1000, max_iters=1, final_validation=False),
            optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": job.lr, "weight_decay": 0.1}},
            devices=job.ranks,
            logger_name="csv",
        )


if __name__ == "__main__":
    main(Job.load(sys.argv[1]))
