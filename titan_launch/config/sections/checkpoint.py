"""`[checkpoint]`: saving and resuming."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from titan_launch.config.sections.base import Array, Section

AsyncMode = Literal["disabled", "thread", "process"]


class CheckpointConfig(Section):
    """Saving and resuming."""

    enable: bool = False
    """Write checkpoints while the run trains, and resume from them when a run of the same name starts."""

    save_last: bool = True
    """Save the step at which the run ends, because `training.steps` are done or because a signal stopped it, also with
    `enable = false`. A run with `enable = false` never resumes from that checkpoint. `enable = true` always saves the
    last step."""

    interval: Annotated[int, Field(ge=1)] = 500
    """Steps between checkpoints. With `enable = true` the last step is always saved."""

    interval_minutes: Annotated[float, Field(gt=0)] | None = None
    """Minutes from one checkpoint to the next, besides `interval`. Unset: only `interval` counts."""

    async_mode: AsyncMode = "disabled"
    """The writer of checkpoints. `disabled`: training waits until the checkpoint is complete. `thread`: training
    waits only until its state is copied to the host's memory, and a thread writes the copy. `process`: a separate
    process writes the copy and shares nothing with training but that memory. One checkpoint is written at a time, and
    the run's end waits for it. With `enable = false` this key has no effect."""

    keep_latest: Annotated[int, Field(ge=0)] = 10
    """How many of the newest checkpoints are kept; older ones are deleted once a newer one is complete. 0: all."""

    keep_every: Annotated[int, Field(ge=0)] = 0
    """Checkpoints of steps that are a multiple of this are kept for good. 0: none."""

    keep_best: Annotated[int, Field(ge=0)] = 0
    """How many checkpoints with the lowest validation loss are kept, whatever their age; the link `best` points to the
    first. A checkpoint counts when its step was validated. 0: none."""

    load: int | str = "latest"
    """Checkpoint at which the run starts. `latest`: with `enable = true` the newest checkpoint of the run's folder that
    is complete and undamaged; the run starts at step 0 if there is none, or with `enable = false`. `none`: the run
    starts at step 0, and an earlier run in the folder is moved aside, not deleted. A number: that step of the run's
    folder; checkpoints of later steps are moved aside. A path: that checkpoint (`.../checkpoints/step-100`), or the
    newest of that folder, of another run. With `enable = true` a restart of the same launch always resumes from its
    own latest checkpoint."""

    initial_load_path: str | None = None
    """A checkpoint (or a run's folder, which stands for its newest) whose parameters and buffers a new run begins with;
    step, data and optimizer begin anew. A run that has checkpoints of its own goes on from these."""

    exclude_from_loading: Array[str] = ()
    """What is not taken from a checkpoint that `initial_load_path`, or `load` with a number or a path, names:
    `optimizer`, `data` (the position in it), `random`, with a path `step` (and the schedule), or parameters and buffers
    by glob (`output.**`). It begins as in a new run. A run that goes on from its own latest checkpoint takes
    everything."""

    accept_changes: bool = False
    """Resume although the experiment has changed: its configuration is another than the one that the run's folder
    records, or the training data is not what it was when the checkpoint was saved. Another model can never be
    resumed."""
