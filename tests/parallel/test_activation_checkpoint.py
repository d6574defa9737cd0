"""Activation checkpointing changes the tensors saved for backward, and no bit of the results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.sampling import rest_is_slow
from tests.tensors import Operations, assert_equal, cross_entropy_sum, full_state, full_tensor
from tests.train.jobs import TINY_ARGS, run_job, run_job_until, sharded_model, this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig
from titan_launch.models.decoder import attention, mixture_of_experts
from titan_launch.models.decoder.mixture_of_experts import MixtureOfExperts, grouped_product
from titan_launch.models.decoder.table_args import ExpertArgs
from titan_launch.parallel import activation_checkpoint
from titan_launch.parallel.activation_checkpoint import SAVED_OPS, checkpoint_activations
from titan_launch.train.build import build_run
from titan_launch.train.loop import fit

NORM_CLASSES = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "batchnorm": "BatchNorm", "conv": "BatchNorm"}
FULL = {"mode": "full"}
OPS = {"mode": "selective", "selective_ac_option": "op"}
EVERY_SECOND = {"mode": "selective", "selective_ac_option": 2}
PARTS = {"mode": "selective", "modules": ["layers.*.attention", "layers.*.*_norm"]}
CONV_PARTS = {"mode": "full", "modules": ["blocks.*.bn", "blocks.1"]}


def make_job(norm: str, checkpointing: dict[str, Any], **sections: dict[str, Any]) -> JobConfig:
    """Return a job with a Llama that has this norm, or with the convolutional network. `sections` override fp32."""
    llama = {"args": {**TINY_ARGS, "norm": norm}}
    job: dict[str, Any] = {
        "model": {"name": "tests.parallel.conv_model:ConvNet"} if norm == "conv" else llama,
        "training": {"seq_len": 16},
        "precision": {"param_dtype": "float32"},
        "activation_checkpoint": checkpointing,
    }
    return JobConfig.model_validate({**job, **sections})


def train(model: nn.Module, num_microbatches: int = 2) -> dict[str, Tensor]:
    """Return losses, full gradients and buffers of some microbatches."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = {}
    for index in range(num_microbatches):
        tokens = torch.randint(0, 61, (2, 16), generator=generator)
        loss = cross_entropy_sum(model(tokens), tokens)
        loss.backward()
        found[f"loss {index}"] = loss.detach()
    found |= {f"{name}.grad": full_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return found | full_state(model)


def assert_counted(state: dict[str, Tensor], num_forwards: int) -> None:
    counts = {int(tensor) for name, tensor in state.items() if "num_batches_tracked" in name}
    assert counts <= {num_forwards}, "the second forward of a checkpointed block has updated the running statistics"


def precisions(norm: str) -> list[dict[str, Any]]:
    """Return sections for fp32, and for bf16 with fp32 norms: in one unit, and in units that every block's backward
    all-gathers."""
    rule = {"type": NORM_CLASSES[norm], "param_dtype": "float32"}
    return [
        {},
        {"precision": {"rules": [rule]}},
        {
            "precision": {"rules": [{**rule, "unit_per": "module"}]},
            "parallelism": {"fsdp_reshard_after_forward": "always"},
        },
    ]


def checkpointed_and_not(norm: str, statistics: str) -> int:
    """Compare each activation checkpointing mode with none. Return the number of comparisons.

    All modes are compared in the last precision, in which backward all-gathers the parameters of the second forward.
    With running statistics, which a second forward could change, the other precisions are compared in half of them.
    """
    compared, modes = 0, (FULL, OPS, EVERY_SECOND, CONV_PARTS if norm == "conv" else PARTS)
    first, second, last = precisions(norm)
    others = [(first, modes[::2]), (second, modes[1::2])] if (norm, statistics) == ("batchnorm", "local") else []
    for sections, own_modes in (*others, (last, modes)):
        sections = {**sections, "batchnorm": {"statistics": statistics}}
        expected = train(sharded_model(make_job(norm, {}, **sections), 16))
        for checkpointing in own_modes:
            found = train(sharded_model(make_job(norm, checkpointing, **sections), 16))
            assert_counted(found, num_forwards=2)
            assert_equal(found, expected)
            compared += 1
    return compared


@pytest.mark.parametrize(
    ("norm", "statistics"),
    rest_is_slow(
        [
            ("batchnorm", "local"),
            ("rmsnorm", "local"),
            ("layernorm", "local"),
            ("conv", "synchronized"),
            ("conv", "local"),
            ("batchnorm", "synchronized"),
        ],
        6,
    ),
)
def test_activation_checkpointing_changes_no_bit(norm: str, statistics: str) -> None:
    compared = 8 if (norm, statistics) == ("batchnorm", "local") else 4
    assert run_ranks(checkpointed_and_not, 2, norm, statistics) == [compared] * 2


def interrupted_and_not(folder: Path) -> None:
    """Compare a run that continues without activation checkpointing after one with it, and a run that never has it."""
    sections: dict[str, Any] = {
        "model": {"args": {"norm": "batchnorm"}},
        "batchnorm": {"statistics": "synchronized"},
        "training": {"steps": 2},
        "checkpoint": {"enable": True, "interval": 1},
    }
    run_job_until(tiny_job(folder, **sections, activation_checkpoint=FULL), 1)
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(tiny_job(folder, **sections)), this_rank(), stack)
        assert run.first_step == 2
        fit(run)
    assert_equal(full_state(run.model), run_job(tiny_job(folder, **sections, job={"name": "plain"})))


