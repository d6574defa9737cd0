"""Rendering of chats by Jinja templates. A helper process with limits imports this module, so it imports little.

A template runs in a sandbox, with the variables, functions and tags that templates of Hugging Face use:
https://huggingface.co/docs/transformers/chat_templating_writing
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, time
from functools import cached_property
from typing import Any, Literal, NamedTuple

from titan_launch.core.json_files import JsonError, parse_json
from titan_launch.core.terminal import one_line

Message = Mapping[str, Any]
"""A message of a chat, as templates expect it: `{"role": "user", "content": "..."}`, perhaps with more keys."""

_BEGIN, _END, _MARK_END = "\ufdd0", "\ufdd1", "\ufdd2"
"""Noncharacters of Unicode that delimit marks. Marks are put into messages, to find where the text of each message is
in the rendered chat. A mark is `_BEGIN` or `_END`, then the index of a message, then `_MARK_END`. Marks of `generation`
blocks have no index. Messages with these characters are refused."""

_NONCHARACTERS = re.compile(f"[{_BEGIN}-{_MARK_END}]")

_MARKS = re.compile(f"([{_BEGIN}{_END}])([0-9]*){_MARK_END}")

_PLACES = (("blank", "first", "last", "end"), ("first", "last", "end"), ("last",), ("end",), ("first",))
"""Sets of places for marks in the text of a message. `first`: before its first word. `last`: before its last word.
`end`: after its last word. `blank`: in a text of white space only. A template can test whether a text is empty, or has
a certain beginning, end or word, so marks may change the rendered chat. The sets are tried in this order, and the first
set that does not change the rendered chat is used."""

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that may have the reasoning before an answer. A template reads one of the first two keys."""

_TEXTS = ("content", *_THOUGHTS, "arguments")
"""Keys whose texts get marks, in a message and in its tool calls."""


class RecordError(Exception):
    """Error for a record of text data, such as a chat, that cannot be used."""

    def __init__(self, reason: str, detail: str = "", key: str = "path", on_error: Literal["stop", "skip", ""] = ""):
        """`reason`: text that follows "is" in the error, such as `not valid JSON`; skipped records are counted by
        reason. `detail`: further text for the error. `key`: key of the section that may be wrong. `on_error`: "stop" or
        "skip" if `key` itself decides about the record, as `truncation` does; "" if the key `on_error` decides."""
        super().__init__(reason, detail, key, on_error)
        self.reason, self.detail, self.key, self.on_error = reason, detail, key, on_error

    def __str__(self) -> str:
        return f"{self.reason} ({one_line(self.detail[:_LONGEST_DETAIL])})" if self.detail else self.reason


class Span(NamedTuple):
    """A range of characters."""

    start: int
    stop: int


class Mark(NamedTuple):
    """A mark (see `_BEGIN`), with its position in the text of the chat without marks."""

    position: int
    message: int
    """Index of the message."""


class Rendered(NamedTuple):
    """The rendered text of some messages, with the positions of its blocks and marks."""

    text: str
    blocks: list[Span]
    """The spans of the `generation` blocks in `text`."""

    marks: list[Mark]


