"""Traces of ranks that share samples: their exchanges, and the extrapolation of a pipeline's step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.sampling import rest_is_slow
from tests.trace.traces import a_job
from titan_launch.config.axes import AXES
from titan_launch.core.errors import ConfigError
from titan_launch.core.torch_release import ACCUMULATES_IN_GRAD
from titan_launch.distributed.mesh import build_mesh
from titan_launch.metrics.traffic import TrafficCount
from titan_launch.models.build import build_model
from titan_launch.plan.communication import Exchange, collectives_of_step
from titan_launch.trace import step
from titan_launch.trace.fake_group import fake_process_group
from titan_launch.trace.observers import ExchangesCounted
from titan_launch.trace.step import TracedStep, trace_step
from titan_launch.trace.trace_engine import representative_ranks
from titan_launch.train.model import plan_precision

BF16 = {"param_dtype": "bfloat16"}
TOKENS, DIM = 32, 32
STREAM = 2 * TOKENS * DIM
"""Bytes of the activations between two layers, in bf16."""


def trace(ranks: int, rank: int = 0, n_layers: int = 2, **sections: Any) -> TracedStep:
    sections.setdefault("model", {"args": {"vocab_size": 64, "n_layers": n_layers}})
    config, layout, _ = a_job(ranks, precision=BF16, **sections)
    built = build_model(config.model, config.training.seq_len)
    return trace_step(config, built, plan_precision(config, built), layout, "cuda", rank)


def test_tensor_parallelism_all_gathers_and_reduce_scatters_the_activations_of_a_block_four_times() -> None:
    """The gradients of the block's two norm weights are also all-reduced, from torch 2.15 on in the dtype of the
    reduction."""
    sections: dict[str, Any] = {
        "training": {"global_batch_size": 2},
        "parallelism": {"tensor_parallel_degree": 2},
    }
    two, three = (trace(4, n_layers=n, **sections).traffic for n in (2, 3))
    assert three.tensor.calls - two.tensor.calls == 8 + 2
    norms = 2 * (4 if ACCUMULATES_IN_GRAD else 2) * DIM
    assert three.tensor.sent_bytes - two.tensor.sent_bytes == 8 * STREAM // 2 + norms  # another rank has the other half
    assert three.context == three.pipeline == Exchange()


def test_context_parallelism_does_not_change_the_units() -> None:
    parallelism = {"context_parallel_degree": 2}
    config, layout, _ = a_job(4, precision=BF16, parallelism=parallelism)
    plan = plan_precision(config, build_model(config.model, config.training.seq_len))
    traced = trace(4, parallelism=parallelism, model={}).traffic
    assert traced.collectives == collectives_of_step(plan.units, layout, config.gradient_accumulation)
    assert traced.context.calls > 0 and traced.tensor == Exchange()


def test_a_collective_without_a_rule_for_its_bytes_is_named() -> None:
    _, layout, _ = a_job(2, parallelism={"tensor_parallel_degree": 2})
    with fake_process_group(2):
        mesh = build_mesh(layout, "cpu")
        ranks = mesh.along(AXES["tensor"])
        assert ranks is not None
        with (
            ExchangesCounted(mesh, TrafficCount()),
            pytest.raises(NotImplementedError, match=r"reduce_ sends along the tensor axis; use one of .* all_reduce"),
        ):
            dist.reduce(torch.ones(2), 0, group=ranks.get_group())


@pytest.mark.parametrize(("seq_len", "balances"), rest_is_slow([(64, True), (96, False)]))
def test_parts_of_a_sequence_are_refused_that_attention_in_fp32_does_not_support(seq_len: int, balances: bool) -> None:
    def run(seq_len: int) -> TracedStep:
        parallelism = {"context_parallel_degree": 2, "context_parallel_load_balance": balances}
        config, layout, _ = a_job(
            2, training={"seq_len": seq_len}, precision={"param_dtype": "float32"}, parallelism=parallelism
        )
        built = build_model(config.model, seq_len)
        return trace_step(config, built, plan_precision(config, built), layout, "cuda")

    length, whole = (16, 128) if balances else (48, 64)
    with pytest.raises(ConfigError, match=rf"{seq_len} tokens into parts of {length}, but .* multiple of {whole}"):
        run(seq_len)
    assert run(whole).traffic.context.calls > 0


@pytest.mark.parametrize("rank", rest_is_slow([2, 0]))
def test_stages_send_activations_and_their_gradients(rank: int) -> None:
    """The first of 4 stages sends to one other stage, and a middle stage to two."""
    parallelism = {"pipeline_parallel_degree": 4}
    sent = trace(4, rank, n_layers=4, parallelism=parallelism, training={"global_batch_size": 6}).traffic.pipeline
    assert sent == Exchange(calls=6 * (1 + (rank == 2)), sent_bytes=6 * STREAM * (1 + (rank == 2)))


@pytest.mark.parametrize(
    ("schedule", "mode", "num_microbatches", "rank", "tensor"),
    rest_is_slow(
        [
            ("1F1B", "deferred", 5, 4, 2),  # gradients are reduced once per step, activations in every microbatch
            ("1F1B", "immediate", 5, 2, 1),
            ("1F1B", "deferred", 5, 2, 1),
            ("ZBVZeroBubble", "deferred", 8, 2, 1),
            ("Interleaved1F1B", "immediate", 8, 0, 1),
        ],
        5,
    ),
)
def test_a_longer_pipeline_step_is_extrapolated_from_a_full_one(
    schedule: str, mode: str, num_microbatches: int, rank: int, tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallelism = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": tensor}
    sections: dict[str, Any] = {
        "parallelism": {**parallelism, "pipeline_parallel_schedule": schedule},
        "gradient_accumulation": {"mode": mode, "keep_params_unsharded": "Zero" in schedule},
        "training": {"global_batch_size": 2 * num_microbatches},
    }
    n_layers = 2 if schedule == "1F1B" else 4
    short = trace(4 * tensor, rank, n_layers, **sections)
    with monkeypatch.context() as whole:
        whole.setattr(step, "counts_to_run", lambda parallelism, layout: (layout.num_microbatches,))
        long = trace(4 * tensor, rank, n_layers, **sections)
    assert short.traffic == long.traffic
    assert short.footprint.peak_bytes == pytest.approx(long.footprint.peak_bytes, abs=64)  # a loss for each microbatch


def test_the_first_and_the_last_rank_represent_a_pipeline() -> None:
    config, _, _ = a_job(4, parallelism={"pipeline_parallel_degree": 4}, model={"args": {"n_layers": 4}})
    plan = plan_precision(config, build_model(config.model, config.training.seq_len))
    assert representative_ranks(plan, with_times=True) == [0, 3]
