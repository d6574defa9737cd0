"""Opening of image files with Pillow. No other module opens image files.

Pillow guesses the format of a file from its content, and some of its formats start other programs: a file that begins
like PostScript is given to Ghostscript, even if its name ends in `.jpg`. So only the formats below are tried. A small
file may also become gigabytes of pixels. A file outside of the limits below is refused before its pixels are decoded.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING

from titan_launch.core.files import MIB
from titan_launch.core.terminal import one_line

if TYPE_CHECKING:
    from PIL.Image import Image  # optional

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


def check_decoded(image: Image) -> None:
    """Raise PixelFormatError if an image has more pixels than may be decoded."""
    if image.width * image.height > MOST_PIXELS:
        raise _too_large(MOST_PIXELS)


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
        raise PixelFormatError(f"has {scans:,} scans of {pixels:,} pixels; save it again")
    exif, in_text = image.info.get("exif", b""), image.info.get("Raw profile type exif", "")
    if max(len(exif), len(in_text) // 2) > _MOST_EXIF:
        raise PixelFormatError(f"has more than {_MOST_EXIF:,} bytes of EXIF; save it without them")


def _too_large(limit: int) -> PixelFormatError:
    return PixelFormatError(f"has more than {limit:,} pixels, the limit of an image; make it smaller")
