"""Every section of a job file has a role, and a change of a key is reported with its role."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from titan_launch.config.job import JobConfig
from titan_launch.config.loading.schema_walk import alternatives
from titan_launch.config.resume_compatibility import ROLES, Role, differences, role_of
from titan_launch.config.sections.data import MixtureEntry


def test_every_section_has_a_role_and_every_listed_key_exists() -> None:
    assert list(ROLES) == list(JobConfig.model_fields)
    for section, field in JobConfig.model_fields.items():
        role = ROLES[section]
        if isinstance(role, str):
            assert role in get_args(Role)
        else:
            keys = {name for kind in alternatives(field.annotation) for name in kind.model_fields}
            if section == "data":
                keys = keys - {"sources"} | set(MixtureEntry.model_fields)
            assert set(role) <= keys, section
            assert set(role.values()) <= set(get_args(Role))


def test_the_page_lists_the_keys_of_each_role() -> None:
    page = (Path(__file__).parents[2] / "docs/how_to/checkpoints.md").read_text()
    (sections,) = re.findall(r"^- \*\*Whole sections\*\*: (.*)\.$", page, flags=re.MULTILINE)
    (single,) = re.findall(r"^- \*\*Single keys\*\*: (.*)\.$", page, flags=re.MULTILINE)
    (model,) = re.findall(r"^\| model \| (.*?) \|", page, flags=re.MULTILINE)
    keys = set()
    for part in single.split("; "):  # such as: `path` and `name` of `[data]`
        section = "".join(f"{name}." for name in re.findall(r" of `\[(\w+)\]`", part))
        keys |= {section + name for name in re.findall(r"`([\w.]+)`", part)}
    tables = {section: table for section, table in ROLES.items() if not isinstance(table, str)}
    roles = {f"{section}.{key}": role for section, table in tables.items() for key, role in table.items()}
    assert keys == {key for key, role in roles.items() if role == "operation"}
    assert set(re.findall(r"`([\w.]+)`", model)) == {key for key, role in roles.items() if role == "model"}
    assert set(re.findall(r"`\[(\w+)\]`", sections)) == {name for name, role in ROLES.items() if role == "operation"}


def test_differences_name_key_values_and_role() -> None:
    before = {"training": {"steps": 3, "seed": 1}, "model": {"args": {"dim": 8, "norm": "a"}}, "gone": {"x": 1}}
    now = {"training": {"steps": 4, "seed": 1}, "model": {"args": {"dim": 8}}, "job": {"name": "a"}}
    assert differences(before, now) == [
        (("gone", "x"), 1, None, "experiment"),
        (("job", "name"), None, "a", "operation"),
        (("model", "args", "norm"), "a", None, "model"),
        (("training", "steps"), 3, 4, "operation"),
    ]
    sources = [{"path": "a", "weight": 1.0}, {"path": "b", "weight": 1.0}]
    changed = [{"path": "c", "weight": 1.0}, {"path": "b", "weight": 2.0}]
    assert differences({"data": {"sources": sources}}, {"data": {"sources": changed}}) == [
        (("data", "sources", 0, "path"), "a", "c", "operation"),
        (("data", "sources", 1, "weight"), 1.0, 2.0, "experiment"),
    ]
    assert role_of(("data", "num_workers")) == "operation" and role_of(("optimizer", "lr")) == "experiment"
