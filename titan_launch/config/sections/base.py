"""The base class of all sections of the job file, and types that several sections share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


class Section(BaseModel):
    """A table of the job file. It is read-only, refuses unknown keys, and converts no types ("5" is not 5).

    The string below a field is its reference documentation: `titan_launch.config.reference` writes it to
    `docs/reference/`. (Pydantic can read these strings itself, but does so at every import.)

    Validators are built on first use. The validator of a whole job contains those of its sections, so a section never
    builds one of its own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    def changed(self, *names: str) -> Iterator[tuple[str, Any]]:
        """Yield the fields that differ from their defaults, as (name, value as in TOML). `names`: fields to consider;
        default: all.

        A recorded configuration has every key. A key that is present therefore does not mean that a user set it.
        """
        for name in names or type(self).model_fields:
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                yield name, list(value) if isinstance(value, tuple) else value


T = TypeVar("T")
Array = Annotated[tuple[T, ...], Field(strict=False)]
"""A read-only TOML array. TOML gives a list, which strict mode alone would refuse for a tuple."""


class OneOf:
    """The type of a key whose value is the name of a row of a table: `Annotated[str, OneOf(TABLE)]`."""

    def __init__(self, table: Mapping[str, object]):
        self._table = table

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of a choice. The schema is built on first use, with the rows that the table has then."""
        return core_schema.literal_schema(list(self._table))


FloatDtype = Literal["float32", "bfloat16"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "bool": 1}
"""Bytes per element, by dtype."""

Table = dict[str, Any]
"""A free-form table. The model's arguments decide its keys, not the schema of the job file."""
