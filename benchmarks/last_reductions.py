"""Gain and price of waiting later for FSDP2's last gradient reductions (torch 2.15 or newer).

    torchrun --nproc-per-node 2 benchmarks/last_reductions.py --write docs/verification/cpu.md

A step has four microbatches, whose gradients are reduced in each backward. After a step the script reads all gradients.
Steps are interleaved, in another order each round.
"""

from __future__ import annotations

import argparse
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from publishing import markdown_table, publish
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from titan_launch.core.patches import replaced
from titan_launch.models.decoder.args import DecoderArgs
from titan_launch.models.decoder.module import Decoder

WAYS = ("in every backward", "in the last backward (`set_is_last_backward`)", "by `GradientReductionHandle`")
SEQUENCE, BATCH, VOCABULARY, MICROBATCHES = 128, 2, 4096, 4
COLUMNS = (
    "waits for the reductions",
    "step ms",
    "minimum",
    "CPU ms",
    "ms in reduce-scatters",
    "ms from the end of autograd to the gradients",
    "MiB held longer",
)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Waiting later for FSDP2's last gradient reductions.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", type=Path, help="Markdown file to put the table into, between its markers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    models = {way: build(way) for way in WAYS}
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(dist.get_rank()))
    norms = {way: step(model, way, tokens)[1] for way, model in models.items()}
    assert len(set(norms.values())) == 1, f"the gradients differ: {norms}"
    rows: dict[str, list[tuple[float, ...]]] = {way: [] for way in WAYS}
    for turn in range(options.rounds):
        shift = turn % len(WAYS)
        for way in (*WAYS[shift:], *WAYS[:shift]):
            rows[way].append(step(models[way], way, tokens)[0])
    table = [[*COLUMNS]]
    for way, measured in rows.items():
        steps, cpu, in_reductions, after, held = zip(*measured, strict=True)
        whole = (median(steps), min(steps), median(cpu), median(in_reductions))
        table.append([way, *(f"{number:.0f}" for number in whole), f"{median(after):.2f}", f"{max(held):.1f}"])
    if dist.get_rank() == 0:
        publish(markdown_table(table, texts=1), "last_reductions", options.write)
    dist.barrier()
    os._exit(0)  # gloo's threads can abort an interpreter that shuts down


def build(way: str) -> Any:
    """Return the launcher's small Llama with the values of seed 0, wrapped. Any, because releases before torch 2.15
    lack methods of FSDP2."""
    torch.manual_seed(0)
    args = DecoderArgs(vocab_size=VOCABULARY, dim=256, n_layers=4, n_heads=8, n_kv_heads=4, hidden_dim=768)
    model = Decoder(args, SEQUENCE)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    cast(Any, model).set_manual_backward_finalization(way == WAYS[2])
    return model


class Reductions:
    """The reduce-scatters of a step: their seconds, and their inputs."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inputs: list[weakref.ref[Tensor]] = []

    def counted(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        """Return a reduce-scatter whose time and input count."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._inputs.append(weakref.ref(kwargs["input"]))
            began = time.perf_counter()
            try:
                return reduce(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return call

    def held(self) -> float:
        """Return the MiB of the inputs that FSDP2 still holds."""
        inputs = (reference() for reference in self._inputs)
        return sum(tensor.nbytes for tensor in inputs if tensor is not None) / 2**20


def step(model: Any, way: str, tokens: Tensor) -> tuple[tuple[float, ...], float]:
    """Train without an update. Return milliseconds of the step, of the CPU, of its reduce-scatters, and from the end of
    the last autograd to the complete gradients, with the largest MiB held after an autograd; and the norm of the
    gradients."""
    reductions, held, began, cpu_began = Reductions(), 0.0, time.perf_counter(), time.process_time()
    with replaced(dist, "reduce_scatter_single", reductions.counted(dist.reduce_scatter_single)):
        for index in range(MICROBATCHES):
            model.set_is_last_backward(way != WAYS[1] or index == MICROBATCHES - 1)
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            end_of_autograd = time.perf_counter()
            handle = model.finalize_backward(async_op=True) if way == WAYS[2] else None
            held = max(held, reductions.held())
            if handle is not None:  # FSDP2 demands it before the next forward
                handle.wait()
        after = time.perf_counter() - end_of_autograd
    norm = torch.nn.utils.get_total_norm([p.grad.to_local() for p in model.parameters()]).item()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    model.zero_grad()
    return (1000 * seconds, 1000 * cpu, 1000 * reductions.seconds, 1000 * after, held), norm


if __name__ == "__main__":
    main()
