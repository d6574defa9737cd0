"""Bytes on the wire. (Counts and buffers are checked against real collectives in tests/accumulation.)"""

from __future__ import annotations

import pytest

from titan_launch.plan.layout import Layout
from titan_launch.plan.traffic import Collectives, Traffic, Wire, padded_numel, wire_bytes
from titan_launch.plan.types import TensorInfo


@pytest.mark.parametrize(
    ("shape", "shard", "expected"), [((61, 32), 2, 62 * 32), ((3,), 8, 8), ((64, 3, 3, 3), 7, 70 * 27), ((8, 0), 3, 0)]
)
def test_the_first_axis_is_padded(shape: tuple[int, ...], shard: int, expected: int) -> None:
    assert padded_numel(TensorInfo("weight", shape, "float32", True, True), shard) == expected


def layout(replicate: int, shard: int) -> Layout:
    return Layout(replicate, shard, local_batch_size=1, num_microbatches=1)


GATHERED = Traffic(Collectives(all_gathers=1), all_gather_bytes=1024)
REDUCED = Traffic(Collectives(all_reduces=1), all_reduce_bytes=1024)


@pytest.mark.parametrize(
    ("traffic", "replicate", "shard", "gpus_per_node", "expected"),
    [
        (GATHERED, 1, 1, 8, Wire(0, 0)),
        (GATHERED, 1, 8, 8, Wire(896, 0)),
        (GATHERED, 1, 16, 8, Wire(840, 120)),  # 960 sent; 2 of the ring's 16 hops leave a node
        (GATHERED, 1, 4, 1, Wire(0, 768)),
        (GATHERED, 2, 6, 8, Wire(1024 * 5 / 6 * 4 / 6, 1024 * 5 / 6 * 2 / 6)),  # ranks 6..11 lie on two nodes
        (REDUCED, 4, 8, 8, Wire(0, 1536)),  # replicas on nodes of their own: twice 3/4, all of it across
        (REDUCED, 4, 2, 8, Wire(1536, 0)),
        (REDUCED, 4, 4, 8, Wire(768, 768)),  # ranks 0, 4, 8, 12: 2 hops of 4
    ],
)
def test_rings_lie_on_nodes_as_ranks_do(
    traffic: Traffic, replicate: int, shard: int, gpus_per_node: int, expected: Wire
) -> None:
    wire = wire_bytes(traffic, layout(replicate, shard), gpus_per_node)
    assert (wire.within, wire.across) == pytest.approx((expected.within, expected.across))


def test_reduce_scatters_go_round_like_all_gathers_and_add_up() -> None:
    scattered = Traffic(Collectives(reduce_scatters=1), reduce_scatter_bytes=1024)
    assert wire_bytes(scattered, layout(1, 4), 8) == wire_bytes(GATHERED, layout(1, 4), 8)
    both = wire_bytes(GATHERED + scattered, layout(1, 4), 8)
    assert (both.total, str((GATHERED + scattered).collectives)) == (1536, "1 AG + 1 RS")
