"""Tasks of lm-evaluation-harness on a tiny run: against sums by hand, and against the harness's own model `hf`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.inference.test_generation import byte_level_tokenizer, load
from tests.models.parity import random_model
from titan_launch.cli import main
from titan_launch.inference.chat_format import ChatOptions
from titan_launch.inference.generation import Sampling, TextStream, generate_tokens
from titan_launch.inference.language_model import LanguageModel

pytest.importorskip("lm_eval")

DOCUMENTS = [
    {"question": "Grüße,", "choices": ["世界", "wide world"], "answer": 0},
    {"question": "Grüße, 世界", "choices": ["Gr", "🌍!", "u"], "answer": 1},
    {"question": "🌍! Grüße, 世界 🌍! Grüße, 世界 🌍!", "choices": ["Kein", "Grüß"], "answer": 0},
]
_TASK = """
task: {name}
output_type: {kind}
dataset_path: json
dataset_kwargs:
  data_files: {folder}/documents.jsonl
  cache_dir: {folder}/cache
test_split: train
doc_to_text: "{{{{question}}}}"
doc_to_target: "{target}"
target_delimiter: ""
"""
_ROLLING = """
doc_to_text: ""
metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]
"""
_GENERATION = """
generation_kwargs: {until: ["!"], max_gen_toks: 12}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def write_tasks(folder: Path) -> str:
    """Write a task of each kind, the first of which is that of the docs, and return their names."""
    (folder / "documents.jsonl").write_text("\n".join(map(json.dumps, DOCUMENTS)))
    page = Path(__file__).parents[2] / "docs" / "how_to" / "generate_and_evaluate.md"
    (task,) = re.findall("^```yaml\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    task = task.replace("tasks/capitals.jsonl }", f"{folder}/documents.jsonl, cache_dir: {folder}/cache }}")
    (folder / "capitals.yaml").write_text(task)
    kinds = {
        "rolling": ("loglikelihood_rolling", "{{question}}{{choices[answer]}}", _ROLLING),
        "continued": ("generate_until", " {{choices[0]}} \N{EARTH GLOBE EUROPE-AFRICA}", _GENERATION),
    }
    for name, (kind, target, rest) in kinds.items():
        task = _TASK.format(name=name, kind=kind, target=target, folder=folder) + rest
        if name == "rolling":
            task = task.replace('doc_to_text: "{{question}}"\n', "")
        (folder / f"{name}.yaml").write_text(task, encoding="utf-8")
    return ",".join(["capitals", *kinds])


def log_likelihoods(model: LanguageModel, tokens: list[int]) -> list[float]:
    """Return the log-likelihood of each token but the first, by a plain forward."""
    logits = model.module(torch.tensor([tokens[:-1]]))[0]
    return [float(row.log_softmax(-1)[token]) for row, token in zip(logits, tokens[1:], strict=True)]


