"""Facts about a GPU machine: driver, memory, versions, device, attention kernel, rate of matrix products.

python -m benchmarks.gpu.facts
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sysconfig
import time
import warnings
from pathlib import Path

import torch

from benchmarks.gpu.table import installed


def main() -> None:
    """Print one line per fact. Facts of the GPU are printed only if there is one."""
    parser = argparse.ArgumentParser(description="Print facts about this machine.")
    parser.add_argument("--without-values", action="store_true", help="do not measure the rate of matrix products")
    options = parser.parse_args()
    print(f"Python {platform.python_version()}; {platform.platform()}; {len(os.sched_getaffinity(0))} CPU cores")
    for path in ("/dev/shm", "/tmp"):
        print(f"{path}: {shutil.disk_usage(path).free / 2**30:.1f} GiB free")
    header = Path(sysconfig.get_path("include"), "Python.h")
    print(f"Triton needs a C compiler: {shutil.which('gcc') or shutil.which('cc')}; and {header}: {header.exists()}")
    print(f"torch {torch.__version__}; CUDA {torch.version.cuda}; {installed('triton')}; {installed('torchao')}")
    if torch.cuda.is_available():
        device_facts()
        if not options.without_values:
            print(f"bf16 matrix products of 8192 x 8192: {matmul_tflops(8192):.0f} TFLOP/s")


def device_facts() -> None:
    """Print what the driver and PyTorch report about the first GPU."""
    if shutil.which("nvidia-smi"):
        print(subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout)
    print(f"cuDNN {torch.backends.cudnn.version()}; NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    print(torch.cuda.get_device_properties(0))
    free, total = (number / 2**30 for number in torch.cuda.mem_get_info())
    print(f"GPU memory: {free:.1f} of {total:.1f} GiB free")
    print(f"FlashAttention with fp32 tensors: {flash_attention_refusal()}")


def flash_attention_refusal() -> str:
    """Return the Python warnings of `can_use_flash_attention(debug=True)` for tensors that the kernel must refuse."""
    tensor = torch.zeros(1, 2, 128, 64, device="cuda")
    params = torch.backends.cuda.SDPAParams(tensor, tensor, tensor, None, 0.0, True, False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        can_use = torch.backends.cuda.can_use_flash_attention(params, debug=True)
    return f"{can_use}; {len(caught)} Python warnings {[str(warning.message) for warning in caught]}"


def matmul_tflops(size: int, repeats: int = 50) -> float:
    """Return the rate of square bf16 matrix products: an upper bound of the rate of a training."""
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for count in (5, repeats):  # the first round warms up
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            left @ right
        torch.cuda.synchronize()
    return 2 * size**3 * repeats / (time.perf_counter() - began) / 1e12


if __name__ == "__main__":
    main()
