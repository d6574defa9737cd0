"""Chats: their text and tokens are those of transformers, and only the assistant's tokens are targets."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
import sys
from contextlib import ExitStack
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from tests.distributed import run_ranks
from tests.train.jobs import read_metrics, this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.data import IGNORED_TARGET, ChatData, TokensData
from titan_launch.config.sections.tokenizer import ADDED_FILE, NAMES_FILE, TokenizerConfig
from titan_launch.core.errors import ConfigError
from titan_launch.core.files import CACHE_VARIABLE
from titan_launch.data.chat_rendering import Renderer
from titan_launch.data.corpora.chat import ChatCorpus, chat_messages
from titan_launch.data.prepare import prepare
from titan_launch.data.sources import SampleSource, build_source
from titan_launch.data.tokenizers import ByteTokenizer, Tokenizer, build_tokenizer, train_tokenizer
from titan_launch.train.build import build_run
from titan_launch.train.describe_data import decode_sample
from titan_launch.train.loop import due_now, report, train_one_step

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + "
    "eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n"
    "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
MARKED = (
    "{%- if tools %}{{ '<tools>' + tools | tojson(indent=1) }}{% endif %}\n{%- for message in messages %}\n"
    "    {%- if message.role == 'assistant' %}\n        {{- '<|im_start|>assistant\n' }}\n"
    "        {%- generation %}\n        {{- message.content }}\n"
    "        {%- for call in message.tool_calls or [] %}{{ '<call>' + call.function | tojson }}{% endfor %}\n"
    "        {{- '<|im_end|>' }}\n        {%- endgeneration %}\n        {{- '\n' }}\n        {%- continue %}\n"
    "    {%- endif %}\n    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}\n"
    "{%- endfor %}"
)
THINKING = (
    "{%- set found = namespace(last=0) %}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- set found.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' }}{%- if message.role == 'assistant' and loop.index0 > found.last %}"
    "{{- '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}{%- endif %}"
    "{{- message.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- if enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
SPACED = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ message.content + ': ' }}{% else %}"
    "{% generation %}{{ message.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
TEMPLATES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": (LLAMA3, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "qwen": (QWEN, {"eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True}}),
    "zephyr": (ZEPHYR, {"bos_token": "<s>", "eos_token": "</s>"}),
    "mistral": (MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"}),
    "marked": (MARKED, {"eos_token": "<|im_end|>"}),
    "thinking": (THINKING, {"eos_token": "<|im_end|>"}),
}
HEADERS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL = [*HEADERS, "<s>", "</s>", "<|im_start|>", "<|im_end|>"]

SEQ_LEN = 400


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a folder with a tokenizer for each template. A token is a byte, or a special token. In the folder `words`
    a word with the space before it is a token."""
    pytest.importorskip("tokenizers")
    root = tmp_path_factory.mktemp("tokenizers")
    train_tokenizer([""], 257, root / "bytes")
    train_tokenizer([" Yes no" * 9], 270, root / "words_only")
    for name, (template, settings) in TEMPLATES.items():
        write_folder(root / "bytes", root / name, settings | {"chat_template": template})
    write_folder(root / "words_only", root / "words", {"eos_token": "</s>", "chat_template": SPACED})
    return {folder.name: folder for folder in root.iterdir()}


