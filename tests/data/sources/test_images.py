"""Images: real digits and the user's files are split, scaled, and in the same batches on any number of ranks."""

from __future__ import annotations

import itertools
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from tests.packages import skip_without
from titan_launch.config.image_format import ImageFormat
from titan_launch.config.sections.data import IGNORED_TARGET, ImageData
from titan_launch.core.errors import ConfigError, UserError
from titan_launch.data.images import arrays
from titan_launch.data.images.arrays import map_npz
from titan_launch.data.loader import Workers, build_train_loader, build_validation_loader
from titan_launch.data.order import SampleOrder
from titan_launch.data.sources import SampleSource, build_source
from titan_launch.data.tokenizers import ByteTokenizer
from titan_launch.plan.layout import Layout


def build(taken: ImageFormat | None = None, key: tuple[str, ...] = ("data",), **keys: Any) -> SampleSource:
    config = ImageData.model_validate({"kind": "images", **keys})
    return build_source(config, ByteTokenizer(), 16, key, taken)


def write(path: Path, images: npt.ArrayLike, labels: npt.ArrayLike) -> str:
    np.savez(path, images=np.asarray(images), labels=np.asarray(labels))
    return str(path)


def numbered(path: Path, number: int = 60) -> str:
    """Write images with their labels: image i is filled with i, and its label is i."""
    images = np.broadcast_to(np.arange(number, dtype=np.float32)[:, None, None], (number, 2, 3))
    return write(path, images, np.arange(number))


def labels_of(source: SampleSource) -> list[int]:
    return [int(source[i][1]) for i in range(len(source))]


def test_digits_are_images_with_a_class_each() -> None:
    skip_without("sklearn")
    source = build(mean=0.305, std=0.376)
    images, labels = (torch.stack(parts) for parts in zip(*(source[i] for i in range(len(source))), strict=True))
    assert images.shape == (1797, 1, 8, 8) and images.dtype == torch.float32
    assert labels.dtype == torch.int64 and labels.unique().tolist() == list(range(10))
    assert abs(images.mean()) < 0.01 and abs(images.std() - 1) < 0.01
    with pytest.raises(IndexError):
        source[1797]


