"""The job files that are part of the package. Their names can be used in place of paths: `--config llama_bn`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import titan_launch

_NEEDS_CHECKOUT = ("custom_model",)
"""Names of job files that need other files of the repository, which are not part of the package. These names cannot be
used."""


@cache
def carried_configs() -> dict[str, Path]:
    """Return the path of each job file in the package, by its name without suffix, such as `llama_bn` or
    `precision/fp32`."""
    folder = Path(titan_launch.__file__).parent / "configs"
    found = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.toml")}
    names = sorted(found.keys() - {*_NEEDS_CHECKOUT}, key=lambda name: ("/" in name, name))
    return {name: found[name] for name in names}
