from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.train.jobs import run_job, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError
from titan_launch.models.build import build_model
from titan_launch.models.decoder.layers import LatentAttention
from titan_launch.plan.attention_kernels import priority
from titan_launch.plan.layout import Layout
from titan_launch.train import kernel_choice as kernels
from titan_launch.train.kernel_choice import (
    BACKENDS,
    attention_dtypes,
    choose,
    refusal,
    set_precision,
    use_kernels,
    without_unsafe_cudnn,
)
from titan_launch.train.model import plan_precision

WHOLE = Layout(1, 1, local_batch_size=1, num_microbatches=1)


def obstacle(name: str) -> str | None:
    return {"cudnn": "head_dim should be no more than 256", "flash": "fp32 is not supported"}.get(name)


def test_the_first_usable_attention_backend_is_chosen_and_the_others_are_explained() -> None:
    taken = ["efficient", "not cudnn: head_dim should be no more than 256", "not flash: fp32 is not supported"]
    assert choose("auto", priority((9, 0)), obstacle) == taken
    assert [choose("auto", priority((major, 0)), lambda _: None) for major in (8, 10)] == [["flash"], ["flash"]]
    assert choose("efficient", priority((9, 0)), obstacle) == ["efficient"]
    with pytest.raises(ConfigError, match=r"kernels.attention: cannot be used: fp32 is not supported; set \"auto\""):
        choose("flash", priority((9, 0)), obstacle)


def test_the_reason_of_a_refused_backend_comes_from_a_call_with_that_backend_only() -> None:
    query = torch.randn(1, 2, 8, 16)

    def call(dropout: float) -> Callable[[], Tensor]:
        return lambda: F.scaled_dot_product_attention(query, query, query, dropout_p=dropout)

    refused = [refusal(BACKENDS[name], call(dropout)) for name in ("flash", "math") for dropout in (0.0, 0.1)]
    assert refused == [None, "Both fused kernels do not support non-zero dropout", None, None]
    failed = refusal(BACKENDS["flash"], lambda: torch.ones(2) @ torch.ones(3))  # another error, shortened to one line
    assert failed is not None and failed.startswith("inconsistent tensor size") and "\n" not in failed


def test_a_version_of_cudnn_with_a_memory_error_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    order = priority((9, 0))
    with caplog.at_level("INFO", logger="titan_launch"):
        assert all(without_unsafe_cudnn("auto", order, version) == order for version in (None, 91501, 92000))
        assert caplog.messages == []
        for version in (8907, 91002):
            assert without_unsafe_cudnn("auto", order, version) == ("flash", "efficient", "math")
    old, newer = caplog.messages
    assert old.startswith("attention: cudnn is not used: cuDNN 8.9.7 ")
    unsafe = newer.removeprefix("attention: cudnn is not used: ")
    assert unsafe.startswith("cuDNN 9.10.2 is older than 9.15.1, and accesses memory wrongly")
    with pytest.raises(ConfigError) as error:
        without_unsafe_cudnn("cudnn", order, 91002)
    (problem,) = error.value.problems
    assert (problem.key, problem.value) == (("kernels", "attention"), "cudnn")
    assert problem.reason == f'cannot be used: {unsafe}; install cuDNN 9.15.1 or later, or set "auto"'


def enabled_on_hopper(cudnn: int, refused: tuple[str, ...], is_known: bool = True) -> dict[str, bool]:
    """Return the backends that may be used on a GPU of the Hopper generation that refuses some of them. `is_known`: the
    attention of the model is known."""
    config = JobConfig()
    built = build_model(config.model, 16)
    built = built if is_known else replace(built, attention=None)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        patch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        patch.setattr(kernels, "_check_on", lambda *_: lambda name: "an error" if name in refused else None)
        use_kernels(config, built, plan_precision(config, built), WHOLE, torch.device("cuda"), stack)
        enabled = ("cudnn_sdp_enabled", "flash_sdp_enabled", "math_sdp_enabled")
        return {name: getattr(torch.backends.cuda, name)() for name in enabled}


def test_a_backend_that_fails_at_the_start_is_not_tried_again() -> None:
    safe, old, broken = (
        run_ranks(enabled_on_hopper, 1, *case)[0] for case in ((91501, ()), (91002, ()), (91501, ("cudnn",)))
    )
    assert safe == {"cudnn_sdp_enabled": True, "flash_sdp_enabled": True, "math_sdp_enabled": True}
    assert old == broken == {**safe, "cudnn_sdp_enabled": False}


def test_a_model_that_may_pass_masks_does_not_use_cudnn() -> None:
    enabled = run_ranks(enabled_on_hopper, 1, 92000, (), False)[0]
    assert enabled == {"cudnn_sdp_enabled": False, "flash_sdp_enabled": True, "math_sdp_enabled": True}


