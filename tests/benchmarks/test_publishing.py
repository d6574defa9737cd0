"""Tables of benchmarks in Markdown files."""

from __future__ import annotations

from pathlib import Path

from benchmarks.publishing import markdown_table, publish, published_rows


def test_rows_of_a_published_table_are_read_as_they_were_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- memory: begin -->\n<!-- memory: end -->\nafter | text\n")
    assert published_rows("memory", page) == {}
    rows = [["a.toml", "2", ""], ["published: a, the same", "", "0.1"]]
    publish(markdown_table([["job", "ranks", "GiB"], *rows]), "memory", page)
    assert published_rows("memory", page) == {row[0]: row for row in rows}
