"""`[compile]`: torch.compile of the model's blocks."""

from __future__ import annotations

from typing import Literal

from titan_launch.config.base import Array, Section

Component = Literal["model", "loss"]


class CompileConfig(Section):
    """The model's blocks, and the loss, compiled by torch.compile: fewer and larger kernels. The first step takes
    longer, and sums may round otherwise."""

    enable: bool = False
    """Compile. Each block becomes one graph, that equal blocks share; where units of precision rules lie inside of it,
    whose hooks cannot be in a graph, the largest modules around these do. What would break a graph is an error."""

    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """What makes code of a graph. `inductor`: Triton kernels on GPUs, C++ on CPUs (needs a compiler). For finding
    faults: `aot_eager` runs the graph's operations one by one, `eager` those of the model as they were traced."""

    components: Array[Component] = ("model",)
    """What is compiled: `model` (its blocks), `loss`. The compiled loss makes no fp32 copies of the logits, as
    `training.loss_chunks` does without it."""

    cache_folder: str | None = None
    """Where inductor keeps the kernels that it makes, and looks for them: a folder that outlasts the job, on storage
    that all hosts share, saves later starts most of the compilation. Unset: the compiler's own, which is in the host's
    temporary files unless `TORCHINDUCTOR_CACHE_DIR` says otherwise."""
