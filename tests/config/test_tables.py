"""The rows of the tables of rules name keys that exist."""

from __future__ import annotations

from operator import attrgetter

import pytest

from titan_launch.config.job import JobConfig
from titan_launch.config.rules.tables import CONTRADICTIONS, IN_BRACES, NEEDS_GPU, NO_EFFECT, Contradiction
from titan_launch.config.sections.section import Section


@pytest.mark.parametrize("row", CONTRADICTIONS, ids=lambda row: row.key)
def test_a_contradiction_names_its_keys(row: Contradiction) -> None:
    others = IN_BRACES.findall(row.reason)
    assert others, "the reason names the keys that the problem depends on in braces"
    attrgetter(row.key, *others)(JobConfig())
    assert not row.when(JobConfig()), "a job of defaults has no problem"


def test_all_keys_of_the_tables_exist() -> None:
    keys = [key for row in NO_EFFECT for key in (*row.keys, row.other)]
    for key in (*keys, *NEEDS_GPU):
        section, _, name = key.rpartition(".")
        table = attrgetter(section)(JobConfig()) if section else JobConfig()
        assert isinstance(table, Section)
        assert name in type(table).model_fields
