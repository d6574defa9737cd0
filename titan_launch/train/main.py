"""A training run, from its configuration to its end."""

from __future__ import annotations

import logging
import sys
import warnings
from contextlib import ExitStack

from titan_launch.config.job import JobConfig
from titan_launch.config.provenance import Provenance
from titan_launch.parallel.distributed import process_group
from titan_launch.train.build import build_run
from titan_launch.train.loop import fit
from titan_launch.train.seed import seed_everything


def train(config: JobConfig, provenance: Provenance) -> None:
    """Train as one rank. Every path out closes writers and destroys the process group."""
    with ExitStack() as stack:
        ranks = stack.enter_context(process_group(config.job.device, config.comm.timeout_seconds))
        _log_on_main(ranks.is_main)
        _leave_out_warnings()
        seed_everything(config.training.seed + ranks.rank, config.debug.deterministic)
        fit(build_run(config, ranks, stack, provenance.place))


def _leave_out_warnings() -> None:
    """Those of PyTorch that every rank would print, for what the launcher says itself or somebody asked for."""
    for message in (
        r"FSDP2-wrapped module .* returned a view tensor",  # train.audit names them by path
        r"Mismatch dtype between input and weight",  # a rule for fp32 norm weights asks for it
    ):
        warnings.filterwarnings("ignore", message=message)


def _log_on_main(is_main: bool) -> None:
    """This package's messages go to standard output, from one rank; warnings from all."""
    logger = logging.getLogger("titan_launch")
    logger.setLevel(logging.INFO if is_main else logging.WARNING)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logging.raiseExceptions = False  # a closed pipe is reported once, by the console's next line
        logger.propagate = False
