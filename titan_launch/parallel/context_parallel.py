"""Context parallelism: sequences divided over ranks, with PyTorch's ring attention (arXiv:2310.01889).

Each rank has a part of the tokens of every sample, and the same part of buffers with one row per position. Only
attention communicates: it receives the keys and values of the other ranks.

PyTorch's implementation is imported only if sequences are divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan_launch.config.axes import CONTEXT
from titan_launch.config.sections.parallelism import ParallelismConfig
from titan_launch.core.errors import config_error
from titan_launch.core.fingerprint import Fingerprint
from titan_launch.core.patches import replaced
from titan_launch.data.sources import Batch, Sample, SampleSource, read_batch
from titan_launch.distributed.mesh import Mesh
from titan_launch.distributed.torch_private import ring_attention_module
from titan_launch.models.parallel_plans import buffers_along_sequence


@dataclass(frozen=True)
class SequencePart:
    """The tokens of every sequence that belong to one rank of a context-parallel group."""

    index: int
    """Index of the rank in the group, from 0 to `count` - 1."""

    count: int

    is_balanced: bool
    """True: a sequence has `2 * count` chunks, and rank i has chunk i from the front, then chunk i from the back. This
    balances the work of causal attention, and PyTorch's ring attention expects this order. False: a sequence has
    `count` chunks, and rank i has chunk i."""

    def of(self, full: Tensor, axis: int = 0) -> Tensor:
        """Return the rank's part of a tensor along the token axis, whose size is a multiple of the number of chunks."""
        if not self.is_balanced:
            return full.chunk(self.count, axis)[self.index]
        chunks = full.chunk(2 * self.count, axis)
        return torch.cat((chunks[self.index], chunks[-1 - self.index]), axis)


def sequence_part(mesh: Mesh, parallelism: ParallelismConfig) -> SequencePart | None:
    """Return this rank's part of every sequence; None if each rank has whole sequences."""
    ranks = mesh.along(CONTEXT)
    if ranks is None:
        return None
    return SequencePart(ranks.get_local_rank(), ranks.size(), parallelism.context_parallel_load_balance)


def part_of(source: SampleSource, part: SequencePart | None) -> SampleSource:
    """Return a source whose samples contain only a rank's tokens and targets. If `part` is None, return `source`."""
    return source if part is None else _SequencePartSource(source, part)


def part_of_batch(batch: Batch, part: SequencePart | None) -> Batch:
    """Return a microbatch with only a rank's tokens and targets. If `part` is None, return `batch`."""
    if part is None:
        return batch
    return Batch._make(None if tensor is None else part.of(tensor, axis=1) for tensor in batch)


@dataclass(frozen=True)
class _SequencePartSource:
    source: SampleSource
    part: SequencePart

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        return tuple(self.part.of(tensor) for tensor in self.source[index])

    def read_batch(self, indices: Sequence[int], positions: Sequence[int] | None) -> Sample:
        return tuple(self.part.of(tensor, axis=1) for tensor in read_batch(self.source, indices, positions))

    @property
    def num_classes(self) -> int:
        return self.source.num_classes

    def describe(self) -> str:
        return self.source.describe()

    def fingerprint(self, seed: int) -> Fingerprint | None:
        return self.source.fingerprint(seed)


def divide_buffers(model: nn.Module, axes: Mapping[str, int] | None, part: SequencePart | None, seq_len: int) -> None:
    """In buffers with one row per position, keep only the rows of this rank's tokens, in place. Do nothing if `part` is
    None.

    `axes`: the model's declaration (`ModelSpec.context_parallel`), checked by `check_divisions`; None is allowed if
    `part` is None. `seq_len`: number of tokens of a whole sequence; further rows are dropped.
    """
    if part is None:
        return
    assert axes is not None, "check_divisions comes first"
    for module, name, axis in buffers_along_sequence(model, axes).values():
        full = module._buffers[name]
        assert isinstance(full, Tensor)
        module._buffers[name] = part.of(full.narrow(axis, 0, seq_len), axis).clone()


@contextmanager
def ring_attention(mesh: DeviceMesh | None, parallelism: ParallelismConfig, device: torch.device) -> Iterator[None]:
    """Let `F.scaled_dot_product_attention` attend to the tokens of all ranks of `mesh` until the `with` block ends. Do
    nothing if `mesh` is None.

    The block must contain forward and backward, because PyTorch replaces that function and DTensor's dispatcher only
    inside of the block. Raise ConfigError if PyTorch has no ring attention for the device. In the block, attention in
    fp32 raises ConfigError if PyTorch's kernel for it does not support the number of tokens.
    """
    if mesh is None:
        yield
        return
    from torch.distributed.tensor.experimental import context_parallel

    attention = ring_attention_module()
    if device.type == "cpu" and _CPU_KERNEL not in attention.custom_ops:
        reason = "PyTorch's ring attention has no kernels for the CPU; use GPUs, or set context_parallel_degree = 1"
        raise config_error(CONTEXT.key, reason, mesh.size(), also=(("job", "device"),))
    # PyTorch takes the settings from global options. It also needs a buffer to divide, whose values do not matter.
    options = attention._cp_options
    before = options.enable_load_balance, options.rotate_method
    options.enable_load_balance = parallelism.context_parallel_load_balance
    options.rotate_method = attention._RotateMethod[_ROTATION[parallelism.context_parallel_rotate_method]]
    divided = torch.empty(2 * mesh.size(), device=device)
    ring = context_parallel(mesh, buffers=[divided], buffer_seq_dims=[0], no_restore_buffers={divided})
    on_meta = F.scaled_dot_product_attention
    ring.__enter__()
    in_ring = F.scaled_dot_product_attention
    num_parts = 2 if parallelism.context_parallel_load_balance else 1

    def attend(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if q.is_meta:
            return on_meta(q, *args, **kwargs)
        if q.dtype == torch.float32 and device.type != "cpu":
            _check_num_tokens(q.shape[-2] * mesh.size(), mesh.size(), num_parts)
        return in_ring(q, *args, **kwargs)

    try:
        with replaced(F, "scaled_dot_product_attention", attend):
            yield
    finally:
        ring.__exit__(None, None, None)  # before torch 2.13, an exception as argument would prevent the restoration
        options.enable_load_balance, options.rotate_method = before


_ALIGNMENT = 32
"""On CUDA, attention in fp32 uses the memory-efficient kernel. This kernel pads the logsumexp of the scores to a
multiple of this number of tokens. PyTorch's ring attention does not expect the padding (torch 2.11 to 2.15)."""


def _check_num_tokens(seq_len: int, degree: int, num_parts: int) -> None:
    """Raise ConfigError if attention in fp32 cannot run on parts of a sequence. `num_parts`: number of parts that each
    rank has."""
    whole, length = degree * num_parts * _ALIGNMENT, seq_len // (degree * num_parts)
    if length % _ALIGNMENT:
        reason = (
            f"divides a sequence of {seq_len} tokens into parts of {length}, but attention in float32 needs parts with "
            f"a multiple of {_ALIGNMENT} tokens; set training.seq_len to a multiple of {whole}, or compute attention "
            "in bfloat16"
        )
        raise config_error(CONTEXT.key, reason, degree, also=(("training", "seq_len"),))


_ROTATION = {"allgather": "ALL_GATHER", "alltoall": "ALL_TO_ALL"}
_CPU_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
