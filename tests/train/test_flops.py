"""The FLOPs of jobs: against the formulas of papers, against PyTorch's counter, and against published figures."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.sampling import rest_is_slow
from tests.train.jobs import TINY_ARGS
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig
from titan_launch.models.architectures import resolve_args
from titan_launch.models.build import build_model
from titan_launch.models.decoder.args import DecoderArgs
from titan_launch.models.decoder.families import FAMILIES
from titan_launch.plan.layout import plan_layout
from titan_launch.plan.memory.recordings import Recordings
from titan_launch.plan.step_time import Flops
from titan_launch.trace.recorder import TorchRecorder
from titan_launch.train import flops
from titan_launch.train.batches import build_data
from titan_launch.train.flops import flops_of_job, flops_of_run
from titan_launch.train.model import build_job_model, plan_precision

SEQ_LEN, LAYERS, DIM, VOCABULARY = 16, 4, TINY_ARGS["dim"], TINY_ARGS["vocab_size"]
LLAMA = {"args": {**TINY_ARGS, "n_layers": LAYERS}}
IMAGES = {"data": {"kind": "images"}, "tokenizer": {}}
MODES = [{"mode": "none"}, {"mode": "full"}, {"mode": "selective"}, {"mode": "selective", "selective_ac_option": 2}]


def job(model: dict[str, Any] = LLAMA, **sections: Any) -> JobConfig:
    training = {"seq_len": SEQ_LEN, **sections.pop("training", {})}
    sections = {"data": {"kind": "synthetic", "vocab_size": 8}, **sections}
    return JobConfig.model_validate({"model": model, "training": training, **sections})


def weights_of(module: nn.Module, of: str = "") -> int:
    """Return the weights of the matrices whose path contains `of`."""
    return sum(p.numel() for name, p in module.named_parameters() if p.dim() == 2 and of in name)


@pytest.mark.parametrize("family", rest_is_slow(list(FAMILIES)))
def test_a_decoder_counts_by_the_formula_of_palm(family: str) -> None:
    """6 for each weight that is multiplied with a token, and 6 (Q + V) for each pair of tokens, or of a token and its
    window (arXiv:2204.02311, appendix B)."""
    config = job({"name": family, "flavor": "debug"}, training={"seq_len": 128})
    args, module = resolve_args(family, "debug", {}), build_model(config.model, 128).module
    assert isinstance(args, DecoderArgs)
    stacked = sum(p.numel() for p in module.parameters() if p.dim() == 3)
    chosen = stacked * args.experts.top_k // args.experts.num_experts if args.experts else 0
    biases = sum(p.numel() for name, p in module.named_parameters() if p.dim() == 2 and ".experts.b" in name)
    matrices = weights_of(module) - weights_of(module, "embeddings") - biases
    if args.tie_embeddings:
        matrices += args.vocab_size * args.dim
    keys = sum(min(128, args.window_of(layer) or 128) for layer in range(args.n_layers))
    counted = flops_of_job(config)
    assert counted.per_sample == 6 * 128 * (matrices + chosen + (args.query_width + args.attended_width) * keys)
    assert counted.of_experts == 6 * 128 * chosen


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_activation_checkpointing_repeats_what_backward_needs(mode: dict[str, Any]) -> None:
    """`full` repeats a block but for its last product. `op` keeps attention and every second product: of wq, wk, wv,
    wo, w1, w3 and w2, it repeats wk, wo and w3."""
    module = build_model(job().model, SEQ_LEN).module
    attention = 4 * DIM * SEQ_LEN
    whole = 2 * (weights_of(module, "layers.0.") - weights_of(module, "layers.0.feed_forward.w2")) + attention
    kept = 2 * sum(
        weights_of(module, f"layers.0.{name}.") for name in ("attention.wk", "attention.wo", "feed_forward.w3")
    )
    expected = {"none": 0, "full": LAYERS * whole, "selective": LAYERS * kept}[mode["mode"]]
    if "selective_ac_option" in mode:
        expected = LAYERS // 2 * whole
    added = flops_of_job(job(activation_checkpoint=mode)).per_sample - flops_of_job(job()).per_sample
    assert added == SEQ_LEN * expected


LORA = {"targets": ["wq", "wk", "wv", "w1"], "rank": 4}
TRAINED: dict[str, dict[str, Any]] = {
    "all": {},
    "adapters": {"lora": LORA},
    "the last block": {"training": {"trainable": ["layers.3.**", "output.weight"]}},
    "one block": {"training": {"trainable": ["layers.1.**"]}},
    "all but the embedding": {"training": {"frozen": ["tok_embeddings.weight"]}},
}


@pytest.mark.parametrize("trained", TRAINED)
def test_frozen_parameters_cost_no_gradients(trained: str) -> None:
    """PyTorch's counter sees the products of attention, of which it leaves out those of no use."""
    config = job(**TRAINED[trained])
    module = build_job_model(config).module
    tokens = torch.zeros(2, SEQ_LEN, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        module(tokens).sum().backward()
    assert flops_of_job(config).per_sample == counter.get_total_flops() // 2


VARIANTS: dict[str, JobConfig] = {
    **{name: job(**sections) for name, sections in TRAINED.items()},
    "one block, checkpointed": job(**TRAINED["one block"], activation_checkpoint={"mode": "full"}),
    "windows": job({"name": "gemma3", "flavor": "debug", "args": {"n_layers": 8}}, training={"seq_len": 128}),
    "experts": job({"name": "deepseek_v3", "flavor": "debug", "args": {"n_layers": 5}}),
    "some blocks": job(activation_checkpoint={"mode": "selective", "selective_ac_option": 2}),
    "named modules": job(activation_checkpoint={"mode": "full", "modules": ["layers.1.attention", "layers.2"]}),
    "adapters of one layer": job(lora={"targets": ["layers.2.attention.wq"], "rank": 2}),
    "resnet": job({"name": "resnet", "flavor": "debug", "args": {"depths": [3, 3, 3], "widths": [8, 8, 8]}}, **IMAGES),
    "vit": job({"name": "vit", "flavor": "debug"}, **IMAGES),
}


@pytest.mark.parametrize("variant", rest_is_slow(list(VARIANTS)))
def test_two_blocks_of_a_kind_tell_those_of_all(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = VARIANTS[variant]
    few = flops_of_job(config)
    monkeypatch.setattr(flops, "_blocks_by_kind", lambda model, plan: ())
    assert few == flops_of_job(config)


def test_a_loss_in_chunks_repeats_the_product_of_the_output_layer() -> None:
    plain, chunked = flops_of_job(job()), flops_of_job(job(loss={"chunks": 2}))
    assert chunked.per_sample - plain.per_sample == 2 * SEQ_LEN * DIM * VOCABULARY


def test_published_figures() -> None:
    """TorchTitan: 5,762 tokens/s of Llama 3 8B at 33.7 % of an H100's 989 TFLOP/s (8192 tokens). torchvision: 4.09
    billion multiply-adds in forward for ResNet-50, and 17.56 for ViT-B/16."""
    llama = flops_of_job(job({"flavor": "8B"}, training={"seq_len": 8192})).per_sample / 8192
    assert 5762 * llama / 989e12 == pytest.approx(0.337, abs=1e-3)
    for name, flavor, published in (("resnet", "resnet50", 4.09e9), ("vit", "B/16", 17.56e9)):
        assert flops_of_job(job({"name": name, "flavor": flavor}, **IMAGES)).per_sample / 6 == pytest.approx(
            published, rel=0.02
        )


class Net(nn.Module):
    """A user's own model that may need values."""

    def __init__(self, needs_values: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.needs_values = needs_values

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x[: int(tokens.max()) + 8] if self.needs_values else x


class Declared(Net):
    """A model that declares its FLOPs."""

    def flops_per_sample(self, seq_len: int) -> int:
        return 1000


def own(cls: type[Net], **args: Any) -> JobConfig:
    return job({"name": f"{__name__}:{cls.__name__}", "args": args})


def recorded(config: JobConfig, mode: str) -> Flops | None:
    recordings = Recordings(config, plan_layout(config.parallelism, config.training, 1), "cpu", TorchRecorder)
    return recordings.flops(ActivationCheckpointConfig.model_validate({"mode": mode}))


def test_a_users_model_is_counted_or_declares_its_flops(caplog: pytest.LogCaptureFixture) -> None:
    whole = 6 * SEQ_LEN * 3 * 64
    caplog.set_level(logging.INFO, logger="titan_launch")
    assert recorded(own(Net), "none") == Flops(whole)
    assert recorded(own(Net), "full") == Flops(whole)  # a product alone need not be repeated
    assert recorded(own(Declared), "none") == recorded(own(Declared), "full") == Flops(1000)
    assert recorded(own(Declared), "memory_budget") is None
    assert not caplog.records
    assert recorded(own(Net, needs_values=True), "none") is None
    assert "no TFLOP/s: the FLOPs cannot be counted, because the model does not run on the meta device" in caplog.text
    assert recorded(own(Declared, needs_values=True), "none") == Flops(1000)
    assert recorded(own(Declared, needs_values=True), "full") is None


def test_a_run_counts_once_what_is_computed_twice(caplog: pytest.LogCaptureFixture) -> None:
    config = job(activation_checkpoint={"mode": "full"}, loss={"chunks": 2}, lora=LORA)
    layout = plan_layout(config.parallelism, config.training, 1)
    config = config.model_copy(update={"training": config.training.model_copy(update={"global_batch_size": 1})})
    built = build_job_model(config)
    before = copy.deepcopy(built.module)
    with caplog.at_level(logging.INFO, logger="titan_launch"):
        counted = flops_of_run(config, built, plan_precision(config, built), build_data(config, layout, None))
    assert counted == flops_of_job(job(lora=LORA)).per_sample
    assert not caplog.records
    assert vars(built.module).keys() == vars(before).keys()
    assert all("forward" not in vars(module) for module in built.module.modules())
    assert all(parameter.grad is None for parameter in built.module.parameters())
