"""The table of gradient accumulation modes, and the texts that describe its rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from titan_launch.config.reference import field_docs
from titan_launch.config.sections.training import ACCUMULATION_MODES, GradientAccumulationConfig

PAGE = Path(__file__).parent.parent.parent / "docs" / "how_to" / "gradient_accumulation.md"


def test_the_page_has_a_row_for_each_mode() -> None:
    rows = {}
    for name, *cells in re.findall(r"^\| `(\w+)`[^|]* \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.M):
        rows[name] = tuple(cells)
    times = {True: "N x U", False: "U"}
    held = {True: "sharded: 4 x P / S bytes", False: "unsharded, on every rank: 4 x P bytes"}
    assert rows == {
        name: (times[mode.reduce_scatters_each], times[mode.all_reduces_each], held[mode.reduce_scatters_each])
        for name, mode in ACCUMULATION_MODES.items()
    }


def test_the_reference_describes_each_mode() -> None:
    described = re.findall(r"`(\w+)`(?: \(HSDP only\))?:", field_docs(GradientAccumulationConfig)["mode"])
    assert sorted(described) == sorted([*ACCUMULATION_MODES, "auto"])


def test_auto_has_no_row() -> None:
    with pytest.raises(ValueError, match=r"resolve `auto` first"):
        _ = GradientAccumulationConfig(mode="auto").row
