"""Wording of problems: file and line, key, value and reason."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from titan_launch.config.loading.load import load_job
from titan_launch.config.loading.provenance import Provenance, report, toml_value
from titan_launch.core.errors import ConfigError, Problem, config_error, format_key


@pytest.fixture
def provenance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Provenance:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(
        "[training]\nsteps = 10\n\n[[precision.rules]]\nmatch = 'norm'\n\n[[precision.rules]]\nmatch = 'nrom'\n"
    )
    return load_job("job.toml", ["--precision.rules.2={match = 'head'}", "--job.name", "x"]).provenance


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        (Problem(("precision", "rules", 1, "match"), "r", "nrom"), 'job.toml:8: precision.rules.1.match = "nrom": r'),
        (Problem(("precision", "rules", 1, "type"), "r"), "job.toml:7: precision.rules.1.type: r"),
        (
            Problem(("precision", "rules", 2, "match"), "r", "head"),
            "command line: --precision.rules.2={match = 'head'}: precision.rules.2.match = \"head\": r",
        ),
        (Problem(("job", "name"), "r", "x"), 'command line: --job.name x: job.name = "x": r'),
        (
            Problem(("training", "seq_len"), "r", 256),
            "job.toml:1: training.seq_len = 256 (default, not set in the job): r",
        ),
        (
            Problem(("comm", "timeout_seconds"), "r", 600),
            "job.toml: comm.timeout_seconds = 600 (default, not set in the job): r",
        ),
    ],
)
def test_a_problem_found_after_loading_names_its_line(problem: Problem, line: str, provenance: Provenance) -> None:
    assert provenance.describe([problem]) == f"error: {line}"


def test_problems_are_listed_in_the_order_of_the_job(provenance: Provenance) -> None:
    keys = [("job", "name"), ("precision", "rules", 0), ("training", "steps")]
    text = provenance.describe(Problem(key, "wrong") for key in keys)
    assert text.splitlines() == [
        "error: 3 problems in job.toml",
        "  job.toml:2: training.steps: wrong",
        "  job.toml:4: precision.rules.0: wrong",
        "  command line: --job.name x: job.name: wrong",
    ]


def test_a_report_of_one_problem_is_one_line() -> None:
    assert report(["this is wrong"], "job.toml") == "error: this is wrong"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\n\"b'", r'"a\n\"b' + "'\""),
        (True, "true"),
        (1e-8, "1e-08"),
        ([1, "x", []], '[1, "x", []]'),
        (("a",), '["a"]'),
        ({"a": 1, "b c": {}}, '{a = 1, "b c" = {}}'),
        (datetime.date(2024, 1, 2), "2024-01-02"),
        (None, "null"),
    ],
)
def test_values_are_shown_as_toml(value: Any, text: str) -> None:
    assert toml_value(value) == text


def test_keys_are_shown_as_overrides_take_them() -> None:
    assert format_key(("precision", "rules", 0, "a.b")) == 'precision.rules.0."a.b"'


def test_a_config_error_lists_its_problems() -> None:
    error = config_error(("a", 0), "is wrong", 1, also=(("b",),))
    assert isinstance(error, ConfigError)
    assert str(error) == "a.0: is wrong"
    assert error.problems == (Problem(("a", 0), "is wrong", 1, (("b",),)),)
