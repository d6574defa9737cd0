"""Classifiers and reward models beside those of `transformers`: weights, logits of the last token, and exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.parity import CASES, random_model, read_model, round_trip, same_tensors, samples
from tests.packages import needs
from tests.sampling import rest_is_slow
from titan_launch.core.errors import ConfigError
from titan_launch.models.huggingface.config_json import read_folder_config
from titan_launch.models.huggingface.files import WeightsError

pytestmark = needs("transformers")


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits of each sequence, one sequence at a time, because the classes have no padding token."""
    found = [model(row[None]) for row in tokens]
    return torch.cat([out[:, -1] if isinstance(out, Tensor) else out.logits for out in found])


@pytest.mark.parametrize(
    ("case", "num_labels"), rest_is_slow([(case, 1 + index % 3) for index, case in enumerate(CASES)], 5)
)
def test_classifiers_are_those_of_transformers(tmp_path: Path, case: str, num_labels: int) -> None:
    from transformers import AutoModelForSequenceClassification

    names = {index: f"name {index}" for index in range(num_labels)}
    theirs = random_model(case, tmp_path / "theirs", AutoModelForSequenceClassification, id2label=names)
    ours, _ = read_model(tmp_path / "theirs")
    tokens, _ = samples()
    expected = logits_of(theirs, tokens)
    assert expected.shape == (3, num_labels)
    torch.testing.assert_close(logits_of(ours, tokens), expected, rtol=1e-5, atol=1e-5)
    exported = round_trip(tmp_path / "theirs", tmp_path)
    assert same_tensors(tmp_path / "theirs", exported)
    back, info = AutoModelForSequenceClassification.from_pretrained(exported, output_loading_info=True)
    assert not any(info.values()) and type(back) is type(theirs)
    assert back.config.id2label == names
    torch.testing.assert_close(logits_of(back.eval(), tokens), expected)


def test_a_new_output_layer_replaces_that_of_a_language_model(tmp_path: Path) -> None:
    """The weights of a language model begin a classifier if its output layer is excluded."""
    theirs = random_model("Llama 2", tmp_path / "theirs")
    args = {**read_folder_config(tmp_path / "theirs").args, "num_labels": 2}
    with pytest.raises(ConfigError, match=r"score\.weight"):
        read_model(tmp_path / "theirs", args=args)
    ours, weights = read_model(tmp_path / "theirs", args=args, exclude_from_weights=("output.weight",))
    state: dict[str, Any] = theirs.state_dict()
    assert ours.get_submodule("output").weight.shape == (2, 32) and "output.weight" not in weights.pieces
    assert torch.equal(ours.get_submodule("tok_embeddings").weight, state["model.embed_tokens.weight"])


@pytest.mark.parametrize("labels", ["abc", ["a", "b"], 3, {}], ids=str)
def test_names_of_labels_that_cannot_be_read(tmp_path: Path, labels: Any) -> None:
    random_model("Llama 2", tmp_path / "theirs")
    file = tmp_path / "theirs/config.json"
    config = json.loads(file.read_text()) | {"architectures": ["LlamaForSequenceClassification"], "id2label": labels}
    file.write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="id2label"):
        read_folder_config(tmp_path / "theirs")
