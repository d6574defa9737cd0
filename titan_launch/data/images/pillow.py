"""Image files, which Pillow opens and decodes. No other module decodes image files.

Pillow guesses the format of a file from its content, and some of its formats start other programs: a file that begins
like PostScript is given to Ghostscript, even if its name ends in `.jpg`. So only the formats below are tried. A small
file may also become gigabytes of pixels. A file outside of the limits below is refused before its pixels are decoded.

Pillow converts any mode into any other, and clips, drops or reinterprets values on the way. So an image is converted
only if its file format, its mode and the stored layout ("raw mode") of its pixels are in the tables below. All other
images are refused with an error.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any

from titan_launch.core.files import MIB
from titan_launch.core.terminal import one_line

if TYPE_CHECKING:
    from PIL.Image import Image  # optional
    from torch import Tensor

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's names of the file formats that are read. A JPEG with further pictures gets the name MPO when it is open."""

MOST_BYTES = 256 * MIB
"""Largest size of an image file in bytes. An uncompressed image of `MOST_PIXELS` takes less."""

MOST_PIXELS = 50_000_000
"""Largest number of pixels that are decoded. Decoding and normalization take up to 20 bytes for each pixel."""

_MOST_STORED = 125_000_000
"""Largest number of stored pixels of a JPEG. Some telephones take photos of 108 million pixels. A JPEG of more than
MOST_PIXELS must be scaled down while it is decoded. For a progressive JPEG, libjpeg takes up to 8 bytes for each
pixel."""

_MOST_SCANS = 20
"""Largest number of scans of a JPEG with `MOST_PIXELS`. A smaller JPEG may have more scans, because the time of a scan
grows with the number of pixels."""

_MOST_EXIF = 1 << 16
"""Largest size of EXIF data in bytes. All tags of EXIF may refer to the same bytes, so the memory that Pillow needs
grows with the square of this size."""

_READ_TWICE = 2 * MIB
"""While Pillow opens a file, it may read as many bytes as the file has, plus this number. Many tags of a TIFF may refer
to the same bytes, which Pillow reads once for each tag."""

_LEAST_READ, _MOST_SMALL_READS = 256, 50_000
"""Pillow may read a file 50,000 times, plus once for every 256 bytes of the file. Without a limit, a file could consist
of millions of tiny parts."""

_OWN_WARNINGS = re.compile(r"PIL\b")


class PixelFormatError(Exception):
    """Error for an image that is refused. The message is a clause with a remedy: `has several frames; save ...`."""


@contextmanager
def opened_image(content: bytes) -> Iterator[Image]:
    """Open an image until the end of the block. The block may load the pixels. Raises ImportError without Pillow.
    Raises PixelFormatError for formats that are not in FORMATS, for files outside of the limits, and in place of any
    other error in the block."""
    from PIL import Image  # optional

    if not any(item[3] == _OWN_WARNINGS for item in warnings.filters):  # a damaged file may cause thousands of warnings
        warnings.filterwarnings("ignore", module=_OWN_WARNINGS.pattern)
    file = _Bounded(content)
    try:
        with Image.open(file, formats=FORMATS) as image:
            file.left = None
            _check(image, content)
            yield image
    except PixelFormatError:
        raise
    except Image.UnidentifiedImageError:
        reason = f"it is none of {', '.join(FORMATS)}, or damaged"
        raise PixelFormatError(f"is not a valid image ({reason}); convert it to PNG or JPEG, or remove it") from None
    except Image.DecompressionBombError:
        raise _too_large(MOST_PIXELS) from None
    except Exception as error:  # Pillow raises many types of errors for damaged images
        reason = f"{type(error).__name__}: {one_line(str(error)):.200}" if str(error) else type(error).__name__
        raise PixelFormatError(f"is not a valid image ({reason}); replace or remove it") from None


