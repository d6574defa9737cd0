"""Options are promises: every key of the job file is read somewhere outside the config layer's own sections."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_launch.config.architectures import ARCHITECTURES
from titan_launch.config.job import JobConfig
from titan_launch.config.sections import training as lr_scheduler
from titan_launch.config.sections.base import Section
from titan_launch.config.sections.data import DATA_KINDS
from titan_launch.config.sections.precision import PrecisionRule
from titan_launch.config.sections.training import MuonConfig, ParamGroup, SGDConfig

REPO = Path(__file__).parent.parent
PACKAGE = REPO / "titan_launch"
READERS = "\n".join(p.read_text() for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE / "config")


def sections() -> Iterator[type[Section]]:
    for field in JobConfig.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield field.annotation
    yield from DATA_KINDS.values()
    yield from (lr_scheduler.WarmupStableDecay, lr_scheduler.Cosine, lr_scheduler.Linear, lr_scheduler.Constant)
    yield from (PrecisionRule, ParamGroup, MuonConfig, SGDConfig)
    yield from (architecture.args for architecture in ARCHITECTURES.values())


FIELDS = sorted({(section.__name__, name) for section in sections() for name in section.model_fields})


@pytest.mark.parametrize(("section", "field"), FIELDS)
def test_every_field_has_a_reader(section: str, field: str) -> None:
    assert re.search(rf"\.{field}\b", READERS), f"nothing reads {section}.{field}"
