"""The base of every section of the job file."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A table of the job file: read-only, without unknown keys, without silent conversions ("5" is not 5).

    The string below a field is its reference documentation: `titan_launch.config.reference` puts it into
    `docs/config.md` and the JSON Schema. (Pydantic can read these strings itself, but does so at every import.)

    Validators are built on first use: those of a whole job contain those of its sections, which need none of their own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


T = TypeVar("T")
Array = Annotated[tuple[T, ...], Field(strict=False)]
"""A TOML array, read-only: strict mode alone would refuse the list that TOML gives for a tuple."""

FloatDtype = Literal["float32", "bfloat16"]

Table = dict[str, Any]
"""A free-form table, whose keys something other than the job file's schema decides."""
