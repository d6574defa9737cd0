"""A tiny Hugging Face folder, and its hostile variants."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_launch.core.import_string import FOLDERS_CHOOSE_NO_CODE

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

_LAYER = {
    "self_attn.q_proj": (16, 16),
    "self_attn.k_proj": (16, 16),
    "self_attn.v_proj": (16, 16),
    "self_attn.o_proj": (16, 16),
    "mlp.gate_proj": (24, 16),
    "mlp.up_proj": (24, 16),
    "mlp.down_proj": (16, 24),
    "input_layernorm": (16,),
    "post_attention_layernorm": (16,),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (64, 16),
    **{f"model.layers.{layer}.{name}.weight": shape for layer in range(2) for name, shape in _LAYER.items()},
    "model.norm.weight": (16,),
    "lm_head.weight": (64, 16),
}

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def header_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the header of a file of fp32 tensors."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    return header


def write_file(path: Path, header: Any, num_bytes: int | None = None) -> None:
    """Write a safetensors file with zeros. `header`: a table, or bytes. `num_bytes`: of the tensors, which become a
    hole in the file."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if num_bytes is None:
        num_bytes = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + num_bytes)


def write_folder(folder: Path, config: Mapping[str, Any] = CONFIG) -> Path:
    """Write a folder that every command accepts."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_file(folder / FILE, header_of(SHAPES))
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{chr(ord("a") + index): 3 + index for index in range(26)}}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": index, "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False}
            for index, name in enumerate(("<unk>", "<s>", "</s>"))
        ],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


@dataclass(frozen=True)
class Hostile:
    """A change of the folder, and the sentence that each command ends with."""

    change: Callable[[Path], object]
    sentence: str
    others: Mapping[str, str | None]
    """Other sentences, by command; None if the command does not read the changed file."""


def _case(change: Callable[[Path], object], sentence: str, **others: str | None) -> Hostile:
    return Hostile(change, sentence, others)


def keys(**values: Any) -> Callable[[Path], object]:
    """Return a change of keys of `config.json`."""
    return lambda folder: (folder / "config.json").write_text(json.dumps({**CONFIG, **values}))


def _text(name: str, content: str | bytes) -> Callable[[Path], object]:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def _link(name: str, target: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return change


def _fifo(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def _folder(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return change


def _hole(name: str, num_bytes: int) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.truncate(num_bytes)

    return change


def _header(header: Any, num_bytes: int | None = None) -> Callable[[Path], object]:
    return lambda folder: write_file(folder / FILE, header, num_bytes)


def _index(weight_map: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / FILE).unlink()
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return change


def _bomb(folder: Path) -> None:
    tensors = (f'"{number:x}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for number in range(100_000))
    write_file(folder / FILE, f"{{{','.join(tensors)}}}".encode(), 0)


def _own(**model: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(json.dumps({"model": model}))


_HUGE = header_of({name: (2**36, 16) if name == "lm_head.weight" else shape for name, shape in SHAPES.items()})
_NOT_COPIED = dict.fromkeys(("check", "plan", "train", "generate"))
_NEITHER = "neither the format of Hugging Face nor"

CASES: dict[str, Hostile] = {
    "layers_without_tensors": _case(keys(num_hidden_layers=22), "has 22 layers, but its files have 21 tensors"),
    "layers_thousands": _case(keys(num_hidden_layers=900), "has 900 layers, but its files have 21 tensors"),
    "layers_million": _case(keys(num_hidden_layers=10**6), "num_hidden_layers = 1000000"),
    "layers_billion": _case(keys(num_hidden_layers=10**9), "num_hidden_layers = 1000000000"),
    "vocabulary": _case(keys(vocab_size=10**12), "vocab_size = 1000000000000"),
    "vocabulary_of_no_file": _case(keys(vocab_size=2**31), "of another shape"),
    "width": _case(keys(hidden_size=10**9), "hidden_size = 1000000000"),
    "width_of_no_file": _case(keys(hidden_size=2**20), "of another shape"),
    "heads": _case(keys(num_attention_heads=10**9), "num_attention_heads = 1000000000"),
    "head_width": _case(keys(head_dim=10**8), "head_dim = 100000000"),
    "hidden": _case(keys(intermediate_size=10**299), "intermediate_size = 1000"),
    "digits": _case(_text("config.json", '{"hidden_size": 1' + "0" * 5000 + "}"), "300 digits"),
    "rope_factor": _case(keys(rope_scaling={"rope_type": "linear", "factor": 0}), "greater than or equal to 1"),
    "rope_list": _case(keys(rope_scaling=[1]), "rope_scaling = [1]"),
    "rope_nested": _case(keys(rope_scaling={"rope_type": {"a": []}, "factor": 2}), "rope_scaling.rope_type"),
    "type_list": _case(keys(model_type=["llama"]), 'model_type ["llama"]'),
    "type_null": _case(keys(model_type=None), "model_type null"),
    "type_escape": _case(keys(model_type="\x1b[2J\nerror: x"), "\\u001b[2J"),
    "key_escape": _case(keys(**{"\x1b[2J\nerror: x": 1}), "\\x1b[2J\\nerror: x"),
    "many_keys": _case(keys(**{f"k{number}": 1 for number in range(100_000)}), "99,990 further unknown keys"),
    "long_key": _case(keys(**{"k" * 1_000_000: 1}), "kkk ... kkk"),
    "nan": _case(_text("config.json", '{"rms_norm_eps": NaN}'), "NaN is not a JSON value"),
    "infinity": _case(_text("config.json", '{"rms_norm_eps": Infinity}'), '{"__float__": "Infinity"}'),
    "deep": _case(_text("config.json", '{"a":' * 100_000), "64 nested"),
    "twice": _case(_text("config.json", '{"hidden_size": 1, "hidden_size": 2}'), "occurs twice"),
    "surrogate": _case(_text("config.json", '{"a": "\\ud800"}'), "surrogate"),
    "bytes": _case(_text("config.json", b"\xff\xfe{\0}\0"), "not UTF-8 text"),
    "empty": _case(_text("config.json", ""), "not valid JSON"),
    "list": _case(_text("config.json", "[]"), "must be a JSON object"),
    "no_keys": _case(_text("config.json", "{}"), "", generate="", export="", import_=""),
    "config_is_large": _case(_hole("config.json", 10**12), "larger than 4 MiB"),
    "config_is_fifo": _case(_fifo("config.json"), "not a regular file"),
    "config_is_folder": _case(_folder("config.json"), "config.json cannot be read: "),
    "config_is_zero": _case(_link("config.json", "/dev/zero"), "a link to a file outside of the folder"),
    "config_is_link": _case(_link("config.json", "/etc/hostname"), "a link to a file outside of the folder"),
    "config_is_itself": _case(_link("config.json", "config.json"), "config.json cannot be read"),
    "own_factory": _case(_own(name="os:system"), FOLDERS_CHOOSE_NO_CODE, import_="", export=""),
    "own_unknown": _case(_own(name="x" * 3), 'its model.name is "xxx": unknown model'),
    "own_types": _case(
        _own(name="llama3", flavor=["a"]),
        "its config.json does not come",
        check=_NEITHER,
        plan=_NEITHER,
        train=_NEITHER,
    ),
    "own_args": _case(_own(name="llama3", args={"dim": 10**9}), "dim", import_="", export=""),
    "file_is_missing": _case(lambda folder: (folder / FILE).unlink(), "it has neither"),
    "file_is_fifo": _case(_fifo(FILE), "model.safetensors cannot be read: not a regular file"),
    "file_is_folder": _case(_folder(FILE), "model.safetensors cannot be read"),
    "file_is_zero": _case(_link(FILE, "/dev/zero"), "a link to a file outside of the folder"),
    "file_is_itself": _case(_link(FILE, FILE), "model.safetensors cannot be read"),
    "file_is_empty": _case(_text(FILE, ""), "truncated or damaged"),
    "file_is_text": _case(_text(FILE, "version https://git-lfs.github.com/spec/v1"), "its first 8 bytes name a header"),
    "header_huge": _case(_text(FILE, (2**60).to_bytes(8, "little") + b"{}"), "1,152,921,504,606,846,976 bytes"),
    "header_not_in_file": _case(_text(FILE, (10**6).to_bytes(8, "little") + b"{}"), "truncated or damaged"),
    "header_list": _case(_header(b"[]", 0), "truncated or damaged"),
    "header_bomb": _case(_bomb, "100000 unexpected"),
    "header_deep": _case(_header(b'{"a":' * 10_000, 0), "truncated or damaged"),
    "header_metadata": _case(_header(b'{"__metadata__": {"a": 1}}', 0), "truncated or damaged"),
    "header_of_metadata": _case(
        _header({"__metadata__": {f"{number:06}": "" for number in range(180_000)}} | header_of(SHAPES), 25_920),
        "more than 1,048,576 characters of metadata",
    ),
    "header_overflow": _case(
        _header({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 0]}}, 0), "overflow"
    ),
    "header_of_zeros": _case(
        _header({"a": {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}}, 0), "a has the shape [0, 461"
    ),
    "header_dimensions": _case(
        _header({"a": {"dtype": "F32", "shape": [1] * 10**5, "data_offsets": [0, 4]}}, 4), "a has the shape [1, 1"
    ),
    "header_names": _case(_header(header_of({**SHAPES, "\x1b[2J\nerror: x": (1,)})), "\\x1b[2J\\nerror"),
    "header_dtype": _case(
        _header({name: {**row, "dtype": "I32"} for name, row in header_of(SHAPES).items()}), "dtype that is not"
    ),
    "tensor_of_terabytes": _case(_header(_HUGE), "model.safetensors cannot be mapped"),
    "index_list": _case(_index([]), "no table weight_map"),
    "index_numbers": _case(_index({"a": 1}), "no table weight_map"),
    "index_outside": _case(_index({"a": "../x.safetensors"}), "not a *.safetensors file in the folder"),
    "index_nul": _case(_index({"a": "a\0.safetensors"}), "of its 1 file: a\\x00.safetensors"),
    "index_lines": _case(_index({"a": "\nerror: \x1b.safetensors"}), "of its 1 file: \\nerror"),
    "index_long": _case(_index({"a": "a" * 5000 + ".safetensors"}), "of its 1 file: aaa"),
    "index_of_itself": _case(_index({"a": INDEX}), "not a *.safetensors file in the folder"),
    "index_of_many": _case(
        _index({f"a{n}": f"{n}.safetensors" for n in range(100_000)}), "it lacks 100,000 of its 100,000 files"
    ),
    "index_is_fifo": _case(
        lambda folder: [(folder / FILE).unlink(), os.mkfifo(folder / INDEX)], "index.json cannot be read: not a regular"
    ),
    "adapter": _case(_text("adapter_config.json", "{}"), "an adapter of peft"),
    "companion_is_link": _case(
        _link("vocab.json", "/etc/passwd"),
        "vocab.json cannot be copied: a link",
        check=None,
        plan=None,
        train=None,
        generate=None,
    ),
    "companion_is_fifo": _case(
        _fifo("merges.txt"),
        "merges.txt cannot be copied: not a regular",
        check=None,
        plan=None,
        train=None,
        generate=None,
    ),
    "companion_is_large": _case(
        _hole("tokenizer.model", 10**12),
        "cannot be copied: larger than 256 MiB",
        check=None,
        plan=None,
        train=None,
        generate=None,
    ),
}
"""Hostile variants, by name."""

_LOADS = "can load code or files by name"
CLASSES: dict[str, tuple[Mapping[str, Any], str]] = {
    "layers_million": ({"num_hidden_layers": 10**6}, "larger than in any real model; write 256"),
    "layers_billion": ({"num_hidden_layers": 10**9}, "larger than in any real model; write 256"),
    "vocabulary": ({"vocab_size": 10**12}, "larger than in any real model"),
    "labels": ({"num_labels": 10**9}, "larger than in any real model"),
    "experts": ({"num_local_experts": 10**6}, "larger than in any real model"),
    "nested": ({"text_config": {"num_hidden_layers": 10**6}}, "text_config.num_hidden_layers"),
    "list": ({"depths": [3, 10**9]}, "depths.1"),
    "type_unknown": ({"model_type": "lama"}, 'has no such model_type; did you mean "llama"?'),
    "type_list": ({"model_type": [1]}, "must be a string"),
    "type_of_code": ({"model_type": "own", "auto_map": {"AutoModel": "own.Own"}}, "code in the folder (auto_map)"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights cannot be trained"),
    "timm": ({"model_type": "timm_wrapper", "model_args": {"checkpoint_path": "/etc/passwd"}}, "is built by timm"),
    "timm_inside": ({"vision_config": {"model_type": "timm_wrapper"}}, "is built by timm"),
    "timm_arguments": ({"vision_config": {"model_args": {"checkpoint_path": "/etc/passwd"}}}, _LOADS),
    "backbone": ({"backbone": "hf-hub:a/b"}, _LOADS),
    "backbone_weights": ({"use_pretrained_backbone": True}, _LOADS),
    "kernels": ({"attn_implementation": "kernels-community/flash-attn"}, "names kernels on the hub"),
    "kernels_inside": ({"text_config": {"_attn_implementation": "a/b"}}, "names kernels on the hub"),
    "kernels_of_experts": ({"experts_implementation": "a/b"}, "names kernels on the hub"),
}
"""Keys of a `config.json` for `model.name = "huggingface"`, and the sentence that `check` ends with."""

ADAPTER: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj"],
    "exclude_modules": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "layers_pattern": None,
    "lora_dropout": 0.0,
    "bias": "none",
}


def write_adapter(folder: Path, **changes: Any) -> Path:
    """Write the adapters of `q_proj` in both layers of the folder."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({**ADAPTER, **changes}))
    modules = [f"base_model.model.model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
    shapes = {f"{module}.lora_{part}.weight": shape for module in modules for part, shape in _PARTS.items()}
    write_file(folder / "adapter_model.safetensors", header_of(shapes))
    return folder


_PARTS = {"A": (2, 16), "B": (16, 2)}


def _adapter(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / "adapter_config.json").write_text(json.dumps({**ADAPTER, **changes}))


_NEVER_ENDS = "(?:[a-z0-9_.]+)+!"

ADAPTERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "rank": (_adapter(r=10**9), "r: Input should be less than or equal to 1048576"),
    "alpha": (
        _text("adapter_config.json", '{"peft_type": "LORA", "r": 2, "lora_alpha": NaN}'),
        "NaN is not a JSON value",
    ),
    "types": (_adapter(rank_pattern=[1]), "rank_pattern: Input should be a valid dictionary"),
    "pattern_ends_never": (_adapter(target_modules=_NEVER_ENDS), "take too long to match"),
    "rank_pattern_ends_never": (_adapter(rank_pattern={_NEVER_ENDS: 2}), "take too long to match"),
    "exclusion_ends_never": (_adapter(exclude_modules=_NEVER_ENDS), "take too long to match"),
    "pattern_is_long": (_adapter(target_modules="a" * 10**6), "more than 10000 characters"),
    "pattern_nests": (_adapter(target_modules="(" * 4000), "is not a valid regular expression"),
    "pattern_repeats": (_adapter(target_modules="a{99999999999999999999}"), "is not a valid regular expression"),
    "many_names": (_adapter(target_modules=[f"m{n}" for n in range(200_000)]), "peft ignores the tensors of"),
    "many_keys": (_adapter(**{f"k{n}": 1 for n in range(100_000)}), "a key that this package does not know"),
    "key_escape": (_adapter(**{"\x1b[2J\nerror: x": 1}), "\\x1b[2J\\nerror: x"),
    "config_is_fifo": (_fifo("adapter_config.json"), "not a regular file"),
    "config_is_link": (_link("adapter_config.json", "/etc/hostname"), "a link to a file outside of the folder"),
    "file_is_fifo": (_fifo("adapter_model.safetensors"), "not a regular file"),
    "file_is_text": (_text("adapter_model.safetensors", "x" * 100), "is no safetensors file, or is damaged"),
    "file_is_link": (_link("adapter_model.safetensors", "/dev/zero"), "a link to a file outside of the folder"),
}
"""Hostile variants of a folder of adapters, and the sentence that `train` ends with."""