def write_folder(base: Path, folder: Path, settings: dict[str, Any], special: list[str] = SPECIAL) -> None:
    """Write a tokenizer with special tokens: by default those of all templates."""
    shutil.copytree(base, folder)
    content = json.loads((base / "tokenizer.json").read_text())
    first = len(content["model"]["vocab"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    new = [name for name in special if name not in content["model"]["vocab"]]
    added = [{"id": first + index, "content": name, "special": True, **flags} for index, name in enumerate(new)]
    content["added_tokens"] += added
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def load(folder: Path) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(kind="huggingface", path=str(folder)))


def build(path: Path, tokenizer: Tokenizer, lines: list[Any], seq_len: int = SEQ_LEN, **keys: Any) -> SampleSource:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return build_source(ChatData(kind="chat", path=str(path), **keys), tokenizer, seq_len)


def problem(path: Path, tokenizer: Tokenizer, lines: list[Any], **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(path, tokenizer, lines, **keys)
    return str(caught.value)


def test_a_template_that_would_write_arguments_as_python_does_gets_the_text() -> None:
    call = {"name": "f", "arguments": '{"a": "b"}'}
    for value, written in (("arguments", '{"a": "b"}'), ("arguments | tojson", '{"a": "b"}'), ("arguments.a", "b")):
        calls = f"{{% for call in message.tool_calls or [] %}}f:{{{{ call.{value} }}}}{{% endfor %}}"
        text = f"{{% for message in messages %}}{{{{ message.content }}}}{calls}|{{% endfor %}}"
        chat = [*messages("a"), {"role": "assistant", "tool_calls": [call]}]
        assert Renderer(text, {}, date(2024, 7, 26)).render(chat, None, "all")[0] == f"a|f:{written}|"


def test_a_template_that_refuses_the_text_gets_arguments_that_a_message_quotes() -> None:
    text = "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}"
    text += "f:{{ call.arguments.items() | list | length }}{% endfor %}|{% endfor %}"
    call = {"name": "f", "arguments": '{"a": "b"}'}
    chat = [*messages("Python: {'a': 'b'}"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert Renderer(text, {}, date(2024, 7, 26)).render(chat, None, "all")[0] == "Python: {'a': 'b'}|f:1|"


def test_the_formats_of_the_docs_are_read() -> None:
    page = (Path(__file__).parents[3] / "docs/how_to/chats.md").read_text()
    lines = page.partition("```json\n")[2].partition("```")[0].splitlines()
    expected = [messages("Say hello.", "Hello!")] * 3 + [messages("Translate to German.\n\nhouse", "Haus")]
    assert [chat_messages(json.loads(line)) for line in lines] == expected
    turns = messages("a", "b")
    assert chat_messages({"prompt": turns[:1], "completion": turns[1:]}) == turns
    unweighted = {"role": "assistant", "content": "b", "weight": 0}
    sharegpt = {"conversations": [{"from": "gpt", "value": "b", "weight": 0}], "messages": None, "system": None}
    assert chat_messages(sharegpt) == [unweighted]
    (named,) = chat_messages({"conversations": [{"c": 1, "b": 2, "from": "gpt", "a": 3, "value": "b"}]})
    assert list(named) == ["c", "b", "a", "role", "content"], "a template may write keys in their order"
    dolly = {"instruction": "Translate to German.", "context": "house", "response": "Haus"}
    assert chat_messages(dolly) == expected[3]
    retrieval = {"prompt": "Use the passages: ...", "context": ["..."], "response": "Haus"}
    assert chat_messages(retrieval) == messages("Use the passages: ...", "Haus")


class Chat(NamedTuple):
    """The tokens of a chat, and the numbers of those that are targets."""

    tokens: list[int]
    targets: list[int]


def first_chat(source: SampleSource) -> Chat:
    inputs, targets, documents = source[0]
    length = int((documents == 0).sum())
    tokens = [*inputs[:length].tolist(), int(source.stream.read(length, length + 1)[0])]  # type: ignore[attr-defined]
    counted = [index + 1 for index in range(length) if targets[index] != IGNORED_TARGET]
    assert [tokens[index] for index in counted] == [token for token in targets[:length].tolist() if token >= 0]
    return Chat(tokens, counted)


def shown(tokenizer: Tokenizer, chat: Chat) -> list[str]:
    """Return the text of each group of consecutive targets, with special tokens."""
    groups = groupby(chat.targets, key=lambda index: index - chat.targets.index(index))
    return [tokenizer.decode([chat.tokens[index] for index in group], keep_special=True) for _, group in groups]


def messages(*contents: str, system: str = "") -> list[dict[str, str]]:
    turns = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 9, contents, strict=False)]
    return [{"role": "system", "content": system}, *turns] if system else turns


TWO_TURNS = {"messages": messages("Hi", "Hello!", "Sum?", "It is 4.", system="Be brief.")}
CALL = {"id": "1", "function": {"name": "add", "arguments": {"a": 1}}}
CALLS = {
    "tools": [{"name": "add", "about": "Ünïcode <b>"}],
    "messages": [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ],
}
SHAREGPT = {
    "system": "Be kind.",
    "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Grüße 🌍"}],
}
ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}

