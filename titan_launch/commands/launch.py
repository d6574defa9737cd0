"""The command `launch`: it checks the job, then runs torchrun in this process to start the ranks."""

from __future__ import annotations

from argparse import SUPPRESS, Namespace
from collections.abc import Iterator
from functools import partial
from shlex import quote

from titan_launch.commands.parser import Parser, check_weights, load_to_train
from titan_launch.commands.train import add_dry_run, add_output, dry_run, is_dry_run
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import LoadedJob
from titan_launch.config.rules import Rule
from titan_launch.config.rules.training import profiled_ranks_exist
from titan_launch.core.errors import ConfigError, Problem, UserError
from titan_launch.core.terminal import counted
from titan_launch.launch.options import LAUNCH_OPTIONS, check_rendezvous, plan_processes
from titan_launch.launch.torchrun import launch
from titan_launch.plan.proof.certificate import find_certificate


def add_arguments(parser: Parser) -> None:
    parser.add_job("titan-launch launch --nproc-per-node 2 --config configs/llama_bn.toml --training.steps=20")
    for name, (metavar, text) in LAUNCH_OPTIONS.items():
        parser.add_argument(f"--{name}", dest=name, metavar=metavar, default=SUPPRESS, help=text)
    text = "start only if a certificate of `prove` proves the job's layout (see prove.certificate)"
    parser.add_argument("--require-proof", action="store_true", help=text)
    add_output(parser)
    add_dry_run(parser)


def run(arguments: Namespace) -> int:
    """Start the ranks and wait for them. Return 0, the exit status of the rank that failed first, or a status of
    torchrun if torchrun itself fails. With an option of a dry run, make the dry run and end the process."""
    given = {name: value for name, value in vars(arguments).items() if name in LAUNCH_OPTIONS}
    processes = plan_processes(given)
    world_size = processes.world_size
    if is_dry_run(arguments):
        fake = arguments.fake_world_size
        if fake and world_size and fake != world_size and given.keys() & {"nnodes", "nproc-per-node"}:
            made = f"--nnodes and --nproc-per-node make {counted(world_size, 'rank')}"
            reason = f"{made}; remove these options, or --fake-world-size"
            raise UserError(f"error: --fake-world-size {fake}: {reason}")
        dry_run(arguments)
    most = processes.per_node * int(processes.nodes.rpartition(":")[2])
    more_rules: list[Rule] = [partial(profiled_ranks_exist, world_size=most)]
    if world_size is None:
        more_rules.append(_global_batch_is_set)
    loaded = load_to_train(arguments, world_size, more_rules)
    check_weights(loaded)
    if arguments.require_proof:
        _check_proof(loaded, arguments.config)
    check_rendezvous(given)
    output = ["--quiet"] * arguments.quiet + ([f"--log-level={arguments.log_level}"] if arguments.log_level else [])
    worker_args = ["--config", arguments.config, *output, *arguments.overrides]
    return launch(processes, worker_args, loaded.config.job.run_folder)


def _global_batch_is_set(config: JobConfig) -> Iterator[Problem]:
    if config.training.global_batch_size is None:
        reason = "is required with --nnodes min:max: its default depends on the number of ranks, which may change"
        yield Problem(("training", "global_batch_size"), reason)


def _check_proof(loaded: LoadedJob, file: str) -> None:
    """Raise UserError if no certificate proves the layout of a job. `file`: the job file, for the message."""
    try:
        certificate = find_certificate(loaded.config)
    except ConfigError as error:
        raise UserError(loaded.provenance.describe(error.problems)) from None
    if certificate is None:
        command, named = f"titan-launch prove --config {quote(file)}", loaded.config.prove.certificate
        if named is not None:
            remedy = f"run {command} --out {quote(named)} with the same overrides"
            others = "another job, other code, or other versions of torch or transformers"
            raise UserError(f"error: --require-proof: the certificate {named} is for {others}; {remedy}")
        remedy = f"run {command} with the same overrides, or set prove.certificate to a file from prove --out"
        these = "this job, this code and these versions of torch and transformers"
        raise UserError(f"error: --require-proof: found no certificate for {these}; {remedy}")
    if certificate.verdict != "proven":
        raise UserError(f"error: --require-proof: {certificate.text()}")
