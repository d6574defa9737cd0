"""`[job]`: what the run is called, where it writes and what it runs on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from titan_launch.config.base import Section


def _file_name(name: str) -> str:
    is_plain = name.isascii() and name.replace(".", "").replace("_", "").replace("-", "").isalnum()
    if is_plain and name[0].isalnum():
        return name
    raise ValueError("must consist of letters, digits, `.`, `_` and `-`, and start with a letter or a digit")


class GeneralConfig(Section):
    """What the run is called, where it writes and what it runs on."""

    name: Annotated[
        str,
        AfterValidator(_file_name),
        Field(json_schema_extra={"pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$"}),
    ] = "job"
    """Name of the run, and of its folder below `dump_folder`. Letters, digits, `.`, `_` and `-`."""

    dump_folder: str = "outputs"
    """Folder that holds the run folders, relative to the working directory."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What to compute on. `auto` takes CUDA where there is a GPU. The backend follows: NCCL on `cuda`, gloo on
    `cpu`."""

    @property
    def run_folder(self) -> Path:
        """Folder of all files that a run writes."""
        return Path(self.dump_folder, self.name)
