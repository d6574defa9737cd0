"""Start of a run from its own checkpoint, from another run's checkpoint, or anew."""

from __future__ import annotations

import hashlib
import logging
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from titan_launch.checkpoint.loading import (
    EVERYTHING,
    START_AGAIN,
    Selection,
    damage,
    find_checkpoint,
    find_result,
    load_state,
    newest_valid,
    partly_loaded,
)
from titan_launch.checkpoint.manager import CheckpointManager
from titan_launch.checkpoint.manifest import Origin, checkpoint_name, read_manifest
from titan_launch.checkpoint.state import Progress, TrainingState, Values
from titan_launch.checkpoint.store import CheckpointStore
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import dump_job
from titan_launch.config.sections.data import MixtureData
from titan_launch.core.errors import ConfigError, KeyPath, Problem, config_error, format_key
from titan_launch.core.fingerprint import Fingerprint, commit_of
from titan_launch.data.order import MixtureOrder, Order
from titan_launch.distributed.collectives import on_all_ranks, on_rank_0, on_rank_0_slowly, warn
from titan_launch.distributed.process_group import Ranks
from titan_launch.models.lora import Adapter
from titan_launch.optim.ema import WeightEMA
from titan_launch.train.base_weights import RunBase
from titan_launch.train.run_folder.attempt import Attempt
from titan_launch.train.run_folder.folder import (
    Load,
    check_earlier_run,
    checkpoint_folder,
    effective_load,
    supersede_later_checkpoints,
)
from titan_launch.train.run_folder.records import CONFIG_FILE

_log = logging.getLogger(__name__)

NOTHING_SAVED = "nothing was saved (checkpoint.enable and checkpoint.save_last are false)"
"""Clause for messages about a run without checkpoints."""

SAME_COMMAND = "run the same command again"
"""Advice for a run that resumes without further options."""


class FingerprintedSource(Protocol):
    """A data source of a run, or the folder of the loss's teacher or reference model."""

    def fingerprint(self, seed: int) -> Fingerprint | None:
        """Return sizes and digests of the files; None without files. `seed` selects the samples to hash."""

    def __len__(self) -> int:
        """Return the number of samples."""


Sources = Mapping[str, FingerprintedSource]
"""Sources of a run by section of the job file: `data`, `validation.data` if the run validates, and the key of the loss
that names a teacher or reference model. A source of a mixture has a section such as `data.sources.0`."""


@dataclass(frozen=True)
class Resumable:
    """The state of a run that checkpoints save, and the files on which the run depends."""

    state: TrainingState
    progress: Progress
    """A part of `state`."""

    order: Order
    """The order of the training samples."""

    sources: Sources
    base: RunBase
    """The folder of `model.weights`."""


def load_or_begin(
    config: JobConfig,
    attempt: Attempt,
    run: Resumable,
    store: CheckpointStore | None,
    adapters: Sequence[Adapter],
    ema: WeightEMA | None,
) -> None:
    """Load the checkpoint with which a run starts. If there is none, load the weights and the adapters that the job
    names, if any. Collective.

    `config`: the job as requested (`ResolvedJob.requested`). `store`: result of `open_store`. `adapters`: the LoRA
    adapters of the whole model. All ranks raise ConfigError or UserError if the checkpoint is missing, damaged or of
    another model. Without `checkpoint.accept_changes`, also raises ConfigError if the training data, or other files
    that this run depends on, have changed since the checkpoint was saved.
    """
    folder, selection = config.job.run_folder, Selection(config.checkpoint.exclude_from_loading)
    load = on_rank_0(lambda: effective_load(config, attempt))
    found = _own_checkpoint(folder, load, config.checkpoint.store, store) if config.checkpoint.enable else None
    if found is not None:
        if config.checkpoint.store is not None:
            on_rank_0(lambda: check_earlier_run(config, load))  # again, with the files from the store
        # A restart that loads the checkpoint with which its launch began must omit the same parts again.
        is_own = load == "latest" and found != partly_loaded(checkpoint_folder(folder), config.checkpoint)
        _resume(config, found, EVERYTHING if is_own else selection, run)
        if isinstance(load, int):
            on_rank_0(lambda: supersede_later_checkpoints(folder, load))
    elif isinstance(load, str) and load not in ("latest", "none"):
        _load(find_checkpoint(Path(load), ("checkpoint", "load")), run.state, selection)
    elif config.checkpoint.initial_load_path is not None:
        path = find_result(Path(config.checkpoint.initial_load_path), ("checkpoint", "initial_load_path"))
        _load(path, run.state, replace(selection, only_weights=True))
    else:
        if config.model.weights is not None:
            run.base.begin()
        if config.lora.adapter is not None:
            run.base.begin_adapters(adapters, config.lora)
        if ema is not None:
            ema.load_state_dict({})  # the average begins with these weights