CHAT = (
    "{% for m in messages %}{{ m.role[:1] }}:{{ m.content }}{% if m.role == 'assistant' %}!{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@torch.no_grad()
@pytest.mark.parametrize("is_chat", [False, True], ids=["texts", "chats"])
def test_results_are_sums_by_hand(
    is_chat: bool, run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat has a system message, its answers have no space at their beginning, and rolling texts are no chats."""
    monkeypatch.chdir(tmp_path)  # which is in no checkout of git
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    names, out, template = write_tasks(tmp_path), tmp_path / "results.json", tmp_path / "own.jinja"
    template.write_text(CHAT)
    options = ["--chat", f"--template={template}", "--system=S"] if is_chat else []
    command = ["evaluate", str(run), "--tasks", names.replace(",", ", "), f"--include-path={tmp_path}", f"--out={out}"]
    assert main([*command, *options]) == 0
    printed, reported = capfd.readouterr()
    assert "|capitals" in printed and "fatal" not in reported, reported
    written: dict[str, Any] = json.loads(out.read_text())
    assert written["git_hash"] is None
    results, config = written["results"], written["config"]
    assert config["apply_chat_template"] == is_chat and config.get("system_instruction") == ("S" if is_chat else None)
    model = load(run, chat=ChatOptions(str(template)) if is_chat else None)
    num_right, num_bytes, bits, num_exact = 0, 0, 0.0, 0
    for document in DOCUMENTS:
        question = str(document["question"])
        context = list((f"s:S;u:{question};a:" if is_chat else question).encode())
        scores = [
            sum(log_likelihoods(model, [*context, *choice.encode()][-49:])[-len(choice.encode()) :])
            for choice in (choice if is_chat else f" {choice}" for choice in document["choices"])
        ]
        num_right += scores.index(max(scores)) == document["answer"]
        whole = question + document["choices"][document["answer"]]
        tokens = [256, *whole.encode()]
        for start in range(0, len(tokens) - 1, 48):  # each window has the longest context that leaves room
            stop = min(start + 48, len(tokens) - 1)
            window = tokens[max(0, stop - 48) : stop + 1]
            bits += sum(log_likelihoods(model, window)[start - stop :])
        num_bytes += len(whole.encode())
        room = 48 - 12
        stream = TextStream(model.tokenizer.decode, () if is_chat else context[-room:], ["!"])
        text = "".join(stream.pieces(generate_tokens(model, context[-room:], 12, Sampling())))
        num_exact += text == f" {document['choices'][0]} \N{EARTH GLOBE EUROPE-AFRICA}"
    assert results["capitals"]["acc,none"] == pytest.approx(num_right / 3)
    assert results["rolling"]["bits_per_byte,none"] == pytest.approx(-bits / num_bytes / 0.6931471805599453, rel=1e-5)
    assert results["continued"]["exact_match,none"] == pytest.approx(num_exact / 3)
    assert is_chat or (0 < num_right < 3 and num_exact == 1)


def test_examples_are_turns_and_a_refused_system_message_is_left_out(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from titan_launch.inference.evaluation import EvaluatedModel

    write_tasks(tmp_path)
    template, seen = tmp_path / "own.jinja", list[str]()
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    encode = EvaluatedModel.tok_encode

    def noted(self: EvaluatedModel, string: str, *arguments: Any, **options: Any) -> list[int]:
        seen.append(string)
        return encode(self, string, *arguments, **options)

    monkeypatch.setattr(EvaluatedModel, "tok_encode", noted)
    command = ["evaluate", str(run), "--tasks=continued", f"--include-path={tmp_path}", "--limit=1", "--num-fewshot=1"]
    for text, options in ((CHAT, []), (CHAT, ["--single-turn"]), (refusing + CHAT, ["--system=S"])):
        template.write_text(text)
        assert main([*command, "--chat", f"--template={template}", *options]) == 0
    examples = {str(document["question"]): document["choices"][0] for document in DOCUMENTS}
    question = str(DOCUMENTS[0]["question"])
    turns = "|".join(f"u:{re.escape(asked)};a: {first} .!;" for asked, first in examples.items())
    assert re.fullmatch(f"(?:{turns})u:{question};a:", seen[0])
    assert re.fullmatch(rf"u:.*{question};a:", seen[1], re.DOTALL) and seen[1].count(";") == 1
    assert re.fullmatch(f"(?:{turns})u:{question};a:", seen[2])
    assert "note: the chat template refuses system messages" in capsys.readouterr().err
    template.write_text("{{ raise_exception('nothing') }}")
    assert main([*command, "--chat", f"--template={template}"]) == 2
    assert "error: --chat: a document of a task is refused by the chat template (nothing)" in capsys.readouterr().err


def test_bad_requests_are_one_line_and_status_2(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks, own = write_tasks(tmp_path), str(run)
    for arguments, message in (
        ([own], "the following arguments are required: --tasks"),
        ([own, "--tasks=, "], "--tasks names no task"),
        ([own, f"--tasks={tasks}", "--include-path=no"], "--include-path no: there is no such folder"),
        ([own, f"--tasks={tasks}", "--out=no/results.json"], "error: no/results.json: there is no folder no"),
        ([own, f"--tasks={tasks}", f"--out={tmp_path}"], f"error: {tmp_path} is a folder; name a file"),
        (["no", f"--tasks={tasks}"], "error: no: there is no such folder"),
        ([own, f"--tasks={tasks}", "--batch-size=0"], "--batch-size: must be a whole number of at least 1"),
    ):
        assert main(["evaluate", *arguments]) == 2, arguments
        error = capsys.readouterr().err
        assert message in error and len(error.splitlines()) == 1, error


@pytest.mark.slow  # the tasks of the harness are read, and its model `hf` needs the package accelerate
def test_results_are_those_of_the_harness_on_the_folder(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from titan_launch.inference.evaluation import EvaluatedModel

    random_model("Llama 3.1, RoPE scaling", tmp_path, vocab_size=258, eos_token_id=256, bos_token_id=257)
    byte_level_tokenizer(tmp_path)
    theirs = HFLM(pretrained=str(tmp_path), device="cpu", batch_size=2)
    ours = EvaluatedModel(load(tmp_path), batch_size=3)

    def ask(kind: str, arguments: list[tuple[Any, ...]]) -> tuple[Any, Any]:
        requests = [Instance(kind, {}, given, 0) for given in arguments]
        return getattr(ours, kind)(requests), getattr(theirs, kind)(requests)

    pairs = [(str(d["question"]) * times, choice) for d in DOCUMENTS for choice in d["choices"] for times in (0, 1, 3)]
    for (score, is_greedy), (expected, expected_greedy) in zip(*ask("loglikelihood", pairs), strict=True):
        assert score == pytest.approx(expected, abs=1e-4) and is_greedy == expected_greedy
    texts = [(context * 2 + choice,) for context, choice in pairs]
    assert ask("loglikelihood_rolling", texts)[0] == pytest.approx(ask("loglikelihood_rolling", texts)[1], abs=1e-4)
    options = {"until": ["\n"], "max_gen_toks": 10, "do_sample": False}
    generated, expected_texts = ask("generate_until", [(context or "a", options) for context, _ in pairs])
    assert generated == expected_texts


@pytest.mark.slow
def test_chats_are_those_of_the_harness_on_the_folder(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from titan_launch.inference.evaluation import EvaluatedModel

    random_model("Llama 3.1, RoPE scaling", tmp_path, vocab_size=258, eos_token_id=256, bos_token_id=257)
    byte_level_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}" + CHAT.replace("!", "<end>"))
    theirs = HFLM(pretrained=str(tmp_path), device="cpu", batch_size=2)
    ours = EvaluatedModel(load(tmp_path, chat=ChatOptions()), batch_size=3)
    histories = [
        [{"role": "system", "content": "S"}, {"role": "user", "content": "a <end>"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}],
    ]
    contexts = []
    for history in histories:
        options = {"add_generation_prompt": history[-1]["role"] == "user"}
        contexts.append(ours.apply_chat_template(history, **options))
        assert contexts[-1] == theirs.apply_chat_template(history, **options)
    pairs = [Instance("loglikelihood", {}, (context, "an answer"), 0) for context in contexts]
    for (score, is_greedy), (expected, expected_greedy) in zip(
        ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True
    ):
        assert score == pytest.approx(expected, abs=1e-4) and is_greedy == expected_greedy
    kwargs = {"until": ["\n"], "max_gen_toks": 10, "do_sample": False}
    requests = [Instance("generate_until", {}, (context, kwargs), 0) for context in contexts]
    assert ours.generate_until(requests) == theirs.generate_until(requests)
