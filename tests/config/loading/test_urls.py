"""The keys whose URLs are copied, and the URLs that stay in a job."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from titan_launch.config.job import JobConfig
from titan_launch.config.loading import urls
from titan_launch.config.loading.load import load_job
from titan_launch.config.loading.schema_walk import TableSchema, alternatives, item_types, tables
from titan_launch.config.loading.urls import READ, STORE, WRITTEN, with_local_copies
from titan_launch.config.reference import field_docs
from titan_launch.core.errors import ConfigError, KeyPath, UserError

_NO_FILES = {
    ("checkpoint", "exclude_from_loading"),
    ("data", "name"),
    ("job", "name"),
    ("lora", "targets"),
    ("metrics", "sinks"),
    ("model", "blocks"),
    ("model", "name"),
    ("optimizer", "param_groups", "match"),
    ("precision", "rules", "match"),
    ("tokenizer", "end_of_document"),
}
"""Keys whose docstrings mention files, folders or paths, although their values name none."""


def string_keys() -> dict[KeyPath, str]:
    """Return the docstrings of all keys whose values may be strings, or arrays of strings."""
    found: dict[KeyPath, str] = {}
    for table in [TableSchema("", (), JobConfig), *tables(JobConfig)]:
        docs = field_docs(table.section)
        for name, field in table.section.model_fields.items():
            kinds = alternatives(field.annotation)
            if str in kinds or any(str in item_types(kind) for kind in kinds):
                key = (*table.key, name)
                found[key] = found.get(key, "") + docs.get(name, "")
    return found


def test_the_tables_have_all_keys_of_files() -> None:
    """A key of a source of a mixture, or of validation data, is the key of `[data]` in another table."""
    keys = string_keys()
    known = {*READ, *WRITTEN, STORE}
    assert known <= keys.keys()
    named = {key for key, doc in keys.items() if re.search(r"\b(paths?|folders?|files?)\b", doc, re.IGNORECASE)}
    names = {key: ("data", key[-1]) if "data" in key else key for key in named - known}
    assert set(names.values()) == _NO_FILES


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The URLs that are copied: each to a folder without files."""
    found: list[str] = []

    def copy(url: str) -> Path:
        found.append(url)
        return tmp_path

    monkeypatch.setattr(urls, "local_copy", copy)
    return found


def test_only_urls_of_files_that_a_run_reads_are_copied(copied: list[str], tmp_path: Path) -> None:
    def table(read: str) -> dict[str, object]:
        source = {"path": [read], "template": read, "args": {"path": "s3://b/no"}, "name": "s3://b/no"}
        return {
            "data": {"kind": "m:f", "args": {"input_dir": "s3://b/no"}, "labels": ["s3://b/no"], "sources": [source]},
            "validation": {"data": {"path": read, "template_args": {"path": "s3://b/no"}}},
            "model": {"weights": read, "args": {"weights": "s3://b/no"}},
            "loss": {"dpo": {"reference": read}},
            "checkpoint": {"load": read, "store": "s3://b/no"},
            "prove": {"args": {"path": "s3://b/no"}},
        }

    assert with_local_copies(table("s3://b/yes")) == (table(str(tmp_path)), [])
    assert copied == ["s3://b/yes"] * 6


@pytest.mark.parametrize(
    "sections", [{"optimizer": {"lrr": 0.1}}, {"training": {"steps": "many"}}, {"job": {"dump_folder": "s3://b/out"}}]
)
def test_a_job_is_checked_before_objects_are_copied(copied: list[str], tmp_path: Path, sections: object) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"model": {"weights": "s3://b/weights"}} | dict(sections)))  # type: ignore[call-overload]
    with pytest.raises(UserError) as caught:
        load_job(str(path))
    assert len(str(caught.value).splitlines()) == 1 and not copied


def test_urls_in_the_folder_of_a_model_are_not_copied(copied: list[str], tmp_path: Path) -> None:
    """The folder has keys with the names of those of `[model]`. An override changes an item of an array that only the
    folder has."""
    config = {"model_type": "llama", "weights": "s3://b/no", "path": "s3://b/no", "sizes": [1, 2, 3]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--model.name=huggingface", "--model.path=s3://b/folder", "--model.args.sizes.1=5"]
    job = load_job(None, options, rules=()).config
    assert copied == ["s3://b/folder"]
    assert job.model.path == str(tmp_path) and job.model.weights is None
    assert job.model.args["weights"] == "s3://b/no" and job.model.args["sizes"] == [1, 5, 3]


@pytest.mark.parametrize("key", ["data.path", "checkpoint.store", "job.dump_folder"])
def test_credentials_in_a_url_are_not_shown(copied: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(None, [f"--{key}=s3://user:secret@bucket/a"])
    assert str(caught.value) == f"{key}: a URL must have no credentials; set them in the environment"
    assert not copied
