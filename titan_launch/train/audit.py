"""The audit of the first step: whether the model computes, stores and communicates in what was planned."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from typing import NamedTuple

from torch import nn

from titan_launch.core.errors import UserError, listed
from titan_launch.core.torch_release import is_tested_release
from titan_launch.distributed.collectives import on_all
from titan_launch.parallel.compile import eager
from titan_launch.parallel.pipeline import parts
from titan_launch.plan.types import ModelPlan
from titan_launch.precision.audit import Audit, compare, together
from titan_launch.precision.observation import Observations, look_at_storage, observe
from titan_launch.train.run import Run
from titan_launch.train.run_folder.records import AUDIT_FILE, record_audit
from titan_launch.train.step import Microbatch, StepResult

_log = logging.getLogger(__name__)


def is_audited(run: Run) -> bool:
    """Whether the step to come is the first of this process, and is watched."""
    return run.progress.step + 1 == run.first_step and audits(run)


def audits(run: Run) -> bool:
    """Whether `debug.audit_precision` wants the first step of this process watched."""
    model = run.config.model
    by_default = ":" in model.name or model.flavor == "debug"
    wanted = run.config.debug.audit_precision
    return by_default if wanted is None else wanted


def audited_step(run: Run, microbatches: list[Microbatch]) -> StepResult:
    """Train on one step's microbatches and watch; the numbers are those of any other step. Nothing is compiled in it.

    Raises UserError, on all ranks and before the update, for what is not as planned.
    """
    with ExitStack() as stack:
        watched = [
            _Watched(module, plan, stack.enter_context(observe(module, plan)))
            for module, plan in parts(run.model, run.plan)
        ]
        stack.enter_context(eager(run.config.compile))
        return run.step(microbatches, before_update=lambda: _settle(run, watched))


class _Watched(NamedTuple):
    """What runs as a whole (the model, or one of its pipeline stages), what was planned of it, and what was seen."""

    module: nn.Module
    plan: ModelPlan
    observed: Observations


def _settle(run: Run, watched: Sequence[_Watched]) -> None:
    for module, _, observed in watched:
        look_at_storage(module, observed)
    audit = together([compare(plan, run.layout, observed) for _, plan, observed in watched])
    if run.mesh.pipeline_group is not None:
        audit = together(on_all(lambda: audit, run.mesh.pipeline_group))
    differences = _differences_of_all_ranks(audit.differences(run.locate_key))
    if run.ranks.is_main:
        record_audit(run.folder, {"differences": differences, **audit.as_data()})
        for sink in run.sinks:
            sink.text("precision_audit", audit.as_markdown())
    _name_views(watched)
    if differences and is_tested_release():
        raise UserError(_explain(run, differences))
    if differences:  # on an untested release they do not end the run
        _log.warning("precision audit: differences on an untested release of PyTorch:\n  %s", "\n  ".join(differences))
    else:
        _log.info("precision audit: %s: as planned", _size(audit))


def _name_views(watched: Sequence[_Watched]) -> None:
    """Log the paths of units that return views. FSDP2 warns of them by class. The model's own output may be a view."""
    paths = [
        path
        for _, plan, observed in watched
        for unit in plan.units
        for path in unit.modules
        if path and observed.modules[path].returns_view
    ]
    if paths:
        advice = "nothing to do unless the model changes these in place: write x = x + y, not x += y"
        _log.info("outputs that are views: %s (%s)", listed(paths), advice)


def _differences_of_all_ranks(own: list[str]) -> list[str]:
    """Common to all ranks, so that all of them stop."""
    return list(dict.fromkeys(chain.from_iterable(on_all(lambda: own))))


def _size(audit: Audit) -> str:
    return f"{len(audit.modules)} modules, {len(audit.units)} units"


def _explain(run: Run, differences: list[str]) -> str:
    """A user's error, since a repetition would end alike: mostly the model's code, or a hook of it, casts something."""
    return "\n  ".join(
        [
            "precision audit: the first step was not as planned, and the run ends before its update "
            f"(all dtypes are in {run.folder / AUDIT_FILE}; usual causes are casts in the model's own forward or "
            "hooks; debug.audit_precision = false trains as it is)",
            *differences,
        ]
    )
