"""Manifests detect any change to a file of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from titan_launch.checkpoint.manifest import (
    MANIFEST_FILE,
    DamagedCheckpointError,
    Manifest,
    check,
    checkpoint_steps,
    complete_steps,
    read_manifest,
    record_of,
    write_manifest,
)

DATA = bytes(range(256)) * 40


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a folder with two files and a manifest."""
    folder = tmp_path / "step-3"
    folder.mkdir()
    for name in ("__0_0.distcp", ".metadata"):
        (folder / name).write_bytes(DATA)
    files = {name: record_of(folder / name) for name in ("__0_0.distcp", ".metadata")}
    write_manifest(
        folder, Manifest(2, "abc", {"mode": "deferred"}, {}, {}, "", None, 3, None, {"torch": "2.13"}, 1.5, files)
    )
    return folder


def test_a_manifest_is_read_back(checkpoint: Path) -> None:
    manifest = check(checkpoint)
    assert (manifest.step, manifest.world_size, manifest.validation_loss) == (3, 2, 1.5)
    assert manifest.files["__0_0.distcp"].bytes == len(DATA)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: (f / "__0_0.distcp").write_bytes(DATA[:-1]), r"__0_0.distcp has 10,239 bytes instead of 10,240"),
        (lambda f: flip(f / "__0_0.distcp", 5000), r"__0_0.distcp does not match its checksum"),
        (lambda f: flip(f / ".metadata", 0), r".metadata does not match its checksum"),
        (lambda f: (f / ".metadata").unlink(), r".metadata is missing"),
        (lambda f: (f / MANIFEST_FILE).unlink(), r"manifest.json is missing"),
        (lambda f: (f / MANIFEST_FILE).write_text(""), r"manifest.json is damaged"),
        (lambda f: (f / MANIFEST_FILE).write_text((f / MANIFEST_FILE).read_text()[:-40]), r"manifest.json is damaged"),
        (
            lambda f: (f / MANIFEST_FILE).write_text((f / MANIFEST_FILE).read_text().replace('"step": 3', '"step": 7')),
            r"manifest.json does not match its checksum",
        ),
    ],
)
def test_every_kind_of_damage_is_found(checkpoint: Path, damage: Callable[[Path], None], reason: str) -> None:
    damage(checkpoint)
    with pytest.raises(DamagedCheckpointError, match=reason):
        check(checkpoint)


def test_a_change_of_any_bit_of_a_manifest_is_found(checkpoint: Path) -> None:
    path = checkpoint / MANIFEST_FILE
    whole, manifest = path.read_bytes(), read_manifest(checkpoint)
    for position in range(0, len(whole), 7):
        flip(path, position)
        with suppress(DamagedCheckpointError):
            assert read_manifest(checkpoint) == manifest, position  # one whitespace character may replace another
        path.write_bytes(whole)


def test_a_manifest_cannot_name_other_folders(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "secret").write_bytes(DATA)
    record = record_of(tmp_path / "secret")
    write_manifest(checkpoint, Manifest(2, "abc", {}, {}, {}, "", None, 3, None, {}, None, {"../secret": record}))
    with pytest.raises(DamagedCheckpointError, match="outside of the checkpoint"):
        check(checkpoint)


def test_the_step_of_the_folder_name_must_equal_that_of_the_manifest(tmp_path: Path, checkpoint: Path) -> None:
    """A link named `latest` and a folder whose name has no step pass the check."""
    for path in (tmp_path / "latest", tmp_path / "step-50"):
        path.symlink_to("step-3")
    assert check(tmp_path / "latest").step == 3
    with pytest.raises(
        DamagedCheckpointError, match=r"^manifest.json is of step 3, but the folder has the name of another step$"
    ):
        check(tmp_path / "step-50")
    checkpoint.rename(tmp_path / "step-12")
    (tmp_path / "best").symlink_to("step-12")
    for name in ("step-12", "best"):
        with pytest.raises(
            DamagedCheckpointError, match=r"^manifest.json is of step 3, but the folder has the name of another step$"
        ):
            check(tmp_path / name)
    assert check((tmp_path / "step-12").rename(tmp_path / "pretrained")).step == 3


def test_only_final_names_are_checkpoints(tmp_path: Path, checkpoint: Path) -> None:
    for name in ("step-9.tmp", "step-8.damaged-1", "step-7", "step-x", "step-07", "latest"):
        (tmp_path / name).mkdir()
    assert checkpoint_steps(tmp_path) == [7, 3]
    assert complete_steps(tmp_path) == [3]
    assert checkpoint_steps(tmp_path / "nowhere") == []
