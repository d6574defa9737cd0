"""Activation offloading moves saved tensors to the host and back, and changes no bit of the results."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.sampling import sampled
from tests.tensors import assert_equal
from tests.train.jobs import run_job, tiny_job
from titan_launch.core.patches import replaced
from titan_launch.distributed.torch_private import functions_wrapped, unsharded_parameter
from titan_launch.parallel import activation_offload
from titan_launch.parallel.activation_offload import ActivationArena, HostCopies, offload_activations
from titan_launch.plan.memory.ledger import SMALLEST_OFFLOADED
from titan_launch.train import kernel_choice

PIPELINE = {"pipeline_parallel_degree": 2}
ZERO_BUBBLE = {**PIPELINE, "pipeline_parallel_schedule": "ZBVZeroBubble"}
UNSHARDED = {"mode": "deferred", "keep_params_unsharded": True}
FULL, OPS = {"mode": "full"}, {"mode": "selective"}
FP32_NORMS = {"rules": [{"type": "BatchNorm", "param_dtype": "float32", "unit_per": "module"}]}
JOBS: dict[str, dict[str, Any]] = {
    "per operation, units inside of blocks": {
        "activation_checkpoint": OPS,
        "model": {"args": {"norm": "batchnorm"}},
        "precision": {"param_dtype": "bfloat16", **FP32_NORMS},
        "parallelism": {"fsdp_reshard_after_forward": "always"},
    },
    "full, BatchNorm": {"activation_checkpoint": FULL, "model": {"args": {"norm": "batchnorm"}}},
    "none": {},
    "every second block, deferred": {
        "activation_checkpoint": {**OPS, "selective_ac_option": 2},
        "gradient_accumulation": {"mode": "deferred"},
    },
    "1F1B": {"parallelism": PIPELINE, "model": {"args": {"n_layers": 4}}},
    "compiled": {"activation_checkpoint": FULL, "compile": {"enable": True, "backend": "aot_eager"}},
    "tensor parallel": {
        "parallelism": {"tensor_parallel_degree": 2},
        "activation_checkpoint": OPS,
        "model": {"args": {"vocab_size": 64}},
    },
    "a part of each block": {"activation_checkpoint": {**FULL, "modules": ["layers.*.feed_forward"]}},
    "zero bubble": {
        "parallelism": ZERO_BUBBLE,
        "gradient_accumulation": UNSHARDED,
        "model": {"args": {"n_layers": 6}},
    },
}


class Copied:
    """Counts of copies. A copy of a parameter that FSDP2 has all-gathered is an error."""

    def __init__(self) -> None:
        self.to_host = self.to_device = 0
        self.gathered: list[Tensor] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count copies of storages of all sizes until the end of the block."""
        to_host, to_device = HostCopies.to_host, HostCopies.to_device

        def counted_to_host(copies: HostCopies, flat: Tensor) -> Tensor:
            storages = {parameter.untyped_storage()._cdata for parameter in self.gathered}
            assert flat.untyped_storage()._cdata not in storages, "an all-gathered parameter was offloaded"
            self.to_host += 1
            return to_host(copies, flat)

        def counted_to_device(copies: HostCopies, flat: Tensor) -> Tensor:
            self.to_device += 1
            return to_device(copies, flat)

        def watched(init: Any) -> Any:
            def init_unsharded_param(parameter: Any) -> None:
                init(parameter)
                self.gathered.append(unsharded_parameter(parameter))

            return init_unsharded_param

        with ExitStack() as stack:
            stack.enter_context(replaced(HostCopies, "to_host", counted_to_host))
            stack.enter_context(replaced(HostCopies, "to_device", counted_to_device))
            stack.enter_context(replaced(activation_offload, "SMALLEST_OFFLOADED", 1))
            stack.enter_context(replaced(kernel_choice, "missing_on_cpu", lambda *_: []))
            stack.enter_context(functions_wrapped({"init_unsharded_param": watched}))
            yield


def with_and_without(folder: Path, names: Sequence[str]) -> dict[str, int]:
    """Train jobs with and without offloading, and compare all parameters. Return the copies to the device."""
    found = {}
    for name in names:
        sections = JOBS[name]
        job = tiny_job(folder / name, **{"training": {"steps": 2, "global_batch_size": 8}, **sections})
        expected = run_job(job)
        copied = Copied()
        with copied.counted():
            offloads = {**job.get("activation_checkpoint", {}), "offload": True}
            assert_equal(run_job({**job, "activation_checkpoint": offloads}), expected)
        assert copied.gathered, "no all-gathered parameter was seen"
        is_pipeline = sections.get("parallelism", {}).keys() & PIPELINE.keys()
        assert is_pipeline or copied.to_host > copied.to_device, "the last block left the device"
        found[name] = copied.to_device
    return found


@sampled("names", list(JOBS), len(JOBS))
def test_offloading_changes_no_bit(names: tuple[str, ...], tmp_path: Path) -> None:
    for copies in run_ranks(with_and_without, 2, tmp_path, names, timeout=300):
        assert [name for name, count in copies.items() if not count] == []


