"""The phantom GPU itself: what it computes, what it allocates, what it carries between ranks, and what it refuses."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.phantom_gpu.conftest import Phantom
from titan_launch.core.errors import UserError
from titan_launch.phantom_gpu import build, environment
from titan_launch.phantom_gpu.__main__ import main
from titan_launch.phantom_gpu.environment import PHANTOMS, describe_device
from titan_launch.plan.hardware import DEVICES, find_device

_OPERATORS = """
import torch

def is_equal(function, *shapes):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.rand(shape, generator=generator) for shape in shapes]
    expected, found = function(*inputs), function(*(x.cuda() for x in inputs))
    assert found.device.type == "cuda" and found.dtype == expected.dtype and found.stride() == expected.stride()
    assert torch.equal(found.cpu(), expected), function

is_equal(lambda x: x.sum() / 3 + 1, (50, 50))
is_equal(lambda x, y: x @ y, (20, 30), (30, 4))
is_equal(lambda x: torch.linalg.vector_norm(x), (100,))
is_equal(lambda x: x.mul(2).t().contiguous(), (5, 6))
is_equal(lambda x: x.to(torch.bfloat16).float() * 1.5, (33,))
is_equal(lambda x: torch.where(x > 0.5, x, 0.0).nonzero(), (7, 9))
is_equal(lambda x: torch.stack(torch._foreach_norm([x, 2 * x])), (12,))
is_equal(lambda x: (x * 8).long().bincount(minlength=8), (1000,))
is_equal(lambda x: torch.softmax(x, -1).argmax(-1), (4, 10))
assert torch.arange(10, device="cuda").sum().item() == 45
assert torch.full((3,), -100, device="cuda").eq(-100).all().item()
counts = torch.randint(0, 8, (1 << 20,), device="cuda").bincount(minlength=8)  # integers of any number
assert counts.sum().item() == 1 << 20

# Gradients of autograd's threads, and the fused update, are those of the host.
torch.manual_seed(0)
layer = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 2))
rows = torch.randn(4, 8)
results = []
for device in ("cpu", "cuda"):
    import copy
    model = copy.deepcopy(layer).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(rows.to(device)).square().mean().backward()
    optimizer.step()
    results.append([p.detach().cpu() for p in model.parameters()])
for a, b in zip(*results):
    torch.testing.assert_close(a, b)

# What is not computed takes no memory of the host, and is finite.
import resource
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
big = torch.empty(1 << 31, device="cuda").normal_()  # 8 GiB
product = big.view(1 << 15, 1 << 16) @ big.view(1 << 16, 1 << 15)
assert not product.isnan().any().item() and product.sum().isfinite().item()
targets = torch.zeros(1 << 14, dtype=torch.long, device="cuda")
assert torch.nn.functional.cross_entropy(big.view(-1, 1 << 17), targets).isfinite()
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB
experts = torch.rand(8192, 128, device="cuda").topk(8).indices.flatten().bincount(minlength=128)
assert (experts == 8192 * 8 // 128).all().item()  # every expert gets equally many tokens

# The allocator, and its error.
assert torch.cuda.memory_stats()["active_bytes.all.current"] >= 12 << 30
try:
    torch.empty(1 << 40, device="cuda")
except torch.OutOfMemoryError as error:
    assert "79.10 GiB" in str(error), error
else:
    raise AssertionError("80 GB are not 4 TB")
print(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), torch.cuda.device_count())
"""

_COLLECTIVES = """
import datetime, os, sys
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=float(sys.argv[1])), device_id=device)
size = dist.get_world_size()

def tensor(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=device)

for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8):
    x = tensor(rank, 1, dtype=dtype)
    dist.all_reduce(x)
    assert x.tolist() == [size * (size - 1) / 2, size], (dtype, x)
x = tensor(rank + 0.5)
dist.all_reduce(x, dist.ReduceOp.MAX)
assert x.item() == size - 0.5
x = tensor(2**53 + 1 + rank, dtype=torch.int64)
dist.all_reduce(x, dist.ReduceOp.MIN)
assert x.item() == 2**53 + 1
parts = [tensor(0.0) for _ in range(size)]
dist.all_gather(parts, tensor(rank * 10.0))
assert [p.item() for p in parts] == [10.0 * r for r in range(size)]
out = tensor(0.0)
dist.reduce_scatter_tensor(out, torch.arange(size, device=device, dtype=torch.float32))
assert out.item() == rank * size
sent = [1] * size if rank else list(range(1, size + 1))  # rank 0 sends r + 1 elements to rank r
received = [rank + 1] + [1] * (size - 1)
out = torch.empty(sum(received), dtype=torch.int64, device=device)
dist.all_to_all_single(out, torch.full((sum(sent),), rank, device=device), received, sent)
assert out.tolist() == [0] * (rank + 1) + list(range(1, size)), out
x = tensor(float(rank))
dist.broadcast(x, 1)
assert x.item() == 1
ops = [dist.P2POp(dist.isend, tensor(rank), (rank + 1) % size), dist.P2POp(dist.irecv, x, (rank - 1) % size)]
for work in dist.batch_isend_irecv(ops):
    work.wait()
