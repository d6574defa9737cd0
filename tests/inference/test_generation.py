"""Text from trained models: equal to `transformers`, with and without a cache, and as the command prints it."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.inference.conftest import TEXT, text_job
from tests.models.huggingface_folders import CONFIGS, needs_transformers
from tests.models.parity import random_model
from tests.train.jobs import run_job
from titan_launch.checkpoint.index import read_weights
from titan_launch.cli import main
from titan_launch.core.import_string import FOLDERS_CHOOSE_NO_CODE
from titan_launch.data.tokenizers import ByteTokenizer
from titan_launch.inference.generation import (
    Sampling,
    TextStream,
    choose,
    generate_tokens,
    has_cache,
    probabilities,
    token_sequence,
)
from titan_launch.inference.language_model import LanguageModel, load_language_model
from titan_launch.inference.saved_model import open_saved_model
from titan_launch.models.architectures import resolve_args
from titan_launch.models.build import SPECS, recorded_model

CPU = torch.device("cpu")
NAMES = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<begin>", "eos_token": "<end>"}


def load(folder: Path, device: torch.device = CPU, **options: Any) -> LanguageModel:
    return load_language_model(open_saved_model(folder), folder, device, **options)


def byte_level_tokenizer(folder: Path) -> None:
    """Write the files of a tokenizer whose tokens are bytes. Token 256 ends a text, and token 257 begins it."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(dict(zip(alphabet, range(256), strict=True)), []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<begin>"])
    template = tokenizers.processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 257)])
    tokenizer.post_processor = template
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(NAMES))


@needs_transformers
@pytest.mark.parametrize(
    "case",
    [
        "Llama 3.1, RoPE scaling",
        "Qwen 3",
        "Qwen 3, experts",
        "Mixtral",
        "GPT-OSS",
        "Gemma 2",
        "Gemma 3",
        "GPT-2",
        "DeepSeek-V3",
    ],
)
def test_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """The sequences are longer than the sliding windows, and the logits with a cache are those without."""
    from transformers import AutoTokenizer

    theirs = random_model(case, tmp_path, vocab_size=258, eos_token_id=256)
    byte_level_tokenizer(tmp_path)
    model, new = load(tmp_path), 30
    prompt = model.encode("a prompt, 世界")
    assert prompt == AutoTokenizer.from_pretrained(tmp_path).encode("a prompt, 世界")
    expected: Any = theirs.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False, pad_token_id=256)
    tokens = list(generate_tokens(model, prompt, new, Sampling()))
    assert [*prompt, *tokens] == expected[0, : len(prompt) + len(tokens)].tolist()
    assert len(tokens) == new or expected[0, len(prompt) + len(tokens)] == 256
    sequence = torch.tensor([[*prompt, *range(new)]])
    pieces = [sequence[:, :7], *sequence[:, 7:30].split(1, dim=1), sequence[:, 30:]]
    whole = model.module(sequence)[0]
    other = [*sequence[0, :21].tolist(), *range(40, 60)]  # the cache is shortened, and grows
    whole_other = model.module(torch.tensor([other]))[0, -1]
    with torch.no_grad(), token_sequence(model.module, max_tokens=len(pieces)) as computed:
        cached = torch.stack([computed.extend(piece[0].tolist()) for piece in pieces])
        torch.testing.assert_close(cached, torch.cat([whole[6:30], whole[-1:]]), rtol=0, atol=1e-5)
        assert computed.continued_as(other) == other[21:] and computed.num_kept == 21
        torch.testing.assert_close(computed.extend(other[21:]), whole_other, rtol=0, atol=1e-5)


@needs_transformers
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("case", ["Llama 3.1, RoPE scaling", "GPT-OSS", "Gemma 2", "GPT-2"])
def test_a_gpu_generates_what_the_cpu_does(case: str, tmp_path: Path) -> None:
    random_model(case, tmp_path, vocab_size=258, eos_token_id=256)
    byte_level_tokenizer(tmp_path)
    on_cpu, on_gpu = load(tmp_path), load(tmp_path, device=torch.device("cuda"))
    prompt = on_cpu.encode("a prompt, 世界")
    tokens = [list(generate_tokens(model, prompt, 30, Sampling())) for model in (on_cpu, on_gpu)]
    assert tokens[0] == tokens[1]


