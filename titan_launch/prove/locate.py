"""The cause of a difference between a layout and the single process: the axes of parallelism and modes that show the
difference, and the first module that departs.

A tensor departs if it differs from the same tensor of the single process by more than the tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from titan_launch.core.errors import RunError, listed
from titan_launch.core.terminal import counted
from titan_launch.plan.proof.cases import Case, runs_with_parts
from titan_launch.plan.proof.certificate import ProofFinding
from titan_launch.prove.results import LOSS, OUTPUT, Departure, Difference, exceeding

if TYPE_CHECKING:
    from titan_launch.prove.main import Proof

ALL = "all parameters"
_NOT_TRACED = "the outputs of a compiled model's modules were not compared"
_MOST = 0.9
"""If the gradients of more than this fraction of the parameters differ, the cause is not in a single parameter."""


def explain(proof: Proof, case: Case, results: Sequence[Difference]) -> ProofFinding:
    """Return the finding about a case whose `results` differ from those of one process. To find the cause, run the case
    with each of its axes and modes alone. If none of these runs differs, run each pair of axes and modes."""
    smallest, parts, tolerances = case, list[str](), proof.tolerances(case)
    for number in (1, 2)[: len(case.parts)]:
        candidates = runs_with_parts(case, number)
        chosen = "one" if number == 1 else "two"
        every = f"the {len(case.parts)} axes and modes of the run that differs"
        proof.say(f"looking for the cause: {counted(len(candidates), 'run')}, each with {chosen} of {every}")
        found = [(one, _compared(proof, one)) for one in candidates]
        failing = [(one, of_one) for one, of_one in found if exceeding(of_one, tolerances)]
        if failing:
            parts = [one.name for one, _ in failing]
            smallest, results = min(failing, key=lambda pair: pair[0].ranks)
            break
    wrong = exceeding(results, tolerances)
    first_step = min(result.step for result in wrong)
    of_step = [result for result in wrong if result.step == first_step]
    first = min(of_step, key=_order)
    gradients = sum(result.step == first.step and result.name.startswith("gradient ") for result in results) - 1
    module, how = _module(proof, smallest, of_step, first, gradients)
    numbers = (first.name, first.step, first.error, first.ratio, first.cosine)
    return ProofFinding(case.name, *numbers, module, how, tuple(parts))


def _compared(proof: Proof, case: Case) -> list[Difference]:
    """Run a case. Return its differences from a single process, or an empty list if the case cannot run. For example, a
    schedule alone may need more microbatches than the case has."""
    try:
        return proof.compare(case)
    except RunError:
        return []


def _order(result: Difference) -> int:
    """Return the position of a result in the search for the cause: gradients first, averages last."""
    kinds = ("gradient", "loss", "gradient norm", "buffer", "update", "average")
    return kinds.index(result.name if result.name in kinds else result.name.split(" ")[0])


def _module(
    proof: Proof, case: Case, of_step: Sequence[Difference], first: Difference, num_gradients: int
) -> tuple[str, str]:
    """Return two texts: the place of the first difference, and a clause that says what departs there and by how much.
    The place is a module path, `the whole model`, `the loss`, `gradient clipping`, `[ema]`, `the optimizer`, or ALL.

    `of_step`: the results that exceed their tolerance in the first step with such results. `num_gradients`: number of
    gradients in a step.
    """
    kind, is_traced = first.name.partition(" ")[0], not case.config.compile.enable
    if kind in ("gradient", "loss") and first.name != "gradient norm":
        if departed := _departures(proof, case, first.step):
            event, error = departed[0].event, departed[0].error
            if event.kind == LOSS:
                return "the loss", f"the gradient of the logits departs by {error:.1e}; the logits are equal"
            what = "its output departs" if event.kind == OUTPUT else "the gradient of its input departs"
            return event.path or "the whole model", f"{what} by {error:.1e}"
        wrong = [r for r in of_step if r.name.startswith("gradient ") and r.name != "gradient norm"]
        if not wrong:
            return "the loss", "outputs and gradients of all modules are equal" if is_traced else _NOT_TRACED
        if len(wrong) > max(2, _MOST * num_gradients):
            ratio = median(result.ratio for result in wrong)
            return ALL, f"the gradients of {len(wrong)} parameters depart after backward, by a factor of {ratio:.4g}"
        names = [result.name.removeprefix("gradient ") for result in wrong]
        others = "activations and their gradients do not" if is_traced else _NOT_TRACED
        return owner(names[0]), f"the gradient of {listed(names)} departs; {others}"
    if first.name == "gradient norm":
        return "gradient clipping", "the gradients are equal, but their norm departs"
    name = first.name.partition(" ")[2]
    if kind == "buffer":
        return owner(name), f"its buffer {name.rpartition('.')[2]} departs; gradients do not"
    if kind == "average":
        return "[ema]", f"the average of {name} departs; its updates do not"
    updates = [result.name for result in of_step if result.name.startswith("update ")]
    number = counted(len(updates), "parameter")
    return "the optimizer", f"the update of {number} departs, first {name}; their gradients do not"


def owner(name: str) -> str:
    """Return the path of the module that has a parameter or a buffer; `the whole model` for the root."""
    return name.rpartition(".")[0] or "the whole model"


def _departures(proof: Proof, case: Case, step: int) -> list[Departure]:
    """Return the tensors of modules that depart in a step, in the order in which a single process computes them. A
    compiled model is not traced, so its list is empty."""
    if case.config.compile.enable:
        return []
    reference, results = proof.reference(case)
    file = f"{results}.trace"
    proof.launch("measure:trace_reference", 1, case.reference(reference.has_batch_norm), step, file)
    of_ranks = proof.launch(
        "measure:trace_case", case.ranks, case.config, step, file, proof.tolerances(case)["gradient"]
    )
    return sorted(departure for departures in of_ranks for departure in departures)
