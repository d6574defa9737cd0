"""Minimal hand-written training loop for this model, with FSDP2, DDP or neither.

    torchrun --nproc-per-node 2 -m benchmarks.speed.tools.bare JOB

With FSDP2 there is one unit per block and one for the head. The head and the last block stay unsharded after forward.
Gradients are summed, because the loss is divided by the targets of all ranks. Clipping works on the local shards. The
loop has no metrics, checks or checkpoints.
"""

from __future__ import annotations

import gc
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.speed.jobs import Job
from benchmarks.speed.tools.tokens import random_sequences
from titan_launch.models.decoder.args import DecoderArgs
from titan_launch.models.decoder.module import Decoder


def main(job: Job) -> None:
    """Run the training of one rank."""
    rank = start(job)
    model, parameters, optimizer = prepare(job)
    batches = iter(random_sequences(job, rank).split(job.local_sequences))
    gc.disable()
    for _ in range(job.steps):
        microbatches = [next(batches) for _ in range(job.microbatches)]
        train_step(model, parameters, optimizer, microbatches, job)


def start(job: Job) -> int:
    """Join torchrun's process group, or create one for this process alone if FSDP2 needs it. Return the rank."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    elif job.division != "whole":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return int(os.environ.get("RANK", "0"))


def prepare(job: Job) -> tuple[nn.Module, list[nn.Parameter], torch.optim.Optimizer]:
    """Return the model of this rank, its parameters, and the optimizer."""
    torch.manual_seed(0)
    model = divide(build(job), job)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=job.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return model, parameters, optimizer


def build(job: Job) -> Decoder:
    """Return the launcher's Llama."""
    shape = {name: getattr(job, name) for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim")}
    return Decoder(DecoderArgs(vocab_size=job.vocab_size, **shape), job.seq_len)


def divide(model: Decoder, job: Job) -> nn.Module:
    """Shard the model over the ranks with FSDP2, in place."""
    if job.division == "whole":
        return model
    if job.division == "replicated":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = init_device_mesh("cpu", (job.ranks,))
    policy = MixedPrecisionPolicy(param_dtype=dtype(job), reduce_dtype=torch.float32)
    last = len(model.layers) - 1
    for index, layer in enumerate(
        model.layers
    ):  # backward begins with the last block; resharding frees nothing on a single rank
        reshards = job.ranks > 1 and index < last
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
    fully_shard([model.norm, model.output], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo does not have PREMUL_SUM
    return model


def dtype(job: Job) -> torch.dtype:
    """Return the compute dtype."""
    result = getattr(torch, job.precision)
    assert isinstance(result, torch.dtype)
    return result


def train_step(
    model: nn.Module, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, batches: list[Tensor], job: Job
) -> None:
    """Run forward, backward, clipping and update."""
    valid = torch.tensor(sum(int((batch[:, 1:] != -100).sum()) for batch in batches))
    if job.division != "whole":
        dist.all_reduce(valid)
    scale = job.ranks if isinstance(model, DistributedDataParallel) else 1  # DDP averages over the ranks
    for index, batch in enumerate(batches):
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = index == len(batches) - 1
        with torch.autocast("cpu", dtype(job), enabled=job.division != "sharded" and job.precision != "float32"):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum")
        (loss * scale / valid).backward()
    clip(parameters, job)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def clip(parameters: list[nn.Parameter], job: Job) -> None:
    """Clip the gradients by their norm over all shards, in a few operations on this rank's shards."""
    whole = [p.grad for p in parameters if p.grad is not None]
    gradients = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in whole]
    square = torch.stack(torch._foreach_norm(gradients)).square().sum()
    if job.division == "sharded":
        dist.all_reduce(square)
    torch._foreach_mul_(gradients, (job.max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0))


if __name__ == "__main__":
    main(Job.load(sys.argv[1]))
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # gloo's threads can abort an interpreter that shuts down
