"""Precision audit of the first step: comparison of planned and observed dtypes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import NamedTuple

from torch import nn
from torch.utils.checkpoint import CheckpointError

from titan_launch.core.errors import UserError, listed
from titan_launch.core.torch_release import is_tested_release
from titan_launch.distributed.collectives import on_all_ranks
from titan_launch.parallel.compile import eager
from titan_launch.parallel.expert_balance import choices_watched
from titan_launch.parallel.pipeline import parts
from titan_launch.plan.types import ModelPlan
from titan_launch.precision.audit import Audit, compare, merge_audits
from titan_launch.precision.observation import Observations, look_at_storage, observe
from titan_launch.train.run import Run
from titan_launch.train.run_folder.records import AUDIT_FILE, record_audit

_log = logging.getLogger(__name__)


def audits(run: Run) -> bool:
    """Return True if `debug.audit_precision` enables the audit. By default it is on for custom and debug models."""
    model = run.config.model
    by_default = not model.is_of_package or model.flavor == "debug"
    wanted = run.config.debug.audit_precision
    return by_default if wanted is None else wanted


@contextmanager
def audit_of_step(run: Run, step: int) -> Iterator[Callable[[], None] | None]:
    """Audit the step in the block if `step` is the first step of this process and the audit is enabled.

    Yield a function that the step must call before its update; None if the step is not audited. The function raises
    UserError on all ranks if the observed dtypes or collectives differ from the plan, or if activation checkpointing
    chooses other experts in its second forward. An audited step runs without compilation. The audit does not change the
    step's results.
    """
    if step != run.first_step or not audits(run):
        yield None
        return
    with ExitStack() as stack:
        watched = [
            _Watched(
                module, plan, stack.enter_context(observe(module, plan)), stack.enter_context(choices_watched(module))
            )
            for module, plan in parts(run.model, run.plan)
        ]
        stack.enter_context(eager(run.config.compile))
        try:
            yield lambda: _compare_with_plan(run, watched)
        except CheckpointError as error:  # an expert had another number of rows in the second forward
            other_choices = _other_choices(watched)
            if not other_choices:
                raise
            raise UserError("\n  ".join([_ENDS, *other_choices])) from error


class _Watched(NamedTuple):
    """The model, or one of its pipeline stages, with its plan and its observed dtypes."""

    module: nn.Module
    plan: ModelPlan
    observed: Observations
    other_choices: Callable[[], list[str]]
    """The result of `choices_watched`."""


def _compare_with_plan(run: Run, watched: Sequence[_Watched]) -> None:
    for module, _, observed, _ in watched:
        look_at_storage(module, observed)
    audit = merge_audits([compare(plan, run.layout, observed) for _, plan, observed, _ in watched])
    if run.mesh.pipeline_group is not None:
        audit = merge_audits(on_all_ranks(lambda: audit, run.mesh.pipeline_group))
    differences = _merge_differences([*audit.differences(run.locate_key), *_other_choices(watched)])
    if run.ranks.is_rank_0:
        record_audit(run.folder, {"differences": differences, **audit.as_data()})
        for sink in run.sinks:
            sink.text("precision_audit", audit.as_markdown())
    _log_views(watched)
    if differences and is_tested_release():
        raise UserError(_explain(run, differences))
    if differences:  # on an untested release, differences do not end the run
        _log.warning(
            "precision audit: the first step was not as planned; the run continues, because this release of PyTorch is "
            "not tested:\n  %s",
            "\n  ".join(differences),
        )
    else:
        _log.info("precision audit: %s: as planned", _size(audit))


def _other_choices(watched: Sequence[_Watched]) -> list[str]:
    """Return a line for each mixture of experts whose second forward chose other experts than the first."""
    return [line for part in watched for line in part.other_choices()]


def _log_views(watched: Sequence[_Watched]) -> None:
    """Log the paths of the modules that return views, because FSDP2's warning names only a class. The model itself is
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


def _merge_differences(differences: list[str]) -> list[str]:
    """Return the differences of all ranks without duplicates. Collective.

    All ranks get the same list, so they all stop if one rank has found a difference."""
    return list(dict.fromkeys(chain.from_iterable(on_all_ranks(lambda: differences))))


def _size(audit: Audit) -> str:
    return f"{len(audit.modules)} modules, {len(audit.units)} units"


_ENDS = "precision audit: the first step was not as planned, and the run ends before its update"


def _explain(run: Run, differences: list[str]) -> str:
    """Return the message of the UserError. After a UserError the run is not restarted: the audit would fail again."""
    return "\n  ".join(
        [
            f"{_ENDS} (all dtypes are in {run.folder / AUDIT_FILE}; usual causes are casts in the model's own forward "
            "or hooks; debug.audit_precision = false disables the audit)",
            *differences,
        ]
    )
