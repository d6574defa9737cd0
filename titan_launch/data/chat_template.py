"""Chat templates: Jinja templates that turn the messages of a chat into text.

A template runs in a sandbox, with the functions that templates of Hugging Face use, except for the present date:
https://huggingface.co/docs/transformers/chat_templating_writing
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from titan_launch.core.errors import KeyPath, config_error
from titan_launch.core.files import read_regular
from titan_launch.data.tokenizers import Tokenizer

_CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{ message['content'] + '<|im_end|>' }}{%- endif %}{{ '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)

TEMPLATES = {"chatml": _CHATML}
"""Templates of this package, by the name that the key `template` gives."""

_BEGIN, _END = "\0<", "\0>"
"""Marks around the text of a `generation` block, until it is found. JSON text with NUL characters is refused."""


class Span(NamedTuple):
    """A range of characters."""

    start: int
    stop: int


class TemplateProblem(Exception):
    """A chat that a template cannot render."""

    def __init__(self, reason: str, detail: str):
        """`reason`: text after "is"; `detail`: further words."""
        self.reason, self.detail = reason, detail
        super().__init__(reason)


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the special tokens that it may name."""

    text: str
    special_tokens: Mapping[str, str]
    """Such as `{"bos_token": "<s>"}`: variables of the template."""

    control_tokens: Sequence[str] = ()
    """Names of tokens that no message may contain."""

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> tuple[str, list[Span]]:
        """Return the text of a chat, and the assistant's turns in it. Raises TemplateProblem.

        A turn is the text of a `generation` block, if the template has such blocks. Otherwise it is the difference
        between the chat before and after the message. White space after a turn's last special token does not count.
        """
        self._check_content(messages)
        marked = self._text(messages, tools)
        if self.marks_turns:
            return _without_marks(marked)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._text(messages[:index], tools, add_generation_prompt=True)
                after = self._text(messages[: index + 1], tools)
                if not (marked.startswith(after) and after.startswith(before)):
                    detail = (
                        "the text of a turn changes with later messages; use a template with generation marks, or chats "
                        "with one answer each"
                    )
                    raise TemplateProblem("not divided into turns by the template", detail)
                spans.append(Span(len(before), len(before) + len(self._trimmed(after[len(before) :]))))
        return marked, spans

    @cached_property
    def marks_turns(self) -> bool:
        """True if the template has `generation` blocks."""
        return re.search(r"{%[-+]?\s*generation\b", self.text) is not None

    def _trimmed(self, turn: str) -> str:
        stripped = turn.rstrip()
        return stripped if stripped.endswith(tuple(self.control_tokens)) else turn

    def _check_content(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise TemplateProblem for a message that contains a control token, which would end the turn."""
        for message in messages:
            content = message.get("content") or ""
            found = next((token for token in ("\0", *self.control_tokens) if token in content), None)
            if found is not None:
                name = "a NUL character" if found == "\0" else f"the control token {found}"
                raise TemplateProblem(f"a chat with {name} in a message", "remove it from the text")

    def _text(self, messages: Sequence[Mapping[str, Any]], tools: Any, add_generation_prompt: bool = False) -> str:
        from jinja2 import TemplateError

        variables = {**self.special_tokens, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return str(self._compiled.render(messages=messages, **variables))
        except TemplateError as error:
            raise TemplateProblem("refused by the chat template", str(error)) from None
        except Exception as error:  # a template may fail on messages in any way
            raise TemplateProblem("refused by the chat template", f"{type(error).__name__}: {error}") from None

    @cached_property
    def _compiled(self) -> Any:
        return _environment().from_string(self.text)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields. A compiled template cannot be sent to another process."""
        names = ("text", "special_tokens", "control_tokens")
        return {name: getattr(self, name) for name in names}


def load_template(template: str | None, tokenizer: Tokenizer, key: KeyPath) -> ChatTemplate:
    """Return the template that the key `template` names: by default that of the tokenizer's folder. Raises ConfigError
    on `key`."""
    folder = tokenizer.folder
    settings = {} if folder is None else _settings(folder / "tokenizer_config.json")
    if template in TEMPLATES:
        text = TEMPLATES[template]
    elif template is not None:
        text = _read(Path(template), key, template)
    else:
        text = _of_tokenizer(folder, settings, key)
    special = {name: _content(value) for name, value in settings.items() if name.endswith("_token") and _content(value)}
    control = [name for name in tokenizer.special_tokens if name in text or name in special.values()]
    made = ChatTemplate(text, special, control)
    _check_syntax(made, key, template)
    return made


def _of_tokenizer(folder: Path | None, settings: Mapping[str, Any], key: KeyPath) -> str:
    if folder is not None and (folder / "chat_template.jinja").is_file():
        return _read(folder / "chat_template.jinja", key, None)
    found = settings.get("chat_template")
    if isinstance(found, list):  # several templates with names
        by_name = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = by_name.get("default")
    if isinstance(found, str):
        return found
    where = "the tokenizer" if folder is None else str(folder)
    reason = f'is needed, because {where} has no chat template; set "chatml", or the path of a Jinja template'
    raise config_error(key, reason)


def _read(path: Path, key: KeyPath, value: str | None) -> str:
    try:
        return read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        names = ", ".join(f'"{name}"' for name in TEMPLATES)
        raise config_error(
            key, f"cannot be read ({reason}); name {names}, or a file with a Jinja template", value
        ) from None


def _settings(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _content(value: Any) -> str:
    """Return the text of a special token, which may be an object with options."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""


def _check_syntax(template: ChatTemplate, key: KeyPath, value: str | None) -> None:
    try:
        from jinja2 import TemplateSyntaxError
    except ImportError:
        raise config_error(key, "needs the package jinja2, which is not installed: pip install jinja2") from None
    try:
        _ = template._compiled
    except TemplateSyntaxError as error:
        raise config_error(key, f"is not a Jinja template: line {error.lineno}: {error.message}", value) from None


def _without_marks(marked: str) -> tuple[str, list[Span]]:
    """Return a text without marks, and the spans that were between them."""
    text, spans = "", []
    for piece in marked.split(_BEGIN):
        turn, mark, rest = piece.partition(_END)
        if mark:
            spans.append(Span(len(text), len(text) + len(turn)))
        text += turn + rest
    return text, spans


def _environment() -> Any:
    """Return the sandbox of templates, with the functions, filters and tags of Hugging Face's templates."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
    from jinja2.utils import Namespace

    class GenerationBlocks(Extension):
        """The tag `generation`, around the text of the assistant."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        def marked(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    class Variables(Namespace):
        """Variables of a template, without those that lead to Python's internals."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"the name {name} begins with an underscore")
            super().__setitem__(name, value)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["namespace"] = Variables
    # `strftime_now` is missing on purpose: the tokens would depend on the day. Templates then use a fixed date.
    return environment