@dataclass(frozen=True)
class Renderer:
    """A chat template with its variables."""

    text: str
    variables: Mapping[str, Any]
    """The named special tokens, such as `{"bos_token": "<s>"}`, and the variables of the job."""

    today: date
    """The date that the template gets from `strftime_now`. With the present date, the tokens would change every day."""

    special_tokens: Sequence[str] = ()
    """Names of special tokens. Chats with these names are refused, unless `prompt` allows them, because the tokenizer
    would make them special tokens."""

    def render(
        self, messages: Sequence[Message], tools: Any, train_on: Literal["assistant", "last", "all"]
    ) -> tuple[str, list[Span]]:
        """Return the text of a chat, and its parts that are targets. Raises RecordError.

        `train_on` chooses the targets: all turns of the assistant, only the last of these turns, or the whole text. A
        turn whose message has `"weight": 0` or `"train": false` is a target only with `all`.

        If the template has `generation` blocks, their texts are the turns of the assistant (see `_Turns.blocks`).
        Otherwise `_Turns.turn` finds the turns, and a chat is refused if a turn would contain text of another message.

        Arguments of tool calls that are a JSON object in a string (OpenAI) are decoded, because most templates write
        them as JSON. If the template refuses the decoded arguments, the chat is rendered with the strings. The
        strings are also preferred to decoded arguments that the template seems to write as Python does.
        """
        given = [_with_thoughts(message) for message in messages]
        messages = [_with_decoded_arguments(message) for message in given]
        self._check_strings([given, messages])
        self._check_strings(tools, place='"tools"')
        try:
            text = self.rendered(messages, tools).text
        except RecordError:
            if messages == given:
                raise
            text, messages = self.rendered(given, tools).text, given
        if messages != given and _has_python_arguments(text, messages):
            with suppress(RecordError):
                text, messages = self.rendered(given, tools).text, given
        chat = _Turns(self, messages, tools, text)
        spans = [Span(0, len(text))] if train_on == "all" else self._targets(chat, train_on)
        for index, message in enumerate(messages):
            if message["role"] != "assistant" and chat.is_omitted(index):
                detail = f"message {index + 1}, of the role {message['role']}; use a template that writes this message"
                raise RecordError("a chat with a message that the template omits", detail, "template")
        return text, spans

    def _targets(self, chat: _Turns, train_on: str) -> list[Span]:
        """Return the turns of the assistant that are targets. Raises RecordError."""
        messages = chat.messages
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        answers = answers[-1:] if train_on == "last" else answers
        answers = [index for index in answers if _is_target(messages[index])]
        has_blocks = re.search(r"{%[-+]?\s*generation\b", self.text) is not None
        spans = chat.blocks(answers, train_on) if has_blocks else [chat.turn(index) for index in answers]
        targets = "".join(chat.text[span.start : span.stop] for span in spans)
        for index in answers:
            if lost := [name for name in _called(messages[index]) if name not in targets]:
                detail = f"message {index + 1} calls {lost[0]}; use a template that writes tool calls"
                reason = "a chat with a tool call that the template does not write into the answer"
                raise RecordError(reason, detail, "template")
        return spans

    def prompt(self, messages: Sequence[Message], allows_special: bool = False) -> str:
        """Return the text of a chat up to the answer that a model is to generate. If the last message is the
        assistant's, the answer continues this message, so the returned text ends with this message. Raises RecordError.

        `allows_special`: True accepts messages with the names of special tokens. The names become these tokens.
        """
        for number, message in enumerate(messages, start=1):
            self._check_strings(message, f"message {number}, of the {message['role']}", allows_special)
        *earlier, last = messages
        if last["role"] != "assistant":
            return self.rendered(messages, None, add_generation_prompt=True).text
        end = f"{_END}{len(earlier)}{_MARK_END}"
        found = self.rendered([*earlier, {**last, "content": f"{last['content']}{end} "}], None)
        if not found.marks or last["content"].strip() not in found.text:
            detail = "the template changes or omits the text of the last message, which the answer continues"
            raise RecordError("refused by the chat template", detail, "template")
        text, rest = found.text[: found.marks[-1].position], found.text[found.marks[-1].position :]
        return text if rest.startswith(" ") else text.rstrip()  # without the space, the template strips messages

    def end_of_answer(self) -> str:
        """Return the text that the template writes at the end of the last answer of a chat: a special token or, without
        one, the rest of the line after the answer. Return "" if no such text is found, or if it is too long."""
        answer = "answer"
        try:
            text, spans = self.render([_QUESTION, {"role": "assistant", "content": answer}], None, "last")
        except RecordError:
            return ""
        turn = "".join(text[span.start : span.stop] for span in spans[-1:])
        end = turn.rpartition(answer)[2].strip()
        tokens = [token for token in self.closing if end.startswith(token)]
        line = end.partition("\n")[0].rstrip()
        return max(tokens, key=len, default=line if len(line) <= _LONGEST_END else "")

    def syntax_error(self) -> str:
        """Return the reason why `text` is not a valid template; "" if it is valid."""
        from jinja2 import TemplateSyntaxError

        try:
            _ = self._compiled
        except TemplateSyntaxError as error:
            return f"line {error.lineno}: {_shortened(error)}"
        except (SyntaxError, RecursionError, OverflowError) as error:  # blocks are nested too deeply
            return _shortened(error)
        return ""

    @cached_property
    def _forbidden(self) -> re.Pattern[str]:
        return re.compile("|".join([_NONCHARACTERS.pattern, *map(re.escape, self.special_tokens)]))

    def _check_strings(
        self, value: Any, where: str = "", allows_special: bool = False, place: str = "a message"
    ) -> None:
        forbidden = _NONCHARACTERS if allows_special else self._forbidden
        for string in _strings(value):
            if found := forbidden.search(string):
                if found[0] in self.special_tokens:
                    raise RecordError(f"a chat with the special token {one_line(found[0])} in {place}", where)
                raise RecordError(f"a chat with the noncharacter U+{ord(found[0]):04X} in {place}", where)

    def rendered(self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool = False) -> Rendered:
        """Render messages. Return their text, and the positions of the marks and `generation` blocks in it. Raises
        RecordError."""
        variables = {"documents": None, **self.variables, "messages": messages, "tools": tools}
        try:
            marked = self._compiled.render(variables, add_generation_prompt=add_generation_prompt)
        except MemoryError:  # the limit of the helper process
            raise
        except Exception as error:  # a template can fail on a chat in any way
            name = type(error).__name__
            detail = _shortened(error) if name == "TemplateError" else f"{name}: {_shortened(error)}"
            raise RecordError("refused by the chat template", detail, "template") from None
        return _without_marks(marked)

    def closed(self, turn: str) -> str:
        """Return a turn without the white space after the special token that ends it. If no special token ends the
        turn, return the whole turn."""
        stripped = turn.rstrip()
        return stripped if stripped.endswith(self.closing) else turn

    @cached_property
    def closing(self) -> tuple[str, ...]:
        """The texts that can end a turn: the special tokens, and the variables whose names end in `_token`."""
        named = (value for name, value in self.variables.items() if name.endswith("_token"))
        return tuple(token for token in (*self.special_tokens, *named) if token and isinstance(token, str))

    def __getstate__(self) -> dict[str, Any]:
        """Return only the fields. A process that unpickles them compiles the template again."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def _compiled(self) -> Any:
        return _environment(self.today).from_string(self.text)


_UNDIVIDED = "not divided into turns by the template"

_QUESTION: Message = {"role": "user", "content": "?"}


class _Marked(NamedTuple):
    messages: list[Message]
    marks: list[Mark]


@dataclass(frozen=True)
class _Turns:
    """The assistant's turns in the text of a chat.

    Without `generation` blocks, a turn begins after the prompt for an answer: the text that `add_generation_prompt`
    adds to a chat. To find the end of a turn, the chat is also rendered only up to this turn. In that rendering, the
    text after the message is the end of the turn. Marks in the messages show where the text of each message is. Marks
    that change the chat's text are not used.
    """

    template: Renderer
    messages: Sequence[Message]
    tools: Any
    text: str

    def turn(self, index: int) -> Span:
        """Return the turn of message `index`. Raises RecordError if the turn is not found."""
        if not self._marked.messages:
            reason = "the template modifies or tests the text of messages, so the messages are not found in its output"
            raise self._unknown(index, reason)
        start = self._start(index)
        turn = Span(start, self._stop(index, start))
        if any(not turn.start <= position <= turn.stop for position in self._positions_of(index)):
            raise self._unknown(index, "a part of the message's text is outside of the turn")
        if others := self._messages_in(turn) - {index}:
            raise self._unknown(index, f"it would contain text of message {min(others) + 1}")
        return turn

    def blocks(self, turns: Sequence[int], train_on: str) -> list[Span]:
        """Return the `generation` blocks of the messages with the indices `turns`.

        Raises RecordError for a block with text of a message that is not the assistant's. This check is omitted if
        marks would change the text. If an answer is no target (`"weight": 0`), also raises RecordError for another
        number of blocks than of answers.
        """
        blocks = self.template.rendered(self.messages, self.tools).blocks
        answers = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        if train_on == "last" and answers:
            earlier = self.template.rendered(self.messages[: answers[-1]], self.tools).blocks if answers[-1] else []
            blocks = blocks[len(earlier) :] if turns else []
        elif len(turns) < len(answers):
            if len(blocks) != len(answers):
                reason = 'an answer has weight 0 or "train": false, so each answer needs a generation block of its own'
                raise RecordError(_UNDIVIDED, reason, "template")
            blocks = [block for block, index in zip(blocks, answers, strict=True) if index in turns]
        for index in sorted(set().union(*map(self._messages_in, blocks))):
            if self.messages[index]["role"] != "assistant":
                reason = f"a generation block has text of message {index + 1}, which is not an answer of the assistant"
                raise RecordError(_UNDIVIDED, reason, "template")
        return blocks

    def _start(self, index: int) -> int:
        """Return the start of the turn of message `index`: the end of the prompt for this answer.

        The chat usually begins with the rendering of the earlier messages and this prompt. But some templates change
        earlier messages if later messages follow. Then the prompt is searched for between the text of the earlier
        messages and the text of the answer, where it must occur exactly once.
        """
        if index:  # templates do not expect a chat without messages
            with suppress(RecordError):
                before = self.template.rendered(self.messages[:index], self.tools, add_generation_prompt=True).text
                if self.text.startswith(before):
                    start, is_second = len(before), self.messages[index - 1]["role"] == "assistant"
                    # Some templates add no prompt to a chat that ends with an answer.
                    is_before_prompt = not before.endswith(self._prompt) and self.text.startswith(self._prompt, start)
                    return start + len(self._prompt) * (is_second and is_before_prompt)
        if not (own := self._positions_of(index)):
            raise self._unknown(index, "no text of the message is in the rendered chat")
        start = max(
            [mark.position for mark in self._marked.marks if mark.position <= own[0] and mark.message != index] or [0]
        )
        if self._prompt and self.text.count(self._prompt, start, own[0]) == 1:
            return self.text.index(self._prompt, start) + len(self._prompt)
        if self._prompt:
            reason = f"the prompt {self._prompt!r} must occur exactly once between the previous message and the answer"
            raise self._unknown(index, reason)
        if index:
            raise self._unknown(index, "the template writes the earlier messages differently if they end the chat")
        before = self.text[: own[0]]
        while token := next((token for token in self.template.closing if before.startswith(token, start)), ""):
            start += len(token)
        if before[start:].strip():
            raise self._unknown(index, "the template has no prompt for an answer")
        return start

    def _stop(self, index: int, start: int) -> int:
        """Return the end of the turn of message `index`, which begins at `start`. The turn includes its special token.

        The text after the last message of the chat ends its turn. For any other message, the chat is rendered only up
        to this message. The text after the message in that rendering is the first candidate. For the second candidate,
        the prompt for the next answer is rendered, too, and then removed: templates often end the last turn of a chat
        differently. The first candidate that also follows the message in `self.text` ends the turn.
        """
        own = max(self._positions_of(index), default=start)
        for end in map(self.template.closed, self._ends(index, start, own)):
            if self.text.startswith(end, own) and not self._is_prompt(end, index, start):
                return own + len(end)
        raise self._unknown(index, "the template ends the turn differently if another message follows")

    def _ends(self, index: int, start: int, own: int) -> Iterator[str]:
        """Yield the texts after message `index` that may end its turn. `own`: the end of the message's text."""
        if index == len(self.messages) - 1:
            yield self.text[own:]
        else:
            yield self._text_after(index, start)
            yield self._text_after(index, start, add_generation_prompt=True).removesuffix(self._prompt)

    def _is_prompt(self, end: str, index: int, start: int) -> bool:
        """Return True if `end`, a text after message `index`, is the prompt for an answer, which some templates write
        after every chat. The text before `start`, the start of the turn, then ends with this prompt, too. And the
        template does not write the prompt if a question follows the turn."""
        if not end or not self.text[:start].rstrip().endswith(end):
            return False
        return not self._text_after(index, start, _QUESTION).startswith(end)

    def _text_after(self, index: int, start: int, *further: Message, add_generation_prompt: bool = False) -> str:
        """Render a chat that ends with message `index` and the messages `further`. Return the rendered text after
        message `index` or, if this message has no text, after `start`."""
        messages = [*self._marked.messages[: index + 1], *further]
        other = self.template.rendered(messages, self.tools, add_generation_prompt)
        positions = [mark.position for mark in other.marks if mark.message == index]
        if positions:
            return other.text[max(positions) :]
        if self._positions_of(index) or not other.text.startswith(self.text[:start]):
            raise self._unknown(index, "the template writes the message differently if it ends the chat")
        return other.text[start:]

    def _unknown(self, index: int, reason: str) -> RecordError:
        detail = f"the turn of message {index + 1} is not found: {reason}; use a template with generation blocks"
        return RecordError(_UNDIVIDED, detail, "template")

    @cached_property
    def _prompt(self) -> str:
        """The text that the template adds as the prompt for an answer; empty if it adds none."""
        asked = list(self.messages)
        while asked and asked[-1]["role"] == "assistant":
            asked.pop()
        asked = asked or [*self.messages, _QUESTION]
        try:
            chat = self.template.rendered(asked, self.tools).text
            prompted = self.template.rendered(asked, self.tools, add_generation_prompt=True).text
        except RecordError:
            return ""
        closing = next(filter(chat.endswith, self.template.closing), "")  # the special token that ends the chat
        begins = (chat, chat.removesuffix(closing))
        return next((prompted.removeprefix(begin) for begin in begins if prompted.startswith(begin)), "")

    @cached_property
    def _marked(self) -> _Marked:
        """The messages with marks, and the positions of the marks in the chat's text. Both are empty if each set of
        `_PLACES` changes the text."""
        for places in _PLACES:
            with suppress(RecordError):
                messages = _with_marks(self.messages, places)
                found = self.template.rendered(messages, self.tools)
                if found.text == self.text:
                    return _Marked(messages, found.marks)
        return _Marked([], [])

    def is_omitted(self, index: int) -> bool:
        """Return True if the template has omitted the text of message `index`. Return False if the message has no text,
        and if marks would change the chat's text, so that this is not known."""
        content = self.messages[index].get("content")
        has_text = isinstance(content, str) and bool(content.strip())
        return has_text and bool(self._marked.messages) and not self._positions_of(index)

    def _positions_of(self, index: int) -> list[int]:
        return [mark.position for mark in self._marked.marks if mark.message == index]

    def _messages_in(self, span: Span) -> set[int]:
        """Return the indices of the messages with text in a span. If no special token ends the span, also return a
        message whose text follows directly, because one token may contain parts of both texts."""
        last = span.stop - self.text.endswith(self.template.closing, 0, span.stop)
        return {mark.message for mark in self._marked.marks if span.start <= mark.position <= last}


