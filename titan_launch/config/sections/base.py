"""The base of every section of the job file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


class Section(BaseModel):
    """A table of the job file: read-only, without unknown keys, without silent conversions ("5" is not 5).

    The string below a field is its reference documentation: `titan_launch.config.reference` writes it to
    `docs/reference/`. (Pydantic can read these strings itself, but does so at every import.)

    Validators are built on first use: those of a whole job contain those of its sections, which need none of their own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    def changed(self, *names: str) -> Iterator[tuple[str, Any]]:
        """Of the named fields, or of all, those that are not at their defaults, with their values as TOML has them.

        A recorded configuration has every key, so that a key is there does not tell that somebody chose it.
        """
        for name in names or type(self).model_fields:
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                yield name, list(value) if isinstance(value, tuple) else value


T = TypeVar("T")
Array = Annotated[tuple[T, ...], Field(strict=False)]
"""A TOML array, read-only: strict mode alone would refuse the list that TOML gives for a tuple."""


class OneOf:
    """The type of a key that names a row of a table: `Annotated[str, OneOf(TABLE)]`."""

    def __init__(self, table: Mapping[str, object]):
        self._table = table

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of a choice. The schema is built on first use, with the rows that the table then has."""
        return core_schema.literal_schema(list(self._table))


FloatDtype = Literal["float32", "bfloat16"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
"""Bytes of an element, by dtype."""

Table = dict[str, Any]
"""A free-form table, whose keys something other than the job file's schema decides."""
