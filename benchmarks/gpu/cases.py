"""Cases of the table: model shapes, and the ways to train each shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A Llama with its batch size and sequence length."""

    name: str
    flavor: str
    args: Mapping[str, int]
    """Overrides of the flavor's arguments."""

    seq_len: int
    batch: int
    """Sequences in a microbatch."""

    steps: int = 8
    """Measured steps. As many warm-up steps come before them."""

    eager_s: float = 18
    """Duration of an eager run on an H200, start-up included."""


@dataclass(frozen=True)
class Published:
    """Published results of another launcher for the same shape on the same GPU."""

    source: str
    tokens_per_second: int
    mfu_percent: float
    peak_gib: float

    def __str__(self) -> str:
        return f"{self.tokens_per_second:,} tokens/s, {self.mfu_percent} %, {self.peak_gib} GiB ({self.source})"


@dataclass(frozen=True)
class Case:
    """One training; a row of the table."""

    shape: Shape
    label: str
    is_bare: bool = False
    microbatches: int = 1
    is_compiled: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the job file, used by the launcher only."""

    published: Published | None = None

    @property
    def name(self) -> str:
        """Shape and label, for messages and `--only`."""
        return f"{self.shape.name}, {self.shape.seq_len} x {self.shape.batch}, {self.label}"

    @property
    def expected_s(self) -> float:
        """Duration on an H200, compilation included. A case does not begin if less time is left."""
        return self.shape.eager_s + 6 * self.is_compiled

    def does_the_same_as(self, bare: Case) -> bool:
        """Return True if a bare loop does the same work, so that their step times can be compared."""
        is_plain = not self.is_bare and not self.options and self.microbatches == 1
        return is_plain and bare.is_bare and (bare.shape, bare.is_compiled) == (self.shape, self.is_compiled)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all microbatches of a step."""
        return self.shape.seq_len * self.shape.batch * self.microbatches


WIDTH_8B = Shape("8B width, 8 layers", "8B", {"n_layers": 8}, 2048, 4)
OTHER_SHAPES = (
    Shape("8B width, 8 layers", "8B", {"n_layers": 8}, 8192, 1),
    Shape("1B", "1B", {}, 2048, 8),
    Shape("1B", "1B", {}, 8192, 2),
)
ANCHOR = Shape("8B", "8B", {}, 4096, 2, steps=5, eager_s=85)
SMALL_ANCHOR = Shape("8B, 8 layers", "8B", {"n_layers": 8}, 4096, 2, steps=5, eager_s=30)
SMOKE = Shape("smoke", "debug", {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 128}, 64, 2)

FLOAT8 = {"float8.enable": True}
FLOAT8_TENSORWISE = {**FLOAT8, "float8.recipe": "tensorwise"}
FP32_NORMS = {"precision.rules": '[{type = "RMSNorm", param_dtype = "float32"}]'}
BF16_STORAGE = {"precision.storage_dtype": "bfloat16", "precision.reduce_dtype": "bfloat16"}
# With fp32 storage, an H200 has no room for the fp32 logits of a whole microbatch or for unsharded bf16 parameters.
FP32_STORAGE = {"loss.chunks": 8, "parallelism.fsdp_reshard_after_forward": "always"}

KEMPNER_FORGE = Published("KempnerForge, one H200, April 2026", 10_471, 57.8, 80.7)


def all_cases() -> Iterator[Case]:
    """Yield the cases, the most important first: the last ones do not run if the time is short."""
    yield Case(WIDTH_8B, "bare loop, compiled", is_bare=True, is_compiled=True)
    yield Case(WIDTH_8B, "compiled", is_compiled=True)
    yield Case(WIDTH_8B, "bare loop, eager", is_bare=True)
    yield Case(WIDTH_8B, "eager")
    yield from anchor_cases()
    yield Case(WIDTH_8B, "compiled, float8 rowwise", is_compiled=True, options=FLOAT8)
    for shape in OTHER_SHAPES:
        yield Case(shape, "bare loop, compiled", is_bare=True, is_compiled=True)
        yield Case(shape, "compiled", is_compiled=True)
        yield Case(shape, "compiled, float8 rowwise", is_compiled=True, options=FLOAT8)
        yield Case(shape, "eager")
    for mode in ("immediate", "deferred"):
        options = {"gradient_accumulation.mode": mode}
        yield Case(WIDTH_8B, f"eager, 4 microbatches, {mode}", microbatches=4, options=options)
    yield Case(WIDTH_8B, "eager, fp32 norms", options=FP32_NORMS)
    yield Case(WIDTH_8B, "compiled, fp32 norms", is_compiled=True, options=FP32_NORMS)
    yield Case(WIDTH_8B, "compiled, float8 tensorwise", is_compiled=True, options=FLOAT8_TENSORWISE)


def anchor_cases() -> Iterator[Case]:
    """Yield the published run in its own shape, the same with fp32 storage, and with the layers that fit into 80 GB."""
    for shape, label, storage, published in (
        (ANCHOR, "bf16 storage", BF16_STORAGE, KEMPNER_FORGE),
        (ANCHOR, "fp32 storage", FP32_STORAGE, None),
        (SMALL_ANCHOR, "bf16 storage", BF16_STORAGE, None),
    ):
        label = f"compiled, full activation checkpointing, {label}"
        options = {"activation_checkpoint.mode": "full", **storage}
        yield Case(shape, label, microbatches=4, is_compiled=True, options=options, published=published)


def smoke_cases() -> Iterator[Case]:
    """Yield two cases with a tiny shape for a CPU."""
    yield Case(SMOKE, "bare loop, eager", is_bare=True)
    yield Case(SMOKE, "eager, fp32 norms", options=FP32_NORMS)
