"""Resize, crop and augmentation: random numbers follow from index and position."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from titan_launch.config.sections.data import ImageData
from titan_launch.core.errors import ConfigError, UserError
from titan_launch.data.images.transform import Transform

PAGE = Path(__file__).parents[3] / "docs/how_to/images.md"
IMAGE = torch.arange(3 * 8 * 12, dtype=torch.uint8).reshape(3, 8, 12)


def transform(key: tuple[str, ...] = ("data",), **keys: Any) -> Callable[[torch.Tensor, int, int | None], torch.Tensor]:
    """Return the function (image, index, position) -> sample."""
    built = Transform(ImageData.model_validate({"kind": "images", "mean": 0.0, "std": 1 / 255, **keys}), key)
    return lambda image, index, position: built.normalized(built.changed(image, index, position))


def test_without_keys_the_image_stays() -> None:
    assert torch.equal(transform()(IMAGE, 0, 5), IMAGE.float())


def test_resize_scales_the_shorter_side_and_crop_takes_the_center() -> None:
    assert transform(resize=4)(IMAGE, 0, None).shape == (3, 4, 6)
    assert transform(resize=4)(IMAGE.transpose(1, 2), 0, None).shape == (3, 6, 4)
    assert torch.equal(transform(crop=4)(IMAGE, 0, None), IMAGE[:, 2:6, 4:8].float())
    constant = transform(resize=5, crop=5)(torch.full_like(IMAGE, 7), 0, None)
    assert torch.equal(constant, torch.full((3, 5, 5), 7.0))


def test_half_of_the_images_are_flipped_and_none_without_a_position() -> None:
    flip = transform(augment=["flip"])
    flipped = [torch.equal(flip(IMAGE, index, 100 + index), IMAGE.flip(-1).float()) for index in range(200)]
    assert 70 < sum(flipped) < 130
    assert all(
        torch.equal(flip(IMAGE, index, 100 + index), IMAGE.float()) for index in range(200) if not flipped[index]
    )
    assert torch.equal(flip(IMAGE, 3, None), IMAGE.float())


def test_random_crops_are_parts_of_the_padded_image_at_all_places() -> None:
    padded = torch.nn.functional.pad(IMAGE, [1] * 4).float()
    crop = transform(augment=["crop"], crop=6, padding=1)
    places = set()
    for position in range(600):
        part = crop(IMAGE, 0, position)
        (place,) = ((y, x) for y in range(5) for x in range(9) if torch.equal(part, padded[:, y : y + 6, x : x + 6]))
        places.add(place)
    assert len(places) == 5 * 9
    assert transform(augment=["crop"], padding=2)(IMAGE, 0, 1).shape == IMAGE.shape


def test_resized_crops_have_the_area_and_aspect_ratio_of_their_ranges() -> None:
    """The coordinates of a part show in an image whose pixels are their coordinates."""
    rows = torch.arange(100.0)[:, None].expand(100, 160)
    columns = torch.arange(160.0).expand(100, 160)
    crop = transform(augment=["resized_crop"], crop=50, std=1.0)
    areas = []
    for position in range(300):
        part = crop(torch.stack([rows, columns]), 0, position)
        height, width = ((part[0, -1, 0] - part[0, 0, 0]) * 50 / 49, (part[1, 0, -1] - part[1, 0, 0]) * 50 / 49)
        assert 0.7 < width / height < 1.42
        areas.append(float(height * width / 16000))
    assert 0.06 < min(areas) < 0.12 and 0.75 < max(areas) <= 1.01
    narrow = crop(torch.zeros(2, 2, 60), 0, 0)  # no attempt fits
    assert narrow.shape == (2, 50, 50)


def test_random_numbers_follow_from_index_and_position() -> None:
    augment = transform(augment=["flip", "resized_crop"], crop=5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = augment(IMAGE, 3, 7)
    assert torch.equal(augment(IMAGE, 3, 7), first)
    assert not torch.equal(augment(IMAGE, 4, 7), first) and not torch.equal(augment(IMAGE, 3, 8), first)
    now = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(now[0], before[0]) and now[1:] == before[1:]


def noise(train: bool) -> Callable[[Tensor], Tensor]:
    """Return a transform that uses the global generators, as those of torchvision do."""

    def add(image: Tensor) -> Tensor:
        assert image.dtype == torch.uint8 and image.is_contiguous()
        pixels = image / 255
        return pixels + torch.rand(()) + random.random() + float(np.random.rand()) if train else pixels

    return add


def test_a_transform_of_the_user_has_random_numbers_of_its_own() -> None:
    name = f"{__name__}:noise"
    mine = transform(transform=name, std=1.0)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = mine(IMAGE, 3, 7)
    assert torch.equal(mine(IMAGE, 3, 7), first) and not torch.equal(mine(IMAGE, 3, 8), first)
    now = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(now[0], before[0]) and now[1:] == before[1:]
    validation = transform(("validation", "data"), transform=name, std=1.0, crop=6)
    assert torch.equal(validation(IMAGE, 3, None), IMAGE[:, 1:7, 3:9] / 255)


def fails(train: bool) -> Callable[[Tensor], Any]:
    return lambda image: [][0]


def returns_a_list(train: bool) -> Callable[[Tensor], Any]:
    return lambda image: image.tolist()


def takes_nothing() -> None: ...


def test_unusable_transforms_are_refused() -> None:
    with pytest.raises(
        UserError, match=r'(?s)^data.transform = ".*:fails": failed for an image \[3, 8, 12\]:.*IndexError'
    ):
        transform(transform=f"{__name__}:fails")(IMAGE, 0, None)
    with pytest.raises(
        UserError, match=r"must return a uint8 or floating-point tensor \[channels, height, width\], not list"
    ):
        transform(transform=f"{__name__}:returns_a_list")(IMAGE, 0, None)
    with pytest.raises(ConfigError, match=r"(?s)^data.transform: factory\(train=True\) failed:.*unexpected keyword"):
        transform(transform=f"{__name__}:takes_nothing")
    with pytest.raises(ConfigError, match=r"^data.transform: .*has no attribute"):
        transform(transform=f"{__name__}:nois")
    with pytest.raises(ConfigError, match=r"^data.mean: must be one number, or one number for each of the 3 channels"):
        transform(mean=[0.0, 1.0])(IMAGE, 0, None)


@pytest.mark.parametrize(("resize", "crop"), [(5, None), (None, 5), (6, 5), (13, 10)])
def test_resize_and_crop_are_those_of_torchvision(resize: int | None, crop: int | None) -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2", exc_type=ImportError)
    theirs = IMAGE
    for size, function in ((resize, v2.Resize), (crop, v2.CenterCrop)):
        theirs = function(size)(theirs) if size else theirs
    assert torch.equal(transform(resize=resize, crop=crop)(IMAGE, 0, None), theirs.float())


def test_the_transform_in_the_docs_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision.transforms.v2", exc_type=ImportError)
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "my_transforms.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for key, position in ((("data",), 7), (("validation", "data"), None)):
        mine = transform(key, transform="my_transforms:build")
        first = mine(IMAGE.repeat(1, 40, 40), 3, position)
        assert first.shape == (3, 224, 224) and torch.equal(mine(IMAGE.repeat(1, 40, 40), 3, position), first)
