"""The JSON Schema of the job file, for editors. Descriptions are the docstrings of the fields."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise
from typing import Any

from titan_launch.config.architectures import ARCHITECTURES
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.schema_walk import TAGGED, tables
from titan_launch.config.sections.base import Section
from titan_launch.config.sections.model import ModelConfig

_EXTENDS = {
    "description": "Job files that this one is laid over, relative to it. Tables merge, everything else is replaced; "
    "later files win, and this one wins over all of them.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a job file."""
    job = section_schema(JobConfig)
    definitions = job.pop("$defs")
    for variant in (variant for kinds in TAGGED.values() for variant in kinds.variants.values()):
        definitions[variant.__name__].pop("required", None)  # `kind` may stand in the file that this one extends
    for name, architecture in ARCHITECTURES.items():
        args = section_schema(architecture.args)
        args.pop("required", None)  # the flavor has what is left out
        definitions |= args.pop("$defs", {})
        definitions[architecture.args.__name__] = args
        definitions["ModelConfig"].setdefault("allOf", []).append(_args_by_name(name))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "titan_launch job",
        **job,
        "properties": {"extends": _EXTENDS, **job["properties"]},
        "$defs": definitions,
    }


def section_schema(section: type[Section]) -> dict[str, Any]:
    """The JSON Schema of one section: pydantic's, with the fields' docstrings, and without null, which TOML lacks."""
    schema = section.model_json_schema()
    sections = {table.section.__name__: table.section for table in tables(section)}
    for name, definition in schema.get("$defs", {}).items():
        _polish(definition, sections[name])
    _polish(schema, section)
    return schema


def _polish(schema: dict[str, Any], section: type[Section]) -> None:
    docs = field_docs(section)
    schema.pop("title")
    schema["description"] = section_doc(section)
    for name, field in schema["properties"].items():
        schema["properties"][name] = _without_null(field) | ({"description": docs[name]} if name in docs else {})


def _without_null(field: dict[str, Any]) -> dict[str, Any]:
    field = {key: value for key, value in field.items() if key not in ("title", "discriminator")}
    if "default" in field and field["default"] is None:
        del field["default"]
    branches = field.pop("oneOf", []) or [b for b in field.pop("anyOf", []) if b != {"type": "null"}]
    if len(branches) == 1:
        return _without_null(branches[0]) | field
    return {"anyOf": branches} | field if branches else field


def _args_by_name(name: str) -> dict[str, Any]:
    """What `[model]` may hold for one architecture. The default one is also meant where `name` is left out."""
    architecture = ARCHITECTURES[name]
    is_default = ModelConfig.model_fields["name"].default == name
    return {
        "if": {"properties": {"name": {"const": name}}} | ({} if is_default else {"required": ["name"]}),
        "then": {
            "properties": {
                "flavor": {"enum": list(architecture.flavors)},
                "args": {"$ref": f"#/$defs/{architecture.args.__name__}"},
            }
        },
    }


def field_docs(section: type[Section]) -> dict[str, str]:
    """The docstring of every field of a section, inherited ones included, one line per paragraph."""
    docs: dict[str, str] = {}
    for cls in reversed(section.__mro__):
        if issubclass(cls, Section) and cls is not Section:
            docs |= _own_docs(cls)
    return {name: docs[name] for name in section.model_fields if name in docs}


def section_doc(section: type[Section]) -> str:
    """The docstring of a section, one line per paragraph."""
    return _unwrap(section.__doc__ or "")


def _own_docs(cls: type[Section]) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for field, following in pairwise(tree.body):
        text = _string(following)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and text is not None:
            docs[field.target.id] = _unwrap(text)
    return docs


def _string(node: ast.stmt) -> str | None:
    """The string that a statement consists of, if it does."""
    value = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
    return value if isinstance(value, str) else None


def _unwrap(text: str) -> str:
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
