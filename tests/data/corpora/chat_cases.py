"""Published chat templates, and odd conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

TEMPLATES = Path(__file__).parent / "templates"


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
COHERE = ["<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>"]
GRANITE = ["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"]
HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"]
S = ["<s>", "</s>"]

LLAMA3_SYSTEM = "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n<|eot_id|>"  # noqa: E501
LLAMA3_FIRST = (
    f"<|begin_of_text|>{LLAMA3_SYSTEM}<|start_header_id|>user<|end_header_id|>\n\nWhat is 2+2?<|eot_id|>"
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
MISTRAL = "</s> [INST] And 3+3? [/INST]"
BOS_S = {"bos_token": "<s>", "eos_token": "</s>"}
LLAMA3_NAMED = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
DEEPSEEK_NAMED = {"bos_token": DEEPSEEK[0], "eos_token": DEEPSEEK[1]}
PHI_NAMED = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}
GEMMA_NAMED = {"bos_token": "<bos>", "eos_token": "<eos>"}
END = "<|endoftext|>"

FAMILIES: dict[str, Family] = {
    "chatml": Family("ChatML", IM, {"eos_token": IM[1]}, CHATML_FIRST),
    "command_r": Family("Command R", [*COHERE, "<|CHATBOT_TOKEN|>"], {"bos_token": COHERE[0], "eos_token": COHERE[2]}, COMMAND_R_FIRST),  # noqa: E501
    "deepseek_r1": Family("DeepSeek-R1", DEEPSEEK, DEEPSEEK_NAMED, ""),
    "deepseek_v3": Family("DeepSeek-V3", DEEPSEEK, DEEPSEEK_NAMED, DEEPSEEK_FIRST),
    "falcon": Family("Falcon", [END], {"eos_token": END}, "\n\nUser: What is 2+2?\n\nAssistant:⟦ It is 4.⟧\n\nUser: And 3+3?\n\nAssistant:⟦ 6.⟧"),  # noqa: E501
    "gemma2": Family("Gemma 2", ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], GEMMA_NAMED, GEMMA_FIRST),
    "gemma3": Family("Gemma 3", ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], GEMMA_NAMED, GEMMA_FIRST),
    "glm_edge": Family("GLM-Edge", [END, "<|system|>", "<|user|>", "<|assistant|>"], {"eos_token": END}, ""),
    "gpt_oss": Family("GPT-OSS", HARMONY, {"eos_token": "<|return|>"}, HARMONY_FIRST),
    "granite3_3": Family("Granite 3.3", GRANITE, {"eos_token": GRANITE[0]}, GRANITE_FIRST),
    "llama2": Family("Llama 2", S, BOS_S, "<s>[INST] What is 2+2? [/INST]⟦ It is 4. </s>⟧<s>[INST] And 3+3? [/INST]⟦ 6. </s>⟧"),  # noqa: E501
    "llama3_1": Family("Llama 3.1", LLAMA3, LLAMA3_NAMED, LLAMA3_FIRST),
    "llama3_2": Family("Llama 3.2", LLAMA3, LLAMA3_NAMED, LLAMA3_FIRST),
    "mistral_v0_1": Family("Mistral v0.1", S, BOS_S, "<s>[INST] What is 2+2? [/INST]⟦It is 4.</s>⟧ [INST] And 3+3? [/INST]⟦6.</s>⟧ "),  # noqa: E501
    "mistral_v0_3": Family("Mistral v0.3", [*S, "[INST]", "[/INST]"], BOS_S, "<s>[INST] What is 2+2?[/INST]⟦ It is 4.</s>⟧[INST] And 3+3?[/INST]⟦ 6.</s>⟧"),  # noqa: E501
    "olmo2": Family("OLMo 2", [END], {"bos_token": END, "eos_token": END}, f"{END}<|user|>\nWhat is 2+2?\n<|assistant|>\n⟦It is 4.{END}⟧\n<|user|>\nAnd 3+3?\n<|assistant|>\n⟦6.{END}⟧"),  # noqa: E501
    "openchat": Family("OpenChat 3.5", [*S, "<|end_of_turn|>"], {"bos_token": "<s>", "eos_token": "<|end_of_turn|>"}, "<s>GPT4 Correct User: What is 2+2?<|end_of_turn|>GPT4 Correct Assistant:⟦ It is 4.<|end_of_turn|>⟧GPT4 Correct User: And 3+3?<|end_of_turn|>GPT4 Correct Assistant:⟦ 6.<|end_of_turn|>⟧"),  # noqa: E501
    "orion": Family("Orion", S, BOS_S, "<s>Human: What is 2+2?\n\nAssistant: </s>⟦It is 4.</s>⟧Human: And 3+3?\n\nAssistant: </s>⟦6.</s>⟧"),  # noqa: E501
    "phi3": Family("Phi-3", PHI, PHI_NAMED, PHI3_FIRST),
    "phi3_5": Family("Phi-3.5", PHI, PHI_NAMED, PHI3_FIRST),
    "phi4": Family("Phi-4", [*IM, SEP, END], {"eos_token": IM[1]}, PHI4_FIRST),
    "phi4_mini": Family("Phi-4-mini", PHI, PHI_NAMED, PHI3_FIRST.replace("\n", "")),
    "qwen2_5": Family("Qwen 2.5", IM, {"eos_token": IM[1]}, QWEN_SYSTEM + CHATML_FIRST),
    "qwen3": Family("Qwen 3", IM, {"eos_token": IM[1]}, CHATML_FIRST.replace("⟦6.", f"⟦{THOUGHT}6.")),
    "qwen3_thinking": Family("Qwen 3 Thinking", IM, {"eos_token": IM[1]}, ""),
    "smollm2": Family("SmolLM2", IM, {"eos_token": IM[1]}, SMOLLM2_SYSTEM + CHATML_FIRST),
    "smollm3": Family("SmolLM3", IM, {"eos_token": IM[1]}, SMOLLM3_FIRST),
    "vicuna": Family("Vicuna", S, BOS_S, "<s>USER: What is 2+2?\nASSISTANT:⟦ It is 4.</s>⟧\nUSER: And 3+3?\nASSISTANT:⟦ 6.</s>⟧\n"),  # noqa: E501
    "yandexgpt5": Family("YandexGPT 5 Lite", ["<s>", "</s>", "[SEP]"], BOS_S, ""),
    "zephyr": Family("Zephyr", S, BOS_S, "<|user|>\nWhat is 2+2?</s>\n<|assistant|>\n⟦It is 4.</s>⟧\n<|user|>\nAnd 3+3?</s>\n<|assistant|>\n⟦6.</s>⟧\n"),  # noqa: E501
}

THOUGHTS = "<think>\nEasy.\n</think>\n\n4."
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": "one and two"}}}
CALL_OF_TEXT = CALL | {"function": {"name": "add", "arguments": '{"a": "one and two"}'}}
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
    "an empty last answer": turns("Hi", "Hello!", "Bye", ""),
    "nothing but newlines": turns("\n\n", "\n", "\n", "\n\n"),
    "white space at the ends": turns("  Hi \n", "\n Hello!  \n", "\tBye", " See you! "),
    "Unicode": turns("Grüße 🌍, 你好?", "Привет 👩‍👩‍👧 \u200b!", "e\u0301", "\u202eمرحبا"),
    "equal turns": turns("Hi", "Hi", "Hi", "Hi", "Hi", "Hi"),
    "the answer is the question": turns("Say it.", "Say it.", "Again.", "Again."),
    "the next question in the answer": turns("A", "And B? And B?", "And B?", "And B? And B?"),
    "marks of other templates": turns("[INST] User: ASSISTANT: a", "Assistant: b [/INST] USER: c", "### d", "\n\nUser: e"),
    "its own marks as text": turns("assistant\nuser\n", "user\nassistant\n", "model\n", "system\n GPT4 Correct User: x"),
    "one character": turns("a", "b", "c", "d"),
    "thoughts": turns("2+2?", THOUGHTS, "Sure?", THOUGHTS),
    "thoughts in a key": [*turns("2+2?"), turn("assistant", "4.", reasoning_content="Easy."), *turns("Sure?", "Yes.")],
    "answers in JSON": turns('{"a": 1}', '{"b": [2]}', '"c"', '[{"d": "e"}]'),
    "a tool": [turn("user", "1+2?"), turn("assistant", "", tool_calls=[CALL]),
               turn("tool", "3 is it", tool_call_id="abcdefghi"), *turns("x", "It is 3.", "Sure?", "Yes.")[1:]],
    "a tool with arguments as text": [turn("user", "1+2?"), turn("assistant", "", tool_calls=[CALL_OF_TEXT]),
                                      turn("tool", "3 is it", tool_call_id="abcdefghi"), turn("assistant", "3.")],
    "a tool after a thought": [turn("user", "1+2?"), turn("assistant", "", thinking="I add.", tool_calls=[CALL]),
                               turn("tool", "3 is it", tool_call_id="abcdefghi"), *turns("x", "It is 3.", "Sure?", "Yes.")[1:]],
    "a tool response as the user": turns("2?", "Wait.", "<tool_response>\n3\n</tool_response>", "3.", "So?", "3."),
    "modes as words": turns("Think! /no_think", "Fine.", "/think", "Fine too.", system="Be brief. /no_think"),
}  # fmt: skip
