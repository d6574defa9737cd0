"""The documentation of fields, read from the source: the string below each."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise

from titan_launch.config.base import Section


def field_docs(section: type[Section]) -> dict[str, str]:
    """The docstring of every field of a section, inherited ones included, one line per paragraph."""
    docs: dict[str, str] = {}
    for cls in reversed(section.__mro__):
        if issubclass(cls, Section) and cls is not Section:
            docs |= _own_docs(cls)
    return {name: docs[name] for name in section.model_fields if name in docs}


def section_doc(section: type[Section]) -> str:
    """The docstring of a section, one line per paragraph."""
    return _unwrap(section.__doc__ or "")


def _own_docs(cls: type[Section]) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for field, following in pairwise(tree.body):
        text = _string(following)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and text is not None:
            docs[field.target.id] = _unwrap(text)
    return docs


def _string(node: ast.stmt) -> str | None:
    """The string that a statement consists of, if it does."""
    value = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
    return value if isinstance(value, str) else None


def _unwrap(text: str) -> str:
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
