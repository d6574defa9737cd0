"""torchrun's agent, which starts the ranks of a host and watches them, with another way to end them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from titan_launch.core.process import EXITED_DIRECTLY, claim_announcement, has_exited_directly
from titan_launch.core.signals import RESTART_SIGNAL, RESTART_STATUS, signals_blocked

_SECONDS_AFTER_A_FAILURE = 30  # as torchrun's own


class ElasticAgent(LocalElasticAgent):
    """torchrun's own agent ends itself when a signal comes, gives its ranks 30 s, and does not tell how they ended.

    This one leaves signals to `launch.torchrun`, which passes them on to the ranks, and goes on watching: ranks that
    save and end with status 0 have succeeded. Where nothing is gained by a restart there is none: after a signal,
    and when a rank has found its input to be wrong.
    """

    def __init__(
        self,
        *args: Any,
        on_start: Callable[[Sequence[subprocess.Popen[bytes]]], None],
        on_failure: Callable[[Mapping[int, ProcessFailure]], object],
        is_stopping: Callable[[], bool],
        stop_timeout_s: int,
        final_statuses: Collection[int],
        **kwargs: Any,
    ):
        """`on_start` is told the processes of every start; `on_failure`, before they are started again, the failures of
        ranks. `is_stopping`: whether a signal has come; `stop_timeout_s`: how long ranks may take to end when they are
        asked to; `final_statuses`: those of a rank that would only repeat itself."""
        super().__init__(*args, **kwargs)
        self._on_start = on_start
        self._on_failure = on_failure
        self._is_stopping = is_stopping
        self._stop_timeout_s = stop_timeout_s
        self._final_statuses = final_statuses
        self._has_failed = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with signals_blocked():
            ids: dict[int, Any] = super()._start_workers(worker_group)
        context = self._pcontext
        assert isinstance(context, SubprocessContext)
        self._on_start([handler.proc for handler in context.subprocess_handlers.values()])
        return ids

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """End the ranks, before a restart or at the end. If a new host joined, they get the time to save. If another
        rank has failed, they cannot save, and on GPUs may not even notice the signal."""
        if self._pcontext is not None:
            self._pcontext.close(RESTART_SIGNAL, _SECONDS_AFTER_A_FAILURE if self._has_failed else self._stop_timeout_s)
        super()._stop_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        silent = self._silent_failures(worker_group)
        if silent:
            # `on_failure` will name these ranks. The others need not announce the SIGTERM that they get now.
            assert self._pcontext is not None
            claim_announcement(self._pcontext.envs[0])
            self._pcontext.close(signal.SIGTERM, _SECONDS_AFTER_A_FAILURE)
            result = RunResult(WorkerState.FAILED, failures=silent)
        else:
            result = super()._monitor_workers(worker_group)
        if result.state not in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self._has_failed = False
            return result
        self._has_failed = True
        statuses = {failure.exitcode for failure in result.failures.values()}
        if RESTART_STATUS in statuses:  # another agent has seen the new host first; all ranks end together
            self._remaining_restarts += 1  # which counts a failure, and this is none
            self._has_failed = False
            return result
        if self._is_stopping() or statuses & set(self._final_statuses):
            self._remaining_restarts = 0
        if self._remaining_restarts > 0:
            most = worker_group.spec.max_restarts
            self._on_failure(result.failures)
            number = most - self._remaining_restarts + 1
            print(f"starting all ranks again: restart {number} of at most {most}", file=sys.stderr, flush=True)
        return result

    def _silent_failures(self, worker_group: WorkerGroup) -> dict[int, ProcessFailure]:
        """Return, by rank, the failures of the ranks that have ended and could print no error: a signal killed the
        rank, or code that the rank ran ended the process, perhaps with status 0."""
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
