"""The Trainer of Hugging Face's Transformers on its own Llama: autocast; several processes use DDP."""

from __future__ import annotations

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from benchmarks.speed.jobs import Job
from benchmarks.speed.tools.hugging_face import llama_config
from benchmarks.speed.tools.tokens import random_sequences


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """The samples of all ranks. The Trainer divides them over the ranks, and the model shifts the labels."""

    def __init__(self, job: Job):
        self._tokens = torch.cat([random_sequences(job, rank)[:, :-1] for rank in range(job.ranks)])

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


def main(job: Job) -> None:
    """Run the training of one rank."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            bf16=job.precision == "bfloat16",
            per_device_train_batch_size=job.local_sequences,
            gradient_accumulation_steps=job.microbatches,
            max_steps=job.steps,
            learning_rate=job.lr,
            max_grad_norm=job.max_norm,
            optim="adamw_torch_fused",
            weight_decay=0.1,
            lr_scheduler_type="constant",
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        torch.manual_seed(0)
        Trainer(LlamaForCausalLM(llama_config(job)), arguments, train_dataset=Sequences(job)).train()


if __name__ == "__main__":
    main(Job.load(sys.argv[1]))
