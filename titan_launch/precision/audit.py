"""Comparison of planned and observed dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from titan_launch.config.sections.section import DTYPE_BYTES
from titan_launch.core.errors import format_key
from titan_launch.core.torch_release import ACCUMULATES_IN_GRAD
from titan_launch.distributed.torch_private import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from titan_launch.plan.layout import Layout
from titan_launch.plan.report.unit_table import KeyLocator
from titan_launch.plan.types import ModelPlan, ModuleInfo, Unit, full_name
from titan_launch.precision.observation import (
    AUTOCAST,
    GRADIENTS,
    INPUTS,
    OUTPUTS,
    PARAMETERS,
    STORED_GRADIENTS,
    STORED_PARAMETERS,
    Observations,
    Seen,
    buffer,
)


@dataclass(frozen=True)
class AuditFinding:
    """The planned and observed dtypes of one kind of tensor of a module or unit."""

    what: str
    """Kind of tensor, such as `inputs` or `all-gather` (`precision.observation`)."""

    planned: tuple[str, ...]
    """The dtypes that are correct. If empty, the observed dtypes are shown but not checked."""

    observed: tuple[str, ...]
    """All observed dtypes. Empty if no such tensor was observed."""

    @property
    def differs(self) -> bool:
        """True if dtypes are planned, and a dtype that is not planned was observed."""
        return bool(self.planned) and any(dtype not in self.planned for dtype in self.observed)

    @property
    def planned_text(self) -> str:
        """The planned dtypes as text: `bfloat16`, or `bfloat16 or float32`."""
        return " or ".join(self.planned)


@dataclass(frozen=True)
class Audited:
    """A module or a unit, with its findings."""

    name: str
    """Path of a module, or name of a unit."""

    classes: str
    unit: Unit
    """For a unit, the unit itself. For a module, the entry of `ModelPlan.units` or `ModelPlan.in_place` that sets the
    dtypes of its parameters."""

    findings: tuple[AuditFinding, ...]
    remark: str
    """Reason for missing dtypes: `container`, `did not run`, `frozen`, `no gradient` or `not communicated`. Empty if no
    dtype is missing."""

    num_forwards: int | None = None
    """Number of forwards of a module, including the second forwards of activation checkpointing; None for a unit."""


@dataclass(frozen=True)
class Audit:
    """The planned and observed dtypes of all modules and units."""

    modules: tuple[Audited, ...]
    units: tuple[Audited, ...]

    def differences(self, locate_key: KeyLocator = format_key) -> list[str]:
        """Return one line for each finding that differs. Equal lines of modules or units whose names differ only in
        numbers are merged."""
        differing = [(row, finding) for row in (*self.modules, *self.units) for finding in row.findings]
        lines = [(row.name, _difference(row, finding, locate_key)) for row, finding in differing if finding.differs]
        return [f"{name} {line}" for name, (line,) in _merge_equal_rows((name, (line,)) for name, line in lines)]

    def as_data(self) -> dict[str, Any]:
        """Return the content of `precision_audit.json`."""
        return {"modules": [_as_data(row) for row in self.modules], "units": [_as_data(row) for row in self.units]}

    def as_markdown(self) -> str:
        """Return a table of the modules and a table of the units. Equal rows whose paths differ only in numbers are
        merged. Observed dtypes are bold if they differ from the plan, and in parentheses if nothing is planned."""
        return f"{_markdown('module', self.modules)}\n\n{_markdown('unit', self.units)}\n"


def compare(plan: ModelPlan, layout: Layout, observed: Observations) -> Audit:
    """Return the audit of a model, which compares planned and observed dtypes."""
    return Audit(
        modules=tuple(_audit_module(plan, info, observed.modules[info.path]) for info in plan.inventory.distinct),
        units=tuple(
            _audit_unit(plan, unit, gathered, layout, seen)
            for unit, gathered, seen in zip(plan.units, plan.gathered_dtypes(), observed.units, strict=True)
        ),
    )


def merge_audits(audits: Sequence[Audit]) -> Audit:
    """Merge the audits of pipeline stages."""
    return Audit(
        modules=tuple(row for audit in audits for row in audit.modules),
        units=tuple(row for audit in audits for row in audit.units),
    )


def _audit_module(plan: ModelPlan, info: ModuleInfo, seen: Seen) -> Audited:
    unit = plan.unit_of[info.path]
    findings = tuple(_findings(dict(_planned_of_module(plan, info, unit)), seen))
    return Audited(info.path, info.class_name, unit, findings, _remark(info, seen), seen.num_forwards)


def _remark(info: ModuleInfo, seen: Seen) -> str:
    if not info.has_forward:
        return "container"
    if not seen.num_forwards:
        return "did not run"
    if not info.parameters or seen.dtypes[GRADIENTS]:
        return ""
    return "no gradient" if any(parameter.requires_grad for parameter in info.parameters) else "frozen"


def _gradient_dtypes(unit: Unit) -> tuple[str, ...]:
    """Return the dtypes that the gradients of unsharded parameters may have when autograd passes them to hooks.

    Before torch 2.15, autograd converts gradients to the compute dtype. From torch 2.15 on, FSDP2 chooses the dtype
    (`_set_unsharded_grad_dtypes` in its source). If the reduce dtype is not larger than the compute dtype, all
    gradients have the reduce dtype. With a larger reduce dtype, a gradient has the dtype of its backward operation. Two
    kinds of gradients may have the reduce dtype instead: the first gradient of a step with deferred reduction, and the
    gradient of a parameter that tensor parallelism replicates.
    """
    compute, reduce = unit.compute_dtype, unit.reduce_dtype
    if not ACCUMULATES_IN_GRAD:
        return (compute,)
    return (compute, reduce) if DTYPE_BYTES[reduce] > DTYPE_BYTES[compute] else (reduce,)


def _planned_of_module(plan: ModelPlan, info: ModuleInfo, unit: Unit) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (kind of tensor, planned dtypes) of a module. Inputs and outputs are cast only at the modules that an entry
    of `ModelPlan.units` or `ModelPlan.in_place` lists."""
    policy = unit.policy if info.path in unit.modules else None
    yield INPUTS, _one(policy.input_dtype if policy else None)
    yield AUTOCAST, ("off",)  # autocast would ignore the dtypes of parameters and inputs
    if info.parameters:
        yield PARAMETERS, (unit.compute_dtype,)
        yield GRADIENTS, _gradient_dtypes(unit)
    for tensor in info.buffers:
        if tensor.is_floating:
            yield buffer(tensor.name), (plan.buffer_dtypes[full_name(info.path, tensor.name)],)
    yield OUTPUTS, _one(policy.output_dtype if policy and not plan.returns_loss(info.path) else None)
    if info.parameters:
        yield STORED_PARAMETERS, (unit.storage_dtype,)
        yield STORED_GRADIENTS, (unit.storage_dtype,)


