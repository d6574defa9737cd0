"""`[checkpoint]`: saving and resuming."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from titan_launch.config.base import Section


class CheckpointConfig(Section):
    """Saving and resuming."""

    enable: bool = False
    """Whether checkpoints are written, and whether a run with the same name resumes from them."""

    interval: Annotated[int, Field(ge=1)] = 500
    """Steps between checkpoints. The last step is always saved."""

    load: Literal["latest", "none"] = "latest"
    """`latest`: resume from the newest complete checkpoint of the run folder, if there is one. `none`: start anew;
    what an earlier run left in the folder is moved aside, not deleted."""
