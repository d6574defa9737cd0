"""The role of each key of a job: what happens if the key has changed when a run resumes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from titan_launch.core.errors import KeyPath

Role = Literal["model", "experiment", "operation"]
"""Effect of a changed key on a run that resumes. `model`: the tensors or the computation change, so the checkpoint
cannot be loaded. `experiment`: the training result changes, so the run needs `checkpoint.accept_changes`. `operation`:
only duration, location, speed, reports or the handling of skipped steps change. The results stay the same, except for
rounding, because sums may be computed in another order. But a new number of steps moves the decay of the learning
rate."""

ROLES: Mapping[str, Role | Mapping[str, Role]] = {
    "job": "operation",
    "model": {
        "name": "model",
        "flavor": "model",
        "args": "model",
        "path": "operation",
        "blocks": "operation",
        "weights": "operation",
        "exclude_from_weights": "operation",
    },
    "lora": {"targets": "model", "rank": "model", "rules": "model", "adapter": "operation"},
    "tokenizer": {"path": "operation"},
    "data": {"path": "operation", "dtype": "operation", "num_workers": "operation", "name": "operation"},
    "training": {
        "local_batch_size": "operation",
        "epochs": "operation",
        "steps": "operation",
        "enable_cpu_offload": "operation",
        "gc_freq": "operation",
    },
    "loss": {"chunks": "operation"},
    "precision": {"placement": "operation"},
    "batchnorm": "experiment",
    "activation_checkpoint": "operation",
    "gradient_accumulation": "operation",
    "compile": "operation",
    "kernels": {"attention": "operation"},
    "float8": "experiment",
    "parallelism": "operation",
    "optimizer": {"implementation": "operation"},
    "mup": "experiment",
    "lr_scheduler": "experiment",
    "ema": "operation",
    "checkpoint": "operation",
    "validation": "operation",
    "metrics": "operation",
    "profiling": "operation",
    "planner": "operation",
    "prove": "operation",
    "comm": "operation",
    "debug": "operation",
}
"""The role of all keys of a section, or of single keys. A key that is not listed has the role `experiment`.

`training.steps` and `training.epochs` are `operation`, because a larger value only extends the run, and moves a decay
at the end of the schedule. `data.path` and `model.weights` are `operation`, because the files may be moved. Instead of
the paths, a resumed run compares the content of the files with the content at the time of the checkpoint. `model.path`
is `operation`, because `model.args` contains the content of the `config.json` at this path.
"""


class KeyDifference(NamedTuple):
    """A key whose value differs between two configurations."""

    key: KeyPath
    was: Any
    """Earlier value; None if the key was unset."""

    now: Any
    role: Role


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[KeyDifference]:
    """Return the differences between two configurations, sorted by key. Both are nested tables without unset keys."""
    old, new = dict(_leaves(before, ())), dict(_leaves(now, ()))
    return [
        KeyDifference(key, old.get(key), new.get(key), role_of(key))
        for key in sorted(old.keys() | new.keys(), key=lambda key: [(isinstance(part, str), part) for part in key])
        if old.get(key) != new.get(key)
    ]


def role_of(key: KeyPath) -> Role:
    """Return the role of a key (see `Role`). A key of a source of a mixture has the role of the same key in `[data]`. A
    key that no longer exists, from the `config.json` of an older version, has the role `experiment`."""
    section, *names = key[:1] + key[3:] if key[:2] == ("data", "sources") else key
    role = ROLES.get(str(section), "experiment")
    if isinstance(role, str):
        return role
    return role.get(str(names[0]), "experiment") if names else "experiment"


def _leaves(table: Mapping[str, Any], key: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*key, name))
        elif (*key, name) == ("data", "sources") and isinstance(value, list):  # the sources of a mixture
            for index, source in enumerate(value):
                yield from _leaves(source if isinstance(source, Mapping) else {"": source}, (*key, name, index))
        else:
            yield (*key, name), value
