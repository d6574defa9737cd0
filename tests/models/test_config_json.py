"""`config.json` files: changed keys beside `transformers`, published files, and tables of keys beside its classes."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.models.mutations import FULL, LINEAR, LLAMA3, SLIDING, YARN, Case, Judge, bases, count
from tests.models.parity import CASES, VOCABULARY, random_model, read_model, round_trip, samples, tensors_of
from tests.models.published_configs import PUBLISHED_FILES
from titan_launch.core.errors import ConfigError
from titan_launch.models.decoder.huggingface_classes import FAMILIES, NEUTRAL, WITHOUT_EFFECT
from titan_launch.models.huggingface.config_json import arguments_of, read_folder_config
from titan_launch.models.huggingface.files import WeightsError

_SAMPLE, _ALL = 199, 1


@pytest.mark.parametrize(
    ("every", "model_type"),
    [
        pytest.param(every, model_type, marks=[pytest.mark.slow, pytest.mark.timeout(600)] if every == _ALL else [])
        for every in (_SAMPLE, _ALL)
        for model_type in FAMILIES
    ],
)
def test_a_changed_file_is_refused_by_name_or_computes_what_transformers_computes(every: int, model_type: str) -> None:
    numbers, wrong = count(model_type, every)
    assert wrong == [] and numbers["equal"] > 0 and numbers["refused"] > 0


EQUAL = "equal"
NAMED: dict[str, tuple[str, dict[str, Any], str]] = {
    "rope_scaling beside rope_parameters": (
        "Qwen 2.5",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": YARN},
        "rope_scaling = .*it differs from rope_parameters.*put all parameters into rope_parameters",
    ),
    "the same rope_scaling beside rope_parameters": (
        "Qwen 2.5",
        {"rope_parameters": {**YARN, "rope_theta": 1e4}, "rope_scaling": YARN},
        EQUAL,
    ),
    "rope_scaling beside the rope_parameters of Gemma 3": (
        "Gemma 3",
        {"rope_scaling": {**LINEAR, "factor": 4.0}},
        "rope_scaling = .*it differs from rope_parameters",
    ),
    **{
        f"is_causal of {model_type}": (case, {"is_causal": False}, "is_causal = false, which is not supported")
        for case, (model_type, _) in CASES.items()
    },
    "inner partial_rotary_factor": (
        "Phi-3",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "partial_rotary_factor": 1.0,
        },
        "rope_parameters.partial_rotary_factor = 0.5",
    ),
    "rope_interleave": ("DeepSeek-V3", {"rope_interleave": None}, "rope_interleave = null"),
    "no scaling of GPT-OSS": ("GPT-OSS", {"rope_parameters": {}}, EQUAL),
    "null for the scaling of GPT-OSS": ("GPT-OSS", {"rope_parameters": None}, "rope_parameters = null.*5.0"),
    "other names of GPT-2": (
        "GPT-2",
        {
            **dict.fromkeys(("n_embd", "n_layer", "n_head", "n_positions"), ...),
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
        },
        EQUAL,
    ),
    "two names of one key": ("GPT-2", {"hidden_size": 64}, "hidden_size = 64.*another name of n_embd, but n_embd = 32"),
    "per_layer_config": (
        "Llama 2",
        {"per_layer_config": {"0": {"intermediate_size": 24}}},
        r"per_layer_config = \{.*which is not a known key of LlamaForCausalLM",
    ),
    "sliding_window_pattern of Gemma 2": (
        "Gemma 2",
        {"sliding_window_pattern": 1},
        "sliding_window_pattern = 1, which is not a known key",
    ),
    "sliding_window_pattern of GPT-OSS": (
        "GPT-OSS",
        {"sliding_window_pattern": 1},
        "sliding_window_pattern = 1, which is not a known key",
    ),
    "_sliding_window_pattern": ("Gemma 3", {"_sliding_window_pattern": 2}, EQUAL),
    "attn_logit_softcapping of Gemma 3": (
        "Gemma 3",
        {"attn_logit_softcapping": 2.0},
        "attn_logit_softcapping = 2.0, which is not supported",
    ),
    "type without rope_type": (
        "Gemma 3",
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 8.0}},
        r'rope_scaling.type = "linear".*rope_type is "default"',
    ),
    **{
        f"{table['rope_type']} of Phi-3": (
            "Phi-3",
            {"rope_parameters": {**table, "rope_theta": 1e4}},
            f'rope_parameters.rope_type = "{table["rope_type"]}".*supported: default',
        )
        for table in (LINEAR, LLAMA3, YARN)
    },
    "swish": ("Llama 2", {"hidden_act": "swish"}, EQUAL),
    "windows in odd layers": (
        "Gemma 2",
        {"num_hidden_layers": 4, "layer_types": [FULL, SLIDING, FULL, SLIDING]},
        EQUAL,
    ),
    "windows after the first layers": (
        "Qwen 2.5, tied, windows",
        {"num_hidden_layers": 3, "max_window_layers": 1},
        EQUAL,
    ),
    "YaRN without the length of pre-training": (
        "Llama 2",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}, "max_position_embeddings": 16},
        EQUAL,
    ),
    "YaRN without the key that the class needs": (
        "Mixtral",
        {"head_dim": ..., "rope_parameters": {**YARN, "rope_theta": 1e4}},
        "computes YaRN for mixtral only if config.json has head_dim; add this key",
    ),
    "a null for truncate": ("Llama 2", {"rope_parameters": {**YARN, "truncate": None}}, "truncate = null"),
    "two lengths of pre-training": (
        "Llama, YaRN",
        {"original_max_position_embeddings": 8},
        "original_max_position_embeddings = 8.*rope_parameters has 16",
    ),
    "a list of other length": ("Gemma 2", {"layer_types": [FULL]}, "layer_types = .*2 entries .num_hidden_layers."),
    "no window for a layer that has one": (
        "Qwen 2.5",
        {"layer_types": [FULL, SLIDING]},
        "sliding_window = null.*layers with sliding_attention .layer_types. need",
    ),
    "no window where the class needs one": ("Gemma 2", {"sliding_window": None}, "sliding_window = null"),
    "the width of a rotated head": ("DeepSeek-V3", {"head_dim": 8}, "head_dim = 8.*qk_rope_head_dim require 4"),
    "true is not 1": ("Llama 2", {"pretraining_tp": True}, "pretraining_tp = true"),
    "a string of true": ("Llama 2", {"attention_bias": "x"}, 'attention_bias = "x"'),
    "an unknown key": (
        "Llama 2",
        {"hidden_sizes": 3},
        'hidden_sizes = 3, which is not a known key .* did you mean "hidden_size"',
    ),
    "an unknown key with null": (
        "Llama 2",
        {"residual_multiplier": None},
        "residual_multiplier = null, which is not a known key",
    ),
    "a padding token beyond the vocabulary": ("Llama 2", {"pad_token_id": VOCABULARY}, "pad_token_id = 61.*vocabulary"),
    "several keys": ("Llama 2", {"is_causal": False, "surprise": 1}, "surprise = 1.*is_causal = false"),
}
"""Changes of a case of `parity`, with the verdict: equal, or the error. `...` removes a key."""


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", NAMED)
def test_a_named_change(name: str, judge: Judge, tmp_path: Path) -> None:
    base, changes, expected = NAMED[name]
    model_type = CASES[base][0]
    changed = {**bases(model_type)[base], **copy.deepcopy(changes)}
    config = {key: value for key, value in changed.items() if value is not ...}
    if expected == EQUAL:
        assert judge.verdict(Case(model_type, base, (next(iter(changes)),), None, config)) == ("equal", "")
        return
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=expected):
        read_folder_config(tmp_path)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_tables_are_those_of_the_class(model_type: str) -> None:
    """A key, another name or a default that a release of `transformers` adds fails here first."""
    from transformers import CONFIG_MAPPING

    config_class, family = CONFIG_MAPPING[model_type], FAMILIES[model_type]
    defaults = config_class().to_dict()
    assert {*defaults, *config_class.attribute_map} <= family.known_keys
    assert config_class.attribute_map.items() <= family.aliases.items()
    assert defaults["pad_token_id"] == family.pad_token
    for key, value in family.neutral.items():
        assert defaults.get(key, value) == value
    tables = (NEUTRAL, WITHOUT_EFFECT, family.neutral, family.unused, family.aliases)
    of_features = [key for feature in family.features for key in feature.keys]
    assert len(of_features) == len({*of_features})
    overlapping = {"max_position_embeddings"}  # an other name in GPT-2, and without effect elsewhere
    once = [*of_features, *(key for table in tables for key in table if key not in overlapping)]
    assert len(once) == len({*once})


def test_padding_is_noted_and_trained(tmp_path: Path) -> None:
    """`transformers` gives the padding token's row no gradient from inputs. Classes without it get no note."""
    theirs = random_model("Llama 2", tmp_path, pad_token_id=5)
    note = "pad_token_id = 5: the embedding of this token is trained like any other; LlamaForCausalLM of transformers"
    assert read_folder_config(tmp_path).notes[0].startswith(note)
    ours, _ = read_model(tmp_path)
    tokens = torch.full((1, 4), 5)
    for model in (ours, theirs):
        result = model(tokens)
        getattr(result, "logits", result).sum().backward()
    assert not theirs.get_input_embeddings().weight.grad[5].any()
    assert ours.get_parameter("tok_embeddings.weight").grad[5].any()
    assert arguments_of({**bases("gpt2")["GPT-2"], "pad_token_id": 10**6})  # the class does not read it


