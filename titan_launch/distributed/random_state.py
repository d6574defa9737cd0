"""Random number generators of a rank: seeding, determinism, and their state in a checkpoint."""

from __future__ import annotations

import hashlib
import math
import os
import random

import numpy as np
import torch
from torch import Tensor

from titan_launch.config.sections.parallelism import ParallelismConfig


def random_stream(rank: int, parallelism: ParallelismConfig) -> int:
    """Return the index of the stream of random numbers that a rank uses during training.

    Each rank has a stream of its own, except that the ranks of a tensor-parallel group share one stream. These ranks
    hold the same activations, so their dropout masks must be equal.
    """
    return rank // parallelism.tensor_parallel_degree


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seed the generators of torch, Python and NumPy that training uses, for example for dropout.

    Initial parameters and the data order do not use these generators. `deterministic`: True forbids kernels whose
    result depends on timing. torch then raises an error for an operation without a deterministic kernel.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads the variable later, when it starts
        torch.use_deterministic_algorithms(True)
        # By default torch.empty would fill all memory with NaN, including the buffers of FSDP2's collectives.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False


def random_key(stream: int) -> str:
    """Return the key of a random stream in a checkpoint."""
    return f"rank_{stream}"


_MT19937_WORDS = 624


class RandomState:
    """State of this rank's random generators: PyTorch's (CPU and this rank's GPU), Python's and NumPy's.

    A checkpoint stores each stream under its own key, because DCP saves only one rank's copy of a shared key. A resumed
    rank continues its stream. If a resumed run has more streams than the checkpoint, `seed_new_stream` seeds each new
    stream.
    """

    def __init__(self, device: torch.device, seed: int, stream: int):
        """`stream`: index of this rank's stream. Ranks with the same stream draw the same numbers."""
        self._device = device
        self._seed = seed
        self.stream = stream

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of all generators as tensors."""
        _, python, python_gauss = random.getstate()
        _, numpy, position, has_gauss, gauss = np.random.get_state()
        state = {
            "torch": torch.get_rng_state(),
            "python": torch.tensor(python, dtype=torch.int64),
            "python_gauss": torch.tensor(math.nan if python_gauss is None else python_gauss, dtype=torch.float64),
            "numpy": torch.tensor([*map(int, numpy), int(position), int(has_gauss)], dtype=torch.int64),
            "numpy_gauss": torch.tensor(gauss, dtype=torch.float64),
        }
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the state of the generators. Raises ValueError for an invalid state."""
        try:
            *keys, position, has_gauss = state["numpy"].tolist()
            if not 0 <= position <= _MT19937_WORDS:  # NumPy would read out of bounds
                raise ValueError(f"position {position} of NumPy's generator is out of range")
            torch.set_rng_state(state["torch"])
            python_gauss = float(state["python_gauss"])
            random.setstate((3, tuple(state["python"].tolist()), None if math.isnan(python_gauss) else python_gauss))
            gauss = float(state["numpy_gauss"])
            np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
            if "cuda" in state:
                torch.cuda.set_rng_state(state["cuda"], self._device)
        except (RuntimeError, TypeError, OverflowError, KeyError) as error:
            raise ValueError(str(error)) from error

    def seed_new_stream(self, step: int) -> None:
        """Seed a stream that the checkpoint of `step` does not contain. The seed depends on the job's seed, the
        stream's index and the step."""
        digest = hashlib.blake2b(f"{self._seed}/{self.stream}/{step}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
        torch.manual_seed(seed % 2**63)
        random.seed(seed)
        np.random.seed(seed % 2**32)