@pytest.mark.slow
def test_a_checkpoint_loads_with_another_activation_checkpointing_mode(tmp_path: Path) -> None:
    run_ranks(interrupted_and_not, 2, tmp_path)


def backward_operations(norm: str) -> list[Counter[str]]:
    """Count the operations of backward without activation checkpointing, with `full`, every second block, and `op`."""
    counts = []
    for checkpointing in ({}, FULL, EVERY_SECOND, OPS):
        model = sharded_model(make_job(norm, checkpointing, batchnorm={"statistics": "synchronized"}), 16)
        tokens = torch.zeros(1, 16, dtype=torch.int64)
        loss = cross_entropy_sum(model(tokens), tokens)
        with Operations() as operations:
            loss.backward()
        counts.append(operations.counts)
    return counts


@pytest.mark.parametrize(
    ("norm", "blocks", "per_block"),
    [
        (
            "batchnorm",
            2,
            {
                "_scaled_dot_product_flash_attention_for_cpu": (1, 0),
                "_c10d_functional.all_gather_into_tensor": (2, 0),
                "mm": (6, 3),  # of 7: backward does not need the result of the last one
            },
        ),
        ("conv", 3, {"convolution": (1, 0)}),
    ],
)
def test_backward_repeats_the_operations_of_checkpointed_modules(
    norm: str, blocks: int, per_block: dict[str, tuple[int, int]]
) -> None:
    none, full, every_second, op = run_ranks(backward_operations, 1, norm)[0]
    for operation, (in_full, in_op) in per_block.items():
        assert full[operation] - none[operation] == in_full * blocks
        assert every_second[operation] - none[operation] == in_full * (blocks // 2)
        assert op[operation] - none[operation] == in_op * blocks


class OperationsAndGraphs(Operations):
    """Counts compiled graphs too. (Under a mode without this method, compiled functions run eagerly.)"""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def by_operation(module: nn.Module) -> nn.Module:
    """Return a copy whose forward saves the results of `SAVED_OPS`."""
    wrapped = nn.Sequential(deepcopy(module))
    checkpoint_activations(wrapped, ["0"], ActivationCheckpointConfig(mode="selective"))
    return wrapped


def assert_same_gradients(module: nn.Module, again: nn.Module, *inputs: Tensor) -> list[Counter[str]]:
    """Compare results and gradients, and return the operations of each backward."""
    results, counts = [], []
    for each in (module, again):
        given = [x.clone().requires_grad_() for x in inputs]
        torch.manual_seed(0)
        output = each(*given)
        with OperationsAndGraphs() as operations:
            output.float().square().sum().backward()
        results.append({str(index): t for index, t in enumerate([output, *(p.grad for p in each.parameters())])})
        results[-1] |= {f"input {index}": x.grad for index, x in enumerate(given)}
        counts.append(operations.counts)
    assert_equal(*results)
    return counts


@pytest.mark.parametrize("num_groups", [1, 4])
def test_experts_are_chosen_and_computed_once(num_groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        mixture_of_experts, "expert_product", lambda rows, counts, *weights: grouped_product(counts)
    )  # as on CUDA
    groups = {"num_groups": num_groups, "top_k_groups": 2} if num_groups > 1 else {}
    args = ExpertArgs(num_experts=8, top_k=2, hidden_dim=16, expert_bias=True, **groups)
    layer = MixtureOfExperts(16, args, F.silu).bfloat16()
    none, op = assert_same_gradients(layer, by_operation(layer), torch.randn(2, 12, 16, dtype=torch.bfloat16))
    assert op["_grouped_mm"] == none["_grouped_mm"] and op["topk"] == none["topk"] == 0


class Halved(nn.Module):
    """It changes the values of `topk` in place, as routers of `transformers` do."""

    def forward(self, x: Tensor) -> Tensor:
        values, indices = x.topk(3, dim=1, sorted=False)
        values /= 2
        return (x.gather(1, indices) * values).exp()


def test_the_values_of_topk_may_change_in_place() -> None:
    none, op = assert_same_gradients(Halved(), by_operation(Halved()), torch.randn(4, 9, 5))
    assert op["topk"] == none["topk"] == 0


@torch.library.custom_op("titan_launch_tests::dropped", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def dropped(x: Tensor, dropout_p: float) -> Tensor:
    """A stand-in for the kernels of attention, which have dropout on GPUs only."""
    return x * F.dropout(torch.ones_like(x), dropout_p)


def backward_of_dropped(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
    x, result = context.saved_tensors
    return gradient * result / x, None


dropped.register_autograd(
    backward_of_dropped, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output)
)


class Dropping(nn.Module):
    """A block whose stand-in for attention has dropout, followed by a second dropout."""

    def __init__(self, dropout_p: float):
        super().__init__()
        self.dropout_p = dropout_p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(dropped(x.exp(), self.dropout_p)).exp()


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_attention_with_dropout_runs_again_so_that_later_dropout_is_the_same(
    dropout_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = torch.ops.titan_launch_tests.dropped.default
    monkeypatch.setattr(activation_checkpoint, "SAVED_OPS", SAVED_OPS | {op})
    module = Dropping(dropout_p)
    _, repeated = assert_same_gradients(module, by_operation(module), torch.randn(8, 16))
    assert repeated["titan_launch_tests.dropped"] == (dropout_p > 0)


class Compiled(nn.Module):
    def __init__(self, attend: Callable[..., Tensor]):
        super().__init__()
        self.attend = attend
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.project(x).sin(), x.cos())


@pytest.mark.slow
def test_a_compiled_kernel_of_attention_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention has no backward on a CPU, so another function is compiled in its place."""
    monkeypatch.setattr(attention, "flex_attention", lambda: lambda q, k: torch.tanh(q @ k.mT) @ k)
    module = Compiled(attention._compiled_flex_attention.__wrapped__())
    none, op = assert_same_gradients(module, by_operation(module), torch.randn(2, 6, 8))
    assert op["inductor_compiled_code"] == none["inductor_compiled_code"] == 1


def test_the_docs_name_the_saved_operations() -> None:
    page = (Path(__file__).parents[2] / "docs/explanation/activation_checkpointing.md").read_text()
    section = page.partition("## Operations that `op` saves")[2].partition("\n## ")[0]
    patterns = [code for code in re.findall("`([^` ]+)`", section) if "." in code]
    names = [f"{op.namespace}.{op.name().rpartition('::')[2]}" for op in SAVED_OPS]
    assert [name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in names)] == []
