"""Classes of `transformers` from a `config.json`: the module that is built, and errors of classes that cannot be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.models.huggingface_folders import CONFIGS, POSITIONS, VOCABULARY, needs_transformers, write_config
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import dump_job, load_job
from titan_launch.config.rules import first_problem
from titan_launch.config.sections.model import ModelConfig
from titan_launch.core.errors import ConfigError, Problem, format_key
from titan_launch.models.build import BuiltModel, build_model
from titan_launch.models.documents import check_documents, document_arguments
from titan_launch.models.factory import HostBuild
from titan_launch.models.host_values import HostValues
from titan_launch.models.huggingface import module as huggingface
from titan_launch.models.huggingface.args import label_names
from titan_launch.models.huggingface.config_json import read_folder_config
from titan_launch.models.huggingface.image_processor import FILE, read_image_keys
from titan_launch.models.weights.folder import find_weights
from titan_launch.train.model import inspect_model

TOKENS = 16


def test_a_job_takes_the_keys_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's own keys override those of the folder. A recorded job needs no folder."""
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "vit", "vit")
    (tmp_path / "job.toml").write_text(
        '[model]\nname = "huggingface"\npath = "vit"\nargs = { num_labels = 10, image_size = 8 }\n'
        '[data]\nkind = "images"\npath = "sklearn-digits"\n'
    )
    config = load_job("job.toml").config
    labels = {"id2label", "label2id"}
    expected = {key: value for key, value in CONFIGS["vit"].items() if key not in labels}
    assert config.model.args == {**expected, "num_labels": 10, "image_size": 8}
    (tmp_path / "config.json").write_text(dump_job(config))
    (tmp_path / "vit/config.json").unlink()
    assert load_job("config.json").config == config


def test_names_of_classes_have_the_order_of_the_folder(tmp_path: Path) -> None:
    """A new output layer may have any order. Class folders with other names are not compared."""
    names: dict[str, Any] = {"id2label": {"0": "dogs", "1": "cats"}}
    for name in ("cats", "dogs"):
        (tmp_path / "images" / name).mkdir(parents=True)
    images = {"kind": "images", "path": str(tmp_path / "images")}
    texts = {"kind": "classification", "path": __file__, "labels": ["cats", "dogs"]}
    vit: dict[str, Any] = {"name": "huggingface", "args": {**CONFIGS["vit"], **names}}
    keys = {"architectures": ["LlamaForSequenceClassification"], "vocab_size": 257, **names}
    folder = write_config(tmp_path / "llama", "llama", **keys)
    args = dict(read_folder_config(folder).args)
    llama: dict[str, Any] = {"name": "llama3", "flavor": "none", "args": args, "weights": folder}
    of_folders = "data.path: its class folder cats is class 0, which is dogs in model.args.id2label; rename the folders"
    of_labels = f'data.labels: must have the order of id2label in {folder}/config.json, ["dogs", "cats"]; or, for a new'
    jobs: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (vit, images, of_folders),
        ({**vit, "args": {**CONFIGS["vit"], "num_labels": 2, "id2label": None}}, images, ""),
        ({**vit, "args": CONFIGS["vit"]}, images, ""),
        (llama, texts, of_labels),
        (llama, {**texts, "labels": ["dogs", "cats"]}, ""),
        ({**llama, "exclude_from_weights": ["output.weight"]}, texts, ""),
    ]
    for model, data, message in jobs:
        problem = first_problem(JobConfig.model_validate({"model": model, "data": data}))
        found = "" if problem is None else f"{format_key(problem.key)}: {problem.reason}"
        assert found.startswith(message) and bool(found) == bool(message), found
        assert not found or ("exclude_from_weights" in found) == ("weights" in model), found
    assert label_names({"id2label": {"1": "cats"}}) == []


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"size": 224, "crop_pct": 0.875, "do_resize": True}, (256, 224)),  # as of ResNet
        ({"size": {"shortest_edge": 384}, "crop_pct": 0.95}, (384, 384)),
        ({"size": {"height": 224, "width": 224}}, (224, 224)),  # as of ViT
        ({"size": {"shortest_edge": 256}, "crop_size": {"height": 224}, "do_center_crop": True}, (256, 224)),
        ({"size": 256, "do_resize": False}, (None, None)),
        ({"size": "large"}, (None, None)),
    ],
)
def test_the_size_of_images_is_that_of_the_folder(keys: dict[str, Any], expected: object, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({**keys, "image_mean": [1, 0.5], "do_normalize": keys.get("size") != 256}))
    found = read_image_keys(tmp_path)
    assert (found.get("resize"), found.get("crop")) == expected
    assert found.get("mean") == (None if keys["size"] == 256 else [1.0, 0.5])


