"""The environment of all tests, which the workers of xdist and processes that tests start inherit."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile

import pytest

from titan_launch.data.cache import VARIABLE


def pytest_configure(config: pytest.Config) -> None:
    """Name a temporary cache folder of prepared data. Do not ignore Ctrl-C, as processes in the background of a shell
    do: tests send it to processes that they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = tempfile.mkdtemp(prefix="titan_launch_tests_")
        config.add_cleanup(lambda: shutil.rmtree(os.environ[VARIABLE], ignore_errors=True))
