"""`[checkpoint]`: saving and resuming."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from titan_launch.config.sections.section import Array, Section
from titan_launch.core.object_store import is_url

AsyncMode = Literal["disabled", "thread", "process"]

LOAD_KEYWORDS = ("latest", "none")
"""Values of `load` that name no checkpoint."""


def _store_url(text: str) -> str:
    if is_url(text):
        return text
    raise ValueError("must be the URL of a folder in an object store: s3://BUCKET/FOLDER or gs://BUCKET/FOLDER")


class CheckpointConfig(Section):
    """Saving and resuming."""

    enable: bool = False
    """Save checkpoints during the run. A later run with the same `job.name` resumes from the newest checkpoint.
    With `false`, keys such as `interval` and `async_mode` have no effect, and are not refused."""

    save_last: bool = True
    """Save a checkpoint at the last step, even with `enable = false`. The last step is `training.steps`, or the step at
    which a signal stopped the run. `enable = true` always saves the last step. A run with `enable = false` never
    resumes from this checkpoint."""

    interval: Annotated[int, Field(ge=1)] = 500
    """Steps between checkpoints."""

    interval_minutes: Annotated[float, Field(gt=0)] | None = None
    """Minutes between checkpoints, in addition to `interval`. Unset: only `interval` counts."""

    async_mode: AsyncMode = "disabled"
    """Write checkpoints in a separate thread or process. `disabled`: training waits until the checkpoint is complete.
    `thread`: training waits only until the training state is copied to host memory; a thread writes the copy.
    `process`: as `thread`, but a separate process writes the copy. The two processes share only the memory of the copy.
    One checkpoint is written at a time. The run does not end before the last checkpoint is complete."""

    keep_latest: Annotated[int, Field(ge=0)] = 10
    """Number of newest checkpoints to keep. An older checkpoint is deleted after a newer checkpoint is complete. 0
    keeps all checkpoints."""

    keep_every: Annotated[int, Field(ge=0)] = 0
    """Never delete checkpoints whose step is a multiple of this number. 0 disables this rule."""

    keep_best: Annotated[int, Field(ge=0)] = 0
    """Number of checkpoints with the lowest validation loss to keep, whatever their age. The link `best` points to the
    checkpoint with the lowest loss. A checkpoint counts only if its step was validated. With `validation.patience`, a
    checkpoint is also saved after each validation with the lowest loss so far. 0 disables this rule."""

    save_frozen: bool = False
    """Also save the parameters that are never trained and have the values of `model.weights`. False: checkpoints omit
    these parameters, and record the path and the fingerprint of the folder `model.weights`. A run that resumes reads
    the parameters from `model.weights`, and refuses a folder with another fingerprint. All other parameters are always
    saved."""

    load: int | str = "latest"
    """The checkpoint from which the run starts. `latest`: the newest checkpoint in the run folder that is complete and
    undamaged. If the folder has no checkpoint, or if `enable = false`, the run starts at step 0. If all checkpoints are
    damaged, the run ends with an error. `none`: the run starts at step 0, and an earlier run in the folder is moved
    aside, not deleted. A number: the checkpoint of that step in the run folder; checkpoints of later steps are moved
    aside. A path: a checkpoint of another run (`.../checkpoints/step-100`), or the folder of another run, whose newest
    checkpoint is loaded. Exception: once a launch with `enable = true` has saved a checkpoint, ranks that `launch`,
    torchrun or Slurm restarts always resume from the latest checkpoint of this run."""

    store: Annotated[str, AfterValidator(_store_url)] | None = None
    """URL of a folder in an object store, such as `s3://bucket/runs`. Each complete checkpoint is also copied to
    `STORE/NAME/step-N/`, where `NAME` is `job.name`. Training does not wait for a copy, but the end of the run does. If
    several checkpoints wait to be copied, the newest checkpoint is copied next. Of the older checkpoints that wait,
    only those are copied that `keep_every` or `keep_best` keeps. With `keep_latest = 0`, all are copied. Copies are
    deleted by the same rules as checkpoints. With `load = "latest"`, a run resumes from the newest copy if the run
    folder has no newer undamaged checkpoint. `s3://` needs `pip install 'titan-launch[s3]'`, and `gs://` needs `pip
    install 'titan-launch[gs]'`."""

    initial_load_path: str | None = None
    """Path of a checkpoint from which a new run loads parameters and buffers. If the path is a run folder, its newest
    checkpoint is loaded, or its best checkpoint if `validation.patience` has ended that run. Step, data position and
    optimizer state start anew. If this run already has checkpoints, it resumes from its newest checkpoint instead."""

    exclude_from_loading: Array[str] = ()
    """Parts of a checkpoint that are not loaded, but start as in a new run. `optimizer`: the optimizer state. `ema`:
    the moving average of the weights, which then begins with the loaded parameters. `data`: the position in the data.
    `random`: the states of random number generators. `step`: the step and the schedule (only if `load` is a path). A
    glob, such as `output.**`: the matching parameters and buffers. This key applies only with `initial_load_path`, or
    if `load` is a number or a path. A run that resumes from its own latest checkpoint loads all parts."""

    accept_changes: bool = False
    """Resume even if the experiment has changed since the checkpoint. The experiment consists of the configuration, and
    of the content of the training data, the tokenizer, the initial weights and the second model of the loss. A
    checkpoint of a different model can never be resumed."""
