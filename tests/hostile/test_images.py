"""Hostile images: each ends `data` and `train` with one sentence, starts no program, and takes little memory."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import subprocess
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.hostile.mutations import damaged
from tests.hostile.runner import Runner
from tests.sampling import rest_is_slow
from titan_launch.core.errors import ConfigError, UserError
from titan_launch.data.images.arrays import open_npz
from titan_launch.data.images.encoded import open_shards
from titan_launch.data.images.pillow import PixelFormatError, decode, opened_image

Image = pytest.importorskip("PIL.Image")

JOB = """
[job]
name = "hostile"
device = "cpu"
dump_folder = "out"
[model]
name = "vit"
flavor = "debug"
[data]
kind = "images"
path = "{path}"
[training]
local_batch_size = 1
steps = 1
"""

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(x) (w) file\nshowpage\n%%EOF\n"


def encoded(image: object, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)  # type: ignore[attr-defined]
    return file.getvalue()


def picture(kind: str = "PNG", **options: object) -> bytes:
    """Return a valid image of 8 x 8 pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    return encoded(Image.fromarray(pixels), kind, **options)


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, *chunks: bytes, bits: int = 1, color: int = 0) -> bytes:
    """Return a PNG of zeros."""
    row = 1 + (width * bits * {0: 1, 2: 3, 6: 4}[color] + 7) // 8
    packer = zlib.compressobj(9)
    zeros = bytes(row)
    pixels = b"".join(packer.compress(zeros) for _ in range(height)) + packer.flush()
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def tiff(width: int, height: int, *more: tuple[int, int, int, int], tail: bytes = b"") -> bytes:
    """Return a TIFF of 8-bit gray with further tags `(tag, type, count, value)`."""
    known = {256: (3, 1, width), 257: (3, 1, height), 258: (3, 1, 8), 259: (3, 1, 1), 262: (3, 1, 1), 277: (3, 1, 1)}
    known |= {273: (4, 1, 8), 278: (3, 1, 1), 279: (4, 1, 1)} | {tag: rest for tag, *rest in more}  # type: ignore[misc]
    entries = b"".join(struct.pack("<HHII", tag, *rest) for tag, rest in sorted(known.items()))
    return b"II*\0" + struct.pack("<IH", 8, len(known)) + entries + bytes(4) + tail


def same_bytes_of_many_tags() -> bytes:
    tags = [(40_000 + number, 7, 2_000_000, 4) for number in range(5_000)]
    return tiff(8, 8, *tags, tail=bytes(2_100_000))


def gif(frames: int = 1, width: int = 8, height: int = 8, comments: int = 0) -> bytes:
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x4c\x01\x00"
    comment = b"\x21\xfe" + b"\xff" + b"a" * 255 + b"\x00"
    palette = bytes(12)
    return b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0x81, 0, 0) + palette + comment * comments + frame * frames + b"\x3b"


def scans_of_jpeg() -> bytes:
    whole = encoded(Image.new("L", (6000, 6000)), "JPEG", progressive=True)
    last = whole.rindex(b"\xff\xda")
    return whole[:-2] + whole[last:-2] * 2000 + b"\xff\xd9"


