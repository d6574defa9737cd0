"""muP (`[mup]`) beside the standard parametrization: sizes of activations over widths, and the best learning rates.

    python benchmarks/width_transfer.py coordinates [--write docs/verification/numerics.md] [--picture FILE]
    python benchmarks/width_transfer.py rates [--write docs/verification/numerics.md]

`coordinates` (a minute on 2 cores) trains models of five widths for four steps, and plots the root mean square of
outputs: the coordinate check of Tensor Programs V (arXiv:2203.03466, appendix D.1). `rates` (20 minutes) trains two
widths with several learning rates on the data of the main job. At the base width, both parametrizations are the same.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from publishing import markdown_table, publish

from titan_launch.config.loading.load import load_job
from titan_launch.prove.ranks import run_ranks, start_server

BASE = 64
"""The base width, at which both parametrizations are the same."""

WIDTHS = (64, 128, 256, 512, 1024)
MODULES = ("tok_embeddings", "layers.0", "layers.1", "output")
STEPS = 4
RATES = tuple(2.0**-exponent for exponent in range(11, 4, -1))
"""Learning rates, 0.0005 to 0.03."""

_STEPS_OF_RATES = 200

_HEAD = 16
"""Width of a head, which is the same at every width of the model."""


def rows_of_run(width: int, has_mup: bool, *keys: str) -> list[dict[str, float]]:
    """Train a model on one rank, and return its reports."""
    shape = {"dim": width, "hidden_dim": 3 * width, "n_heads": width // _HEAD, "n_kv_heads": width // _HEAD // 2}
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            *(f"--model.args.{key}={value}" for key, value in shape.items()),
            *([f"--mup.base_width={BASE}"] if has_mup else []),
            "--job.device=cpu",
            f"--job.dump_folder={folder}",
            "--precision.param_dtype=float32",
            "--lr_scheduler.kind=constant",
            "--checkpoint.save_last=false",
            *keys,
        ]
        config = load_job("llama_debug", overrides).config
        rows: list[dict[str, float]] = run_ranks("measured_layouts:run_steps", 1, config, timeout=3600)[0]
    return rows


def coordinates(picture: Path | None, page: Path | None) -> None:
    """Measure the outputs of modules at all widths after each step."""
    found: dict[tuple[bool, int], list[list[float]]] = {}
    modules = ",".join(f'"{module}"' for module in MODULES)
    for has_mup in (False, True):
        for width in WIDTHS:
            keys = ("--model.args.n_layers=2", "--training.seq_len=64", "--training.global_batch_size=4")
            rate, steps = "--optimizer.lr=1e-2", f"--training.steps={STEPS + 1}"
            rows = rows_of_run(width, has_mup, *keys, rate, steps, f"--metrics.modules=[{modules}]")
            found[has_mup, width] = [[row[f"activations/rms/{module}"] for module in MODULES] for row in rows]
    table: list[Sequence[str]] = [["parametrization", "output of", "step", *map(str, WIDTHS), "widest / narrowest"]]
    for has_mup in (False, True):
        for index, module in enumerate(MODULES):
            for step in (0, STEPS):
                values = [found[has_mup, width][step][index] for width in WIDTHS]
                name = "muP" if has_mup else "standard"
                ratio = f"{values[-1] / values[0]:.2f}"
                table.append([name, f"`{module}`", str(step), *(f"{value:.3g}" for value in values), ratio])
    if picture is not None:
        plot(found, picture)
    publish(markdown_table(table, 2), "mup_coordinates", page)


def plot(found: dict[tuple[bool, int], list[list[float]]], path: Path) -> None:
    """Plot the outputs of all modules over the width: a column for each module, a line for each step."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "mup"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(MODULES), figsize=(11, 5), sharex=True, sharey="col", layout="constrained")
    for row, has_mup in zip(axes, (False, True), strict=True):
        for index, axis in enumerate(row):
            for step in range(STEPS + 1):
                values = [found[has_mup, width][step][index] for width in WIDTHS]
                color = pyplot.get_cmap("viridis")(step / (STEPS + 1))
                axis.loglog(WIDTHS, values, marker="o", markersize=3, color=color, label=f"{step} updates")
            axis.set_xticks(WIDTHS, map(str, WIDTHS), minor=False)
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            axis.set_title(f"{MODULES[index]}, {'muP' if has_mup else 'standard'}", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("width")
    for axis in axes[:, 0]:
        axis.set_ylabel("root mean square of outputs")
    axes[0, 0].legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})


def rates(page: Path | None) -> None:
    """Train two widths with all learning rates."""
    table: list[Sequence[str]] = [["parametrization", "width", *(f"{rate:.2g}" for rate in RATES), "best"]]
    for name, width in (("both", BASE), ("standard", 4 * BASE), ("muP", 4 * BASE)):
        losses = []
        for rate in RATES:
            keys = ("--training.seq_len=128", "--training.global_batch_size=8", "--training.local_batch_size=8")
            rows = rows_of_run(
                width, name == "muP", *keys, f"--training.steps={_STEPS_OF_RATES}", f"--optimizer.lr={rate}"
            )
            losses.append(sum(row["train/loss"] for row in rows[-50:]) / 50)
            print(f"{name}, width {width}, learning rate {rate:.2g}: loss {losses[-1]:.3f}", flush=True)
        best = RATES[losses.index(min(losses))]
        table.append([name, str(width), *(f"{loss:.3f}" for loss in losses), f"{best:.2g}"])
    publish(markdown_table(table, 1), "mup_rates", page)


def main() -> None:
    """Run one of the two measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("coordinates", "rates"))
    parser.add_argument("--picture", type=Path, metavar="FILE")
    parser.add_argument("--write", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    start_server()
    if arguments.what == "coordinates":
        coordinates(arguments.picture, arguments.write)
    else:
        rates(arguments.write)


if __name__ == "__main__":
    main()
