"""Optional packages, and the commands that install them. This module does not import these packages."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from typing import NamedTuple


class Package(NamedTuple):
    """An optional package."""

    name: str
    """Name of the package for `pip install`."""

    extra: str
    """The extra of titan-launch that installs the package."""


PACKAGES = {
    "PIL": Package("pillow", "images"),
    "backports.zstd": Package("backports.zstd", "zst"),
    "datasets": Package("datasets", "datasets"),
    "gcsfs": Package("gcsfs", "gs"),
    "jinja2": Package("jinja2", "chat"),
    "lm_eval": Package("lm_eval", "eval"),
    "matplotlib": Package("matplotlib", "plot"),
    "mlflow": Package("mlflow", "mlflow"),
    "pyarrow": Package("pyarrow", "parquet"),
    "s3fs": Package("s3fs", "s3"),
    "safetensors": Package("safetensors", "hf"),
    "sklearn": Package("scikit-learn", "images"),
    "tokenizers": Package("tokenizers", "tokenizers"),
    "torchao": Package("torchao", "float8"),
    "transformers": Package("transformers", "hf"),
    "wandb": Package("wandb", "wandb"),
}
"""The optional packages, by the module that they provide."""


def is_installed(module: str) -> bool:
    """Return True if a module can be imported. A folder with the module's name, but without `__init__.py`, does not
    count, because wandb writes its runs to a folder `wandb` in the working directory."""
    with suppress(ModuleNotFoundError, ValueError):  # `backports` may be missing, or a module may have no spec
        found = find_spec(module)
        return found is not None and found.origin is not None
    return False


def not_installed(module: str) -> str:
    """Return a clause for a message about a missing module of `PACKAGES`. The clause names the package and the command
    that installs it."""
    package = PACKAGES[module]
    return f"needs the package {package.name}, which is not installed: {install(module)}"


def install(module: str) -> str:
    """Return the command that installs a module of `PACKAGES`."""
    return f"pip install 'titan-launch[{PACKAGES[module].extra}]'"
