"""The model card of an export: a README.md that records where the weights come from."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_launch import __version__
from titan_launch.checkpoint.index import read_index, read_tensor
from titan_launch.checkpoint.manifest import checkpoint_name
from titan_launch.config.loading.provenance import toml_value
from titan_launch.inference.saved_model import SavedModel
from titan_launch.train.run_folder.folder import checkpoint_folder


def write_card(folder: Path, source: SavedModel, origin: Path, library: str) -> None:
    """Write the model card of an export into its folder. `source`: the exported model. `origin`: the folder that was
    exported, for example a run folder. `library`: Hugging Face's name of the library that loads the export.

    Raises FileExistsError if the folder already has a README.md.
    """
    with (folder / "README.md").open("x", encoding="utf-8") as file:
        file.write("\n".join(_lines(source, origin, library)) + "\n")


def _lines(source: SavedModel, origin: Path, library: str) -> Iterator[str]:
    manifest = source.manifest
    base = None if manifest is None else manifest.base
    yield from ("---", f"library_name: {library}")
    if base is not None:
        yield f"base_model: {toml_value(base.folder)}"
    yield from ("---", "", f"# {source.job.job.name if manifest else origin.name}", "")
    yield from ("| | |", "|---|---|")
    yield _row("exported from", f"`{origin}`, {source.description}")
    if base is not None:
        yield _row("base", f"`{base.folder}`, fingerprint `{base.fingerprint.digest}`")
    elif source.base is not None:
        yield _row("base", f"`{source.base}`")
    yield _row("model", f"`{source.job.model.name}`, {source.num_parameters:,} elements in all tensors")
    if manifest is not None:
        yield _row("steps", f"{manifest.step:,} on {manifest.world_size} ranks")
        checkpoint = checkpoint_folder(origin) / checkpoint_name(manifest.step)
        samples = int(read_tensor(checkpoint, read_index(checkpoint)["progress.samples_seen"]))
        if source.job.data.unit != "images":
            length = source.job.training.seq_len
            yield _row("tokens", f"{samples * length:,} ({samples:,} samples of {length})")
        else:
            yield _row("samples", f"{samples:,}")
        if manifest.validation_loss is not None:
            yield _row("validation loss", f"{manifest.validation_loss:.4f}")
        for section, fingerprint in manifest.data.items():
            yield _row(section, f"{_named(source, section)}fingerprint `{fingerprint.digest}`")
        yield _row("trained with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items()))
        yield _row("command", f"`{manifest.command}`")
        if manifest.commit is not None:
            yield _row("commit", f"`{manifest.commit}`")
        yield _row("config", f"SHA-256 `{manifest.config_digest}`")
    yield _row("exported with", f"titan_launch {__version__}: `{shlex.join(['titan-launch', *sys.argv[1:]])}`")
    if manifest is not None:
        yield from ("", "## Job", "", "```toml")
        for section, table in source.record.items():
            yield from (f"[{section}]", *(f"{key} = {toml_value(value)}" for key, value in table.items()))
        yield "```"


def _row(name: str, text: str) -> str:
    return f"| {name} | {text.replace('|', '&#124;')} |"


def _named(source: SavedModel, section: str) -> str:
    """Return the path, or else the kind, of the data source in `section` of the job, followed by a comma; "" if the job
    has no such source. `section`: for example `data.sources.0`."""
    table: Any = source.record
    for part in section.split("."):
        table = table[int(part)] if part.isdecimal() else table.get(part, {})
    named = isinstance(table, dict) and (table.get("path") or table.get("kind"))
    return f"`{named}`, " if named else ""
