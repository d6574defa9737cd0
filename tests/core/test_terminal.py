"""The door of the terminal."""

from __future__ import annotations

import io

import pytest

from titan_launch.core.terminal import as_message, one_line, printable, say


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 日本 😀", "plain é 日本 😀"),
        ("a\x1b[31mb\x07", "a\\x1b[31mb\\x07"),
        ("\x00\x7f\x85\x9b", "\\x00\\x7f\\x85\\x9b"),
        ("a\u202eb\u2066", "a\\u202eb\\u2066"),
        ("\ud800\u2028", "\\ud800\\u2028"),
        ("a\r", "a\\r"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == one_line(text) == shown


def test_only_a_name_has_no_line_ends() -> None:
    assert printable("a\n\tb") == "a\n\tb"
    assert one_line("a\n\tb") == "a\\n\\tb"


def test_no_part_of_a_message_looks_like_a_message() -> None:
    assert as_message("error: a\nerror: fake\n    b\n\x1b[2K") == "error: a\n  error: fake\n    b\n  \\x1b[2K"


def test_say_prints_what_a_terminal_does_not_obey() -> None:
    file = io.StringIO()
    say("a\x1bb", file, end="")
    say("c\n", file)
    assert file.getvalue() == "a\\x1bbc\n\n"