@pytest.mark.parametrize(
    ("takes_two_widths", "refused", "chosen", "pads"),
    [
        ({"cudnn"}, {"cudnn"}, "cudnn", False),  # cuDNN on Hopper takes 192 and 128, and not 192 and 192
        (set(), {"cudnn"}, "flash", True),
        ({"efficient"}, {"cudnn"}, "flash", True),
        ({"efficient"}, {"cudnn", "flash"}, "efficient", False),
    ],
)
def test_values_are_padded_only_for_a_kernel_that_needs_it(
    takes_two_widths: set[str],
    refused: set[str],
    chosen: str,
    pads: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = JobConfig.model_validate({"model": {"name": "deepseek_v3"}})
    built = build_model(config.model, 16)
    assert built.attention is not None and built.attention.value_width < built.attention.width
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    obstacles = {
        True: lambda name: "an error" if name in refused else None,
        False: lambda name: None if name in takes_two_widths else "two widths",
    }
    monkeypatch.setattr(kernels, "_check_on", lambda *given: obstacles[given[-1]])
    monkeypatch.setattr(kernels, "set_precision", lambda _: None)  # it would last for the process
    with ExitStack() as stack, caplog.at_level("INFO", logger="titan_launch"):
        use_kernels(config, built, plan_precision(config, built), WHOLE, torch.device("cuda"), stack)
    assert any(message.startswith(f"attention (bfloat16): {chosen}") for message in caplog.messages)
    layers = [module for module in built.module.modules() if isinstance(module, LatentAttention)]
    assert layers and {layer.options.pads_values for layer in layers} == {pads}


def test_attention_has_the_compute_dtype_of_its_precision_rule() -> None:
    rules = [{"match": "layers.1.attention", "param_dtype": "float32"}]
    config = JobConfig.model_validate({"model": {"args": {"n_layers": 2}}, "precision": {"rules": rules}})
    built = build_model(config.model, 16)
    assert attention_dtypes(config.data, built, plan_precision(config, built)) == ["bfloat16", "float32"]


@pytest.mark.parametrize(("section", "key"), [("comm", "profile_freq"), ("profiling", "memory"), ("float8", "enable")])
def test_a_run_that_finds_itself_on_a_cpu_refuses_settings_for_gpus(section: str, key: str) -> None:
    config = JobConfig.model_validate({section: {key: True}} if key != "profile_freq" else {section: {key: 10}})
    built = build_model(config.model, 16)
    with ExitStack() as stack, pytest.raises(ConfigError, match=rf'{section}\.{key}: .*the device is "cpu"'):
        use_kernels(config, built, plan_precision(config, built), WHOLE, torch.device("cpu"), stack)


def test_a_cpu_has_two_attention_backends() -> None:
    query = torch.randn(1, 2, 8, 16)
    exact = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    for name in BACKENDS:
        config = JobConfig.model_validate({"kernels": {"attention": name}})
        built = build_model(config.model, 16)
        with ExitStack() as stack:
            if name in ("cudnn", "efficient"):
                with pytest.raises(ConfigError, match=r"kernels.attention: is for GPUs"):
                    use_kernels(config, built, plan_precision(config, built), WHOLE, torch.device("cpu"), stack)
                continue
            use_kernels(config, built, plan_precision(config, built), WHOLE, torch.device("cpu"), stack)
            kinds = ("flash" if torch.backends.cuda.flash_sdp_enabled() else "math",)
            assert kinds == (name,)
            assert torch.allclose(F.scaled_dot_product_attention(query, query, query, is_causal=True), exact, atol=1e-5)


class Dropping(nn.Module):
    """A user's model with attention dropout, which PyTorch's fused kernels for CPUs do not support."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.embedding = nn.Embedding(61, 8)
        self.output = nn.Linear(8, 61)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).unsqueeze(1)
        return self.output(F.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout).squeeze(1))


def attention_that_drops(folder: Path) -> list[str]:
    """Return the errors and the warnings of a run with each backend."""
    shown: list[str] = []
    warnings.showwarning = lambda message, *_: shown.append(str(message))
    found = []
    for backend in ("flash", "math"):
        model = {"name": f"{__name__}:Dropping", "args": {"dropout": 0.1}}
        job = {**tiny_job(folder, training={"steps": 1}, kernels={"attention": backend}), "model": model}
        try:
            run_job(job)
            found.append("no error")
        except ConfigError as error:
            found.append(str(error))
    return found + [text for text in shown if "kernel" in text]


def test_a_backend_that_does_not_support_the_models_attention_is_explained(tmp_path: Path) -> None:
    explained, *others = run_ranks(attention_that_drops, 1, tmp_path)[0]
    assert re.fullmatch(
        r"kernels.attention: cannot be used at .*test_kernel_choice.py:\d+: Both fused kernels do not support non-zero "
        r'dropout; set "auto", which finds a usable backend, or "math"',
        explained,
    )
    assert others == ["no error"]


def test_float32_precision_sets_tf32_for_matrix_products_and_convolutions() -> None:
    was = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        for name, matmul, convolution in (("ieee", "highest", False), ("tf32", "high", True)):
            set_precision(JobConfig.model_validate({"kernels": {"float32_precision": name}}).kernels)
            assert torch.get_float32_matmul_precision() == matmul
            assert torch.backends.cudnn.allow_tf32 is convolution
    finally:
        torch.set_float32_matmul_precision(was[0])
        torch.backends.cudnn.allow_tf32 = was[1]
