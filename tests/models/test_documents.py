"""Documents in one sample: attention and positions are those of each document alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tensors import cross_entropy_sum
from titan_launch.core.errors import ConfigError
from titan_launch.models.architectures import resolve_args
from titan_launch.models.build import SPECS
from titan_launch.models.documents import check_documents, document_arguments, positions_in

DOCUMENTS = torch.tensor([[0] * 7 + [1] + [4] * 16, [3] * 24], dtype=torch.int32)
BOUNDS = ((0, 0, 7), (0, 7, 8), (0, 8, 24), (1, 0, 24))
"""The row, first token and last token + 1 of each document."""

MODELS: dict[str, dict[str, Any]] = {
    "llama3": {},
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5, "attention_soft_cap": 4.0},
    "gemma3": {"sliding_window": 5, "full_attention_every": 2},
    "gpt2": {"n_kv_heads": 4},
    "deepseek_v3": {
        "n_kv_heads": 4,
        "latent_attention": {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6},
        "experts": {"hidden_dim": 8, "balance_loss": 0.0},
    },
}


def test_positions_restart_where_the_number_changes() -> None:
    assert positions_in(DOCUMENTS).tolist() == [[*range(7), 0, *range(16)], [*range(24)]]
    assert positions_in(DOCUMENTS).dtype == torch.int32


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_each_document_alone(name: str) -> None:
    shape = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 24, "vocab_size": 30}
    torch.manual_seed(0)
    model = SPECS[name].build(resolve_args(name, "debug", {**shape, **MODELS[name]}), 24)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    tokens, targets = torch.randint(0, 30, (2, *DOCUMENTS.shape))

    logits = model(tokens, DOCUMENTS)
    found = torch.autograd.grad(cross_entropy_sum(logits, targets), list(model.parameters()))
    loss, sequences = torch.zeros(()), []
    for row, first, end in BOUNDS:
        sequences.append(model(tokens[row, None, first:end]))
        loss = loss + cross_entropy_sum(sequences[-1], targets[row, None, first:end])
    expected = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(logits.flatten(0, 1), torch.cat(sequences, 1)[0], rtol=1e-5, atol=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in expected)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * largest)


def test_the_module_in_the_docs_separates_documents() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how_to" / "bring_a_model.md").read_text()
    (source,) = [block for block in re.findall(r"^```python\n(.*?)^```", page, re.S | re.M) if "positions_in" in block]
    names: dict[str, Any] = {}
    exec(source, names)
    model = names["PackedEncoder"](dim=16, layers=2, vocab_size=30)
    check_documents(model, 24, ("data", "packing"), "documents")
    tokens = torch.randint(0, 30, DOCUMENTS.shape)
    alone = [model(tokens[row, None, first:end]) for row, first, end in BOUNDS]
    torch.testing.assert_close(model(tokens, DOCUMENTS).flatten(0, 1), torch.cat(alone, 1)[0], rtol=1e-5, atol=1e-5)


class Own(nn.Module):
    """A user's module that takes documents."""

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        return tokens if documents is None else documents


class Deaf(nn.Module):
    """A user's module that ignores unknown arguments."""

    def forward(self, tokens: Tensor, **kwargs: Any) -> Tensor:
        return tokens


def test_a_module_must_take_documents() -> None:
    check_documents(Own(), 24, ("data", "packing"), "documents")
    assert document_arguments(Own(), DOCUMENTS) == {"documents": DOCUMENTS}
    assert document_arguments(Own(), None) == {}
    with pytest.raises(ConfigError) as caught:
        check_documents(Deaf(), 24, ("data", "packing"), "documents")
    assert str(caught.value) == (
        "data.packing: needs forward(inputs, documents=None), but Deaf.forward has no argument documents; set "
        'packing = "concat"'
    )
