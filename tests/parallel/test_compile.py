"""Compiled blocks: their graphs, results equal to eager ones, and errors for code that does not become a graph."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.sampling import sampled
from tests.tensors import assert_equal
from tests.train.jobs import TINY_ARGS, planned_and_sharded
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.loss import LossConfig
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig, CompileConfig
from titan_launch.core.errors import ConfigError
from titan_launch.core.torch_release import MIXES_DTYPES_IN_UNIT
from titan_launch.loss.cross_entropy import CrossEntropy
from titan_launch.models.decoder import layers as rope
from titan_launch.parallel.compile import _prepare, compile_loss, compile_time, describe_pieces, eager

COMPILE = {"enable": True, "backend": "aot_eager"}
SHAPES = 9
FULL, OPS = {"mode": "full"}, {"mode": "selective"}
BUDGET = {"mode": "memory_budget", "memory_budget": 0.3}
CONV = {"name": "tests.parallel.conv_model:ConvNet"}
SYNCHRONIZED = {"statistics": "synchronized"}
FP32_NORMS = {"param_dtype": "bfloat16", "rules": [{"type": "RMSNorm", "param_dtype": "float32"}]}


LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
TWO = {"tensor_parallel_degree": 2}


def llama(**args: Any) -> dict[str, Any]:
    return {"args": {**TINY_ARGS, "n_layers": 3, **args}}


class Breaking(nn.Module):
    """A model whose blocks cannot become graphs: one branches on values, the others print."""

    def __init__(self, looks: bool):
        super().__init__()
        self.embedding = nn.Embedding(61, 8)
        self.blocks = nn.ModuleList([Looking() if looks else Printing()])
        self.output = nn.Linear(8, 61)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.blocks[0](self.embedding(tokens)))


class Printing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        print("hello")
        return super().forward(x)


class Looking(Printing):
    def forward(self, x: Tensor) -> Tensor:
        return nn.Linear.forward(self, x) if x.sum().item() > 0 else x


class Widening(nn.Module):
    """A model whose block has more shapes than PyTorch compiles for one function."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 8)
        self.blocks = nn.ModuleList(Wider(size) for size in range(8, 8 + SHAPES))
        self.output = nn.Linear(8 + SHAPES, 61)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(x)


class Wider(nn.Linear):
    def __init__(self, size: int) -> None:
        super().__init__(size, size + 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def train(sections: dict[str, Any], packed: bool = False) -> tuple[dict[str, Tensor], tuple[int, int]]:
    """Train two microbatches. Return losses, gradients of this rank's shards and buffers, and a pair of numbers.

    `packed`: each sample has two documents.
    The pair has the bytes that the first microbatch saved for backward, and the number of graphs.
    """
    job: dict[str, Any] = {"training": {"seq_len": 16}, "precision": {"param_dtype": "float32"}, **sections}
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, _, _ = planned_and_sharded(JobConfig.model_validate(job), 16)
    generator = torch.Generator().manual_seed(0 if "parallelism" in sections else dist.get_rank())
    found, kept = {}, 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    for index in range(2):
        tokens = torch.randint(0, 61, (2, 16), generator=generator)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            documents = (torch.arange(16) > 5 + index).int().expand(2, 16) if packed else None
            loss = CrossEntropy().sums(model(tokens, *([documents] if packed else [])), tokens)[0]
        loss.backward()
        found[f"loss {index}"] = loss.detach()
    found |= {name: p.grad.to_local() for name, p in model.named_parameters() if p.grad is not None}
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert not torch._dynamo.utils.counters["graph_break"]
    return found, (kept, torch._dynamo.utils.counters["stats"]["unique_graphs"])


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "whole": ({"model": llama()}, 1),
    "batchnorm": (
        {"model": llama(norm="batchnorm"), "activation_checkpoint": OPS, "batchnorm": SYNCHRONIZED},
        1,
    ),
    "conv": ({"model": CONV, "activation_checkpoint": {**FULL, "modules": ["blocks.*.bn"]}}, 2),
    "parts": (
        {"model": llama(), "activation_checkpoint": FULL, "precision": {**FP32_NORMS, "placement": "own_unit"}},
        2,
    ),
    "rules in place": (
        {"model": llama(), "activation_checkpoint": FULL, "precision": FP32_NORMS},
        1 if MIXES_DTYPES_IN_UNIT else 2,
    ),
    "budget": ({"model": llama(), "activation_checkpoint": BUDGET}, 1),
    # the inputs of the first block take no gradient
    **(
        {
            "adapters in place": (
                {"model": llama(), "lora": {"targets": ["all-linear"]}, "activation_checkpoint": FULL},
                2,
            )
        }
        if MIXES_DTYPES_IN_UNIT
        else {}
    ),
    "latents": ({"model": llama(vocab_size=64, n_kv_heads=4, latent_attention=LATENT), "parallelism": TWO}, 1),
    "packed": ({"model": llama(), "activation_checkpoint": FULL}, 1),
    "divided": ({"model": llama(vocab_size=64), "activation_checkpoint": FULL, "parallelism": TWO}, 1),
}
"""Sections of a job, and the number of graphs of a step."""


