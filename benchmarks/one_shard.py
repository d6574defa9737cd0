"""Cost of FSDP2 with one shard: resharded after forward, unsharded after forward, and PyTorch's `replicate`.

    torchrun --nproc-per-node 2 benchmarks/one_shard.py --write docs/verification/cpu.md

Steps are interleaved, in another order each round. They are measured in CPU time, which other processes disturb least.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from publishing import publish
from torch import Tensor
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from titan_launch.models.decoder.args import DecoderArgs
from titan_launch.models.decoder.module import Decoder

WAYS = ("plain module", "resharded after forward", "unsharded", "`replicate`")
SEQUENCE, BATCH, VOCABULARY = 128, 1, 320


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description="FSDP2 with one shard: parameters resharded or unsharded after forward, or replicated."
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", type=Path, help="Markdown file to put the table into, between its markers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ranks = dist.get_world_size()
    ways = WAYS if ranks == 1 else WAYS[1:]
    lines = [
        f"| bfloat16, {ranks} rank{'s' * (ranks > 1)}: CPU ms per step | median | minimum | loss |",
        "|---|---|---|---|",
    ]
    models = {way: build(way, ranks) for way in ways}
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    losses = {way: step(model, tokens) for way, model in models.items()}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(options.rounds):
        for way in (*ways[turn % len(ways) :], *ways[: turn % len(ways)]):
            began = time.process_time()
            step(models[way], tokens)
            times[way].append(1000 * (time.process_time() - began))
    lines += [f"| {w} | {median(times[w]):.1f} | {min(times[w]):.1f} | {losses[w]:.7f} |" for w in ways]
    if dist.get_rank() == 0:
        publish("\n".join(lines), f"one_shard_{ranks}", options.write)
    dist.barrier()
    os._exit(0)  # gloo's threads can abort an interpreter that shuts down


def build(way: str, ranks: int) -> Decoder:
    """Return the launcher's small Llama with the values of seed 0, wrapped in one of `WAYS`."""
    torch.manual_seed(0)
    args = DecoderArgs(vocab_size=VOCABULARY, dim=256, n_layers=6, n_heads=8, n_kv_heads=4, hidden_dim=768)
    model = Decoder(args, SEQUENCE)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    modules = [*model.layers, model]
    if way == "plain module":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        return model
    if way == "`replicate`":
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("replicate",))
        for module in modules:
            replicate(module, mesh=mesh, mp_policy=policy)
        return model
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replicate", "shard"))
    for module in modules:
        fully_shard(
            module,
            mesh=mesh if ranks > 1 else mesh["shard"],
            mp_policy=policy,
            reshard_after_forward=way != "unsharded",
        )
    return model


def step(model: Decoder, tokens: Tensor) -> float:
    """Run forward and backward. Return the loss."""
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    model.zero_grad()
    return loss.item()


if __name__ == "__main__":
    main()