class Smoothed(nn.Module):
    """A model of the user's own. It adds the mean of all earlier tokens to each, and has BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 8)
        self.norm = nn.BatchNorm1d(8)
        self.output = nn.Linear(8, 257)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embedding(tokens)
        x = x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return {"logits": self.output(self.norm(x.mT).mT)}


OWN = f"{__name__}:Smoothed"


@needs_transformers
def test_every_kind_of_model_generates_what_plain_pytorch_does(
    single_process_group: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with BatchNorm, a class of `transformers` with its own cache, and a model of the user without one. Each
    also answers in a chat."""
    pytest.importorskip("jinja2")
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    llama = {**CONFIGS["llama"], "vocab_size": 257, "max_position_embeddings": 48}
    models = [
        ({"args": {"norm": "batchnorm"}}, None, True),
        ({"name": "huggingface", "args": llama}, None, True),
        ({"name": OWN}, OWN, False),
    ]
    for number, (section, name, is_cached) in enumerate(models):
        folder = tmp_path / str(number)
        folder.mkdir()
        job = text_job(folder, optimizer={"lr": 1e-1})
        job["model"] = {**section, "args": {**job["model"]["args"], **section["args"]}} if not number else section
        run_job(job)
        run, prompt = folder / "tiny", [71, 114, 195]
        plain = recorded_model(run / "config.json").eval()
        plain.load_state_dict(dict(read_weights(run / "checkpoints" / "step-1")), strict=False)
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(12):
                outputs = plain(torch.tensor([tokens]))
                logits = outputs if isinstance(outputs, Tensor) else outputs["logits"]
                tokens.append(int(logits[0, -1].argmax()))
        model = load(run, model=name)
        assert has_cache(model.module) == is_cached
        assert list(generate_tokens(model, prompt, 12, Sampling())) == tokens[3:]
        options = ["--max-new-tokens=5", *(["--model", OWN] if name else [])]
        assert main(["generate", str(run), "--prompt=Gr", *options]) == 0
        assert ("the whole sequence is computed again for each token" in capsys.readouterr().err) != is_cached
        monkeypatch.setattr(sys, "stdin", io.StringIO("Gr\nGr\n"))
        assert main(["chat", str(run), f"--template={tmp_path}/own.jinja", *options]) == 0
        assert capsys.readouterr().err.count("\nprompt: ") == 2
    assert main(["generate", str(run), "--prompt=Gr"]) == 2
    assert f"its model is the factory {OWN}, and {FOLDERS_CHOOSE_NO_CODE}; add --model {OWN}" in capsys.readouterr().err


