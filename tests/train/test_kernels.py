from __future__ import annotations

import re
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.train.jobs import run_job, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.errors import ConfigError
from titan_launch.models.build import build_model
from titan_launch.plan.layout import Layout
from titan_launch.train.kernels import BACKENDS, attention_dtypes, choose, priority, set_precision, use_kernels
from titan_launch.train.plan import plan_precision

WHOLE = Layout(1, 1, local_batch_size=1, num_microbatches=1)


def obstacle(name: str) -> str | None:
    return {"cudnn": "head_dim should be no more than 256", "flash": "fp32 is not supported"}.get(name)


def test_the_first_backend_that_can_be_used_is_taken_and_the_others_are_explained() -> None:
    taken = "efficient; not cudnn: head_dim should be no more than 256; not flash: fp32 is not supported"
    assert choose("auto", priority((9, 0)), obstacle) == taken
    assert choose("auto", priority((8, 0)), lambda _: None) == "flash"
    assert choose("efficient", priority((9, 0)), obstacle) == "efficient"
    with pytest.raises(ConfigError, match=r"kernels.attention: cannot be used: fp32 is not supported; set \"auto\""):
        choose("flash", priority((9, 0)), obstacle)


def test_attention_has_the_dtype_of_the_rules_around_it() -> None:
    rules = [{"match": "layers.1.attention", "param_dtype": "float32"}]
    config = JobConfig.model_validate({"model": {"args": {"n_layers": 2}}, "precision": {"rules": rules}})
    built = build_model(config.model, 16)
    assert attention_dtypes(built, plan_precision(config, built)) == ["bfloat16", "float32"]


def test_a_cpu_has_two_backends() -> None:
    query = torch.randn(1, 2, 8, 16)
    exact = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    for name in BACKENDS:
        config = JobConfig.model_validate({"kernels": {"attention": name}})
        built = build_model(config.model, 16)
        with ExitStack() as stack:
            if name in ("cudnn", "efficient"):
                with pytest.raises(ConfigError, match=r"kernels.attention: is a kernel for GPUs"):
                    use_kernels(config, built, plan_precision(config, built), WHOLE, torch.device("cpu"), stack)
                continue
            use_kernels(config, built, plan_precision(config, built), WHOLE, torch.device("cpu"), stack)
            kinds = ("flash" if torch.backends.cuda.flash_sdp_enabled() else "math",)
            assert kinds == (name,)
            assert torch.allclose(F.scaled_dot_product_attention(query, query, query, is_causal=True), exact, atol=1e-5)


class Dropping(nn.Module):
    """A model of somebody's own, which drops some of its scores: PyTorch's fused kernels for CPUs do not."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.embedding = nn.Embedding(61, 8)
        self.output = nn.Linear(8, 61)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).unsqueeze(1)
        return self.output(F.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout).squeeze(1))


def attention_that_drops(folder: Path) -> list[str]:
    """What a run with each backend says: errors, and warnings that reach the user."""
    shown: list[str] = []
    warnings.showwarning = lambda message, *_: shown.append(str(message))
    found = []
    for backend in ("flash", "math"):
        kernels: dict[str, Any] = {"attention": backend}
        model = {"name": f"{__name__}:Dropping", "args": {"dropout": 0.1}}
        job = {**tiny_job(folder, training={"steps": 1}, kernels=kernels), "model": model}
        try:
            run_job(job)
            found.append("no error")
        except ConfigError as error:
            found.append(str(error))
    return found + [text for text in shown if "kernel" in text]


def test_a_backend_that_does_not_take_the_models_attention_is_explained(tmp_path: Path) -> None:
    explained, *others = run_ranks(attention_that_drops, 1, tmp_path)[0]
    assert re.fullmatch(
        r"kernels.attention: cannot be used at .*test_kernels.py:\d+: Both fused kernels do not support non-zero "
        r'dropout; set "auto", which finds one, or "math"',
        explained,
    )
    assert others == ["no error"]


def test_exact_products_are_the_default_on_gpus() -> None:
    was = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        for name, matmul, convolution in (("ieee", "highest", False), ("tf32", "high", True)):
            set_precision(JobConfig.model_validate({"kernels": {"float32_precision": name}}).kernels)
            assert torch.get_float32_matmul_precision() == matmul
            assert torch.backends.cudnn.allow_tf32 is convolution
    finally:
        torch.set_float32_matmul_precision(was[0])
        torch.backends.cudnn.allow_tf32 = was[1]