def test_images_are_normalized_as_the_weights_expect(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"image_mean": [0.4, 0.5], "image_std": [0.5, 0.5]}))
    args = {**CONFIGS["vit"], "id2label": None, "num_labels": 10}
    model = {"name": "huggingface", "args": args, "weights": str(tmp_path)}

    def problem(**keys: Any) -> Problem | None:
        data = {"kind": "images", "path": "sklearn-digits", "resize": 6, "crop": 6, **keys}
        return first_problem(JobConfig.model_validate({"model": model, "data": data}))

    found = problem()
    assert found is not None and found.key == ("data", "mean")
    assert found.reason.endswith("image_mean = [0.4, 0.5], but the default is 0.5; set [0.4, 0.5]")
    assert problem(mean=0.5) is None, "a job may set other values"


def _built(
    name: str, weights: str | None = None, seq_len: int = TOKENS, free_bytes: int = 2**34, **args: Any
) -> BuiltModel:
    config = ModelConfig(name="huggingface", args={**CONFIGS[name], **args}, weights=weights)
    return build_model(config, seq_len, HostBuild(0, free_bytes))


def _check_modules() -> None:
    llama = _built("llama")
    assert llama.blocks == ("model.layers.0", "model.layers.1")
    config: Any = llama.module.config
    assert config.use_cache is False and config._attn_implementation == "sdpa"
    qwen = _built("qwen2", weights="anywhere")  # only buffers are computed
    assert isinstance(qwen.initializer, HostValues)
    assert set(qwen.initializer.by_name) == {"model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"}
    inverse = 1e4 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(qwen.initializer.by_name["model.rotary_emb.inv_freq"], inverse)
    module: Any = qwen.module
    assert module.lm_head.weight is module.model.embed_tokens.weight and module.lm_head.weight.is_meta


def _found(name: str, weights: Path, exclude: tuple[str, ...] = (), **args: Any) -> set[str] | str:
    """Return the tensors of a model that a folder has, or the error."""
    built = _built(name, **args)
    model = ModelConfig(name="huggingface", weights=str(weights), exclude_from_weights=exclude)
    names: Any = built.module.places_in_files
    try:
        return set(find_weights(model, inspect_model(JobConfig(), built), names).pieces)
    except ConfigError as error:
        return " ".join(str(error).split())


DOCUMENTS = torch.tensor([[0] * 5 + [1] + [2] * 10, [7] * 16], dtype=torch.int32)
BOUNDS = ((0, 0, 5), (0, 5, 6), (0, 6, 16), (1, 0, 16))
"""The row, first token and last token + 1 of each document."""

