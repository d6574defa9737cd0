"""Weights of Hugging Face folders: parity of all families, the sizes of published models, and folders that are
refused."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.mutations import LLAMA3
from tests.models.parity import CASES, VOCABULARY, parity, random_model, read_model, same_tensors, samples, tensors_of
from tests.models.published_configs import PUBLISHED_FILES
from titan_launch.cli import main
from titan_launch.commands import parser
from titan_launch.config.loading.load import load_job
from titan_launch.core.errors import ConfigError
from titan_launch.core.files import CACHE_VARIABLE
from titan_launch.models.architectures import ALL_IN_ARGS, ARCHITECTURES, resolve_args
from titan_launch.models.decoder.args import DecoderArgs
from titan_launch.models.decoder.huggingface_classes import FAMILIES
from titan_launch.models.decoder.mixture_of_experts import balance_losses, choose
from titan_launch.models.decoder.table_args import ExpertArgs
from titan_launch.models.huggingface.config_json import arguments_of, config_of, differences, read_folder_config
from titan_launch.models.huggingface.files import WeightsError
from titan_launch.models.weights.folder import INDEX, Weights, WeightsFolder

pytest.importorskip("transformers")

JOB = """
[model]
weights = "hf"

[data]
kind = "synthetic"
vocab_size = 61
"""


@pytest.mark.parametrize("case", CASES)
def test_a_model_of_transformers_and_ours_are_equal(case: str, tmp_path: Path) -> None:
    found = parity(case, tmp_path)
    assert found.logits < 1e-5 and found.gradients < 1e-4 and found.comes_back


def test_every_family_has_a_case() -> None:
    assert {model_type for model_type, _ in CASES.values()} == FAMILIES.keys()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_published_sizes_are_expressed_as_transformers_reads_them(model_type: str) -> None:
    from transformers import AutoConfig

    name = FAMILIES[model_type].name
    for flavor in ARCHITECTURES[name].flavors:
        args = resolve_args(name, flavor, {})
        assert isinstance(args, DecoderArgs)
        config = config_of(name, args, "bfloat16", 4096)
        assert config.items() >= FAMILIES[model_type].neutral.items()
        assert resolve_args(name, ALL_IN_ARGS, arguments_of(config)).num_layers() == args.n_layers
        read = AutoConfig.for_model(**json.loads(json.dumps(config))).to_dict()  # it changes tables in place
        assert config_of(name, resolve_args(name, ALL_IN_ARGS, arguments_of(read)), "bfloat16", 4096) == config


PUBLISHED = {
    ("llama3", "8B"): PUBLISHED_FILES["meta-llama/Llama-3.1-8B"],
    ("qwen2", "0.5B"): PUBLISHED_FILES["Qwen/Qwen2.5-0.5B"],
    ("qwen3", "0.6B"): PUBLISHED_FILES["Qwen/Qwen3-0.6B"],
    ("qwen3_moe", "30B-A3B"): PUBLISHED_FILES["Qwen/Qwen3-30B-A3B"],
    ("mixtral", "8x7B"): PUBLISHED_FILES["mistralai/Mixtral-8x7B-v0.1"],
    ("gpt_oss", "20B"): PUBLISHED_FILES["openai/gpt-oss-20b"],
    ("mistral", "7B"): PUBLISHED_FILES["mistralai/Mistral-7B-v0.1"],
    ("gemma2", "2B"): PUBLISHED_FILES["google/gemma-2-2b"],
    ("gemma3", "1B"): PUBLISHED_FILES["google/gemma-3-1b-pt"],
    ("gpt2", "124M"): PUBLISHED_FILES["openai-community/gpt2"],
    ("phi3", "mini-4k"): PUBLISHED_FILES["microsoft/Phi-3-mini-4k-instruct"],
    ("olmo2", "7B"): PUBLISHED_FILES["allenai/OLMo-2-1124-7B"],
    ("deepseek_v3", "671B-A37B"): PUBLISHED_FILES["deepseek-ai/DeepSeek-V3"],
    ("deepseek_v3", "16B-A3B"): PUBLISHED_FILES["moonshotai/Moonlight-16B-A3B"],
}
"""Published files by model and flavor."""


NOTES = {
    "gpt2": "dropout is not applied: resid_pdrop = 0.1, embd_pdrop = 0.1, attn_pdrop = 0.1",
    **{
        name: f"pad_token_id = {token}: the embedding of this token is trained like any other; "
        f"{model_class} of transformers gives it no gradient from inputs"
        for name, token, model_class in (
            ("gemma2", 0, "Gemma2ForCausalLM"),
            ("gemma3", 0, "Gemma3ForCausalLM"),
            ("gpt_oss", 199999, "GptOssForCausalLM"),
            ("phi3", 32000, "Phi3ForCausalLM"),
            ("olmo2", 100277, "Olmo2ForCausalLM"),
        )
    },
}


@pytest.mark.parametrize(("name", "flavor"), PUBLISHED)
def test_a_published_config_is_the_flavor(name: str, flavor: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name, flavor]))
    found = read_folder_config(tmp_path)
    assert found.name == name and differences(resolve_args(name, flavor, {}), found) == []
    assert found.notes == ((NOTES[name],) if name in NOTES else ())


@pytest.mark.parametrize(
    ("name", "flavor", "changes", "message"),
    [
        ("qwen3_moe", "30B-A3B", {"mlp_only_layers": [0, 2]}, r"mlp_only_layers = \[0, 2\].* must be the first ones"),
        ("qwen3_moe", "30B-A3B", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2, which is not supported"),
        ("qwen3_moe", "30B-A3B", {"num_experts_per_tok": 129}, r"top_k \(129\) must not exceed num_experts"),
        ("mixtral", "8x7B", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1, which is not supported"),
        ("gpt_oss", "20B", {"swiglu_alpha": 1.5}, "swiglu_alpha = 1.5, which is not supported"),
        ("gpt_oss", "20B", {"quantization_config": {"quant_method": "mxfp4"}}, r"quantized .*Mxfp4Config\(dequantize"),
    ],
)
def test_experts_that_are_not_supported(name: str, flavor: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        arguments_of({**PUBLISHED[name, flavor], **changes})


def test_auxiliary_losses_are_those_of_the_job(tmp_path: Path) -> None:
    """A job may set other auxiliary losses than the folder, but not another number of chosen experts."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["mixtral", "8x7B"]))
    found, losses = read_folder_config(tmp_path), {"balance_loss": 0.5, "z_loss": 0.1}
    assert differences(resolve_args("mixtral", "8x7B", {"experts": losses}), found) == []
    args = resolve_args("mixtral", "8x7B", {"experts": {**losses, "top_k": 3}})
    assert differences(args, found) == [("experts.top_k", 3, 2)]
    args = resolve_args("mixtral", "8x7B", {"experts": {"selection_bias_rate": 0.001}})
    assert differences(args, found) == [("experts.selection_bias_rate", 0.001, None)]
    args = resolve_args("mixtral", "8x7B", {"experts": {"normalize": False}})
    assert isinstance(args, DecoderArgs)
    with pytest.raises(WeightsError, match=r"MixtralForCausalLM .* has no counterpart of model.args.experts.normalize"):
        config_of("mixtral", args, "float32", 64)


