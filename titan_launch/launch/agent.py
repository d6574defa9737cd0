"""torchrun's agent, with changes to how ranks are ended and restarted."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from titan_launch.core.process import (
    BAD_INPUT,
    EXITED_DIRECTLY,
    claim_announcement,
    has_exited_directly,
    print_hidden_announcement,
)
from titan_launch.core.signals import RESTART_SIGNAL, RESTART_STATUS, signals_blocked
from titan_launch.core.terminal import say

if TYPE_CHECKING:
    from titan_launch.launch.torchrun import Stopping

_SECONDS_AFTER_A_FAILURE = 30  # the same timeout as torchrun's own


class ElasticAgent(LocalElasticAgent):
    """The agent that starts and monitors the ranks of this host.

    After a signal, torchrun's own agent stops monitoring, kills its ranks after 30 s, and does not report how the ranks
    ended. This agent continues to monitor its ranks, and `launch.torchrun` forwards the signal to the ranks. If all
    ranks then save and end with status 0, the run has succeeded. After a signal, this agent restarts the ranks neither
    after a failure nor for a new host. But if the ranks have already ended for a new host, this agent restarts them,
    and forwards the signal to them. This agent also does not restart the ranks if a rank ended with the status
    BAD_INPUT, because the ranks would fail again.
    """

    def __init__(
        self,
        *args: Any,
        stopping: Stopping,
        on_failure: Callable[[Mapping[int, ProcessFailure]], object],
        **kwargs: Any,
    ):
        """`stopping`: the forwarder of signals, which gets the processes of the ranks at every start. `on_failure`:
        function that is called before a restart, with the failures by rank."""
        super().__init__(*args, **kwargs)
        self._stopping = stopping
        self._on_failure = on_failure
        self._has_failed = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with self._stopping.starting():
            with signals_blocked():
                ids: dict[int, Any] = super()._start_workers(worker_group)
            context = self._pcontext
            assert isinstance(context, SubprocessContext)
            self._stopping.started([handler.proc for handler in context.subprocess_handlers.values()])
        return ids

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Restart the ranks after a failure or for a new host. After a signal, do nothing if the ranks still run: they
        end by themselves."""
        if self._stopping.signal is None or worker_group.state != WorkerState.HEALTHY:
            super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """End the ranks, before a restart or at the end of the run.

        If a new host joined, the ranks get the time of `--shutdown-timeout` to save. If a rank has failed, the other
        ranks get only 30 s: they cannot save, and on GPUs they may not notice the signal.
        """
        if self._pcontext is not None:
            seconds = _SECONDS_AFTER_A_FAILURE if self._has_failed else self._stopping.timeout_s
            self._pcontext.close(RESTART_SIGNAL, seconds)
        super()._stop_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        silent = self._silent_failures(worker_group)
        if silent:
            # `on_failure` will report the silent ranks. The other ranks must not report the SIGTERM that they get now.
            assert self._pcontext is not None
            claim_announcement(self._pcontext.envs[0])
            self._pcontext.close(signal.SIGTERM, _SECONDS_AFTER_A_FAILURE)
            result = RunResult(WorkerState.FAILED, failures=silent)
        else:
            result = super()._monitor_workers(worker_group)
        if result.state != WorkerState.HEALTHY and self._pcontext is not None:
            print_hidden_announcement(self._pcontext.envs[0])
        if result.state not in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self._has_failed = False
            return result
        self._has_failed = True
        statuses = {failure.exitcode for failure in result.failures.values()}
        if RESTART_STATUS in statuses:  # another host's agent was the first to notice the new host
            self._remaining_restarts += 1  # a new host is no failure, but torchrun will count a restart
            self._has_failed = False
            return result
        if self._stopping.signal is not None or BAD_INPUT in statuses:
            self._remaining_restarts = 0
        if self._remaining_restarts > 0:
            most = worker_group.spec.max_restarts
            self._on_failure(result.failures)
            number = most - self._remaining_restarts + 1
            say(f"starting all ranks again: restart {number} of at most {most}", file=sys.stderr, flush=True)
        return result

    def _silent_failures(self, worker_group: WorkerGroup) -> dict[int, ProcessFailure]:
        """Return, by rank, the failures of ranks of this host that ended without printing an error.

        Either a signal killed the rank, or its code ended the process, perhaps with status 0, by `os._exit` or C's
        `exit` (see `EXITED_DIRECTLY`).
        """
        assert isinstance(self._pcontext, SubprocessContext)
        failures = {}
        for local_rank, handler in self._pcontext.subprocess_handlers.items():
            status = handler.proc.poll()
            if status is not None and (status < 0 or has_exited_directly(self._pcontext.envs[local_rank])):
                rank = worker_group.workers[local_rank].global_rank
                failures[rank] = ProcessFailure(
                    local_rank, handler.proc.pid, status, self._pcontext.error_files[local_rank]
                )
                if status >= 0:
                    failures[rank].message = EXITED_DIRECTLY
        return failures
