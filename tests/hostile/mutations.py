"""Random changes of the bytes of files."""

from __future__ import annotations

import random


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Return the content of a binary file with a few changed, removed, repeated or inserted bytes."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0:
                data[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                data[place : place + 4] = rng.choice((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0"))
            case 2:
                del data[place:]
            case 3:
                del data[place : place + rng.randint(1, 30)]
            case 4:
                data[place:place] = rng.randbytes(rng.randint(1, 30))
            case 5:
                data[place:place] = data[: rng.randint(0, 60)]
    return bytes(data)


_WORDS = (
    *(b"\0", b"\xff", b"\n", b'"', b"{", b"[", b",", b"\\u", b"\\ud800", b"1e999", b"NaN", b"99999999999999999999"),
    *(b"9" * 50, b"true", b"null", b'"x"', b"{}", b"[]"),
)
"""Pieces of JSON and of damaged text."""


def damaged_text(content: bytes, rng: random.Random) -> bytes:
    """Return the content of a text file with a few changed, removed, repeated or inserted bytes and words."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0:
                data[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[place : place + rng.choice((1, 3, 50))]
            case 2:
                data[place:place] = rng.choice(_WORDS)
            case 3:
                del data[place:]
            case 4:
                data[place:place] = data[max(0, place - 40) : place] * rng.choice((1, 30))
            case 5:
                data[place : place + 2] = rng.choice(_WORDS)
    return bytes(data)
