"""The certificate of a proof: how training of the twin (`plan.proof.twin`) differs from one process. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from titan_launch.core.terminal import aligned

Verdict = Literal["proven", "differs", "cannot be proven"]


@dataclass(frozen=True)
class Row:
    """The comparison of one run of the twin with a single process."""

    name: str
    """The axes and modes of the run."""

    ranks: int
    precision: str
    """`float32`, or the dtypes of the job."""

    errors: Mapping[str, float]
    """Largest relative difference of each kind of result: `loss`, `gradient`, `update`, and so on."""

    tolerances: Mapping[str, float]
    num_results: int
    """Number of results that were compared, over all steps."""

    seconds: float

    @property
    def exceeded(self) -> list[str]:
        """The kinds of results whose largest difference is above their tolerance."""
        return [kind for kind, error in self.errors.items() if not error <= self.tolerances[kind]]


@dataclass(frozen=True)
class Finding:
    """The first place where a run differs from the single process. If a smaller run, with one or two of its axes and
    modes, shows the difference too, the fields from `result` to `how` describe the smallest such run."""

    run: str
    result: str
    """The first result that differs, such as `gradient layers.0.attention.wo.weight`."""

    step: int
    error: float
    ratio: float
    """Norm of the result, divided by its norm on the single process."""

    cosine: float
    module: str
    """Path of the first module in which tensors differ, or another place in words, such as `gradient clipping`."""

    how: str
    """The results that depart at this place, in words: `its output departs by 1.6e-01`."""

    parts: tuple[str, ...]
    """Names of the runs with one axis or mode that show the difference. If there are none, names of the runs with two
    axes or modes that show it."""

    is_alone: bool = True
    """False if no run with a single axis or mode shows the difference."""


@dataclass(frozen=True)
class Certificate:
    """The result of `titan-launch prove`."""

    verdict: Verdict
    layout: str
    """The axes and modes of the job."""

    digest: str
    """Digest by which the certificate is found (`plan.proof.store.digest_of`)."""

    twin: str
    """Sizes of the twin, in words."""

    num_parameters: int
    steps: int
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    problems: tuple[str, ...]
    """Reasons why the layout cannot be proven: parameters without a gradient, or a model that is not deterministic.
    Differences from the single process are not listed here."""

    unshrunk: tuple[str, ...]
    unproven: tuple[str, ...]
    versions: Mapping[str, str]
    files: Mapping[str, str]
    """Digests of the files of the user's own modules, by path."""

    created: str
    seconds: float

    def dumps(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        return {
            "proven": f"layout proven ({self.layout}): the twin trains as in one process",
            "differs": f"layout differs ({self.layout}): the twin does not train as in one process",
            "cannot be proven": f"layout cannot be proven ({self.layout}): it cannot be compared with one process",
        }[self.verdict]

    def text(self) -> str:
        """Return the certificate for the terminal."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield self.headline
        for finding in self.findings:
            yield ""
            yield from _describe_finding(finding)
        if self.problems:
            yield ""
            yield from self.problems
        yield ""
        yield f"twin: {self.num_parameters:,} parameters ({self.twin}), {self.steps} steps"
        yield from _table(self.rows)
        for title, sentences in (("not shrunk", self.unshrunk), ("not proven", self.unproven)):
            if sentences:
                yield ""
                yield f"{title}:"
                yield from (f"  {sentence}" for sentence in sentences)
        yield ""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        yield f"made in {self.seconds:.0f} s on {self.created} with {versions}; digest {self.digest}"


def _describe_finding(finding: Finding) -> Iterator[str]:
    yield f"module: {finding.module} ({finding.how})"
    yield f"first result that differs: {finding.result} in step {finding.step}, by {finding.error:.1e} of its norm;"
    yield f"  its norm is {finding.ratio:.4g} times its norm in one process, the cosine is {finding.cosine:.4f}"
    shown = "shown by" if finding.is_alone else "shown only together by"
    yield f"{shown}: {', '.join(finding.parts) or 'no part of the layout alone'} (found in: {finding.run})"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.errors))
    lines = [["", *kinds, "results", "ranks", "dtype", "run"]]
    for row in rows:
        errors = [f"{row.errors[kind]:.0e}" if kind in row.errors else "" for kind in kinds]
        mark = "differs" if row.exceeded else "equal"
        lines.append([mark, *errors, str(row.num_results), str(row.ranks), row.precision, row.name])
    yield from aligned(lines)
    limits = dict.fromkeys((row.precision, tuple(row.tolerances.items())) for row in rows)
    for precision, tolerances in limits:
        yield f"tolerances in {precision}: {', '.join(f'{kind} {value:.0e}' for kind, value in tolerances)}"
