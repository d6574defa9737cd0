"""Helpers of the benchmarks in this folder: the files for their results, and the commit that they measured."""

from __future__ import annotations

import subprocess
from pathlib import Path


def publish(text: str, name: str, path: Path | None) -> None:
    """Print a result, and put it into a Markdown file, between the markers of the benchmark."""
    print(text)
    if path is not None:
        put_between_markers(text, name, path)


def put_between_markers(text: str, name: str, path: Path) -> None:
    """Put a result into a Markdown file, in place of what is between the markers of the benchmark."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = path.read_text().partition(begin)
    _, _, after = rest.partition(end)
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def commit() -> str:
    """Return the commit of the sources; "unknown" without git or outside of a repository."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"
