"""Generator of the reference of the job file, from the docstrings of its fields.

`python -m titan_launch.config.reference` writes into `docs/reference/`: the JSON Schema for editors, and the generated
part of three pages: the job file, the keys of other tools, and the files of other programs.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from titan_launch.config.job import JobConfig
from titan_launch.config.loading.foreign_keys import COMMON_NAMES, TORCHTITAN_KEYS, foreign_key
from titan_launch.config.loading.provenance import toml_value
from titan_launch.config.loading.schema_walk import TAGGED, Kinds, alternatives, is_section, item_types, tables
from titan_launch.config.sections.data import MIXED_KINDS, DataSource, MixtureData, MixtureEntry
from titan_launch.config.sections.model import ModelConfig
from titan_launch.config.sections.section import Section
from titan_launch.core.terminal import say
from titan_launch.models.architectures import ARCHITECTURES, Architecture
from titan_launch.models.args import ModelArgs
from titan_launch.models.decoder.huggingface_classes import FAMILIES, NEUTRAL, REFUSED, WITHOUT_EFFECT
from titan_launch.models.huggingface import adapter_config

_EXTENDS = {
    "description": "Path of a job file that this file extends, or an array of paths, relative to this file. Tables are "
    "merged key by key; other values are replaced. Later files override earlier ones; this file overrides all of them.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a job file."""
    job = section_schema(JobConfig)
    definitions = job.pop("$defs")
    for kinds in TAGGED.values():
        for variant in kinds.variants.values():
            definitions[variant.__name__].pop("required", None)  # `kind` may be set in a file that the job file extends
    for name, architecture in ARCHITECTURES.items():
        args = section_schema(architecture.args)
        args.pop("required", None)  # the flavor sets omitted arguments
        definitions |= args.pop("$defs", {})
        for field in architecture.args.model_fields.values():
            for section in filter(is_section, alternatives(field.annotation)):
                definitions[section.__name__].pop("required", None)  # the flavor also sets omitted keys of these tables
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
    """Return pydantic's JSON Schema of one section, with the docstrings of the fields as descriptions. Null is removed,
    because TOML has no null."""
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
    """Return an if-then schema: if the key `name` is this model, only the flavors and arguments of this model are
    valid. For the default model, the condition is also true if the key `name` is omitted."""
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
    """Return the docstrings of a section's fields by name, including inherited fields, one line per paragraph. Fields
    without a docstring are omitted."""
    docs: dict[str, str] = {}
    for cls in reversed(section.__mro__):
        # The classes in MIXED_KINDS are created at run time, so they have no source code.
        if issubclass(cls, Section) and cls is not Section and cls not in MIXED_KINDS.values():
            docs |= _own_docs(cls)
    return {name: docs[name] for name in section.model_fields if name in docs}


def section_doc(section: type[Section]) -> str:
    """Return the docstring of a section, one line per paragraph."""
    return _unwrap(section.__doc__ or "")


@cache
def _own_docs(cls: type[Section]) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for statement, following in pairwise(tree.body):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = _unwrap(text)
    return docs


def _unwrap(text: str) -> str:
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


REFERENCE_FOLDER = Path(__file__).parents[2] / "docs" / "reference"

_TYPES = {"integer": "whole number", "number": "number", "string": "string", "boolean": "bool", "object": "table"}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def _foreign_keys() -> Iterator[str]:
    """Yield the tables of keys of other tools. After TorchTitan's table, there is one table for each section of the job
    file. The last table has the keys that no key of the job file replaces."""
    yield "## TorchTitan\n"
    yield from _remedy_table(TORCHTITAN_KEYS)
    yield "## TRL, Transformers' Trainer, Axolotl, LLaMA-Factory, torchtune, Lightning\n"
    yield "The headings are sections of titan_launch's job file. A key gets the same remedy in every section.\n"
    by_section: dict[str, list[str]] = {section: [] for section in [*JobConfig.model_fields, ""]}
    for key in COMMON_NAMES:
        found = re.search(r'"(\w+)\.\w', _remedy(key))
        by_section[found[1] if found else ""].append(key)
    for section, keys in by_section.items():
        if keys:
            yield f"### `[{section}]`\n" if section else "### No key of the job file\n"
            yield from _remedy_table(keys)


_QUOTED = r'"([^"]+)" = (\[[^]]*\]|"[^"]*"|\w+)|"([^"]+)"|(--[a-z-]+|\[+[a-z._]+\]+)'
"""Pattern of a part of a remedy: a quoted key with its value, a quoted key or value alone, an option, or a section."""


def _remedy(key: str) -> str:
    found = foreign_key(tuple(key.split(".")))
    assert found is not None, key
    return found[0]


