"""Folders of class folders and WebDataset shards: the same images give the same samples, by index, from a cached
index."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from titan_launch.config.image_format import ImageFormat
from titan_launch.config.sections.data import ImageData
from titan_launch.core import fingerprint
from titan_launch.core.errors import ConfigError, UserError
from titan_launch.core.files import CACHE_VARIABLE
from titan_launch.data.images.encoded import open_folder
from titan_launch.data.loader import Workers, build_validation_loader
from titan_launch.data.sources import SampleSource, build_source
from titan_launch.data.tokenizers import ByteTokenizer

Image = pytest.importorskip("PIL.Image")

SIDE = 6
CLASSES = ("cat", "dog", "owl")


def encoded(number: int, ending: str = "png", size: tuple[int, int] = (SIDE, SIDE)) -> bytes:
    """Return an RGB image of random pixels."""
    pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, {"jpg": "jpeg"}.get(ending, ending))
    return file.getvalue()


def write_folder(root: Path, per_class: int = 4) -> Path:
    """Write class folders. Image n of the sorted images is `encoded(n)`."""
    for label, name in enumerate(CLASSES):
        for n in range(per_class):
            path = root / name / ("part" if n == per_class - 1 else "") / f"{n}.PNG"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(label * per_class + n))
    return root


def write_shard(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name.rstrip("*"))
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def build(
    path: Path | str, key: tuple[str, ...] = ("data",), taken: ImageFormat | None = None, **keys: Any
) -> SampleSource:
    config = ImageData.model_validate({"kind": "images", "path": str(path), "mean": 0.0, "std": 1.0, **keys})
    return build_source(config, ByteTokenizer(), 16, key, taken)


def problem(path: Path | str, **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(path, **keys)
    return str(caught.value)


def assert_same(a: SampleSource, b: SampleSource) -> None:
    assert len(a) == len(b) > 0
    for mine, theirs in zip(a, b, strict=True):
        assert torch.equal(mine[0], theirs[0]) and mine[1] == theirs[1]


def arrays(path: Path, number: int) -> Path:
    """Write the images of `write_folder` as an .npz file."""
    images = [np.array(Image.open(io.BytesIO(encoded(n)))).transpose(2, 0, 1) for n in range(number)]
    np.savez(path, images=np.stack(images), labels=np.arange(number) // (number // len(CLASSES)))
    return path


def test_folders_shards_and_arrays_of_the_same_images_have_the_same_samples(tmp_path: Path) -> None:
    expected = build(arrays(tmp_path / "a.npz", 12))
    folder = build(write_folder(tmp_path / "folder"))
    assert_same(folder, expected)
    assert folder.describe() == "12 images (3, 6, 6) of 3 classes"
    for shard in range(2):
        numbers = range(6 * shard, 6 * shard + 6)
        write_shard(
            tmp_path / f"cls-0{shard}.tar",
            {
                f"a/{n:03}.{end}": content
                for n in numbers
                for end, content in (("png", encoded(n)), ("cls", b"%d\n" % (n // 4)))
            },
        )
        write_shard(
            tmp_path / f"json-0{shard}.tar",
            {
                f"{n:03}.{end}": content
                for n in numbers
                for end, content in (
                    ("meta.json", b"{}"),
                    ("json", json.dumps({"y": n // 4}).encode()),
                    ("png", encoded(n)),
                )
            },
        )
    assert_same(build(tmp_path / "cls-{00..01}.tar"), expected)
    assert_same(build(tmp_path / "cls-*.tar"), expected)
    assert_same(build(tmp_path / "{json-00,json-01}.tar", label_field="y"), expected)


def test_the_index_is_built_once_and_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))
    root = write_folder(tmp_path / "folder")
    first = build(root).fingerprint(0)
    (index,) = (cache / "images").glob("*/index.npz")
    assert build(root).fingerprint(0) == first and list((cache / "images").glob("*/index.npz")) == [index]
    (root / "dog" / "part" / "new.png").write_bytes(encoded(99))
    now = build(root).fingerprint(0)
    (root / "cat" / "0.PNG").rename(root / "cat" / "00.PNG")
    renamed = build(root).fingerprint(0)
    assert now and renamed and now.changed_to(renamed) == "the names, sizes or contents of its files differ"
    assert first and now and first.changed_to(now) == "it now has 13 samples (before: 12)"


def test_shards_of_the_same_size_and_time_have_other_labels(tmp_path: Path) -> None:
    members = {"0.png": encoded(0), "0.cls": b"0", "1.png": encoded(1), "1.cls": b"1"}
    shard = write_shard(tmp_path / "a.tar", members)
    times = shard.stat()
    assert [int(label) for _, label in build(shard)] == [0, 1]
    write_shard(shard, {**members, "0.cls": b"1", "1.cls": b"0"})
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert [int(label) for _, label in build(shard)] == [1, 0]


def test_a_split_of_a_folder_follows_from_the_names(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "folder", 20)
    before = {split: build(root, split=split, validation_percent=30) for split in ("train", "validation")}
    held_out = [image.sum().item() for image, _ in before["validation"]]
    assert len(before["train"]) + len(before["validation"]) == 60 and 8 < len(held_out) < 30
    (root / "cat" / "00.png").write_bytes(encoded(99))
    after = [image.sum().item() for image, _ in build(root, split="validation", validation_percent=30)]
    assert set(held_out) <= set(after)
    assert before["validation"].fingerprint(0) != before["train"].fingerprint(0)


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_images_have_the_channels_of_the_model(tmp_path: Path, channels: int, mode: str) -> None:
    root = write_folder(tmp_path / "folder")
    image, _ = build(root, taken=ImageFormat(channels, SIDE, SIDE, 3))[5]
    expected = np.array(Image.open(io.BytesIO(encoded(5))).convert(mode)).reshape(SIDE, SIDE, channels)
    assert torch.equal(image, torch.from_numpy(expected).permute(2, 0, 1) / 255)


def test_a_large_jpeg_is_scaled_while_it_is_decoded(tmp_path: Path) -> None:
    """The result is nearly that of a full decode."""
    ramp = np.linspace(0, 255, 640).astype(np.uint8)
    pixels = np.stack(
        [
            np.broadcast_to(ramp, (480, 640)),
            np.broadcast_to(ramp[:480, None], (480, 640)),
            np.full((480, 640), 99, np.uint8),
        ],
        2,
    )
    (tmp_path / "jpg" / "a").mkdir(parents=True)
    (tmp_path / "png" / "a").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "jpg/a/0.jpg", quality=95)
    Image.fromarray(pixels).save(tmp_path / "png/a/0.png")
    scaled, full = (build(tmp_path / name, resize=48)[0][0] for name in ("jpg", "png"))
    assert scaled.shape == full.shape == (3, 48, 64)
    torch.testing.assert_close(scaled, full, atol=4 / 255, rtol=0)


def test_files_that_are_not_images_are_skipped_and_never_opened(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "folder")
    os.mkfifo(root / "cat" / "9.png")
    (root / "cat" / "notes.txt").write_text("")
    (root / "cat" / ".9.jpg").write_text("")
    (root / ".hidden").mkdir()
    source, skipped = build(root), "3 files that are hidden or no images, first: cat/.9.jpg"
    assert source.describe() == f"12 images (3, 6, 6) of 3 classes; skipped {skipped}"
    assert source.details().amounts["skipped"] == skipped


def test_unusable_folders_are_refused(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "folder")
    (root / "emu").mkdir()
    (root / "fox").mkdir()
    assert problem(root).startswith("data.path: these class folders contain no image: emu, fox; add images (.jpg")
    assert problem(root / "emu").startswith("data.path: contains no class folders; put the images of each class")


def test_a_damaged_image_is_named_when_it_is_read(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "folder")
    source = build(root)
    path = root / "cat" / "1.PNG"
    whole = path.read_bytes()
    for content, reason in (
        (bytes(len(whole)), r"1.PNG is not a valid image \(it is none of BMP, GIF"),
        (whole[:60] + bytes(len(whole) - 60), r"1.PNG is not a valid image \("),
        (whole[:-9], rf"1.PNG has {len(whole) - 9} bytes, but had {len(whole)} bytes when it was indexed"),
        (None, "1.PNG cannot be read: No such file or directory; restore"),
    ):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(UserError, match=reason):
            source[1]
    source[2]
    for num_workers in (0, 1):
        with (
            build_validation_loader(
                source, local_batch_size=4, dp_rank=0, dp_size=1, workers=Workers(num_workers)
            ) as loader,
            pytest.raises(UserError) as caught,
        ):
            list(loader)
        assert str(caught.value) == f"{path} cannot be read: No such file or directory; restore the file"
    (root / "dog" / "2.PNG").write_bytes(encoded(1, size=(9, 5)))
    with pytest.raises(
        UserError, match=r"2.PNG becomes a sample \(3, 9, 5\), but other samples are \(3, 6, 6\); set resize"
    ):
        build(root)[5]


PNG = {"a.png": encoded(0), "b.png": encoded(1)}
ANY = {"a.png": b""}
WRITE = "write the class as a whole number from 0"


@pytest.mark.parametrize(
    ("members", "field", "reason"),
    [
        (ANY, None, "has no member a.cls with the class of the image; write it, or set label_field for KEY.json"),
        (ANY | {"a.cls": b"0"}, "y", "has no member a.json with the class of the image; write it"),
        ({"x/a.cls": b"0"}, None, "has 0 images with the key x/a; write one image for each key"),
        (ANY | {"a.jpg": b"", "a.cls": b"0"}, None, "has 2 images with the key a; write one image for each key"),
        (ANY | {"a.png*": b""}, None, "has several members a.png; give each image its own key"),
        (ANY | {"a.cls": b"cat"}, None, f"contains a.cls without a whole number; {WRITE}"),
        (ANY | {"a.cls": b"-1"}, None, "contains a.cls with the class -1; number the classes from 0"),
        (ANY | {"a.json": b"{}"}, "y", f"contains a.json without a field y; {WRITE}"),
        (ANY | {"a.json": b'{"y": "cat"}'}, "y", "contains a.json with the class 'cat'; number the classes from 0"),
    ],
)
def test_shards_without_classes_are_refused(tmp_path: Path, members: Any, field: str | None, reason: str) -> None:
    assert problem(write_shard(tmp_path / "a.tar", members), label_field=field) == f"data.path: a.tar {reason}"


def test_a_folder_or_shard_that_cannot_be_opened_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with pytest.raises(ConfigError, match=r"data.path: .*/gone cannot be read: No such file or directory; correct the"):
        open_folder(str(tmp_path / "gone"), 3, ("data", "path"))
    shard = write_shard(tmp_path / "a.tar", {"0.png": encoded(0), "0.cls": b"0"})
    monkeypatch.setattr(fingerprint, "open_regular", refuse)  # a test that runs as root may open every file
    assert f"{shard} cannot be read: Permission denied; correct the permissions" in problem(shard)


def test_damaged_shards_are_refused_by_name(tmp_path: Path) -> None:
    whole = write_shard(
        tmp_path / "a.tar", {"a.png": PNG["a.png"], "a.cls": b"0", "b.png": PNG["b.png"], "b.cls": b"1"}
    )
    content = whole.read_bytes()
    source = build(whole)
    damaged = "data.path: b.tar is truncated, or not an uncompressed tar file"
    for cut in (content[:700], content[: 6 * 512], content[:4000], b"", b"text"):
        (tmp_path / "b.tar").write_bytes(cut)
        assert problem(tmp_path / "b.tar").startswith(damaged), len(cut)
    with tarfile.open(tmp_path / "b.tar", "w:gz") as tar:
        tar.add(whole)
    assert problem(tmp_path / "b.tar").startswith(damaged)
    write_shard(tmp_path / "b.tar", {})
    assert problem(tmp_path / "b.tar") == "data.path: contains no images (b.tar); write KEY.jpg and KEY.cls"
    os.mkfifo(tmp_path / "c.tar")
    assert problem(tmp_path / "c.tar").startswith("data.path: no file matches")
    whole.write_bytes(content.replace(b"IHDR", b"____"))
    with pytest.raises(UserError, match=r"^b.png in .*a.tar is not a valid image"):
        source[1]