BAD_IMAGES: dict[str, tuple[Callable[[], bytes], str]] = {
    "EPS": (lambda: EPS, "is not a valid image (it is none of BMP, GIF, JPEG"),
    "EPS in a DOS header": (
        lambda: b"\xc5\xd0\xd3\xc6" + struct.pack("<II", 32, len(EPS)) + bytes(20) + EPS,
        "is not a valid image",
    ),
    "ICO": (lambda: picture("ICO", sizes=[(8, 8)]), "is not a valid image"),
    "TGA": (lambda: picture("TGA"), "convert it to PNG or JPEG"),
    "empty": (lambda: b"", "is not a valid image"),
    "text": (lambda: b"hello\n" * 100, "is not a valid image"),
    "PNG of many chunks": (lambda: png(8, 8, chunk(b"abCd", b"") * 100_000), "it consists of too many small parts"),
    "PNG of 169 million pixels": (lambda: png(13_000, 13_000), "has more than 50,000,000 pixels"),
    "PNG of 81 million pixels": (lambda: png(9_000, 9_000), "has more than 50,000,000 pixels"),
    "PNG of many colors": (lambda: png(8_000, 6_300, bits=8, color=6), "has more than 50,000,000 pixels"),
    "PNG of the largest size": (lambda: png(1, 1)[:16] + b"\x7f\xff\xff\xff" * 2 + png(1, 1)[24:], "is not a valid"),
    "JPEG of the largest size": (
        lambda: picture("JPEG").replace(b"\x08\x00\x08\x00\x08\x03", b"\x08\xff\xdc\xff\xdc\x03"),
        "has more than 50,000,000 pixels",
    ),
    "JPEG of many scans": (scans_of_jpeg, "scans of 36,000,000 pixels, which is too slow; save it again"),
    "PPM of many pixels": (lambda: b"P6 99999999 99999999 255\n", "has more than 50,000,000 pixels"),
    "PPM of digits": (lambda: b"P6 " + b"9" * 5000 + b" 1 255\n", "is not a valid image"),
    "BMP of many pixels": (
        lambda: picture("BMP")[:18] + struct.pack("<ii", 60_000, 60_000) + picture("BMP")[26:],
        "has more than 50,000,000 pixels",
    ),
    "GIF of a large frame": (lambda: gif(width=65_535, height=65_535), "has more than 50,000,000 pixels"),
    "GIF of many frames": (lambda: gif(frames=200_000), "has several frames"),
    "GIF of a truncated frame": (lambda: gif()[:-4], "is not a valid image"),
    "TIFF of many pixels": (lambda: tiff(65_535, 65_535), "has more than 50,000,000 pixels"),
    "TIFF of many tags": (same_bytes_of_many_tags, ""),
    "TIFF whose tags are in a circle": (lambda: tiff(8, 8)[:-4] + struct.pack("<I", 8), ""),
    "PNG of long texts": (
        lambda: png(8, 8, *[chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(30_000_000)))] * 40),
        "is not a valid image",
    ),
    "PNG of long EXIF": (lambda: png(8, 8, chunk(b"eXIf", bytes(100_000))), "has more than 65,536 bytes of EXIF"),
    "WebP of the largest size": (
        lambda: b"RIFF" + struct.pack("<I", 30) + b"WEBPVP8X" + struct.pack("<II", 10, 0) + b"\xff\x3f\0\xff\x3f\0",
        "has more than 50,000,000 pixels",
    ),
    "PNG cut": (lambda: picture()[:-30], "is not a valid image"),
    "JPEG cut": (lambda: picture("JPEG")[:-30], "is not a valid image"),
}


def write_job(folder: Path, path: str) -> None:
    (folder / "job.toml").write_text(JOB.format(path=path))


def fake_programs(folder: Path) -> dict[str, str]:
    """Write programs that Pillow knows, and return an environment that finds them first."""
    (folder / "bin").mkdir()
    for name in ("gs", "djpeg", "gswin32c"):
        program = folder / "bin" / name
        program.write_text(f"#!/bin/sh\ntouch {folder}/started\ncat\n")
        program.chmod(0o755)
    cache = str(folder / "cache")
    return {"PATH": f"{folder}/bin:{os.environ['PATH']}", "TITAN_LAUNCH_CACHE": cache}


COMMANDS = (["data", "--config", "job.toml"], ["train", "--config", "job.toml"])


@pytest.mark.parametrize("name", rest_is_slow(list(BAD_IMAGES), every=9))
def test_bad_images_are_one_sentence(runner: Runner, tmp_path: Path, name: str) -> None:
    make, sentence = BAD_IMAGES[name]
    content = make()
    environment = fake_programs(tmp_path)
    (tmp_path / "folder" / "cat").mkdir(parents=True)
    (tmp_path / "folder" / "cat" / "0.png").write_bytes(content)
    write_tar(tmp_path / "a.tar", {"0.png": content, "0.cls": b"0"})
    for path in ("folder", "a.tar"):
        write_job(tmp_path, path)
        for command in COMMANDS if sentence else COMMANDS[:1]:
            ended = runner.run(command, tmp_path, environment)
            if sentence:
                ended.assert_one_sentence(sentence)
                assert "0.png" in ended.stderr
            ended.assert_harmless()
            assert len(ended.text) < 20_000
        ended = runner.run(
            ["init", "image_classification", "--out", f"{path}.toml", "--data", path],
            tmp_path,
            environment,
        )
        ended.assert_harmless()
    assert not (tmp_path / "started").exists()


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