def _remedy_table(keys: Iterable[str]) -> Iterator[str]:
    by_remedy: dict[str, list[str]] = {}
    for key in keys:
        by_remedy.setdefault(_remedy(key), []).append(key)
    yield from _table(
        ["key of the other tool", "in titan_launch"],
        (
            [_code(*group), re.sub(_QUOTED, lambda m: _code(m[3] or m[4] or f"{m[1]} = {m[2]}"), remedy)]
            for remedy, group in by_remedy.items()
        ),
    )


def _keys_of_files() -> Iterator[str]:
    families = {_code(model_type): family for model_type, family in FAMILIES.items()}
    yield "## Keys of `config.json`\n"
    yield from _table(
        ["family", "keys that decide the computation", "other names"],
        (
            [
                name,
                _code(*(key for feature in family.features for key in feature.keys)),
                ", ".join(f"`{alias}` for `{key}`" for alias, key in family.aliases.items()),
            ]
            for name, family in families.items()
        ),
    )
    yield "These keys have one supported value. Any other value is refused:\n"
    neutral = {"all": NEUTRAL, **{name: family.neutral for name, family in families.items()}}
    yield from _table(
        ["key", "value", "families"],
        ([_code(key), _code(json.dumps(value)), name] for name, keys in neutral.items() for key, value in keys.items()),
    )
    yield "These keys are refused with any value but null:\n"
    yield from _table(["key", "reason"], ([_code(key), reason] for key, reason in REFUSED.items()))
    yield "These keys change neither the logits nor the training of a language model:\n"
    unused = {"all": WITHOUT_EFFECT, **{name: family.unused for name, family in families.items()}}
    yield from _table(
        ["keys", "families", "reason"],
        (
            [_code(*(key for key, other in keys.items() if other == reason)), name, reason]
            for name, keys in unused.items()
            for reason in dict.fromkeys(keys.values())
        ),
    )
    yield "## Keys of `adapter_config.json`\n"
    yield f"These keys decide the adapters: {_code(*adapter_config.AdapterConfig.model_fields)}.\n"
    yield "These keys must have one of the values:\n"
    yield from _table(
        ["key", "values"],
        ([_code(key), _code(*map(json.dumps, found))] for key, found in adapter_config.NEUTRAL.items()),
    )
    yield "These keys have no effect:\n"
    yield from _table(
        ["keys", "reason"], ([_code(key), reason] for key, reason in adapter_config.WITHOUT_EFFECT.items())
    )


def _code(*texts: str) -> str:
    return ", ".join(f"`{text}`" for text in texts)


