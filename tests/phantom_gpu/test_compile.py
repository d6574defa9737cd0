"""Compiled models on a phantom GPU: each family gets one graph for each kind of its blocks, and no graph later."""

from __future__ import annotations

import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.phantom_gpu.conftest import Phantom
from tests.phantom_gpu.test_branches import COMPILED, SHORT, of_family
from titan_launch.models.architectures import ARCHITECTURES
from titan_launch.models.decoder.families import FAMILIES

MODES: dict[str, tuple[str, ...]] = {
    "none": (),
    "full": ("--activation_checkpoint.mode=full",),
    "every second block": ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"),
    "op": ("--activation_checkpoint.mode=selective",),
    "op of attention": (
        "--activation_checkpoint.mode=selective",
        '--activation_checkpoint.modules=["layers.*.attention"]',
    ),
    "budget": ("--activation_checkpoint.mode=memory_budget",),
}

IMAGES = {
    "resnet": ("--config=configs/resnet_bn.toml", "--precision.rules=[]", "--precision.param_dtype=float32"),
    "vit": ("--config=configs/vit_debug.toml",),
}
"""Options of models for images. In bf16, ResNet's norms are units of their own, and nothing is left to compile."""

JOBS: dict[str, tuple[str, ...]] = {
    "llama3": ("none", "full", "every second block", "budget"),
    "qwen2": ("op",),
    "qwen3": ("full",),
    "qwen3_moe": ("op of attention",),
    "mistral": ("full",),
    "mixtral": ("none",),
    "gemma2": ("op",),
    "gemma3": ("none", "op"),
    "gpt2": ("budget",),
    "gpt_oss": ("op of attention",),
    "phi3": ("every second block",),
    "olmo2": ("none",),
    "deepseek_v3": ("full",),
    "resnet": ("op",),
    "vit": ("full",),
}
"""The modes of activation checkpointing of each model. A job takes a minute, so most models have one mode. `op` needs
blocks that are compiled as a whole, without units for experts or for norms in fp32."""

RECOMPILATIONS = {
    **dict.fromkeys(("gemma2", "gemma3", "gpt_oss"), 1),  # blocks with and without a window are two graphs
    "resnet": 2,  # the blocks of its three stages have different shapes
}
"""Permitted recompilations of a model. A model whose blocks are all alike has none."""

_NOTING = """#!/bin/sh
{tool} "$@"
status=$?
echo $status "$@" >>{log}
exit $status
"""


def _noting_tools(folder: Path, log: Path) -> dict[str, str]:
    """Return variables by which Triton uses assemblers that note their exit status. Inductor silently drops a variant
    of a kernel that the assembler refuses."""
    triton = find_spec("triton")
    assert triton is not None and triton.origin is not None
    variables = {}
    for name in ("ptxas", "ptxas-blackwell"):  # the second one also compiles for Hopper since Triton 3.9
        tool, own = Path(triton.origin).parent / "backends/nvidia/bin" / name, folder / name
        own.write_text(_NOTING.format(tool=shlex.quote(str(tool)), log=shlex.quote(str(log))))
        own.chmod(0o755)
        variables[f"TRITON_{name.upper().replace('-', '_')}_PATH"] = str(own)
    return variables


def options_of(model: str) -> tuple[str, ...]:
    """Return the options of a small model with three blocks, so that two of them are alike."""
    return of_family(model, num_layers=3) if model in FAMILIES else (*IMAGES[model], "--validation.freq=0")


def test_all_models_are_compiled() -> None:
    assert JOBS.keys() == ARCHITECTURES.keys()


@pytest.mark.phantom
@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize(("model", "mode"), [(model, mode) for model, modes in JOBS.items() for mode in modes])
def test_blocks_of_one_kind_share_a_graph(phantom: Phantom, tmp_path: Path, model: str, mode: str) -> None:
    log = tmp_path / "calls"
    tools = _noting_tools(tmp_path, log)
    cache = f"--compile.cache_folder={tmp_path / 'kernels'}"  # empty, so that each kernel is compiled
    options = (*options_of(model), *SHORT, *COMPILED, *MODES[mode], cache)
    ended = phantom.train(1, tmp_path, *options, timeout=900, TORCH_LOGS="recompiles,graph_breaks", **tools)
    calls = [line for line in log.read_text().splitlines() if "--gpu-name" in line]
    assert calls and all(call.startswith("0 ") for call in calls), calls
    assert "Graph break in user code" not in ended.stderr, ended.stderr
    assert ended.stderr.count("Recompiling function") == RECOMPILATIONS.get(model, 0), ended.stderr
