"""Where the benchmarks of this folder put their results."""

from __future__ import annotations

from pathlib import Path


def publish(text: str, name: str, path: Path | None) -> None:
    """Print a result, and put it into a Markdown file, between the markers of the benchmark."""
    print(text)
    if path is not None:
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, _, rest = path.read_text().partition(begin)
        _, _, after = rest.partition(end)
        path.write_text(f"{before}{begin}\n{text}\n{end}{after}")
