"""Pixels of image files: exact values by hand, and refusals by name, each of a real file."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from titan_launch.config.image_format import ImageFormat
from titan_launch.config.sections.data import ImageData
from titan_launch.core.errors import UserError
from titan_launch.data.images.pillow import READ_AS_FLOAT, READ_AS_UINT8, REFUSED
from titan_launch.data.sources import build_source
from titan_launch.data.tokenizers import ByteTokenizer

Image = pytest.importorskip("PIL.Image")

HEIGHT, WIDTH = 3, 5
RNG = np.random.default_rng(0)
GRAY_16 = np.concatenate([[0, 1, 128, 256, 257, 300, 32767, 65279, 65280, 65534, 65535], RNG.integers(0, 65536, 4)])
GRAY_16 = GRAY_16.reshape(HEIGHT, WIDTH).astype(np.uint16)
RGB = RNG.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
GRAY = RGB[..., 0]
ALPHA = np.full((HEIGHT, WIDTH), 255, np.uint8)
HOLES = np.where(np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) == 7, 254, 255).astype(np.uint8)


def read(folder: Path, content: bytes, channels: int = 1) -> np.ndarray[Any, Any]:
    """Return the pixels of a file, from 0 to 1, as a model takes them: float32 `[channels, height, width]`."""
    folder = folder / str(zlib.crc32(content))  # the index of a folder has the sizes of its files
    (folder / "class").mkdir(parents=True, exist_ok=True)
    (folder / "class" / "0.png").write_bytes(content)
    config = ImageData(kind="images", path=str(folder), mean=0.0, std=1.0)
    taken = ImageFormat(channels, None, None, num_classes=1)
    return build_source(config, ByteTokenizer(), 16, images_taken=taken)[0][0].numpy()  # type: ignore[no-any-return]


def refusal(folder: Path, content: bytes, channels: int = 1) -> str:
    with pytest.raises(UserError) as caught:
        read(folder, content, channels)
    place, _, reason = str(caught.value).partition("class/0.png ")
    assert Path(place).parent == folder and "\n" not in reason
    return reason


def saved(image: Any, file_format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def picture(pixels: np.ndarray[Any, Any], mode: str | None = None) -> Any:
    image = Image.fromarray(pixels)
    return image if mode is None else image.convert(mode)


def png(pixels: np.ndarray[Any, Any], color: int, extra: bytes = b"") -> bytes:
    """Return a PNG file of 16 bits per channel, which Pillow cannot write. `color`: its type in the standard."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 16, color, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + extra
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def transparent_value(value: int) -> bytes:
    """Return the chunk tRNS of a gray PNG file."""
    data = b"tRNS" + struct.pack(">H", value)
    return struct.pack(">I", 2) + data + struct.pack(">I", zlib.crc32(data))


def tiff(data: bytes, bits: tuple[int, ...], order: str = "<", **tags: int | tuple[int, ...]) -> bytes:
    """Return an uncompressed TIFF file of one strip. `tags`: further tags of 16-bit numbers, as `t262=1`."""
    entries: dict[int, tuple[int, ...]] = {256: (WIDTH,), 257: (HEIGHT,), 258: bits, 259: (1,), 262: (1,), 273: (8,)}
    entries |= {277: (len(bits),), 278: (HEIGHT,), 279: (len(data),)}
    entries |= {int(name[1:]): value if isinstance(value, tuple) else (value,) for name, value in tags.items()}
    directory = 8 + len(data) + len(data) % 2
    after, table = directory + 2 + 12 * len(entries) + 4, b""
    values = b""
    for number, value in sorted(entries.items()):
        packed = struct.pack(f"{order}{len(value)}H", *value)
        if len(packed) > 4:
            packed, values = struct.pack(f"{order}I", after + len(values)), values + packed
        table += struct.pack(f"{order}HHI", number, 3, len(value)) + packed.ljust(4, b"\0")
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}I", directory)
    return head + data + bytes(len(data) % 2) + struct.pack(f"{order}H", len(entries)) + table + bytes(4) + values