def open_store(config: JobConfig, attempt: Attempt) -> CheckpointStore | None:
    """Return the object that manages the copies of checkpoints in `checkpoint.store`. Return None if this key is not
    set, and on all ranks except rank 0. Collective.

    Raises ConfigError on all ranks if the store cannot be used, or if the run would overwrite copies: the store has
    checkpoints of later steps, and the run does not resume from the newest checkpoint.
    """
    opened: list[CheckpointStore] = []

    def open_it() -> None:
        folder = config.job.run_folder
        store = CheckpointStore(config.checkpoint, config.job.name, checkpoint_folder(folder), folder / CONFIG_FILE)
        load = effective_load(config, attempt)
        resumes_newest = config.checkpoint.enable and load == "latest"
        begins_at = load if config.checkpoint.enable and isinstance(load, int) else -1
        later = [step for step in store.known if step > begins_at]
        if later and not resumes_newest:
            reason = (
                f"{store.url} has checkpoints up to step {max(later)}, which this run would overwrite; resume with "
                "--checkpoint.enable=true --checkpoint.load=latest, or choose another --job.name, or delete the copies"
            )
            raise config_error(("checkpoint", "store"), reason, config.checkpoint.store)
        opened.append(store)

    if config.checkpoint.store is not None:
        on_rank_0_slowly(open_it)
    return opened[0] if opened else None


def open_checkpoints(config: JobConfig, run: Resumable, ranks: Ranks, stack: ExitStack) -> CheckpointManager | None:
    """Return the manager that writes the run's checkpoints. Closing `stack` closes the manager. Collective. If the run
    saves no checkpoints, log a line that says so, and return None."""
    if not config.checkpoint.enable and not config.checkpoint.save_last:
        _log.info("checkpoints: none will be saved (checkpoint.enable and checkpoint.save_last are false)")
        return None
    fingerprints = {name: source.fingerprint(config.training.seed) for name, source in run.sources.items()}
    origin = Origin(
        world_size=ranks.world_size,
        config_digest=hashlib.sha256(dump_job(config).encode()).hexdigest(),
        gradient_accumulation=config.gradient_accumulation.model_dump(mode="json"),
        activation_checkpoint=config.activation_checkpoint.model_dump(mode="json"),
        data={name: fingerprint for name, fingerprint in fingerprints.items() if fingerprint is not None},
        command=shlex.join(["titan-launch", *sys.argv[1:]]),
        commit=on_rank_0(lambda: commit_of(Path.cwd())),
    )
    folder = checkpoint_folder(config.job.run_folder)
    checkpoints = CheckpointManager(folder, config.checkpoint, run.state, run.progress, origin, ranks.device)
    stack.push(lambda kind, *_: checkpoints.close(after_error=kind is not None))
    return checkpoints


def how_to_resume(config: JobConfig) -> str:
    """Return advice on how to resume the run from its newest checkpoint."""
    options = [] if config.checkpoint.enable else ["--checkpoint.enable=true"]
    options += [] if config.checkpoint.load == "latest" else ["--checkpoint.load=latest"]
    return f"{SAME_COMMAND} with {' '.join(options)}" if options else SAME_COMMAND


