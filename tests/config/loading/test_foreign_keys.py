"""Hints for unknown keys: keys of other tools come from a table, misspelt keys from similarity."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from titan_launch.config.architectures import ARCHITECTURES
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.foreign_keys import FOREIGN_KEYS
from titan_launch.config.loading.load import load_job
from titan_launch.config.loading.schema_walk import tables
from titan_launch.core.errors import UserError, format_key

SECTIONS = set(JobConfig.model_fields)
KEYS = {format_key((*table.key, name)) for table in tables(JobConfig) for name in table.section.model_fields}
KEYS |= {f"model.args.{name}" for model in ARCHITECTURES.values() for name in model.args.model_fields}


def complaint(text: str) -> str:
    """Return the error for a job file with this text."""
    Path("job.toml").write_text(text)
    with pytest.raises(UserError) as caught:
        load_job("job.toml")
    return str(caught.value)


@pytest.mark.parametrize("key", FOREIGN_KEYS)
def test_a_key_of_another_tool_is_explained(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = FOREIGN_KEYS[key]
    named = re.findall(r'"([^" ]+\.[^" ]+)"', text) if " " in text else [text]
    assert [name for name in named if name not in KEYS | {"package.module:factory"}] == []
    remedy = text if " " in text else f'use "{text}"'
    section, _, name = key.rpartition(".")
    if section:
        assert section in SECTIONS and key not in KEYS
        assert complaint(f"[{section}]\n{name} = 1\n") == f"error: job.toml:2: {key} = 1: unknown key; {remedy}"
    elif key in SECTIONS:
        assert complaint(f"{key} = 1\n") == f"error: job.toml:1: {key} = 1: must be a table; {remedy}"
    else:
        assert complaint(f"{key} = 1\n") == f"error: job.toml:1: {key} = 1: unknown key; {remedy}"
        assert complaint(f"[{key}]\nx = 1\n") == f"error: job.toml:1: {key}: unknown section; {remedy}"
        assert complaint(f"[comm]\n{key} = 1\n") == f"error: job.toml:2: comm.{key} = 1: unknown key; {remedy}"


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("job.seed", 'use "training.seed"'),
        ("optimizer.betas", 'use "optimizer.beta1" and "optimizer.beta2"'),
        ("training.lr", "it belongs in [optimizer]"),
        ("training.warmup_steps", "it belongs in [lr_scheduler]"),
        ("optimizer.nesterov", "it belongs in [optimizer.muon] or [optimizer.sgd]"),
        ("training.stepz", 'did you mean "training.steps"?'),
        ("training.local_batchsize", 'did you mean "training.local_batch_size"?'),
        ("data.storage_dtypes", 'did you mean "precision.storage_dtype"?'),
    ],
)
def test_a_hint_names_a_key_with_a_similar_meaning(
    key: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    section, name = key.split(".")
    assert complaint(f"[{section}]\n{name} = 1\n") == f"error: job.toml:2: {key} = 1: unknown key; {remedy}"


GUESSES = {
    "activation_checkpoint": ["enabled"],
    "tokenizer": ["split", "vocabulary"],
    "metrics": ["mode", "path", "name"],
    "comm": ["modules", "components"],
    "training": ["alpha", "enable", "mode", "momentum"],
    "optimizer": ["gamma", "path", "kind"],
    "lr_scheduler": ["gamma"],
    "data": ["cache", "device", "format"],
    "debug": ["verbose", "enable", "freq"],
    "job": ["interval", "path", "rules"],
    "checkpoint": ["mode", "path", "device"],
    "compile": ["modules", "level"],
    "precision": ["mode", "type"],
    "parallelism": ["mode", "backend"],
    "validation": ["path", "interval"],
    "model": ["type", "dir", "norm"],
    "planner": ["mode", "name"],
    "float8": ["mode"],
    "batchnorm": ["mode", "eps2"],
}


@pytest.mark.parametrize("section", GUESSES)
def test_a_key_that_resembles_none_gets_no_hint(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error lists only the keys of the section."""
    monkeypatch.chdir(tmp_path)
    for name in GUESSES[section]:
        has = f"error: job.toml:2: {section}.{name} = 1: unknown key; {section} has "
        assert complaint(f"[{section}]\n{name} = 1\n").startswith(has)


@pytest.mark.parametrize("name", ["rope", "moe", "zero", "foo", "adapter", "io", "logger", "callbacks"])
def test_a_section_that_resembles_none_gets_no_hint(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert complaint(f"[{name}]\nx = 1\n").startswith(f"error: job.toml:1: {name}: unknown section; the sections are ")
