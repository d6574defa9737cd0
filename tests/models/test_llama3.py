"""Llama 3 compared with Hugging Face's, its formulas, and training under FSDP2."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.flop_counter import FlopCounterMode

from tests.models import llama3_reference
from titan_launch.config.architectures.llama3 import FLAVORS, Llama3Args, flops_per_token, num_parameters
from titan_launch.models.init import initialize
from titan_launch.models.layers import BatchNorm
from titan_launch.models.llama3 import SPEC, Llama3, initial_values
from titan_launch.models.loss import cross_entropy_sum

CPU = torch.device("cpu")
NORMS = ("rmsnorm", "layernorm", "batchnorm")


def tiny_args(**overrides: Any) -> Llama3Args:
    shape = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 24, "vocab_size": 30}
    return Llama3Args.model_validate({**shape, **overrides})


def tiny_model(seq_len: int = 16, seed: int = 0, **overrides: Any) -> Llama3:
    args = tiny_args(**overrides)
    model = Llama3(args, seq_len)
    initialize(model, initial_values(args), seed, CPU)
    return model


def test_logits_are_those_of_hugging_face(reference: dict[str, Any]) -> None:
    tokens = torch.tensor(llama3_reference.TOKENS)
    model = Llama3(Llama3Args.model_validate(llama3_reference.ARGS), max_seq_len=tokens.shape[1])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(llama3_reference.weight(name, parameter.shape))
        logits = model(tokens)
    torch.testing.assert_close(logits, torch.tensor(reference["logits"]), rtol=1e-4, atol=1e-4)


def test_module_names_are_torchtitans() -> None:
    names = set(tiny_model(n_layers=1).state_dict())
    layer = {f"layers.0.attention.{name}.weight" for name in ("wq", "wk", "wv", "wo")}
    layer |= {f"layers.0.feed_forward.{name}.weight" for name in ("w1", "w2", "w3")}
    layer |= {"layers.0.attention_norm.weight", "layers.0.ffn_norm.weight"}
    assert names == {"tok_embeddings.weight", *layer, "norm.weight", "output.weight"}


@pytest.mark.parametrize("flavor", FLAVORS)
def test_num_parameters_equals_the_number_of_the_models_parameters(flavor: str) -> None:
    args = Llama3Args.model_validate(FLAVORS[flavor])
    with torch.device("meta"):
        model = SPEC.build(args, 8)
    assert sum(p.numel() for p in model.parameters()) == num_parameters(args)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_num_parameters_with_other_norms_and_tied_embeddings(norm: str, tie_embeddings: bool) -> None:
    args = tiny_args(norm=norm, tie_embeddings=tie_embeddings)
    assert sum(p.numel() for p in Llama3(args, 8).parameters()) == num_parameters(args)


def test_published_sizes() -> None:
    sizes = {flavor: round(num_parameters(Llama3Args.model_validate(row)) / 1e6) for flavor, row in FLAVORS.items()}
    assert sizes == {"debug": 5, "1B": 1236, "3B": 3213, "8B": 8030, "70B": 70554, "405B": 405853}


def test_flops_of_8b_are_those_of_torchtitans_published_mfu() -> None:
    """TorchTitan publishes 5,762 tokens/s at 33.7 % of an H100's 989 TFLOP/s (sequence length 8192)."""
    flops = flops_per_token(Llama3Args.model_validate(FLAVORS["8B"]), 8192)
    assert 5762 * flops / 989e12 == pytest.approx(0.337, abs=1e-3)


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_flops_equal_those_that_torch_counts(tie_embeddings: bool) -> None:
    seq_len, args = 16, tiny_args(tie_embeddings=tie_embeddings)
    with torch.device("meta"):
        model, tokens = Llama3(args, seq_len), torch.zeros(2, seq_len, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            model(tokens).sum().backward()
    assert counter.get_total_flops() == tokens.numel() * flops_per_token(args, seq_len)


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_no_token_sees_a_later_one(norm: str) -> None:
    model = tiny_model(norm=norm)
    tokens = torch.randint(0, 30, (1, 16))
    changed = tokens.clone()
    changed[:, 10:] = (tokens[:, 10:] + 1) % 30
    torch.testing.assert_close(model(tokens)[:, :10], model(changed)[:, :10], rtol=0, atol=1e-6)


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_logits_start_near_a_standard_deviation_of_one(tie_embeddings: bool) -> None:
    tokens = torch.randint(0, 200, (4, 16))
    logits = tiny_model(dim=128, vocab_size=200, tie_embeddings=tie_embeddings)(tokens)
    logits.scatter_(-1, tokens[..., None], 0.0)  # a tied output gives the logit sqrt(dim) to the input token
    assert 0.8 < logits.std().item() < 1.2


def test_initial_values() -> None:
    model = tiny_model(dim=256, n_layers=8, norm="batchnorm")
    deep, shallow = (model.get_parameter(f"layers.{i}.attention.wo.weight") for i in (7, 0))
    assert model.tok_embeddings.weight.std().item() == pytest.approx(1, rel=0.05)
    assert shallow.std().item() == pytest.approx(0.02 / 2**0.5, rel=0.05)
    assert deep.std().item() == pytest.approx(0.02 / 16**0.5, rel=0.05)
    assert model.output.weight.std().item() == pytest.approx(256**-0.5, rel=0.05)
    assert model.output.weight.abs().max().item() <= 3 * 256**-0.5
    assert isinstance(model.norm, BatchNorm)
    assert torch.equal(model.norm.weight, torch.ones(256)) and torch.equal(model.norm.bias, torch.zeros(256))
    assert torch.equal(model.norm.running_mean, torch.zeros(256))
    assert torch.equal(model.norm.running_var, torch.ones(256))
    assert model.norm.num_batches_tracked.item() == 0


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_a_llama_trains_from_the_meta_device_under_fsdp(
    norm: str, tie_embeddings: bool, single_process_group: None
) -> None:
    """Build in fp32 on the meta device, shard, allocate and initialise. Loss and gradients are those of the plain
    model, and nothing warns about views."""
    args = tiny_args(norm=norm, tie_embeddings=tie_embeddings)
    plain = tiny_model(norm=norm, tie_embeddings=tie_embeddings)
    with torch.device("meta"):
        model = Llama3(args, 16)
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=CPU)
    initialize(model, initial_values(args), 0, CPU)
    tokens = torch.randint(0, 30, (2, 17))
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (plain, model):
            losses.append(cross_entropy_sum(each(tokens[:, :-1]), tokens[:, 1:]))
            losses[-1].backward()
    assert torch.equal(*losses)
    for (name, expected), (_, actual) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(actual.grad.full_tensor(), expected.grad, msg=name)


def test_rope_table_stays_float32_under_a_bfloat16_policy(single_process_group: None) -> None:
    model = tiny_model()
    mesh, policy = init_device_mesh("cpu", (1,)), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    seen: list[torch.dtype] = []
    model.rope.register_forward_hook(lambda module, args, y: seen.extend([module.table.dtype, args[0].dtype, y.dtype]))
    assert model(torch.zeros(1, 4, dtype=torch.int64)).dtype == torch.bfloat16
    assert set(seen[::3]) == {torch.float32} and set(seen[1::3]) == set(seen[2::3]) == {torch.bfloat16}