def _one(dtype: str | None) -> tuple[str, ...]:
    return () if dtype is None else (dtype,)


def _audit_unit(plan: ModelPlan, unit: Unit, gathered: str, layout: Layout, seen: Seen) -> Audited:
    """Audit the collectives of a unit. `gathered`: dtype of its all-gather."""
    classes = dict.fromkeys(plan.inventory.by_path[path].class_name for path in unit.modules)
    planned: dict[str, tuple[str, ...]] = {ALL_GATHER: (gathered,), REDUCE_SCATTER: (unit.reduce_dtype,)}
    if layout.fsdp_replicas > 1:
        planned[ALL_REDUCE] = (unit.reduce_dtype,)
    remark = "" if any(seen.dtypes.values()) else "not communicated"
    return Audited(unit.name, ", ".join(classes), unit, tuple(_findings(planned, seen)), remark)


def _findings(planned: dict[str, tuple[str, ...]], seen: Seen) -> Iterator[AuditFinding]:
    """Yield a finding for each kind of tensor with planned dtypes. Then yield a finding for each other observed kind,
    such as a buffer that a forward has created."""
    unplanned = {what for what, dtypes in seen.dtypes.items() if dtypes} - planned.keys()
    for what in (*planned, *sorted(unplanned)):
        yield AuditFinding(what, planned.get(what, ()), tuple(sorted(seen.dtypes.get(what, ()))))


def _difference(row: Audited, finding: AuditFinding, locate_key: KeyLocator) -> str:
    where = row.unit.reason if row.unit.key is None else locate_key(row.unit.key)
    origin = row.unit.reason if where == row.unit.reason else f"{row.unit.reason}, {where}"
    observed = " and ".join(finding.observed)
    return f"({row.classes}), {finding.what}: planned {finding.planned_text}, observed {observed} (unit: {origin})"


def _as_data(row: Audited) -> dict[str, Any]:
    return {
        "name": row.name,
        "class": row.classes,
        "unit": row.unit.name,
        "reason": row.unit.reason,
        **({} if row.num_forwards is None else {"forwards": row.num_forwards}),
        "remark": row.remark,
        "dtypes": {f.what: {"planned": f.planned_text or None, "observed": list(f.observed)} for f in row.findings},
        "as_planned": not any(finding.differs for finding in row.findings),
    }


def _markdown(kind: str, rows: Sequence[Audited]) -> str:
    whats = [what for what in _COLUMNS if any(_column(f) == what and f.observed for row in rows for f in row.findings)]
    lines = [(kind, "class", "forwards", *whats, "from"), ("---",) * (len(whats) + 4)]
    cells = (
        (row.name, (row.classes, _forwards(row), *(_cell(row, w) for w in whats), row.unit.reason)) for row in rows
    )
    lines += [(name, *rest) for name, rest in _merge_equal_rows(cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_BUFFERS = "buffers"
_COLUMNS = (
    *(INPUTS, PARAMETERS, GRADIENTS, _BUFFERS, OUTPUTS, STORED_PARAMETERS, STORED_GRADIENTS),
    *(ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, AUTOCAST),
)


def _column(finding: AuditFinding) -> str:
    return finding.what if finding.what in _COLUMNS else _BUFFERS


def _forwards(row: Audited) -> str:
    return ", ".join(filter(None, ("" if row.num_forwards is None else str(row.num_forwards), row.remark)))


def _cell(row: Audited, column: str) -> str:
    found = [finding for finding in row.findings if _column(finding) == column and finding.observed]
    return ", ".join(dict.fromkeys(map(_describe, found))) or "-"


def _describe(finding: AuditFinding) -> str:
    observed = " and ".join(finding.observed)
    if finding.differs:
        return f"**{observed}, planned {finding.planned_text}**"
    return observed if finding.planned else f"({observed})"


def _merge_equal_rows(rows: Iterable[tuple[str, tuple[str, ...]]]) -> list[tuple[str, tuple[str, ...]]]:
    """Merge rows with equal cells whose names differ only in numbers, under one name such as `layers.*.norm (2)`."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, cells in rows:
        groups.setdefault((re.sub(r"\b\d+\b", "*", name), cells), []).append(name)
    return [
        (names[0] or "(root)" if len(names) == 1 else f"{pattern} ({len(names)})", cells)
        for (pattern, cells), names in groups.items()
    ]
