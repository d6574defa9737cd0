"""Run a command on phantom GPUs: CUDA code on a host without a GPU sees them as GPUs. They run no kernels."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys

from titan_launch.core.errors import UserError
from titan_launch.core.process import BAD_INPUT, announce_once
from titan_launch.phantom_gpu.environment import PHANTOMS, phantom_gpus

_MOST_GIB = 1 << 20
"""Largest value of `--memory-gib`."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m titan_launch.phantom_gpu", description=__doc__)
    names = f"one of {', '.join(PHANTOMS)} (default: %(default)s)"
    parser.add_argument("--device", default="h100-80gb", metavar="NAME", help=names)
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs that the command sees (default: 1)")
    parser.add_argument("--memory-gib", type=float, metavar="GIB", help="GiB of each GPU (default: as the device)")
    parser.add_argument("--hide-gpu", action="store_true", help="run also on a host with a GPU, which is then hidden")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="command and its arguments")
    return parser


def main() -> int:
    parser = build_parser()
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        parser.error("the command is missing; write it after the options")
    if arguments.gpus < 1:
        parser.error(f"--gpus: must be at least 1, not {arguments.gpus}")
    if arguments.memory_gib is not None and not 0 < arguments.memory_gib <= _MOST_GIB:
        parser.error(f"--memory-gib: must be above 0 and at most {_MOST_GIB}, not {arguments.memory_gib:g}")
    try:
        with phantom_gpus(arguments.device, arguments.gpus, arguments.memory_gib, arguments.hide_gpu) as environment:
            return _run(command, environment)
    except UserError as error:
        announce_once(str(error))
        return BAD_INPUT


def _run(command: list[str], environment: dict[str, str]) -> int:
    with subprocess.Popen(command, env=environment) as process:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, lambda number, _: process.send_signal(number))
        status = process.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
