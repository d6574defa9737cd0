"""`[comm]`: the process group."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from titan_launch.config.base import Section


class CommConfig(Section):
    """The process group."""

    timeout_seconds: Annotated[int, Field(ge=1)] = 600
    """A collective that takes longer than this ends the run."""
