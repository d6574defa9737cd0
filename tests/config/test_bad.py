"""Errors for wrong job files: each `bad/*.toml` has its exact error text beside it.

A first line `# overrides: ...` holds command-line overrides. `python -m tests.config.test_bad` writes the texts anew,
for review as a diff.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from titan_launch.config.loading.load import load_job
from titan_launch.core.errors import UserError

ROOT = Path(__file__).parents[2]
BAD = sorted(path.relative_to(ROOT) for path in (ROOT / "tests/config/bad").glob("*.toml"))


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_a_bad_job_file_has_the_expected_message(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = message(path)
    assert len(set(found.splitlines())) == len(found.splitlines()), "a mistake is printed twice"
    assert found == path.with_suffix(".expected").read_text(encoding="utf-8").rstrip("\n")


def message(path: Path) -> str:
    """Return the error text for a bad job file."""
    first_line = path.read_text(encoding="utf-8").partition("\n")[0]
    marker, _, overrides = first_line.partition(": ")
    with pytest.raises(UserError) as caught:
        load_job(str(path), shlex.split(overrides) if marker == "# overrides" else ())
    return str(caught.value)


if __name__ == "__main__":
    os.chdir(ROOT)
    for bad in BAD:
        bad.with_suffix(".expected").write_text(message(bad) + "\n", encoding="utf-8")
