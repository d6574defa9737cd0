"""The command `prove`: a comparison of training in a job's layout and in one process, with a certificate."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import NoReturn

from titan_launch.commands.parser import Parser, load
from titan_launch.core.errors import RunError
from titan_launch.core.files import check_output, write_output
from titan_launch.core.process import run_and_exit
from titan_launch.core.terminal import one_line, say, say_data
from titan_launch.plan.job import with_values
from titan_launch.plan.proof.certificate import find_certificate, store_certificate


def add_arguments(parser: Parser) -> None:
    parser.add_job("titan-launch prove --config configs/parallel/tensor.toml")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--out", metavar="FILE", type=Path, help="also write the certificate as JSON")
    parser.add_argument("--again", action="store_true", help="compare again, even if the cache has a certificate")


def run(arguments: Namespace) -> NoReturn:
    """Print the certificate of the job, and end the process. The exit status is 1 if the layout is not proven."""
    loaded = load(arguments, None)
    if arguments.out is not None:
        check_output(arguments.out)
    in_cache = with_values(loaded.config, {("prove", "certificate"): None})  # the file may not exist yet, or be old

    def print_certificate() -> None:
        certificate = None if arguments.again else find_certificate(in_cache)
        if certificate is None:
            from titan_launch.prove.main import prove

            certificate = prove(loaded.config, lambda text: say(one_line(text), file=sys.stderr, flush=True))
            store_certificate(certificate)
        try:
            if arguments.out is not None:
                write_output(arguments.out, certificate.dumps())
        finally:  # the certificate is printed even if the file cannot be written
            say_data(certificate.dumps()) if arguments.json else say(certificate.text())
        if certificate.verdict != "proven":
            raise RunError(certificate.headline)

    run_and_exit(print_certificate, loaded.provenance.describe)
