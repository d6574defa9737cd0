"""Count of the operations in a training run that make the host wait for the GPU.

    python -m benchmarks.gpu.waits --config JOB.toml [--section.key=value ...]

PyTorch warns of most such operations (`torch.cuda.set_sync_debug_mode`): copies to the host, `item()`, `nonzero()`.
It does not warn of explicit calls of `synchronize()`.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

import torch

from titan_launch.commands.parser import Parser
from titan_launch.config.loading.load import load_job
from titan_launch.core.process import run_and_exit
from titan_launch.train.health.coordination import StopRequest
from titan_launch.train.loop import fit
from titan_launch.train.main import train

_MESSAGE = "called a synchronizing CUDA operation"
_PACKAGE = str(Path(sys.modules["titan_launch"].__path__[0]))


def main() -> None:
    """Train the job of the command line, print the waits, and end the process with the launcher's exit status."""
    parser = Parser(prog="python -m benchmarks.gpu.waits")
    parser.add_job("python -m benchmarks.gpu.waits --config configs/llama_debug.toml --training.steps=20")
    arguments = parser.parse(sys.argv[1:])
    loaded = load_job(arguments.config, arguments.overrides)

    def train_and_print() -> None:
        stop = StopRequest()
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        else:
            print("no CUDA device: PyTorch reports no waits")
        with stop.listening(), counted_waits() as waits:
            try:
                train(loaded.config, loaded.provenance, stop)
            finally:
                print(report(waits))

    run_and_exit(train_and_print, loaded.provenance.describe)


@contextmanager
def counted_waits() -> Iterator[Counter[tuple[str, str, str]]]:
    """Count waits by the phase of the training loop, the line that waits, and the innermost line of the launcher."""
    waits: Counter[tuple[str, str, str]] = Counter()
    show = warnings.showwarning

    def count(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if _MESSAGE in str(message):
            phase, caller = _phase_and_caller(_frame_of(filename))
            waits[phase, f"{filename}:{lineno}", caller] += 1
        else:
            show(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{_MESSAGE}")
        warnings.showwarning = count
        yield waits


def report(waits: Counter[tuple[str, str, str]]) -> str:
    """Return one line per waiting line of code, training steps first, then the totals.

    A phase is a function that the training loop calls.
    """
    in_steps = sum(count for (phase, _, _), count in waits.items() if phase == "train_one_step")
    order = sorted(waits.items(), key=lambda item: (item[0][0] != "train_one_step", item[0]))
    lines = [f"{count:5} x {phase}: {line}, from {caller}" for (phase, line, caller), count in order]
    return "\n".join([*lines, f"waits within steps: {in_steps}; all waits: {waits.total()}"])


def _frame_of(filename: str) -> FrameType | None:
    """Return the innermost frame of a file: the frame that warned, without the frames that handle the warning."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != filename:
        frame = frame.f_back
    return frame


def _phase_and_caller(frame: FrameType | None) -> tuple[str, str]:
    """Walk up the stack from a warning.

    Return the function that `fit` has called, or "start or end" outside of `fit`, and the launcher's innermost line.
    """
    phase, caller, callee = "start or end", "", ""
    while frame is not None:
        code = frame.f_code
        if code is fit.__code__:
            return callee, caller
        if code.co_filename.startswith(_PACKAGE):
            caller = caller or f"{Path(code.co_filename).relative_to(_PACKAGE)}:{frame.f_lineno}"
        callee, frame = code.co_name, frame.f_back
    return phase, caller


if __name__ == "__main__":
    main()