def _table(header: Sequence[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table, and an empty line."""
    yield from (f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))
    yield ""


def _sections() -> Iterator[str]:
    for name, field in JobConfig.model_fields.items():
        heading = f"## `[{name}]`"
        if (name,) in TAGGED:
            yield from _tagged_table(heading, TAGGED[(name,)])
        else:
            (section,) = alternatives(field.annotation)
            yield from _section(heading, name, section)
        if name == "model":
            yield from _architectures()


def _section(heading: str, path: str, section: type[Section]) -> Iterator[str]:
    """Yield the description of a table's keys, then the description of each array of tables in this table."""
    yield from _describe(heading, section_doc(section), _fields(section))
    for name, field in section.model_fields.items():
        for kind in alternatives(field.annotation):
            for item in filter(is_section, item_types(kind)):
                yield from _section(f"### `[[{path}.{name}]]`", f"{path}.{name}", item)


def _tagged_table(heading: str, kinds: Kinds) -> Iterator[str]:
    """Yield the description of a table that has a `kind`: the keys that all kinds except `mixture` share, then the
    other keys of each kind."""
    single = {kind: section for kind, section in kinds.variants.items() if section is not MixtureData}
    own = Kinds(single).keys_of_some()
    fields = {kind: _fields(section) for kind, section in kinds.variants.items()}
    common = {name: field for name, field in fields[kinds.default].items() if name not in own}
    del common["kind"]
    text = "Kind of the table. It decides which other keys are valid."
    names = _code(*map(toml_value, kinds.variants))
    common_keys = {"kind": {"type": names, "default": kinds.default, "description": text}}
    yield from _describe(heading, "", common_keys | common)
    for kind, section in kinds.variants.items():
        own_fields = {name: field for name, field in fields[kind].items() if name not in common_keys | common}
        yield from _describe(f'### `kind = "{kind}"`', section_doc(section), own_fields)
        if section is MixtureData:
            mixed = next(iter(MIXED_KINDS.values()))
            keys = [name for name in field_docs(MixtureEntry) if name not in DataSource.model_fields]
            of_entry = {name: _fields(mixed)[name] for name in keys}
            yield from _describe("#### `[[data.sources]]`", section_doc(MixtureEntry), of_entry)


def _architectures() -> Iterator[str]:
    """Yield the arguments of every arguments class, then the size tables of the models that use this class."""
    models: dict[type[ModelArgs], list[str]] = {}
    for name, architecture in ARCHITECTURES.items():
        models.setdefault(architecture.args, []).append(name)
    for args, names in models.items():
        yield from _args(args, names)
        for name in names:
            yield from _flavors(name, ARCHITECTURES[name])


def _args(args: type[ModelArgs], names: Sequence[str]) -> Iterator[str]:
    fields = {field_name: field | {"required": False} for field_name, field in _fields(args).items()}
    doc = f"{section_doc(args)} Omitted arguments have the value of the flavor, or else the default."
    yield from _describe(f"### `[model.args]` of {_code(*names)}", doc, fields)
    for field_name, field in args.model_fields.items():
        for section in filter(is_section, alternatives(field.annotation)):
            doc, of_section = section_doc(section), _fields(section)
            doc = f"{doc} Omitted keys have the value of the flavor, if it has this table, or else the default."
            yield from _describe(f"#### `[model.args.{field_name}]`", doc, of_section)


def _flavors(name: str, architecture: Architecture) -> Iterator[str]:
    """Yield the size table of a model. Arguments with the same value in all flavors are listed above the table."""
    yield f"#### Flavors of `{name}`\n"
    flavors = architecture.flavors
    first, *others = flavors.values()
    common = {key: value for key, value in first.items() if all(key in row and row[key] == value for row in others)}
    if common:
        yield f"All flavors: {_code(*(f'{key} = {toml_value(value)}' for key, value in common.items()))}.\n"
    varied = {key for row in flavors.values() for key in row} - common.keys()
    columns = [key for key in architecture.args.model_fields if key in varied]
    yield from _table(
        ["flavor", *map(_code, columns)],
        (
            [_code(flavor), *(toml_value(row[column]) if column in row else "" for column in columns)]
            for flavor, row in flavors.items()
        ),
    )


def _describe(heading: str, doc: str, fields: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield f"{heading}\n"
    if doc:
        yield f"{doc}\n"
    if fields:
        yield from (_entry(name, field) for name, field in fields.items())
        yield ""


def _fields(section: type[Section]) -> dict[str, dict[str, Any]]:
    """Return the JSON Schema of every key of a section. An added entry `required` tells whether the key is required."""
    schema = section_schema(section)
    required = schema.get("required", [])
    return {name: field | {"required": name in required} for name, field in schema["properties"].items()}


def _entry(name: str, field: Mapping[str, Any]) -> str:
    notes = [_type(field)]
    if field.get("default") not in (None, [], {}):
        notes.append(f"default `{toml_value(field['default'])}`")
    elif field.get("required"):
        notes.append("required")
    return f"- **`{name}`** ({'; '.join(notes)}): {field['description']}"


def _type(field: Mapping[str, Any], plural: str = "") -> str:
    """Return a type in words, with its bounds. `plural`: "s" for the items of an array."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(kind, plural) for kind in field["anyOf"]))
    if "enum" in field or "const" in field:
        return _code(*map(toml_value, field.get("enum", [field.get("const")])))
    if "$ref" in field or "oneOf" in field:
        return f"table{plural}"
    if field["type"] == "array":
        return f"array{plural} of {_type(field['items'], plural='s')}"
    bounds = [f"{sign} {field[bound]}" for bound, sign in _BOUNDS.items() if bound in field]
    return " ".join([f"{_TYPES.get(field['type'], field['type'])}{plural}", ", ".join(bounds)]).strip()


_PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "job_file.md": _sections,
    "foreign_keys.md": _foreign_keys,
    "files_of_other_programs.md": _keys_of_files,
}
"""Functions that yield the generated part of each page, which follows `_MARKER`. The part above is written by hand."""

_MARKER = re.compile(r"<!-- Generated by `python -m titan_launch.config.reference` from here on;.*?-->\n", re.DOTALL)


def documents() -> dict[Path, str]:
    """Return the text of every generated file. The part of a page that is written by hand is read from the page."""
    schema = json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
    texts = {REFERENCE_FOLDER / "job.schema.json": schema}
    for name, generated in _PAGES.items():
        page = REFERENCE_FOLDER / name
        text = page.read_text(encoding="utf-8")
        marker = _MARKER.search(text)
        assert marker is not None, page
        texts[page] = "\n".join([text[: marker.end()], *generated()])
    return texts


def main() -> None:
    """Write the generated files."""
    for path, text in documents().items():
        path.write_text(text, encoding="utf-8")
        say(str(path))


if __name__ == "__main__":
    main()
