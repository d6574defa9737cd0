"""Overrides from the command line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import load_job
from titan_launch.config.loading.merge import parse_overrides
from titan_launch.config.sections.data import SyntheticData, TextData
from titan_launch.core.errors import UserError


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--training.steps=20"], "training.steps", 20),
        (["--training.steps", "20"], "training.steps", 20),
        (["--parallelism.data_parallel_shard_degree", "-1"], "parallelism.data_parallel_shard_degree", -1),
        (["--job.name=foo"], "job.name", "foo"),
        (["--job.name='12'"], "job.name", "12"),
        (["--job.name="], "job.name", ""),
        (["--job.name=#1"], "job.name", "#1"),
        (["--data.path=a=b"], "data.path", "a=b"),
        (["--data.path=x\ny = 1"], "data.path", "x\ny = 1"),
        (["--data.path=1\ny = 1"], "data.path", "1\ny = 1"),
        (["--debug.deterministic"], "debug.deterministic", True),
        (["--debug.deterministic=false"], "debug.deterministic", False),
        (["--optimizer.lr=3e-4"], "optimizer.lr", 3e-4),
        (["--data.path=['a', 'b']"], "data.path", ["a", "b"]),
        (["--model.args={norm = 'batchnorm'}"], "model.args", {"norm": "batchnorm"}),
        (['--model.args."a.b"=1'], "model.args.a.b", 1),
    ],
)
def test_forms_of_an_override(arguments: list[str], key: str, value: Any) -> None:
    (override,) = parse_overrides(arguments)
    assert (".".join(override.key), override.value) == (key, value)
    assert override.text == " ".join(arguments)


def test_a_flag_without_a_value_does_not_take_the_next_override() -> None:
    flag, other = parse_overrides(["--debug.deterministic", "--training.steps=1"])
    assert (flag.value, other.value) == (True, 1)


def test_nan_and_infinity_are_values() -> None:
    (override,) = parse_overrides(["--training.max_norm=inf"])
    assert override.value == math.inf


@pytest.mark.parametrize("argument", ["steps", "training.steps=1", "-x", "--", "--=1", "--a..b=1", "--a.'b=1"])
def test_invalid_overrides_are_refused(argument: str) -> None:
    with pytest.raises(UserError, match="not an override"):
        parse_overrides([argument])


def test_overrides_of_array_items(tmp_path: Path) -> None:
    config = _load(
        tmp_path,
        "[[precision.rules]]\ntype = 'BatchNorm'\nparam_dtype = 'bfloat16'\n",
        "--precision.rules.0.param_dtype=float32",
        "--precision.rules.1.match=**.norm",
        "--precision.rules.2={match = 'head'}",
        "--model.blocks.0=layers.*",
    )
    rules = config.precision.rules
    assert [(rule.type, rule.match, rule.param_dtype) for rule in rules] == [
        ("BatchNorm", None, "float32"),
        (None, "**.norm", None),
        (None, "head", None),
    ]
    assert config.model.blocks == ("layers.*",)


def test_tables_merge_and_arrays_replace(tmp_path: Path) -> None:
    text = "[model.args]\nn_layers = 2\nrope_scaling.factor = 2.0\n[data]\npath = ['a', 'b']\n"
    (tmp_path / "c").touch()
    config = _load(
        tmp_path,
        text,
        "--model.args={norm = 'batchnorm', rope_scaling = {low_freq_factor = 2.0}}",
        f"--data.path=['{tmp_path}/c']",
    )
    assert config.model.args == {
        "n_layers": 2,
        "rope_scaling": {"factor": 2.0, "low_freq_factor": 2.0},
        "norm": "batchnorm",
    }
    assert isinstance(config.data, TextData)
    assert config.data.path == (f"{tmp_path}/c",)


def test_the_last_override_of_a_key_wins(tmp_path: Path) -> None:
    assert _load(tmp_path, "", "--training.steps=1", "--training.steps=2").training.steps == 2


def test_an_override_of_kind_may_follow_overrides_of_its_keys(tmp_path: Path) -> None:
    config = _load(tmp_path, "[data]\npath = 'x'", "--data.vocab_size=99", "--data.kind=synthetic")
    assert config.data == SyntheticData(kind="synthetic", vocab_size=99)


def _load(folder: Path, text: str, *overrides: str) -> JobConfig:
    path = folder / "job.toml"
    path.write_text(text)
    return load_job(str(path), overrides).config