def test_the_balance_loss_and_that_of_transformers() -> None:
    """The relations in docs/how_to/mixtures_of_experts.md. Each layer and sequence prefers other experts."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    args, layers = ExpertArgs(num_experts=8, top_k=2, hidden_dim=8), 3
    torch.manual_seed(0)
    one = torch.randn(1, 32, 8) + torch.randn(8)

    def losses(router_outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        ours = [balance_losses(choose(logits, args)).mean() for logits in router_outputs]
        flat = tuple(logits.flatten(0, 1) for logits in router_outputs)
        return torch.stack(ours).sum(), load_balancing_loss_func(flat, args.num_experts, args.top_k)

    ours, theirs = losses([one])
    torch.testing.assert_close(theirs, args.top_k * ours)

    same = [one.repeat(4, 1, 1).requires_grad_() for _ in range(layers)]
    ours, theirs = losses(same)
    torch.testing.assert_close(theirs, args.top_k / layers * ours)
    gradients = torch.autograd.grad(args.top_k / layers * ours, same), torch.autograd.grad(theirs, same)
    torch.testing.assert_close(*gradients)

    different = [torch.randn(4, 32, 8) + torch.randn(4, 1, 8) for _ in range(layers)]
    ours, theirs = losses(different)
    choices = [choose(logits, args) for logits in different]
    f = torch.stack([F.one_hot(choice.experts, 8).sum(2).float().mean((0, 1)) for choice in choices]).mean(0)
    p = torch.stack([choice.scores.mean((0, 1)) for choice in choices]).mean(0)
    torch.testing.assert_close(theirs, 8 * (f * p).sum())
    assert theirs < 0.9 * args.top_k / layers * ours


class Counted(WeightsFolder):
    """A folder that counts the elements that are read."""

    num_read = 0

    def read_each(self, names: Sequence[str], start: Sequence[int], stop: Sequence[int]) -> Iterator[Tensor]:
        for part in super().read_each(names, start, stop):
            self.num_read += part.numel()
            yield part


@pytest.mark.parametrize("case", ["Qwen 3, experts", "Mixtral", "GPT-OSS", "GPT-2", "Phi-3"])
def test_a_rank_reads_only_its_part(case: str, tmp_path: Path) -> None:
    """If a head is divided over ranks, each reads the whole head. If parameters alternate in a tensor, a rank reads all
    of them."""
    random_model(case, tmp_path)
    model, found = read_model(tmp_path)
    folder = Counted(tmp_path)
    weights, generator = Weights(folder, found.pieces), random.Random(0)
    for name, parameter in model.named_parameters():
        for _ in range(3):
            stops = [generator.randint(1, size) for size in parameter.shape]
            offsets = [generator.randrange(stop) for stop in stops]
            lengths = [stop - offset for offset, stop in zip(offsets, stops, strict=True)]
            folder.num_read = 0
            part = weights.read(name, offsets, lengths)
            box = tuple(slice(offset, stop) for offset, stop in zip(offsets, stops, strict=True))
            assert torch.equal(part, parameter[box]) and part.shape == torch.Size(lengths)
            if found.pieces[name].rotary_width is None:
                assert folder.num_read <= part.numel() * found.pieces[name].step


@pytest.mark.parametrize(
    ("changes", "argument"),
    [({"qk_norm": True}, "qk_norm"), ({"norm": "batchnorm"}, "norm"), ({"full_attention_every": 2}, "sliding_window")],
)
def test_a_model_that_no_class_computes_is_not_written(changes: dict[str, Any], argument: str) -> None:
    window = {"sliding_window": 8} if argument == "sliding_window" else {}
    args = resolve_args("llama3", "debug", {**changes, **window})
    assert isinstance(args, DecoderArgs)
    with pytest.raises(
        WeightsError, match=f"LlamaForCausalLM of transformers has no counterpart of model.args.{argument} "
    ):
        config_of("llama3", args, "float32", 64)


@pytest.mark.parametrize("case", ["Qwen 3, tied", "DeepSeek-V3"])
def test_a_hugging_face_folder_is_exported_without_an_import(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--dtype` converts all tensors but the biases of the choice of experts."""
    random_model(case, tmp_path / "hf")
    config(auto_map={"AutoModelForCausalLM": "code.Model"})(tmp_path / "hf")
    imported = tmp_path / "an import"
    assert main(["import", str(tmp_path / "hf"), "--out", str(imported)]) == 0
    assert load_job(str(imported / "job.toml"), rules=()).config.job.name == "job", "a name has no spaces"
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert main(["import", str(tmp_path / "hf"), "--out", "."]) == 2
    assert "error: . is the working directory, which cannot be replaced; name another" in capsys.readouterr().err
    for name, options in (("plain", ["--format=plain"]), ("bf16", ["--dtype=bfloat16"])):
        assert main(["export", str(tmp_path / "hf"), "--out", str(tmp_path / name), *options]) == 0
    assert same_tensors(imported, tmp_path / "plain")
    original, rounded = tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "bf16")
    assert original.keys() == rounded.keys()
    exported = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert exported["torch_dtype"] == "bfloat16" and "auto_map" not in exported, "the export has no code"
    for name, tensor in original.items():
        kept = name.endswith("e_score_correction_bias")
        assert torch.equal(rounded[name], tensor if kept else tensor.to(torch.bfloat16))


