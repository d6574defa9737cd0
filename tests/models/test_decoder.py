"""Llama 3 compared with Hugging Face's, its formulas, and training under FSDP2."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.models import llama3_reference
from tests.tensors import cross_entropy_sum
from titan_launch.config.job import JobConfig
from titan_launch.models.architectures import resolve_args
from titan_launch.models.build import build_model
from titan_launch.models.decoder.args import DecoderArgs
from titan_launch.models.decoder.families import FAMILIES
from titan_launch.models.decoder.layers import BatchNorm
from titan_launch.models.decoder.module import SPECS, Decoder, llama_values
from titan_launch.models.decoder.table_args import RopeScaling
from titan_launch.models.init import initialize
from titan_launch.plan.experts import active_parameters
from titan_launch.train.model import plan_precision

CPU = torch.device("cpu")
NORMS = ("rmsnorm", "layernorm", "batchnorm")


def tiny_args(**overrides: Any) -> DecoderArgs:
    shape = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 24, "vocab_size": 30}
    return DecoderArgs.model_validate({**shape, **overrides})


def tiny_model(seq_len: int = 16, seed: int = 0, **overrides: Any) -> Decoder:
    args = tiny_args(**overrides)
    model = Decoder(args, seq_len)
    initialize(model, llama_values(args), seed, CPU)
    return model


def test_logits_are_those_of_hugging_face(reference: dict[str, Any]) -> None:
    tokens = torch.tensor(llama3_reference.TOKENS)
    model = Decoder(DecoderArgs.model_validate(llama3_reference.ARGS), max_seq_len=tokens.shape[1])
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


PUBLISHED = {
    "llama3": {
        "1B": 1_235_814_400,
        "3B": 3_212_749_824,
        "8B": 8_030_261_248,
        "70B": 70_553_706_496,
        "405B": 405_853_388_800,
    },
    "qwen2": {
        "0.5B": 494_032_768,
        "1.5B": 1_543_714_304,
        "3B": 3_085_938_688,
        "7B": 7_615_616_512,
        "14B": 14_770_033_664,
        "32B": 32_763_876_352,
        "72B": 72_706_203_648,
    },
    "qwen3": {
        "0.6B": 596_049_920,
        "1.7B": 1_720_574_976,
        "4B": 4_022_468_096,
        "8B": 8_190_735_360,
        "14B": 14_768_307_200,
        "32B": 32_762_123_264,
    },
    "qwen3_moe": {"30B-A3B": 30_532_122_624, "235B-A22B": 235_093_634_560},
    "mixtral": {"8x7B": 46_702_792_704, "8x22B": 140_620_634_112},
    "gpt_oss": {"20B": 20_914_757_184, "120B": 116_829_156_672},
    "mistral": {"7B": 7_241_732_096, "7B-v0.3": 7_248_023_552},
    "gemma2": {"2B": 2_614_341_888, "9B": 9_241_705_984, "27B": 27_227_128_320},
    "gemma3": {"1B": 999_885_952, "4B": 3_880_263_168, "12B": 11_766_034_176, "27B": 27_009_346_304},
    "gpt2": {"124M": 124_439_808, "355M": 354_823_168, "774M": 774_030_080, "1.5B": 1_557_611_200},
    "phi3": {"mini-4k": 3_821_079_552},
    "olmo2": {"1B": 1_484_916_736, "7B": 7_298_617_344, "13B": 13_716_198_400, "32B": 32_234_279_936},
    "deepseek_v3": {"16B-A3B": 15_960_108_544, "671B-A37B": 671_026_404_352},
}
"""Parameters of the published weights. (Of Gemma 3: of the language model.)"""


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_the_published_ones(family: str) -> None:
    sizes = {}
    for name, row in FAMILIES[family].items():
        args = DecoderArgs.model_validate(row)
        with torch.device("meta"):
            model = SPECS[family].build(args, 8)
        sizes[name] = sum(parameter.numel() for parameter in model.parameters())
        assert not [*args.problems(), *args.unused()]
    assert sizes.pop("debug") < 11e6
    assert sizes == PUBLISHED[family]


ACTIVE = {
    ("qwen3_moe", "30B-A3B"): 3.35,
    ("qwen3_moe", "235B-A22B"): 22.19,
    ("mixtral", "8x7B"): 12.88,
    ("mixtral", "8x22B"): 39.15,
    ("gpt_oss", "20B"): 3.61,
    ("gpt_oss", "120B"): 5.13,
}
"""Parameters in billions that compute a token. (The model card of GPT-OSS does not count the embedding.)"""


@pytest.mark.parametrize(("family", "flavor"), ACTIVE)
def test_active_parameters_are_the_published_ones(family: str, flavor: str) -> None:
    config = JobConfig.model_validate({"model": {"name": family, "flavor": flavor}})
    plan = plan_precision(config, build_model(config.model, 8))
    args = DecoderArgs.model_validate(FAMILIES[family][flavor])
    embedding = args.vocab_size * args.dim if family == "gpt_oss" else 0
    assert (active_parameters(config, plan) - embedding) / 1e9 == pytest.approx(ACTIVE[family, flavor], abs=0.005)


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


def test_initial_values_of_llama() -> None:
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


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_values_of_a_family(family: str) -> None:
    """Every tensor is filled, also if the arguments ask for all modules."""
    everything = {"qkv_bias": True, "attention_output_bias": True, "feed_forward_bias": True, "qk_norm": True}
    args = DecoderArgs.model_validate({**FAMILIES[family]["debug"], **everything, "post_norms": True})
    with torch.device("meta"):
        model = SPECS[family].build(args, 16)
    model.to_empty(device=CPU)
    initialize(model, SPECS[family].initializer(args), 0, CPU)
    values = {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    assert not any(tensor.isnan().any() for tensor in values.values())
    norms = {float(values[name].mean()) for name in values if name.endswith("norm.weight")}
    assert norms == {0.0 if args.norm_unit_offset else 1.0}
    assert all(not tensor.any() for name, tensor in values.items() if name.endswith("bias"))
    deviation = {name: float(tensor.std()) for name, tensor in values.items() if tensor.ndim > 1}
    if family == "llama3":
        return
    queries = "wq" if args.latent_attention is None else "wkv_a"
    assert deviation[f"layers.3.attention.{queries}.weight"] == pytest.approx(0.02, rel=0.05)
    into_stream = 0.02 / 12**0.5 if family == "gpt2" else 0.02
    assert deviation["layers.3.attention.wo.weight"] == pytest.approx(into_stream, rel=0.05)
    second = "feed_forward.w2.weight" if args.experts is None else "moe.experts.w2"
    assert deviation[f"layers.3.{second}"] == pytest.approx(into_stream, rel=0.05)
    if family == "gpt2":
        assert deviation["pos_embeddings.weight"] == pytest.approx(0.01, rel=0.05)
        assert torch.equal(values["pos_embeddings.rows"], torch.arange(1024))


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
        model = Decoder(args, 16)
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=CPU)
    initialize(model, llama_values(args), 0, CPU)
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


def test_a_table_of_another_kind_replaces_that_of_the_flavor() -> None:
    def scaling(flavor: tuple[str, str], **changes: Any) -> RopeScaling | None:
        args = resolve_args(*flavor, {"rope_scaling": changes})
        assert isinstance(args, DecoderArgs) and not list(args.unused())
        return args.rope_scaling

    yarn = {"kind": "yarn", "original_max_position": 4096, "truncate": False}
    assert scaling(("gpt_oss", "20B"), factor=4.0) == RopeScaling.model_validate({**yarn, "factor": 4.0})
    assert scaling(("gpt_oss", "20B"), kind="yarn") == RopeScaling.model_validate({**yarn, "factor": 32.0})
    assert scaling(("gpt_oss", "20B"), kind="linear", factor=2.0) == RopeScaling(kind="linear", factor=2.0)
    assert scaling(("llama3", "1B"), kind="llama3", low_freq_factor=2.0) == RopeScaling(
        kind="llama3", factor=32.0, low_freq_factor=2.0
    )
