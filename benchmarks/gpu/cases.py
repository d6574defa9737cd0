"""The trainings of the table: their shapes, and the ways to train each shape."""

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
    """Overrides of the flavor's arguments."""

    seq_len: int
    batch: int
    """Sequences in a microbatch."""

    steps: int = 8
    """Measured steps. As many warm-up steps come before them."""


@dataclass(frozen=True)
class Published:
    """Numbers that others have published for the same shape on the same GPU."""

    source: str
    tokens_per_second: int
    mfu_percent: float
    peak_gib: float


@dataclass(frozen=True)
class Case:
    """One training; a row of the table."""

    shape: Shape
    label: str
    is_bare: bool = False
    microbatches: int = 1
    is_compiled: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the job file; for the launcher only."""

    published: Published | None = None
    expected_s: float = 30
    """Estimate of the duration, start-up and compilation included. A case does not begin if less time is left."""

    @property
    def name(self) -> str:
        """Shape and label, for messages and `--only`."""
        return f"{self.shape.name}, {self.shape.seq_len} x {self.shape.batch}, {self.label}"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all microbatches of a step."""
        return self.shape.seq_len * self.shape.batch * self.microbatches


def bare(shape: Shape, is_compiled: bool) -> Case:
    """Return the case of the bare FSDP2 loop."""
    return _case(shape, "bare loop", is_compiled, is_bare=True)


def launcher(shape: Shape, is_compiled: bool, label: str = "", **changes: Any) -> Case:
    """Return a case of the launcher; `label` names what differs from its defaults."""
    return _case(shape, label, is_compiled, **changes)


def _case(shape: Shape, label: str, is_compiled: bool, **changes: Any) -> Case:
    how = "compiled" if is_compiled else "eager"
    parts = (label, how) if label == "bare loop" else (how, label)
    expected = {"expected_s": 55 if is_compiled else 30}
    return Case(shape, ", ".join(filter(None, parts)), is_compiled=is_compiled, **{**expected, **changes})


WIDTH_8B = Shape("8B width, 8 layers", "8B", {"n_layers": 8}, 2048, 4)
SHAPES = (
    WIDTH_8B,
    Shape("8B width, 8 layers", "8B", {"n_layers": 8}, 8192, 1),
    Shape("1B", "1B", {}, 2048, 8),
    Shape("1B", "1B", {}, 8192, 2),
)
ANCHOR = Shape("8B", "8B", {}, 4096, 2, steps=5)
SMOKE = Shape("smoke", "debug", {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 128}, 64, 2)

FLOAT8 = {"float8.enable": True}
FLOAT8_TENSORWISE = {**FLOAT8, "float8.recipe": "tensorwise"}
FP32_NORMS = {"precision.rules": '[{type = "RMSNorm", param_dtype = "float32"}]'}
BF16_STORAGE = {"precision.storage_dtype": "bfloat16", "precision.reduce_dtype": "bfloat16"}
# With fp32 storage, an H200 has no room for the fp32 logits of a whole microbatch or for unsharded bf16 parameters.
FP32_STORAGE = {"training.loss_chunks": 8, "parallelism.fsdp_reshard_after_forward": "always"}

KEMPNER_FORGE = Published("KempnerForge, one H200, April 2026", 10_471, 57.8, 80.7)


def all_cases() -> Iterator[Case]:
    """Yield the most telling cases first, since the last ones do not run if the time is short."""
    for is_compiled in (True, False):
        yield bare(WIDTH_8B, is_compiled)
        yield launcher(WIDTH_8B, is_compiled)
    yield from anchor_cases()
    yield launcher(WIDTH_8B, True, "float8 rowwise", options=FLOAT8)
    for shape in SHAPES[1:]:
        yield bare(shape, True)
        yield launcher(shape, True)
        yield launcher(shape, True, "float8 rowwise", options=FLOAT8)
        yield launcher(shape, False)
    for mode in ("immediate", "deferred"):
        options = {"gradient_accumulation.mode": mode}
        yield launcher(WIDTH_8B, False, f"4 microbatches, {mode}", microbatches=4, options=options)
    yield launcher(WIDTH_8B, False, "fp32 norms", options=FP32_NORMS)
    yield launcher(WIDTH_8B, True, "fp32 norms", options=FP32_NORMS)
    yield launcher(WIDTH_8B, True, "float8 tensorwise", options=FLOAT8_TENSORWISE)


def anchor_cases() -> Iterator[Case]:
    """Yield the published run in its own shape, and the same with fp32 storage."""
    for label, storage, published in (
        ("bf16 storage", BF16_STORAGE, KEMPNER_FORGE),
        ("fp32 storage", FP32_STORAGE, None),
    ):
        options = {"activation_checkpoint.mode": "full", **storage}
        label = f"full activation checkpointing, {label}"
        yield launcher(ANCHOR, True, label, microbatches=4, options=options, published=published, expected_s=110)


def smoke_cases() -> Iterator[Case]:
    """Yield two cases with a tiny shape for a CPU."""
    yield bare(SMOKE, False)
    yield launcher(SMOKE, False, "fp32 norms", options=FP32_NORMS)