def test_files_without_prefix_with_unused_tensors_and_a_tied_head_are_read(tmp_path: Path) -> None:
    """The published GPT-2 is such a file."""
    from safetensors.torch import save_file

    theirs = random_model("GPT-2", tmp_path)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors_of(tmp_path).items()}
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "lm_head.weight": tensors["wte.weight"].clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    ours, _ = read_model(tmp_path)
    tokens, _ = samples()
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)
    save_file({**tensors, "lm_head.weight": tensors["wte.weight"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lm_head.weight and wte.weight have different values, but the model"):
        read_model(tmp_path)


def test_a_second_predicted_token_is_not_read_but_selection_biases_must_be(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    theirs = random_model("DeepSeek-V3", tmp_path)
    found = {**tensors_of(tmp_path), "model.layers.61.eh_proj.weight": torch.ones(32, 64)}
    save_file(found, tmp_path / "model.safetensors")
    ours, _ = read_model(tmp_path)
    tokens, _ = samples()
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)
    bias = "model.layers.2.mlp.gate.e_score_correction_bias"
    save_file({name: tensor for name, tensor in found.items() if name != bias}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"1 missing: {bias}"):
        read_model(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "hf"
    random_model("Llama 3.1, RoPE scaling", path)
    return path


Change = Callable[[Path], object]


def config(**changes: Any) -> Change:
    """Return a function that changes keys of `config.json`; None removes a key."""

    def change(folder: Path) -> None:
        table = {**json.loads((folder / "config.json").read_text()), **changes}
        (folder / "config.json").write_text(json.dumps({key: v for key, v in table.items() if v is not None}))

    return change


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Change:
    """Return a function that changes the tensors of the file."""

    def apply(folder: Path) -> None:
        from safetensors.torch import save_file

        found = tensors_of(folder)
        change(found)
        save_file(found, folder / "model.safetensors")

    return apply


def index(**weight_map: str) -> Change:
    """Return a function that replaces the file by an index."""

    def apply(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "x.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "x.safetensors", **weight_map}}))

    return apply


def in_two_files(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write two tensors also into a second file, where one of them has another dtype. The index names one file for each
    tensor."""
    from safetensors.torch import save_file

    found = tensors_of(folder)
    index(**{Q: "y.safetensors"})(folder)
    save_file({Q: found[Q], K: found[K].to(dtype)}, folder / "y.safetensors")


def truncated(size: int) -> Change:
    """Return a function that keeps only the first bytes of the file."""
    return lambda folder: os.truncate(folder / "model.safetensors", size)


Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"

BAD: dict[str, tuple[Change, str]] = {
    "architecture": (
        config(model_type="bert"),
        'model_type "bert", which no built-in model .* known: llama, qwen2.*"huggingface"',
    ),
    "rope": (
        config(rope_parameters={"rope_type": "longrope", "factor": 4.0}),
        'rope_parameters.rope_type = "longrope"',
    ),
    "old_rope": (config(rope_parameters=None, rope_scaling={"type": "dynamic", "factor": 2}), 'rope_type = "dynamic"'),
    "rotates_a_part": (config(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "incomplete_rope": (config(rope_parameters={"rope_type": "llama3", "factor": 8.0}), "has no low_freq_factor, high"),
    "equal_rope_factors": (
        config(rope_parameters={**LLAMA3, "low_freq_factor": 4.0}),
        r"config.json has an impossible value in rope_parameters = .*: low_freq_factor .4.0. must be below high_freq",
    ),
    "rope_of_fast_pairs": (config(rope_parameters={**LLAMA3, "low_freq_factor": 8.0}), r"low_freq_factor .8.0. must"),
    "quantized": (config(quantization_config={"bits": 4}), "has quantization_config: quantized weights"),
    "activation": (config(hidden_act="gelu"), 'hidden_act = "gelu", which is not supported .supported: silu'),
    "wrong_type": (config(num_hidden_layers="2"), 'n_layers would be "2"'),
    "key_missing": (config(hidden_size=None), "config.json has no hidden_size$"),
    "odd_heads": (config(num_key_value_heads=3), "must be a multiple of n_kv_heads"),
    "no_json": (lambda folder: (folder / "config.json").write_text("{"), "config.json is not valid JSON"),
    "no_config": (lambda folder: (folder / "config.json").unlink(), "has no config.json; name a folder"),
    "missing": (config(num_hidden_layers=3), r"9 missing: model.layers.2.input_layernorm.weight.* and 1 more"),
    "unexpected": (config(num_hidden_layers=1), "9 unexpected: model.layers.1.input_layernorm.weight"),
    "shape": (config(intermediate_size=40), r"6 of another shape: .*gate_proj.weight \[48, 32\], not \[40, 32\]"),
    "vocabulary": (config(vocab_size=70), r"2 of another shape: model.embed_tokens.weight \[61, 32\], not \[70, 32\]"),
    "dtype": (
        tensors(lambda found: found.update({Q: found[Q].to(torch.float8_e4m3fn), K: found[K].int()})),
        f"2 of a dtype that is not supported: {Q} F8_E4M3, {K} I32",
    ),
    "truncated": (truncated(20_000), "model.safetensors is truncated or damaged"),
    "empty": (truncated(0), "model.safetensors is truncated or damaged"),
    "no_weights": (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "pickle": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "pytorch_model.bin: pickles, which can run code .* convert",
    ),
    "outside": (index(a="../y.safetensors"), r'names "../y.safetensors", which is not a \*.safetensors file in the'),
    "missing_shards": (index(a="y.safetensors", b="z.safetensors"), "it lacks 2 of its 3 files: y.safetensors, z"),
    "not_in_its_shard": (index(a="x.safetensors"), "x.safetensors lacks tensors that .* lists: a"),
    "in_two_files": (
        lambda folder: in_two_files(folder, torch.bfloat16),
        f"x.safetensors and y.safetensors both have {K}, with different shapes or dtypes; copy or download the",
    ),
    "fifo": (
        lambda folder: ((folder / "model.safetensors").unlink(), os.mkfifo(folder / "model.safetensors")),
        "model.safetensors cannot be read: not a regular file",
    ),
}
"""Damage to a good folder, and the error."""


def test_the_index_names_the_file_of_a_tensor_that_several_files_have(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "hf")
    in_two_files(tmp_path / "hf")
    found = WeightsFolder(tmp_path / "hf").tensors
    assert (found[Q].file, found[K].file) == ("y.safetensors", "x.safetensors")


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_is_one_error(
    case: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hf").mkdir()
    for file in folder.iterdir():
        Path("hf", file.name).write_bytes(file.read_bytes())
    Path("job.toml").write_text(JOB)
    change, message = BAD[case]
    change(Path("hf"))
    assert main(["check", "--config", "job.toml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith('error: job.toml:3: model.weights = "hf": ') and error.count("error") == 1
    assert main(["import", "hf", "--out", "out"]) == 2
    imported = capsys.readouterr().err
    assert imported.startswith("error: hf: ") and not any(Path(".").glob("out*"))
    for text in (error, imported):
        assert re.search(message, text.rstrip(), flags=re.DOTALL)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--model.args.vocab_size=64"], ""),
        (["--model.name=llama3"], ""),
        (["--model.exclude_from_weights=['output.*']"], ""),
        (["--model.exclude_from_weights=['output.*', 'head']"], 'exclude_from_weights.1 = "head": matches no tensor'),
        (["--model.args.vocab_size=60"], "vocab_size is 60 in this job, and 61 in hf; remove the key from the job"),
        (["--model.flavor=debug"], "dim is 256 in this job, and 32 in hf; remove the key from the job"),
        (["--model.name=qwen2"], 'model.name = "qwen2": hf holds the weights of llama3'),
        (["--model.name=qwen2", "--model.flavor=debug"], "holds the weights of llama3, not of qwen2"),
        (["--model.weights=no"], "there is no such folder; name a folder with config.json"),
        (
            ["--checkpoint.initial_load_path=outputs/x"],
            "names the initial weights, and so does checkpoint.initial_load_path",
        ),
    ],
)
def test_the_job_is_compared_with_the_folder(
    overrides: list[str],
    message: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hf").symlink_to(folder)
    Path("job.toml").write_text(JOB)
    status = main(["check", "--config", "job.toml", *overrides])
    error = capsys.readouterr().err
    assert (status, bool(error)) == ((2, True) if message else (0, False)) and message in error


def test_without_the_library_the_error_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(WeightsError, match=r"pip install 'titan-launch\[hf\]'"):
        WeightsFolder(folder)


def test_a_folder_is_checked_without_torch(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the model has been recorded."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    job = str(folder / "job.toml")
    code = (
        "import sys; from titan_launch.config.loading.load import load_job; from titan_launch.commands import parser;"
        f"job = load_job({job!r}); parser.check_weights(job);"
        f"assert job.config.model.args['vocab_size'] == {VOCABULARY}; print('torch' in sys.modules)"
    )
    (folder / "job.toml").write_text(JOB.replace('"hf"', json.dumps(str(folder))))
    parser.check_weights(load_job(job))
    assert [*(tmp_path / "cache").rglob("*")]
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found == "False\n"
