"""The command `measure-device`: measurements of the speeds of this machine, for predictions of step times."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from titan_launch.commands.parser import Parser
from titan_launch.commands.train import torchrun_world_size
from titan_launch.core.errors import ConfigError, Problem, UserError
from titan_launch.core.files import check_output, write_output
from titan_launch.core.phantom import is_phantom
from titan_launch.core.process import run_and_exit
from titan_launch.core.terminal import one_line, say
from titan_launch.plan.speeds import Measured, read_measured

_TIMEOUT_SECONDS = 300
"""Seconds that a rank waits for the other ranks."""


def add_arguments(parser: Parser) -> None:
    parser.usage = "titan-launch measure-device --out FILE [--device DEVICE]"
    parser.epilog = "examples:\n  titan-launch measure-device --out speeds.json\n"
    parser.epilog += "  torchrun --nproc-per-node 8 -m titan_launch measure-device --out speeds.json"
    text = "file of measurements to write, for planner.speeds; replaces older measurements (required)"
    parser.add_argument("--out", required=True, metavar="FILE", type=Path, help=text)
    text = "device to measure (default: auto, a GPU if there is one)"
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=text)


def run(arguments: Namespace) -> NoReturn:
    """Measure the speeds with all ranks that torchrun started, or alone. Rank 0 writes the file and prints a summary.
    End the process."""
    torchrun_world_size()
    if os.environ.get("RANK", "0") == "0":
        _check_out(arguments.out)
    if is_phantom() and arguments.device != "cpu":
        raise UserError("error: a phantom GPU has no speeds; measure a real device, or set --device cpu")

    def describe(problems: Iterable[Problem]) -> str:
        return "\n".join(f"error: --device {problem.value}: {problem.reason}" for problem in problems)

    run_and_exit(lambda: _measure(arguments.out, arguments.device), describe)


def _check_out(out: Path) -> None:
    """Raise UserError if the file `out` cannot be written, or if it exists and is not a file of measurements."""
    check_output(out)
    if os.path.lexists(out):
        try:
            read_measured(str(out))
        except ConfigError:
            reason = "exists, and is not a file of measurements, so it is not replaced; name another file"
            raise UserError(f"error: --out {out}: {reason}") from None


def _measure(out: Path, device: str) -> None:
    from titan_launch.config.sections.precision import KernelsConfig
    from titan_launch.distributed.process_group import process_group
    from titan_launch.metrics.device_speeds import measure, scope_of
    from titan_launch.train.kernel_choice import set_precision

    with process_group(device, _TIMEOUT_SECONDS) as ranks:
        set_precision(KernelsConfig())
        measured = measure(ranks, scope_of(ranks.device), lambda text: say(text, file=sys.stderr, flush=True))
        if ranks.is_rank_0:
            write_output(out, measured.dumps())
            for line in (*_summary(measured), f"file: {out}"):
                say(one_line(line))


def _summary(measured: Measured) -> list[str]:
    """Return the most important speeds as lines."""
    cubes = measured.products.items()
    rates = {
        "products": {dtype: max(r for plane in cube for row in plane for r in row) for dtype, cube in cubes},
        # The widths of heads ascend, so the rate of the longest sequence with the widest heads remains.
        "attention, forward": {one.dtype: one.forward[-1][1] for one in measured.attention},
        "attention, backward": {one.dtype: one.backward[-1][1] for one in measured.attention},
        "convolution": measured.convolution,
    }
    lines = [f"device: {measured.device}", f"ranks: {measured.ranks}"]
    for name, by_dtype in rates.items():
        lines += [f"{name} ({dtype}): {rate / 1e12:.3g} TFLOP/s" for dtype, rate in by_dtype.items()]
    num_bytes, seconds = measured.memory[-1]
    lines.append(f"memory: {num_bytes / seconds / 1e9:.3g} GB/s")
    host = {
        "FSDP2 unit": measured.unit_seconds,
        "parameter": measured.parameter_seconds,
        "operation": measured.operation_seconds,
        "collective of tensor parallelism": measured.exchange_seconds,
        "microbatch in a pipeline stage": measured.stage_seconds,
    }
    lines += [f"host time per {what}: {seconds * 1e6:,.0f} us" for what, seconds in host.items()]
    for collective in measured.collectives:
        place = ", across nodes" if collective.crossings else ""
        (_, base_seconds), *_, (num_bytes, seconds) = collective.points
        speed = f"{base_seconds * 1e6:,.0f} us (smallest message), {num_bytes / seconds / 1e9:.3g} GB/s (largest)"
        lines.append(f"{collective.kind} ({collective.ranks} ranks{place}): {speed}")
    return lines
