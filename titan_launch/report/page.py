"""Pages of HTML in one file each: without a script, and without anything from the network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from titan_launch.core.errors import UserError
from titan_launch.core.files import replace_text

_STYLE = """
:root { color-scheme: light dark; --line: #d5d8dc; --soft: #f4f5f7; --text: #1d2329; --back: #fff; --dim: #636c76; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3a4149; --soft: #1f242a; --text: #e4e7ea; --back: #14181c; --dim: #9aa4ae; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 0 auto;
  max-width: 1200px; padding: 16px 24px 64px; }
h1 { font-size: 24px; margin: 12px 0 4px; } h2 { font-size: 18px; margin: 32px 0 8px; }
.dim { color: var(--dim); } p { margin: 4px 0; }
.state { border-radius: 4px; padding: 1px 8px; font-size: 14px; color: #fff; background: #636c76; }
.running { background: #2f6fbb; } .finished, .early { background: #3b8f5a; } .failed { background: #c0392b; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); gap: 16px; }
figure { margin: 0; } svg { width: 100%; height: auto; background: var(--soft); border-radius: 6px; }
svg text { fill: var(--text); font: 12px system-ui, sans-serif; } svg .title { font-size: 14px; font-weight: 600; }
svg .tick { fill: var(--dim); } svg .end { text-anchor: end; } svg .middle { text-anchor: middle; }
svg .grid { stroke: var(--line); fill: none; } svg .line { fill: none; stroke-width: 1.7; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 13px; color: var(--dim); }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }
.bar { display: flex; height: 26px; margin: 2px 0 6px; } .bar i { height: 100%; }
.wide b { font-size: 13px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 14px; }
td, th { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top;
  font-variant-numeric: tabular-nums; }
th { color: var(--dim); font-weight: 600; }
code, pre { font: 13px/1.45 ui-monospace, monospace; } pre { background: var(--soft); padding: 10px; overflow-x: auto; }
details { margin-top: 24px; } summary { cursor: pointer; font-size: 18px; font-weight: 600; }
"""


def page(title: str, body: Iterable[str]) -> str:
    """Return a page. `title` is plain text, `body` HTML."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
{chr(10).join(body)}
</body>
</html>
"""


def section(title: str, *content: str) -> str:
    """Return a part of a page with a heading; "" without content."""
    found = [part for part in content if part]
    return f"<h2>{escape(title)}</h2>\n{chr(10).join(found)}" if found else ""


def folded(title: str, content: str) -> str:
    """Return a part of a page that opens with a click."""
    return f"<details><summary>{escape(title)}</summary>\n{content}</details>" if content else ""


def charts(figures: Iterable[str]) -> str:
    """Return charts side by side; "" without charts."""
    inside = "".join(figures)
    return f'<div class="charts">{inside}</div>' if inside else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of plain text; "" without rows."""
    lines = [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    if not lines:
        return ""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return f'<div class="scroll"><table><tr>{top}</tr>{"".join(lines)}</table></div>'


def paragraphs(sentences: Iterable[str]) -> str:
    """Return a paragraph for each sentence of plain text."""
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


def write_page(path: Path, text: str, option: str) -> None:
    """Write a page. Raises UserError if the file cannot be written. `option`: the option that names another file."""
    try:
        replace_text(path, text)
    except OSError as error:
        reason = f"{path} cannot be written: {error.strerror}; name a file in another folder with {option}"
        raise UserError(f"error: {reason}") from None
