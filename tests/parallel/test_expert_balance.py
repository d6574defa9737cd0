"""Mixtures of experts: a step's losses, gradients, loads and selection biases do not depend on the division of work."""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.tensors import assert_equal, full_state
from tests.train.jobs import TINY_ARGS, TINY_EXPERTS, run_job, run_job_until, step_and_report, this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import UserError
from titan_launch.core.observer import Observer
from titan_launch.distributed.mesh import build_mesh
from titan_launch.distributed.ring_attention_on_cpu import ring_attention_on_cpu
from titan_launch.models.build import build_model
from titan_launch.models.decoder.args import DecoderArgs
from titan_launch.models.decoder.mixture_of_experts import ContextGroup, balance_losses, choose, z_losses
from titan_launch.models.decoder.module import Decoder
from titan_launch.models.decoder.table_args import ExpertArgs
from titan_launch.parallel.expert_balance import prepare_experts
from titan_launch.plan.layout import plan_layout
from titan_launch.train.build import build_run
from titan_launch.train.loop import due_now, report, train_one_step
from titan_launch.train.model import plan_precision

STEPS = 3


def moe_job(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a job that trains 8 experts in the second and third layer, with everything that balances them."""
    args = {"n_layers": 3, "experts": TINY_EXPERTS, **sections.pop("args", {})}
    # If a gradient is almost 0, the sign of its rounding error decides the sign of Adam's update.
    return tiny_job(folder, model={"args": args}, **{"optimizer": {"lr": 1e-2, "eps": 1e-5}, **sections})


Trained = tuple[list[dict[str, float]], dict[str, Tensor]]
"""The metrics of all steps, and the selection biases at the end, by name."""


def train(jobs: list[dict[str, Any]]) -> list[Trained]:
    """Train the jobs."""
    return [train_one(job) for job in jobs]


def train_one(job: dict[str, Any]) -> Trained:
    with ExitStack() as stack:
        if "context_parallel_degree" in job.get("parallelism", ()):
            stack.enter_context(ring_attention_on_cpu())
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        reports = [step_and_report(run) for _ in range(STEPS)]
        return reports, biases_of(run.model)


def biases_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("selection_bias")}


def divided_jobs(folder: Path) -> list[dict[str, Any]]:
    """Return jobs on two ranks: with shards, replicas, a pipeline and divided sequences."""
    return [
        moe_job(
            folder / "shards",
            training={"global_batch_size": 4, "local_batch_size": 1},
            gradient_accumulation={"mode": "deferred"},
            activation_checkpoint={"mode": "full"},
        ),
        moe_job(
            folder / "replicas",
            parallelism={"data_parallel_replicate_degree": 2},
            gradient_accumulation={"mode": "deferred_all_reduce"},
            activation_checkpoint={"mode": "selective"},
        ),
        moe_job(folder / "pipeline", parallelism={"pipeline_parallel_degree": 2}),
        moe_job(folder / "context", parallelism={"context_parallel_degree": 2}),
    ]


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_microbatches_modes_and_checkpointing_do_not_change_a_step(every: int, tmp_path: Path) -> None:
    """Shards and a pipeline, or all divisions."""
    alone = moe_job(tmp_path / "alone", training={"global_batch_size": 4, "local_batch_size": 4})
    (((expected, expected_biases),),) = run_ranks(train, 1, [alone])
    others = [trained for jobs in run_ranks(train, 2, divided_jobs(tmp_path)[::every]) for trained in jobs]
    experts = [tag for tag in expected[0] if tag.startswith("experts/")]
    assert len(experts) == 2 + 3 * 2
    for measured, biases in others:
        assert len(biases) in (1, 2)  # a pipeline rank has a part of the layers
        for name, bias in biases.items():
            assert torch.equal(bias, expected_biases[name]), name
        for step, reference in zip(measured, expected, strict=True):
            for tag in ("train/loss", "train/grad_norm", *experts):
                assert step[tag] == pytest.approx(reference[tag], rel=1e-5), tag
    for bias in expected_biases.values():
        assert set((bias / 0.05).round(decimals=4).tolist()) <= set(range(-STEPS, STEPS + 1)) and bias.any()
    # 2 of 8 experts for each token, so the largest load is between the mean and 4 times the mean
    assert all(1 < step["experts/load_max_over_mean/layers.1.moe"] < 4 for step in expected)
    assert all(0 < step["experts/entropy/layers.2.moe"] < 1 for step in expected)
    assert 2 * 0.5 < expected[0]["experts/balance_loss"] < 2  # two layers, and at least the weight in each


def part_of_sequence(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    group = ContextGroup(dist.group.WORLD.group_name, dist.get_world_size())
    own = logits.chunk(group.size, dim=1)[dist.get_rank()].clone().requires_grad_()
    choice = choose(own, ExpertArgs(num_experts=8, top_k=2, hidden_dim=4, score="sigmoid"))
    balance, z = balance_losses(choice, group), z_losses(own, group)
    (gradient,) = torch.autograd.grad((balance + z).sum(), own)
    return balance.detach(), z.detach(), gradient


def test_losses_of_divided_sequences_add_up(tmp_path: Path) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 12, 8)
    ((balance, z, gradient),) = run_ranks(part_of_sequence, 1, logits)
    parts = run_ranks(part_of_sequence, 2, logits)
    torch.testing.assert_close(sum(part[0] for part in parts), balance)
    torch.testing.assert_close(sum(part[1] for part in parts), z)
    torch.testing.assert_close(torch.cat([part[2] for part in parts], dim=1), gradient)


STEADY = {"kind": "warmup_stable_decay", "decay_ratio": 0.0}
"""A learning rate that does not depend on the number of steps."""


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"training": {"steps": 2}, "lr_scheduler": STEADY}
    job = moe_job(tmp_path / "resumed", checkpoint={"enable": True, "interval": 1}, **sections)
    run_ranks(run_job_until, 2, job, 1)
    resumed, _ = run_ranks(run_job, 2, job)
    expected, _ = run_ranks(run_job, 2, moe_job(tmp_path / "uninterrupted", **sections))
    assert_equal(resumed, expected)
    assert resumed["layers.2.moe.selection_bias"].any() and not resumed["layers.2.moe.load"].any()


def poisoned_and_abandoned(job: dict[str, Any]) -> None:
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        factor = 1.0
        embedding = run.model.get_submodule("tok_embeddings")
        embedding.register_forward_hook(lambda _, args, output: output * factor)
        train_one_step(run)
        step_and_report(run)
        before = full_state(run.model)
        assert before["layers.2.moe.selection_bias"].any()

        factor = math.inf if run.ranks.is_rank_0 else 1.0
        result = train_one_step(run)
        assert result.is_skipped == 1
        assert_equal(full_state(run.model), before)
        factor = 1.0
        run.step.guard.pop_skipped_steps(run.progress.step)

        class Interrupt(Observer):
            def before_update(self) -> None:
                assert run.model.get_buffer("layers.1.moe.load").sum() == 2 * 16 * 2  # samples, tokens, choices
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run.step([next(run.batches.train) for _ in range(run.job.layout.num_microbatches)], [Interrupt()])
        run.step.parameters_changed()
        run.optimizer.zero_grad()
        assert_equal(full_state(run.model), before)
        scalars = report(run, due_now(run))  # the window has no step that was trained
        assert [scalars[f"experts/{tag}"] for tag in ("balance_loss", "z_loss", "entropy/layers.1.moe")] == [0, 0, 0]


@pytest.mark.slow
def test_a_skipped_or_abandoned_step_moves_nothing(tmp_path: Path) -> None:
    sections = {"debug": {"on_nonfinite": "skip"}, "activation_checkpoint": {"mode": "full"}}
    run_ranks(poisoned_and_abandoned, 2, moe_job(tmp_path, **sections))


class NoisyRouter(nn.Linear):
    """A router with noise from a generator of its own, which activation checkpointing cannot set back."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(8, generator=_NOISE)


_NOISE = torch.Generator().manual_seed(0)


class NoisyDecoder(Decoder):
    """A decoder whose last layer has a noisy router."""

    def __init__(self) -> None:
        experts = {**TINY_EXPERTS, "first_dense_layers": 0}
        super().__init__(DecoderArgs.model_validate({**TINY_ARGS, "experts": experts}), max_seq_len=16)
        layer = self.get_submodule("layers.1.moe")
        layer.router = NoisyRouter(32, 8, bias=False)

    def reset_parameters(self) -> None:
        """Keep PyTorch's values."""


def audited(folder: Path) -> None:
    """Audit a step. PyTorch does not notice that an expert has other rows in the second forward."""
    model = {"name": f"{__name__}:NoisyDecoder", "blocks": ["layers.*"]}
    job = {**tiny_job(folder, activation_checkpoint={"mode": "full"}, debug={"audit_precision": True}), "model": model}
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        with pytest.raises(UserError, match=r"layers\.1\.moe: in 2 of 2 microbatches, the second forward") as raised:
            train_one_step(run)
        assert "layers.0" not in str(raised.value)


def test_the_audit_names_a_layer_whose_second_forward_chooses_other_experts(tmp_path: Path) -> None:
    run_ranks(audited, 2, tmp_path)


class _Texts(logging.Handler):
    """A handler that keeps the warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def warnings_of(jobs: list[dict[str, Any]]) -> list[list[str]]:
    """Train the jobs, and return the warnings of each, and then those of preparing the last model for a GPU. The router
    of layers.2.moe always chooses the same experts."""
    found = []
    for job in jobs:
        handler = _Texts()
        logging.getLogger("titan_launch").addHandler(handler)
        with ExitStack() as stack:
            run = build_run(JobConfig.model_validate(job), this_rank(), stack)
            bias = run.model.get_buffer("layers.2.moe.selection_bias")
            bias.copy_(torch.arange(8.0))
            for _ in range(2):
                step_and_report(run)
        logging.getLogger("titan_launch").removeHandler(handler)
        found.append(handler.texts)
    handler = _Texts()
    logging.getLogger("titan_launch").addHandler(handler)
    for hidden_dim, lora in ((16, {}), (20, {}), (16, {"targets": ["layers.*.moe.experts"], "rank": 4})):
        job["model"]["args"]["experts"]["hidden_dim"] = hidden_dim
        job["lora"] = lora
        config = JobConfig.model_validate(job)
        built = build_model(config.model, config.training.seq_len, lora=config.lora)
        mesh = build_mesh(plan_layout(config.parallelism, config.training, 1), "cpu")
        prepare_experts(built.module, plan_precision(config, built), mesh, "cuda")
    return [*found, handler.texts]


def test_warnings_of_collapsed_layers_and_of_routers_in_bfloat16(tmp_path: Path) -> None:
    rule = {"match": "layers.*.moe.router", "param_dtype": "float32", "output_dtype": "float32"}
    jobs = [
        moe_job(
            tmp_path / str(seq_len),
            training={"seq_len": seq_len, "local_batch_size": 1, "global_batch_size": 4},
            precision={"param_dtype": "bfloat16", "rules": rules},
        )
        # in 16 tokens of 4 samples, the mean load is too small
        for seq_len, rules in ((16, []), (8, [{**rule, "output_dtype": None}]), (64, [rule]))
    ]
    reduced, rounded, collapsed, unaligned = run_ranks(warnings_of, 1, jobs)[0]
    for texts in (reduced, rounded):
        assert [text.partition(". ")[0] for text in texts] == [
            "router precision: the logits of layers.1.moe.router, layers.2.moe.router are bfloat16"
        ]
    (text,) = (text for text in collapsed if "layers.2.moe" in text)  # once, although the second step has the same load
    assert text.startswith(
        "step 1: the load of the experts of layers.2.moe has collapsed: 75% of the experts got less than 1% of the "
        "mean load since the last report, and the largest load is 4.0 times the mean."
    )
    text, of_adapters = unaligned  # a row of 20 values in bfloat16 has 40 bytes
    assert "but a rank has the widths 32 and 20 in layers.1.moe. The experts of layers.1.moe, layers.2.moe are" in text
    assert "adapters of the experts of layers.1.moe, layers.2.moe are computed one after another" in of_adapters
