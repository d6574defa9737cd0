"""Random generators of a rank: seeding, determinism, and their state in a checkpoint."""

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
    """Which stream of random numbers a rank draws from while it trains: its own, but for the ranks that share matrices
    (tensor parallelism). These draw the same, so that a mask over activations that all of them hold is one mask."""
    return rank // parallelism.tensor_parallel_degree


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seed what draws during training (dropout, say), per stream; parameters and data have seeds of their own. The
    generators are torch's, Python's and NumPy's, all of which a checkpoint holds.

    `deterministic` forbids kernels whose result depends on timing, and makes torch fail where there is no other.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts, after this
        torch.use_deterministic_algorithms(True)
        # By default torch.empty would fill with NaN whatever it allocates, the buffers of FSDP2's collectives included.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False


def random_key(stream: int) -> str:
    """The key of a stream of random numbers: where each rank draws from its own, that of the rank."""
    return f"rank_{stream}"


_MT19937_WORDS = 624


class RandomState:
    """Every rank's random generators (PyTorch's for the CPU and this rank's GPU, Python's, numpy's), each stream of
    numbers under a key of its own: DCP keeps only one rank's copy of a shared key.

    A rank takes up what the stream of its number was at. Where there are more streams than before, the new ones are
    seeded by (seed, stream, step): no two draw the same numbers.
    """

    def __init__(self, device: torch.device, seed: int, stream: int):
        """`stream`: the number of this rank's stream; ranks with the same one have drawn the same numbers."""
        self._device = device
        self._seed = seed
        self._stream = stream

    def state_dict(self) -> dict[str, Tensor]:
        """The state of all generators, as tensors."""
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
        """Set the generators to a state. Raises ValueError for what is no state of theirs."""
        try:
            self._set(state)
        except (RuntimeError, TypeError, OverflowError) as error:
            raise ValueError(str(error)) from error

    def _set(self, state: dict[str, Tensor]) -> None:
        *_, position, _ = state["numpy"].tolist()
        if not 0 <= position <= _MT19937_WORDS:  # NumPy would read beyond its table
            raise ValueError(f"position {position} of NumPy's generator")
        torch.set_rng_state(state["torch"])
        python_gauss = float(state["python_gauss"])
        random.setstate((3, tuple(state["python"].tolist()), None if math.isnan(python_gauss) else python_gauss))
        *keys, position, has_gauss = state["numpy"].tolist()
        gauss = float(state["numpy_gauss"])
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self._device)

    def seed_new_stream(self, step: int) -> None:
        """Begin a stream that no rank has drawn from, where a checkpoint of `step` has none of its number."""
        digest = hashlib.blake2b(f"{self._seed}/{self._stream}/{step}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
        torch.manual_seed(seed % 2**63)
        random.seed(seed)
        np.random.seed(seed % 2**32)
