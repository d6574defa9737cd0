# ruff: noqa: RUF001 - marks of published templates, and odd characters
"""Published chat templates and odd conversations: the tokens are those of `transformers`, and no target has text of
another message, or the chat is refused."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.data.corpora.test_chat import load, write_folder
from tests.sampling import rest_is_slow
from titan_launch.config.sections.data import ChatData, TokensData
from titan_launch.core.files import CACHE_VARIABLE
from titan_launch.data.chat_rendering import RecordError
from titan_launch.data.corpora.chat import ChatCorpus
from titan_launch.data.prepare import prepare
from titan_launch.data.sources import build_source
from titan_launch.data.tokenizers import ByteTokenizer, train_tokenizer
from titan_launch.train.describe_data import decode_sample

TEMPLATES = Path(__file__).parent / "templates"
"""Templates of published models, typed afresh. The first line of each names its source."""


class Family(NamedTuple):
    """A template in `templates/`, and the tokens of its tokenizer."""

    model: str
    """Name for the docs."""

    special: list[str]
    settings: dict[str, str]
    """The named tokens."""

    first: str
    """The text of `FIRST` as counted by hand. Each target is between `⟦` and `⟧`."""


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def turns(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """Return messages of the user and the assistant in turn."""
    first = [] if system is None else [turn("system", system)]
    return first + [turn(("user", "assistant")[index % 2], content) for index, content in enumerate(contents)]


FIRST = turns("What is 2+2?", "It is 4.", "And 3+3?", "6.")

IM = ["<|im_start|>", "<|im_end|>"]
LLAMA3 = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
PHI = ["<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
COHERE = ["<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"]
GRANITE = ["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"]
HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"]
S = ["<s>", "</s>"]

LLAMA3_FIRST = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: 26 Jul 2024\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nWhat is 2+2?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦It is 4.<|eot_id|>⟧"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd 3+3?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦6.<|eot_id|>⟧"
)
CHATML_FIRST = (
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n⟦It is 4.<|im_end|>⟧\n"
    "<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n⟦6.<|im_end|>⟧\n"
)
THOUGHT = "<think>\n\n</think>\n\n"
PHI3_FIRST = (
    "<|user|>\nWhat is 2+2?<|end|>\n<|assistant|>\n⟦It is 4.<|end|>⟧\n"
    "<|user|>\nAnd 3+3?<|end|>\n<|assistant|>\n⟦6.<|end|>\n<|endoftext|>⟧"
)
GEMMA_FIRST = (
    "<bos><start_of_turn>user\nWhat is 2+2?<end_of_turn>\n<start_of_turn>model\n⟦It is 4.<end_of_turn>⟧\n"
    "<start_of_turn>user\nAnd 3+3?<end_of_turn>\n<start_of_turn>model\n⟦6.<end_of_turn>⟧\n"
)
DEEPSEEK_FIRST = (
    "<｜begin▁of▁sentence｜><｜User｜>What is 2+2?<｜Assistant｜>⟦It is 4.<｜end▁of▁sentence｜>⟧"
    "<｜User｜>And 3+3?<｜Assistant｜>⟦6.<｜end▁of▁sentence｜>⟧"
)
HARMONY_FIRST = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
    "Current date: 2024-07-26\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. Channel must be "
    "included for every message.<|end|><|start|>user<|message|>What is 2+2?<|end|>"
    "<|start|>assistant⟦<|channel|>final<|message|>It is 4.<|end|>⟧<|start|>user<|message|>And 3+3?<|end|>"
    "<|start|>assistant⟦<|channel|>final<|message|>6.<|return|>⟧"
)
GRANITE_FIRST = (
    "<|start_of_role|>system<|end_of_role|>Knowledge Cutoff Date: April 2024. Today's Date: July 26, 2024. You are "
    "Granite, developed by IBM. You are a helpful AI assistant.<|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>What is 2+2?<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>⟦It is 4.<|end_of_text|>⟧\n"
    "<|start_of_role|>user<|end_of_role|>And 3+3?<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>⟦6.<|end_of_text|>⟧\n"
)
SMOLLM3_FIRST = (
    "<|im_start|>system\n## Metadata\n\nKnowledge Cutoff Date: June 2025\nToday Date: 26 July 2024\nReasoning Mode: "
    "/think\n\n## Custom Instructions\n\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face.\n\n"
    "<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n⟦<|im_start|>assistant\nIt is 4.<|im_end|>\n⟧"
    "<|im_start|>user\nAnd 3+3?<|im_end|>\n⟦<|im_start|>assistant\n6.<|im_end|>\n⟧"
)
COMMAND_R_FIRST = (
    "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>What is 2+2?<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>⟦It is 4.<|END_OF_TURN_TOKEN|>⟧"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>And 3+3?<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>⟦6.<|END_OF_TURN_TOKEN|>⟧"
)
QWEN_SYSTEM = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
SMOLLM2_SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
SEP = "<|im_sep|>"
PHI4_FIRST = (
    f"<|im_start|>user{SEP}What is 2+2?<|im_end|><|im_start|>assistant{SEP}⟦It is 4.<|im_end|>⟧"
    f"<|im_start|>user{SEP}And 3+3?<|im_end|><|im_start|>assistant{SEP}⟦6.<|im_end|>⟧"
)
BOS_S = {"bos_token": "<s>", "eos_token": "</s>"}
LLAMA3_NAMED = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
DEEPSEEK_NAMED = {"bos_token": DEEPSEEK[0], "eos_token": DEEPSEEK[1]}
PHI_NAMED = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}
GEMMA_NAMED = {"bos_token": "<bos>", "eos_token": "<eos>"}
END = "<|endoftext|>"
OLMO2_FIRST = (
    f"{END}<|user|>\nWhat is 2+2?\n<|assistant|>\n⟦It is 4.{END}⟧\n<|user|>\nAnd 3+3?\n<|assistant|>\n⟦6.{END}⟧"
)
FALCON_FIRST = "\n\nUser: What is 2+2?\n\nAssistant:⟦ It is 4.⟧\n\nUser: And 3+3?\n\nAssistant:⟦ 6.⟧"
LLAMA2_FIRST = "<s>[INST] What is 2+2? [/INST]⟦ It is 4. </s>⟧<s>[INST] And 3+3? [/INST]⟦ 6. </s>⟧"
MISTRAL1_FIRST = "<s>[INST] What is 2+2? [/INST]⟦It is 4.</s>⟧ [INST] And 3+3? [/INST]⟦6.</s>⟧ "
MISTRAL3_FIRST = "<s>[INST] What is 2+2?[/INST]⟦ It is 4.</s>⟧[INST] And 3+3?[/INST]⟦ 6.</s>⟧"
OPENCHAT_FIRST = (
    "<s>GPT4 Correct User: What is 2+2?<|end_of_turn|>GPT4 Correct Assistant:⟦ It is 4.<|end_of_turn|>⟧"
    "GPT4 Correct User: And 3+3?<|end_of_turn|>GPT4 Correct Assistant:⟦ 6.<|end_of_turn|>⟧"
)
ORION_FIRST = "<s>Human: What is 2+2?\n\nAssistant: </s>⟦It is 4.</s>⟧Human: And 3+3?\n\nAssistant: </s>⟦6.</s>⟧"
VICUNA_FIRST = "<s>USER: What is 2+2?\nASSISTANT:⟦ It is 4.</s>⟧\nUSER: And 3+3?\nASSISTANT:⟦ 6.</s>⟧\n"
ZEPHYR_FIRST = (
    "<|user|>\nWhat is 2+2?</s>\n<|assistant|>\n⟦It is 4.</s>⟧\n<|user|>\nAnd 3+3?</s>\n<|assistant|>\n⟦6.</s>⟧\n"
)

FAMILIES: dict[str, Family] = {
    "chatml": Family("ChatML", IM, {"eos_token": IM[1]}, CHATML_FIRST),
    "command_r": Family("Command R", COHERE, {"bos_token": COHERE[0], "eos_token": COHERE[2]}, COMMAND_R_FIRST),
    "deepseek_r1": Family("DeepSeek-R1", DEEPSEEK, DEEPSEEK_NAMED, ""),
    "deepseek_v3": Family("DeepSeek-V3", DEEPSEEK, DEEPSEEK_NAMED, DEEPSEEK_FIRST),
    "falcon": Family("Falcon", [END], {"eos_token": END}, FALCON_FIRST),
    "gemma2": Family("Gemma 2", ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], GEMMA_NAMED, GEMMA_FIRST),
    "gemma3": Family("Gemma 3", ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], GEMMA_NAMED, GEMMA_FIRST),
    "glm_edge": Family("GLM-Edge", [END, "<|system|>", "<|user|>", "<|assistant|>"], {"eos_token": END}, ""),
    "gpt_oss": Family("GPT-OSS", HARMONY, {"eos_token": "<|return|>"}, HARMONY_FIRST),
    "granite3_3": Family("Granite 3.3", GRANITE, {"eos_token": GRANITE[0]}, GRANITE_FIRST),
    "llama2": Family("Llama 2", S, BOS_S, LLAMA2_FIRST),
    "llama3_1": Family("Llama 3.1", LLAMA3, LLAMA3_NAMED, LLAMA3_FIRST),
    "llama3_2": Family("Llama 3.2", LLAMA3, LLAMA3_NAMED, LLAMA3_FIRST),
    "mistral_v0_1": Family("Mistral v0.1", S, BOS_S, MISTRAL1_FIRST),
    "mistral_v0_3": Family("Mistral v0.3", [*S, "[INST]", "[/INST]"], BOS_S, MISTRAL3_FIRST),
    "olmo2": Family("OLMo 2", [END], {"bos_token": END, "eos_token": END}, OLMO2_FIRST),
    "openchat": Family(
        "OpenChat 3.5", [*S, "<|end_of_turn|>"], {"bos_token": "<s>", "eos_token": "<|end_of_turn|>"}, OPENCHAT_FIRST
    ),
    "orion": Family("Orion", S, BOS_S, ORION_FIRST),
    "phi3": Family("Phi-3", PHI, PHI_NAMED, PHI3_FIRST),
    "phi3_5": Family("Phi-3.5", PHI, PHI_NAMED, PHI3_FIRST),
    "phi4": Family("Phi-4", [*IM, SEP, END], {"eos_token": IM[1]}, PHI4_FIRST),
    "phi4_mini": Family("Phi-4-mini", PHI, PHI_NAMED, PHI3_FIRST.replace("\n", "")),
    "qwen2_5": Family("Qwen 2.5", IM, {"eos_token": IM[1]}, QWEN_SYSTEM + CHATML_FIRST),
    "qwen3": Family("Qwen 3", IM, {"eos_token": IM[1]}, CHATML_FIRST.replace("⟦6.", f"⟦{THOUGHT}6.")),
    "qwen3_thinking": Family("Qwen 3 Thinking", IM, {"eos_token": IM[1]}, ""),
    "smollm2": Family("SmolLM2", IM, {"eos_token": IM[1]}, SMOLLM2_SYSTEM + CHATML_FIRST),
    "smollm3": Family("SmolLM3", IM, {"eos_token": IM[1]}, SMOLLM3_FIRST),
    "vicuna": Family("Vicuna", S, BOS_S, VICUNA_FIRST),
    "yandexgpt5": Family("YandexGPT 5 Lite", ["<s>", "</s>", "[SEP]"], BOS_S, ""),
    "zephyr": Family("Zephyr", S, BOS_S, ZEPHYR_FIRST),
}

THOUGHTS = "<think>\nEasy.\n</think>\n\n4."
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": "one and two"}}}
CALL_OF_TEXT = CALL | {"function": {"name": "add", "arguments": '{"a": "one and two"}'}}
RESULT = turn("tool", "3 is it", tool_call_id="abcdefghi")
REST = turns("", "It is 3.", "Sure?", "Yes.")[1:]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": turns("Hi", "Hello!"),
    "two turns": FIRST,
    "nine turns": turns(*(f"{word} {index}?" for index in range(9) for word in ("Ask", "Answer"))),
    "a system message": turns("Hi", "Hello!", "Bye", "See you!", system="Be brief and kind."),
    "a system message of white space": turns("Hi", "Hello!", system=" \n"),
    "only a system message before": [turn("system", "Talk."), turn("assistant", "Hello there!")],
    "the user at the end": turns("Hi", "Hello!", "SECRET USER TEXT"),
    "the assistant at the beginning": turns("Hi", "Hello!", "Bye", "See you!")[1:],
    "only the assistant": [turn("assistant", "Hello there!")],
    "an empty answer at the beginning": [turn("assistant", ""), *turns("Hi", "Hello!")],
    "two users in a row": [turn("user", "Hi"), *turns("Are you there?", "Yes.", "Good.", "Bye!")],
    "two users at the end": [*turns("Hi", "Hello!"), turn("user", "A"), turn("user", "B C")],
    "two assistants in a row": [*turns("Hi", "Hello!"), turn("assistant", "More?"), *turns("No.", "Fine.")],
    "an empty question": turns("", "Hello!", "", "Anyone?"),
    "an empty answer": turns("Hi", "", "Hi?", "Hello!"),
    "an empty second answer": [*turns("Hi", "Hello!"), turn("assistant", ""), *turns("Hi?", "Yes.")],
    "an empty last answer": turns("Hi", "Hello!", "Bye", ""),
    "nothing but newlines": turns("\n\n", "\n", "\n", "\n\n"),
    "white space at the ends": turns("  Hi \n", "\n Hello!  \n", "\tBye", " See you! "),
    "Unicode": turns("Grüße 🌍, 你好?", "Привет 👩‍👩‍👧 \u200b!", "e\u0301", "\u202eمرحبا"),
    "equal turns": turns("Hi", "Hi", "Hi", "Hi", "Hi", "Hi"),
    "the answer is the question": turns("Say it.", "Say it.", "Again.", "Again."),
    "the next question in the answer": turns("A", "And B? And B?", "And B?", "And B? And B?"),
    "marks of other templates": turns("[INST] User: a", "ASSISTANT: b [/INST] USER: c", "### d", "\n\nUser: e"),
    "its own marks as text": turns("assistant\nuser\n", "user\nassistant\n", "model\n", "system\n Correct User: x"),
    "one character": turns("a", "b", "c", "d"),
    "thoughts": turns("2+2?", THOUGHTS, "Sure?", THOUGHTS),
    "thoughts in a key": [*turns("2+2?"), turn("assistant", "4.", reasoning_content="Easy."), *turns("Sure?", "Yes.")],
    "answers in JSON": turns('{"a": 1}', '{"b": [2]}', '"c"', '[{"d": "e"}]'),
    "a tool": [turn("user", "1+2?"), turn("assistant", "", tool_calls=[CALL]), RESULT, *REST],
    "a tool with arguments as text": [turn("user", "1+2?"), turn("assistant", "", tool_calls=[CALL_OF_TEXT]), RESULT],
    "a tool after a thought": [
        turn("user", "1+2?"),
        turn("assistant", "", thinking="I add.", tool_calls=[CALL]),
        RESULT,
        *REST,
    ],
    "a tool response as the user": turns("2?", "Wait.", "<tool_response>\n3\n</tool_response>", "3.", "So?", "3."),
    "modes as words": turns("Think! /no_think", "Fine.", "/think", "Fine too.", system="Be brief. /no_think"),
}

ALTERNATION = {
    "only a system message before",
    "the assistant at the beginning",
    "only the assistant",
    "an empty answer at the beginning",
    "two users in a row",
    "two users at the end",
    "two assistants in a row",
    "an empty second answer",
}
SYSTEM = {"a system message", "a system message of white space", "modes as words"}
TOOLS = {"a tool", "a tool with arguments as text", "a tool after a thought"}
UNWRITTEN = "a chat with a tool call that the template does not write into the answer"
OMITTED = "a chat with a message that the template omits"
ALL = set(CONVERSATIONS)

REFUSED: dict[str, list[tuple[str, set[str]]]] = {
    # the beginning of the reason, and the conversations
    "chatml": [(UNWRITTEN, TOOLS)],
    "command_r": [("refused", ALTERNATION | TOOLS)],
    "deepseek_r1": [("refused", TOOLS - {"a tool with arguments as text"}), ("not divided", ALL)],
    "deepseek_v3": [("refused", TOOLS - {"a tool with arguments as text"})],
    "falcon": [("refused", ALTERNATION | TOOLS)],
    "gemma2": [("refused", SYSTEM | ALTERNATION | TOOLS)],
    "gemma3": [("refused", ALTERNATION | TOOLS)],
    "glm_edge": [("not divided", ALL)],
    "granite3_3": [(UNWRITTEN, TOOLS)],
    "llama2": [("refused", ALTERNATION | TOOLS)],
    "llama3_1": [(UNWRITTEN, TOOLS)],
    "mistral_v0_1": [("refused", SYSTEM | ALTERNATION | TOOLS)],
    "mistral_v0_3": [
        ("refused", ALTERNATION),
        ("not divided", SYSTEM),
        ("a chat with the special token [INST] in a message", {"marks of other templates"}),
    ],
    "olmo2": [(UNWRITTEN, TOOLS)],
    "openchat": [(UNWRITTEN, TOOLS)],
    "orion": [(UNWRITTEN, TOOLS), (OMITTED, {"a system message", "only a system message before", "modes as words"})],
    "phi3": [(UNWRITTEN, TOOLS)],
    "phi3_5": [(UNWRITTEN, TOOLS)],
    "phi4": [(UNWRITTEN, TOOLS)],
    "phi4_mini": [(UNWRITTEN, TOOLS)],
    "qwen3_thinking": [("not divided", ALL - {"one turn", "a system message of white space"})],
    "smollm2": [(UNWRITTEN, TOOLS)],
    "smollm3": [(UNWRITTEN, TOOLS)],
    "vicuna": [("refused", ALTERNATION | TOOLS)],
    "yandexgpt5": [
        (OMITTED, {"only a system message before"}),
        ("not divided", ALL - {"one turn", "a system message of white space"}),
    ],
    "zephyr": [(UNWRITTEN, TOOLS)],
}
"""Conversations that are refused. A conversation counts for the first reason that names it."""


@pytest.fixture(scope="module")
def bytes_and_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tokenizer in which frequent words, with the spaces around them, are tokens."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizers") / "words"
    train_tokenizer(
        ["\n\nUser: Hello there! What is 2+2? user assistant model Hi\n\n It is 4. And 3+3?" * 9], 320, folder
    )
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jinja2")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def write(name: str, words: Path, root: Path) -> Path:
    """Write the tokenizer and the template of a family to a new folder."""
    write_folder(words, root / name, FAMILIES[name].settings, FAMILIES[name].special)
    (root / name / "chat_template.jinja").write_text((TEMPLATES / f"{name}.jinja").read_text())
    return root / name


def corpus_of(folder: Path | None = None, **keys: Any) -> ChatCorpus:
    tokenizer = ByteTokenizer() if folder is None else load(folder)
    return ChatCorpus(ChatData(kind="chat", path="none", **keys), tokenizer, ("data",), 4000)


def set_clock(monkeypatch: pytest.MonkeyPatch, day: str) -> None:
    """Set the date of `strftime_now` in templates of `transformers`."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls.fromisoformat(day)

    module = pytest.importorskip("transformers.utils.chat_template_utils")
    monkeypatch.setattr(module, "datetime", Clock)


