"""The server that runs the commands of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile.runner import Runner, running


@pytest.fixture(scope="session")  # the order of files mixes those of this package with others
def runner() -> Iterator[Runner]:
    """Return a server that runs commands with limits on memory and time."""
    with running() as server:
        yield server
