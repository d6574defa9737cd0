"""The loop of Accelerate's documentation on Transformers' Llama: DDP, or FSDP2 with Accelerate's default precision."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from benchmarks.speed.jobs import Job
from benchmarks.speed.tools.hugging_face import let_cpus_shard, llama_config
from benchmarks.speed.tools.tokens import random_sequences


def main(job: Job) -> None:
    """Run the training of one rank."""
    plugin = None
    if job.division == "sharded":
        let_cpus_shard()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if job.precision == "bfloat16" else "no",
        gradient_accumulation_steps=job.microbatches,
        fsdp_plugin=plugin,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(job))
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.cat([random_sequences(job, rank)[:, :-1] for rank in range(job.ranks)])
    loader: Iterable[torch.Tensor] = DataLoader([*tokens], batch_size=job.local_sequences)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), job.max_norm)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main(Job.load(sys.argv[1]))
