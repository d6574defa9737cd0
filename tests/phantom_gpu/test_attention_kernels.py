"""The description of attention's kernels in `plan.attention_kernels` is what PyTorch answers on each GPU."""

from __future__ import annotations

import json

import pytest
import torch

from tests.phantom_gpu.conftest import Phantom
from tests.sampling import rest_is_slow
from titan_launch.phantom_gpu.environment import describe_device
from titan_launch.plan.attention_kernels import priority, takes
from titan_launch.plan.hardware import find_device

WIDTHS = ((192, 128), (48, 32), (128, 64), (128, 128), (320, 320), (320, 256), (80, 64), (44, 28))
OF_RELEASE = {"2.15": ((192, 192), (256, 256), (160, 128), (192, 64), (256, 128))}
"""Widths for which cuDNN's limits differ from those of torch 2.11. The description has the limits of 2.15."""

_ASK = """
import json, sys
import torch
import torch.nn.functional as F
from titan_launch.train.kernel_choice import BACKENDS, refusal

def is_taken(name, dtype, width, value_width):
    q, k, v = (torch.empty(1, 2, 256, w, dtype=getattr(torch, dtype), device="cuda", requires_grad=True)
               for w in (width, width, value_width))
    return refusal(BACKENDS[name], lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)) is None

print(json.dumps([is_taken(*question) for question in json.loads(sys.argv[1])]))
"""


@pytest.mark.phantom
@pytest.mark.parametrize("device", rest_is_slow(["h100-80gb", "b200", "a100-80gb", "l40s"]))
def test_planned_kernels_take_what_pytorchs_take(phantom: Phantom, device: str) -> None:
    known = find_device(device)
    assert known is not None and known.capability is not None
    widths = (*WIDTHS, *OF_RELEASE.get(torch.__version__[:4], ()))
    questions = [
        (name, dtype, width, value_width)
        for name in priority(known.capability)[:-1]
        for dtype in ("bfloat16", "float32")
        for width, value_width in widths
    ]
    ended = phantom.run("-c", _ASK, json.dumps(questions), PHANTOM_DEVICE=describe_device(device))
    assert ended.returncode == 0, ended.stderr
    for (name, dtype, *pair), is_taken in zip(questions, json.loads(ended.stdout.splitlines()[-1]), strict=True):
        assert takes(name, dtype, (pair[0], pair[1]), known.capability) == is_taken, (name, dtype, pair)
