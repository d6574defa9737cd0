"""Conversations: answers of several turns equal those of `transformers`, and the command ends, stops and refuses."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.corpora.test_chat import load as load_tokenizer
from tests.data.corpora.test_templates import FAMILIES, set_clock, write
from tests.distributed import run_ranks
from tests.inference.conftest import TEXT
from tests.inference.test_generation import CPU, byte_level_tokenizer, load
from tests.models.huggingface_folders import needs_transformers
from tests.models.parity import random_model
from tests.sampling import rest_is_slow
from tests.train.jobs import run_job, tiny_job
from titan_launch.cli import main
from titan_launch.data.tokenizers import train_tokenizer
from titan_launch.inference.chat_format import ChatOptions
from titan_launch.inference.conversation import Conversation
from titan_launch.inference.generation import Sampling, generate_tokens, token_sequence
from titan_launch.inference.language_model import LanguageModel, load_language_model
from titan_launch.inference.saved_model import open_saved_model
from titan_launch.models.architectures import resolve_args
from titan_launch.models.build import SPECS
from titan_launch.models.huggingface.config_json import read_folder_config
from titan_launch.models.huggingface.files import WeightsError

pytest.importorskip("jinja2")

REPO = Path(__file__).parents[2]

JOINED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}! {% endgeneration %}"
    "{% elif m.role == 'user' %}{{ m.content }},{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
"""A template whose text the run of the fixture continues. Answers end with a text that is no token."""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tokenizer in which frequent words are tokens."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizers") / "words"
    train_tokenizer(["\n\nUser: Hello there! What is 2+2? user assistant model Hi\n\n It is 4." * 9], 320, folder)
    return folder


ENDS = ("<|end|>", "<|im_end|>", "<end_of_turn>", "<|eot_id|>")


def write_model(name: str, case: str, words: Path, root: Path, **keys: Any) -> Path:
    """Write a random chat model with the template of a family. Its answers end at tokens of `generation_config.json`,
    of which some are ordinary ones, so that answers have several lengths."""
    folder = write(name, words, root)
    tokenizer = load_tokenizer(folder)
    size, named = tokenizer.vocab_size, FAMILIES[name].settings["eos_token"]
    ends = [tokenizer.encode_chat(end)[0][0] for end in {named, *ENDS} & {*tokenizer.special_tokens}]
    random_model(case, folder, **{"vocab_size": size, "max_position_embeddings": 2048, "eos_token_id": ends[0], **keys})
    generation = json.loads((folder / "generation_config.json").read_text())
    generation["eos_token_id"] = sorted({*ends, *range(20, 299, 9)})
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def load_chat(folder: Path, **options: Any) -> LanguageModel:
    return load_language_model(open_saved_model(folder), folder, CPU, chat=ChatOptions(**options))


MESSAGES = ("Hello there!", "What is 2+2?", " /no_think And 3+3?", "Bye")


@needs_transformers
@pytest.mark.parametrize(
    ("name", "case", "keys"),
    rest_is_slow(
        [
            ("llama3_1", "Llama 3.1, RoPE scaling", {}),
            ("qwen3", "Qwen 3", {}),
            ("phi3", "Llama 2", {}),
            ("mistral_v0_3", "Mistral 7B", {}),
            ("llama2", "GPT-2", {"n_positions": 2048}),
            ("gemma3", "Gemma 3", {}),
            ("gpt_oss", "GPT-OSS", {}),
        ],
        3,
    ),
)
def test_answers_of_several_turns_are_those_of_transformers(
    name: str, case: str, keys: dict[str, Any], words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kept keys and values, with none, and with the cache of a class of `transformers`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    set_clock(monkeypatch, "2024-07-26")
    folder = write_model(name, case, words, tmp_path, **keys)
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ours, fresh, system = load_chat(folder), load_chat(folder), None if name == "mistral_v0_3" else "Be brief."
    assert ours.end_tokens == {*theirs.generation_config.eos_token_id}
    messages = [] if system is None else [{"role": "system", "content": system}]
    lengths, num_kept = set[int](), [0, 0]
    with token_sequence(ours.module) as of_ours, token_sequence(theirs) as of_theirs:
        sequences = (of_ours, of_theirs)
        talks = [Conversation(replace(ours, module=sequence.module), sequence, system) for sequence in sequences]
        for text in MESSAGES:
            messages.append({"role": "user", "content": text})
            options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
            inputs = tokenizer.apply_chat_template(messages, **options)
            prompt = inputs["input_ids"][0].tolist()
            found: Any = theirs.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=0)
            answer = found[0, len(prompt) :].tolist()
            answer = answer[:-1] if answer[-1] in ours.end_tokens else answer
            messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
            assert list(generate_tokens(fresh, prompt, 24, Sampling())) == answer
            for index, (talk, sequence) in enumerate(zip(talks, sequences, strict=True)):
                given = talk.answer(text, 24, Sampling())
                assert "".join(given.pieces) == messages[-1]["content"] and talk.messages == messages
                assert given.num_tokens == len(prompt) and given.stream.num_tokens == len(answer)
                assert sequence.tokens in ([*prompt, *answer], [*prompt, *answer][:-1])
                num_kept[index] += sequence.num_kept
            lengths.add(len(answer))
    assert min(lengths) < 24 and num_kept[0] > 40, (lengths, num_kept)


@needs_transformers
def test_an_export_has_the_chat_format_of_the_run(
    words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run has trained a base model, whose folder has another tokenizer and no template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base, own = tmp_path / "base", write("qwen3", words, tmp_path)
    shutil.copytree(words, base)
    tokenizer = load_tokenizer(own)
    random_model("Llama 2", base, vocab_size=tokenizer.vocab_size, eos_token_id=5)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"prompt": "Hello there!", "response": "Hi"}) + "\n")
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}")
    template = str(tmp_path / "plain.jinja")
    job = tiny_job(tmp_path, checkpoint={"enable": True, "async_mode": "disabled"}, training={"steps": 1})
    known = read_folder_config(base)
    job["model"] = {"name": known.name, "flavor": known.flavor, "args": dict(known.args), "weights": str(base)}
    job["tokenizer"] = {"kind": "huggingface", "path": str(own)}
    job["data"] = {"kind": "chat", "path": str(tmp_path / "chats.jsonl"), "template": template}
    job["data"]["template_args"] = {"name": "value"}
    run_ranks(run_job, 1, job)
    assert main(["export", str(tmp_path / "tiny"), "--out", str(tmp_path / "exported")]) == 0
    assert "stores no data.template_args" in capsys.readouterr().out
    theirs = AutoTokenizer.from_pretrained(tmp_path / "exported")
    messages = [{"role": "user", "content": "Hello there!"}]
    tokens = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokens == load_chat(tmp_path / "tiny").encode_chat(messages)
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").generation_config
    assert config.eos_token_id == [5, *tokenizer.encode_chat("<|im_end|>")[0]]


def chat(monkeypatch: pytest.MonkeyPatch, typed: str, *arguments: str) -> int:
    """Run the command with lines of the standard input, which is no terminal."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    return main(["chat", *arguments])


