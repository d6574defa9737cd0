"""A job's small twin on CPU ranks trains what one process trains, and a certificate says so."""

from __future__ import annotations

from typing import Any

from titan_launch.config.job import JobConfig
from titan_launch.core.json_files import parse_as
from titan_launch.plan.proof.certificate import Certificate
from titan_launch.plan.proof.store import CERTIFICATE
from titan_launch.prove.main import prove


def certificate(**sections: dict[str, Any]) -> Certificate:
    return prove(JobConfig.model_validate(sections))


def test_a_dense_decoder_is_proven_in_fp32_and_in_its_precision() -> None:
    proven = certificate(parallelism={"tensor_parallel_degree": 4}, loss={"chunks": 4})
    assert proven.verdict == "proven"
    assert [(row.ranks, row.precision) for row in proven.rows] == [(1, "float32"), (4, "float32"), (4, "bfloat16")]
    assert proven.rows[1].name == "shards 2, tensor 2, accumulation immediate, 4 chunks of the loss"
    assert parse_as(CERTIFICATE, proven.dumps().encode()) == proven
