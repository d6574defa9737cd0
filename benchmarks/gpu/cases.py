"""What is trained: shapes, and the ways to train each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A Llama and its batch."""

    name: str
    flavor: str
    args: Mapping[str, int]
    """In place of the flavor's."""

    seq_len: int
    batch: int
    """Sequences in a microbatch."""


@dataclass(frozen=True)
class Case:
    """One training; a row of the table."""

    shape: Shape
    label: str
    is_bare: bool = False
    microbatches: int = 1
    is_compiled: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the job file; the launcher's only."""

    @property
    def name(self) -> str:
        """In a sentence."""
        return f"{self.shape.name}, {self.shape.seq_len} x {self.shape.batch}, {self.label}"


_WIDTH_8B = {"n_layers": 8}
SHAPES = (
    Shape("8B width, 8 layers", "8B", _WIDTH_8B, 2048, 4),
    Shape("8B width, 8 layers", "8B", _WIDTH_8B, 8192, 1),
    Shape("1B", "1B", {}, 2048, 8),
    Shape("1B", "1B", {}, 8192, 2),
)
SMOKE = Shape("smoke", "debug", {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 128}, 64, 2)

_FLOAT8 = {"float8.enable": True}
_FP32_NORMS = {"precision.rules": '[{type = "RMSNorm", param_dtype = "float32"}]'}


def all_cases() -> Iterator[Case]:
    """The most important first: the last ones are left out where time runs out."""
    for shape in SHAPES:
        yield Case(shape, "bare loop, compiled", is_bare=True, is_compiled=True)
        yield Case(shape, "compiled", is_compiled=True)
        yield Case(shape, "compiled, float8 rowwise", is_compiled=True, options=_FLOAT8)
        yield Case(shape, "eager")
    first = SHAPES[0]
    for mode in ("immediate", "deferred"):
        yield Case(
            first, f"eager, 4 microbatches, {mode}", microbatches=4, options={"gradient_accumulation.mode": mode}
        )
    yield Case(first, "eager, fp32 norms", options=_FP32_NORMS)
    yield Case(first, "compiled, fp32 norms", is_compiled=True, options=_FP32_NORMS)
    yield Case(
        first, "compiled, float8 tensorwise", is_compiled=True, options={**_FLOAT8, "float8.recipe": "tensorwise"}
    )
    yield Case(first, "bare loop, eager", is_bare=True)


def smoke_cases() -> Iterator[Case]:
    """The same on a CPU, small: that everything runs."""
    yield Case(SMOKE, "bare loop, eager", is_bare=True)
    yield Case(SMOKE, "eager, fp32 norms", options=_FP32_NORMS)
