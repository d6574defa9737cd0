"""The reader of JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from titan_launch.core.json_files import JsonError, parse_json, parse_record, read_json

REFUSED = {
    '{"a": 1, "b": {"c": 1, "c": 2}}': 'the key "c" occurs twice in an object',
    "[1e999]": "the number 1e999 is outside the range of float64",
    "[NaN]": "NaN is not a JSON value",
    "9" * 301: "a number of more than 300 digits",
    '"\\ud800"': "a string with half of a surrogate pair",
    '{"\\udfff": 1}': "a string with half of a surrogate pair",
    "[" * 100_000: "more than 64 nested arrays and objects",
    "[" * 65 + "]" * 65: "more than 64 nested arrays and objects",
    '{"a": ' * 65 + "1" + "}" * 65: "more than 64 nested arrays and objects",
    '{"a"': "Expecting ':' delimiter at line 1, column 5",
    "": "Expecting value at line 1, column 1",
}
"""Texts, and what is wrong with them."""


@pytest.mark.parametrize("text", REFUSED)
def test_what_json_does_not_say_is_refused(text: str) -> None:
    for content in (text, text.encode()):
        with pytest.raises(JsonError) as raised:
            parse_json(content)
        assert str(raised.value) == REFUSED[text]


def test_values_are_those_of_json() -> None:
    value = {"a": [1, -2.5, "é\U0001f600\n", None, True], "": {"b": 9 * 10**299}, "c": json.loads("[" * 63 + "]" * 63)}
    assert parse_json(json.dumps(value)) == value
    assert parse_json(b"\xef\xbb\xbf" + json.dumps(value, ensure_ascii=False).encode()) == value


def test_bytes_that_are_not_utf_8_have_a_line() -> None:
    with pytest.raises(JsonError, match=r"not UTF-8 text \(byte 0xff\)") as raised:
        parse_json(b'{"a":\n"\xff"}')
    assert raised.value.line == 2


def test_the_number_of_values_is_limited() -> None:
    assert parse_json("[1,2,3]", 3) == [1, 2, 3]
    with pytest.raises(JsonError, match="more than 3 values"):
        parse_json("[1,2,3,4]", 3)


def test_a_record_may_have_fields_that_nothing_can_use() -> None:
    record = parse_record(b'{"text": "a", "score": NaN, "half": "\\ud800"}')
    assert math.isnan(record["score"])
    for line in (b'{"a": 1, "a": 2}', b"[" * 70 + b"]" * 70, b"9" * 400, b"\xff", b"[1e400]"):
        with pytest.raises(JsonError):
            parse_record(line)


def test_files_are_regular_and_small(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[1, 2]")
    assert read_json(path) == [1, 2]
    assert read_json(path, most_bytes=6) == [1, 2]
    with pytest.raises(OSError, match="larger than"):
        read_json(path, most_bytes=5)
    with pytest.raises(OSError, match="not a regular file"):
        read_json(Path("/dev/zero"))
