"""Plans of an optimizer that is sharded over the replicas: what it saves, its traffic, and the choices of modes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plan.report.test_modes import auto, compared, labels, make_job
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import load_job
from titan_launch.plan.advice import advise
from titan_launch.plan.communication import LinkTraffic, link_traffic_of_step
from titan_launch.plan.job import configured_choice
from titan_launch.plan.layout import Layout, plan_layout
from titan_launch.plan.memory.ledger import Category, Footprint
from titan_launch.trace.recorder import recorded_engine

CONFIG = Path(__file__).parents[2] / "configs/llama3_70b.toml"
REPLICAS = 64


def planned(is_sharded: bool) -> tuple[Footprint, LinkTraffic]:
    """Plan Llama 70B on 512 GPUs of 64 hosts: a replica on each."""
    sharded = ["--parallelism.shard_optimizer_over_replicas=true", "--gradient_accumulation.mode=immediate"]
    overrides = [f"--parallelism.data_parallel_replicate_degree={REPLICAS}", *(sharded if is_sharded else [])]
    config = load_job(str(CONFIG), overrides).config
    layout = plan_layout(config.parallelism, config.training, 512)
    engine, choice = recorded_engine(config, layout, "cuda"), configured_choice(config)
    footprint, traffic = engine(choice), engine.traffic(choice)
    return footprint, link_traffic_of_step(traffic, layout, gpus_per_node=8)


@pytest.mark.slow
def test_64_replicas_divide_the_state_and_the_gradients_of_llama_70b_and_send_no_more_bytes() -> None:
    (whole, before), (sharded, after) = planned(False), planned(True)
    state = whole.by_category[Category.OPTIMIZER]
    assert sharded.by_category[Category.OPTIMIZER] * REPLICAS == pytest.approx(state, rel=0.01)
    gradients = whole.by_category[Category.PARAMETERS]  # both in float32
    in_update = whole.by_phase()["optimizer"] - sharded.by_phase()["optimizer"]
    assert in_update == pytest.approx((state + gradients) * (1 - 1 / REPLICAS), rel=0.01)
    assert whole.peak_bytes - sharded.peak_bytes > (state + 0.75 * gradients) * (1 - 1 / REPLICAS)
    assert after.across == pytest.approx(before.across, rel=0.001)  # 161 norms of 1024 rows have whole rows
    assert after.within == pytest.approx(before.within, rel=0.001)


def replicated(**parallelism: bool) -> JobConfig:
    shared = {"data_parallel_replicate_degree": 2, **parallelism}
    return make_job(parallelism=shared, **auto(memory_gib=100, margin_gib=0))


def test_auto_does_not_consider_an_all_reduce_that_does_not_exist() -> None:
    assert "deferred_all_reduce" in labels(compared(replicated(), 4)[0])
    modes = labels(compared(replicated(shard_optimizer_over_replicas=True), 4)[0])
    assert "deferred_all_reduce" not in modes and {"immediate", "deferred"} < {*modes}


@pytest.mark.slow
def test_the_advice_replaces_a_mode_that_the_sharded_optimizer_refuses() -> None:
    overrides = ["--parallelism.data_parallel_replicate_degree=64"]
    config = load_job(str(CONFIG), overrides).config
    layout = plan_layout(config.parallelism, config.training, 512)

    def predict(config: JobConfig, layout: Layout) -> float:
        return float(recorded_engine(config, layout, "cuda")(configured_choice(config)).peak_bytes)

    (first, *_) = advise(config, layout, 80 * 2**30, predict)
    assert first.fits and first.lines == (
        "parallelism.shard_optimizer_over_replicas = true",
        'gradient_accumulation.mode = "immediate"',
    )
