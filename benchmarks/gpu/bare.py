"""Hand-written training loop for one GPU: FSDP2 around the launcher's Llama, without checks and reports.

Initial weights and tokens are the launcher's, because a GPU at its power limit computes some values faster than others.

    python -m benchmarks.gpu.bare '{"flavor": "1B", "args": {}, ...}'

It prints one line of JSON: seconds per step and peak active memory in GiB, both of the steps after the warm-up, and the
backend of attention.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import sdpa_kernel

from titan_launch.config.sections.data import SyntheticData
from titan_launch.data.sources.synthetic import SyntheticSource
from titan_launch.models.architectures import resolve_args
from titan_launch.models.decoder.args import DecoderArgs
from titan_launch.models.decoder.attention import causal_attention
from titan_launch.models.decoder.module import Decoder, llama_values
from titan_launch.models.init import initialize
from titan_launch.train.kernel_choice import BACKENDS, choose, refusal


def main(job: dict[str, Any]) -> None:
    """Train, and time all steps after the first `warm_up`."""
    device = torch.device(job["device"])
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = build(job, device)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    source = SyntheticSource(SyntheticData(kind="synthetic"), job["seq_len"])
    samples = [torch.stack(source[index]) for index in range(job["steps"] * job["batch"])]
    batches = torch.stack(samples).view(job["steps"], job["batch"], 2, job["seq_len"])
    gc.disable()
    began = 0.0
    with sdpa_kernel([*BACKENDS.values()], set_priority=True):
        for step, batch in enumerate(batches):
            if step == job["warm_up"]:
                began = start_window(device)
            train_step(model, parameters, optimizer, batch.to(device, non_blocking=True))
    seconds = (synchronized_time(device) - began) / (job["steps"] - job["warm_up"])
    peak = torch.cuda.memory_stats()["active_bytes.all.peak"] / 2**30 if device.type == "cuda" else None
    attention = attention_backend(job) if device.type == "cuda" else None
    print(json.dumps({"step_s": seconds, "peak_gib": peak, "attention": attention}), flush=True)
    os._exit(0)  # gloo's threads can abort an interpreter that shuts down


def attention_backend(job: dict[str, Any]) -> str:
    """Return the backend that PyTorch takes: the first that does not refuse the model's attention."""
    args = resolve_args("llama3", job["flavor"], job["args"])
    assert isinstance(args, DecoderArgs)

    def call() -> Tensor:
        q, k, v = (
            torch.empty(
                (job["batch"], job["seq_len"], heads, args.head_width),
                dtype=torch.bfloat16,
                device="cuda",
                requires_grad=True,
            ).transpose(1, 2)
            for heads in (args.n_heads, args.n_kv_heads, args.n_kv_heads)
        )
        return causal_attention(q, k, v)

    return choose("auto", [*BACKENDS], lambda name: None if name == "math" else refusal(BACKENDS[name], call))[0]


def build(job: dict[str, Any], device: torch.device) -> Decoder:
    """Return the initialized model with one FSDP unit per block; each block is compiled if the job asks for it."""
    args = resolve_args("llama3", job["flavor"], job["args"])
    assert isinstance(args, DecoderArgs)
    with device:
        model = Decoder(args, job["seq_len"])
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        if job["is_compiled"]:
            layer.compile(fullgraph=True)
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    initialize(model, llama_values(args), 0, device)
    return model


def train_step(
    model: Decoder, parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, batch: Tensor
) -> None:
    """Run forward, backward, clipping and update without waiting for the device. `batch`: inputs and targets, int64
    `[batch, 2, seq_len]`."""
    logits = model(batch[:, 0])
    F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1].flatten()).backward()
    gradients = [parameter.grad.to_local() for parameter in parameters]  # type: ignore[union-attr]
    norm = torch.stack(torch._foreach_norm(gradients)).norm()
    torch._foreach_mul_(gradients, (1.0 / (norm + 1e-6)).clamp(max=1.0))
    optimizer.step()
    optimizer.zero_grad()


def start_window(device: torch.device) -> float:
    """Return the time after the warm-up, and reset the peak memory, as the launcher does after a report."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    return synchronized_time(device)


def synchronized_time(device: torch.device) -> float:
    """Wait for the device, and return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