def advice_without_folder(config: JobConfig) -> str:
    """Return the advice for a run folder that was deleted or moved."""
    if not config.checkpoint.enable:
        return "the same command starts anew"
    return f"to resume, move the folder back and {how_to_resume(config)}; otherwise, the same command starts anew"


def _own_checkpoint(folder: Path, load: Load, url: str | None, store: CheckpointStore | None) -> Path | None:
    """Return the checkpoint of the run folder that `load` selects; None if `load` is a path or `"none"`, or if the
    folder has no checkpoint. Collective.

    For `"latest"`, damaged checkpoints that are newer than the result are renamed, and a newer checkpoint in `store` is
    downloaded. Raises UserError if all checkpoints are damaged, and ConfigError if `load` is a step whose checkpoint
    cannot be loaded.
    """
    checkpoints = checkpoint_folder(folder)
    if load == "latest":
        anew = f'choose another job.name, or delete the copies in {url} and set checkpoint.load = "none"'
        remedy = START_AGAIN if url is None else f"to start at step 0, {anew}"
        return newest_valid(checkpoints, set_damaged_aside=True, remedy=remedy, store=store)
    if not isinstance(load, int):
        return None
    checkpoint = checkpoints / checkpoint_name(load)
    reason = damage(checkpoint)
    if reason is not None:
        raise config_error(("checkpoint", "load"), f"{checkpoint} cannot be loaded: {reason}; name another step", load)
    return checkpoint


def _resume(config: JobConfig, checkpoint: Path, selection: Selection, run: Resumable) -> None:
    """Resume from a checkpoint of this run. Collective. Log a warning if the validation data has changed, and for each
    accepted change of the tokenizer and of the training data.

    Without `checkpoint.accept_changes`, raises ConfigError for a change of the training data, its tokenizer, the
    weights with which the run began, or the loss's teacher or reference model. If `selection` omits the position in the
    data, the training data may change.
    """
    sources, before = run.sources, read_manifest(checkpoint).base
    is_needed = before is not None and before.omitted > 0  # then `load_state` compares the folders
    change = "" if before is None or is_needed else run.base.change_since(before)[0]
    if change and not config.checkpoint.accept_changes:
        raise config_error(
            ("model", "weights"),
            f"the folder has changed since {checkpoint} was saved: {change}; a resumed run ignores the new weights: "
            "restore the folder, or resume with --checkpoint.accept_changes=true, or start anew with "
            "--checkpoint.load=none",
            config.model.weights,
        )
    second = config.loss.frozen_model()
    change = "" if second is None else _data_change(checkpoint, format_key(second.key), sources)
    if second is not None and change and not config.checkpoint.accept_changes:
        reason = "the loss would change: restore the folder, or accept this with --checkpoint.accept_changes=true"
        raise config_error(second.key, f"the folder has {change}; {reason}", second.folder)
    sections = [section for section in sources if section.partition(".")[0] == "data"]
    tokenizers = (_data_change(checkpoint, section, sources, _compare_tokenizers) for section in sections)
    tokenizer_change = next(filter(None, tokenizers), "")
    if tokenizer_change and not config.checkpoint.accept_changes:
        raise config_error(
            ("tokenizer", "path" if config.tokenizer.path else "kind"),
            f"the tokenizer has {tokenizer_change}; the model learned the ids of the other tokenizer: restore "
            "[tokenizer], or accept the change with --checkpoint.accept_changes=true, or start anew with "
            "--checkpoint.load=none",
            config.tokenizer.path or config.tokenizer.kind,
        )
    trained_on = sections if selection.takes("data") else []
    changes = {section: change for section in trained_on if (change := _data_change(checkpoint, section, sources))}
    if changes and not config.checkpoint.accept_changes:
        raise ConfigError(_changed_data(config, section, change) for section, change in changes.items())
    _load(checkpoint, run.state, selection)
    if tokenizer_change:
        warn(_log, "the tokenizer has %s", tokenizer_change)
    consumed = dict(zip(trained_on, run.order.consumed(run.progress.data_position), strict=False))
    for section, change in changes.items():
        epoch = consumed[section] / len(sources[section])
        warn(_log, "%s: the data has %s; training continues at epoch %.2f of the new data", section, change, epoch)
    for section in sources:
        if section.startswith("validation") and (change := _data_change(checkpoint, section, sources)):
            warn(_log, "%s: the data has %s; validation/loss before and after are not comparable", section, change)