def _shortened(error: Exception) -> str:
    """Return the beginning of the text of an error, which the template may have written."""
    text = str(error)
    return one_line(text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}...")


_LONGEST_MESSAGE = 500

_LONGEST_DETAIL = 600
"""Largest number of characters of `RecordError.detail` that the error shows. The detail may quote the record."""

_LONGEST_END = 100
"""Largest number of characters of a text that ends answers. Each newly generated token is compared with this text."""


def _is_target(message: Message) -> bool:
    """Return False for an answer with `"weight": 0` (OpenAI) or `"train": false`. Raises RecordError for weights other
    than 0 and 1."""
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise RecordError("a chat with a message weight other than 0 and 1", f"it is {weight}")
    return bool(weight) and message.get("train", True) is not False


def _functions(message: Message) -> list[Mapping[str, Any]]:
    """Return the functions that a message calls: tables with the keys `name` and `arguments`."""
    calls = (call for call in message.get("tool_calls") or [] if isinstance(call, Mapping))
    functions = (call.get("function", call) for call in calls)
    return [function for function in functions if isinstance(function, Mapping)]


def _called(message: Message) -> list[str]:
    names = (function.get("name") for function in _functions(message))
    return [name for name in names if isinstance(name, str)]


def _has_python_arguments(text: str, messages: Sequence[Message]) -> bool:
    """Return True if a chat's text contains the arguments of a tool call as the `str` of a Python dict."""
    arguments = (function.get("arguments") for message in messages for function in _functions(message))
    return any(isinstance(each, dict) and each and str(each) in text for each in arguments)