ALL = ["|user|>\na</s>\n<|assistant|>\nb</s>\n"]
THOUGHT = "<think>\n\n</think>\n\nIt is 4.<|im_end|>"
CALLED = '<call>{"name": "add", "arguments": {"a": 1}}<|im_end|>'
LAST = {"train_on": "last"}
REASONED = {"messages": [*messages("2+2?"), {"role": "assistant", "content": "4", "reasoning": "Easy."}]}
NO_THOUGHT = {"template_args": {"enable_thinking": False}, **LAST}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[str], int]] = {
    # name: template, keys, line, targets as text, number of targets
    "Llama 3": ("llama3", {}, TWO_TURNS, ["Hello!<|eot_id|>", "It is 4.<|eot_id|>"], 7 + 9),
    "Llama 3, last turn": ("llama3", LAST, TWO_TURNS, ["It is 4.<|eot_id|>"], 9),
    "Qwen, prompt and response": ("qwen", {}, {"prompt": "Hi", "response": "Yo"}, ["Yo<|im_end|>"], 3),
    "Qwen, ShareGPT": ("qwen", {}, SHAREGPT, ["Grüße 🌍<|im_end|>"], 13),
    "Zephyr, Alpaca": ("zephyr", {}, ALPACA, ["3</s>"], 2),
    "Zephyr, all": ("zephyr", {"train_on": "all"}, {"prompt": "a", "completion": "b"}, ALL, 28),
    "Mistral": ("mistral", {}, {"messages": messages("1", "2", "3", "4")}, [" 2</s>", " 4</s>"], 6),
    "blocks": ("marked", {}, TWO_TURNS, ["Hello!<|im_end|>", "It is 4.<|im_end|>"], 16),
    "blocks, tool calls": ("marked", {}, CALLS, [CALLED, "It is 2.<|im_end|>"], 45 + 9),
    "blocks, last turn": ("marked", LAST, CALLS, ["It is 2.<|im_end|>"], 9),
    "thoughts of the last turn": ("thinking", {}, TWO_TURNS, ["Hello!<|im_end|>", THOUGHT], 7 + 28),
    "thoughts": ("thinking", {}, REASONED, ["<think>\nEasy.\n</think>\n\n4<|im_end|>"], 8 + 5 + 11 + 2),
    "thoughts in the prompt": ("thinking", NO_THOUGHT, TWO_TURNS, ["It is 4.<|im_end|>"], 9),
}


@pytest.mark.parametrize("case", CASES)
def test_the_tokens_are_those_of_transformers_and_only_the_assistants_are_targets(
    case: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    name, keys, line, texts, count = CASES[case]
    tokenizer = load(folders[name])
    chat = first_chat(build(tmp_path / "a.jsonl", tokenizer, [line], **keys))
    assert shown(tokenizer, chat) == texts
    assert len(chat.targets) == count
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folders[name])
    turns = messages("Hi", "Grüße 🌍", system="Be kind.") if line is SHAREGPT else line.get("messages")
    turns = messages("Add.\n\n1 2", "3") if line is ALPACA else turns
    turns = turns or messages(*line.values())
    options = {"return_dict": True, "return_assistant_tokens_mask": name == "marked"}
    expected = theirs.apply_chat_template(turns, tools=line.get("tools"), **options, **keys.get("template_args", {}))
    assert chat.tokens == expected["input_ids"]
    if name == "marked" and "train_on" not in keys:
        assert chat.targets == [index for index, counts in enumerate(expected["assistant_masks"]) if counts]


