"""A loss that the model computes itself has the gradient of one big batch in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import starmap
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.tensors import full_state
from tests.train.jobs import this_rank
from tests.train.test_step import GLOBAL_BATCH, MAX_NORM, SEQ_LEN, batches, relative_error
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.run import DebugConfig
from titan_launch.core.errors import ConfigError
from titan_launch.data.sources import Batch
from titan_launch.distributed.mesh import build_mesh
from titan_launch.loss.build import build_loss
from titan_launch.loss.model_loss import ModelLoss
from titan_launch.models.init import allocate, initialize
from titan_launch.optim.registry import build_optimizer
from titan_launch.parallel.fsdp import Accumulation
from titan_launch.plan.layout import plan_layout
from titan_launch.train.health.step_guard import StepGuard
from titan_launch.train.model import build_on_all_ranks, plan_precision, shard_model
from titan_launch.train.step import MicrobatchesInTurn, TrainStep, Update, validate

CPU = torch.device("cpu")
SEED = 5


class WithLabels(nn.Module):
    """A model that returns its loss in one of several forms."""

    def __init__(self, returns: str, reduction: str = "mean"):
        super().__init__()
        self.embedding = nn.Embedding(61, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.output = nn.Linear(16, 61)
        self.returns, self.reduction = returns, reduction

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        logits = self.output(x)
        if labels is None:
            return logits
        wanted, of = (labels[:, 1:], logits[:, :-1]) if self.returns == "shifted" else (labels, logits)
        loss = F.cross_entropy(of.flatten(0, 1), wanted.flatten(), reduction=self.reduction)
        return {"dict": {"loss": loss, "logits": logits}, "alone": loss}.get(self.returns, (loss, logits))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, num_key_value_heads=2, **shape))


CASES: dict[str, tuple[str, Callable[..., nn.Module], dict[str, str]]] = {
    "transformers": ("mean", llama, {}),
    "dict": ("mean", WithLabels, {"returns": "dict"}),
    "tuple": ("sum", WithLabels, {"returns": "tuple", "reduction": "sum"}),
    "alone": ("mean", WithLabels, {"returns": "alone"}),
}


MODES = {"immediate": 1, "deferred": 1, "deferred_all_reduce": 2}
"""The number of replicas, by gradient accumulation mode."""

TRAINED = (
    ("transformers", "immediate"),
    ("transformers", "deferred_all_reduce"),
    ("dict", "deferred"),
    ("tuple", "immediate"),
    ("tuple", "deferred_all_reduce"),
    ("alone", "deferred"),
)
"""Pairs of a case and a mode: each case, each mode, and both reductions in two modes."""


def train_with_own_loss() -> dict[tuple[str, str], tuple[dict[str, Tensor], list[float], dict[str, float]]]:
    """Train pairs of a case and a mode on this rank. Return full parameters, gradient norms and the metrics of
    validation."""
    ranks, results = this_rank(), {}
    for name, mode in TRAINED:
        (reduction, factory, args), replicas = CASES[name], MODES[mode]
        config = JobConfig.model_validate(
            {
                "model": {"name": f"{__name__}:{factory.__name__}", "args": args, "loss": reduction},
                "training": {
                    "seq_len": SEQ_LEN,
                    "local_batch_size": 2,
                    "global_batch_size": GLOBAL_BATCH,
                    "seed": SEED,
                },
                "precision": {"param_dtype": "float32"},
                "gradient_accumulation": {"mode": mode},
                "parallelism": {"data_parallel_replicate_degree": replicas},
                "optimizer": {"name": "SGD", "lr": 0.5, "weight_decay": 0.0},
            }
        )
        built = build_on_all_ranks(config, ranks)
        layout = plan_layout(config.parallelism, config.training, ranks.world_size)
        mesh = build_mesh(layout, "cpu")
        plan = plan_precision(config, built)
        model = shard_model(config, built, plan, mesh)
        allocate(model, CPU)
        initialize(model, built.initializer, SEED, CPU)
        optimizer = build_optimizer(model, config.optimizer)
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.lr
        strategy, guard = Accumulation(config.gradient_accumulation), StepGuard(DebugConfig(), CPU)
        loss = build_loss(model, plan, config, 61)
        assert isinstance(loss, ModelLoss)
        gradients, update = MicrobatchesInTurn(model, strategy, CPU), Update(optimizer, guard, MAX_NORM)
        step = TrainStep(model, gradients, loss, update, mesh, CPU)
        norms: list[float] = []
        microbatches: list[Batch] = []
        for inputs, targets in zip(*batches(), strict=True):
            rounds = [t.unflatten(0, (layout.num_microbatches, 2, -1))[:, ranks.rank] for t in (inputs, targets)]
            microbatches = list(starmap(Batch, zip(*rounds, strict=True)))
            norms.append(step(microbatches).grad_norm.item())
        metrics = validate(model, [("", batch) for batch in microbatches], CPU, loss)
        results[name, mode] = full_state(model), norms, metrics
    return results


def train_plainly(factory: Callable[..., nn.Module], args: dict[str, str]) -> tuple[dict[str, Tensor], list[float]]:
    torch.manual_seed(SEED)
    model, norms = factory(**args), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for inputs, targets in zip(*batches(), strict=True):
        outputs = model(inputs)
        F.cross_entropy(getattr(outputs, "logits", outputs).flatten(0, 1), targets.flatten()).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return full_state(model), norms


def test_the_gradient_is_that_of_one_big_batch() -> None:
    """Microbatches have unequal numbers of valid targets, and one has none."""
    pytest.importorskip("transformers")
    first, second = run_ranks(train_with_own_loss, 2)
    plain = {name: train_plainly(factory, args) for name, (_, factory, args) in CASES.items()}
    for name, mode in TRAINED:
        expected, expected_norms = plain[name]
        parameters, norms, metrics = first[name, mode]
        assert relative_error(parameters, expected) < 1e-6, (name, mode)
        assert norms == pytest.approx(expected_norms, rel=1e-6), (name, mode)
        assert metrics["validation/loss"] == second[name, mode][2]["validation/loss"] < 8, (name, mode)
        assert (metrics["validation/accuracy"] >= 0) == (name != "alone"), (name, mode)


def test_a_loss_that_shifts_the_labels_again_is_refused() -> None:
    torch.manual_seed(0)
    inputs, targets = (tensor[0] for tensor in batches())

    def compute(model: nn.Module, loss: ModelLoss) -> Tensor:
        return loss.sums(loss.select(model(inputs, targets), targets), targets)

    compute(WithLabels("tuple"), ModelLoss("mean", "tokens"))
    model, loss = WithLabels("shifted"), ModelLoss("mean", "tokens")
    nn.init.zeros_(model.output.weight)
    nn.init.zeros_(model.output.bias)
    compute(model, loss)  # all logits are equal, so both alignments have the same loss
    nn.init.normal_(model.output.weight)
    with pytest.raises(ConfigError, match="forward shifts the labels by one token, but the targets are shifted"):
        compute(model, loss)
