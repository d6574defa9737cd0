"""Line numbers of TOML keys, in TOML that is easy to misread."""

from __future__ import annotations

import pytest
import tomli

from titan_launch.config.loading.toml_positions import key_lines, repeated_key
from titan_launch.core.errors import KeyPath


def test_lines_of_sections_and_keys() -> None:
    text = "# a comment\n[training]  # another\nsteps = 1\n\n[ lr_scheduler ]\n  warmup_steps=2 # steps = 3\n"
    assert key_lines(text) == {
        ("training",): 2,
        ("training", "steps"): 3,
        ("lr_scheduler",): 5,
        ("lr_scheduler", "warmup_steps"): 6,
    }


def test_dotted_keys_name_the_tables_they_make() -> None:
    assert key_lines("a.b.c = 1\na . d = 2\n") == {("a",): 1, ("a", "b"): 1, ("a", "b", "c"): 1, ("a", "d"): 2}


def test_lines_of_a_header_below_its_own_subtable() -> None:
    assert key_lines("[a.b]\nc = 1\n[a]\nd = 2\n")["a",] == 3


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('"training" = 1', ("training",)),
        ("'a.b' = 1", ("a.b",)),
        ('a."b.c".d = 1', ("a", "b.c", "d")),
        (r'"tab\there \" \u00e9" = 1', ('tab\there " é',)),
        ('["x y".z]', ("x y", "z")),
        ("1234 = 1", ("1234",)),
        ("'' = 1", ("",)),
    ],
)
def test_lines_of_quoted_keys(text: str, key: KeyPath) -> None:
    assert key_lines(f"\n\n{text}\n")[key] == 3


@pytest.mark.parametrize(
    "string",
    [
        '"""\nb = 1\n[c]\n"""',
        "'''\nb = 1\n[c]\n'''",
        '"""\\"""\nb = 1"""',
        '"""\n"b"" = 1\n"""""',
        "'''\n'b' = 1\n'''''",
        '"b = 1 # [c] \\" \\\\"',
        "'b = 1 # [c] \\'",
        '""""""',
        "''''''",
        '""',
    ],
)
def test_keys_inside_strings_are_ignored(string: str) -> None:
    text = f"a = {string}\nz = 1\n"
    assert tomli.loads(text).keys() == {"a", "z"}
    assert key_lines(text) == {("a",): 1, ("z",): text.count("\n")}


def test_lines_of_keys_around_arrays_over_several_lines() -> None:
    text = 'a = [ # b = 1\n  "x, ]", # ]\n  [1,\n   2],\n]\nz = [[], [ ]]\n'
    assert key_lines(text) == {
        ("a",): 1,
        ("a", 0): 2,
        ("a", 1): 3,
        ("a", 1, 0): 3,
        ("a", 1, 1): 4,
        ("z",): 6,
        ("z", 0): 6,
        ("z", 1): 6,
    }


def test_lines_of_inline_tables_in_arrays() -> None:
    text = "rules = [\n  {type = 'A', x.y = {z = 1}},\n  {},\n  {type = 'B'},\n]\n"
    lines = key_lines(text)
    assert lines["rules", 0, "x", "y", "z"] == 2
    assert lines["rules", 1] == 3
    assert lines["rules", 2, "type"] == 4


def test_arrays_of_tables_count_and_nest() -> None:
    text = "[[a]]\nb = 1\n[[a.c]]\n[[a.c]]\nd = 1\n[a.e]\nf = 1\n[[a]]\n[[a.c]]\nd = 2\n"
    lines = key_lines(text)
    assert lines["a",] == 1
    assert lines["a", 0, "c", 1, "d"] == 5
    assert lines["a", 0, "e", "f"] == 7
    assert lines["a", 1] == 8
    assert lines["a", 1, "c", 0, "d"] == 10


def test_lines_of_a_file_with_windows_line_ends() -> None:
    assert key_lines("[a]\r\nb = '''\r\nc\r\n'''\r\nd = 1\r\n")["a", "d"] == 5


def test_lines_of_keys_with_unquoted_values() -> None:
    text = "a = 1979-05-27 07:32:00\nb = -inf#c = 1\nd = 0xff\ne = [1979-05-27,2]\nf = true"
    assert key_lines(text) == {("a",): 1, ("b",): 2, ("d",): 3, ("e",): 4, ("e", 0): 4, ("e", 1): 4, ("f",): 5}


def test_every_key_of_a_document_has_a_line() -> None:
    text = "[a]\nb.c = 1\nd = [{e = 1, 'f.g' = [2]}]\n[[h.i]]\nj = 'k'\n[[h.i]]\n[h.i.l]\nm = {n = 1}\n"
    assert set(_paths(tomli.loads(text))) <= key_lines(text).keys()


def _paths(value: object, key: KeyPath = ()) -> list[KeyPath]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for name, inner in items for path in [(*key, name), *_paths(inner, (*key, name))]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = 1\nb = 2\na = 3\n", (("a",), 1)),
        ("[a]\n[b]\n[a]\n", (("a",), 1)),
        ("[[a]]\nb = 1\n[[a]]\nb = 1\nb = 2\n", (("a", 1, "b"), 4)),
        ("a = {b = 1, b = 2}\n", (("a", "b"), 1)),
        ("a = 1\nb = nonsense ]\n", None),
        ("a = 'not closed", None),
        ("a = [1, \n", None),
    ],
)
def test_a_repeated_key_is_found_with_its_line(text: str, expected: tuple[KeyPath, int] | None) -> None:
    with pytest.raises(tomli.TOMLDecodeError):
        tomli.loads(text)
    assert repeated_key(text) == expected
