"""Publication of benchmark results in Markdown files, and the commit that was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from titan_launch.core.fingerprint import commit_of


def markdown_table(rows: Sequence[Sequence[str]], texts: int | None = None) -> str:
    """Return a Markdown table. The first row is its header. The columns behind the first `texts` are numbers, and
    aligned to the right; None: there are no such columns."""
    head, *body = rows
    rule = ["---" if texts is None or index < texts else "---:" for index in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))


def publish(text: str, name: str, path: Path | None) -> None:
    """Print a result, and write it between the markers of the benchmark in a Markdown file."""
    print(text)
    if path is not None:
        put_between_markers(text, name, path)


def put_between_markers(text: str, name: str, path: Path) -> None:
    """Replace the text between the markers of the benchmark in a Markdown file."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = path.read_text().partition(begin)
    _, _, after = rest.partition(end)
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def published_rows(name: str, path: Path) -> dict[str, list[str]]:
    """Return the rows of the benchmark's table in a Markdown file, by their first cells."""
    _, _, rest = path.read_text().partition(f"<!-- {name}: begin -->")
    lines = [line for line in rest.partition(f"<!-- {name}: end -->")[0].splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {row[0]: row for row in rows}


def commit() -> str:
    """Return the commit of the sources; "unknown" without git or outside of a repository."""
    return commit_of(Path(__file__).parent, digits=7) or "unknown"
