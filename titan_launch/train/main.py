"""A training run, from its configuration to its end."""

from __future__ import annotations

import warnings
from contextlib import ExitStack

from titan_launch.config.job import JobConfig
from titan_launch.config.loading.provenance import Provenance
from titan_launch.distributed.process_group import process_group
from titan_launch.distributed.random_state import random_stream, seed_everything
from titan_launch.distributed.torch_private import warn_of_untested_release
from titan_launch.train.build import Surroundings, build_run
from titan_launch.train.explain import explain
from titan_launch.train.health.coordination import StopRequest
from titan_launch.train.health.flight_recorder import configure_flight_recorder
from titan_launch.train.health.watchdog import Watchdog
from titan_launch.train.loop import fit
from titan_launch.train.run import Run
from titan_launch.train.run_folder.logs import console_log, rank_log


def train(
    config: JobConfig, provenance: Provenance, stop: StopRequest, log_level: str = "INFO", quiet: bool = False
) -> None:
    """Train on this rank until the run is done, until early stopping ends it, or until a signal sets `stop`. Close all
    sinks and files at the end, even after an error.

    `provenance`: the location of each key of the job. `log_level`: lowest level of the messages on the console.
    `quiet`: True disables reports and progress on the console. The log files and the other sinks get everything.
    """
    with ExitStack() as stack:
        log_file = stack.enter_context(rank_log())
        configure_flight_recorder(config.job.run_folder, config.comm.flight_recorder_size)
        timeout = config.comm.init_timeout_seconds
        ranks = stack.enter_context(process_group(config.job.device, timeout, lambda: stop.signal))
        stack.enter_context(console_log(ranks.is_rank_0, log_level))
        warn_of_untested_release()
        _ignore_warnings()
        seed_everything(
            config.training.seed + random_stream(ranks.rank, config.parallelism), config.debug.deterministic
        )
        watchdog = stack.enter_context(Watchdog(config.comm, ranks))
        run: Run | None = None
        try:
            process = Surroundings(provenance.place, stop, log_file, watchdog, quiet)
            run = build_run(config, ranks, stack, process)
            stop.mark_run_built()
            fit(run)
        except BaseException as error:
            explained = explain(error, config, watchdog, run)
            watchdog.publish_failure()
            if explained is None:
                raise
            raise explained from error


def _ignore_warnings() -> None:
    """Ignore the warnings of PyTorch about behavior that the launcher intends or reports itself."""
    for message in (
        r"FSDP2-wrapped module .* returned a view tensor",  # train.precision_audit names the modules
        r"Mismatch dtype between input and weight",  # the effect of a precision rule for fp32 norm weights
        r"Slicing a flattened dim from root mesh",  # distributed.mesh slices for HSDP
        r"Using a non-tuple sequence for multidimensional indexing",  # inputs["name"]: train.forward explains the error
    ):
        warnings.filterwarnings("ignore", message=message)
