"""Attributes, environment variables and loggers are restored after a block."""

from __future__ import annotations

import logging
import math
import os

import pytest

from titan_launch.core.patches import environment, loggers_silenced, replaced


class Base:
    """A class with an attribute."""

    name = "base"


class Derived(Base):
    """A class that inherits the attribute."""


def test_an_attribute_comes_back_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), replaced(math, "pi", 3):
        assert math.pi == 3
        raise ZeroDivisionError
    assert math.pi > 3.14


def test_an_inherited_attribute_is_inherited_again() -> None:
    with replaced(Derived, "name", "derived"):
        assert (Derived.name, Base.name) == ("derived", "base")
    assert Derived.name == "base" and "name" not in vars(Derived)


def test_nested_replacements_are_undone_in_order() -> None:
    with replaced(Base, "name", "outer"):
        with replaced(Base, "name", "inner"):
            assert Derived.name == "inner"
        assert Derived.name == "outer"
    assert Base.name == "base"


def test_environment_variables_come_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BEFORE", "old")
    with pytest.raises(ZeroDivisionError), environment(SET_BEFORE="", NOT_SET_BEFORE="new"):
        assert (os.environ["SET_BEFORE"], os.environ["NOT_SET_BEFORE"]) == ("", "new")
        raise ZeroDivisionError
    assert os.environ["SET_BEFORE"] == "old" and "NOT_SET_BEFORE" not in os.environ


def test_loggers_are_restored_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    first, second = logging.getLogger("test.first"), logging.getLogger("test.second")
    second.setLevel(logging.INFO)
    with pytest.raises(ZeroDivisionError), loggers_silenced(first.name, second.name, below=logging.ERROR):
        second.warning("dropped")
        second.error("logged")
        raise ZeroDivisionError
    assert [record.message for record in caplog.records] == ["logged"]
    assert (first.level, second.level) == (logging.NOTSET, logging.INFO)
