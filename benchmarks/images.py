"""Speed of reading images: class folders and shards against other data sets in PyTorch's DataLoader.

    python benchmarks/images.py --write docs/verification/cpu.md

The script writes JPEGs of 500 x 375 pixels, the size of a typical image of ImageNet. Every contestant reads all of them
once per round, as batches of normalized random parts of 224 x 224 pixels, on one core without worker processes. The
contestants take turns. Processor time is measured, so other load on the machine hardly matters. `by hand` is a data set
of ten lines with Pillow. ImageFolder of torchvision takes part if torchvision is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import itertools
import os
import statistics
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from publishing import commit, publish
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from titan_launch.config.sections.data import ImageData
from titan_launch.core.files import CACHE_VARIABLE
from titan_launch.data.loader import build_train_loader
from titan_launch.data.order import SampleOrder
from titan_launch.data.sources import build_source
from titan_launch.data.tokenizers import ByteTokenizer
from titan_launch.plan.layout import Layout

NUM_IMAGES, BATCH, ROUNDS, SIDE = 192, 32, 7, 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def write_images(root: Path) -> None:
    """Write images of two classes, as class folders and as one shard. Smooth noise has about the size of a photo."""
    generator = np.random.default_rng(0)
    with tarfile.open(root / "images.tar", "w") as tar:
        for number in range(NUM_IMAGES):
            coarse = generator.integers(0, 256, (47, 63, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC).save(file, "jpeg", quality=92)
            path = root / "folder" / str(number % 2) / f"{number:04}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.getvalue())
            for end, content in (("jpg", file.getvalue()), ("cls", b"%d" % (number % 2))):
                member = tarfile.TarInfo(f"{number:04}.{end}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def launcher(path: Path) -> Iterator[Tensor]:
    """Yield batches of the launcher's loader, without end."""
    keys = {"path": str(path), "crop": SIDE, "augment": ["resized_crop", "flip"], "mean": MEAN, "std": STD}
    source = build_source(ImageData.model_validate({"kind": "images", **keys}), ByteTokenizer(), 1)
    layout = Layout(replicate=1, shard=1, local_batch_size=BATCH, num_microbatches=1)
    order = SampleOrder(len(source), seed=0, shuffle=True)
    with build_train_loader(source, order, layout, 0, start=0) as loader:
        yield from (batch.inputs for batch in loader)


class ByHand(Dataset[tuple[Tensor, int]]):
    """Random parts of the images of a folder, decoded and scaled by Pillow."""

    def __init__(self, root: Path):
        self.paths = sorted(root.glob("*/*.jpg"))
        self.mean, self.std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(self.paths[index]) as image:
            width, height = image.size
            part = (0.08 + 0.92 * torch.rand(()).item()) ** 0.5
            left, top = (torch.rand(()).item() * size * (1 - part) for size in (width, height))
            box = (left, top, left + part * width, top + part * height)
            scaled = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR, box)
        pixels = torch.from_numpy(np.array(scaled)).permute(2, 0, 1) / 255
        pixels = pixels.flip(-1) if torch.rand(()).item() < 0.5 else pixels
        return (pixels - self.mean) / self.std, int(self.paths[index].parent.name)


def image_folder(root: Path) -> Dataset[tuple[Tensor, int]]:
    """Return torchvision's data set with its usual transforms."""
    from torchvision import datasets, transforms

    steps = [transforms.RandomResizedCrop(SIDE), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    return datasets.ImageFolder(str(root), transforms.Compose([*steps, transforms.Normalize(MEAN, STD)]))


def data_loader(dataset: Dataset[tuple[Tensor, int]]) -> Iterator[Tensor]:
    """Yield batches of PyTorch's loader, without end."""
    while True:
        yield from (inputs for inputs, _ in DataLoader(dataset, BATCH, shuffle=True))


def images_per_second(batches: Iterator[Tensor]) -> float:
    """Return the speed of one epoch per second of processor time."""
    begin = time.process_time()
    for inputs in itertools.islice(batches, NUM_IMAGES // BATCH):
        assert inputs.shape == (BATCH, 3, SIDE, SIDE)
    return NUM_IMAGES / (time.process_time() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--write", type=Path, metavar="FILE.md", help="write the table between the markers of this file"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        os.environ[CACHE_VARIABLE] = str(root / "cache")
        write_images(root)
        contestants = {
            "class folders": launcher(root / "folder"),
            "shard": launcher(root / "images.tar"),
            "by hand": data_loader(ByHand(root / "folder")),
        }
        if importlib.util.find_spec("torchvision"):
            contestants["torchvision ImageFolder"] = data_loader(image_folder(root / "folder"))
        speeds: dict[str, list[float]] = {name: [] for name in contestants}
        for turn in range(ROUNDS + 1):
            for name, batches in contestants.items():
                speed = images_per_second(batches)
                speeds[name] += [speed] if turn else []  # the first turn reads the files from disk
    medians = {name: statistics.median(of_name) for name, of_name in speeds.items()}
    rows = ["| reader | images per second of one core | ratio |", "|---|---|---|"]
    rows += [f"| {name} | {speed:,.0f} | {speed / medians['by hand']:.2f} |" for name, speed in medians.items()]
    text = "\n".join([f"Commit {commit()}, PyTorch {torch.__version__}.", "", *rows])
    publish(text, "images", arguments.write)


if __name__ == "__main__":
    main()