END = bytes(1024)


def header(name: str = "0.png", size: int | bytes = 0, kind: bytes = b"0", content: bytes = b"") -> bytes:
    """Return a header of a tar file. `size`: a number, or the bytes of its field."""
    field = b"%011o\0" % size if isinstance(size, int) else size
    block = bytearray(512)
    block[:100] = name.encode()[:100].ljust(100, b"\0")
    block[100:124] = b"0000644\0" + b"0000000\0" * 2
    block[124:136], block[136:148] = field, b"00000000000\0"
    block[148:156], block[156:157], block[257:265] = b" " * 8, kind, b"ustar\x0000"
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + content + bytes(-len(content) % 512)


def pax(**records: str) -> bytes:
    lines = b""
    for key, value in records.items():
        text = f" {key}={value}\n".encode()
        size = len(text) + len(str(len(text) + 2))
        lines += str(size).encode() + text
    return header("x", len(lines), b"x", lines)


def tar_of(cls: bytes, field: bytes | None = None) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        members = {"0.png": picture(), "0.cls": cls} | ({} if field is None else {"0.json": field})
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


NEGATIVE = b"\xff" * 11 + b"\x00"
HUGE = b"\x80" + b"\x00" * 3 + b"\x7f" + b"\xff" * 7

BAD_TARS: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "is truncated, or not an uncompressed tar file"),
    "zeros": (lambda: END, "contains no images"),
    "gzip": (lambda: b"\x1f\x8b\x08" + bytes(2000), "is truncated, or not an uncompressed tar file"),
    "negative size": (lambda: header(size=NEGATIVE) + END, "a.tar "),
    "huge size": (lambda: header(size=HUGE) + END, "is truncated, or not"),
    "size beyond the file": (lambda: header(size=10**9) + END, "is truncated, or not"),
    "long name of 4 GB": (lambda: header("L", 0o37777777777, b"L") + END, "has a header of 4,294,967,295 bytes"),
    "long name of 100 MB": (lambda: header("L", 10**8, b"L", bytes(10**8)) + END, "has a header of 100,000,000 bytes"),
    "pax header of 100 MB": (lambda: header("x", 10**8, b"x", bytes(10**8)) + END, "has a header of 100,000,000"),
    "global records": (lambda: header("g", 5000, b"g", bytes(5000)) + END, "has a header of 5,000 bytes"),
    "negative size in pax": (lambda: pax(size="-1024") + header() + END, "a.tar "),
    "size of digits in pax": (lambda: pax(size="9" * 5000) + header() + END, "a.tar "),
    "sparse records": (
        lambda: pax(**{"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}) + header(size=512, content=b"9" * 512) + END,
        "a.tar ",
    ),
    "many headers of long names": (lambda: header("L", 1, b"L", b"a") * 5000 + END, "is truncated, or not"),
    "bad header in the middle": (lambda: tar_of(b"0")[:-9000] + b"x" * 512 + END, "is truncated, or not"),
    "cut": (lambda: tar_of(b"0")[:700], "is truncated, or not"),
    "links": (lambda: header("0.png", kind=b"2") + header("0.cls", kind=b"1") + END, "contains no images"),
    "class of digits": (lambda: tar_of(b"9" * 5000), "contains 0.cls without a whole number"),
    "large class": (lambda: tar_of(b"1" + b"0" * 30), "beyond 1,048,576, the limit of classes"),
    "negative class": (lambda: tar_of(b"-1"), "with the class -1; number the classes"),
    "class of words": (lambda: tar_of(b"cat\nerror: fake"), "contains 0.cls without a whole number"),
    "class of megabytes": (lambda: tar_of(b" " * 3_000_000), "of more than 1 MiB"),
    "name of lines": (
        lambda: header("a\nerror: fake\x1b[2J.png", 1, content=b"x") + END,
        r"has no member a\nerror: fake\x1b[2J.cls",
    ),
}

BAD_LABELS = {
    "digits": (b'{"y": ' + b"9" * 5000 + b"}", "without a field y"),
    "nested": (b'{"y": ' + b"[" * 100_000 + b"}", "without a field y"),
    "list": (b"[1]", "without a field y"),
    "number": (b"1", "without a field y"),
    "null": (b"null", "without a field y"),
    "text": (b'{"y": "cat"}', "with the class 'cat'"),
    "boolean": (b'{"y": true}', "with the class True"),
    "NaN": (b'{"y": NaN}', "with the class nan"),
    "object": (b'{"y": {"y": 1}}', "with the class {'y': 1}"),
    "huge": (b'{"y": 1' + b"0" * 200 + b"}", "beyond 1,048,576"),
    "bytes": (b"\xff\xfe", "without a field y"),
}


@pytest.mark.parametrize("name", rest_is_slow([*BAD_TARS, *(f"label: {name}" for name in BAD_LABELS)], every=6))
def test_bad_shards_are_one_sentence(runner: Runner, tmp_path: Path, name: str) -> None:
    label = name.startswith("label: ")
    if label:
        content, sentence = BAD_LABELS[name.removeprefix("label: ")]
        (tmp_path / "a.tar").write_bytes(tar_of(b"0", content))
    else:
        make, sentence = BAD_TARS[name]
        (tmp_path / "a.tar").write_bytes(make())
    write_job(tmp_path, "a.tar")
    for command in COMMANDS:
        more = ["--data.label_field=y"] if label else []
        ended = runner.run([*command, *more], tmp_path, {"TITAN_LAUNCH_CACHE": str(tmp_path / "cache")})
        ended.assert_one_sentence(sentence)


def npy(shape: str = "(1, 8, 8)", descr: str = "'|u1'", content: bytes = bytes(64), fill: int = 0) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode() + b" " * fill + b"\n"
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text + content


LABELS = npy("(1,)", "'<i8'", bytes(8))


def npz(images: bytes, labels: bytes = LABELS, kind: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as archive:
        archive.writestr("images.npy", images)
        archive.writestr("labels.npy", labels)
    return file.getvalue()


def zip_bomb(megabytes: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("images.npy", "w", force_zip64=True) as member:
            member.write(npy(f"({megabytes * 256}, 64, 64)", content=b""))
            for _ in range(megabytes):
                member.write(bytes(1 << 20))
        archive.writestr("labels.npy", LABELS)
    return file.getvalue()


NOT_VALID = "is not a valid .npz file of plain arrays"
BAD_ARRAYS: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", NOT_VALID),
    "end of an archive": (lambda: b"PK\x05\x06" + bytes(18), "holds no array named images"),
    "cut": (lambda: npz(npy())[:-30], NOT_VALID),
    "bomb": (lambda: zip_bomb(400), "bytes after decompression, and the limit for a compressed file of its size is"),
    "bomb as a header": (
        lambda: npz(b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(10**8), kind=zipfile.ZIP_DEFLATED),
        NOT_VALID,
    ),
    "shape": (lambda: npz(npy("(10000000000, 8, 8)")), "is damaged: an array has 64 bytes, but its header says"),
    "compressed shape": (lambda: npz(npy("(10**12,)"), kind=zipfile.ZIP_DEFLATED), NOT_VALID),
    "large compressed shape": (
        lambda: npz(npy("(1000000000000, 8, 8)"), kind=zipfile.ZIP_DEFLATED),
        "is damaged: an array has 64 bytes",
    ),
    "negative shape": (lambda: npz(npy("(-1, -8, 8)")), "is damaged: an array has 64 bytes"),
    "shape of nothing": (lambda: npz(npy("(0, 1000000000000, 8)", content=b"")), ""),
    "objects": (lambda: npz(npy("(8,)", "'|O'")), NOT_VALID),
    "text": (lambda: npz(npy("(1, 8, 8)", "'<U1'", bytes(256))), "images are <U1"),
    "fields": (
        lambda: npz(npy("(1, 8, 8)", r"[('a\x1b\nerror: b', '|u1')]")),
        "images are [(",
    ),
    "large items": (lambda: npz(npy("(1, 8, 8)", "'|V2147483647'")), "is damaged: an array has 64 bytes"),
    "large image": (
        lambda: npz(npy("(1, 8000, 8000)", content=bytes(64_000_000)), kind=zipfile.ZIP_DEFLATED),
        "has images of more than 50,000,000 pixels",
    ),
    "nested header": (lambda: npz(npy("(" * 5000)), NOT_VALID),
    "negated header": (lambda: npz(npy("-" * 9000 + "1")), NOT_VALID),
    "long header": (lambda: npz(npy(fill=10**7)), NOT_VALID),
    "NaN": (lambda: npz(npy(descr="'<f4'", content=b"\xff" * 256)), "has pixels that are not finite"),
    "large labels": (
        lambda: npz(npy(), npy("(1,)", "'<i8'", struct.pack("<q", 1 << 40))),
        "labels must be less than 1,048,576",
    ),
    "labels beyond int64": (lambda: npz(npy(), npy("(1,)", "'<u8'", b"\xff" * 8)), "labels must be less than"),
    "LZMA": (lambda: npz(npy(), kind=zipfile.ZIP_LZMA), NOT_VALID),
    "other archive": (lambda: tar_of(b"0"), NOT_VALID),
}


@pytest.mark.parametrize("name", rest_is_slow(list(BAD_ARRAYS), every=6))
def test_bad_arrays_are_one_sentence(runner: Runner, tmp_path: Path, name: str) -> None:
    make, sentence = BAD_ARRAYS[name]
    (tmp_path / "a.npz").write_bytes(make())
    write_job(tmp_path, "a.npz")
    init = ["init", "image_classification", "--out", "b.toml", "--data", "a.npz"]
    for command in (*COMMANDS, init) if name != "NaN" else COMMANDS:
        ended = runner.run(command, tmp_path, {"TITAN_LAUNCH_CACHE": str(tmp_path / "cache")})
        ended.assert_one_sentence(sentence)


def deep(folder: Path) -> None:
    path = folder / "cat"
    path.mkdir(exist_ok=True)
    opened = os.open(path, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=opened)
        below = os.open("d", os.O_RDONLY, dir_fd=opened)
        os.close(opened)
        opened = below
    os.close(opened)


def linked(target: str, name: str = "cat/0.png") -> Callable[[Path], None]:
    return lambda folder: (folder / name).symlink_to(target)


BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "link to a file": (linked("/etc/passwd"), "folder/cat/0.png leads out of the folder; replace the link by a copy"),
    "link with dots": (linked("../../secret"), "folder/cat/0.png leads out of the folder"),
    "link to a folder as a class": (linked("/etc", "dog"), "folder/dog leads out of the folder"),
    "link to a device": (linked("/dev/zero"), "contains no image"),
    "link to itself": (linked("0.png"), "cannot be read: Too many levels of symbolic links"),
    "FIFO": (lambda folder: os.mkfifo(folder / "cat" / "0.png"), "contains no image"),
    "folder": (lambda folder: (folder / "cat" / "0.png").mkdir(), "contains no image"),
    "deep folders": (deep, "cannot be read: File name too long"),
    "large file": (
        lambda folder: os.truncate(os.open(folder / "cat" / "0.png", os.O_CREAT | os.O_RDWR), 1 << 40),
        "is larger than 256 MiB",
    ),
    "names": (lambda folder: (folder / "a\nerror: fake\x1b[2J").mkdir(), r"a\nerror: fake\x1b[2J"),
}


@pytest.mark.parametrize("name", rest_is_slow(list(BAD_FOLDERS), every=4))
def test_bad_folders_are_one_sentence(runner: Runner, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_bytes(picture())
    (tmp_path / "folder" / "cat").mkdir(parents=True)
    make, sentence = BAD_FOLDERS[name]
    make(tmp_path / "folder")
    if name == "names":
        (tmp_path / "folder" / "cat" / "0.png").write_bytes(picture())
    write_job(tmp_path, "folder")
    environment = {"TITAN_LAUNCH_CACHE": str(tmp_path / "cache")}
    for command in COMMANDS:
        runner.run(command, tmp_path, environment).assert_one_sentence(sentence)
    for command in (
        ["init", "image_classification", "--out", "b.toml", "--data", "folder"],
        ["check", "--config", "job.toml"],
    ):
        runner.run(command, tmp_path, environment).assert_harmless()
    if name == "deep folders":  # too deep for `shutil.rmtree`, by which pytest removes old folders
        subprocess.run(["rm", "-rf", str(tmp_path / "folder")], check=True)


def test_links_inside_of_the_folder_and_of_the_hub_are_followed(runner: Runner, tmp_path: Path) -> None:
    hub = tmp_path / "datasets--a--b"
    (hub / "blobs").mkdir(parents=True)
    (hub / "blobs" / "0123").write_bytes(picture())
    folder = hub / "snapshots" / "main"
    (folder / "cat").mkdir(parents=True)
    (folder / "cat" / "0.png").symlink_to("../../../blobs/0123")
    (folder / "cat" / "1.png").symlink_to("0.png")
    (folder / "dog").symlink_to("cat")
    (tmp_path / "folder").symlink_to(folder)
    write_job(tmp_path, "folder")
    more = ["--data.crop=8", "--data.resize=8"]
    ended = runner.run([*COMMANDS[0], *more], tmp_path, {"TITAN_LAUNCH_CACHE": str(tmp_path / "cache")})
    ended.assert_harmless()
    assert "leads out" not in ended.text


FORMATS = {
    "PNG": picture(),
    "JPEG": picture("JPEG"),
    "progressive JPEG": picture("JPEG", progressive=True),
    "GIF": picture("GIF"),
    "BMP": picture("BMP"),
    "PPM": picture("PPM"),
    "TIFF": picture("TIFF"),
    "LZW TIFF": picture("TIFF", compression="tiff_lzw"),
    "WebP": picture("WEBP"),
    "lossless WebP": picture("WEBP", lossless=True),
}


@pytest.mark.parametrize("name", rest_is_slow(list(FORMATS), every=3))
def test_changed_bytes_of_images(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(400):
            content = damaged(FORMATS[name], rng)
            try:
                with opened_image(content) as image:
                    assert decode(image, rng.choice((1, 3, 4))).ndim == 3
            except PixelFormatError as error:
                assert str(error).isprintable() and len(str(error)) < 500
    assert not caught
    assert len(capfd.readouterr().err) < 5000


def test_changed_bytes_of_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_LAUNCH_CACHE", str(tmp_path / "cache"))
    rng, path = random.Random(0), tmp_path / "a.tar"
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for number in range(3):
            for end, content in (("png", b"x" * 700), ("json", json.dumps({"y": number}).encode())):
                member = tarfile.TarInfo(f"{'long' * 40}/{number}.{end}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    for _ in range(400):
        path.write_bytes(damaged(file.getvalue(), rng))
        try:
            images = open_shards(str(path), "y", 3, ("data", "path"))
            for index in range(len(images.labels)):
                assert images.name(index) and images.content(index)
        except ConfigError as error:
            assert len(error.problems) == 1 and error.problems[0].reason.isprintable()
        except UserError as error:
            assert str(error).isprintable()


@pytest.mark.parametrize("kind", rest_is_slow([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
def test_changed_bytes_of_arrays(tmp_path: Path, kind: int) -> None:
    rng, path = random.Random(kind), tmp_path / "a.npz"
    whole = npz(npy(), kind=kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(400):
            path.write_bytes(damaged(whole, rng))
            try:
                images = open_npz(str(path), ("data", "path"))
                for index in range(len(images.labels)):
                    images.pixels(index, None)
            except ConfigError as error:
                assert error.problems[0].reason.isprintable()
            except UserError as error:
                assert str(error).isprintable()
    assert len(caught) < 20
