"""Where the benchmarks of this folder put their results."""

from __future__ import annotations

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
