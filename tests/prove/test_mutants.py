"""The mutation score: each seeded bug is found by a proof, and the certificate names its module."""

from __future__ import annotations

import re

import pytest

from tests.prove.mutants import MUTANTS, certificate_with

QUICK = ("user_over_the_batch",)
"""A bug in a model. The tests of the others are slow."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in MUTANTS]
)
def test_a_seeded_bug_is_found_and_its_module_named(name: str) -> None:
    mutant, certificate = MUTANTS[name], certificate_with(name)
    if not mutant.module:
        assert certificate.verdict == "cannot be proven" and certificate.problems
        return
    assert certificate.verdict == "differs"
    finding = certificate.findings[0]
    assert re.fullmatch(mutant.near or mutant.module, finding.module), f"{finding.module}: {finding.how}"
    assert any(part.startswith(mutant.part) for part in finding.parts) or not mutant.part, finding.parts


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 30
    assert sum(bool(mutant.near) for mutant in MUTANTS.values()) <= len(MUTANTS) // 10, "modules that are not named"
    assert sum(mutant.plant is None for mutant in MUTANTS.values()) >= 5, "of users' models"