def compiled_and_not(names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Compare cases with eager mode. Return the saved bytes and the number of graphs of each."""
    found = {}
    for name in names:
        sections, _ = CASES[name]
        compiled, found[name] = train({**sections, "compile": COMPILE}, name == "packed")
        own = {"activation_checkpoint": {}} if name == "budget" else {}
        with patch.object(rope, "_rotated", rope._rotated_by_parts):  # as in a graph; test_layers compares both
            expected, _ = train({**sections, **own}, name == "packed")
        assert_equal(compiled, expected)
    return found


def check_graphs() -> None:
    """Check numbers of graphs, and code that does not become a graph."""
    _, (_, graphs) = train({"model": {"name": f"{__name__}:Widening"}, "compile": {**COMPILE, "backend": "eager"}})
    assert graphs == SHAPES
    _prepare(1, ActivationCheckpointConfig())  # as for a smaller pipeline stage
    assert torch._dynamo.config.recompile_limit == 8 * SHAPES
    _explain()
    _check_stance()
    _check_loss()
    _check_cost()


def _explain() -> None:
    for args, reason in (
        (
            {"looks": False},
            r"graph of blocks.0 \(test_compile.py:\d+\): .*print.*; change that line, or set compile.enable",
        ),
        ({"looks": True}, r"graph of blocks.0 \(test_compile.py:\d+\): .*data-dependent"),
    ):
        model = {"name": "tests.parallel.test_compile:Breaking", "args": args}
        try:
            train({"model": model, "compile": COMPILE})
        except ConfigError as error:
            assert error.problems[0].key == ("compile", "enable")
            assert re.search(reason, error.problems[0].reason), error
        else:
            raise AssertionError("no error")


def _check_stance() -> None:
    precision = {**FP32_NORMS, "placement": "own_unit"}
    config = JobConfig.model_validate({"model": llama(), "precision": precision, "compile": COMPILE})
    model, plan, _ = planned_and_sharded(config, 16)
    torch._dynamo.utils.counters.clear()
    with eager(config.compile):
        model(torch.zeros(1, 16, dtype=torch.int64))
    assert not torch._dynamo.utils.counters["stats"], "hooks inside of blocks would not see this"
    assert describe_pieces(plan, config.compile) == (
        "compiled by aot_eager, in one graph each: 3 x layers.*.attention, 3 x layers.*.feed_forward; "
        "not compiled: FSDP2 units of precision.rules.0"
    )


def _check_loss() -> None:
    config = CompileConfig(enable=True, backend="aot_eager", components=("loss",))
    targets = torch.tensor([3, -100, 0])
    for chunks, graphs in ((1, 1), (2, 4)):  # of a chunk: forward and backward, in two sizes
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        results = []
        for compiled in (partial(compile_loss, config=config), lambda function: function):
            loss = CrossEntropy(LossConfig(chunks=chunks, z_loss=0.1, label_smoothing=0.1), compiled=compiled)
            logits = torch.randn(3, 13, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
            sums = loss.sums(logits, targets)
            sums[0].backward()
            results.append({"sums": sums.detach(), "gradient": logits.grad})
        assert_equal(*results)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def _check_cost() -> None:
    """Check that seconds of compilation, including those of backward, are counted, and that hooks are removed."""
    torch._dynamo.reset()
    double = torch.compile(lambda x: 2 * x, backend="aot_eager")
    with compile_time() as cost:
        double(torch.ones(2))
        assert cost.take() > 0
        double(torch.ones(2))
        assert cost.take() == 0
    torch._dynamo.reset()
    double(torch.ones(2))
    assert cost.take() == 0


@sampled("names", list(CASES), 5)
def test_compiled_blocks_give_the_same_results_in_few_graphs(names: tuple[str, ...]) -> None:
    found = run_ranks(compiled_and_not, 2, names, timeout=300)[0]
    assert {name: graphs for name, (_, graphs) in found.items()} == {name: CASES[name][1] for name in names}
    assert found["budget"][0] < 0.8 * found["whole"][0]


def test_graphs_of_shapes_and_losses_and_errors_for_code_without_a_graph() -> None:
    run_ranks(check_graphs, 1, timeout=300)