def pgm(maximum: int) -> bytes:
    return b"P5 %d %d %d\n" % (WIDTH, HEIGHT, maximum) + np.minimum(GRAY_16, maximum).astype(">u2").tobytes()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(png(GRAY_16, color=0), id="png"),
        pytest.param(tiff(GRAY_16.astype("<u2").tobytes(), (16,)), id="tiff, little-endian"),
        pytest.param(tiff(GRAY_16.astype(">u2").tobytes(), (16,), ">"), id="tiff, big-endian"),
        pytest.param(saved(Image.fromarray(GRAY_16), "TIFF", compression="tiff_lzw"), id="tiff, compressed"),
        pytest.param(pgm(65535), id="pgm"),
    ],
)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_16_bit_gray_is_scaled_exactly(tmp_path: Path, content: bytes, channels: int) -> None:
    expected = (GRAY_16.astype(np.float64) / 65535).astype(np.float32)
    pixels = read(tmp_path, content, channels)
    assert pixels.shape == (channels, HEIGHT, WIDTH) and pixels.dtype == np.float32
    for channel in pixels[:3]:
        np.testing.assert_array_equal(channel, expected)
    assert channels < 4 or (pixels[3] == 1).all()


def test_16_bit_and_8_bit_images_mix_and_are_resized(tmp_path: Path) -> None:
    """8-bit gray as 16 bits, v * 257, is the same image."""
    for name, pixels in (("8", GRAY), ("16", GRAY * np.uint16(257))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").write_bytes(saved(Image.fromarray(pixels)))
    config = ImageData(kind="images", path=str(tmp_path), mean=0.25, std=0.5)
    source = build_source(config, ByteTokenizer(), 16, images_taken=ImageFormat(1, None, None, 2))
    torch.testing.assert_close(source[0][0], source[1][0], rtol=0, atol=1e-6)
    images, labels = source.read_batch([0, 1], None)  # type: ignore[attr-defined]
    assert images.dtype == torch.float32 and labels.tolist() == [0, 1]
    config = config.model_copy(update={"resize": 2})
    source = build_source(config, ByteTokenizer(), 16, images_taken=ImageFormat(1, None, None, 2))
    torch.testing.assert_close(source[0][0], source[1][0], rtol=0, atol=2 / 255)


def luma(colors: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return gray by ITU-R 601-2."""
    return (colors.astype(np.float64) @ [0.299, 0.587, 0.114])[..., None]


CMYK = RNG.integers(0, 256, (HEIGHT, WIDTH, 4), dtype=np.uint8)
INK = 255.0 - CMYK
PALETTE = picture(RGB // 128 * 128).quantize(8)
BITS = picture(GRAY).point(lambda value: 255 * (value > 99), "1")


@pytest.mark.parametrize(
    ("content", "colors"),
    [
        pytest.param(saved(picture(RGB)), RGB, id="RGB"),
        pytest.param(saved(picture(GRAY)), GRAY[..., None].repeat(3, 2), id="L"),
        pytest.param(saved(BITS), np.where(GRAY > 99, 255, 0)[..., None].repeat(3, 2), id="1"),
        pytest.param(saved(PALETTE), RGB // 128 * 128, id="P"),
        pytest.param(saved(picture(RGB), "BMP"), RGB, id="BMP"),
        pytest.param(saved(picture(np.dstack([RGB, ALPHA])), "WEBP", lossless=True), RGB, id="WEBP"),
        pytest.param(saved(picture(np.dstack([RGB, ALPHA]))), RGB, id="RGBA"),
        pytest.param(saved(picture(np.dstack([GRAY, ALPHA]))), GRAY[..., None].repeat(3, 2), id="LA"),
        pytest.param(saved(picture(GRAY), transparency=0), GRAY[..., None].repeat(3, 2), id="L, unused transparency"),
        pytest.param(saved(PALETTE, "GIF", transparency=9), RGB // 128 * 128, id="GIF, unused transparency"),
        pytest.param(tiff((255 - GRAY).tobytes(), (8,), t262=0), GRAY[..., None].repeat(3, 2), id="L, white is 0"),
        pytest.param(
            saved(Image.fromarray(CMYK, "CMYK"), "TIFF"), INK[..., :3] * INK[..., 3:] / 255, id="CMYK in TIFF"
        ),
        pytest.param(b"P6 %d %d 255\n" % (WIDTH, HEIGHT) + RGB.tobytes(), RGB, id="PPM"),
    ],
)
def test_8_bit_images_have_the_values_of_the_file(tmp_path: Path, content: bytes, colors: Any) -> None:
    pixels = read(tmp_path, content, 3)
    is_rounded = colors.dtype == np.float64
    np.testing.assert_allclose(pixels * 255, colors.transpose(2, 0, 1), atol=1 if is_rounded else 1e-4)
    gray = read(tmp_path, content, 1)
    np.testing.assert_allclose(gray * 255, luma(colors).transpose(2, 0, 1), atol=2)
    whole = read(tmp_path, content, 4)
    np.testing.assert_array_equal(whole[:3], pixels)
    assert (whole[3] == 1).all()


def test_a_cmyk_jpeg_is_not_inverted(tmp_path: Path) -> None:
    ink = np.full((HEIGHT, WIDTH, 4), (200, 100, 50, 30), np.uint8)
    content = saved(Image.fromarray(ink, "CMYK"), "JPEG", quality=100)
    expected = [(255 - color) * (255 - 30) / 255 for color in (200, 100, 50)]
    pixels = read(tmp_path, content, 3)
    np.testing.assert_allclose(pixels[:, 0, 0] * 255, expected, atol=3)
    marker = content.index(b"\xff\xeeXXAdobe".replace(b"XX", b"\0\x0e"))
    without = content[:marker] + content[marker + 16 :]
    assert refusal(tmp_path, without, 3).startswith("has CMYK colors without the marker of Adobe")


@pytest.mark.parametrize("orientation", range(1, 10))
@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_an_image_is_turned_upright(tmp_path: Path, file_format: str, orientation: int) -> None:
    """The stored rows and columns by orientation, as section 4.6.5 of the EXIF standard describes them."""
    upright = np.kron(RGB // 128 * 128, np.ones((8, 8, 1), np.uint8))
    stored = {
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.swapaxes(0, 1),
        6: upright.swapaxes(0, 1)[::-1],
        7: upright.swapaxes(0, 1)[::-1, ::-1],
        8: upright.swapaxes(0, 1)[:, ::-1],
    }.get(orientation, upright)
    exif = Image.Exif()
    exif[274] = orientation
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(file_format, {})
    pixels = read(tmp_path, saved(picture(np.ascontiguousarray(stored)), file_format, exif=exif, **options), 3)
    np.testing.assert_allclose(pixels * 255, upright.transpose(2, 0, 1), atol=40 if file_format == "JPEG" else 0)


def test_damaged_exif_says_nothing_about_the_pixels(tmp_path: Path) -> None:
    content = saved(picture(RGB), exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    np.testing.assert_array_equal(read(tmp_path, content, 3) * 255, RGB.transpose(2, 0, 1))


def test_transparent_pixels_need_an_alpha_channel(tmp_path: Path) -> None:
    palette = PALETTE.copy()
    content = {
        "RGBA": saved(picture(np.dstack([RGB, HOLES]))),
        "LA": saved(picture(np.dstack([GRAY, HOLES]))),
        "P": saved(palette, transparency=palette.getpixel((0, 0))),
        "palette with alpha": saved(palette, transparency=bytes([200] * 8)),
        "L": saved(picture(GRAY), transparency=int(GRAY[1, 1])),
        "RGB": saved(picture(RGB), transparency=tuple(map(int, RGB[1, 1]))),
        "1": saved(BITS, transparency=255),
        "GIF": saved(palette, "GIF", transparency=palette.getpixel((0, 0))),
        "WEBP": saved(picture(np.dstack([RGB, HOLES])), "WEBP", lossless=True),
        "multiplied": tiff(np.dstack([RGB, HOLES]).tobytes(), (8,) * 4, t262=2, t338=1),
    }
    for name, file in content.items():
        for channels in (1, 3):
            assert refusal(tmp_path, file, channels).startswith("has transparent pixels, but the model takes no"), name
        assert 0 <= read(tmp_path, file, 4)[3].min() < 1, name
    np.testing.assert_array_equal(read(tmp_path, content["RGBA"], 4)[3] * 255, HOLES)


FRAMES = [picture(RGB), picture(255 - RGB)]
WIDE = RNG.integers(0, 65536, (HEIGHT, WIDTH, 4)).astype(np.uint16)
FLOAT = tiff(RNG.random((HEIGHT, WIDTH), np.float32).tobytes(), (32,), t339=3)
REMEDY = "; convert it to 8 bits per channel, or save arrays in an .npz file"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (FLOAT, f"has floating-point pixels, which have no known range (mode F of Pillow){REMEDY}"),
        (b"Pf\n2 2\n-1.0\n" + bytes(16), "has floating-point pixels"),
        (saved(Image.new("I", (2, 2)), "TIFF"), "has signed or 32-bit integers as pixels"),
        (tiff(WIDE[..., 0].tobytes(), (16,), t339=2), "has signed or 32-bit integers as pixels"),
        (tiff(WIDE[..., 0].tobytes(), (16,), t262=0), "has 16-bit gray in which 0 is white"),
        (tiff(WIDE[..., 0].tobytes(), (16,), t266=2), "has more than 8 bits per channel (stored as I;16R)"),
        (tiff(WIDE[..., 0].tobytes(), (12,)), "has more than 8 bits per channel (stored as I;12)"),
        (tiff(GRAY.tobytes(), (8,), t339=2), "has signed pixels"),
        (png(WIDE[..., :3], color=2), "has more than 8 bits per channel (stored as RGB;16B)"),
        (png(WIDE[..., :2], color=4), "has more than 8 bits per channel (stored as LA;16B)"),
        (png(WIDE, color=6), "has more than 8 bits per channel (stored as RGBA;16B)"),
        (tiff(WIDE[..., :3].tobytes(), (16,) * 3, t262=2), "has more than 8 bits per channel (stored as RGB;16L)"),
        (tiff(WIDE.tobytes(), (16,) * 4, t262=5), "has more than 8 bits per channel (stored as CMYK;16L)"),
        (png(GRAY_16, 0, transparent_value(300)), "has a transparent value of 16-bit gray"),
        (b"P6 5 3 65535\n" + WIDE[..., :3].tobytes(), "has pixels up to 65,535, which Pillow would reduce to 8 bits"),
        (saved(Image.new("RGBX", (2, 2)), "TIFF"), "has "),
        (tiff(bytes(75), (8,) * 5, t262=2, t338=(0, 0)), ("has further channels of unknown", "has a fourth channel")),
        (saved(Image.new("YCbCr", (2, 2)), "TIFF"), "has "),
        (saved(Image.new("LAB", (2, 2)), "TIFF"), "has CIE L*a*b* colors (mode LAB of Pillow)"),
        (tiff(bytes(30), (8, 8), t338=1), ("has gray that is multiplied by alpha", "is not a valid image")),
        (saved(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), "has several frames; save one frame"),
        (saved(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:]), "has several frames"),
        (saved(FRAMES[0], "PNG", save_all=True, append_images=FRAMES[1:]), "has several frames"),
        (saved(FRAMES[0], "TIFF", save_all=True, append_images=FRAMES[1:]), "has several frames"),
        (saved(picture(RGB), "TGA"), "is not a valid image (it is none of BMP, GIF"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pixels_that_are_not_understood_are_refused(
    tmp_path: Path, content: bytes, reason: str | tuple[str, ...]
) -> None:
    """`reason`: the beginning of the reason, or those of several releases of Pillow."""
    for channels in (1, 3, 4):
        assert refusal(tmp_path, content, channels).startswith(reason)


def test_the_first_picture_of_a_camera_file_counts(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (16, 16), color) for color in ((200, 0, 0), (0, 0, 200))]
    pixels = read(tmp_path, saved(frames[0], "MPO", save_all=True, append_images=frames[1:]), 3)
    np.testing.assert_allclose(pixels[:, 0, 0] * 255, (200, 0, 0), atol=3)


def test_every_mode_of_pillow_is_in_one_table() -> None:
    modes = [*READ_AS_UINT8, *READ_AS_FLOAT, *REFUSED]
    assert set(Image.MODES) <= set(modes) and len(modes) == len(set(modes))
