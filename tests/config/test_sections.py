"""Every key of the job file is read outside of config/. The table of axes and `[lora]` also count."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_launch.config.job import JobConfig
from titan_launch.config.loading.schema_walk import alternatives
from titan_launch.config.sections.data import DATA_KINDS
from titan_launch.config.sections.loss import LOSSES
from titan_launch.config.sections.precision import PrecisionRule
from titan_launch.config.sections.section import Section
from titan_launch.config.sections.training import MuonConfig, ParamGroup, SchedulerConfig, SGDConfig
from titan_launch.models.architectures import ARCHITECTURES

REPO = Path(__file__).parents[2]
PACKAGE = REPO / "titan_launch"
READERS = "\n".join(
    path.read_text()
    for path in PACKAGE.rglob("*.py")
    if PACKAGE / "config" not in path.parents or path.name in ("axes.py", "lora.py")
)


def sections() -> Iterator[type[Section]]:
    for field in JobConfig.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield field.annotation
    yield from DATA_KINDS.values()
    yield from alternatives(SchedulerConfig)
    yield from (PrecisionRule, ParamGroup, MuonConfig, SGDConfig)
    yield from (architecture.args for architecture in ARCHITECTURES.values())


FIELDS = sorted({(section.__name__, name) for section in sections() for name in section.model_fields})


@pytest.mark.parametrize(("section", "field"), FIELDS)
def test_every_field_has_a_reader(section: str, field: str) -> None:
    if section == "LossConfig" and field in LOSSES:
        assert LOSSES[field].table is not None  # `LossConfig.settings` reads it
    else:
        assert re.search(rf"\.{field}\b", READERS), f"nothing reads {section}.{field}"
