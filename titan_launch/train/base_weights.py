"""The folder that `model.weights` names. A new run reads the initial values of its parameters from this folder. A
resumed run reads the values of the parameters that checkpoints omit."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from torch import nn

from titan_launch.checkpoint.manifest import BaseRecord
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.model import LoRAConfig
from titan_launch.core.errors import ConfigError, config_error, listed
from titan_launch.core.object_store import is_url, with_urls
from titan_launch.core.terminal import counted
from titan_launch.distributed.collectives import on_all_ranks
from titan_launch.models.architectures import resolve_args
from titan_launch.models.decoder.huggingface_tensors import Piece
from titan_launch.models.huggingface.files import WeightsError
from titan_launch.models.init import copy_whole, differing_weights, load_weights
from titan_launch.models.weights.adapters import Adapter, AdapterFolder, Target, file_places, targets_of
from titan_launch.models.weights.folder import Weights, WeightsFolder, find_weights, open_weights
from titan_launch.plan.hardware import format_bytes
from titan_launch.plan.types import Inventory

_log = logging.getLogger(__name__)

_KEY = ("model", "weights")


class RunBase:
    """The folder that `model.weights` names, if any. This class implements `checkpoint.state.BaseWeights`."""

    def __init__(self, model: nn.Module, config: JobConfig, inventory: Inventory):
        """Read the headers of the folder's files. An error of this read is raised only when values are needed. `model`:
        the allocated model of this rank. `inventory`: the modules of the whole model."""
        self._model, self._config, self._inventory = model, config.model, inventory
        self._saves_frozen = config.checkpoint.save_frozen
        self._folder: WeightsFolder | None = None
        if config.model.weights is not None:
            with suppress(ConfigError):
                self._folder = open_weights(config.model)
        self._fingerprint = None if self._folder is None else self._folder.fingerprint()
        self._has_begun = False
        self.omitted: frozenset[str] = frozenset()

    def begin_adapters(self, adapters: Sequence[Adapter], config: LoRAConfig) -> None:
        """Copy the values in the folder `lora.adapter` into the adapters; collective. Each rank reads the adapters of
        its pipeline stage, and copies only its shards. `adapters`: the adapters of the whole model. Raises ConfigError,
        on all ranks alike, if the folder cannot be read, or if its adapters do not fit the job."""
        assert config.adapter is not None
        path = Path(config.adapter)

        def load() -> None:
            try:
                folder = AdapterFolder(path)
                if self._folder is not None:
                    folder.ignore_copies(self._folder)
                pieces, targets = self._targets(adapters, folder)
                folder.check(targets, pieces, config, None if self._fingerprint is None else self._fingerprint.digest)
                if shared := [target.path for target in targets if folder.shares_a(target)]:
                    message = (
                        "adapters: %s: several modules share a matrix A in the folder; here, each trains its own copy"
                    )
                    _log.info(message, listed(shared))
                own = dict(self._model.named_parameters())
                for target in targets:
                    if any(part.adapter.a in own for part in target.parts):
                        for name, values in folder.read(target):
                            copy_whole(own[name], values)
            except WeightsError as error:
                raise config_error(("lora", "adapter"), str(error), config.adapter) from None

        on_all_ranks(load)
        _log.info("adapters: initial values from %s", path)

    def _targets(
        self, adapters: Sequence[Adapter], folder: AdapterFolder
    ) -> tuple[Mapping[str, Piece], Sequence[Target]]:
        """Return the `Piece` of each weight in files, and the `peft` target of each adapter. Both use the same names as
        the adapter folder: the names of this package, or those of `transformers`."""
        adapted = {name for adapter in adapters for name in (adapter.a, adapter.b)}
        shapes = {
            name: tensor.shape
            for name, tensor in self._inventory.parameters.items()
            if name not in adapted and tensor.tied_to is None
        }
        places, pieces = file_places(self._config, shapes, None, is_plain=True)
        plain = targets_of(adapters, places, pieces)
        if not self._config.is_of_package or any(key in folder.tensors for target in plain for key in target.keys):
            return pieces, plain
        base = None if self._folder is None else self._folder.config
        args = None if base is None else resolve_args(base.name, base.flavor, base.args)
        places, pieces = file_places(self._config, shapes, getattr(args, "vocab_size", None))
        return pieces, targets_of(adapters, places, pieces)

    @property
    def record(self) -> BaseRecord | None:
        """The facts about the folder that a checkpoint's manifest records; None without a readable folder."""
        if self._fingerprint is None:
            return None
        names = {self._first_names[name] for name in self.omitted}
        num_bytes = self._weights.bytes_of(names) if names else 0
        # If the checkpoint omits parameters, record the URL instead of a local copy: other hosts can read the URL, too.
        weights = str(with_urls(self._config.weights) if names else self._config.weights)
        folder = weights if is_url(weights) else str(Path(weights).resolve())
        return BaseRecord(folder, self._fingerprint, len(names), num_bytes)

    def begin(self) -> None:
        """Copy the weights into the model. Let later checkpoints omit the parameters that are never trained, unless
        `checkpoint.save_frozen` is set. Collective. Each rank reads only its shards. Raises ConfigError, on all ranks
        alike, if the folder cannot be read, or lacks tensors of the model."""
        self._copy(None)
        self._omit(frozenset())

    def change_since(self, base: BaseRecord) -> tuple[str, str]:
        """Return (clause, digest). The clause says how the folder differs from `base`, the folder in a checkpoint's
        manifest. The digest is that of the folder on the lowest rank that finds a difference. Both are "" if no rank
        finds a difference, or if the folder cannot be read. Collective."""
        own = self._fingerprint
        found = on_all_ranks(lambda: ("", "") if own is None else (base.fingerprint.changed_to(own), own.digest))
        return next((of_rank for of_rank in found if of_rank[0]), ("", ""))

    def find(self, checkpoint: Path, base: BaseRecord, names: Collection[str]) -> Collection[str]:
        """Return the names in `names` for which the folder has values. See `checkpoint.state.BaseWeights`."""
        needed = (
            f"{checkpoint} omits {counted(base.omitted, 'never-trained parameter')}; their values are in "
            f"{base.folder}, with the fingerprint {base.fingerprint.digest}; set model.weights to the present path "
            "of this folder"
        )
        if self._config.weights is None:
            raise config_error(_KEY, f"is required: {needed}")
        change, digest = self.change_since(base)
        if change:
            raise config_error(_KEY, f"has the fingerprint {digest} ({change}), but {needed}", self._config.weights)
        try:
            on_all_ranks(lambda: len(self._weights.pieces))
        except ConfigError as error:
            raise config_error(_KEY, f"{error.problems[0].reason}; {needed}", self._config.weights) from None
        return [name for name in names if self._first_names.get(name) in self._weights.pieces]

    def read(self, missing: Collection[str]) -> None:
        """Read the parameters `missing` from the folder. See `checkpoint.state.BaseWeights`."""
        if self._has_begun and self.omitted.issuperset(missing):
            return  # after a rollback: parameters that are never trained have not changed
        read = {self._first_names[name] for name in missing}
        if read:
            self._copy(read)

        def differing() -> Collection[str]:
            compared = {self._first_names[name] for name in self._held} - read  # raises without the model's tensors
            return differing_weights(self._model, self._weights, compared) if compared else []

        self._omit({name for of_rank in on_all_ranks(differing) for name in of_rank})

    def _copy(self, names: Collection[str] | None) -> None:
        """Copy tensors of the folder into the model. `names`: names of parameters; None copies all tensors.
        Collective."""
        start = time.perf_counter()
        loaded = on_all_ranks(lambda: load_weights(self._model, self._weights, names))[0]
        source = self._weights.folder.config
        for note in source.notes:
            _log.info("weights: %s", note)
        message = "weights: from %s (%s); this rank read %s in %.1f s"
        seconds = time.perf_counter() - start
        _log.info(message, self._config.weights, source.model_type or source.name, format_bytes(loaded), seconds)

    def _omit(self, differing: Collection[str]) -> None:
        """Let later checkpoints omit each parameter that is never trained and whose value the folder has on every host.
        With `checkpoint.save_frozen`, checkpoints omit nothing. `differing`: first names of the parameters that are not
        omitted, because their values differ from the folder's. Collective."""
        self._has_begun = True
        own = frozenset(name for name in self._held if self._first_names[name] not in differing)
        # Ranks exchange the names that their folders lack. All other names could be gigabytes in a large job.
        lacking = on_all_ranks(lambda: self._frozen - self._held if self._held else None)
        self.omitted = frozenset() if None in lacking else own.difference(*filter(None, lacking))
        if self.omitted and self.record is not None:
            message = "checkpoints omit %d parameters (%s) that are never trained; a resume reads them from %s"
            _log.info(message, self.record.omitted, format_bytes(self.record.omitted_bytes), self._config.weights)

    @cached_property
    def _weights(self) -> Weights:
        """The values in the folder for the model's parameters and buffers. Raises ConfigError if the folder cannot be
        read, or lacks tensors of the model."""
        return find_weights(self._config, self._inventory, getattr(self._model, "places_in_files", None), self._folder)

    @cached_property
    def _first_names(self) -> dict[str, str]:
        """Dict from each name of a parameter to its first name in the model. A shared parameter has several names."""
        return {name: tensor.tied_to or name for name, tensor in self._inventory.parameters.items()}

    @cached_property
    def _frozen(self) -> frozenset[str]:
        """All names of the parameters that are never trained."""
        return frozenset(name for name, tensor in self._inventory.parameters.items() if not tensor.requires_grad)

    @cached_property
    def _held(self) -> frozenset[str]:
        """All names of the parameters that are never trained and whose values the folder has. Empty without a folder,
        and with `checkpoint.save_frozen`."""
        if self._saves_frozen or self._folder is None or not self._frozen:
            return frozenset()
        return frozenset(name for name in self._frozen if self._first_names[name] in self._weights.pieces)