class Block(nn.Module):
    """A block that saves three views of one storage, and whose weight and buffer backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x @ self.weight).tanh()
        return hidden * self.scale + hidden[:, :4].repeat(1, 2) * hidden.t().reshape(-1, 8)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_views_share_one_copy_and_parameters_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block())
    x = torch.randn(8, 8) * 0.1
    model(x).sum().backward()
    expected = gradients(model)
    model.zero_grad()  # later gradients are other tensors
    monkeypatch.setattr(activation_offload, "SMALLEST_OFFLOADED", 1)
    offload_activations(model, ["0", "1", "2"], "cpu")
    copied = Copied()
    with copied.counted():
        model(x).sum().backward()
    assert_equal(gradients(model), expected)
    saved = 3  # of a block: its input, `hidden`, and the repeated part of `hidden`; the first input needs no gradient
    assert (copied.to_host, copied.to_device) == (3 * saved, 2 * saved)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_the_arena_is_one_piece_of_the_bytes_that_are_live_at_once(
    in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`in_flight`: microbatches whose forwards run before the backward of the first one, as in a pipeline."""
    arena, live, places = ActivationArena(torch.device("cpu")), [0, 0], set()

    def freed(num_bytes: int) -> None:
        live[0] -= num_bytes

    def to_host(copies: HostCopies, flat: Tensor) -> Tensor:
        place = arena.place(flat.nbytes)
        places.add(place.untyped_storage().data_ptr())
        live[0] += flat.nbytes
        live[1] = max(live)
        weakref.finalize(place, freed, flat.nbytes)
        return place.copy_(flat)

    monkeypatch.setattr(HostCopies, "to_host", to_host)
    monkeypatch.setattr(HostCopies, "begin_forward", lambda copies: arena.fit())
    monkeypatch.setattr(activation_offload, "SMALLEST_OFFLOADED", 1)
    model = nn.Sequential(Block(), Block(), Block(), Block())
    expected = deepcopy(model)
    offload_activations(model, ["0", "1", "2", "3"], "cpu")
    for step in range(3):
        places.clear()
        for each in (model, expected):
            waiting: list[Tensor] = []
            for _ in range(7):
                waiting.append(each(torch.full((8, 8), 0.1 * step)).sum())
                if len(waiting) == in_flight:
                    waiting.pop(0).backward()
            while waiting:
                waiting.pop(0).backward()
        assert_equal(gradients(model), gradients(expected))
        assert len(arena.memory) in (0, live[1]) and arena.needed == live[1]
    assert places == {arena.memory.untyped_storage().data_ptr()}


def test_addresses_of_freed_parameters_are_forgotten() -> None:
    model = nn.Sequential(Block(), Block())
    offloader = activation_offload._Offloader(model, HostCopies())
    forwards = [offloader.offloaded(index, block, block.forward) for index, block in enumerate(model)]
    for _ in range(3):
        gathered = nn.Parameter(torch.randn(8, 8))  # FSDP2 may gather into another storage in each forward
        model[0].register_parameter("weight", gathered)
        forwards[1](forwards[0](torch.randn(8, 8, requires_grad=True)))
        assert len(offloader._resident) == len([*model.parameters(), *model.buffers()])


class Unused(Block):
    """A block that computes a tensor that the loss does not use, and may fail after that."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails
        self.unused: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = x @ self.weight
        unused = hidden.tanh()  # saves its own result
        self.unused.append(weakref.ref(unused))
        if self.fails:
            raise ValueError
        return hidden


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("smallest_offloaded", [1, SMALLEST_OFFLOADED], ids=["offloaded", "kept"])
def test_tensors_that_backward_does_not_reach_are_freed(
    smallest_offloaded: int, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_offload, "SMALLEST_OFFLOADED", smallest_offloaded)
    model = nn.Sequential(Block(), Unused(fails))
    offload_activations(model, ["0", "1"], "cpu")
    for _ in range(2):
        with pytest.raises(ValueError) if fails else nullcontext():
            model(torch.randn(8, 8)).sum().backward()
    gc.collect()
    assert [reference() for reference in model[1].unused] == [None, None]


class Overwriting(Block):
    """A block that overwrites a tensor that backward needs."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x @ self.weight).tanh()
        result = hidden * hidden  # saves `hidden`
        hidden.add_(1)
        return result


@pytest.mark.parametrize("smallest_offloaded", [1, SMALLEST_OFFLOADED], ids=["offloaded", "kept"])
def test_a_saved_tensor_that_is_overwritten_is_an_error(
    smallest_offloaded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_offload, "SMALLEST_OFFLOADED", smallest_offloaded)
    model = nn.Sequential(Overwriting(), Block())
    offload_activations(model, ["0", "1"], "cpu")
    loss = model(torch.randn(8, 8)).sum()
    with pytest.raises(RuntimeError, match="an in-place operation changed a tensor"):
        loss.backward()


_ON_CUDA = """
import torch
from torch import nn
from titan_launch.parallel.activation_offload import offload_activations

def gradients(offload):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(2048, 4096), nn.GELU(), nn.Linear(4096, 2048)) for _ in range(12)]
    model = nn.Sequential(*layers).cuda()
    if offload:
        offload_activations(model, [str(i) for i in range(12)], "cuda")
    found, peaks = [], []
    for step in range(4):
        torch.cuda.reset_peak_memory_stats()
        generator = torch.Generator("cuda").manual_seed(step)
        model(torch.randn(16384, 2048, device="cuda", generator=generator)).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        found += [p.grad.clone().cpu() for p in model.parameters()]
        model.zero_grad()
    assert len(set(peaks[1:])) == 1, peaks  # the peak does not depend on timing
    return found, peaks[-1]

expected, before = gradients(False)
found, after = gradients(True)
assert all(map(torch.equal, found, expected))
saved = 12 * 16384 * (2048 + 2 * 4096) * 4  # of a block: its input, and input and output of GELU, in fp32
assert before - after > 0.7 * saved, (before, after, saved)  # the gradients of all weights are a tenth of it
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_offloading_frees_the_memory_of_a_gpu_and_changes_no_bit() -> None:
    result = subprocess.run([sys.executable, "-c", _ON_CUDA], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
