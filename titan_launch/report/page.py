"""HTML pages. Each page is a single file without scripts, and loads nothing from the network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from titan_launch.core.errors import UserError
from titan_launch.core.files import replace_text
from titan_launch.report.charts import NUM_COLORS

COLORS = {
    "light": {
        "line": ("#1b5fae", "#d2601f", "#5a2a86", "#2f9457", "#b3347a", "#8a6d00", "#17808f", "#6b7280", "#3a3f47"),
        "part": ("#e9c43c", "#2f6fbb", "#e88f5a", "#5f2f8c", "#73c690", "#7b838e", "#86c9dc", "#a82a5c", "#b4b9c0"),
    },
    "dark": {
        "line": ("#6aa9f0", "#f2975f", "#b58be0", "#6ccb8e", "#ec7fb8", "#d8bb4a", "#5cc6d4", "#a8b0ba", "#d7dbe0"),
        "part": ("#e9c43c", "#2f6fbb", "#e88f5a", "#8450bd", "#73c690", "#7b838e", "#86c9dc", "#b8386b", "#b4b9c0"),
    },
}
"""Colors of lines and of areas, on a light and on a dark page. Neighboring areas differ in lightness, so they can be
told apart without color. Neighboring lines have different dashes."""

_DASHES = ("none", "7 4", "2 3", "10 3 2 3")
_CLASSES = "\n".join(
    f".line{index} {{ --color: var(--line{index}); stroke-dasharray: {_DASHES[index % len(_DASHES)]}; }} "
    f".part{index} {{ fill: var(--part{index}); }}"
    for index in range(NUM_COLORS)
)


def _variables(scheme: str) -> str:
    return " ".join(
        f"--{kind}{index}: {color};" for kind, colors in COLORS[scheme].items() for index, color in enumerate(colors)
    )


_STYLE = f"""
:root {{ color-scheme: light dark; --rule: #d5d8dc; --soft: #f4f5f7; --text: #1d2329; --back: #fff; --dim: #5b646e;
  --mark: #fff3c4; {_variables("light")} }}
@media (prefers-color-scheme: dark) {{
  :root {{ --rule: #3a4149; --soft: #1f242a; --text: #e4e7ea; --back: #14181c; --dim: #9aa4ae; --mark: #4a3f12;
    {_variables("dark")} }}
}}
{_CLASSES}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 0 auto;
  max-width: 1200px; padding: 16px 24px 64px; }}
h1 {{ font-size: 24px; margin: 12px 0 4px; }} h2 {{ font-size: 18px; margin: 32px 0 8px; }}
.dim {{ color: var(--dim); }} p {{ margin: 4px 0; }}
.state {{ border-radius: 4px; padding: 1px 8px; font-size: 14px; color: #fff; background: #636c76; }}
.running {{ background: #2f6fbb; }} .finished, .early {{ background: #2f7d4c; }} .failed {{ background: #c0392b; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); gap: 16px; }}
figure {{ margin: 0; }} .wide {{ margin: 0 0 12px; overflow-x: auto; }} .wide > svg {{ min-width: 760px; }}
svg {{ width: 100%; height: auto; background: var(--soft); border-radius: 6px; }}
svg text {{ fill: var(--text); font: 12px system-ui, sans-serif; }} svg .title {{ font-size: 14px; font-weight: 600; }}
svg .tick {{ fill: var(--dim); }} svg .end {{ text-anchor: end; }} svg .middle {{ text-anchor: middle; }}
svg .grid {{ stroke: var(--rule); fill: none; }} svg .zero {{ stroke: var(--text); fill: none; }}
svg .limit {{ stroke: var(--text); stroke-width: 1.5; stroke-dasharray: 5 3; fill: none; }}
svg .line {{ fill: none; stroke: var(--color); stroke-width: 1.8; }} circle {{ fill: var(--color); }}
svg .solid {{ stroke-dasharray: none; }}
svg .area {{ stroke: var(--soft); stroke-width: 0.5; }}
svg .hover {{ fill: var(--text); fill-opacity: 0; }} svg .hover:hover {{ fill-opacity: 0.1; }}
.legend {{ display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; color: var(--dim); }}
svg.key {{ width: auto; height: 12px; margin-right: 6px; background: none; border-radius: 2px; vertical-align: -1px; }}
.scroll {{ overflow-x: auto; }} table {{ border-collapse: collapse; font-size: 14px; }}
td, th {{ text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--rule); vertical-align: top;
  font-variant-numeric: tabular-nums; }}
th {{ color: var(--dim); font-weight: 600; }}
.marked td {{ background: var(--mark); padding-left: 8px; }} .marked td:first-child {{ font-weight: 600; }}
.marked th {{ padding-left: 8px; }}
code, pre {{ font: 13px/1.45 ui-monospace, monospace; }}
pre {{ background: var(--soft); padding: 10px; overflow-x: auto; }}
details {{ margin-top: 24px; }} summary {{ cursor: pointer; font-size: 18px; font-weight: 600; }}
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
    """Return a section of a page with a heading; "" without content."""
    found = [part for part in content if part]
    return f"<h2>{escape(title)}</h2>\n{chr(10).join(found)}" if found else ""


def folded(title: str, content: str) -> str:
    """Return a section of a page that opens with a click on its title; "" without content."""
    return f"<details><summary>{escape(title)}</summary>\n{content}</details>" if content else ""


def charts(figures: Iterable[str]) -> str:
    """Return charts side by side; "" without charts."""
    inside = "".join(figures)
    return f'<div class="charts">{inside}</div>' if inside else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "plain") -> str:
    """Return a table with cells of plain text; "" without rows. `kind`: CSS class; `marked` highlights the rows."""
    lines = [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    if not lines:
        return ""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return f'<div class="scroll {kind}"><table><tr>{top}</tr>{"".join(lines)}</table></div>'


def paragraphs(sentences: Iterable[str]) -> str:
    """Return a paragraph for each sentence of plain text."""
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


def write_page(path: Path, text: str) -> None:
    """Write a page. Raises UserError if the file cannot be written."""
    try:
        replace_text(path, text)
    except OSError as error:
        reason = f"{path} cannot be written: {error.strerror}; name a file in another folder with --out"
        raise UserError(f"error: {reason}") from None