def marked(corpus: ChatCorpus, messages: list[dict[str, Any]], **keys: Any) -> str:
    """Return the text of a chat with its targets between `⟦` and `⟧`."""
    text, spans = corpus.template.render(messages, None, keys.get("train_on", "assistant"))
    for span in reversed(spans):
        text = f"{text[: span.start]}⟦{text[span.start : span.stop]}⟧{text[span.stop :]}"
    return text


def with_other_questions(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which other letters stand in the texts that are not of the assistant. Words that templates
    understand stay."""
    return [
        message
        if message["role"] == "assistant"
        else message | {"content": re.sub(r"(<[^>]*>|/\w+)|\S", lambda match: match[1] or "Ж", message["content"])}
        for message in messages
    ]


def with_decoded_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the tool call `CALL` in place of `CALL_OF_TEXT`."""
    return [{**message, "tool_calls": [CALL]} if "tool_calls" in message else message for message in messages]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.first])
def test_the_targets_of_the_first_chat_are_those_counted_by_hand(
    name: str, bytes_and_words: Path, tmp_path: Path
) -> None:
    assert marked(corpus_of(write(name, bytes_and_words, tmp_path)), FIRST) == FAMILIES[name].first


@pytest.mark.parametrize("name", rest_is_slow(list(FAMILIES)))
def test_each_conversation_has_the_tokens_of_transformers_and_no_target_of_another_message(
    name: str, bytes_and_words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(name, bytes_and_words, tmp_path)
    corpus = corpus_of(folder)
    set_clock(monkeypatch, corpus.config.date)
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    for conversation, messages in CONVERSATIONS.items():
        expected = next((reason for reason, group in REFUSED.get(name, []) if conversation in group), None)
        try:
            try:
                tokens = theirs.apply_chat_template(with_decoded_arguments(messages), return_dict=True)["input_ids"]
            except Exception:  # DeepSeek's templates only accept strings
                tokens = theirs.apply_chat_template(messages, return_dict=True)["input_ids"]
        except Exception:  # templates raise many kinds
            assert expected == "refused", conversation
        if expected is not None:
            with pytest.raises(RecordError) as caught:
                corpus.tokenized(messages, {})
            assert caught.value.reason.startswith(expected), conversation
            if expected == "not divided":
                assert re.match(r"the turn of message \d is not found: ", caught.value.detail)
            continue
        chat = corpus.tokenized(messages, {})
        assert chat.tokens.tolist() == tokens, conversation
        text, spans = corpus.template.render(messages, None, "assistant")
        other, other_spans = corpus.template.render(with_other_questions(messages), None, "assistant")
        assert spans == other_spans and len(text) == len(other), conversation
        foreign = {index for index, (a, b) in enumerate(zip(text, other, strict=True)) if a != b}
        assert foreign or conversation != "two turns"
        assert chat.targets is not None
        _, offsets = corpus.tokenizer.encode_chat(text)
        for (start, stop), is_target in zip(offsets, chat.targets, strict=True):
            assert not (is_target and foreign & set(range(start, stop))), conversation


@pytest.mark.parametrize("name", FAMILIES)
def test_the_prompt_for_an_answer_has_the_tokens_of_transformers(
    name: str, bytes_and_words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the prompt of an answer that has begun. What `transformers` refuses is refused."""
    folder = write(name, bytes_and_words, tmp_path)
    corpus = corpus_of(folder)
    set_clock(monkeypatch, corpus.config.date)
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    compared = {True: 0, False: 0}
    for conversation, messages in CONVERSATIONS.items():
        asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        for chat, is_begun in ((asked, False), (messages, True)):
            if not chat or (chat[-1]["role"] == "assistant") != is_begun:
                continue
            try:
                options = {"add_generation_prompt": not is_begun, "continue_final_message": is_begun}
                expected = theirs.apply_chat_template(chat, return_dict=True, **options)["input_ids"]
            except Exception:  # templates raise many kinds
                with pytest.raises(RecordError, match="refused by the chat template"):
                    corpus.template.prompt(chat, allows_special=True)
                continue
            text = corpus.template.prompt(chat, allows_special=True)
            assert corpus.tokenizer.encode_chat(text)[0] == expected, (conversation, is_begun)
            compared[is_begun] += 1
    assert compared[False] > 10 and (compared[True] > 10 or name == "yandexgpt5"), "it writes no last answer"


def test_every_template_file_names_its_source_and_is_tested() -> None:
    files = {path.stem: path.read_text() for path in TEMPLATES.glob("*.jinja")}
    assert files.keys() == FAMILIES.keys() and len(files) >= 20
    assert all(re.match(r"{#- (\S+/\S+|ChatML, as in \S+/\S+?)[,. ]", text) for text in files.values())


def test_the_table_of_the_docs_is_right() -> None:
    chats = {
        "system": "a system message",
        "assistant first": "the assistant at the beginning",
        "two users in a row": "two users in a row",
    }
    rows = [("template", "first answer", "last answer", "refused chats")]
    for name, family in sorted(FAMILIES.items(), key=lambda item: item[1].model.lower()):
        unwritten = [group for reason, group in REFUSED.get(name, []) if reason != UNWRITTEN]
        refused = [words for words, chat in chats.items() if any(chat in group for group in unwritten)]
        answers = re.findall("⟦(.*?)⟧", family.first.replace("\n", "⏎"))
        if not answers:
            refused = ["all" if any("one turn" in group for group in unwritten) else "several answers"]
        rows.append((family.model, *(answers or ("", "")), ", ".join(refused)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    page = (Path(__file__).parents[3] / "docs/verification/models.md").read_text()
    assert "```text\n" + "\n".join(lines) + "\n```" in page


PHI3_SECRET = "<|user|>\nHi<|end|>\n<|assistant|>\n⟦Hello!<|end|>⟧\n<|user|>\nSECRET USER TEXT<|end|>\n<|endoftext|>"


PREVIEWED = PHI3_SECRET.removesuffix("<|endoftext|>")
"""The last token of a document is no input of the model, and here no target."""


def test_a_question_at_the_end_is_no_target_of_the_run_or_of_prepared_tokens(
    bytes_and_words: Path, tmp_path: Path
) -> None:
    folder = write("phi3", bytes_and_words, tmp_path)
    assert marked(corpus_of(folder), CONVERSATIONS["the user at the end"]) == PHI3_SECRET
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": CONVERSATIONS["the user at the end"]}) + "\n")
    data = ChatData(kind="chat", path=str(path))
    prepare(ChatCorpus(data, load(folder), ("data",), 100), tmp_path / "tokens")
    tokens = TokensData(kind="tokens", path=str(tmp_path / "tokens"), packing="documents")
    for source in (build_source(data, load(folder), 100), build_source(tokens, load(folder), 100)):
        [document] = decode_sample(source[0], load(folder))
        assert "".join(f"⟦{p['text']}⟧" if p["counts"] else p["text"] for p in document["text"]) == PREVIEWED


THOUGHT_OF_TOOL = [
    turn("user", "1+2?"),
    turn("assistant", "", reasoning_content="I add.", tool_calls=[CALL]),
    RESULT,
    turn("assistant", "It is 3.", reasoning_content="Done."),
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "qwen3",
            "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nI add.\n</think>\n\n<tool_call>\n"
            '{"name": "add", "arguments": {"a": "one and two"}}\n</tool_call><|im_end|>⟧\n<|im_start|>user\n'
            "<tool_response>\n3 is it\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
            "⟦<think>\nDone.\n</think>\n\nIt is 3.<|im_end|>⟧\n",
        ),
        (
            "gpt_oss",
            f"{HARMONY_FIRST.partition('<|start|>user')[0]}<|start|>user<|message|>1+2?<|end|><|start|>assistant"
            '⟦ to=functions.add<|channel|>commentary json<|message|>{"a": "one and two"}<|call|>⟧'
            '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3 is it"<|end|><|start|>assistant'
            "⟦<|channel|>analysis<|message|>Done.<|end|><|start|>assistant<|channel|>final<|message|>It is 3."
            "<|return|>⟧",
        ),
    ],
)
def test_calls_of_tools_and_thoughts_are_targets_as_the_template_writes_them(
    name: str, expected: str, bytes_and_words: Path, tmp_path: Path
) -> None:
    corpus = corpus_of(write(name, bytes_and_words, tmp_path))
    assert marked(corpus, THOUGHT_OF_TOOL) == expected
    question, call, *rest = THOUGHT_OF_TOOL
    assert marked(corpus, [question, call | {"tool_calls": [CALL_OF_TEXT]}, *rest]) == expected
    last = marked(corpus, THOUGHT_OF_TOOL, train_on="last")
    assert last.replace("⟦", "").replace("⟧", "") == expected.replace("⟦", "").replace("⟧", "")
    assert last.partition("⟦")[2] == expected.rpartition("⟦")[2]


def test_templates_get_the_date_of_the_job(
    bytes_and_words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    set_clock(monkeypatch, "2025-06-28")
    lines = json.dumps({"messages": FIRST}) + "\n"
    (tmp_path / "a.jsonl").write_text(lines)
    for name, written in {
        "llama3_1": "Today Date: 28 Jun 2025",
        "llama3_2": "Today Date: 28 Jun 2025",
        "gpt_oss": "Current date: 2025-06-28",
        "granite3_3": "Today's Date: June 28, 2025",
        "smollm3": "Today Date: 28 June 2025",
    }.items():
        folder = write(name, bytes_and_words, tmp_path)
        corpus = corpus_of(folder, date="2025-06-28")
        assert written in marked(corpus, FIRST)
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        expected = theirs.apply_chat_template(FIRST, return_dict=True, date_string="28 Jun 2025")["input_ids"]
        assert corpus.tokenized(FIRST, {}).tokens.tolist() == expected
        samples = [
            build_source(ChatData(kind="chat", path=str(tmp_path / "a.jsonl"), date=day), load(folder), 400)[0][0]
            for day in ("2025-06-28", "2025-06-29", "2025-06-28")
        ]
        assert samples[0].equal(samples[2]) and not samples[0].equal(samples[1]), (
            "a cached date is not used for another"
        )
    template = {"template_args": {"date_string": "1 Jan 2000"}, "date": "2025-06-28"}
    assert "Today Date: 1 Jan 2000" in marked(corpus_of(tmp_path / "llama3_1", **template), FIRST)


EVERY = "{% for m in messages %}"
ODD_TEMPLATES: dict[str, tuple[str, str]] = {
    # template, detail of the refusal, or the text with its targets
    "writes pairs": (
        "{% for m in messages if m.role == 'assistant' %}Q: {{ messages[loop.index0 * 2].content }} A: {{ m.content }}|"
        "{% endfor %}",
        "the turn of message 2 is not found: it would contain text of message 1; ",
    ),
    "repeats the question": (
        EVERY
        + "<{{ m.role }}>{{ m.content }}{% if m.role != 'user' %} ({{ loop.previtem.content }}){% endif %}{% endfor %}",
        "the turn of message 2 is not found: it would contain text of message 1; ",
    ),
    "writes the last message first": (
        "{% for m in messages | reverse %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        "the turn of message 2 is not found: the template writes the earlier messages differently "
        "if they end the chat; ",
    ),
    "changes texts": (
        EVERY + "<{{ m.role }}>{{ m.content | reverse }}{% endfor %}",
        "the turn of message 2 is not found: the template modifies or tests the text of messages, "
        "so the messages are not found in its output; ",
    ),
    "writes no end of a turn": (EVERY + "{{ m.content }}{% endfor %}", "it would contain text of message 1; "),
    "a block with the question": (
        EVERY + "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "a generation block has text of message 1",
    ),
    "writes the prompt after every chat": (  # as the first template of Llama 3 did
        EVERY + "<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}<|assistant|>",
        "the turn of message 2 is not found: the template ends the turn differently if another message follows; ",
    ),
    "writes the end of the chat after its last message": (
        EVERY + "{{ m.role }}:{{ m.content }}/{% endfor %}{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
        "user:A/⟦assistant:B/⟧user:C/⟦assistant:D/</s>⟧",
    ),
    "writes no prompt after an answer": (
        EVERY + "<{{ m.role }}>{{ m.content }}|{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'assistant' %}<assistant>{% endif %}",
        "<user>A|<assistant>⟦B|⟧<user>C|<assistant>⟦D|⟧<assistant>⟦E|⟧",
    ),
    "drops a last answer": (
        EVERY
        + "{% if not (loop.last and m.role == 'assistant') %}<{{ m.role }}>{{ m.content }}|{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
        "the turn of message 2 is not found: the template writes the message differently if it ends the chat; ",
    ),
    "tests for a beginning": (
        EVERY + "{% if m.content.startswith('A') %}!{% endif %}<{{ m.role }}>{{ m.content }}|{% endfor %}",
        "!<user>A|⟦<assistant>B|⟧<user>C|⟦<assistant>D|⟧",
    ),
}


@pytest.mark.parametrize("case", ODD_TEMPLATES)
def test_a_template_whose_turns_cannot_be_told_apart_is_refused(case: str, tmp_path: Path) -> None:
    template, expected = ODD_TEMPLATES[case]
    (tmp_path / "own.jinja").write_text(template)
    corpus = corpus_of(template=str(tmp_path / "own.jinja"), template_args={"eos_token": "</s>"})
    chat = [*turns("A", "B", "C", "D"), *[turn("assistant", "E")] * ("after an answer" in case)]
    if "⟦" in expected:
        assert marked(corpus, chat) == expected
        return
    with pytest.raises(RecordError) as caught:
        corpus.template.render(chat, None, "assistant")
    assert caught.value.reason == "not divided into turns by the template" and expected in caught.value.detail


FUNCTIONS = (
    "{% set ns = namespace(self=1) %}{{ ns.self }}{{ dict.fromkeys(['a', 'b'], 2) | tojson }}{{ dict(a=1, b=[2]).b }}"
    "{{ {'b': 'é<', 'a': 1} | tojson(sort_keys=true, indent=2) }}{{ [1, 2] | tojson(separators=(',', ':')) }}"
    "{{ 'é' | tojson(ensure_ascii=true) }}{{ strftime_now('%d %B %Y, %H:%M') }}{{ documents }}{{ tools }}\n"
    "    {% for message in messages %}\n{% if loop.index == 2 %}{% break %}{% endif %}\n{{ message.content }}\n"
    "{% endfor %}"
)


def test_templates_have_the_functions_of_transformers(bytes_and_words: Path, tmp_path: Path, monkeypatch: Any) -> None:
    write_folder(bytes_and_words, tmp_path / "functions", {"chat_template": FUNCTIONS}, [])
    set_clock(monkeypatch, "2024-07-26")
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path / "functions")
    text, _ = corpus_of(tmp_path / "functions").template.render(FIRST[:2], None, "all")
    assert text == theirs.apply_chat_template(FIRST[:2], tokenize=False)


def test_a_date_that_is_no_date_is_refused() -> None:
    for text in ("2025-02-30", "20250228", "today", ""):
        with pytest.raises(ValueError, match='must be a date, such as "2024-07-26"'):
            ChatData(kind="chat", path="none", date=text)
