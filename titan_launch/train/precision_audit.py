"""Precision audit of the first step: comparison of planned and observed dtypes and collectives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import NamedTuple

from torch import nn
from torch.utils.checkpoint import CheckpointError

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import UserError, listed
from titan_launch.core.observer import Observer, StepResult, WatchedStep
from titan_launch.core.torch_release import is_tested_release
from titan_launch.distributed.collectives import on_all_ranks, on_rank_0
from titan_launch.distributed.mesh import Mesh
from titan_launch.parallel.compile import eager
from titan_launch.parallel.expert_balance import choices_watched
from titan_launch.parallel.pipeline import parts
from titan_launch.plan.report.unit_table import KeyLocator
from titan_launch.plan.types import ModelPlan
from titan_launch.precision.audit import compare, merge_audits
from titan_launch.precision.observation import Observations, look_at_storage, observe
from titan_launch.train.output import RunOutput
from titan_launch.train.resolve_job import ResolvedJob
from titan_launch.train.run_folder.records import AUDIT_FILE, record_table

_log = logging.getLogger(__name__)


def is_audited(config: JobConfig) -> bool:
    """Return True if the job audits the first step: the value of `debug.audit_precision`. If this key is not set,
    return True for the flavor "debug" and for models that are not of this package: a user's own model, and classes of
    `transformers`."""
    by_default = not config.model.is_of_package or config.model.flavor == "debug"
    wanted = config.debug.audit_precision
    return by_default if wanted is None else wanted


class _Watched(NamedTuple):
    """The model, or one of its pipeline stages, with its plan and its observed dtypes."""

    module: nn.Module
    plan: ModelPlan
    observed: Observations
    other_choices: Callable[[], list[str]]
    """Function from `choices_watched` that returns a line for each mixture of experts that chose other experts in the
    second forward of activation checkpointing."""


class PrecisionAudit(Observer):
    """The audit of the first step of this process. The audited step runs without compilation."""

    def __init__(self, job: ResolvedJob, model: nn.Module, mesh: Mesh, output: RunOutput, locate_key: KeyLocator):
        self._job = job
        self._model = model
        self._mesh = mesh
        self._output = output
        self._locate_key = locate_key
        self._watched: list[_Watched] = []
        self._is_due = True
        self._hooks = ExitStack()

    def before_step(self, step: WatchedStep) -> None:
        """Watch the step if it is the first step of this process."""
        if not self._is_due:
            return
        self._is_due = False
        for module, plan in parts(self._model, self._job.plan):
            observed = self._hooks.enter_context(observe(module, plan))
            other_choices = self._hooks.enter_context(choices_watched(module))
            self._watched.append(_Watched(module, plan, observed, other_choices))
        self._hooks.enter_context(eager(self._job.config.compile))

    def before_update(self) -> None:
        """Compare the observed dtypes and collectives of the step with the plan, and write the result to the run
        folder. Collective.

        Raises UserError on all ranks if the observations differ from the plan. Also raises UserError if a mixture of
        experts chose other experts in the second forward of activation checkpointing. On an untested release of
        PyTorch, log a warning instead.
        """
        if not self._watched:
            return
        for module, _, observed, _ in self._watched:
            look_at_storage(module, observed)
        audit = merge_audits([compare(plan, self._job.layout, observed) for _, plan, observed, _ in self._watched])
        if self._mesh.pipeline_group is not None:
            audit = merge_audits(on_all_ranks(lambda: audit, self._mesh.pipeline_group))
        own = [*audit.differences(self._locate_key), *_other_choices(self._watched)]
        # All ranks get the same list, so they all stop if one rank has found a difference.
        differences = list(dict.fromkeys(chain.from_iterable(on_all_ranks(lambda: own))))
        folder = self._output.folder.path
        on_rank_0(lambda: record_table(folder / AUDIT_FILE, {"differences": differences, **audit.as_data()}))
        for sink in self._output.sinks:
            sink.text("precision_audit", audit.as_markdown())
        _log_views(self._watched)
        if differences and is_tested_release():
            reason = (
                f"{_ENDS} (all dtypes are in {folder / AUDIT_FILE}; usual causes are casts in the model's own forward "
                "or hooks; debug.audit_precision = false disables the audit)"
            )
            # A UserError, because `launch` does not restart the run after this class: the audit would fail again.
            raise UserError("\n  ".join([reason, *differences]))
        if differences:  # on an untested release, differences do not end the run
            _log.warning(
                "precision audit: the first step was not as planned; the run continues, because this release of "
                "PyTorch is not tested:\n  %s",
                "\n  ".join(differences),
            )
        else:
            _log.info("precision audit: %d modules, %d units: as planned", len(audit.modules), len(audit.units))

    def after_step(self, step: WatchedStep, result: StepResult) -> None:
        """Remove all hooks."""
        self._hooks.close()
        self._watched.clear()

    def abandon_step(self, error: BaseException) -> None:
        """Remove all hooks. Keep their observations, because `explain` reads them."""
        self._hooks.close()

    def explain(self, error: BaseException) -> UserError | None:
        """Return the UserError if a mixture of experts chose other experts in the second forward of activation
        checkpointing, so that shapes differed. Return None for a different error."""
        if not isinstance(error, CheckpointError) or not (other_choices := _other_choices(self._watched)):
            return None
        return UserError("\n  ".join([_ENDS, *other_choices]))


def _other_choices(watched: Sequence[_Watched]) -> list[str]:
    """Return a line for each mixture of experts whose second forward chose other experts than the first."""
    return [line for part in watched for line in part.other_choices()]


def _log_views(watched: Sequence[_Watched]) -> None:
    """Log the paths of the modules that return views, because FSDP2's warning names only a class. The root module is
    not listed."""
    paths = [
        path
        for _, plan, observed, _ in watched
        for unit in plan.units
        for path in unit.modules
        if path and observed.modules[path].returns_view
    ]
    if paths:
        advice = (
            "if the model changes these outputs in place, write x = x + y instead of x += y; otherwise nothing to do"
        )
        _log.info("outputs that are views: %s (%s)", listed(paths), advice)


_ENDS = "precision audit: the first step was not as planned, and the run ends before its update"
