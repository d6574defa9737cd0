"""The reference of the job file, generated from the docstrings of its fields.

`python -m titan_launch.config.reference` writes into `docs/reference/`: a page of all keys, a page of the keys of other
tools, the tables of keys in files of other programs, and the JSON Schema for editors.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    for variant in (variant for kinds in TAGGED.values() for variant in kinds.variants.values()):
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
    """Return the docstring of every field of a section, including inherited fields, one line per paragraph."""
    docs: dict[str, str] = {}
    for cls in reversed(section.__mro__):
        # Mixed kinds are created at run time, so they have no source code.
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
    for field, following in pairwise(tree.body):
        text = _string(following)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and text is not None:
            docs[field.target.id] = _unwrap(text)
    return docs


def _string(node: ast.stmt) -> str | None:
    """Return the string of a statement that consists of a string; None for any other statement."""
    value = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
    return value if isinstance(value, str) else None


def _unwrap(text: str) -> str:
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


REFERENCE_FOLDER = Path(__file__).parents[2] / "docs" / "reference"

_INTRODUCTION = """\
# The job file

<!-- Generated by `python -m titan_launch.config.reference`; edit the docstrings in titan_launch/config/. -->

A job is one TOML file. Every section and nearly every key may be omitted: the defaults below train a small Llama on
the source code of Python's standard library, on any machine.

```toml
#:schema ../docs/reference/job.schema.json
extends = "llama_debug.toml"

[job]
name = "first"

[training]
steps = 200

[[precision.rules]]
type = "RMSNorm"
param_dtype = "float32"
```

With the first line, editors with a TOML extension (such as Even Better TOML) complete keys and show this reference. The
path is relative to the job file.

`python -m titan_launch check --config job.toml` finds the errors of a job in a tenth of a second, without torch or a
GPU.

## Files that extend others

`extends` is the path of a job file, or an array of paths, relative to the file that contains it. These files are
merged in order, and the file itself last. Tables are merged key by key. Any other value, including an array, replaces
the earlier one. A file that is reached in several ways is merged once, where it is first reached.

A job has at most 100 files. A TOML file has at most 1 MiB, and a JSON file at most 4 MiB. A file has at most 100,000
values, 1,000 items in an array (10,000 in an array `path`), 32 nested tables and arrays, and integers of 64 bits.

## Overrides

Every key can be set on the command line: `--training.steps=20` or `--training.steps 20`. Overrides take precedence over
files.

- Values are TOML. A value that is not TOML is a string, so `--job.name=test` needs no quotes. A string that looks like
  another type needs quotes: `--job.name='"123"'`.
- A key without a value is set to true: `--debug.deterministic`.
- An index selects an item of an array: `--precision.rules.0.param_dtype=float32`. The index after the last one appends
  an item.
- A table is merged into the existing one: `--model.args='{norm = "batchnorm", n_layers = 2}'`. An array replaces the
  existing one.
- If a key is set twice, the later value is used.

## Tables with a kind

The keys of `[data]`, `[[data.sources]]`, `[validation.data]` and `[lr_scheduler]` depend on their `kind`. If a later
file or an override changes the kind, keys with the same meaning in both kinds are kept, and the others are removed:
`--lr_scheduler.kind=cosine` keeps `warmup_steps` and `min_lr_factor`, and removes `decay_ratio`. `--data.kind=images`
keeps `shuffle`, and removes `path`: a path of texts is not a path of images.

## The record of a run

A run folder contains the complete configuration as `config.json`. This file is also a job file: `--config
outputs/first/config.json` runs the same job again.

## Messages

Unknown keys, values of the wrong type (`"5"` is not `5`) and contradictions between keys are errors. All errors are
reported at once, before the run starts, with the file and line, or the override, of each key:

```
error: 2 problems in configs/first.toml
  configs/first.toml:8: training.stepz = 200: unknown key; did you mean "training.steps"?
  command line: --training.seq_len=abc: training.seq_len = "abc": must be a whole number
```
"""

_FOREIGN_INTRODUCTION = """\
# Keys of other tools

<!-- Generated by `python -m titan_launch.config.reference`; edit titan_launch/config/loading/foreign_keys.py. -->

Search this page for a key of another training tool to find the key that replaces it here. `check` and every run use the
same tables: for such a key in a job file, the error names the key to use.

```
error: 2 problems in job.toml
  job.toml:2: training.batch_size = 4: unknown key; use "training.local_batch_size"
  job.toml:5: optimizer.fused = true: unknown key; use "optimizer.implementation" = "fused"
```

