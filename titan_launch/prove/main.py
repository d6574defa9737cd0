"""The proof of a job's layout. A small copy of the job, its twin, trains on CPU ranks in several runs. Each run
(`Case`) has some of the job's axes of parallelism and modes. Its results must equal those of a single process, the
reference."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import RunError, UserError, leaves, listed
from titan_launch.plan.hardware import free_memory_gib
from titan_launch.plan.proof.cases import Case, cases, data_ranks, has_compiler, in_precision, proven_layout
from titan_launch.plan.proof.certificate import (
    WEIGHTS,
    Certificate,
    ProofFinding,
    ProofRow,
    Verdict,
    digest_of,
    digests_of_files,
    versions,
)
from titan_launch.plan.proof.twin import SAMPLES, SECOND, SEQ_LEN, STEPS, Twin, size_of, structure, twin_of
from titan_launch.prove import ranks
from titan_launch.prove.locate import explain, owner
from titan_launch.prove.results import TOLERANCES, Difference, Reference, exceeding, kind_of, largest_by_kind

MUON_TOLERANCES = {"loss": 1e-4, "gradient": 5e-3, "update": 0.2}
"""Tolerances with Muon, in place of those in `TOLERANCES`. Muon's iterations make all singular values of an update
equal, which enlarges small differences."""

WEIGHTS_TOLERANCE = 1e-3
"""Largest relative difference of logits and gradients from those of `transformers`, which uses other operations."""

_WIDEST = 0.5
"""Largest tolerance in the precision of the job. A kind of result that needs a larger tolerance is not compared,
because rounding alone changes it too much."""

_RANK_GIB = 0.4
_TIMEOUT_S = 600.0
Say = Callable[[str], None]


def prove(config: JobConfig, say: Say = lambda text: None) -> Certificate:
    """Compare a job's layout with a single process. `say`: function that shows a line of progress.

    Raises ConfigError for a job whose twin cannot be built or is too large for this host. Raises UserError if the host
    has too little memory or cannot start enough processes, or if the single process cannot train the twin. Raises
    RunError if another run fails.
    """
    begin = time.perf_counter()
    twin, digest = twin_of(config), digest_of(config)
    ranks.start_server()
    with tempfile.TemporaryDirectory(prefix="titan-launch-prove-") as folder:
        proof = Proof(twin, Path(folder), say)
        proof.run()
        proof.compare_weights(config)
    problems = tuple(dict.fromkeys(proof.problems()))
    verdict: Verdict = "differs" if proof.findings else "cannot be proven" if problems else "proven"
    return Certificate(
        verdict=verdict,
        layout=proven_layout(twin.config, proof.cases),
        digest=digest,
        twin=size_of(twin.config),
        num_parameters=proof.num_parameters,
        steps=STEPS,
        rows=tuple(proof.rows),
        findings=tuple(proof.findings),
        problems=problems,
        unshrunk=twin.unshrunk,
        unproven=tuple(dict.fromkeys((*twin.unproven, *proof.unproven, *proof.not_live()))),
        versions=versions(),
        files=digests_of_files(proof.files),
        created=f"{datetime.now():%Y-%m-%d}",
        seconds=time.perf_counter() - begin,
    )


@dataclass
class Proof:
    """The runs of a twin (a small copy of a job), and the results so far."""

    twin: Twin
    folder: Path
    say: Say
    rows: list[ProofRow] = field(default_factory=list)
    findings: list[ProofFinding] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cases = list(cases(self.twin.config))
        self._references: dict[str, tuple[Reference, str]] = {}
        self._results: dict[str, list[Difference]] = {}
        self._has_batch_norm = False
        self._rounding: dict[str, dict[tuple[int, str], float]] = {}
        """Rounding errors in fp32, by file of a reference: the largest difference by (step, kind of result). A file has
        no entry until its errors are measured."""

    def run(self) -> None:
        """Compare the cases with a single process, and explain the first case that differs.

        Stop if the single process is not deterministic, or if rounding leaves no results to compare. Skip the case in
        the precision of the job if a case in fp32 differs.
        """
        processes = max(case.ranks for case in self.cases)
        free, needed = free_memory_gib(), _RANK_GIB * processes
        if free < needed:
            raise UserError(
                f"{processes} process{'es need' if processes > 1 else ' needs'} about {needed:.1f} GiB of memory, and "
                f"{free:.1f} GiB are free; end other processes, or use a machine with more memory"
            )
        if self.twin.second is not None:  # the loss of the twin reads its second model from this folder
            model = self.twin.second.model_dump(mode="json")
            self._call("weights:write_folder", 1, model, SEQ_LEN, str(self.folder / SECOND))
        all_cases = [*self.cases]
        if self.twin.precision is not None:
            all_cases.append(in_precision(self.cases[-1], self.twin.precision))
        for case in all_cases:
            if self.reference(case)[0].changed or (self.findings and not case.is_exact):
                return
            begin = time.perf_counter()
            results = self.compare(case)
            if case.is_exact and not self.findings and exceeding(results, self.tolerances(case)):
                self._measure_rounding(case)
                results = self.compare(case)
                if not results:
                    return
            row = self._row(case, results, time.perf_counter() - begin)
            self.rows.append(row)
            self.say(f"{'differs' if row.exceeded else 'equal'}: {row.name}, {row.precision}, ranks: {row.ranks}")
            if row.exceeded and not self.findings:
                self.findings.append(explain(self, case, results))

    def compare_weights(self, config: JobConfig) -> None:
        """Load `model.weights` into the job's model, and compare this model with the class of `transformers` that the
        folder's `config.json` names. Do nothing if the job has no weights, or if the folder has no `config.json`. If
        the models cannot be compared, add the reason to `unproven`. Otherwise add a row, and a finding if they
        differ."""
        if config.model.weights is None or not (Path(config.model.weights) / "config.json").is_file():
            return
        begin = time.perf_counter()
        (results,) = self.launch("weights:compare_weights", 1, config)
        if isinstance(results, str):
            self.unproven.append(results)
            return
        name, errors = f"values of {config.model.weights}, compared with transformers", largest_by_kind(results)
        seconds = time.perf_counter() - begin
        row = ProofRow(name, 1, "float32", errors, dict.fromkeys(errors, WEIGHTS_TOLERANCE), len(results), seconds)
        self.rows.append(row)
        if wrong := exceeding(results, row.tolerances):
            first = wrong[-1]  # usually a gradient, which names one module; the logits, which are first, depend on all
            module, how = owner(first.name.partition(" ")[2]), f"{len(wrong)} results differ from transformers"
            numbers = (first.name, 1, first.error, first.ratio, first.cosine)
            self.findings.append(ProofFinding(name, *numbers, module, how, WEIGHTS))

    def compare(self, case: Case) -> list[Difference]:
        """Return the results of a case, each with the largest difference of all ranks. A gradient that is missing
        on all ranks counts as a difference of 1.

        Results that rounding alone changes too much are omitted (`unproven` then names them), and so are statistics
        that ranks pool. The ranks of a case run only once. A second call for the same case may return fewer results, if
        rounding errors have been measured since the first call.
        """
        key = structure(case.config)
        if key not in self._results:
            self._results[key] = self._compared(case)
        reference, file = self.reference(case)
        too_wide = {kind for kind, tolerance in self.tolerances(case).items() if tolerance > _WIDEST}
        for kind in sorted(too_wide):
            what = f"results of kind {kind} in {case.config.precision.param_dtype}"
            self._leave_out(what, reference.rounding_errors[kind])
        steps, rounding = self._comparable_steps(file), self._rounding.get(file, {})
        return [
            row
            for row in self._results[key]
            if (row.step <= steps or row.error > _BEYOND_ROUNDING * rounding[row.step, kind_of(row)])
            and kind_of(row) not in too_wide
            and not self._is_pooled(case, row, reference)
        ]

    def _compared(self, case: Case) -> list[Difference]:
        reference, file = self.reference(case)
        found: dict[tuple[int, str], Difference] = {}
        for rows in self.launch("measure:measure_case", case.ranks, case.config, file):
            for row in rows:
                key = (row.step, row.name)
                if key not in found or row.error > found[key].error:
                    found[key] = row
        for name in sorted(reference.names - {name for _, name in found}):
            found[1, name] = Difference(1, name, 1.0, 0.0, 0.0)
        return list(found.values())

    def _measure_rounding(self, case: Case) -> None:
        """Measure the rounding errors of a case in fp32: the differences between two runs of the single process. The
        initial parameters of these runs differ by one rounding."""
        _, file = self.reference(case)
        if file in self._rounding:
            return
        (rows,) = self.launch("measure:measure_case", 1, case.reference(self._has_batch_norm), file, True)
        found = self._rounding[file] = {}
        for row in rows:
            key = (row.step, kind_of(row))
            found[key] = max(found.get(key, 0.0), row.error)
        steps = self._comparable_steps(file)
        if steps < STEPS:
            self._leave_out(f"the steps from {steps + 1} on in fp32", max(self._large_rounding(file).values()))

    def _large_rounding(self, file: str) -> dict[tuple[int, str], float]:
        """Return the rounding errors that exceed a third of the tolerance, by step and kind of result."""
        limits, known = self._exact_tolerances, self._rounding.get(file, {})
        return {(step, kind): error for (step, kind), error in known.items() if not error <= limits[kind] / 3}

    def _comparable_steps(self, file: str) -> int:
        """Return the number of steps before the first step with a large rounding error."""
        return min((step for step, _ in self._large_rounding(file)), default=STEPS + 1) - 1

    def _leave_out(self, what: str, error: float) -> None:
        reason = f"{what} are not compared: on one process, rounding alone changes them by {error:.0e}"
        if reason not in self.unproven:
            self.unproven.append(reason)

    def reference(self, case: Case) -> tuple[Reference, str]:
        """Return the `Reference` of a case, and the file with the results of the single process. Cases with the same
        reference share one run."""
        first = self._measured(case)
        if first[0].has_batch_norm and not self._has_batch_norm:
            self._has_batch_norm = True  # the microbatches of the single process must be those of the case
            return self._measured(case)
        return first

    def _measured(self, case: Case) -> tuple[Reference, str]:
        config = case.reference(self._has_batch_norm)
        key = structure(config)
        if key not in self._references:
            exact = None if case.is_exact else self._measured(in_precision(case, self.twin.config))[1]
            file = str(self.folder / f"reference_{len(self._references)}.pt")
            changes = None if self._references else variants(self.job(config))
            try:
                (reference,) = self.launch("measure:measure_reference", 1, config, changes, file, exact)
            except RunError as error:  # a failure of the single process says nothing about the layout
                reason = f"one process on a CPU cannot train the twin (a small copy of the job): {error}"
                raise UserError(
                    f"{reason}\nif the model has kernels that run only on a GPU, add CPU versions, and select them by "
                    "an argument in [prove.args]"
                ) from None
            self._references[key] = reference, file
        return self._references[key]

    def tolerances(self, case: Case) -> dict[str, float]:
        """Return the largest difference that a case may have, by kind of result.

        In fp32, these are fixed numbers. In the precision of the job, a tolerance is 3 times the difference that this
        precision makes in the single process, but at least 100 times the number in `TOLERANCES`.
        """
        if case.is_exact:
            return self._exact_tolerances
        rounding = self.reference(case)[0].rounding_errors
        return {kind: max(100 * exact, 3 * rounding.get(kind, 0.0)) for kind, exact in TOLERANCES.items()}

    @property
    def _exact_tolerances(self) -> dict[str, float]:
        optimizer = self.twin.config.optimizer
        has_muon = "Muon" in (optimizer.name, *(group.algorithm for group in optimizer.param_groups))
        return TOLERANCES | (MUON_TOLERANCES if has_muon else {})

    def launch(self, function: str, world_size: int, config: JobConfig, *args: Any) -> list[Any]:
        """Run a function of `titan_launch.prove`, `module:name`, with a twin, or with the job itself, on `world_size`
        ranks. Return the results of all ranks."""
        return self._call(function, world_size, self.job(config), *args)

    def _call(self, function: str, world_size: int, *args: Any) -> list[Any]:
        return ranks.run_ranks(f"titan_launch.prove.{function}", world_size, *args, timeout=_TIMEOUT_S)

    def job(self, config: JobConfig) -> dict[str, Any]:
        """Return the job file of a twin as a dict. The twin trains in the folder of this proof. If this host has no C++
        compiler, compiled modules use the backend `aot_eager` in place of `inductor`, and `unproven` says so."""
        job = config.job.model_copy(update={"dump_folder": str(self.folder)})
        table = config.model_copy(update={"job": job}).model_dump(mode="json")
        if config.compile.enable and config.compile.backend == "inductor" and not has_compiler():
            table["compile"]["backend"] = "aot_eager"
            if _NO_COMPILER not in self.unproven:
                self.unproven.append(_NO_COMPILER)
        second = config.loss.frozen_model()
        if second is not None:
            table["loss"][config.loss.name][second.key[-1]] = str(self.folder / SECOND)
        return table

    @property
    def num_parameters(self) -> int:
        return max(reference.num_parameters for reference, _ in self._references.values())

    @property
    def files(self) -> list[str]:
        """The files of the user's own modules."""
        return sorted({file for reference, _ in self._references.values() for file in reference.files})

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each reason why a comparison of this model proves nothing. Sentences may repeat."""
        for reference, file in self._references.values():
            if reference.changed:
                first = reference.changed[0]
                yield (
                    f"not deterministic: {first.name} of step {first.step} differs when one process trains twice, by "
                    f"{first.error:.1e} of its norm; remove the random numbers of the model's forward"
                )
            if reference.dead:
                yield (
                    f"dead: the gradient of {listed(reference.dead)} is 0 in all {STEPS} steps; freeze these "
                    "parameters, or correct the model"
                )
            if self._comparable_steps(file) == 0:
                yield (
                    "not comparable: on one process, rounding alone changes the first step by more than a third of the "
                    "tolerance; remove steep functions (such as sin(1e8 * x)) from the model"
                )
            if reference.constant:
                yield (
                    f"dead: the gradient of {listed(reference.constant)} does not depend on the data; freeze these "
                    "parameters, or correct the model"
                )
            for key in reference.without_effect:
                yield (
                    f"without effect: no gradient changes when {key} is set to 0; remove the key, or correct the model"
                )

    def not_live(self) -> list[str]:
        """Return a sentence about the gradients that are only rounding errors; an empty list if there are none."""
        names = sorted({name for reference, _ in self._references.values() for name in reference.rounding})
        return [f"the gradient of {listed(names)}: it is 0 up to rounding"] if names else []

    def _row(self, case: Case, results: Sequence[Difference], seconds: float) -> ProofRow:
        errors, tolerances = largest_by_kind(results), self.tolerances(case)
        limits = {kind: tolerances[kind] for kind in errors}
        precision = "float32" if case.is_exact else case.config.precision.param_dtype
        return ProofRow(case.name, case.ranks, precision, errors, limits, len(results), seconds)

    def _is_pooled(self, case: Case, row: Difference, reference: Reference) -> bool:
        """Return True for running statistics that each rank computes from its own samples, and that ranks then pool.
        One process has no such statistics to compare with."""
        is_local = case.config.batchnorm.statistics == "local"
        is_statistic = row.name.startswith("buffer ") and row.name.endswith(("running_mean", "running_var"))
        return reference.has_batch_norm and is_local and data_ranks(case.config.parallelism) > 1 and is_statistic


_BEYOND_ROUNDING = 10
"""A difference of more than this number times the rounding error is not caused by rounding."""

_NO_COMPILER = 'compile.backend = "inductor": this host has no C++ compiler, so the graphs ran with "aot_eager"'


_OTHER_SAMPLES = 48
"""Offset (`samples.Samples`) in the variant `data`: the random seed of its first sample. Other runs use lower seeds."""

_WEIGHTS = ("loss.z_loss", "loss.label_smoothing", "model.args.experts.balance_loss", "model.args.experts.z_loss")
"""Keys of the job that weight a part of the loss. A part with a weight above 0 must change gradients."""


def variants(job: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return changed copies of a twin, by changed key: `data` with other samples, if the twin trains on random samples,
    and each key of `_WEIGHTS` that is not 0 already, with the value 0. Each change must change the gradients."""
    found = {}
    if job["data"]["kind"] == SAMPLES:
        found["data"] = _changed(job, "data.args.offset", _OTHER_SAMPLES)
    values = dict(leaves(job))
    for key in _WEIGHTS:
        if values.get(key):
            found[key] = _changed(job, key, 0.0)
    return found


def _changed(table: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {**table, first: _changed(table[first], rest, value) if rest else value}
