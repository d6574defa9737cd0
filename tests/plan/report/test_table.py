"""Tests of the sentences that tell how accurate the numbers of a plan are."""

from __future__ import annotations

from typing import Any

import pytest

from titan_launch.config.job import JobConfig
from titan_launch.plan.report.table import accuracy

WITHOUT = "active memory of the job without {}; --measure measures the job itself"


@pytest.mark.parametrize(
    ("sections", "predicted"),
    [
        ({}, "active memory, a lower bound"),
        ({"compile": {"enable": True}}, WITHOUT.format("compile")),
        ({"float8": {"enable": True}}, WITHOUT.format("float8")),
        ({"compile": {"enable": True}, "float8": {"enable": True}}, WITHOUT.format("compile and float8")),
    ],
)
def test_the_memory_of_a_compiled_or_float8_job_is_said_to_be_another_jobs(
    sections: dict[str, Any], predicted: str
) -> None:
    lines = accuracy(JobConfig.model_validate(sections), has_flops=False)
    assert dict(lines)["predicted"] == predicted