ANSWER = " 世界 \N{EARTH GLOBE EUROPE-AFRICA}"


def test_a_piped_conversation(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second message continues the text of the first turn. The template ends an answer with a text."""
    (tmp_path / "joined.jinja").write_text(JOINED)

    def chat(typed: str, *options: str, status: int = 0) -> tuple[str, list[str]]:
        """Return what the command prints, and its lines about tokens and errors."""
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        assert main(["chat", str(run), f"--template={tmp_path}/joined.jinja", *options]) == status
        output = capsys.readouterr()
        assert output.err.startswith("model: ")
        return output.out, [line.partition(" in ")[0] for line in output.err.splitlines()[1:]]

    first, second = (len(text.encode()) for text in (f"Grüße,{ANSWER}", f"Grüße,{ANSWER}! Grüße,"))
    new = len(ANSWER.encode())
    printed, numbers = chat("Grüße\n\nGrüße\n/reset\nGrüße\n/quit\nGrüße\n")
    assert printed == f"{ANSWER}\n" * 3
    assert numbers == [
        f"prompt: 8 tokens; new: {new} tokens",
        f"prompt: {second} tokens ({first} cached); new: {new} tokens",
        f"prompt: 8 tokens (7 cached); new: {new} tokens",
    ]
    cut = (
        f"prompt: 8 tokens; new: {new} tokens",
        "note: the answer was cut after 4 tokens: increase --max-new-tokens to allow longer answers",
    )
    assert chat("üße\n", "--system=Gr", "--max-new-tokens=4") == (" 世\n", [cut[0].replace(f"{new}", "4"), cut[1]])
    assert chat("Grüße", "--stop=界")[0] == " 世\n"
    note = "note: the answer was cut after 9 tokens: the model takes at most 48 tokens; "
    note += "type /reset to begin a new conversation"
    assert note in chat(f"{TEXT}{TEXT[:-3]}\n")[1]
    error = "error: the conversation has 51 tokens, but the model takes at most 48, including the answer"
    error += "; shorten the message, or type /reset to begin a new conversation"
    assert error in chat(f"{TEXT}{TEXT}Grüß\n", status=2)[1]
    drawn = [chat("Grüße\n", "--temperature=3", "--top-k=50", f"--seed={seed}")[0] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert (
        main(["generate", str(run), f"--template={tmp_path}/joined.jinja", "--chat", "--prompt=üße", "--system=Gr"])
        == 0
    )
    output = capsys.readouterr()
    assert output.out == f"{ANSWER}\n" and f"prompt: 8 tokens; new: {new} tokens in" in output.err


def test_special_tokens_in_a_prompt_are_a_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The token that begins a text is not repeated."""
    random_model("Llama 2", tmp_path, vocab_size=258, eos_token_id=256)
    byte_level_tokenizer(tmp_path)
    model, plain = load(tmp_path), [257, *load(tmp_path).tokenizer.encode("Hi<end>")]
    assert model.encode("Hi<end>") == plain and len(plain) == 8
    for text in ("Hi<end>", "<begin>Hi<end>"):
        assert model.encode(text, has_special_tokens=True) == [*plain[:3], 256]
    for options, number in (([], 8), (["--special-tokens"], 4)):
        assert main(["generate", str(tmp_path), "--prompt=Hi<end>", "--max-new-tokens=1", *options]) == 0
        assert f"prompt: {number} tokens; new: " in capsys.readouterr().err


DATED = "{{ mood }} {{ strftime_now('%Y') }} {{ date_string }}|{% for m in messages %}{{ m.content }}{% endfor %}"


def test_the_template_is_that_of_the_options_the_run_the_tokenizer_or_the_weights(
    run: Path, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dated.jinja").write_text(DATED)
    Path("run").mkdir()
    Path("run/checkpoints").symlink_to(run / "checkpoints")
    record = json.loads((run / "config.json").read_text())
    chats = {"kind": "chat", "path": "chats.jsonl", "template": "dated.jinja", "template_args": {"mood": "glad"}}

    def text(data: dict[str, Any], **options: Any) -> str:
        Path("run/config.json").write_text(json.dumps({**record, "data": data}))
        template = load_chat(Path("run"), **options).template
        assert template is not None
        return template.prompt([{"role": "user", "content": "Hi"}])

    assert text(chats) == "glad 2024 |Hi"
    assert text({**chats, "date": "2025-06-28"}) == "glad 2025 28 Jun 2025|Hi"
    assert text({**chats, "date": "2025-06-28"}, date="2023-01-02") == "glad 2023 02 Jan 2023|Hi"
    assert text(chats, template_args={"mood": "sad"}) == "sad 2024 |Hi"
    assert text(chats, template="chatml") == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    two = {"kind": "mixture", "sources": [{**chats, "name": "a"}, {**chats, "name": "b", "template": "chatml"}]}
    with pytest.raises(WeightsError, match="several formats; choose the chat template with --template"):
        text(two)
    assert text(two, template="dated.jinja") == "glad 2024 |Hi"
    Path("dated.jinja").unlink()
    with pytest.raises(
        WeightsError, match=r"data.template: cannot read dated.jinja: No such file.*--template replaces"
    ):
        text(chats)

    folder = write_model("llama2", "Llama 2", words, tmp_path)
    assert load_chat(folder).template == load_chat(folder).template
    assert main(["import", str(folder), "--out", "imported"]) == 0
    for source in (folder, Path("imported")):
        template = load_chat(source).template
        assert template is not None and template.prompt([{"role": "user", "content": "Hi"}]) == "<s>[INST] Hi [/INST]"


def test_bad_requests_are_one_line_and_status_2(
    run: Path, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gemma = str(write_model("gemma2", "Llama 2", words, tmp_path))
    base = str(shutil.copytree(gemma, "base"))
    Path(base, "chat_template.jinja").unlink()
    Path("bad.jinja").write_text("a\n{% if %}")
    Path("picky.jinja").write_text("{% if messages[-1].content == 'a' %}{{ raise_exception('no a') }}{% endif %}b")
    Path("images").mkdir()
    Path("images/config.json").write_text(json.dumps({"model": {"name": "resnet", "flavor": "debug"}}))
    resnet = SPECS["resnet"].build(resolve_args("resnet", "debug", {}), 1)
    pytest.importorskip("safetensors.torch").save_file(resnet.state_dict(), "images/model.safetensors")
    own, chatml, task = str(run), "--template=chatml", "--tasks=capitals"
    for arguments, message in (
        (
            ["chat", own],
            f'error: {own}: --template: must be "chatml" or a Jinja file, because the tokenizer "bytes" has no chat ',
        ),
        (["chat", base], f'{base}: --template: must be "chatml" or a Jinja file, because {base} has no chat template'),
        (["chat", base, "--template=no.jinja"], "--template: cannot read no.jinja: No such file or directory; set"),
        (["chat", base, "--template=bad.jinja"], "--template: is not a Jinja template: line 2: "),
        (["chat", own, "--template=picky.jinja"], "the conversation is refused by the chat template (no a)"),
        (["chat", gemma, "--system=Be brief."], "refused by the chat template (System role not supported)"),
        (["chat", "images", chatml], "images: its model, resnet, takes images; give the folder of a language model"),
        (["chat", "no_such_folder"], "no_such_folder: there is no such folder"),
        (["chat", own, chatml], "the conversation has 51 tokens, but the model takes at most 48, including the answer"),
        (
            ["chat", own, chatml, "--template-arg=a"],
            "--template-arg: must be NAME=VALUE, such as enable_thinking=false",
        ),
        (["chat", own, chatml, "--template-arg=a=[1"], "--template-arg: a: not valid TOML"),
        (["chat", own, chatml, "--date=1 May"], '--date: must be a date, such as "2024-07-26", not "1 May"'),
        (["chat", own, chatml, "--top-p=0.5"], "--top-p has no effect at temperature 0"),
        (["chat", own, chatml, "--step=7"], "it has no checkpoint of step 7; steps: 28"),
        (["chat", own, chatml, "--chat"], "unknown option --chat"),
        (["generate", own, "--prompt=a", chatml], "--template has no effect without --chat; add --chat"),
        (["generate", own, "--prompt=a", "--chat", "--special-tokens"], "--special-tokens cannot be used with --chat"),
        (["evaluate", own, task, "--system=a"], "--system has no effect without --chat; add --chat"),
        (["evaluate", own, task, "--single-turn"], "--single-turn has no effect without --chat; add --chat"),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
        assert main(arguments) == 2, arguments
        error = capsys.readouterr().err
        assert message in error and error.count("error:") == 1 == len(error[error.index("error:") :].splitlines()), (
            error
        )
    for typed, place in (("say <end_of_turn>\n", "message 1"), ("Hi\nsay <end_of_turn>\n", "message 3")):
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        assert main(["chat", gemma, "--max-new-tokens=1"]) == 2
        sentence = "the conversation is a chat with the special token <end_of_turn> in a message"
        assert f"{sentence} ({place}, of the user)" in capsys.readouterr().err


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model that always answers "aaaa", without an end."""
    folder = tmp_path_factory.mktemp("endless")
    model = random_model("Llama 2", folder, vocab_size=258, eos_token_id=256, max_position_embeddings=100_000)
    byte_level_tokenizer(folder)
    (a,) = load(folder).tokenizer.encode("a")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(float("norm" in name or "embed" in name))
        model.get_output_embeddings().weight[a] = 1.0
    model.save_pretrained(folder)
    return folder


@contextmanager
def started(folder: Path, **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start the command on the endless model in a process of its own."""
    options = ["--template=chatml", "--max-new-tokens=90000", "--device=cpu"]
    command = [sys.executable, "-m", "titan_launch", "chat", str(folder), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"}
    with subprocess.Popen(command, cwd=REPO, env=environment, **streams) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_the_first_interrupt_on_a_terminal_stops_an_answer(endless: Path) -> None:
    """The conversation goes on, with the answer as far as it was. At the prompt, an interrupt ends the command."""
    ours, theirs = os.openpty()
    with started(endless, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = ""

        def read_up_to(mark: str) -> str:
            nonlocal shown
            while mark not in shown:
                shown += os.read(ours, 4096).decode()
            text, _, shown = shown.partition(mark)
            return text

        assert "/quit or Ctrl-D ends the chat; Ctrl-C stops an answer" in read_up_to("> ")
        lengths, prompts = [], []
        for _ in range(2):
            os.write(ours, b"Hello\n")
            read_up_to("aaaa")
            process.send_signal(signal.SIGINT)
            prompts.append(int(re.findall(r"prompt: (\d+) tokens", read_up_to("; new: "))[0]))
            lengths.append(int(read_up_to(" tokens in ")))
            read_up_to("> ")
        assert all(4 <= length < 90000 for length in lengths)
        assert prompts[1] == 2 * prompts[0] + lengths[0] + len("<|im_end|>\n")
        while process.poll() is None:  # Python's wait for a line misses a signal between the prompt and the wait
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
        assert process.returncode == 130
    os.close(ours)


@pytest.mark.slow
def test_an_interrupt_without_a_terminal_ends_the_command(endless: Path) -> None:
    with started(endless, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"Hello\nHello\n")
        process.stdin.flush()
        assert process.stdout.read(4) == b"aaaa"
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
