"""The cache of prepared data during tests: a temporary folder that all processes of the tests share."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

from titan_launch.data.cache import VARIABLE


def pytest_configure(config: pytest.Config) -> None:
    """Name the cache folder. The workers of xdist, and processes that tests start, inherit the variable."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = tempfile.mkdtemp(prefix="titan_launch_tests_")
        config.add_cleanup(lambda: shutil.rmtree(os.environ[VARIABLE], ignore_errors=True))
