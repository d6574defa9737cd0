"""The base class of all sections of the job file, and types that several sections share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


class Section(BaseModel):
    """A table of the job file. A section is read-only, refuses unknown keys, and converts no types ("5" is not 5).

    The string below a field is its reference documentation: `titan_launch.config.reference` writes it to
    `docs/reference/`. (Pydantic can read these strings itself, but does so at every import.)

    Pydantic builds a validator on first use (`defer_build`). The validator of `JobConfig` covers all its sections, so
    the sections need no validators of their own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    def changed(self, *names: str) -> Iterator[tuple[str, Any]]:
        """Yield (name, value) for each field whose value differs from its default. A field with a default factory, or
        without a default, is always yielded.

        `names`: the fields to compare; default: all. Values are compared, because the `config.json` of a run contains
        every key: the presence of a key does not show that a user set it.
        """
        for name in names or type(self).model_fields:
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                yield name, value


T = TypeVar("T")
Array = Annotated[tuple[T, ...], Field(strict=False)]
"""A TOML array as a read-only tuple. The TOML parser returns a list, which strict mode refuses for a tuple."""


class OneOf:
    """Annotation of a string that must be one of the names in a mapping: `Annotated[str, OneOf(ALGORITHMS)]`."""

    def __init__(self, table: Mapping[str, object]):
        self._table = table

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema that accepts only the names in the mapping. Pydantic calls this method on first use."""
        return core_schema.literal_schema(list(self._table))


def is_import_string(text: str) -> bool:
    """Return True if a text has the form `package.module:object`."""
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), *name.split(".")])


FloatDtype = Literal["float32", "bfloat16"]

Positive = Annotated[float, Field(gt=0)]

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float64": 8,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element, by dtype."""

Table = dict[str, Any]
"""A table whose keys the schema of the job file does not list. The reader of the table, for example the model, decides
which keys are valid."""