def _changed_data(config: JobConfig, section: str, change: str) -> Problem:
    """Return the error for training data that has changed. `section`: its section, `data` or `data.sources.0`."""
    source: Any = config.data
    if isinstance(source, MixtureData):
        source = source.sources[int(section.rpartition(".")[2])]
    key: KeyPath = tuple(int(part) if part.isdecimal() else part for part in section.split("."))
    name = "path" if "path" in type(source).model_fields else "kind"
    reason = (
        f"the data has {change}; restore it, or use the new data with --checkpoint.accept_changes=true, or start anew "
        "with --checkpoint.load=none"
    )
    return Problem((*key, name), reason, getattr(source, name))


class ConsumedSamples:
    """The number of samples that a run has consumed, for each data source. Checkpoints save these numbers, and a resume
    compares them. So a run that changes the weights of a mixture neither repeats nor omits samples."""

    def __init__(self, order: Order, progress: Progress):
        """`progress`: a part of the same training state that is loaded before this part."""
        self._order, self._progress = order, progress

    def state_dict(self) -> Values:
        """Return the numbers by index of the source."""
        consumed = self._order.consumed(self._progress.data_position)
        return {str(index): torch.tensor(count) for index, count in enumerate(consumed)}

    def load_state_dict(self, state: Values) -> None:
        """Check the saved numbers. Raises ConfigError if this run's order gives other numbers at the same position in
        the data. An empty state is not checked, because the run then does not continue at the saved position."""
        ours = self._order.consumed(self._progress.data_position)
        saved = tuple(int(state.get(str(index), 0)) for index in range(len(ours)))
        if state and ours != saved:
            reason = (
                f"the order of the data has changed: of the first {sum(ours):,} samples, this job takes "
                f"{_listed(ours)} from its sources, but the run took {_listed(saved)}; keep the weights of past steps, "
                "and change only the weights of later steps (weight = [[0, 3], [1000, 1]]), or start anew with "
                "--checkpoint.load=none"
            )
            raise config_error(("data", "sources") if isinstance(self._order, MixtureOrder) else ("data",), reason)


def _listed(counts: Iterable[int]) -> str:
    return " + ".join(f"{count:,}" for count in counts)


def _compare_tokenizers(before: Fingerprint, now: Fingerprint) -> str:
    """Return a clause with the digests of two tokenizers; "" if the tokenizers are the same."""
    return f"digest {now.tokenizer} (before: {before.tokenizer})" if before.tokenizer != now.tokenizer else ""


def _data_change(
    checkpoint: Path,
    section: str,
    sources: Sources,
    compare: Callable[[Fingerprint, Fingerprint], str] = Fingerprint.changed_to,
) -> str:
    """Return a clause that describes how the data of a section has changed since a checkpoint was saved. Collective.

    Return "" if no rank finds a change, or if the checkpoint or this job has no data for the section. `compare`:
    function of the saved and the present fingerprint that returns the clause, or "" if they are equal.
    """
    before = read_manifest(checkpoint).data.get(section)
    if before is None or section not in sources:
        return ""

    def own_change() -> str:
        now = sources[section].fingerprint(before.seed)
        return "" if now is None else compare(before, now)

    change = next(filter(None, on_all_ranks(own_change)), "")
    return change and f"changed since {checkpoint} was saved: {change}"


def _load(checkpoint: Path, state: TrainingState, selection: Selection) -> None:
    load_state(checkpoint, state, selection)
    what = "started with the parameters and buffers of" if selection.only_weights else "resumed from"
    _log.info("%s %s", what, checkpoint)
