"""Layers against the formulas they implement."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.models import llama3_reference
from tests.models.test_attention import explicit_attention
from titan_launch.models.decoder.args import DecoderArgs
from titan_launch.models.decoder.layers import (
    Attention,
    BatchNorm,
    FeedForward,
    RotaryEmbedding,
    build_norm,
    rotary_frequencies,
)
from titan_launch.models.decoder.table_args import RopeScaling


def tiny_args(**overrides: Any) -> DecoderArgs:
    shape = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 24, "vocab_size": 30}
    return DecoderArgs.model_validate({**shape, **overrides})


# --- rotary embedding


@pytest.mark.parametrize("is_compiled", [False, True])
def test_rope_rotates_pairs_by_the_angles_of_their_positions(is_compiled: bool) -> None:
    rope = RotaryEmbedding(head_dim=8, max_seq_len=20, theta=100.0)
    x = torch.randn(2, 20, 3, 8)
    angles = torch.outer(torch.arange(20.0), 100.0 ** -(torch.arange(0, 8, 2) / 8))
    cos, sin = angles.cos(), angles.sin()
    turns = torch.stack((torch.stack((cos, -sin), -1), torch.stack((sin, cos), -1)), -2)  # [20, 4, 2, 2]
    turned = torch.einsum("tpij,bthpj->bthpi", turns, x.unflatten(-1, (4, 2))).flatten(-2)
    turn = torch.compile(rope, backend="eager", fullgraph=True) if is_compiled else rope
    torch.testing.assert_close(turn(x), turned)
    torch.testing.assert_close(turn(x[:, :7]), turned[:, :7])


def test_rope_rotates_in_float32_and_keeps_the_dtype() -> None:
    rope = RotaryEmbedding(head_dim=8, max_seq_len=9000, theta=500_000.0)
    x = torch.randn(1, 9000, 1, 8).bfloat16()
    assert torch.equal(rope(x), rope(x.float()).bfloat16())


def test_rope_refuses_longer_sequences() -> None:
    rope = RotaryEmbedding(head_dim=4, max_seq_len=8, theta=100.0)
    with pytest.raises(ValueError, match="9 tokens, but the rotary table has 8"):
        rope(torch.zeros(1, 9, 1, 4))


def test_rope_table_is_computed_after_the_meta_device() -> None:
    expected = RotaryEmbedding(head_dim=4, max_seq_len=8, theta=100.0)
    with torch.device("meta"):
        rope = RotaryEmbedding(head_dim=4, max_seq_len=8, theta=100.0)
    assert rope.table.is_meta and not rope.state_dict()
    rope.to_empty(device="cpu")
    rope.reset_parameters()
    assert torch.equal(rope.table, expected.table)


@pytest.mark.parametrize("name", llama3_reference.PUBLISHED)
def test_frequencies_of_published_models(name: str, reference: dict) -> None:
    head_dim, factor = llama3_reference.PUBLISHED[name]
    frequencies = rotary_frequencies(head_dim, 500_000.0, RopeScaling(factor=factor))
    torch.testing.assert_close(frequencies, torch.tensor(reference["frequencies"][name]), rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    ("head_dim", "theta", "arguments"),
    [
        (64, 10_000.0, {"factor": 40.0, "original_max_position": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}),
        (64, 150_000.0, {"factor": 32.0, "original_max_position": 4096, "truncate": False}),
        (16, 10_000.0, {"factor": 4.0, "original_max_position": 16, "mscale": 0.7, "mscale_all_dim": 0.3}),
        (16, 1e6, {"original_max_position": 64, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.5}),
    ],
)
def test_yarn_is_that_of_transformers(head_dim: int, theta: float, arguments: dict) -> None:
    """The first two are DeepSeek-V3's and GPT-OSS's."""
    transformers = pytest.importorskip("transformers")
    scaling = RopeScaling(kind="yarn", **arguments)
    theirs = {**arguments, "rope_type": "yarn", "rope_theta": theta, "factor": scaling.factor}
    theirs["original_max_position_embeddings"] = theirs.pop("original_max_position")
    config = transformers.LlamaConfig(head_dim=head_dim, rope_parameters=theirs)
    expected, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config)
    torch.testing.assert_close(rotary_frequencies(head_dim, theta, scaling), expected, rtol=2e-7, atol=0)
    table = RotaryEmbedding(head_dim, 8, theta, scaling).table
    torch.testing.assert_close(table[3, :, 0], (3 * expected).cos() * factor)


# --- attention and feed-forward


def test_attention_projects_turns_attends_and_projects() -> None:
    rope = RotaryEmbedding(head_dim=4, max_seq_len=7, theta=100.0)
    attention = Attention(tiny_args(dim=8, n_heads=2, n_kv_heads=1), window=None, rope=rope)
    x = torch.randn(3, 7, 8)
    q = rope((x @ attention.wq.weight.T).view(3, 7, 2, 4)).transpose(1, 2)
    k = rope((x @ attention.wk.weight.T).view(3, 7, 1, 4)).transpose(1, 2)
    v = (x @ attention.wv.weight.T).view(3, 7, 1, 4).transpose(1, 2)
    attended = explicit_attention(q, k, v).transpose(1, 2).reshape(3, 7, 8)
    torch.testing.assert_close(attention(x), attended @ attention.wo.weight.T)


def test_feed_forward_is_swiglu() -> None:
    layer = FeedForward(tiny_args(dim=4), hidden_dim=6)
    x = torch.randn(2, 3, 4)
    gate = x @ layer.w1.weight.T
    expected = (gate * torch.sigmoid(gate) * (x @ layer.w3.weight.T)) @ layer.w2.weight.T
    torch.testing.assert_close(layer(x), expected)


# --- norms


def test_build_norm_returns_the_layer_of_each_name() -> None:
    x = torch.randn(2, 3, 5) * 3 + 1
    kinds = ("rmsnorm", "layernorm", "batchnorm")
    norms = {kind: build_norm(tiny_args(norm=kind, batchnorm_momentum=0.25), 5) for kind in kinds}
    torch.testing.assert_close(norms["rmsnorm"](x), x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    torch.testing.assert_close(norms["layernorm"](x), F.layer_norm(x, (5,)))
    assert isinstance(norms["batchnorm"], nn.BatchNorm1d) and norms["batchnorm"].momentum == 0.25


def test_batch_norm_normalizes_channels_over_all_tokens() -> None:
    norm = BatchNorm(5, momentum=0.25)
    x = torch.randn(2, 3, 5) * 3 + 1
    mean, variance = x.mean((0, 1)), x.var((0, 1), correction=0)
    torch.testing.assert_close(norm(x), (x - mean) / (variance + norm.eps).sqrt())
    torch.testing.assert_close(norm.running_mean, 0.25 * mean)
    torch.testing.assert_close(norm.running_var, 0.75 + 0.25 * x.var((0, 1), correction=1))
    norm.eval()
    torch.testing.assert_close(norm(x), (x - norm.running_mean) / (norm.running_var + norm.eps).sqrt())


def _check_mixed_batch_norm(device: str) -> None:
    norm, exact = BatchNorm(6).to(device), BatchNorm(6).to(device)
    x = (torch.randn(4, 8, 6, device=device) * 2 + 1).bfloat16().requires_grad_()
    wide = x.detach().float().requires_grad_()
    upstream = torch.randn(4, 8, 6, device=device)
    y, expected = norm(x), exact(wide)
    (y.float() * upstream).sum().backward()
    (expected * upstream).sum().backward()
    assert y.dtype == x.dtype == x.grad.dtype == torch.bfloat16
    assert norm.running_mean.dtype == norm.weight.grad.dtype == torch.float32
    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(x.grad.float(), wide.grad, rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(norm.running_mean, exact.running_mean)


def test_batch_norm_takes_bfloat16_input_with_float32_parameters() -> None:
    _check_mixed_batch_norm("cpu")


@pytest.mark.gpu
def test_batch_norm_takes_bfloat16_input_with_float32_parameters_on_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    _check_mixed_batch_norm("cuda")


def test_batch_norm_as_a_unit_of_its_own(single_process_group: None) -> None:
    """FSDP2 does not warn about outputs that are views. Parameters and statistics stay fp32 between bf16 layers."""
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Sequential(nn.Linear(6, 6, bias=False), BatchNorm(6), nn.Linear(6, 6, bias=False))
    fully_shard(model[1], mesh=mesh, mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    dtypes: list[torch.dtype] = []
    model[1].register_forward_hook(lambda module, args, y: dtypes.extend([args[0].dtype, module.weight.dtype, y.dtype]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(2, 4, 6)).float().square().sum().backward()
    assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert model[1].running_mean.dtype == model[1].weight.grad.dtype == torch.float32
    assert model[1].running_mean.abs().sum() > 0