def test_a_token_that_begins_before_a_turn_is_a_target(folders: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = load(folders["words"])
    chat = first_chat(build(tmp_path / "a.jsonl", tokenizer, [{"prompt": "no", "response": "Yes no"}]))
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folders["words"])
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    expected = theirs.apply_chat_template(messages("no", "Yes no"), **options)
    assert shown(tokenizer, chat) == [" Yes no</s>"], "one token is the space and the first word"
    assert chat.targets == [index for index, counts in enumerate(expected["assistant_masks"]) if counts]


def test_templates_are_found_by_name_and_in_each_file(folders: dict[str, Path], tmp_path: Path) -> None:
    def chat(folder: Path, **keys: Any) -> list[int]:
        return first_chat(build(tmp_path / "a.jsonl", load(folder), [TWO_TURNS], **keys)).tokens

    expected = chat(folders["qwen"])
    folder = tmp_path / "tokenizer"
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": QWEN}]
    write_folder(folders["bytes"], folder, {"chat_template": named})
    assert chat(folder) == expected
    corpus = ChatCorpus(ChatData(kind="chat", path=str(tmp_path / "a.jsonl")), load(folder), ("data",), SEQ_LEN)
    prepare(pickle.loads(pickle.dumps(corpus)), tmp_path / "tokens")
    tokens = TokensData(kind="tokens", path=str(tmp_path / "tokens"), packing="documents")
    assert shown(load(folder), first_chat(build_source(tokens, load(folder), SEQ_LEN))) == CASES["blocks"][3]
    (folder / "chat_template.jinja").write_text("{# a comment #}" + QWEN)
    (folder / "tokenizer_config.json").write_text("{}")
    assert chat(folder) == expected
    (tmp_path / "own.jinja").write_text(QWEN)
    for template in ("chatml", str(tmp_path / "own.jinja")):
        assert chat(folders["llama3"], template=template) == expected
    (tmp_path / "own.jinja").write_text(LLAMA3)
    changed = chat(folders["llama3"], template=str(tmp_path / "own.jinja"))
    assert changed == chat(folders["llama3"]) != expected, "the cache is not used for another template"


def test_named_tokens_are_those_of_transformers_or_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for decoder, name in (({}, "</s>"), ({"added_tokens_decoder": {}}, "<s>")):
        folder = tmp_path / f"{len(decoder)}"
        write_folder(folders["bytes"], folder, {"eos_token": "<s>", "chat_template": ZEPHYR, **decoder})
        (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>", "lstrip": false}}')
        theirs, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), load(folder)
        assert theirs.eos_token == name == tokenizer.decode([tokenizer.end_of_document], keep_special=True)
        chat = first_chat(build(tmp_path / "a.jsonl", tokenizer, [TWO_TURNS]))
        assert chat.tokens == theirs.apply_chat_template(TWO_TURNS["messages"], return_dict=True)["input_ids"]
    end = {"eos_token": "<|endoftext|>"}
    unknown = 'data.template: writes the token "<|assistant|>", which is not among the "added_tokens" of '
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"tokenizer_class": "GPT2Tokenizer"}, {}, 'or set data.template_args.eos_token ("" for no token)'),
        ({**end, "extra_special_tokens": ["<|assistant|>"]}, {}, unknown),
        ({**end, "extra_special_tokens": ["<|assistant|>"]}, {NAMES_FILE: {"extra_special_tokens": ["<a>"]}}, unknown),
        (end, {ADDED_FILE: {"<|assistant|>": 999}}, unknown),
    ]
    for index, (settings, files, reason) in enumerate(cases):
        folder = tmp_path / f"case {index}"
        write_folder(folders["bytes"], folder, {"chat_template": ZEPHYR, **settings}, [])
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
        assert reason in problem(tmp_path / "a.jsonl", load(folder), [TWO_TURNS])