- For a misspelt key or section, the error suggests the most similar one.
- TorchTitan's keys that are not in the first table have the same section and name here, or are unknown.
- `titan-launch migrate` [converts a whole job file of TorchTitan](../how_to/from_torchtitan.md#convert-a-job-file).
- [The job file](job_file.md) explains the keys in the column "here".
"""

_TYPES = {"integer": "whole number", "number": "number", "string": "string", "boolean": "bool", "object": "table"}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def reference() -> str:
    """Return the page of the job file."""
    return "\n".join([_INTRODUCTION, *_sections()])


def foreign_keys() -> str:
    """Return the page of keys of other tools."""
    return "\n".join(
        [
            _FOREIGN_INTRODUCTION,
            "## TorchTitan\n",
            *_remedy_table(TORCHTITAN_KEYS),
            "## TRL, Transformers' Trainer, Axolotl, LLaMA-Factory, torchtune, Lightning\n",
            "The headings are the sections of the job file here. The error for a key is the same in every section.\n",
            *_common_names(),
        ]
    )


def _common_names() -> Iterator[str]:
    """Yield a table for each section of the job file, then a table of the keys that no key of the job file replaces."""
    by_section: dict[str, list[str]] = {section: [] for section in [*JobConfig.model_fields, ""]}
    for key in COMMON_NAMES:
        found = re.search(r'"(\w+)\.\w', _remedy(key))
        by_section[found[1] if found else ""].append(key)
    for section, keys in by_section.items():
        if keys:
            yield f"### `[{section}]`\n" if section else "### No key of the job file\n"
            yield from _remedy_table(keys)


_QUOTED = r'"([^"]+)" = (\[[^]]*\]|"[^"]*"|\w+)|"([^"]+)"'
"""Pattern of a part of a remedy: a quoted key with its value, or a quoted key or value alone."""


def _remedy(key: str) -> str:
    found = foreign_key(tuple(key.split(".")))
    assert found is not None, key
    return found[0]


def _remedy_table(keys: Iterable[str]) -> Iterator[str]:
    yield from (_row(["key there", "here"]), _row(["---", "---"]))
    by_remedy: dict[str, list[str]] = {}
    for key in keys:
        by_remedy.setdefault(_remedy(key), []).append(key)
    for remedy, group in by_remedy.items():
        code = re.sub(_QUOTED, lambda match: f"`{match[3] or f'{match[1]} = {match[2]}'}`", remedy)
        yield _row([_names(group), code])
    yield ""


_FILES_PAGE = REFERENCE_FOLDER / "files_of_other_programs.md"
_FILES_MARKER = """<!-- Generated by `python -m titan_launch.config.reference` from here on;
edit titan_launch/models/*/huggingface_*.py and titan_launch/models/huggingface/adapter_config.py. -->
"""


def files_of_other_programs() -> str:
    """Return the page of files of other programs: the part that is written by hand, which stays, and the generated
    tables of keys."""
    written = _FILES_PAGE.read_text(encoding="utf-8").partition(_FILES_MARKER)[0]
    return "\n".join([written + _FILES_MARKER, *_keys_of_config_json(), *_keys_of_adapters()])


def _keys_of_config_json() -> Iterator[str]:
    yield "## Keys of `config.json`\n"
    yield from (_row(["family", "keys that decide the computation", "other names"]), _row(["---"] * 3))
    for model_type, family in FAMILIES.items():
        keys = [key for feature in family.features for key in feature.keys]
        aliases = (f"`{alias}` for `{key}`" for alias, key in family.aliases.items())
        yield _row([f"`{model_type}`", _names(keys), ", ".join(aliases)])
    yield "\nThese keys have one supported value. Any other value is refused:\n"
    yield from (_row(["key", "value", "families"]), _row(["---"] * 3))
    yield from (_row([f"`{key}`", f"`{json.dumps(value)}`", "all"]) for key, value in NEUTRAL.items())
    for model_type, family in FAMILIES.items():
        for key, value in family.neutral.items():
            yield _row([f"`{key}`", f"`{json.dumps(value)}`", f"`{model_type}`"])
    yield "\nThese keys are refused with any value but null:\n"
    yield from (_row(["key", "reason"]), _row(["---"] * 2))
    yield from (_row([f"`{key}`", reason]) for key, reason in REFUSED.items())
    yield "\nThese keys have no effect:\n"
    yield from (_row(["keys", "families", "reason"]), _row(["---"] * 3))
    yield from _by_reason(WITHOUT_EFFECT, "all")
    for model_type, family in FAMILIES.items():
        yield from _by_reason(family.unused, f"`{model_type}`")
    yield ""


def _keys_of_adapters() -> Iterator[str]:
    yield "## Keys of `adapter_config.json`\n"
    yield f"These keys decide the adapters: {_names(adapter_config.AdapterConfig.model_fields)}.\n"
    yield "These keys must have one of the values:\n"
    yield from (_row(["key", "values"]), _row(["---"] * 2))
    for key, values in adapter_config.NEUTRAL.items():
        yield _row([f"`{key}`", ", ".join(f"`{json.dumps(value)}`" for value in values)])
    yield "\nThese keys have no effect:\n"
    yield from (_row(["keys", "reason"]), _row(["---"] * 2))
    yield from (_row([f"`{key}`", reason]) for key, reason in adapter_config.WITHOUT_EFFECT.items())
    yield ""


def _by_reason(reasons: Mapping[str, str], families: str) -> Iterator[str]:
    for reason in dict.fromkeys(reasons.values()):
        yield _row([_names(key for key, other in reasons.items() if other == reason), families, reason])


def _names(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def _sections() -> Iterator[str]:
    for name, field in JobConfig.model_fields.items():
        heading = f"## `[{name}]`"
        if (name,) in TAGGED:
            yield from _tagged_table(heading, TAGGED[(name,)])
        else:
            (section,) = alternatives(field.annotation)
            yield from _table(heading, name, section)
        if name == "model":
            yield from _architectures()


def _table(heading: str, path: str, section: type[Section]) -> Iterator[str]:
    """Yield the description of a table's keys, then that of each array of tables in it."""
    yield from _describe(heading, section_doc(section), _fields(section))
    for name, field in section.model_fields.items():
        for kind in alternatives(field.annotation):
            for item in filter(is_section, item_types(kind)):
                yield from _table(f"### `[[{path}.{name}]]`", f"{path}.{name}", item)


def _tagged_table(heading: str, kinds: Kinds) -> Iterator[str]:
    """Yield the keys that all kinds except `mixture` have, then the other keys of each kind."""
    own = Kinds(
        {kind: section for kind, section in kinds.variants.items() if section is not MixtureData}
    ).keys_of_some()
    fields = {kind: _fields(section) for kind, section in kinds.variants.items()}
    common = {name: field for name, field in fields[kinds.default].items() if name not in own}
    del common["kind"]
    names = ", ".join(f'`"{kind}"`' for kind in kinds.variants)
    text = "Kind of the table. It decides which other keys are valid."
    common_keys = {"kind": {"type": names, "default": kinds.default, "description": text}}
    yield from _describe(heading, "", common_keys | common)
    for kind, section in kinds.variants.items():
        own_fields = {name: field for name, field in fields[kind].items() if name not in common_keys | common}
        yield from _describe(f'### `kind = "{kind}"`', section_doc(section), own_fields)
        if section is MixtureData:
            mixed = next(iter(MIXED_KINDS.values()))
            keys = {
                name: _fields(mixed)[name] for name in field_docs(MixtureEntry) if name not in DataSource.model_fields
            }
            yield from _describe("#### `[[data.sources]]`", section_doc(MixtureEntry), keys)


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
    yield from _describe(f"### `[model.args]` of {', '.join(f'`{name}`' for name in names)}", doc, fields)
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
        yield f"All flavors: {', '.join(f'`{key} = {toml_value(value)}`' for key, value in common.items())}.\n"
    varied = {key for row in flavors.values() for key in row} - common.keys()
    columns = [key for key in architecture.args.model_fields if key in varied]
    yield _row(["flavor", *(f"`{column}`" for column in columns)])
    yield _row(["---"] * (len(columns) + 1))
    for flavor, row in flavors.items():
        yield _row([f"`{flavor}`", *(toml_value(row[column]) if column in row else "" for column in columns)])
    yield ""


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
        return ", ".join(f"`{toml_value(choice)}`" for choice in field.get("enum", [field.get("const")]))
    if "$ref" in field or "oneOf" in field:
        return f"table{plural}"
    if field["type"] == "array":
        return f"array{plural} of {_type(field['items'], plural='s')}"
    bounds = [f"{sign} {field[bound]}" for bound, sign in _BOUNDS.items() if bound in field]
    return " ".join([f"{_TYPES.get(field['type'], field['type'])}{plural}", ", ".join(bounds)]).strip()


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def documents() -> dict[Path, str]:
    """Return the text of every generated file."""
    schema = json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
    return {
        REFERENCE_FOLDER / "job.schema.json": schema,
        REFERENCE_FOLDER / "job_file.md": reference(),
        REFERENCE_FOLDER / "foreign_keys.md": foreign_keys(),
        _FILES_PAGE: files_of_other_programs(),
    }


def main() -> None:
    """Write the generated files."""
    for path, text in documents().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        say(str(path))


if __name__ == "__main__":
    main()
