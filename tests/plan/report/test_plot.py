from __future__ import annotations

import html
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan.report.test_modes import compared, make_job
from titan_launch.core.errors import UserError
from titan_launch.plan.report.plot import check_plot, plot_comparison

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture_has_a_bar_for_every_choice(tmp_path: Path, suffix: str) -> None:
    comparison, hardware = compared(make_job())
    path = tmp_path / f"plan{suffix}"
    plot_comparison(comparison, hardware, "tiny", str(path), comparison.rows[1], "recommended")
    assert path.stat().st_size > 10_000
    if suffix == ".svg":
        text = path.read_text()
        labels = [f"{r.choice.accumulation.label} / {r.choice.activation_checkpoint.label}" for r in comparison.rows]
        assert all(f"<!-- {label}" in text for label in labels)
        marks = dict(re.findall(r"<!-- (.* / .*?) +([>*]+) -->", html.unescape(text)))
        assert marks == {labels[0]: ">", labels[1]: "*"}  # as in the table
        assert "limit 10 GiB" in text and "activations" in text and "far to the right" not in text


def test_a_limit_far_above_every_bar_is_named_in_the_title_and_not_drawn(tmp_path: Path) -> None:
    comparison, hardware = compared(make_job())
    path = tmp_path / "plan.svg"
    plot_comparison(comparison, replace(hardware, memory_gib=1000.0), "tiny", str(path), None, None)
    assert "limit 1000 GiB, far to the right" in path.read_text()


def test_a_path_that_cannot_be_written_is_an_error_before_planning(tmp_path: Path) -> None:
    (tmp_path / "a.png").mkdir()
    for name, words in (("plan.jpg", "must end in"), ("no/plan.png", "there is no folder"), ("a.png", "is a folder")):
        with pytest.raises(UserError, match=words):
            check_plot(str(tmp_path / name))


def test_the_error_without_matplotlib_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"--plot needs the package matplotlib, .*\[plot\]"):
        check_plot("plan.png")
