"""Certificates in the user's cache, or in a file that the job names. No torch.

A certificate is found by a digest of the job's twin (`plan.proof.twin`), of the code, and of the job's weights. The
digest does not depend on the host, and usually not on the sizes of the model or on whether a degree is 2 or 64. So a
job may be proven on a laptop and run on a cluster.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import TypeAdapter

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError, config_error
from titan_launch.core.files import cache_folder, read_regular, replace_text
from titan_launch.core.fingerprint import content_digest, fingerprint_of_files
from titan_launch.core.json_files import JsonError, parse_as, reason_of
from titan_launch.plan.proof.certificate import Certificate
from titan_launch.plan.proof.twin import twin_of

_PACKAGES = ("titan-launch", "torch", "transformers")
_MOST_BYTES = 1 << 22
_SAMPLE_BYTES = 1 << 12
CERTIFICATE = TypeAdapter(Certificate)


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


def find(config: JobConfig) -> Certificate | None:
    """Return the certificate of a job: from the file `prove.certificate` if the job sets this key, else from the cache.
    Return None if the cache has no readable certificate, or if the job has no twin. Also return None if the certificate
    belongs to a different twin or to different code. Raises ConfigError if `prove.certificate` cannot be read."""
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
        reason = f"cannot be read ({reason_of(error)}); write it with titan-launch prove --out"
        raise config_error(("prove", "certificate"), reason, named) from None
    is_current = found.digest == digest
    with suppress(OSError):
        return found if is_current and digests_of_files(found.files) == dict(found.files) else None
    return None


def store(certificate: Certificate) -> None:
    """Write a certificate into the cache. If the cache cannot be written, do nothing."""
    with suppress(OSError):
        path = _entry(certificate.digest)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_text(path, certificate.dumps())


def _folder() -> Path:
    return cache_folder() / "proofs"


def _entry(digest: str) -> Path:
    return _folder() / f"{digest}.json"


def describe(certificate: Certificate | None) -> str:
    """Return the line of a run's header about its proof."""
    if certificate is None:
        return "layout not proven; titan-launch prove compares it with one process"
    if certificate.verdict == "proven":
        return f"layout proven on {certificate.created} ({certificate.digest})"
    result = "differs from one process" if certificate.verdict == "differs" else certificate.verdict
    return f"layout {result}; compared on {certificate.created} ({certificate.digest})"