def test_the_template_of_the_package_is_rendered_by_several_processes(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "?" * 9000}, {"role": "assistant", "content": "Yes."}]}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(chat)}\n" * 150)  # two parts
    config = ChatData(kind="chat", path=str(tmp_path / "a.jsonl"), template="chatml")
    corpus = ChatCorpus(config, ByteTokenizer(), ("data",), 10_000)
    numbers = [shard.num_documents for shard in prepare(corpus, tmp_path / "tokens", num_workers=2).shards]
    assert len(numbers) == 2 and sum(numbers) == 150


def test_answers_that_do_not_count_are_no_targets(tmp_path: Path) -> None:
    unmarked = tmp_path / "unmarked.jinja"
    unmarked.write_text("{% for m in messages %}{{ m.role[0] + ':' + m.content + '\\n' }}{% endfor %}")
    chat = messages("p", "q", "r", "s")
    chat[1]["weight"], chat[3]["train"] = 0, True
    for template, expected in (("chatml", "s<|im_end|>"), (str(unmarked), "a:s\n")):
        for train_on in ("assistant", "last"):
            keys = {"template": template, "train_on": train_on}
            found = first_chat(build(tmp_path / "a.jsonl", ByteTokenizer(), [{"messages": chat}], **keys))
            assert ByteTokenizer().decode([found.tokens[index] for index in found.targets]) == expected


def test_a_chat_is_a_document_that_is_not_cut(folders: dict[str, Path], tmp_path: Path) -> None:
    lines = [{"prompt": "a" * length, "response": "bcd"} for length in (1, 2, 60)]
    keys: dict[str, Any] = {"template": "chatml"}
    path, tokenizer = tmp_path / "a.jsonl", ByteTokenizer()
    length = 2 * len("<|im_start|>" + "<|im_end|>\n") + len("user\n" + "a" + "assistant\n" + "bcd")
    source = build(path, tokenizer, lines, seq_len=length, **keys)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    compressed = build_source(ChatData(kind="chat", path=str(tmp_path / "b.jsonl.gz"), **keys), tokenizer, length)
    assert len(compressed) == len(source) == 2
    note = f"; skipped 1 line: 1 longer than training.seq_len + 1 = {length + 1} tokens; first: a.jsonl, line 3"
    assert source.describe().endswith(f"2 samples of {length}, 0.77% padding, 0 of 2 documents cut{note}")
    [document] = decode_sample(source[0], tokenizer)
    expected = [("user\na<|im_end|>\n<|im_start|>assistant\n", False), ("bcd<|im_end|>", True)]
    assert [(part["text"].removeprefix("<|im_start|>"), part["counts"]) for part in document["text"]] == expected
    stop = problem(path, tokenizer, lines, seq_len=length, truncation="stop", **keys)
    reason = f"longer than training.seq_len + 1 = {length + 1} tokens (it has {length + 59})"
    remedy = 'correct this line, or set data.truncation = "skip"'
    assert stop == f"data.truncation: a.jsonl, line 3 is {reason}; {remedy}"
    left = first_chat(build(path, tokenizer, lines[2:], seq_len=length, truncation="left", **keys))
    assert len(left.tokens) == length + 1
    assert tokenizer.decode(left.tokens).endswith("bcd<|im_end|>\n") and len(left.targets) == 13
    cut = problem(path, tokenizer, lines[2:], seq_len=length, truncation="right", **keys)
    assert cut.startswith("data.truncation: a.jsonl, line 1 is without a target (it was truncated); ")