@pytest.mark.parametrize("case", ["Qwen 3, tied", "GPT-2"])
def test_an_output_layer_beside_a_tied_embedding_must_equal_it(case: str, tmp_path: Path) -> None:
    """`transformers` ties the two if they are equal, and not otherwise."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    random_model(case, tmp_path)
    found, (tokens, _) = tensors_of(tmp_path), samples()
    embedding = next(name for name in found if re.search(r"embed_tokens|wte", name))
    save_file({**found, "lm_head.weight": found[embedding].clone()}, tmp_path / "model.safetensors")
    ours, _ = read_model(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)
    save_file({**found, "lm_head.weight": found[embedding] * 1.1}, tmp_path / "model.safetensors")
    message = f"lm_head.weight and {embedding} have different values, .*set tie_word_embeddings to false"
    with pytest.raises(ConfigError, match=message):
        read_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    ours, _ = read_model(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", ["Gemma 2", "Gemma 3", "GPT-OSS"])
def test_an_export_without_windows_runs_in_transformers(case: str, tmp_path: Path) -> None:
    """These classes make a mask with a window whether or not a layer has one."""
    from transformers import AutoModelForCausalLM

    number = CASES[case][1]["num_hidden_layers"]
    theirs, (tokens, _) = random_model(case, tmp_path / "hf", layer_types=[FULL] * number), samples()
    exported = round_trip(tmp_path / "hf", tmp_path)
    again = AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager").eval()
    torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, rtol=0, atol=1e-5)
    assert read_folder_config(exported).args == read_folder_config(tmp_path / "hf").args


@pytest.mark.parametrize(("repository", "config"), PUBLISHED_FILES.items(), ids=PUBLISHED_FILES)
def test_a_published_file_is_read(repository: str, config: Mapping[str, Any]) -> None:
    """`transformers` reads the same sizes, and the class of the file is the family's."""
    from transformers import CONFIG_MAPPING

    family = FAMILIES[config["model_type"]]
    args = arguments_of(config)
    theirs = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(dict(config)))
    assert config["architectures"] == [family.model_class]
    assert (args["dim"], args["n_layers"]) == (theirs.hidden_size, theirs.num_hidden_layers)
    assert args["vocab_size"] == theirs.vocab_size


def test_every_family_has_a_published_file() -> None:
    assert {config["model_type"] for config in PUBLISHED_FILES.values()} == FAMILIES.keys()