def test_a_run_prints_what_it_has_learned(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed(*options: str) -> str:
        assert main(["generate", str(run), *options]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    most = 48 - len("Grüße".encode())
    expected = (TEXT * 3).encode()[len("Grüße".encode()) :][:most].decode(errors="ignore")
    assert printed("--prompt=Grüße").rstrip("\n\ufffd") == expected
    assert printed("--prompt=Grüße", "--max-new-tokens=4") == ", \ufffd\n"
    assert printed("--prompt=Grüße", "--stop=\N{EARTH GLOBE EUROPE-AFRICA}!") == ", 世界 \n"
    (tmp_path / "prompt.txt").write_text("Grüße, 世", encoding="utf-8-sig")
    assert printed(f"--prompt-file={tmp_path}/prompt.txt", "--max-new-tokens=3") == "界\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("Grüß\nGrüße, \n"))
    assert printed("--max-new-tokens=3") == "e, \n世\n"
    assert main(["generate", str(run), "--prompt=Gr", "--max-new-tokens=2", "--dtype=bfloat16"]) == 0
    output = capsys.readouterr()
    assert output.out == "ü\n" and "prompt: 2 tokens; new: 2 tokens in " in output.err
    drawn = [printed("--prompt=Gr", "--temperature=3", "--top-k=50", f"--seed={seed}") for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_probabilities_are_those_of_the_definition() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.5])
    for sampling in (Sampling(0.7), Sampling(1.5, top_k=3), Sampling(1.0, top_p=0.8), Sampling(2.0, 4, 0.7)):
        weights = [float(torch.exp(logit / sampling.temperature)) for logit in logits]
        order = sorted(range(5), key=lambda token: -weights[token])[: sampling.top_k]
        total, kept, so_far = sum(weights[token] for token in order), [], 0.0
        for token in order:
            if so_far < sampling.top_p:
                kept.append(token)
                so_far += weights[token] / total
        mass = sum(weights[token] for token in kept)
        expected = torch.tensor([weights[token] / mass if token in kept else 0.0 for token in range(5)])
        torch.testing.assert_close(probabilities(logits, sampling), expected)
        generator = torch.Generator().manual_seed(0)
        drawn = torch.tensor([choose(logits, sampling, generator) for _ in range(2000)]).bincount(minlength=5) / 2000
        assert not drawn[expected == 0].any()
        torch.testing.assert_close(drawn, expected, rtol=0, atol=4 * 0.5 / 2000**0.5)
    for greedy in (Sampling(), Sampling(1.0, top_p=0.0), Sampling(1e-39), Sampling(1e-60)):
        assert probabilities(logits, greedy).tolist() == [0, 1, 0, 0, 0] and choose(logits, greedy) == 1


def test_a_stream_holds_back_parts_of_characters_and_of_stop_texts() -> None:
    decode = ByteTokenizer().decode

    def pieces(data: bytes, *stop: str) -> list[str]:
        stream, found = TextStream(decode, [97, 0xE4], stop), []
        for byte in data:
            found.append(stream.push(byte))
            if stream.is_stopped:
                return found
        return [*found, stream.close()]

    assert pieces("aü€🌍b".encode()) == ["a", "", "ü", "", "", "€", "", "", "", "🌍", "b", ""]
    assert pieces(b"a\xf0\x9f") == ["a", "", "", "\ufffd"]
    for data in (b"\xff\xff\xff\xffa\xe4", b"\xe4b\xb8\xad\xf0\x9f\x8cc", bytes(range(256))):
        assert "".join(pieces(data)) == decode(data)
    assert pieces(b"x\n\ny", "\n\n") == ["x", "", ""]
    assert "".join(pieces(b"x\ny\n", "\n\n")) == "x\ny\n"
    assert "".join(pieces(b"abcabd and more", "abd", "more")) == "abc"


def test_bad_requests_are_one_line_and_status_2(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record = json.loads((run / "config.json").read_text())
    folders: dict[str, dict[str, Any]] = {
        "images": {"model": {"name": "resnet", "flavor": "debug"}},
        "unknown": {"model": {"name": "lama3"}},
        "synthetic": {**record, "data": {"kind": "synthetic", "vocab_size": 61}},
        "code": {"model": {"name": "os:system"}},
        "opt": {"model_type": "opt"},
        "begun": record,
        "no_tokenizer": {"model": record["model"], "training": {"seq_len": 48}},
    }
    exported = tmp_path / "plain"
    assert main(["export", str(run), "--out", str(exported), "--format=plain"]) == 0
    for name, config in folders.items():
        Path(name).mkdir()
        (Path(name) / "config.json").write_text(json.dumps(config))
        if name != "begun":
            shutil.copyfile(exported / "model.safetensors", Path(name, "model.safetensors"))
    resnet = SPECS["resnet"].build(resolve_args("resnet", "debug", {}), 1)
    pytest.importorskip("safetensors.torch").save_file(resnet.state_dict(), "images/model.safetensors")
    prompt, own = ["--prompt=Gr"], str(run)
    for arguments, message in (
        (["no_such_folder", *prompt], "no_such_folder: there is no such folder"),
        ([".", *prompt], "it has no config.json"),
        (["begun", *prompt], "it has neither checkpoints nor *.safetensors"),
        (["images", *prompt], "its model, resnet, takes images; give the folder of a language model"),
        (["unknown", *prompt], 'its model.name is "lama3": unknown model; must be "llama3"'),
        (["unknown", *prompt], '"huggingface", or package.module:factory'),
        (["code", *prompt], f"{FOLDERS_CHOOSE_NO_CODE}; add --model os:system"),
        (["opt", *prompt], 'any other class trains with model.name = "huggingface"'),
        (["synthetic", *prompt], 'its model was trained on data.kind = "synthetic", which is not text'),
        (["no_tokenizer", *prompt], "it has no tokenizer.json"),
        ([own, *prompt, "--step=7"], "it has no checkpoint of step 7; steps: 28"),
        ([own, *prompt, "--ema"], "has no moving average"),
        ([own, *prompt, "--model=a:b"], "its model is llama3, not a:b; remove --model"),
        ([own, "--prompt-file=no.txt"], "--prompt-file no.txt: No such file or directory"),
        ([own, *prompt, "--prompt-file=no.txt"], "--prompt and --prompt-file are both set"),
        ([own, "--prompt=\udcff"], "the prompt is not UTF-8 text"),
        ([own, "--prompt="], "--prompt needs a value"),
        ([own, *prompt, "--max-new-tokens=0"], "--max-new-tokens: must be a whole number of at least 1"),
        ([own, *prompt, "--max-new-tokens=47"], "the prompt has 2 tokens, and --max-new-tokens is 47, but the model"),
        ([own, *prompt, "--max-new-tokens=47"], "takes 48 tokens at most; set --max-new-tokens to at most 46"),
        ([own, f"--prompt={'a' * 48}"], "the prompt has 48 tokens"),
        ([own, *prompt, "--temperature=-1"], '--temperature: must be a number of at least 0, not "-1"'),
        ([own, *prompt, "--temperature=nan"], '--temperature: must be a number of at least 0, not "nan"'),
        ([own, *prompt, "--top-p=1.5"], '--top-p: must be a number from 0 to 1, not "1.5"'),
        ([own, *prompt, "--top-p=0.5"], "--top-p has no effect at temperature 0"),
        ([own, *prompt, "--dtype=int8"], "--dtype: invalid choice"),
        ([own, *prompt, "--training.steps=3"], "unknown option --training.steps"),
    ):
        assert main(["generate", *arguments]) == 2, arguments
        error = capsys.readouterr().err
        assert message in error and error.count("error:") == 1 == len(error[error.index("error:") :].splitlines())
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert main(["generate", own]) == 2 and "the prompt is empty" in capsys.readouterr().err