BAD_CHATS: list[tuple[Any, str]] = [
    ({"text": "x"}, 'path: {} is not a chat (its keys are text; a chat has "messages", "conversations", '),
    ({"messages": []}, 'path: {} is without messages in "messages" (it must be an array of one or more '),
    ({"messages": "Hi"}, 'path: {} is without messages in "messages" (it must be an array of one or more '),
    ({"messages": [{"content": "a"}]}, 'path: {} is without the role of a message (message 1 of "messages"); '),
    ({"conversations": [{"from": []}]}, "path: {} is without the role of a message (message 1 of "),
    ({"prompt": "a", "response": None}, "path: {} is not a chat (its keys are prompt, response: null; a chat has "),
    ({"messages": messages("a")}, "path: {} is without a message of the assistant; "),
    ({"messages": messages("a", "b</s>")}, "path: {} is a chat with the special token </s> in a message; "),
    ({"messages": messages("a", "b\ufdd0")}, "path: {} is a chat with the noncharacter U+FDD0 in a message; "),
    ({"messages": messages("\ud800", "b")}, "path: {} is not valid Unicode (it has half of a surrogate pair); "),
    (
        {"messages": [{**message, "weight": 0.5} for message in messages("a", "b")]},
        "path: {} is a chat with a message weight other than 0 and 1 (it is 0.5); ",
    ),
    ({"messages": messages("a", "b"), "tools": "[]"}, 'path: {} is a chat whose "tools" are not an array (they are '),
    (
        {"messages": [*messages("a"), {"role": "assistant", "content": "b", "tool_calls": 5}]},
        'path: {} is a chat whose "tool_calls" are not an array (message 2 has 5); ',
    ),
    (ALPACA | {"history": [["a", "b"]]}, 'path: {} is a chat with "history" (write a chat of several turns as '),
    (ALPACA | {"input": 0}, 'path: {} is a chat without a string in "input" (it is 0); '),
    (ALPACA | {"prompt": "a"}, 'path: {} is a chat with both "prompt" and "instruction"; '),
    (ALPACA | {"instruction": messages("a")}, 'path: {} is a chat with "input", but without a string in "instruction"'),
    (SHAREGPT | {"system": 1}, 'path: {} is a chat without a string in "system" (it is 1); '),
    ({"messages": [], "conversations": []}, 'path: {} is a chat with both "messages" and "conversations"; '),
    (
        {"messages": [*messages("a"), {"role": "assistant", "tool_calls": [{"arguments": r'{"a": "\u003c/s>"}'}]}]},
        "path: {} is a chat with the special token </s> in a message; ",
    ),
    (
        {"messages": messages("a", "b")[::-1]},
        "template: {} is refused by the chat template (Conversation roles must alternate "
        "user/assistant/user/assistant/...); ",
    ),
]


def test_chats_that_cannot_be_used_stop_the_run_or_are_counted(folders: dict[str, Path], tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "a.jsonl", load(folders["mistral"])
    good = {"prompt": "a", "response": "b"}
    for line, reason in BAD_CHATS:
        found = problem(path, tokenizer, [good, line])
        assert found.startswith("data." + reason.format("a.jsonl, line 2")), found
        assert found.endswith('correct this line, or set data.on_error = "skip"')
    source = build(path, tokenizer, [good, *(line for line, _ in BAD_CHATS)], on_error="skip")
    assert "1 document, " in source.describe()
    assert "; skipped 21 lines: 2 not a chat, 2 without messages in " in source.describe()


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{% set f = namespace(__html__='{0.__class__}'.format) %}{{ f }}",
    "{% set f = namespace() %}{% set f.__class__ = 1 %}",
    "{{ raise_exception.__globals__.os }}",
    "{{ (dict|attr('__class__')).__mro__ }}",
    "{% include '/etc/passwd' %}",
    "{{ range(10 ** 9) }}",
    "{% for a in messages %}{{ 1 / 0 }}{% endfor %}",
]