def _with_thoughts(message: Message) -> Message:
    """Return a message with its reasoning under both keys that templates read, as in `transformers`."""
    thoughts = next((message[key] for key in _THOUGHTS if message.get(key) is not None), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _with_decoded_arguments(message: Message) -> Message:
    """Return a message with the decoded arguments of its tool calls (see `_decoded`)."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_decoded(call) for call in calls]} if isinstance(calls, list) else message


def _decoded(call: Any) -> Any:
    """Return `call`, a tool call or the `function` of one. If its `arguments` are a JSON object in a string, they are
    decoded in the result."""
    if isinstance(call, Mapping) and "function" in call:
        return {**call, "function": _decoded(call["function"])}
    if isinstance(call, Mapping) and isinstance(text := call.get("arguments"), str):
        with suppress(JsonError):
            if isinstance(arguments := parse_json(text), dict):
                return {**call, "arguments": arguments}
    return call


def _with_marks(messages: Sequence[Message], places: Sequence[str]) -> list[Message]:
    """Return messages with marks at `places` (see `_PLACES`) of their texts."""

    def marked(value: Any, index: int, is_text: bool) -> Any:
        if isinstance(value, str) and is_text:
            return _with_marks_of(index, value, places)
        if isinstance(value, Mapping):
            return {
                key: marked(item, index, key in _TEXTS or (is_text and key != "type")) for key, item in value.items()
            }
        return [marked(item, index, is_text) for item in value] if isinstance(value, list) else value

    return [marked(message, index, False) for index, message in enumerate(messages)]


def _with_marks_of(index: int, text: str, places: Sequence[str]) -> str:
    """Return a text with marks of message `index` at `places` (see `_PLACES`)."""
    begin, end = (f"{mark}{index}{_MARK_END}" for mark in (_BEGIN, _END))
    words = text.rsplit(None, 1)
    if not words:
        return text + end if "blank" in places else text
    first, stop = len(text) - len(text.lstrip()), len(text.rstrip())
    marks = {"first": (first, begin), "last": (stop - len(words[-1]), begin), "end": (stop, end)}
    for position, mark in sorted({marks[place] for place in places if place in marks}, reverse=True):
        text = text[:position] + mark + text[position:]
    return text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings([*value, *value.values()])
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _without_marks(marked: str) -> Rendered:
    """Return a text without marks, the spans of its `generation` blocks, and the marks of its messages."""
    text, blocks, marks, begin = "", [], [], 0
    pieces = _MARKS.split(marked)
    for piece, kind, index in zip(pieces[::3], ["", *pieces[1::3]], ["", *pieces[2::3]], strict=True):
        if index:
            marks.append(Mark(len(text), int(index)))
        elif kind == _BEGIN:
            begin = len(text)
        elif kind == _END:
            blocks.append(Span(begin, len(text)))
        text += piece
    return Rendered(text, blocks, marks)


def _environment(today: date) -> Any:
    """Return the sandbox of templates, with the functions, filters and tags of Hugging Face's templates. `today`: the
    date of `strftime_now`."""
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
            return f"{_BEGIN}{_MARK_END}{caller()}{_END}{_MARK_END}"

    class Variables(Namespace):
        """The `namespace` of templates: variables that a template may change. Names that begin with an underscore are
        refused, because they lead to Python's internals."""

        def __init__(*args: Any, **variables: Any):
            self, *items = args  # so that `self` can be the name of a variable
            Namespace.__init__(self)
            for name, value in dict(*items, **variables).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"the name {name} begins with an underscore")
            super().__setitem__(name, value)

    class Dict:
        """The `dict` of templates: only the constructor and `fromkeys`, without other attributes of Python's `dict`."""

        def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
            return dict(*args, **items)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    extensions = [GenerationBlocks, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = to_json
    midnight = datetime.combine(today, time())
    environment.globals.update(raise_exception=refuse, strftime_now=midnight.strftime, namespace=Variables, dict=Dict())
    return environment
