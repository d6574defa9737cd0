"""BatchNorm over ranks: synchronized statistics equal one process on the whole batch, and running statistics are
pooled."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.sampling import rest_is_slow
from tests.tensors import Operations, assert_equal, cross_entropy_sum, full_state, full_tensor
from tests.train.jobs import TINY_ARGS, read_metrics, run_job, sharded_model, this_mesh, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.precision import BatchNormConfig
from titan_launch.core.errors import ConfigError
from titan_launch.models.build import build_model
from titan_launch.models.factory import HostBuild
from titan_launch.models.init import initialize
from titan_launch.parallel.batchnorm import (
    Divergence,
    RunningStatistics,
    check_batch_norms,
    prepare_batch_norms,
)
from titan_launch.parallel.synchronized_batchnorm import synchronize
from titan_launch.plan.hardware import hardware_of
from titan_launch.plan.layout import plan_layout
from titan_launch.train.model import plan_precision
from titan_launch.train.output import _later_metrics
from titan_launch.train.resolve_job import ResolvedJob
from titan_launch.train.run_folder.attempt import Attempt

SYNCHRONIZED = BatchNormConfig(statistics="synchronized")
CPU = torch.device("cpu")


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest value or 1e-4. The gradient of a bias before attention is
    0 except for rounding."""
    if expected.numel() == 0:
        return 0.0
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-4))


# Layers alone


class ChannelsLast(nn.BatchNorm1d):
    """A user's subclass whose last axis is the channels."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, ..., channels) to the same shape."""
        return super().forward(x.movedim(-1, 1)).movedim(1, -1)


def layers() -> Iterator[tuple[nn.Module, Tensor]]:
    """Return layers, and the whole batch of each: 9 samples of 5 channels, whose means are far larger than their
    deviations."""
    generator = torch.Generator().manual_seed(0)
    flat, long, square = (torch.randn(9, 5, *axes, generator=generator) + 100 for axes in ((), (7,), (4, 3)))
    yield nn.BatchNorm1d(5), flat
    yield nn.BatchNorm1d(5, momentum=None), long
    yield nn.BatchNorm2d(5, affine=False), square
    yield nn.BatchNorm2d(5, track_running_stats=False), square
    yield nn.BatchNorm3d(5).requires_grad_(False), square.unsqueeze(-1)
    yield ChannelsLast(5), long.movedim(1, -1)
    yield nn.BatchNorm2d(5), square.bfloat16()
    yield nn.BatchNorm1d(5).double(), flat.double()


def forward_and_backward(norm: nn.Module, batch: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x = batch.clone().requires_grad_()
    for _ in range(2):
        y = norm(x)
    assert y.dtype == x.dtype
    y.backward(grad)
    gradients = {f"{name}.grad": p.grad for name, p in norm.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x.grad": x.grad, **gradients, **dict(norm.named_buffers())}  # type: ignore[dict-item]


def layers_in_parts(sizes: list[int]) -> list[dict[str, float]]:
    """Return the errors of synchronized layers on parts of a batch, compared with PyTorch's layers on the whole
    batch."""
    errors = []
    group, rank = this_mesh().statistics_group(60), dist.get_rank()
    for (alone, batch), (together, _) in zip(layers(), layers(), strict=True):
        generator = torch.Generator().manual_seed(1)
        grad = torch.randn(batch.shape, generator=generator).to(batch.dtype)
        for norm in (alone, together):
            for parameter in norm.parameters():
                nn.init.normal_(parameter, mean=1, generator=torch.Generator().manual_seed(2))
        synchronize([together], group)  # type: ignore[list-item]
        expected = forward_and_backward(alone, batch, grad)
        part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        found = forward_and_backward(together, batch[part], grad[part])
        for name, tensor in found.items():
            if name in ("weight.grad", "bias.grad"):
                dist.all_reduce(tensor)
        expected |= {name: expected[name][part] for name in ("y", "x.grad")}
        assert found.keys() == expected.keys()
        found["evaluated"], expected["evaluated"] = (norm.eval()(batch).detach() for norm in (together, alone))
        errors.append({name: error(found[name], expected[name]) for name in found})
    return errors


@pytest.mark.parametrize("sizes", [[9], [0, 2, 7]], ids=str)
def test_a_synchronized_layer_equals_one_process_on_the_whole_batch(sizes: list[int]) -> None:
    for errors in run_ranks(layers_in_parts, len(sizes), sizes):
        *others, reduced, exact = errors
        assert all(value < 2e-5 for layer in others for value in layer.values()), others
        assert all(value < 1e-2 for value in reduced.values()), reduced  # y and x.grad are bf16
        assert max(reduced["running_mean"], reduced["running_var"]) < 1e-5, reduced
        assert all(value < 1e-12 for value in exact.values()), exact


class Whitened(nn.BatchNorm1d):
    """A user's subclass that replaces PyTorch's forward."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels) to the same shape."""
        return (x - x.mean(0)) / x.std(0)


def test_layers_that_compute_their_own_statistics_are_refused_by_name() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), Whitened(3), nn.SyncBatchNorm(3))
    check_batch_norms(model, BatchNormConfig())
    with pytest.raises(ConfigError) as error:
        check_batch_norms(model, SYNCHRONIZED)
    message = str(error.value)
    ours, torchs = message.splitlines()
    assert ours == (
        "batchnorm.statistics: 1 is a Whitened, whose forward does not call super().forward(...), so its statistics "
        'cannot be synchronized; add this call, or set batchnorm.statistics = "local"'
    )
    assert "2 is a SyncBatchNorm" in torchs