@pytest.mark.parametrize("escape", ESCAPES)
def test_a_template_cannot_leave_the_sandbox(escape: str, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(escape)
    line = {"prompt": "a", "response": "b"}
    found = problem(tmp_path / "a.jsonl", ByteTokenizer(), [line], template=str(tmp_path / "own.jinja"))
    assert "a.jsonl, line 1 is refused by the chat template (" in found


def test_bad_templates_are_named(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lines = tmp_path / "a.jsonl", [{"prompt": "a", "response": "b"}]

    def found(text: str | None, name: str = "own.jinja", lines: list[Any] = lines) -> str:
        if text is not None:
            (tmp_path / name).write_text(text)
        return problem(path, ByteTokenizer(), lines, template=str(tmp_path / name)).replace(str(tmp_path), "T")

    syntax = "is not a Jinja template: line 2: Expected an expression, got 'end of statement block'"
    assert found("a\n{% if %}") == f'data.template: {syntax}; correct it, or set "chatml"'
    missing = 'data.template: cannot read T/none: No such file or directory; set "chatml", or a Jinja file'
    assert found(None, "none") == missing
    changing = "{{ messages | length }}{% for message in messages %}{{ message.content }}{% endfor %}"
    assert "a.jsonl, line 1 is not divided into turns by the template (the turn of message 2 is not " in found(changing)
    partial = "{% for m in messages if m.role != 'system' %}{{ m.role + ': ' + m.content }}|{% endfor %}"
    omitted = "is a chat with a message that the template omits (message 1, of the role system; use "
    assert omitted in found(partial, lines=[{"system": "Be kind.", **lines[0]}])
    unset = (
        'data.template: must be "chatml" or a Jinja file, because {} has no chat template; or set tokenizer.path '
        "(prepare: --tokenizer) to a folder with a template, such as the folder of a chat model"
    )
    assert problem(path, ByteTokenizer(), lines) == unset.format('the tokenizer "bytes"')
    assert problem(path, load(folders["bytes"]), lines) == unset.format(folders["bytes"])
    monkeypatch.setattr("titan_launch.data.corpora.chat_template.version", lambda name: "3.1.5")
    oldest = "needs jinja2 3.1.6 or later, because templates can leave the sandbox of 3.1.5"
    install = "pip install 'titan-launch[chat]'"
    assert problem(path, ByteTokenizer(), lines, template="chatml") == f"data.template: {oldest}: {install}"
    monkeypatch.setitem(sys.modules, "jinja2", None)
    missing = f"needs the package jinja2, which is not installed: {install}"
    assert problem(path, ByteTokenizer(), lines, template="chatml") == f"data.template: {missing}"


ANSWERS = {"Hi": "Hello", "Bye": "See you!", "Why?": ""}


def step_and_validation(config: dict[str, Any]) -> tuple[int, float]:
    """Train a step. Return its number of targets, and the mean loss of the assistant's bytes after the step."""
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(config), this_rank(), stack)
        result = train_one_step(run)
        report(run, due_now(run))
        losses = []
        for question, answer in ANSWERS.items():
            before = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n".encode()
            text = torch.tensor([*before, *f"{answer}<|im_end|>".encode()])
            with torch.no_grad():
                logits = run.model(text[None, :-1])[0].float()
            losses.append(F.cross_entropy(logits, text[1:], reduction="none")[len(before) - 1 :])
        return int(result.targets_global), torch.cat(losses).mean().item()


def test_the_loss_of_a_run_counts_exactly_the_tokens_of_the_assistant(tmp_path: Path) -> None:
    lines = [{"prompt": question, "response": answer} for question, answer in ANSWERS.items()]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {"kind": "chat", "path": str(tmp_path / "a.jsonl"), "template": "chatml"}
    config = tiny_job(
        tmp_path,
        model={"args": {"vocab_size": 257}},
        training={"seq_len": 160, "steps": 1, "global_batch_size": 2},
        validation={"freq": 1, "data": data},
    )
    [(count, loss)] = run_ranks(step_and_validation, 1, config | {"data": data})
    assert count == (5 + 8 + 0) + 3 * 10, "the answers, and three times <|im_end|>"
    assert read_metrics(tmp_path)[0]["validation/loss"] == pytest.approx(loss, rel=1e-5)
