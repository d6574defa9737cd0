"""The certificate of a proof: the differences between the runs of the twin (`plan.proof.twin`) and its single-process
run. This module does not import torch.

Certificates are in the user's cache, or in a file that the job names. A certificate is found by a digest of the job's
twin, of the code, and of the job's weights. The digest does not depend on the host. Usually, it depends neither on the
sizes of the model nor on the size of a degree above 1. So a job may be proven on a laptop and run on a cluster.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError, config_error, toml_string
from titan_launch.core.files import cache_folder, read_regular, replace_text
from titan_launch.core.fingerprint import content_digest, fingerprint_of_files
from titan_launch.core.json_files import JsonError, parse_as, reason_of
from titan_launch.core.terminal import aligned
from titan_launch.plan.proof.twin import twin_of

Verdict = Literal["proven", "differs", "cannot be proven"]


@dataclass(frozen=True)
class ProofRow:
    """The comparison of one run of the twin with a single process, or of the job's weights with `transformers`."""

    name: str
    """The axes and modes of the run, or a text about the job's weights."""

    ranks: int
    precision: str
    """`float32`, or the compute dtype of the job."""

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
class ProofFinding:
    """The first place where a run differs from the single process. If runs with only one or two axes or modes also
    show the difference, the fields from `result` to `how` describe the smallest such run."""

    run: str
    """Name of the run in which the difference was found, with all of its axes and modes."""

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
    axes or modes that show the difference. `WEIGHTS` for a difference of the job's weights from `transformers`."""


@dataclass(frozen=True)
class Certificate:
    """The result of `titan-launch prove`."""

    verdict: Verdict
    layout: str
    """The axes and modes of the job."""

    digest: str
    """Digest by which the certificate is found (`digest_of`)."""

    twin: str
    """Sizes of the twin, in words."""

    num_parameters: int
    steps: int
    rows: tuple[ProofRow, ...]
    findings: tuple[ProofFinding, ...]
    problems: tuple[str, ...]
    """Reasons why the layout cannot be proven, such as a model that is not deterministic (`Proof.problems`).
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
    def differs_in_weights(self) -> bool:
        """True if the only difference is that of the job's weights from `transformers`."""
        return [finding.parts for finding in self.findings] == [WEIGHTS]

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        if self.differs_in_weights:
            return "the values of model.weights differ: the job's model computes other results than transformers"
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
        packages = ", ".join(f"{name} {release}" for name, release in self.versions.items())
        yield f"made in {self.seconds:.0f} s on {self.created} with {packages}; digest {self.digest}"


WEIGHTS = ("model.weights",)
"""Value of `ProofFinding.parts` for a difference of the job's weights from `transformers`."""

CERTIFICATE = TypeAdapter(Certificate)


def _describe_finding(finding: ProofFinding) -> Iterator[str]:
    yield f"module: {finding.module} ({finding.how})"
    yield f"first result that differs: {finding.result} in step {finding.step}, by {finding.error:.1e} of its norm;"
    where = "in transformers" if finding.parts == WEIGHTS else "in one process"
    yield f"  its norm is {finding.ratio:.4g} times its norm {where}, the cosine is {finding.cosine:.4f}"
    if finding.parts == WEIGHTS:
        yield f"found in: {finding.run}"
        return
    if finding.parts:
        parts = f"the difference also occurs in runs with only: {'; '.join(finding.parts)}"
    else:
        parts = "no single axis or mode shows the difference, and no pair of them"
    yield f"{parts} (found in: {finding.run})"


def _table(rows: Sequence[ProofRow]) -> Iterator[str]:
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


# Certificates in the cache

_PACKAGES = ("titan-launch", "torch", "transformers")
_MOST_BYTES = 1 << 22
_SAMPLE_BYTES = 1 << 12


def versions() -> dict[str, str]:
    """Return the versions of the packages that compute a step, without local labels such as `+cu130`."""
    found = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name).partition("+")[0]
    return found


def digest_of(config: JobConfig) -> str:
    """Return the digest by which a job's certificate is found. Raises ConfigError for a job without a twin."""
    twin = twin_of(config)
    tables = [job.model_dump(mode="json") for job in (twin.config, twin.precision) if job is not None]
    package = content_digest(sorted(Path(__file__).parent.parent.parent.rglob("*.py")))
    parts = json.dumps([tables, _digest_of_weights(config), versions(), package], sort_keys=True)
    return hashlib.blake2b(parts.encode(), digest_size=8).hexdigest()


def _digest_of_weights(config: JobConfig) -> str | None:
    """Return a digest of the safetensors files in the folder `model.weights`, because a proof also reads them
    (`prove.weights`). Return None if the key is not set, or if a file cannot be read."""
    if config.model.weights is None:
        return None
    files = sorted(Path(config.model.weights).glob("*.safetensors"))
    with suppress(OSError):
        return fingerprint_of_files([(file.name, file) for file in files], _SAMPLE_BYTES).digest
    return None


def digests_of_files(files: Iterable[str]) -> dict[str, str]:
    """Return a digest of the content of each file, by path. Paths below the working directory are relative to it."""
    found = {}
    for file in map(Path, files):
        name = str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)
        found[name] = content_digest([file])
    return found


def find_certificate(config: JobConfig) -> Certificate | None:
    """Return the certificate of a job: from the file `prove.certificate` if the job sets this key, else from the cache.
    Return None if the cache has no readable certificate, or if the job has no twin. Also return None if the certificate
    belongs to a different twin, to other weights or to other code. Raises ConfigError if `prove.certificate` cannot be
    read."""
    named = config.prove.certificate
    if named is None and not _folder().exists():  # most runs then compute no digest
        return None
    try:
        digest = digest_of(config)
    except ConfigError:
        return None
    try:
        found = parse_as(CERTIFICATE, read_regular(Path(named or _entry(digest)), _MOST_BYTES))
    except (OSError, JsonError) as error:
        if named is None:
            return None
        reason = f"cannot be read ({reason_of(error)}); write it with titan-launch prove --out FILE"
        raise config_error(("prove", "certificate"), reason, named) from None
    is_current = found.digest == digest
    with suppress(OSError):
        return found if is_current and digests_of_files(found.files) == dict(found.files) else None
    return None


def store_certificate(certificate: Certificate) -> None:
    """Write a certificate into the cache. If the cache cannot be written, do nothing."""
    with suppress(OSError):
        path = _entry(certificate.digest)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_text(path, certificate.dumps())


def _folder() -> Path:
    return cache_folder() / "proofs"


def _entry(digest: str) -> Path:
    return _folder() / f"{digest}.json"


def describe_certificate(certificate: Certificate | None, named: str | None) -> str:
    """Return the line about the proof of the layout, for the header of a run. `certificate`: the result of
    `find_certificate`. `named`: the value of `prove.certificate`."""
    if certificate is None:
        file = "" if named is None else f" (prove.certificate = {toml_string(named)} is not for this job and code)"
        return f"layout not proven{file}; titan-launch prove compares the layout with one process"
    if certificate.verdict == "proven":
        return f"layout proven on {certificate.created} ({certificate.digest})"
    result: str = "differs from one process" if certificate.verdict == "differs" else certificate.verdict
    if certificate.differs_in_weights:
        result = "not proven: the values of model.weights differ from transformers"
    return f"layout {result}; compared on {certificate.created} ({certificate.digest})"
