"""Optional packages: tests that need some, and empty ones for jobs that are checked and do not run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from titan_launch.core.packages import PACKAGES, is_installed


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skip all tests of a test module without some packages.

    They are not imported, as `importorskip` does it. Each rank of a test imports the test module, and an import of
    `peft` takes 1.6 s.
    """
    missing = [module for module in modules if not is_installed(module)]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} cannot be imported")


def skip_without(module: str) -> None:
    """Skip the running test without a package, which is not imported: `sklearn` takes 3 s."""
    if not is_installed(module):
        pytest.skip(f"{module} cannot be imported")


def add_empty_packages(folder: Path, monkeypatch: pytest.MonkeyPatch, modules: Iterable[str] = tuple(PACKAGES)) -> None:
    """Write a package without content to a folder for each module that is missing here, and make it importable."""
    for module in modules:
        if not is_installed(module):
            inner = folder / module.replace(".", "/")
            inner.mkdir(parents=True)
            for package in (inner, *inner.parents[: module.count(".")]):
                (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(folder)
