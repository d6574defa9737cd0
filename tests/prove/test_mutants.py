"""The mutation score: each seeded bug is found by a proof, and the certificate names its module."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.prove.mutants import MUTANTS
from tests.sampling import rest_is_slow
from titan_launch.config.job import JobConfig
from titan_launch.core.patches import replaced
from titan_launch.plan.proof.certificate import Certificate
from titan_launch.prove import ranks
from titan_launch.prove.main import prove


def certificate_with(name: str) -> Certificate:
    """Return the certificate of a mutant's job, in fp32, with the bug planted on every rank."""
    run_ranks = ranks.run_ranks

    def run(function: str, world_size: int, *args: Any, timeout: float) -> list[Any]:
        return run_ranks("tests.prove.mutants:planted", world_size, name, function, *args, timeout=timeout)

    job = {"precision": {"param_dtype": "float32"}, **MUTANTS[name].job}
    with replaced(ranks, "run_ranks", run):
        return prove(JobConfig.model_validate(job))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", rest_is_slow(list(MUTANTS), every=8))
def test_a_seeded_bug_is_found_and_its_module_named(name: str) -> None:
    mutant, certificate = MUTANTS[name], certificate_with(name)
    if not mutant.module:
        assert certificate.verdict == "cannot be proven" and certificate.problems
        return
    assert certificate.verdict == "differs"
    finding = certificate.findings[0]
    assert re.fullmatch(mutant.module, finding.module), f"{finding.module}: {finding.how}"
    assert any(part.startswith(mutant.part) for part in finding.parts) or not mutant.part, finding.parts


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 30
    assert sum(mutant.plant is None for mutant in MUTANTS.values()) >= 5, "of users' models"
