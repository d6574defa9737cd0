"""Chat templates that somebody else wrote: one sentence each, by every command that reads them."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.runner import Runner
from tests.hostile.weights_folders import write_folder
from tests.sampling import rest_is_slow
from titan_launch.config.sections.data import ChatData
from titan_launch.core import limited_process
from titan_launch.core.errors import ConfigError
from titan_launch.data.chat_rendering import RecordError, Renderer
from titan_launch.data.corpora.chat_template import ChatTemplate

pytest.importorskip("jinja2")

JOB = """
[job]
name = "tiny"
dump_folder = "out"
device = "cpu"
[model]
args = {dim = 32, n_layers = 1, n_heads = 4, n_kv_heads = 2, hidden_dim = 48, vocab_size = 500}
[data]
kind = "chat"
path = "a.jsonl"
template = "own.jinja"
on_error = "skip"
[training]
seq_len = 64
local_batch_size = 1
global_batch_size = 1
steps = 1
[precision]
param_dtype = "float32"
[metrics]
enable_tensorboard = false
"""

COMMANDS = {
    "data": ["data", "--config", "job.toml"],
    "prepare": ["prepare", "--config", "job.toml", "--out", "tokens"],
    "train": ["train", "--config", "job.toml"],
    "generate": ["generate", "hf", "--chat", "--prompt", "a question", "--template", "own.jinja"],
    "chat": ["chat", "hf", "--template", "own.jinja"],
}

TYPED = "a question\n"

CHAT = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]

MEMORY = "MiB of memory (input: "
TIME = "s of CPU time (input: "
SYNTAX = "is not a Jinja template: "
RESULT = "has a result of more than 1 MiB"

LIMITED = {
    "product": ("{{ 'a' * 10**10 }}", MEMORY),
    "product of arrays": ("{{ ([messages] * 10**9) | length }}", MEMORY),
    "doubling": ("{% set n = namespace(a='a') %}{% for i in range(64) %}{% set n.a = n.a + n.a %}{% endfor %}", MEMORY),
    "percent": ("{{ '%1000000000d' % 1 }}", MEMORY),
    "format": ("{{ '{:1000000000}'.format(1) }}", MEMORY),
    "center": ("{{ 'a' | center(10**9) }}", MEMORY),
    "indent": ("{{ 'a\\nb' | indent(10**9) }}", MEMORY),
    "tojson": ("{{ messages | tojson(indent=10**9) }}", MEMORY),
    "replace": ("{{ ('a' * 10**5) | replace('a', 'b' * 10**5) }}", MEMORY),
    "strftime": ("{{ strftime_now('%Y' * 10**9) }}", MEMORY),
    "loops": ("{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}", TIME),
    "power": ("{{ 10 ** (10 ** 9) }}", ""),
    "long text": (
        "{{ 'a' * 20000000 }}{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}",
        RESULT,
    ),
    "long error": ("{{ raise_exception('x' * 10**9) }}", MEMORY),
    "nested blocks": ("{% if 1 %}" * 200 + "{% endif %}" * 200, ""),
    "nested brackets": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", SYNTAX),
    "signs": ("{{ " + "-" * 100_000 + "1 }}", SYNTAX),
}
"""Templates that are stopped. One of them is enough to stop the run, even with on_error = "skip"."""

REFUSED = {
    "large range": "{{ range(10**9) }}",
    "recursive macro": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "error of a terminal": "{{ raise_exception('\x1b[2J\nerror: x') }}",
    "attribute": "{{ ''.__class__.__mro__ }}",
    "file": "{% include '/etc/passwd' %}",
    "surrogates": "{{ '\\ud800' }}",
}
"""Templates that refuse a chat, which `on_error` may skip."""


def fifo(path: Path) -> None:
    os.mkfifo(path)


def large(path: Path) -> None:
    path.touch()
    os.truncate(path, 100 << 20)


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "cannot read own.jinja: No such file"),
    "a FIFO": (fifo, "cannot read own.jinja: not a regular file"),
    "a folder": (lambda path: path.mkdir(), "cannot read own.jinja: "),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "cannot read own.jinja: not a regular file"),
    "large": (large, "cannot read own.jinja: larger than 1 MiB"),
    "not UTF-8": (lambda path: path.write_bytes(b"\xff\xfe"), "cannot read own.jinja: not UTF-8 text"),
    "not a template": (lambda path: path.write_text("a\n{% if %}"), SYNTAX + "line 2"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    write_folder(tmp_path / "hf")
    return tmp_path


OF_JOBS, OF_MODELS = ("data.template", "data.path", "tokens has no"), ("--template", "the conversation is ")
NAMED = {command: OF_MODELS if command in ("generate", "chat") else OF_JOBS for command in COMMANDS}
"""Words that name the template or the chat in an error."""


def refused(runner: Runner, folder: Path, command: str, sentence: str) -> None:
    ended = runner.run(COMMANDS[command], folder, {"TITAN_LAUNCH_CACHE": str(folder / "cache")}, typed=TYPED)
    ended.assert_one_sentence(sentence)
    assert any(words in ended.stderr for words in NAMED[command])


@pytest.mark.parametrize("case", rest_is_slow(list(FILES)))
def test_commands_refuse_files_that_are_no_templates(case: str, runner: Runner, folder: Path) -> None:
    make, sentence = FILES[case]
    make(folder / "own.jinja")
    for command in COMMANDS if case in ("a FIFO", "large") else ["prepare", "chat"]:
        refused(runner, folder, command, sentence)


@pytest.mark.parametrize("case", ["product", *rest_is_slow(["signs", "loops", "tojson"], 3)])
def test_commands_stop_at_a_template_without_end(case: str, runner: Runner, folder: Path) -> None:
    text, sentence = LIMITED[case]
    (folder / "own.jinja").write_text(text)
    for command in {"signs": list(COMMANDS), "loops": ["chat"]}.get(case, ["prepare", "chat"]):
        refused(runner, folder, command, sentence)


@pytest.mark.parametrize("case", rest_is_slow(list(REFUSED), 3))
def test_commands_skip_chats_that_a_template_refuses(case: str, runner: Runner, folder: Path) -> None:
    (folder / "own.jinja").write_text(REFUSED[case])
    refused(runner, folder, "data", "")
    refused(runner, folder, "chat", "error: the conversation is ")
    (folder / "job.toml").write_text(JOB.replace('on_error = "skip"', ""))
    refused(runner, folder, "prepare", "a.jsonl, line 1 is ")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_template_that_waits_for_a_message_is_stopped(command: str, runner: Runner, folder: Path) -> None:
    """The command has loaded the model by then, and has rendered a chat to find where answers end."""
    (folder / "own.jinja").write_text("{% if messages[0].content == 'a question' %}{{ 'a' * 10**10 }}{% endif %}a")
    refused(runner, folder, command, MEMORY)


def template(text: str, special: tuple[str, ...] = ()) -> ChatTemplate:
    return ChatTemplate(Renderer(text, {}, date(2024, 7, 26), special), ("data", "template"), "own.jinja", False)


def result(text: str, special: tuple[str, ...] = ()) -> str:
    """Return the text of a chat, or the error."""
    own = template(text, special)
    try:
        return own.call("syntax_error") or own.render(CHAT, None, "assistant")[0]
    except ConfigError as error:
        assert error.problems[0].key == ("data", "template") and len(str(error)) < 2000
        return str(error)
    except RecordError as error:
        assert len(error.reason + error.detail) < 2000
        return f"{error.reason}: {error.detail}"


@pytest.mark.parametrize("case", rest_is_slow(list(LIMITED)))
def test_a_template_without_end_is_stopped(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, sentence = LIMITED[case]
    monkeypatch.setattr(limited_process, "SECONDS", 0.5 if sentence in ("", TIME) else 10.0)
    monkeypatch.setattr(limited_process, "MEMORY", 128 << 20)
    assert sentence.removeprefix(SYNTAX) in result(text)
    assert result("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}")


def test_special_tokens_of_a_stranger_are_searched_with_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_process, "SECONDS", 0.5)
    assert "of CPU time" in result("a", tuple(f"{index}" * 3 for index in range(10**6, 10**6 + 150_000)))


PIECES = re.compile(r"\{%-?|-?%\}|\{\{-?|-?\}\}|\w+|\s+|.", re.DOTALL)

WORDS = (
    *("{%", "%}", "{{", "}}", "{#", "#}", "(", ")", "[", "]", "{", "}", "|", ".", ",", "~", "+", "*", "**", "%", "//"),
    *("'", "-", "not", "in", "is", "if", "for", "else", "endif", "endfor", "set", "macro", "call", "filter", "block"),
    *("generation", "endgeneration", "break", "continue", "recursive", "range", "cycler", "joiner", "lipsum", "dict"),
    *("namespace", "messages", "message", "loop", "self", "caller", "None", "1", "999999999", "1e9", "'a'", "0"),
    *("tojson", "indent", "center", "join", "map", "batch", "slice", "format", "wordwrap", "urlize", "xmlattr"),
    *("__class__", "_x", "\0", "\x1b", "\ufdd0", "世", "\n", " "),
)

TEMPLATES = sorted((Path(__file__).parents[1] / "data/corpora/templates").glob("*.jinja"))

FUZZED = [
    pytest.param(100, id="some"),
    pytest.param(5000, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
]


@pytest.mark.parametrize("count", FUZZED)
def test_no_template_gives_anything_but_a_sentence(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_process, "SECONDS", 0.5)
    texts = [path.read_text() for path in TEMPLATES if path.stat().st_size < 5000]
    assert len(texts) > 10
    draw = random.Random(1)
    rendered = 0
    for _ in range(count):
        pieces = PIECES.findall(draw.choice(texts))
        for _ in range(draw.choice((1, 1, 2, 5))):
            place = draw.randrange(len(pieces))
            pieces[place : place + draw.choice((0, 1, 1, 3))] = draw.choices(WORDS, k=draw.choice((0, 1, 1, 2)))
        rendered += "answer" in result("".join(pieces))
    assert count / 50 < rendered < count


def odd_settings() -> list[Any]:
    return [
        {"chat_template": value, "eos_token": "</s>", "bos_token": other}
        for value in (None, 1, [], {}, [1], [{"name": "default"}], [{"name": "default", "template": 1}], [{"name": []}])
        for other in (None, 1, [], {"content": 1})
    ]


def test_settings_of_other_types_are_no_templates(tmp_path: Path) -> None:
    from titan_launch.data.corpora.chat_template import load_template
    from titan_launch.data.tokenizers import ByteTokenizer

    class InFolder(ByteTokenizer):
        folder = tmp_path  # type: ignore[assignment]

    def problem() -> str:
        with pytest.raises(ConfigError) as caught:
            load_template(ChatData(kind="chat", path="a.jsonl"), InFolder(), ("data", "template"))
        return str(caught.value)

    for settings in odd_settings():
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        assert f"because {tmp_path} has no chat template" in problem()
    for text in ("[]", "{", '{"a": NaN}', "[" * 10**5):
        (tmp_path / "tokenizer_config.json").write_text(text)
        assert "cannot use" in problem()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").symlink_to("/dev/zero")
    assert "chat_template.jinja: not a regular file" in problem()
