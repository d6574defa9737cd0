"""`[checkpoint]`: saving and resuming."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from titan_launch.config.base import Array, Section

AsyncMode = Literal["disabled", "thread", "process"]


class CheckpointConfig(Section):
    """Saving and resuming."""

    enable: bool = False
    """Whether checkpoints are written, and whether a run with the same name resumes from them."""

    interval: Annotated[int, Field(ge=1)] = 500
    """Steps between checkpoints. The last step is always saved."""

    interval_minutes: Annotated[float, Field(gt=0)] | None = None
    """Minutes from one checkpoint to the next, besides `interval`. Unset: only `interval` counts."""

    async_mode: AsyncMode = "disabled"
    """Who writes. `disabled`: training waits until the checkpoint is complete. `thread`: training waits only until its
    state is copied to the host's memory, and a thread writes the copy; `process`: a process of its own writes it,
    which shares nothing with training but that memory. One checkpoint is written at a time, and the run's end waits for
    it."""

    keep_latest: Annotated[int, Field(ge=0)] = 10
    """How many of the newest checkpoints are kept; older ones are deleted once a newer one is complete. 0: all."""

    keep_every: Annotated[int, Field(ge=0)] = 0
    """Checkpoints of steps that are a multiple of this are kept for good. 0: none."""

    keep_best: Annotated[int, Field(ge=0)] = 0
    """How many checkpoints with the lowest validation loss are kept, whatever their age; the link `best` points to the
    first. A checkpoint counts when its step was validated. 0: none."""

    load: int | str = "latest"
    """Where the run starts. `latest`: the newest checkpoint of the run's folder that is complete and undamaged, if
    there is one. `none`: anew; what an earlier run left in the folder is moved aside, not deleted. A number: that step
    of the run's folder; checkpoints of later steps are moved aside. A path: that checkpoint
    (`.../checkpoints/step-100`), or the newest of that folder, of another run. A restart of the same launch goes on
    from its own latest checkpoint in any case."""

    initial_load_path: str | None = None
    """A checkpoint (or a run's folder, which stands for its newest) whose parameters and buffers a new run begins with;
    step, data and optimizer begin anew. A run that has checkpoints of its own goes on from these."""

    exclude_from_loading: Array[str] = ()
    """What is not taken from a checkpoint that `initial_load_path`, or `load` with a number or a path, names:
    `optimizer`, `data` (the position in it), `random`, with a path `step` (and the schedule), or parameters and buffers
    by glob (`output.**`). It begins as in a new run. A run that goes on from its own latest checkpoint takes
    everything."""

    accept_changes: bool = False
    """Resume although the configuration of the experiment is another than the one that the run's folder records.
    Another model can never be resumed."""
