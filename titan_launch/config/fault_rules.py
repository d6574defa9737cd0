"""Rules across sections for numerical faults and hangs. Part of `titan_launch.config.rules`."""

from __future__ import annotations

from collections.abc import Iterator

from titan_launch.config.job import JobConfig
from titan_launch.errors import KeyPath, Problem

_REPEATED: KeyPath = ("debug", "on_repeated_skips")
_ENABLE: KeyPath = ("checkpoint", "enable")
_TIMEOUT: KeyPath = ("comm", "timeout_seconds")


def rollback_has_checkpoints(config: JobConfig) -> Iterator[Problem]:
    """Without checkpoints there is none to go back to."""
    if config.debug.on_repeated_skips == "rollback" and not config.checkpoint.enable:
        reason = 'goes back to the last checkpoint; set checkpoint.enable = true, or "stop"'
        yield Problem(_REPEATED, reason, config.debug.on_repeated_skips, also=(_ENABLE,))


def rollback_can_be_reached(config: JobConfig) -> Iterator[Problem]:
    """Steps are left out in a row only where leaving one out is not the end."""
    debug = config.debug
    if debug.on_repeated_skips == "rollback" and debug.on_nonfinite == "stop" and debug.spike_sigma is None:
        reason = (
            'is never reached: debug.on_nonfinite = "stop" ends the run at the first step that is left out; '
            'set that to "skip", or debug.spike_sigma'
        )
        also: tuple[KeyPath, ...] = (("debug", "on_nonfinite"), ("debug", "spike_sigma"))
        yield Problem(_REPEATED, reason, debug.on_repeated_skips, also=also)


def start_has_no_less_time(config: JobConfig) -> Iterator[Problem]:
    """The first step includes all that others do."""
    comm = config.comm
    if comm.init_timeout_seconds < comm.timeout_seconds:
        reason = f"must be at least comm.timeout_seconds ({comm.timeout_seconds}): the first step takes the longest"
        yield Problem(("comm", "init_timeout_seconds"), reason, comm.init_timeout_seconds, also=(_TIMEOUT,))


def hangs_are_seen_before_the_timeout(config: JobConfig) -> Iterator[Problem]:
    """What a rank waits for is found out while it still waits."""
    comm = config.comm
    if comm.hang_seconds is not None and comm.hang_seconds >= comm.timeout_seconds:
        reason = (
            f"must be below comm.timeout_seconds ({comm.timeout_seconds}), which ends the run before anybody looks; "
            "leave it out for half of that"
        )
        yield Problem(("comm", "hang_seconds"), reason, comm.hang_seconds, also=(_TIMEOUT,))


FAULT_RULES = (
    rollback_has_checkpoints,
    rollback_can_be_reached,
    start_has_no_less_time,
    hangs_are_seen_before_the_timeout,
)
"""All of them."""