_LLAMA = {key: value for key, value in CONFIGS["llama"].items() if key not in ("architectures", "model_type")}
PACKED: dict[str, tuple[dict[str, Any], str | None]] = {
    "llama": (CONFIGS["llama"], None),
    "gpt2": (CONFIGS["gpt2"], None),  # learned positions
    "sliding window": (
        {**_LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4},
        None,
    ),
    "experts, whose forward fails without values": (
        {**_LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 2},
        None,
    ),
    "masks from other positions": (
        {"architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": VOCABULARY, "hidden_size": 32}
        | {"word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 1, "num_attention_heads": 4},
        "which makes attention masks without position_ids",
    ),
    "no positions": (
        {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 4},
        "which takes no position_ids",
    ),
    "convolutions": (
        {**_LLAMA, "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "layer_types": ["conv"] * 2},
        "which has layers that mix documents (conv, convolution)",
    ),
}
"""Arguments of models, and the reason why each cannot separate documents, or None."""


def _check_documents() -> None:
    """Check that documents are computed as alone, or refused: whatever is refused is computed differently."""
    tokens = torch.randint(0, VOCABULARY, DOCUMENTS.shape, generator=torch.Generator().manual_seed(0))
    for name, (args, reason) in PACKED.items():
        with torch.device("meta"):
            on_meta = huggingface.build(TOKENS, **args)
        torch.manual_seed(0)
        model = huggingface.build(TOKENS, **args).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        with torch.no_grad():
            found = model(tokens, **document_arguments(on_meta, DOCUMENTS))
            alone = torch.cat([model(tokens[row, None, first:end]).logits for row, first, end in BOUNDS], 1)
        is_equal = torch.allclose(found.logits.flatten(0, 1), alone[0], rtol=1e-5, atol=1e-5)
        assert is_equal == (reason is None), name
        try:
            check_documents(on_meta, TOKENS, ("data", "packing"), "documents")
        except ConfigError as error:
            assert reason is not None and f'of transformers, {reason}; set packing = "concat"' in str(error), error
        else:
            assert reason is None, name


def _check_weights(folder: Path) -> None:
    for name, base in (("vit", None), ("gpt2", "transformer")):
        module: Any = huggingface.build(TOKENS, **CONFIGS[name])
        (getattr(module, base) if base else module).save_pretrained(folder / name)
    vit = set(_built("vit").module.state_dict())
    assert _found("vit", folder / "vit") == vit  # the files have names of earlier releases
    own = {name for name, _ in _built("gpt2").module.named_parameters()}
    assert _found("gpt2", folder / "gpt2") == own  # the files are those of the base model
    head = {"num_labels": 5, "id2label": None, "label2id": None}
    assert _found("vit", folder / "vit", **head) == (
        "model.weights: its tensors do not match the model: 2 of another shape: classifier.weight [3, 32], not "
        "[5, 32], classifier.bias [3], not [5] to skip tensors, name them in model.exclude_from_weights"
    )
    assert _found("vit", folder / "vit", ("classifier.*",), **head) == vit - {"classifier.weight", "classifier.bias"}
    assert "12 missing: transformer.h.2." in str(_found("gpt2", folder / "gpt2", n_layer=3))
    assert "unexpected: h.1." in str(_found("gpt2", folder / "gpt2", n_layer=1))


TWO = {"tensor_parallel_degree": 2}
ERRORS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "more than the memory": (
        {"name": "llama", "free_bytes": 1000},
        {},
        "GiB of host memory, but only 0.0 GiB are free; use a host with more memory, or set model.weights without",
    ),
    "an unknown type": (
        {"name": "llama", "model_type": "lama"},
        {},
        'has no such model_type; did you mean "llama"?',
    ),
    "remote code": (
        {"name": "llama", "model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Model"}},
        {},
        "has no such model_type: its class is code in the folder "
        "(auto_map), which is never run; use a class of transformers",
    ),
    "another kind of model": (
        {"name": "llama", "architectures": ["LlamaForSequenceClassification"]},
        {},
        "model.args.architectures: must name a language model (ForCausalLM) or an image classifier of transformers; "
        "the model_type llama has: LlamaForCausalLM",
    ),
    "quantized weights": (
        {"name": "llama", "quantization_config": {"quant_method": "fp8"}},
        {},
        "model.args.quantization_config: quantized weights cannot be trained; use the folder of the original weights",
    ),
    "a wrong value": (
        {"name": "llama", "hidden_size": "wide"},
        {},
        "model.args: LlamaConfig refuses these arguments: ",
    ),
    "long sequences": (
        {"name": "gpt2", "seq_len": POSITIONS + 1},
        {},
        f"training.seq_len: the model takes sequences of up to {POSITIONS} tokens (model.args.n_positions); set "
        f"{POSITIONS} or less",
    ),
    "no plan of tensor parallelism": (
        {"name": "gpt2"},
        TWO,
        "parallelism.tensor_parallel_degree: GPT2LMHeadModel of transformers has no plan for tensor parallelism; set "
        "tensor_parallel_degree = 1",
    ),
    "divided tokens": (
        {"name": "llama"},
        TWO,
        "parallelism.sequence_parallel: the forward of LlamaForCausalLM needs all tokens between its layers; set "
        "sequence_parallel = false",
    ),
    "another plan of tensor parallelism": (
        {"name": "llama", "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0},
        {**TWO, "sequence_parallel": False},
        "parallelism.tensor_parallel_degree: Phi3ForCausalLM divides modules in a way that is not supported: "
        "model.layers.*.self_attn.qkv_proj (colwise_gather_output) and 3 more; set tensor_parallel_degree = 1",
    ),
}
"""Arguments, `[parallelism]` and a part of the error."""


def _error(args: dict[str, Any], parallelism: dict[str, Any]) -> str:
    try:
        built = _built(**args)
        inspect_model(JobConfig.model_validate({"parallelism": parallelism}), built)
    except ConfigError as error:
        return str(error)
    return "no error"


def _check_all(folder: Path) -> list[str]:
    _check_modules()
    _check_documents()
    _check_weights(folder)
    return [_error(args, parallelism) for args, parallelism, _ in ERRORS.values()]


@needs_transformers
def test_modules_tensors_in_folders_and_classes_that_cannot_be_trained(tmp_path: Path) -> None:
    """In one process, because importing the library takes seconds."""
    for name, error in zip(ERRORS, run_ranks(_check_all, 1, tmp_path)[0], strict=True):
        assert ERRORS[name][2] in error, (name, error)


def test_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.models.auto.configuration_auto", None)  # its import fails
    with pytest.raises(ConfigError) as caught:
        _built("llama")
    assert "model.name: needs transformers, which cannot be imported (" in str(caught.value)
    assert "pip install 'titan-launch[hf]'" in str(caught.value)