class _Bounded(BytesIO):
    """The content of a file as a stream. At most `left` more bytes may be read; None: no limit. The number of reads is
    limited, too. Beyond the limits, `read` raises OSError."""

    def __init__(self, content: bytes):
        super().__init__(content)
        self.left: int | None = len(content) + _READ_TWICE
        self._reads_left = _MOST_SMALL_READS + len(content) // _LEAST_READ

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads_left -= 1
        if self._reads_left < 0:
            raise OSError("it consists of too many small parts")
        found = super().read(size)
        if self.left is not None:
            self.left -= len(found)
            if self.left < 0:
                raise OSError("many of its tags refer to the same bytes")
        return found


def _check(image: Image, content: bytes) -> None:
    """Raise PixelFormatError for a file that takes much more memory or time than its size suggests."""
    pixels, is_jpeg = image.width * image.height, image.format in ("JPEG", "MPO")
    if pixels > (limit := _MOST_STORED if is_jpeg else MOST_PIXELS):
        raise _too_large(limit)
    scans = content.count(b"\xff\xda") if is_jpeg else 1
    if scans * pixels > _MOST_SCANS * MOST_PIXELS:
        raise PixelFormatError(
            f"has {scans:,} scans of {pixels:,} pixels, which is too slow; save it again as a JPEG of few scans"
        )
    exif, in_text = image.info.get("exif", b""), image.info.get("Raw profile type exif", "")
    if max(len(exif), len(in_text) // 2) > _MOST_EXIF:
        raise PixelFormatError(f"has more than {_MOST_EXIF:,} bytes of EXIF; save it without EXIF")


def _too_large(limit: int) -> PixelFormatError:
    return PixelFormatError(f"has more than {limit:,} pixels, the limit of an image; make it smaller")


CHANNELS = {1: "L", 3: "RGB", 4: "RGBA"}
"""The mode that Pillow converts to, by number of channels."""

READ_AS_UINT8 = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK")
"""Modes that Pillow converts to uint8: gray, palettes, colors, and CMYK by `R = (255 - C) (255 - K) / 255`."""

READ_AS_FLOAT = ("I;16", "I;16B", "I;16L", "I;16N")
"""Modes of 16-bit gray, and the raw modes with the same names. A value v becomes the float32 nearest to v / 65535.
Other raw modes of one 16-bit channel have another range or order of bits."""

REFUSED = {
    "F": "has floating-point pixels, which have no known range",
    "I": "has signed or 32-bit integers as pixels, which have no known range",
    "HSV": "has hue, saturation and value as channels",
    "LAB": "has CIE L*a*b* colors",
    "La": "has gray that is multiplied by alpha",
    "RGBX": "has a fourth channel of unknown meaning",
    "RGBa": "has colors that are multiplied by alpha",
    "YCbCr": "has YCbCr colors of unknown coefficients",
}
"""Reasons to refuse images, by Pillow's mode."""

_PHOTOMETRIC, _SAMPLE_FORMAT, _WHITE_IS_ZERO, _UNSIGNED = 262, 339, 0, 1
"""Two tags of TIFF, and one value of each tag."""

_ORIENTATION = 274
"""EXIF tag of the orientation, which says how the stored pixels must be turned to be upright."""

_UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""Pillow's operation that makes an image upright, by orientation. Orientation 1 is upright. Other values are
ignored."""

_EIGHT_BITS = "convert it to 8 bits per channel, or save arrays in an .npz file"


def decode(image: Image, channels: int) -> Tensor:
    """Return the pixels of an opened image `[channels, height, width]`, upright. They are uint8, or float32 from 0 to 1
    if the image is 16-bit gray. Gray is repeated for each color, and a missing alpha channel is opaque.

    Raises PixelFormatError for an image that is refused, and the errors of Pillow for a damaged image.
    """
    import numpy as np  # imported here, as torch, because `init` only opens images
    import torch

    if image.width * image.height > MOST_PIXELS:
        raise _too_large(MOST_PIXELS)
    if problem := _problem(image):
        raise PixelFormatError(problem)
    is_gray_16 = _is_gray_16(image)  # `load` removes the raw mode
    image.load()
    upright = _turned(image)
    if is_gray_16:
        pixels = np.array(upright).astype(np.float32)
        pixels /= np.float32(65535)
        gray = torch.from_numpy(pixels)
        colors = gray.expand(min(channels, 3), -1, -1)
        return colors if channels <= 3 else torch.cat([colors, torch.ones(()).expand(1, *gray.shape)])
    if channels != 4 and upright.has_transparency_data:
        upright = upright.convert("RGBA")
        if upright.getchannel("A").getextrema() != (255, 255):
            remedy = "draw it on a background, or train a model with 4 channels"
            raise PixelFormatError(f"has transparent pixels, but the model takes no alpha channel; {remedy}")
    wanted = CHANNELS[channels]
    pixels = np.array(upright if upright.mode == wanted else upright.convert(wanted))
    return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None]).permute(2, 0, 1)


def _problem(image: Image) -> str:
    """Return the reason, with a remedy, why an image is refused; "" if it is accepted. The image must not be loaded
    yet."""
    if image.format != "MPO" and getattr(image, "is_animated", False):  # the first picture of an MPO is used
        return "has several frames; save one frame as a file without the others"
    raw, arguments = _raw_mode(image)
    if _is_gray_16(image):
        if "transparency" in image.info:
            return f"has a transparent value of 16-bit gray; {_EIGHT_BITS}"
        if _tag(image, _PHOTOMETRIC) == _WHITE_IS_ZERO:
            return f"has 16-bit gray in which 0 is white; {_EIGHT_BITS}"
        return ""
    if image.mode not in (*READ_AS_UINT8, *READ_AS_FLOAT):
        reason = REFUSED.get(image.mode, "has an unknown kind of pixels")
        return f"{reason} (mode {image.mode} of Pillow); {_EIGHT_BITS}"
    if image.mode in READ_AS_FLOAT or (image.format in ("PNG", "TIFF") and re.search(r";(12|16)", raw)):
        return f"has more than 8 bits per channel (stored as {raw}), which Pillow would cut off; {_EIGHT_BITS}"
    if image.format == "PPM" and arguments and arguments[0] > 255:  # the largest value of a pixel in the file
        return f"has pixels up to {arguments[0]:,}, which Pillow would reduce to 8 bits; {_EIGHT_BITS}"
    if image.format == "TIFF" and "X" in raw:
        return f"has further channels of unknown meaning (stored as {raw}); {_EIGHT_BITS}"
    if any(sample != _UNSIGNED for sample in _tag(image, _SAMPLE_FORMAT) or ()):
        return f"has signed pixels; {_EIGHT_BITS}"
    if image.format in ("JPEG", "MPO") and image.mode == "CMYK" and "adobe" not in image.info:
        return "has CMYK colors without the marker of Adobe, so they may be inverted; convert it to RGB"
    return ""


def _is_gray_16(image: Image) -> bool:
    """Return True for 16-bit gray. Pillow stores it as 32-bit integers for gray PPM files and, before Pillow 10.3, for
    PNG files."""
    if image.mode == "I" and image.format == "PPM":
        return True
    return image.mode in (*READ_AS_FLOAT, "I") and _raw_mode(image)[0] in READ_AS_FLOAT


def _raw_mode(image: Any) -> tuple[str, tuple[Any, ...]]:
    """Return Pillow's name of the layout of the stored pixels ("" if unknown), and further arguments of its decoder."""
    arguments = getattr(image, "tile", None) and image.tile[0][3]
    if isinstance(arguments, str):
        return arguments, ()
    if isinstance(arguments, tuple) and arguments and isinstance(arguments[0], str):
        return arguments[0], arguments[1:]
    return "", ()


def _tag(image: Any, number: int) -> Any:
    """Return the value of a tag of a TIFF file; None if the file lacks the tag, and for other formats."""
    return image.tag_v2.get(number) if image.format == "TIFF" else None


def _turned(image: Image) -> Image:
    """Return a loaded image upright. Pillow has already turned TIFF files. An image without readable EXIF is not
    turned."""
    from PIL.Image import Transpose

    try:
        change = _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # Pillow raises many types of errors for damaged EXIF, which says nothing about the pixels
        change = None
    return image if change is None else image.transpose(Transpose[change])
