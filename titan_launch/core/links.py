"""Links in folders that somebody else wrote. A link may name any file of this machine."""

from __future__ import annotations

from pathlib import Path

from titan_launch.core.terminal import one_line


def why_leads_out(path: Path, root: Path) -> str:
    """Return a clause with a remedy if a path below the folder `root` is a link to a file or folder outside of it; ""
    if it is none.

    The cache of the Hugging Face Hub has links in `snapshots` to files in `blobs` beside it. These are allowed.
    """
    if not path.is_symlink():
        return ""
    whole = root.resolve()
    allowed = [whole, *(above.parent.parent / "blobs" for above in (whole, *whole.parents) if _is_snapshot(above))]
    target = path.resolve()
    if any(target.is_relative_to(folder) for folder in allowed):
        return ""
    remedy = "copy its content into the folder, or name the folder that it leads to"
    return f"{one_line(str(path))} is a link that leads out of the folder, to {one_line(str(target))}; {remedy}"


def _is_snapshot(folder: Path) -> bool:
    return folder.parent.name == "snapshots"
