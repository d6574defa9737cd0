"""The generated reference is complete and current, and the shipped configs fit the JSON Schema."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
import tomli

from titan_launch.config.job import JobConfig
from titan_launch.config.loading.schema_walk import TAGGED, tables
from titan_launch.config.reference import REFERENCE_FOLDER, documents, field_docs, json_schema, section_doc
from titan_launch.config.sections.section import Section
from titan_launch.models.architectures import ARCHITECTURES

CONFIGS = REFERENCE_FOLDER.parents[1] / "configs"
ROOTS: list[type[Section]] = [JobConfig, *(architecture.args for architecture in ARCHITECTURES.values())]
SECTIONS: set[type[Section]] = {table.section for root in ROOTS for table in tables(root)} | set(ROOTS[1:])


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("section", sorted(SECTIONS, key=str))
def test_every_section_and_field_is_documented(section: type[Section]) -> None:
    assert section_doc(section)
    assert field_docs(section).keys() == section.model_fields.keys()


def test_generated_files_are_current() -> None:
    message = "run `python -m titan_launch.config.reference`"
    for path, text in documents().items():
        assert path.read_text(encoding="utf-8") == text, message


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.toml")), ids=lambda path: path.stem)
def test_shipped_configs_fit_the_schema(path: Path, validator: jsonschema.Draft202012Validator) -> None:
    validator.validate(tomli.loads(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "extends = 'a.toml'",
        "extends = ['a.toml', 'b.toml']",
        "[data]\nvocab_size = 3",
        "[data]\nshuffle = true",
        "[validation.data]\nkind = 'synthetic'",
        "[model]\nname = 'a:b'\nflavor = 'any'\nargs.x = 1",
        "[model.args]\nnorm = 'batchnorm'",
        "[metrics]\npeak_tflops_per_device = 100",
    ],
)
def test_the_schema_accepts_valid_jobs(text: str, validator: jsonschema.Draft202012Validator) -> None:
    validator.validate(tomli.loads(text))


@pytest.mark.parametrize(
    "text",
    [
        "extends = 1",
        "[trainin]",
        "[training]\nstepz = 1",
        "[training]\nsteps = 0",
        "[training]\nsteps = '1'",
        "[data]\nkind = 'text'\nvocab_size = 3",
        "[data]\nkind = 'table'",
        "[model.args]\nnorms = 'batchnorm'",
        "[model]\nflavor = '8b'",
        "[job]\nname = 'a b'",
        "[[optimizer.param_groups]]\nlr_factor = 1",
    ],
)
def test_the_schema_refuses_invalid_jobs(text: str, validator: jsonschema.Draft202012Validator) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(tomli.loads(text))


def test_the_reference_names_the_default_kinds_of_the_job() -> None:
    config = JobConfig()
    assert TAGGED["data",].default == config.data.kind
    assert TAGGED["lr_scheduler",].default == config.lr_scheduler.kind
