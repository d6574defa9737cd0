"""Exports of classes of `transformers`, compared with `save_pretrained`, and read again by both."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.distributed import run_ranks
from tests.inference.test_generation import byte_level_tokenizer
from tests.models.huggingface_folders import CONFIGS, VOCABULARY, needs_transformers
from tests.sampling import sampled
from tests.tensors import assert_equal
from titan_launch.config.sections.data import ImageData
from titan_launch.config.sections.model import ModelConfig
from titan_launch.core.errors import ConfigError
from titan_launch.data.images.transform import Transform
from titan_launch.inference.export import ExportOptions, export
from titan_launch.models.build import take_inventory
from titan_launch.models.huggingface import module as huggingface
from titan_launch.models.huggingface.files import GENERATION_FILE
from titan_launch.models.huggingface.image_processor import read_image_keys
from titan_launch.models.init import load_weights
from titan_launch.models.weights.folder import Weights, find_weights

pytestmark = needs_transformers

TOKENS = 16
_LLAMA = {key: value for key, value in CONFIGS["llama"].items() if key not in ("architectures", "model_type")}
_GPT = {"vocab_size": VOCABULARY, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_EXPERTS = {"num_local_experts": 12, "num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _class(name: str, model_type: str, table: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {**table, "architectures": [name], "model_type": model_type, **keys}


CLASSES: dict[str, dict[str, Any]] = {
    "vit": CONFIGS["vit"],  # other names of modules in files
    "gpt_neox": _class("GPTNeoXForCausalLM", "gpt_neox", _LLAMA),
    "apertus, with scalars": _class("ApertusForCausalLM", "apertus", _LLAMA),
    "gpt2": CONFIGS["gpt2"],
    "dinov2, gate and up in one tensor": _class(
        "Dinov2ForImageClassification", "dinov2", CONFIGS["vit"], use_swiglu_ffn=True
    ),
    "gemma": _class("GemmaForCausalLM", "gemma", _LLAMA, head_dim=8),
    "mixtral": _class("MixtralForCausalLM", "mixtral", {**_LLAMA, **_EXPERTS}),
    "bert": _class("BertLMHeadModel", "bert", _LLAMA, is_decoder=True),
    "resnet": CONFIGS["resnet"],
    "opt": _class("OPTForCausalLM", "opt", _LLAMA, ffn_dim=48, word_embed_proj_dim=32),
    "bloom": _class("BloomForCausalLM", "bloom", _GPT, hidden_size=32),
    "falcon": _class("FalconForCausalLM", "falcon", _LLAMA),
    "llama, tied, token 0 ends a text": _class(
        "LlamaForCausalLM", "llama", _LLAMA, tie_word_embeddings=True, eos_token_id=0
    ),
    "qwen3_moe": _class("Qwen3MoeForCausalLM", "qwen3_moe", {**_LLAMA, **_EXPERTS}, head_dim=8, decoder_sparse_step=1),
    "mamba": _class("MambaForCausalLM", "mamba", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}),
    "deepseek_v3": _class(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        {**_LLAMA, "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 10, "qk_rope_head_dim": 4},
        qk_nope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=12,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
    ),
    "bart, a decoder": _class(
        "BartForCausalLM",
        "bart",
        {"vocab_size": VOCABULARY, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4},
        decoder_ffn_dim=48,
    ),
}


DATA = ImageData(kind="images", path="photos", resize=10, crop=6, mean=0.4, std=(0.25,))


def _module(args: dict[str, Any]) -> Any:
    """Return a module of which no two tensors have equal values."""
    torch.manual_seed(0)
    module = huggingface.build(TOKENS, **args).eval()
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape) * 0.2 + 0.01)
    return module


def _state(module: Any) -> dict[str, Tensor]:
    """Return the state dict of a run, in which scalars are vectors of one."""
    return {name: tensor.clone() if tensor.ndim else tensor.view(1) for name, tensor in module.state_dict().items()}


def _export(module: Any, args: dict[str, Any], folder: Path, **options: Any) -> Path:
    from safetensors.torch import save_file

    (folder / "plain").mkdir(parents=True)
    save_file(_state(module), folder / "plain/model.safetensors")
    record: dict[str, Any] = {"model": {"name": "huggingface", "args": args}, "training": {"seq_len": TOKENS}}
    if "num_channels" in args:
        record["data"] = DATA.model_dump(exclude_none=True)
    if (folder / "new.json").exists():
        record["tokenizer"] = {"kind": "huggingface", "path": str(folder / "new.json")}
    (folder / "plain/config.json").write_text(json.dumps(record))
    export(folder / "plain", folder / "exported", ExportOptions(**options))
    return folder / "exported"


def _tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _find(folder: Path, args: dict[str, Any], **keys: Any) -> tuple[Any, Weights]:
    """Return a module without the values, and the weights of a folder for it."""
    module: Any = huggingface.build(TOKENS, **args).eval()
    model = ModelConfig(name="huggingface", args=args, weights=str(folder), **keys)
    return module, find_weights(model, take_inventory(module, ()), module.places_in_files)


def _read_in_parts(weights: Weights, values: dict[str, Tensor]) -> None:
    generator = random.Random(0)
    for name in weights.pieces:
        if values[name].ndim:
            first = [generator.randrange(size) for size in values[name].shape]
            ends = [generator.randint(a + 1, size) for a, size in zip(first, values[name].shape, strict=True)]
            part = values[name][tuple(map(slice, first, ends))]
            assert torch.equal(weights.read(name, first, part.shape), part), name


def _check_class(name: str, folder: Path) -> None:
    """Check the names and values of an export, and that both libraries read it."""
    import transformers

    args = CLASSES[name]
    module = _module(args)
    module.save_pretrained(folder / "theirs")
    exported = _export(module, args, folder, max_shard_size="20KB")
    assert len(list(exported.glob("model-*.safetensors"))) > 1
    assert_equal(_tensors(exported), _tensors(folder / "theirs"))
    ids = {key: value for key, value in args.items() if key.endswith("_token_id") and value is not None}
    assert json.loads((exported / GENERATION_FILE).read_text()).items() >= ids.items()
    cls = getattr(transformers, args["architectures"][0])
    loaded, report = cls.from_pretrained(exported, output_loading_info=True)
    assert not any(report[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys")), (name, report)
    inputs = torch.arange(TOKENS)[None] if "vocab_size" in args else torch.rand(1, 1, 6, 6)
    assert_equal(dict(loaded.state_dict()), dict(module.state_dict()))
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(inputs).logits, module(inputs).logits, rtol=1e-5, atol=1e-5)
    if "num_channels" in args:
        _check_images(exported)
    ours, weights = _find(exported, args)
    load_weights(ours, weights)
    assert_equal(dict(ours.state_dict()), dict(module.state_dict()))
    _read_in_parts(weights, module.state_dict())


def _check_images(exported: Path) -> None:
    """Compare the images that `transformers` prepares from an export with those of the run. The filters of both round
    pixels to whole numbers."""
    from PIL.Image import fromarray
    from transformers import AutoImageProcessor

    image = torch.randint(0, 256, (1, 20, 31), dtype=torch.uint8)
    processor = AutoImageProcessor.from_pretrained(exported)
    theirs = processor(fromarray(image[0].numpy()), return_tensors="pt").pixel_values
    transform = Transform(DATA, ("data",))
    ours = transform.normalized(transform.changed(image, 0, None)[None])
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1.01 / 255 / 0.25)
    assert read_image_keys(exported) == {"mean": [0.4], "std": [0.25], "resize": 10, "crop": 6}


def _refused(folder: Path, args: dict[str, Any], **keys: Any) -> str:
    try:
        load_weights(*_find(folder, args, **keys))
    except ConfigError as error:
        return " ".join(str(error).split())
    return ""


def _changed(folder: Path, name: str, tensors: dict[str, Tensor]) -> Path:
    from safetensors.torch import save_file

    (folder / name).mkdir()
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name / "model.safetensors")
    return folder / name


def _check_refusals(folder: Path) -> None:
    tied, mixture = CLASSES["llama, tied, token 0 ends a text"], CLASSES["mixtral"]
    module = _module(tied)
    tensors = _tensors(_export(module, tied, folder / "tied"))
    embedding = tensors["model.embed_tokens.weight"]
    same = _changed(folder, "same", {**tensors, "lm_head.weight": embedding.clone()})
    other = _changed(folder, "other", {**tensors, "lm_head.weight": embedding + 1})
    renamed = {"lm_head.weight" if name == "model.embed_tokens.weight" else name: t for name, t in tensors.items()}
    for weights in (same, _changed(folder, "head", renamed)):
        ours, found = _find(weights, tied)
        load_weights(ours, found)
        assert_equal(dict(ours.state_dict()), dict(module.state_dict()))
    assert _refused(other, tied) == (
        "model.weights: lm_head.weight and model.embed_tokens.weight have different values, but the model ties them "
        'to one tensor; set tie_word_embeddings to false in config.json, or exclude_from_weights = ["lm_head.weight"]'
    )
    assert not _refused(other, tied, exclude_from_weights=("lm_head.weight",))

    tensors = _tensors(_export(_module(mixture), mixture, folder / "mixture"))
    w1 = next(name for name in tensors if name.endswith("experts.3.w1.weight"))
    last = w1.replace(".3.", ".11.")
    without = {name: tensor for name, tensor in tensors.items() if name != w1}
    assert "cannot be computed from model.layers.0." in _refused(_changed(folder, "one less", without), mixture)
    renumbered = {last.replace("11", "12") if name == w1 else name: tensor for name, tensor in tensors.items()}
    assert "the numbers in their names have a gap" in _refused(_changed(folder, "a gap", renumbered), mixture)
    smaller = {name: t for name, t in tensors.items() if f"{w1.split('.w1')[0].split('.3')[0]}.11." not in name}
    refused = _refused(_changed(folder, "an expert less", smaller), mixture)
    assert "2 of another shape: model.layers.0.mlp.experts." in refused and "[11, " in refused, refused
    more = {**tensors, "model.layers.0.mlp.bias": torch.zeros(1)}
    assert "1 unexpected: model.layers.0.mlp.bias" in _refused(_changed(folder, "more", more), mixture)

    resnet = CONFIGS["resnet"]
    tensors = _tensors(_export(_module(resnet), resnet, folder / "resnet"))
    statistics = next(name for name in tensors if name.endswith("running_var"))
    del tensors[statistics]
    assert f"1 missing: {statistics}" in _refused(_changed(folder, "no statistics", tensors), resnet)


def _check_all(folder: Path, names: tuple[str, ...]) -> None:
    import transformers

    transformers.logging.disable_progress_bar()
    for index, name in enumerate(names):
        _check_class(name, folder / str(index))
    _check_refusals(folder)


@sampled("names", tuple(CLASSES), every=6)
def test_the_files_are_those_of_save_pretrained_and_other_tensors_are_refused(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    """In one process, because importing the library takes seconds."""
    run_ranks(_check_all, 1, tmp_path, names, timeout=300)


def test_an_export_has_the_tokenizer_of_the_run(tmp_path: Path) -> None:
    """The tokenizer has another name than the file beside it, and the run began without weights."""
    byte_level_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").rename(tmp_path / "new.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    with_code = {**settings, "auto_map": {"AutoTokenizer": ["code.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(with_code))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/rag.jinja").write_text("rag")
    args = _class("LlamaForCausalLM", "llama", _LLAMA, eos_token_id=None)
    exported = _export(_module(args), args, tmp_path)
    assert (exported / "tokenizer.json").read_text() == (tmp_path / "new.json").read_text()
    assert (exported / "additional_chat_templates/rag.jinja").read_text() == "rag"
    assert json.loads((exported / "tokenizer_config.json").read_text()) == settings
    for name in ("config.json", GENERATION_FILE):
        assert json.loads((exported / name).read_text())["eos_token_id"] == 256, name
    (tmp_path / "new.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("[]")
    result = export(tmp_path / "plain", tmp_path / "changed", ExportOptions())
    note = "note: the run's tokenizer files, which were copied to the folder, have an error, so config.json has no "
    assert f"{note}eos_token_id: tokenizer.path: is not a tokenizer.json of " in result
    note = "note: tokenizer_config.json must be a JSON object; the folder has an unchanged copy of this file"
    assert note in result
    (tmp_path / "new.json").unlink()
    note = f"note: the folder lacks the run's tokenizer, because {tmp_path}/new.json is not found; copy the tokenizer"
    assert note in export(tmp_path / "plain", tmp_path / "again", ExportOptions())
    record = json.loads((tmp_path / "plain/config.json").read_text()) | {"tokenizer": {"kind": "bytes"}}
    (tmp_path / "plain/huggingface").mkdir()
    (tmp_path / "plain/huggingface/config.json").write_text((exported / "config.json").read_text())
    (tmp_path / "plain/huggingface/tokenizer.json").write_text("{}")
    for kind in ("text", "tokens"):  # the tokens may have been made with the tokenizer of the weights
        record["data"] = {"kind": kind, "path": "a"}
        (tmp_path / "plain/config.json").write_text(json.dumps(record))
        export(tmp_path / "plain", tmp_path / kind, ExportOptions())
        assert (tmp_path / kind / "tokenizer.json").exists() == (kind == "tokens")