def test_scikit_learn_is_needed_only_for_the_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "find_spec", lambda name: None)
    assert (
        problem()
        == "data.path: needs the package scikit-learn, which is not installed: pip install 'titan-launch[images]'"
    )


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64"])
def test_mean_and_std_apply_after_uint8_pixels_are_scaled_to_0_to_1(tmp_path: Path, dtype: str) -> None:
    stored = np.arange(24).reshape(2, 3, 2, 2).astype(dtype)
    path = write(tmp_path / "a.npz", stored, np.array([1, 0], dtype=np.int32))
    image, label = build(path=path, mean=[0.1, 0.2, 0.3], std=0.5)[1]
    pixels = torch.arange(12, 24).view(3, 2, 2) / (255 if dtype == "uint8" else 1)
    expected = (pixels - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / 0.5
    torch.testing.assert_close(image, expected, rtol=1e-6, atol=1e-6)
    assert label.dtype == torch.int64 and label.shape == () and label == 0


def test_gray_images_get_a_channel(tmp_path: Path) -> None:
    image, _ = build(path=numbered(tmp_path / "a.npz"), mean=0.0, std=2.0)[8]
    assert torch.equal(image, torch.full((1, 2, 3), 4.0))


def test_a_split_has_the_number_of_classes_of_the_data_set(tmp_path: Path) -> None:
    """A class may occur in one part only."""
    held_out = build(path=numbered(tmp_path / "a.npz"), split="validation", validation_percent=20)
    assert held_out.num_classes == 60
    assert held_out.describe() == f"{len(held_out)} images (1, 2, 3) of 60 classes"


def test_the_split_is_disjoint_and_complete(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.npz", 300)
    held_out = [i for i in range(300) if zlib.crc32(str(i).encode()) % 100 < 20]
    assert 40 < len(held_out) < 80
    sides = {
        split: labels_of(build(path=path, split=split, validation_percent=20)) for split in ("train", "validation")
    }
    assert sides["validation"] == held_out
    assert sides["train"] == [i for i in range(300) if i not in held_out]
    assert labels_of(build(path=path)) == list(range(300))


def test_a_larger_validation_share_contains_a_smaller_one(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.npz", 500)
    small, large = (set(labels_of(build(path=path, split="validation", validation_percent=n))) for n in (5, 20))
    assert small < large


def global_batches(source: SampleSource, ranks: int, local: int, steps: int, num_workers: int = 0) -> list[list[int]]:
    """Return the labels of each step, over all ranks."""
    layout = Layout(replicate=1, shard=ranks, local_batch_size=local, num_microbatches=8 // (ranks * local))
    order = SampleOrder(len(source), seed=1, shuffle=True)
    by_rank = []
    for rank in range(ranks):
        with build_train_loader(source, order, layout, rank, start=0, workers=Workers(num_workers)) as loader:
            labels = [batch.targets.tolist() for batch in itertools.islice(loader, steps * layout.num_microbatches)]
        by_rank.append(np.array(labels).reshape(steps, -1))
    return [sorted(step) for step in np.concatenate(by_rank, axis=1).tolist()]


def test_global_batches_do_not_depend_on_ranks_microbatches_or_workers(tmp_path: Path) -> None:
    source = build(path=numbered(tmp_path / "a.npz", 23))
    expected = global_batches(source, ranks=1, local=8, steps=7)
    assert sorted(itertools.chain(*expected))[:3] == [0, 0, 1]  # 56 samples cross the end of two epochs of 23
    for ranks, local in ((1, 2), (2, 2), (4, 2)):
        assert global_batches(source, ranks, local, steps=7) == expected
    assert global_batches(source, 2, 2, steps=7, num_workers=1) == expected


def test_augmented_samples_follow_from_their_position_in_the_stream(tmp_path: Path) -> None:
    """They do not depend on ranks, microbatches, workers, or the step at which a run was resumed. They differ in every
    epoch."""
    images = np.random.default_rng(0).normal(size=(6, 4, 4))
    source = build(path=write(tmp_path / "a.npz", images, np.arange(6)), augment=["crop", "flip"], padding=2)
    order = SampleOrder(6, seed=1, shuffle=True)
    expected = [source.read_batch([order(position)], [position])[0][0] for position in range(24)]
    assert len({tuple(image.flatten().tolist()) for image in expected}) > 20

    def stream(ranks: int, local: int, start: int, num_workers: int = 0) -> list[Tensor]:
        layout = Layout(replicate=1, shard=ranks, local_batch_size=local, num_microbatches=4 // (ranks * local))
        microbatches: list[list[Tensor]] = []
        for rank in range(ranks):
            with build_train_loader(source, order, layout, rank, start=start, workers=Workers(num_workers)) as loader:
                count = (24 - start) // 4 * layout.num_microbatches
                microbatches.append([batch.inputs for batch in itertools.islice(loader, count)])
        return [image for of_ranks in zip(*microbatches, strict=True) for inputs in of_ranks for image in inputs]

    for ranks, local, start, num_workers in ((1, 4, 0, 0), (2, 1, 8, 0), (4, 1, 4, 0), (2, 2, 0, 1)):
        found = stream(ranks, local, start, num_workers)
        assert len(found) == 24 - start and all(map(torch.equal, found, expected[start:]))


def test_validation_pads_with_images_without_a_class(tmp_path: Path) -> None:
    source, targets = build(path=numbered(tmp_path / "a.npz", 7)), []
    for rank in range(2):
        with build_validation_loader(source, local_batch_size=3, dp_rank=rank, dp_size=2) as loader:
            targets += [batch.targets.tolist() for batch in loader]
    padding = [IGNORED_TARGET] * 3
    assert targets == [[0, 1, 2], [6, *padding[:2]], [3, 4, 5], padding]


def test_a_fingerprint_changes_with_the_images_and_not_with_how_they_are_scaled(tmp_path: Path) -> None:
    images, labels = np.arange(480, dtype=np.uint8).reshape(20, 4, 6), np.arange(20)
    before = build(path=write(tmp_path / "a.npz", images, labels)).fingerprint(0)
    assert before is not None

    def change(images: npt.ArrayLike, labels: npt.ArrayLike, **keys: Any) -> str:
        now = build(path=write(tmp_path / "b.npz", images, labels), **keys).fingerprint(0)
        assert now is not None
        return before.changed_to(now)

    assert change(images, labels, mean=0.1, std=0.2) == ""
    assert change(images[:9], labels[:9]) == "it now has 9 samples (before: 20)"
    assert change(images.reshape(20, 6, 4), labels) == "the names, sizes or contents of its files differ"
    for other in ((images + np.uint8(1), labels), (images, labels[::-1])):
        assert change(*other) == "the names and sizes of its files are the same, but their content differs"


def problem(**keys: Any) -> str:
    with pytest.raises(ConfigError) as caught, warnings.catch_warnings():
        warnings.simplefilter("error")
        build(**keys)
    return str(caught.value)


IMAGES, LABELS = np.zeros((4, 8, 8), np.float32), np.arange(4)


@pytest.mark.parametrize(
    ("images", "labels", "reason"),
    [
        (
            IMAGES[0],
            LABELS,
            "images have the shape (8, 8); save them as (N, height, width) or (N, channels, height, width)",
        ),
        (IMAGES.astype(np.int64), LABELS, "images are int64; save them as uint8 or floating point"),
        (
            IMAGES,
            LABELS.astype(np.float32),
            "labels are float32 of the shape (4,); save them as integers of the shape (N)",
        ),
        (IMAGES, LABELS[:, None], "labels are int64 of the shape (4, 1); save them as integers of the shape (N)"),
        (IMAGES, LABELS[:3], "holds 4 images, but 3 labels; save one label for each image"),
        (IMAGES[:0], LABELS[:0], "holds no images; save at least one image with its label"),
        (IMAGES[:, :0], LABELS, "images have the shape (4, 0, 8), and so no pixels; save images of at least one pixel"),
        (IMAGES, LABELS - 1, "labels must be 0 or more, but the smallest is -1; number the classes from 0"),
    ],
)
def test_arrays_that_are_not_images_are_refused(tmp_path: Path, images: Any, labels: Any, reason: str) -> None:
    assert problem(path=write(tmp_path / "a.npz", images, labels)) == f"data.path: {reason}"


def test_pixels_that_are_not_finite_are_refused_when_their_image_is_read(tmp_path: Path) -> None:
    images = IMAGES.copy()
    images[2, 3, 3] = np.nan
    source = build(path=write(tmp_path / "a.npz", images, LABELS))
    source[1]
    with pytest.raises(UserError, match=r"^image 2 of .*a.npz has pixels that are not finite"):
        source[2]


def test_arrays_are_mapped_unless_they_are_compressed(tmp_path: Path) -> None:
    """Both give the same samples, also those in Fortran order, or of the other byte order."""
    images = np.arange(240, dtype=np.uint8).reshape(5, 4, 12)
    np.savez_compressed(tmp_path / "b.npz", images=images, labels=LABELS[[0, 1, 2, 3, 3]])
    expected = build(path=str(tmp_path / "b.npz"))
    for stored in (images, np.asfortranarray(images)):
        path = write(tmp_path / "a.npz", stored, np.array([0, 1, 2, 3, 3], dtype=">i4"))
        assert isinstance(map_npz(Path(path), ["images"])["images"], np.memmap)
        assert not isinstance(map_npz(tmp_path / "b.npz", ["images"])["images"], np.memmap)
        for mine, theirs in zip(build(path=path), expected, strict=True):
            assert torch.equal(mine[0], theirs[0]) and mine[1] == theirs[1]


def test_files_that_are_not_images_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    remedy = "the file with numpy.savez(path, images=..., labels=...)"
    unsound = f"data.path: is not a valid .npz file of plain arrays; write {remedy}"
    assert (
        problem(path=str(path))
        == "data.path: cannot be read: No such file or directory; correct the path or the permissions"
    )
    for content in (b"", b"text", Path(write(path, IMAGES, LABELS)).read_bytes()[:-200]):
        path.write_bytes(content)
        assert problem(path=str(path)) == unsound
    with path.open("wb") as file:
        np.save(file, IMAGES)
    assert problem(path=str(path)) == unsound
    np.savez(path, images=np.array([None, "pickled"], dtype=object), labels=LABELS)
    assert problem(path=str(path)) == unsound
    np.savez(path, images=IMAGES)
    missing = f"validation.data.path: holds no array named labels; save {remedy}"
    assert problem(path=str(path), key=("validation", "data")) == missing


def test_images_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npz", np.zeros((4, 3, 8, 8), np.uint8), np.array([0, 1, 2, 12]))
    build(path=path, taken=ImageFormat(3, 8, 8, num_classes=13))
    assert problem(path=path, taken=ImageFormat(1, 9, 9, num_classes=12)).splitlines() == [
        "data.path: holds images with 3 channels, but the model takes 1; set model.args.in_channels = 3",
        "data.path: holds images of 8 x 8 pixels, but the model takes 9 x 9; set model.args.image_size = 8, "
        "or set resize and crop to 9",
        "data.path: holds labels up to 12, but the model has 12 classes; set model.args.num_classes to 13 or more",
    ]
    oblong = write(tmp_path / "b.npz", np.zeros((4, 8, 9), np.uint8), LABELS)
    assert problem(path=oblong, taken=ImageFormat(1, 8, 8, num_classes=4)) == (
        "data.path: holds images of 8 x 9 pixels, but the model takes square images; set resize and crop to 8"
    )
    last = write(tmp_path / "c.npz", np.zeros((4, 8, 8, 3), np.uint8), LABELS)
    assert problem(path=last, taken=ImageFormat(3, 8, 8, num_classes=4)) == (
        "data.path: holds images of shape (N, 8, 8, 3), probably with channels last; save images.transpose(0, 3, 1, 2)"
    )


def test_keys_that_do_not_fit_the_images_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npz", np.zeros((4, 3, 8, 8), np.uint8), LABELS)
    assert problem(path=path, std=[1.0, 1.0]) == (
        "data.std: must be one number, or one number for each of the 3 channels of the images"
    )
    assert problem(path=path, split="validation", validation_percent=1) == (
        'data.split: is empty: with validation_percent = 1, all 4 images belong to "train"; provide more images, '
        'or a separate path with split = "all"'
    )
