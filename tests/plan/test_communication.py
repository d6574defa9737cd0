"""Bytes that a rank sends over each kind of link. tests/parallel/test_accumulation.py compares counts and buffers with
real collectives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from titan_launch.plan.communication import (
    Collectives,
    Exchange,
    LinkTraffic,
    Traffic,
    link_traffic_of_step,
    padded_numel,
)
from titan_launch.plan.layout import Layout
from titan_launch.plan.types import Policy, TensorInfo, Unit


def layout(replicate: int, shard: int) -> Layout:
    return Layout(replicate, shard, local_batch_size=1, num_microbatches=1)


UNIT = Unit("", (), Policy(None, None), None, "float32", "root")
GATHERED = Traffic(Collectives(all_gathers=1), all_gather_bytes=1024)
REDUCED = Traffic(Collectives(all_reduces=1), all_reduce_bytes=1024)


@pytest.mark.parametrize(
    ("traffic", "replicate", "shard", "gpus_per_node", "expected"),
    [
        (GATHERED, 1, 1, 8, LinkTraffic(0, 0)),
        (GATHERED, 1, 8, 8, LinkTraffic(896, 0)),
        (GATHERED, 1, 16, 8, LinkTraffic(840, 120)),  # 960 bytes sent; 2 of the ring's 16 hops leave a node
        (GATHERED, 1, 4, 1, LinkTraffic(0, 768)),
        (GATHERED, 2, 6, 8, LinkTraffic(1024 * 5 / 6 * 4 / 6, 1024 * 5 / 6 * 2 / 6)),  # ranks 6..11 lie on two nodes
        (REDUCED, 4, 8, 8, LinkTraffic(0, 1536)),  # each replica on its own node: twice 3/4, all across
        (REDUCED, 4, 2, 8, LinkTraffic(1536, 0)),
        (REDUCED, 4, 4, 8, LinkTraffic(768, 768)),  # ranks 0, 4, 8, 12: 2 hops of 4
    ],
)
def test_traffic_of_a_ring_is_split_by_the_nodes_of_its_ranks(
    traffic: Traffic, replicate: int, shard: int, gpus_per_node: int, expected: LinkTraffic
) -> None:
    traffic_by_link = link_traffic_of_step(traffic, layout(replicate, shard), gpus_per_node)
    assert (traffic_by_link.within, traffic_by_link.across) == pytest.approx((expected.within, expected.across))


def test_a_reduce_scatter_has_the_link_traffic_of_an_all_gather() -> None:
    scattered = Traffic(Collectives(reduce_scatters=1), reduce_scatter_bytes=1024)
    assert link_traffic_of_step(scattered, layout(1, 4), 8) == link_traffic_of_step(GATHERED, layout(1, 4), 8)
    both = link_traffic_of_step(GATHERED + scattered, layout(1, 4), 8)
    assert (both.total, str((GATHERED + scattered).collectives)) == (1536, "1 all-gather + 1 reduce-scatter")


def test_traffic_of_each_mesh_axis_is_split_by_nodes() -> None:
    """2 stages of 2 replicas x 2 shards x 2 context x 4 tensor ranks: 64 on nodes of 8."""
    grid = Layout(2, 2, local_batch_size=1, num_microbatches=1, context=2, tensor=4, pipeline=2)

    def sent(traffic: Traffic) -> tuple[float, float]:
        traffic_by_link = link_traffic_of_step(traffic, grid, gpus_per_node=8)
        return traffic_by_link.within, traffic_by_link.across

    assert sent(Traffic(tensor=Exchange(1, 1000))) == (1000, 0)  # ranks 0..3
    assert sent(Traffic(context=Exchange(1, 1000))) == (1000, 0)  # ranks 0, 4
    assert sent(Traffic(pipeline=Exchange(1, 1000))) == (0, 1000)  # ranks 0, 32
    assert sent(GATHERED) == (384, 384)  # ranks 0, 4, 8, 12: 2 hops of 4
    assert sent(REDUCED) == (0, 1024)  # ranks 0, 16
    grid = replace(grid, expert=2)
    assert sent(Traffic(expert=Exchange(1, 1000))) == (1000, 0)  # ranks 0, 4
    of_experts = replace(GATHERED, expert_all_gather_bytes=1024)
    assert sent(of_experts) == (0, 512)  # ranks 0, 8
    grid = replace(grid, expert=4)
    assert sent(Traffic(expert=Exchange(1, 1200))) == (400, 800)  # ranks 0, 4, 8, 12: of three others, two are far
    assert sent(of_experts) == (0, 0)


def test_parameters_of_experts_are_not_padded_to_the_shards_if_their_second_dim_divides() -> None:
    def padded(shape: tuple[int, ...], shards: int, expert_parallel: int = 1) -> int:
        unit = replace(UNIT, expert_parallel=expert_parallel)
        info = TensorInfo("w1", shape, "float32", True, True, is_stacked=True)
        return padded_numel(info, unit, layout(1, shards * expert_parallel))

    assert padded((8, 128, 6), 64) == padded((8, 128, 6), 8) == 8 * 128 * 6
    assert padded((8, 10, 6), 64) == 64 * 60
    assert padded((8, 128, 6), 16, expert_parallel=4) == 2 * 128 * 6
    assert padded((8, 10), 3, expert_parallel=2) == 6 * 10


@pytest.mark.parametrize(
    ("shape", "shard", "expected"), [((61, 32), 2, 62 * 32), ((3,), 8, 8), ((64, 3, 3, 3), 7, 70 * 27), ((8, 0), 3, 0)]
)
def test_padded_numel_pads_the_first_dimension(shape: tuple[int, ...], shard: int, expected: int) -> None:
    assert padded_numel(TensorInfo("weight", shape, "float32", True, True), UNIT, layout(1, shard)) == expected
