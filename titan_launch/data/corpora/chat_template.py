"""Chat templates: Jinja templates that turn the messages of a chat into text.

A template runs in a sandbox, with the variables, functions and tags that templates of Hugging Face use:
https://huggingface.co/docs/transformers/chat_templating_writing
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from titan_launch.core.errors import KeyPath, config_error
from titan_launch.core.files import read_regular
from titan_launch.data.corpora.records import RecordError
from titan_launch.data.tokenizers import Tokenizer

Message = Mapping[str, Any]
"""A message of a chat, as templates expect it: `{"role": "user", "content": "..."}`, perhaps with more keys."""

_CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{ message['content'] + '<|im_end|>' }}{%- endif %}{{ '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)

TEMPLATES = {"chatml": _CHATML}
"""Templates of this package, by the name that the key `template` gives."""

_OLDEST_JINJA = (3, 1, 6)
"""Templates can leave the sandbox of earlier releases (CVE-2025-27516)."""

_BEGIN, _END = "\0<", "\0>"
"""Marks around the text of a `generation` block until its span is known. Messages with NUL characters are refused."""


class Span(NamedTuple):
    """A range of characters."""

    start: int
    stop: int


@dataclass(frozen=True)
class ChatTemplate:
    """A template with its variables."""

    text: str
    variables: Mapping[str, Any]
    """The named special tokens, such as `{"bos_token": "<s>"}`, and the variables of the job."""

    special_tokens: Sequence[str] = ()
    """Text that no message may contain, because the tokenizer would make it a special token."""

    def render(
        self, messages: Sequence[Message], tools: Any, train_on: Literal["assistant", "last", "all"]
    ) -> tuple[str, list[Span]]:
        """Return the text of a chat, and its parts that are targets. Raises RecordError.

        A turn of the assistant is the text of a `generation` block, if the template has such blocks. Otherwise it is
        the difference between the chat before the message, with the prompt for an answer, and the chat after it.
        """
        self._check_strings([messages, tools])
        messages = [_with_thoughts(message) for message in messages]
        text, blocks = self._rendered(messages, tools)
        if train_on == "all":
            return text, [Span(0, len(text))]
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        turns = [index for index in answers[-1:] if train_on == "last"] or answers
        is_weighted = not all(_is_target(messages[index]) for index in turns)
        turns = [index for index in turns if _is_target(messages[index])]
        if not self._marks_turns:
            return text, [self._difference(text, messages, tools, index) for index in turns]
        if train_on == "last" and answers:
            _, earlier_blocks = self._rendered(messages[: answers[-1]], tools) if answers[-1] else ("", [])
            blocks = blocks[len(earlier_blocks) :] if turns else []
        elif is_weighted:
            if len(blocks) != len(answers):
                reason = "the template must have one generation block for each answer of a chat with weights"
                raise RecordError("not divided into turns by the template", reason, "template")
            blocks = [block for block, index in zip(blocks, answers, strict=True) if index in turns]
        return text, blocks

    def check_syntax(self) -> None:
        """Raise `jinja2.TemplateSyntaxError` if the text is not a template."""
        _ = self._compiled

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields. A compiled template cannot be sent to another process."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def _difference(self, text: str, messages: Sequence[Message], tools: Any, index: int) -> Span:
        """Return the turn of message `index` in the text of a chat. A turn ends with its last special token.

        Some templates render a turn in another way once a later message follows. For example, they drop the thoughts
        of earlier turns. The turn then ends at the same special token.
        """
        before, _ = self._rendered(messages[:index], tools, add_generation_prompt=True)
        after, _ = self._rendered(messages[: index + 1], tools)
        if text.startswith(before) and after.startswith(before):
            turn = after[len(before) :]
            end = next(filter(turn.rstrip().endswith, self.special_tokens), "")
            if text.startswith(after):
                return Span(len(before), len(before) + len(turn.rstrip() if end else turn))
            if end and turn.count(end) == 1 and end in text[len(before) :]:
                return Span(len(before), text.index(end, len(before)) + len(end))
        raise RecordError(
            "not divided into turns by the template",
            f"the text before message {index + 1}, with the prompt for an answer, is not the beginning of the chat's "
            "text; use a template with generation blocks",
            "template",
        )

    @cached_property
    def _marks_turns(self) -> bool:
        return re.search(r"{%[-+]?\s*generation\b", self.text) is not None

    @cached_property
    def _forbidden(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, ["\0", *self.special_tokens])))

    def _check_strings(self, value: Any) -> None:
        for string in _strings(value):
            if found := self._forbidden.search(string):
                name = "a NUL character" if found[0] == "\0" else f"the special token {found[0]}"
                raise RecordError(f"a chat with {name} in a message")

    def _rendered(
        self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the text of messages, and the spans of its `generation` blocks. Raises RecordError."""
        variables = {"documents": None, **self.variables, "messages": messages, "tools": tools}
        try:
            marked = self._compiled.render(variables, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template can fail on a chat in any way
            detail = str(error) if type(error).__name__ == "TemplateError" else f"{type(error).__name__}: {error}"
            if "strftime_now" in detail:
                detail = (
                    "it writes the present date, so the tokens would change every day; write a date instead of "
                    "strftime_now(...) into a copy, and name the copy"
                )
            raise RecordError("refused by the chat template", detail, "template") from None
        return _without_marks(marked)

    @cached_property
    def _compiled(self) -> Any:
        return _environment().from_string(self.text)


def _is_target(message: Message) -> bool:
    """Return False for an answer with `"weight": 0` (OpenAI) or `"train": false`. Raises RecordError for weights other
    than 0 and 1."""
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise RecordError("with a weight of a message that is neither 0 nor 1", f"it is {weight}")
    return bool(weight) and message.get("train", True) is not False


def load_template(
    template: str | None, variables: Mapping[str, Any], tokenizer: Tokenizer, key: KeyPath
) -> ChatTemplate:
    """Return the template that the key `template` names: by default that of the tokenizer's folder. Raises ConfigError
    on `key`. `variables`: further variables of the template."""
    folder = tokenizer.folder
    settings = {} if folder is None else _settings(folder / "tokenizer_config.json")
    if template is None:
        text = _of_tokenizer(folder, settings, key)
    else:
        text = TEMPLATES.get(template) or _read(Path(template), key, template)
    tokens = {name: _content(value) for name, value in settings.items() if name.endswith("_token")}
    special = {name: token for name, token in tokens.items() if token}
    loaded = ChatTemplate(text, {**special, **variables}, tokenizer.special_tokens)
    _check_jinja(key)
    from jinja2 import TemplateSyntaxError

    try:
        loaded.check_syntax()
    except TemplateSyntaxError as error:
        raise config_error(key, f"is not a Jinja template: line {error.lineno}: {error.message}", template) from None
    return loaded


def _of_tokenizer(folder: Path | None, settings: Mapping[str, Any], key: KeyPath) -> str:
    """Return the template in the files of a tokenizer: a file, a string, or the one with the name `default`."""
    if folder is not None and (folder / "chat_template.jinja").is_file():
        return _read(folder / "chat_template.jinja", key, None)
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    if isinstance(found, str):
        return found
    where = "the tokenizer" if folder is None else str(folder)
    raise config_error(key, f'must be set, because {where} has no chat template: "chatml", or a Jinja file')


def _read(path: Path, key: KeyPath, value: str | None) -> str:
    try:
        return read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        known = " or ".join(f'"{name}"' for name in TEMPLATES)
        raise config_error(key, f"cannot read {path}: {reason}; set {known}, or a Jinja file", value) from None


def _settings(path: Path) -> dict[str, Any]:
    """Return the content of a `tokenizer_config.json`; nothing if it is missing or has another form."""
    try:
        found = json.loads(read_regular(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _content(value: Any) -> str:
    """Return the text of a special token, which may be an object with options."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""


_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Keys of the thoughts before an answer. Templates read one of the first two."""


def _with_thoughts(message: Message) -> Message:
    """Return a message whose thoughts have the keys that templates read, as `transformers` passes them."""
    thoughts = next((message[key] for key in _THOUGHTS if message.get(key) is not None), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings([*value, *value.values()])
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _without_marks(marked: str) -> tuple[str, list[Span]]:
    """Return a text without marks, and the spans that were between them."""
    text, spans = "", []
    for piece in marked.split(_BEGIN):
        block, mark, rest = piece.partition(_END)
        if mark:
            spans.append(Span(len(text), len(text) + len(block)))
        text += block + rest
    return text, spans


def _check_jinja(key: KeyPath) -> None:
    """Raise ConfigError if jinja2 is missing, or if its sandbox is not safe."""
    install = "pip install 'titan-launch[chat]'"
    try:
        import jinja2  # noqa: F401 - optional
    except ImportError:
        raise config_error(key, f"needs the package jinja2, which is not installed: {install}") from None
    release = version("jinja2")
    if tuple(map(int, re.findall(r"\d+", release)[:3])) < _OLDEST_JINJA:
        oldest = ".".join(map(str, _OLDEST_JINJA))
        reason = f"needs jinja2 {oldest} or later, because templates can leave the sandbox of {release}: {install}"
        raise config_error(key, reason)


def _environment() -> Any:
    """Return the sandbox of templates, with the functions, filters and tags of Hugging Face's templates.

    `strftime_now` is missing: the tokens would depend on the day. Templates that test for it use a fixed date.
    """
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
        """Variables that a template may change. The names of Python's internals are refused."""

        def __init__(self, *args: Any, **variables: Any):
            super().__init__()
            for name, value in dict(*args, **variables).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"the name {name} begins with an underscore")
            super().__setitem__(name, value)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def make_dict(*args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    extensions = [GenerationBlocks, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=refuse, namespace=Variables, dict=make_dict)
    return environment
