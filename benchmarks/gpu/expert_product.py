"""Training with a choice of the product of experts, to compare both ways.

    python -m benchmarks.gpu.expert_product grouped --config JOB.toml [--section.key=value ...]

`grouped` computes all experts of a layer with one kernel, `looped` one after another. The launcher chooses by device,
dtype and widths.
"""

from __future__ import annotations

import sys

from titan_launch.cli import main
from titan_launch.commands.parser import Parser
from titan_launch.core.process import exit_process
from titan_launch.models.decoder import mixture_of_experts


def run() -> None:
    """Train the job of the command line, and end the process with the launcher's exit status."""
    parser = Parser(prog="python -m benchmarks.gpu.expert_product")
    example = "python -m benchmarks.gpu.expert_product looped --config configs/qwen3_moe_debug.toml"
    parser.add_job(example)
    parser.add_argument("product", choices=("grouped", "looped"), help="how the experts of a layer are computed")
    choice = parser.parse(sys.argv[1:]).product
    mixture_of_experts.is_grouped = lambda *_: choice == "grouped"
    exit_process(main(sys.argv[2:]))


if __name__ == "__main__":
    run()