assert x.item() == (rank - 1) % size
pairs = dist.new_subgroups(2)[0]
x = tensor(float(rank))
dist.all_reduce(x, group=pairs)
assert x.item() == rank // 2 * 4 + 1
large = torch.empty(1 << 28, device=device)  # 1 GiB: nothing is carried, and nobody waits
dist.all_reduce(large)
torch.cuda.synchronize()
print("all right", flush=True)
dist.barrier()
os._exit(0)
"""


_SORTED = """
import torch
rows = torch.zeros(1, 4096, dtype=torch.int64, device="cuda")  # from 3,073 rows on, CUB sorts them
torch.ops.aten.embedding_dense_backward(torch.empty(1, 4096, 8, device="cuda"), rows, 100, -1, False)
torch.cuda.synchronize()
print(torch.cuda.get_device_capability())
"""


@pytest.mark.phantom
@pytest.mark.parametrize(("name", "capability"), [("l40s", "(8, 9)"), ("b200", "(10, 0)")])
def test_sorting_kernels_run_on_every_architecture(phantom: Phantom, name: str, capability: str) -> None:
    ended = phantom.run("-m", "titan_launch.phantom_gpu", "--hide-gpu", "--device", name, sys.executable, "-c", _SORTED)
    assert ended.returncode == 0 and capability in ended.stdout, ended.stderr


@pytest.mark.phantom
def test_small_operators_are_computed_and_large_ones_only_allocate(phantom: Phantom) -> None:
    ended = phantom.run("-c", _OPERATORS)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "NVIDIA H100 80GB HBM3 (9, 0) 4"


@pytest.mark.phantom
def test_ranks_exchange_small_messages(phantom: Phantom, tmp_path: Path) -> None:
    script = tmp_path / "collectives.py"
    script.write_text(_COLLECTIVES)
    ended = phantom.run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(script), "60")
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("all right") == 4


@pytest.mark.phantom
def test_a_function_that_is_not_answered_is_named(phantom: Phantom) -> None:
    ended = phantom.run("-c", "import torch; torch.cuda.graph(torch.cuda.CUDAGraph()).__enter__()")
    assert ended.returncode == 1
    assert "phantom GPU: cudaStreamBeginCapture is not implemented" in ended.stderr


def test_names_of_devices() -> None:
    for name, phantom in PHANTOMS.items():
        known = find_device(phantom.driver_name)
        assert known is not None and known.name == name
        memory = int(describe_device(name).split("|")[1])
        assert memory == int(next(device.memory_gib for device in DEVICES if device.name == name) * 2**30)
    with pytest.raises(UserError, match=r'"h100".*h100-80gb'):
        describe_device("h100")


def test_a_host_that_cannot_have_phantoms_is_told_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def reason(device: str = "h100-80gb", count: int = 1, **options: bool) -> str:
        with pytest.raises(UserError) as error, environment.phantom_gpus(device, count, **options):
            pass
        return str(error.value)

    for count, free, text in (
        (
            4,
            2.0,
            "4 phantom GPUs need about 4.8 GiB of host memory, but 2.0 GiB are free; use at most 1 phantom GPU, or a",
        ),
        (1, 1.0, "1 phantom GPU needs about 1.2 GiB of host memory, but 1.0 GiB are free; use a host with more memory"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(environment, "free_memory_gib", lambda free=free: free)
            assert text in reason(count=count)
    driver = tmp_path / "driver"
    driver.touch()
    with monkeypatch.context() as patch:
        patch.setattr(environment, "_DRIVER", driver)
        assert "this host has a GPU; --hide-gpu" in reason()
    version = tmp_path / "torch" / "version.py"
    version.parent.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(build, "find_spec", lambda _: type("Spec", (), {"origin": str(version.parent / "__init__.py")}))
        for cuda, text in (("None", "which has no code for CUDA"), ("'12.8'", "torch 2.11.0 is for CUDA 12.8")):
            version.write_text(f"__version__ = '2.11.0'\ncuda: Optional[str] = {cuda}\n")
            assert text in reason()
        version.write_text("__version__ = '2.11.0'\ncuda = '13.0'\n")
        assert "pip install nvidia-cuda-runtime" in reason()
        headers = tmp_path / "nvidia/cu13/include/cuda.h"
        headers.parent.mkdir(parents=True)
        headers.touch()
        patch.setenv("TITAN_LAUNCH_CACHE", str(tmp_path / "cache"))
        patch.setattr(shutil, "which", lambda _: None)
        assert (
            "gcc is not installed, but the phantom GPU is compiled at its first use; install a C compiler" in reason()
        )


@pytest.mark.parametrize(
    ("option", "values"), [("--gpus", ("0", "-5")), ("--memory-gib", ("0", "-5", "nan", "inf", "1e12"))]
)
def test_impossible_numbers_are_refused(
    option: str, values: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in values:
        monkeypatch.setattr(sys, "argv", ["phantom_gpu", f"{option}={value}", "true"])
        with pytest.raises(SystemExit, match="2"):
            main()
        assert f"error: {option}: must be" in capsys.readouterr().err


def test_the_command_needs_a_command_and_a_known_device() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "titan_launch.phantom_gpu", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert run().returncode == 2
    ended = run("--hide-gpu", "--device", "h100-90gb", "true")
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1 and "h100-80gb" in ended.stderr