# Whole models


MODELS = {
    "llama": {"args": {**TINY_ARGS, "norm": "batchnorm"}},
    "conv": {"name": "tests.parallel.conv_model:ConvNet"},
}
CHECKPOINTING: list[dict[str, Any]] = [{"mode": "none"}, {"mode": "full"}]
"""The modes of this file. `test_activation_checkpoint.py` shows that the other modes are bitwise equal."""


def synchronized_job(model: str, replicate: int, checkpointing: dict[str, Any]) -> JobConfig:
    return JobConfig.model_validate(
        {
            "model": MODELS[model],
            "training": {"seq_len": 16},
            "precision": {"param_dtype": "float32"},
            "parallelism": {"data_parallel_replicate_degree": replicate},
            "batchnorm": {"statistics": "synchronized"},
            "activation_checkpoint": checkpointing,
        }
    )


def train(model: nn.Module, batches: list[Tensor], num_targets: int) -> dict[str, Tensor]:
    """Take steps of gradient descent. Return the last gradients, and the parameters and buffers after the steps."""
    for tokens in batches:
        model.zero_grad()
        (cross_entropy_sum(model(tokens), tokens) / num_targets).backward()
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.grad  # type: ignore[operator]
    gradients = {f"{name}.grad": full_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return full_state(model) | gradients


def model_on_one_rank(config: JobConfig) -> nn.Module:
    """Return the model without FSDP2, with the same initial values."""
    built = build_model(config.model, 16, HostBuild(seed=0, free_bytes=2**40))
    built.module.to_empty(device=CPU)
    initialize(built.module, built.initializer, 0, CPU)
    return built.module


def errors_against_one_process(replicate: int) -> dict[str, float]:
    """Return the largest error of any tensor, by model and activation checkpointing mode."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 61, (8, 16), generator=generator) for _ in range(2)]
    parts = [batch.chunk(dist.get_world_size())[dist.get_rank()] for batch in batches]
    largest = {}
    for name in MODELS:
        expected = train(model_on_one_rank(synchronized_job(name, 1, {})), batches, batches[0].numel())
        for checkpointing in CHECKPOINTING:
            model = sharded_model(synchronized_job(name, replicate, checkpointing), 16)
            found = train(model, parts, batches[0].numel())
            assert found.keys() == expected.keys()
            largest[f"{name} {checkpointing}"] = max(error(found[key], expected[key]) for key in found)
    return largest


@pytest.mark.parametrize(("ranks", "replicate"), rest_is_slow([(2, 1), (1, 1), (4, 1), (4, 2)], 4))
def test_training_with_synchronized_statistics_equals_one_process_on_the_whole_batch(
    ranks: int, replicate: int
) -> None:
    for errors in run_ranks(errors_against_one_process, ranks, replicate):
        assert len(errors) == 4 and max(errors.values()) < 1e-5, errors


# Running statistics


def samples() -> Tensor:
    """Return a [rank, token, channel] tensor. Every rank has another distribution, far from 0."""
    data = torch.randn(4, 50, 3, generator=torch.Generator().manual_seed(0))
    moved = torch.tensor([1000.0, 1005.0, 997.0, 1001.0])[:, None, None]
    return data * torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None, None] + moved


def pooled() -> tuple[list[Tensor], Divergence | None, Divergence | None]:
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=1.0), nn.Linear(3, 5), nn.BatchNorm1d(5))
    model[0](samples()[dist.get_rank()])
    statistics = RunningStatistics(model)
    before, after = statistics.pool(), statistics.pool()
    return [model[i].get_buffer(f"running_{name}") for i in (0, 2) for name in ("mean", "var")], before, after


def test_pooled_statistics_are_those_of_the_data_of_all_ranks() -> None:
    ranks = run_ranks(pooled, 4)
    data = samples().double()
    # Each rank's running variance is the unbiased variance of its own 50 tokens.
    means, variances = data.mean(dim=1), data.var(dim=1)
    total = variances.mean(0) + means.var(dim=0, unbiased=False)
    for (mean, variance, other_mean, other_variance), before, after in ranks:
        torch.testing.assert_close(mean.double(), means.mean(0), rtol=1e-6, atol=0)
        torch.testing.assert_close(variance.double(), total, rtol=1e-4, atol=0)
        assert torch.equal(other_mean, torch.zeros(5)) and torch.equal(other_variance, torch.ones(5))
        assert before.mean == pytest.approx(float(((means - mean).abs() / total.sqrt()).max()), rel=1e-3)
        assert before.variance == pytest.approx(float(((variances - total).abs() / total).max()), rel=1e-3)
        assert max(after.mean, after.variance) < 1e-12
    assert all(torch.equal(a, b) for a, b in zip(ranks[0][0], ranks[3][0], strict=True))


def run_with_statistics(folder: Path, statistics: str) -> dict[str, Tensor]:
    """Run a job whose second step has a checkpoint and whose fourth step also has a validation. The second step has no
    other report."""
    return run_job(
        tiny_job(
            folder,
            job={"name": statistics},
            model={"args": {"norm": "batchnorm"}},
            batchnorm={"statistics": statistics},
            checkpoint={"enable": True, "interval": 2},
            validation={"freq": 4, "data": {"kind": "synthetic", "vocab_size": 61, "num_samples": 8, "seed": 1}},
            metrics={"log_freq": 100},
        )
    )


@pytest.mark.parametrize("statistics", ["local", "synchronized"])
def test_a_run_pools_once_a_step_and_reports_the_divergence_of_ranks(tmp_path: Path, statistics: str) -> None:
    one, other = run_ranks(run_with_statistics, 2, tmp_path, statistics)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    names = [f"batchnorm/running_{name}_divergence" for name in ("mean", "var")]
    reports = read_metrics(tmp_path, statistics)
    assert [report["step"] for report in reports if names[0] in report] == [2, 4]
    apart = [report[name] for report in reports if names[0] in report for name in names]
    assert all(value > 0.01 if statistics == "local" else value < 1e-6 for value in apart), apart


@pytest.mark.parametrize("saves_last", [True, False])
def test_the_dashboard_knows_the_divergence_of_the_last_step(saves_last: bool) -> None:
    sections: dict[str, Any] = {"model": {"args": {"norm": "batchnorm"}}, "checkpoint": {"save_last": saves_last}}
    config = JobConfig.model_validate(tiny_job(Path("unused"), **sections))
    layout = plan_layout(config.parallelism, config.training, 2)
    plan = plan_precision(config, build_model(config.model, 16))
    job = ResolvedJob(config, config, None, layout, hardware_of(config, 2, "cpu"), plan, Attempt())
    assert ("batchnorm/running_mean_divergence" in _later_metrics(job)) == saves_last


def norms_trained_on_nan(depth: int) -> tuple[nn.Module, RunningStatistics]:
    """Return norms in two dtypes after a forward on a batch that is not finite, and a copy of their earlier
    statistics."""
    others = nn.BatchNorm1d(3, momentum=None).double(), nn.InstanceNorm1d(3, track_running_stats=True)
    model = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(depth)), *others)
    statistics = RunningStatistics(model)
    for norm in model:
        norm(torch.randn(4, 3, 2, dtype=norm.running_mean.dtype))
    statistics.save()
    for norm in model:
        norm(torch.full((4, 3, 2), math.nan, dtype=norm.running_mean.dtype))
    return model, statistics


def test_frozen_norms_of_all_classes_are_fixed() -> None:
    model = nn.Sequential(
        *(nn.BatchNorm1d(3), nn.InstanceNorm1d(3, affine=True, track_running_stats=True)),
        *(nn.BatchNorm1d(3, affine=False), nn.InstanceNorm1d(3, affine=True)),
    ).requires_grad_(False)
    prepare_batch_norms(model, BatchNormConfig(of_frozen="fixed"), 1, None)
    assert [norm.training for norm in model.train()] == [False, False, True, True], "no parameters, or no statistics"


@pytest.mark.parametrize("restores", [True, False])
def test_the_statistics_of_a_skipped_step_are_restored_bit_for_bit(restores: bool) -> None:
    model, statistics = norms_trained_on_nan(2)
    after = full_state(model)
    statistics.restore_if(torch.tensor(float(restores)))
    for name, buffer in model.named_buffers():
        if name == "3.num_batches_tracked":
            continue  # nn.InstanceNorm does not count
        changed = not torch.equal(buffer.view(-1).view(torch.uint8), after[name].view(-1).view(torch.uint8))
        assert changed is restores, name
        assert bool(buffer.isfinite().all()) is (restores or "num_batches" in name), name
        if "num_batches" in name:
            assert buffer == (1 if restores else 2)


def test_a_deep_model_copies_its_statistics_in_as_few_operations_as_a_shallow_one() -> None:
    counts = []
    for depth in (1, 8):
        _, statistics = norms_trained_on_nan(depth)
        flag = torch.ones(())
        with Operations() as operations:
            statistics.save()
            statistics.restore_if(flag)
        counts.append(operations.counts)
    assert counts[0] == counts[1]
    assert counts[0]["where.self"] == counts[0]["_foreach_copy_"] == 1


def pool_temporarily() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(1).bfloat16(), nn.BatchNorm1d(1, track_running_stats=False))
    statistics = RunningStatistics(model)
    model[0](samples()[dist.get_rank()])
    own = {name: buffer.clone() for name, buffer in model.named_buffers()}
    statistics.pool(temporarily=True)
    assert not torch.equal(model[0].get_buffer("running_mean"), own["0.running_mean"])
    saved = statistics.state_dict()
    assert_equal(saved, own)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in statistics.targets().items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in saved.items()
    }
    for go_back in (statistics.unpool, lambda: statistics.load_state_dict(saved)):
        go_back()
        assert_equal(dict(model.named_buffers()), own)
        assert statistics.state_dict() == {}
        statistics.pool()
        statistics.unpool()
        assert not torch.equal(model[0].get_buffer("running_mean"), own["0.running_mean"])


def test_unpool_restores_the_statistics_of_a_temporary_pooling_only() -> None:
    run_ranks(pool_temporarily, 2)


def test_a_model_without_norms_has_no_statistics_to_copy() -> None:
    statistics = RunningStatistics(nn.Linear(2, 2))
    assert statistics.state_dict() == statistics.targets() == {}
    statistics.save()
    statistics.restore_if(torch.ones(()))
    statistics.restore()
    assert statistics.saved.nbytes == 0


# Momentum


def weight_left_on_the_old_mean(momentum_per: str) -> float:
    """Return the weight of the old mean after a step of 4 microbatches with mean 0, in a layer with momentum 0.1."""
    config = BatchNormConfig.model_validate({"momentum_per": momentum_per})
    model = nn.Sequential(nn.BatchNorm1d(1), nn.BatchNorm1d(1, momentum=None))
    prepare_batch_norms(model, config, 4, None)
    model[0].running_mean.fill_(1.0)  # type: ignore[union-attr, operator]
    for _ in range(4):
        model(torch.tensor([[-1.0], [1.0]]))
    assert model[1].momentum is None
    return float(model[0].running_mean)  # type: ignore[arg-type]


def test_all_microbatches_of_a_step_together_apply_the_momentum_once() -> None:
    assert weight_left_on_the_old_mean("step") == pytest.approx(0.9)
    assert weight_left_on_the_old_mean("microbatch") == pytest.approx(0.9**4)


def momentum_in_a_job(momentum_per: str) -> float:
    job = {
        "model": MODELS["llama"],
        "training": {"seq_len": 16, "local_batch_size": 1, "global_batch_size": 8},
        "batchnorm": {"momentum_per": momentum_per},
    }
    return float(sharded_model(JobConfig.model_validate(job), 16).get_submodule("norm").momentum)  # type: ignore[arg-type]


def test_a_jobs_microbatches_set_the_momentum() -> None:
    assert run_ranks(momentum_in_a_job, 2, "step") == [pytest.approx(1 - 0.9**0.25)] * 2
    assert run_ranks(momentum_in_a_job, 2, "microbatch") == [0.1] * 2


# Few values


def prepared(config: BatchNormConfig) -> nn.Module:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    prepare_batch_norms(
        model, config, 1, this_mesh().statistics_group(60) if config.statistics == "synchronized" else None
    )
    return model


def test_few_values_per_channel_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    model = prepared(BatchNormConfig())
    model.eval()(torch.randn(2, 3))
    model.train()(torch.randn(31, 3))
    model(torch.randn(2, 3))
    assert [record.getMessage() for record in caplog.records] == [
        "batchnorm statistics: 2 layers with fewer than 32 values per channel and microbatch (fewest: 0, "
        "31 values), so the statistics are mostly noise; increase training.local_batch_size, or with several ranks "
        'set batchnorm.statistics = "synchronized"'
    ]
    caplog.clear()
    prepared(BatchNormConfig())(torch.randn(32, 3))
    assert caplog.records == []


def test_a_single_value_per_channel_is_an_error_that_names_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"training.local_batch_size: gives BatchNorm layer 0 only one value per"):
        prepared(BatchNormConfig())(torch.randn(1, 3))


def messages() -> list[str]:
    """Return a list of the log messages of this process from now on. This process ends with the test."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("titan_launch")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return records


def train_two_stages(folder: Path) -> list[str]:
    """Train a pipeline of two stages. Return the warnings of this rank about BatchNorm."""
    records = messages()
    model, pipeline = {"args": {"norm": "batchnorm", "n_layers": 2}}, {"pipeline_parallel_degree": 2}
    run_job(tiny_job(folder, model=model, parallelism=pipeline, training={"steps": 1}))
    return [record for record in records if "values per channel" in record]


def test_each_pipeline_stage_warns_of_few_values_once(tmp_path: Path) -> None:
    warnings = run_ranks(train_two_stages, 4, tmp_path)
    assert [len(of_rank) for of_rank in warnings] == [1, 0, 1, 0]
    assert "fewest: layers.1" in warnings[2][0]


def one_value_on_each_rank() -> tuple[list[Tensor], list[str]]:
    """Give one value per channel to each rank. Synchronized statistics count the values of all ranks."""
    records = messages()
    model = prepared(SYNCHRONIZED)
    if dist.get_world_size() == 1:
        with pytest.raises(ConfigError, match="variance is 0; increase"):
            model(torch.randn(1, 3))
    else:
        model(torch.tensor([[dist.get_rank() * 2.0 - 1]]).expand(1, 3))
    return list(model[0].buffers()), records


def test_with_synchronized_statistics_the_values_of_all_ranks_count() -> None:
    ((mean, variance, tracked), (logged, warned)), _ = run_ranks(one_value_on_each_rank, 2)
    assert (mean.unique().item(), tracked.item()) == (0.0, 1)
    torch.testing.assert_close(variance, torch.full((3,), 0.9 + 0.1 * 2.0))
    assert logged == "batchnorm statistics: 2 layers synchronized over 2 ranks"
    assert "(fewest: 0, 2 values), so the statistics are mostly noise" in warned
    ((_, (alone,)),) = run_ranks(one_value_on_each_rank, 1)
    assert alone == "batchnorm statistics: synchronized over 1 rank, which is the same as local"
