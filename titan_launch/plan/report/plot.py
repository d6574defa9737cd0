"""The comparison of modes as a picture: stacked bars of memory, with the memory limit. This module does not import
torch."""

from __future__ import annotations

from pathlib import Path

from titan_launch.core.errors import UserError
from titan_launch.core.files import check_output
from titan_launch.core.packages import is_installed, not_installed
from titan_launch.plan.hardware import GIB, Hardware
from titan_launch.plan.memory.ledger import Category
from titan_launch.plan.report.modes import ModeComparison, PlanRow
from titan_launch.plan.report.table import marks_of, meaning_of_marks

FORMATS = (".png", ".pdf", ".svg")


def check_plot(path: str) -> None:
    """Raise UserError if `path` is not the name of a picture, if the picture cannot be written, or if matplotlib is not
    installed. `plan` calls this function before all computation, to fail early."""
    if Path(path).suffix not in FORMATS:
        raise UserError(f"error: --plot {path}: the name must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    check_output(Path(path))
    if not is_installed("matplotlib"):
        raise UserError(f"error: --plot {not_installed('matplotlib')}")


def plot_comparison(
    comparison: ModeComparison, hardware: Hardware, title: str, path: str, best: PlanRow | None, meaning: str | None
) -> None:
    """Write a picture to `path`: a bar of memory by category for each choice, and the memory limit if it is known.
    `best`: the row that gets the mark `*`. `meaning`: the meaning of this mark. Raises UserError if the file cannot be
    written."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # pyplot would look for a display

    rows = comparison.rows[::-1]  # matplotlib draws from bottom to top
    figure = Figure(figsize=(11, 1.8 + 0.42 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    choices = (f"{row.choice.accumulation.label} / {row.choice.activation_checkpoint.label}" for row in rows)
    labels = [f"{choice} {marks_of(row, best)}".rstrip() for choice, row in zip(choices, rows, strict=True)]
    left = [0.0] * len(rows)
    for category, color in zip(Category, _COLORS, strict=True):
        sizes = [row.footprint.by_category.get(category, 0) / GIB for row in rows]
        if any(sizes):
            axes.barh(labels, sizes, left=left, label=category.label, color=colormaps["tab20"](color))
            left = [start + size for start, size in zip(left, sizes, strict=True)]
    if hardware.overhead_gib:
        overhead = [hardware.overhead_gib] * len(rows)
        axes.barh(labels, overhead, left=left, label="overhead", color="0.6")
    reserved = [row.reserved_bytes / GIB for row in rows]
    axes.plot(reserved, labels, "k|", markersize=14, label="reserved (estimate)")
    marks = [f"{mark} {text}" for mark, text in meaning_of_marks(meaning)]
    axes.set_xlabel("\n".join(["GiB per rank at the peak", "; ".join(marks)]))
    if hardware.memory_gib is not None:
        limit = f"limit {hardware.memory_gib:.4g} GiB"
        if hardware.memory_gib > 4 * max(reserved):  # a line there would make the bars too short to read
            title = f"{title} ({limit}, far to the right)"
        else:
            axes.axvline(hardware.memory_gib, color="black", linestyle="--", label=limit)
    axes.set_title(title)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"error: --plot {path}: cannot be written ({error.strerror}); name another file") from None


_COLORS = (0, 1, 2, 3, 4, 5, 9, 6, 7, 10, 11, 12, 13, 16, 18)
"""A color for each category: an index into matplotlib's palette `tab20`."""
