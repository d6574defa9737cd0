"""The search finds the layout that trying all of them finds, and writes it as a job file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NoReturn

import pytest

from tests.distributed import run_command
from tests.plan.report.test_modes import PredictedBy, flops_of, footprint
from tests.plan.test_speeds import MEASURED
from tests.sampling import rest_is_slow
from tests.trace.traces import model_inventory
from titan_launch.cli import main
from titan_launch.commands.parser import recordings_of
from titan_launch.commands.plan_search import search_layouts
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import load_job
from titan_launch.config.rules import first_problem
from titan_launch.core.errors import ConfigError, UserError
from titan_launch.plan.communication import Traffic
from titan_launch.plan.hardware import hardware_of
from titan_launch.plan.job import with_unsharded_parameters, with_values
from titan_launch.plan.layout import Layout, plan_layout
from titan_launch.plan.report.found import overlay
from titan_launch.plan.report.modes import ComparedJob, PlanRow, compare
from titan_launch.plan.search import SEARCHED, Key, Search, _without_pipeline, value_of

RANKS = 4
DEVICE = [
    "--planner.overhead_gib=0",
    "--planner.margin_gib=0",
    "--planner.fragmentation=0",
    "--planner.intra_node_gb_per_s=20",
    "--planner.inter_node_gb_per_s=5",
    "--planner.gpus_per_node=2",
    "--metrics.peak_tflops_per_device=1",
]
JOB = [
    "--model.args.n_layers=2",
    "--training.seq_len=64",
    "--training.global_batch_size=8",
    "--data.kind=synthetic",
    "--parallelism.pipeline_parallel_schedule=1F1B",
    *DEVICE,
]
PLAN = ["plan", "--config=llama_debug", *JOB, "--job.device=cuda"]
AXES = tuple(("parallelism", f"{axis}_parallel_degree") for axis in ("tensor", "context", "pipeline", "expert"))
NO_AXES = [f"--hold={'.'.join(axis)}=1" for axis in AXES]
HELD = (("parallelism", "pipeline_parallel_schedule"), ("loss", "chunks"))


def job(*options: str) -> JobConfig:
    return load_job("llama_debug", [*JOB, *options]).config


def every_fitting_row(config: JobConfig, ranks: int, stages: tuple[int, ...] = (1, 2, 4)) -> Iterator[PlanRow]:
    """Plan all combinations of what a search sets, one by one."""
    parallelism = "parallelism"
    for tensor, pipeline, replicas, sharded, size in product((1, 2), stages, (1, 2, 4), (False, True), (1, 2, 4, 8)):
        one = with_values(
            config,
            {
                (parallelism, "tensor_parallel_degree"): tensor,
                (parallelism, "pipeline_parallel_degree"): pipeline,
                (parallelism, "data_parallel_replicate_degree"): replicas,
                (parallelism, "shard_optimizer_over_replicas"): sharded,
                ("training", "local_batch_size"): size,
            },
        )
        try:
            layout = plan_layout(one.parallelism, one.training, ranks)
        except ConfigError:
            continue
        if first_problem(one) is not None:
            continue
        hardware = hardware_of(one, ranks_on_machine=2)
        one = with_unsharded_parameters(one, layout)
        recordings = recordings_of(one, layout, hardware.kernels)
        subject = ComparedJob.replayed(one, layout, hardware, recordings)
        rows = compare(one, layout, subject, hardware).rows
        yield from (row for row in rows if row.verdict == "fits")


OF_OPERATIONS = ("--planner.device=h100-80gb", "--job.device=cuda")
"""Times of operations and collectives, instead of a share of the peak."""
FOUR_BLOCKS = "--model.args.n_layers=4"
GRIDS = [
    (6, 0.006, (1,), ("--model.args.n_layers=1", "--training.global_batch_size=6")),
    (4, 0.1, (1, 2, 4), (*OF_OPERATIONS, FOUR_BLOCKS)),
    (4, 0.02, (1, 2, 4), (FOUR_BLOCKS,)),
    (6, 0.1, (1,), (*OF_OPERATIONS, FOUR_BLOCKS)),
]


@pytest.mark.parametrize(("ranks", "gib", "stages", "options"), rest_is_slow(GRIDS, len(GRIDS)))
def test_no_layout_is_faster_than_the_one_that_is_found(
    ranks: int, gib: float, stages: tuple[int, ...], options: tuple[str, ...]
) -> None:
    batch = f"--training.global_batch_size={2 * ranks}"
    config = job(f"--planner.memory_gib={gib}", "--job.device=cpu", batch, *options)
    held = [*HELD, *([("parallelism", "pipeline_parallel_degree")] if stages == (1,) else [])]
    best = search_layouts(config, ranks, held).best[0]
    times = [row.time.expected for row in every_fitting_row(config, ranks, stages) if row.time.expected is not None]
    assert best.seconds == pytest.approx(min(times), rel=2e-3)
    assert best.row.verdict == "fits"


@pytest.mark.parametrize(
    ("options", "axis"),
    [
        (["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_stages_per_rank=1"], "pipeline"),
        pytest.param(
            ["--parallelism.tensor_parallel_degree=2", "--parallelism.sequence_parallel=false"],
            "tensor",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_keys_of_an_axis_do_not_exclude_layouts_without_it(options: list[str], axis: str) -> None:
    """If the best layout does not use the axis, the written file must unset these keys. So it is a whole job file."""
    one_size = ("--planner.memory_gib=1", "--job.device=cpu", "--training.local_batch_size=2")
    config = job(*options, *one_size, "--activation_checkpoint.mode=full")
    others = [key for key in AXES if axis not in key[1]]
    held = [*HELD[1:], *others, ("training", "local_batch_size"), ("activation_checkpoint", "mode")]
    found = search_layouts(config, 2, held).best
    assert {getattr(one.layout, axis) for one in found} == {1, 2}
    plain = next(one for one in found if getattr(one.layout, axis) == 1)
    assert first_problem(plain.config) is None
    assert ("extends" in overlay(config, plain.config, "base.toml")) == (axis == "tensor")


def test_the_file_of_the_job_may_need_the_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(search: object, describe: object) -> NoReturn:
        raise UserError("error: the search begins")

    monkeypatch.setattr("titan_launch.commands.plan_search.run_and_exit", stop)
    file, text = tmp_path / "job.toml", tmp_path / "text.jsonl"
    file.write_text('[data]\nkind = "jsonl"\n')
    text.touch()
    options = ["--world-size=2", "--search", f"--out={tmp_path}/best.toml", f"--data.path={text}"]
    assert main(["plan", f"--config={file}", *options]) == 2
    assert capsys.readouterr().err == "error: the search begins\n"
    complete = overlay(None, load_job(str(file), options[-1:]).config, str(file))
    assert "extends" not in complete and f'path = "{text}"' in complete


def test_held_values_are_kept() -> None:
    config = job("--planner.memory_gib=1", "--job.device=cpu", "--training.local_batch_size=2")
    replicated = with_values(
        config,
        {
            ("parallelism", "data_parallel_replicate_degree"): 2,
            ("parallelism", "shard_optimizer_over_replicas"): True,
        },
    )
    keys = [("training", "local_batch_size"), ("parallelism", "shard_optimizer_over_replicas")]
    (found,) = search_layouts(replicated, RANKS, [*HELD, *AXES, *keys]).best
    assert found.layout.local_batch_size == 2 and found.layout.shards_optimizer and found.layout.replicate > 1


def test_a_deferring_job_may_fit_only_with_a_single_microbatch() -> None:
    """A held key with the value `auto` stays open."""
    options = ["--job.device=cpu", "--gradient_accumulation.mode=deferred", "--training.local_batch_size=auto"]
    keys = [("training", "local_batch_size"), ("gradient_accumulation", "mode")]
    (found,) = search_without_recordings(job("--planner.memory_gib=4", *options), [*HELD, *AXES, *keys]).run().best
    assert found.layout.num_microbatches == 1


def test_a_held_mode_with_all_reduces_excludes_a_sharded_optimizer() -> None:
    replicas, mode = ("parallelism", "data_parallel_replicate_degree"), ("gradient_accumulation", "mode")
    options = ["--planner.memory_gib=4", "--job.device=cpu"]
    config = with_values(job(*options), {replicas: 2, mode: "deferred_all_reduce"})
    (found,) = search_without_recordings(config, [*HELD, *AXES, replicas, mode]).run().best
    assert found.layout.replicate == 2 and not found.layout.shards_optimizer


def search_without_recordings(
    config: JobConfig,
    held: Sequence[Key],
    ranks: int = RANKS,
    is_small: Callable[[Layout], bool] = lambda layout: layout.num_microbatches == 1,
) -> Search:
    """Return a search in which a job needs 3 GiB if `is_small`, by default with a single microbatch, else 5 GiB."""
    inventory = model_inventory(config)

    def subject_of(config: JobConfig, layout: Layout) -> ComparedJob:
        gib = 3 if is_small(layout) else 5
        return ComparedJob(inventory, flops_of, PredictedBy(lambda choice: footprint(gib), lambda choice: Traffic()))

    return Search(config, ranks, hardware_of(config, 2), held, subject_of)


def test_a_job_that_a_run_would_refuse_is_not_found() -> None:
    options = ["--planner.memory_gib=4", "--job.device=cpu"]
    with pytest.raises(ConfigError, match="matches no trainable parameter"):
        search_without_recordings(job(*options, "--optimizer.param_groups=[{match = 'nothing'}]"), HELD)
    experts = job(*options, "--model.name=qwen3_moe", "--optimizer.name=Muon")
    divided = with_values(experts, {("parallelism", "tensor_parallel_degree"): 2})
    search = search_without_recordings(experts, HELD)
    assert search._misfit(experts) is None
    assert "tensor_parallel_degree = 2 divides each expert" in str(search._misfit(divided))


def test_a_layout_that_needs_replicas_is_found() -> None:
    """FSDP2 may shard 8 experts over at most 8 of 16 ranks, because Muon needs whole matrices."""
    options = ["--job.device=cpu", "--training.global_batch_size=16", "--planner.memory_gib=4", "--optimizer.name=Muon"]
    search = search_without_recordings(job(*options, "--model.name=qwen3_moe"), [*HELD, *AXES], ranks=16)
    (found,) = search.run().best
    assert found.layout.replicate == 2


def test_a_layout_that_needs_replicas_may_fit_only_with_a_sharded_optimizer() -> None:
    """FSDP2 may shard 528 outputs over at most 16 of 32 ranks, because `float8.all_gather` needs even shards."""
    float8 = ["--float8.enable=true", "--float8.emulate=true", "--float8.recipe=tensorwise", "--float8.all_gather=true"]
    options = ["--job.device=cpu", "--training.global_batch_size=32", "--planner.memory_gib=4", *float8]
    config = job(*options, "--model.args.hidden_dim=528")
    search = search_without_recordings(config, [*HELD, *AXES], 32, lambda layout: layout.shards_optimizer)
    (found,) = search.run().best
    assert found.layout.replicate == 2


@pytest.mark.slow
def test_cpu_offload_is_used_only_if_nothing_fits_without_it() -> None:
    size = ("--model.args.n_layers=8", "--training.local_batch_size=2")
    options = ("--job.device=cuda", *size, "--training.enable_cpu_offload=true")
    held = [*HELD, *AXES, ("training", "local_batch_size")]
    roomy = search_layouts(job(*options, "--planner.memory_gib=1"), 1, held).best[0]
    assert not roomy.config.training.enable_cpu_offload
    tight = search_layouts(job(*options, "--planner.memory_gib=0.1"), 1, held).best[0]
    assert tight.config.training.enable_cpu_offload and tight.row.verdict == "fits"


@pytest.mark.slow
def test_more_chunks_are_tried_if_the_peak_is_in_the_output_layer_of_a_users_own_model() -> None:
    """Such a model declares no head."""
    model = ("--model.name=tests.trace.models:Saving", "--model.args.kinds=aa", "--training.seq_len=4096")
    options = ("--data.kind=synthetic", "--job.device=cpu", "--loss.chunks=2", "--planner.memory_gib=0.004")
    config = load_job("llama_debug", [*DEVICE, *model, *options]).config
    assert search_layouts(config, 1, [HELD[0], *AXES]).best[0].config.loss.chunks == 16


def test_the_best_job_is_written_and_keeps_what_is_held(tmp_path: Path) -> None:
    held = ["--hold=parallelism.tensor_parallel_degree=2", "--hold=parallelism.pipeline_parallel_degree=1"]
    held += ["--hold=activation_checkpoint.mode=full", "--hold=loss.chunks"]
    held.append('--precision.rules=[{match = "layers.*.*_norm", param_dtype = "float32"}]')
    options = [f"--world-size={RANKS}", "--planner.memory_gib=1", "--search", "--json", "--out=best.toml"]
    status, out, err = run_command([*PLAN, *options, *held], tmp_path)
    assert status == 0, err
    found = json.loads(out)["4"]["best"]
    assert {(job["layout"]["tensor"], job["layout"]["pipeline"]) for job in found} == {(2, 1)}
    written = load_job(str(tmp_path / "best.toml")).config
    assert written.activation_checkpoint.mode == "full" and written.parallelism.tensor_parallel_degree == 2
    keys = {".".join(key): value_of(written, key) or False for key in SEARCHED}  # None: the launcher's default
    assert keys == found[0]["keys"]
    assert main(["check", f"--config={tmp_path}/best.toml", f"--world-size={RANKS}"]) == 0
    own = ["plan", "--config=best.toml", f"--world-size={RANKS}", "--rows=own", "--json"]
    status, out, err = run_command(own, tmp_path)
    assert status == 0, err
    assert json.loads(out)["rows"][0]["active_bytes"] == found[0]["active_bytes"]
    status, again, said = run_command([*PLAN, *options[:-1], *held], tmp_path)  # from the cache
    assert json.loads(again)["4"]["best"] == found, said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--search", "--hold=training.steps=5"],
            "--hold training.steps: the search does not change this key; --hold takes",
        ),
        (["--hold=loss.chunks"], "--hold needs --search"),
        (["--max-gpus"], "--max-gpus needs --search"),
        (["--search", "--measure"], "--measure needs one layout, and --search plans many"),
        (["--search", "--global-batch=9:3"], "--global-batch 9:3: needs sample counts LOW <= HIGH, such as 256:1024"),
        (["--search", "--out=best.yaml"], "best.yaml: the name of a job file must end in .toml"),
    ],
)
def test_bad_options_are_one_error(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config=llama_debug", "--world-size=4", "--data.kind=synthetic", *options]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("error:") == 1


def test_half_of_the_ranks_and_larger_batches_are_tried(tmp_path: Path) -> None:
    options = ["--search", "--json", "--max-gpus", "--global-batch=4:8"]
    held = ["--hold=activation_checkpoint.mode=none", "--hold=loss.chunks", *NO_AXES]
    command = [*PLAN, "--world-size=2", "--planner.memory_gib=1", *options, *held]
    status, out, err = run_command(command, tmp_path)
    assert status == 0, err
    found = json.loads(out)
    assert [*found] == ["2", "1"]
    for ranks, result in found.items():
        layout = result["best"][0]["layout"]
        batch = layout["local_batch_size"] * layout["num_microbatches"] * layout["replicate"] * layout["shard"]
        assert batch in (4, 8) and layout["replicate"] * layout["shard"] == int(ranks)


def test_a_job_that_fits_nowhere_says_so(tmp_path: Path) -> None:
    options = ["--search", "--hold=activation_checkpoint.mode=full", "--planner.memory_gib=0.0001"]
    status, _, err = run_command([*PLAN, "--world-size=1", *NO_AXES, *options], tmp_path)
    assert status == 2
    assert "no layout fits without CPU offload" in err
    assert "no layout fits" in err
    command = ["plan", "--config=llama_debug", "--data.kind=synthetic", "--job.device=cuda", "--search"]
    status, _, err = run_command(command, tmp_path)
    assert status == 2
    assert "planner.device (not set in the job): a search needs the memory and the speed of" in err


def test_speeds_without_a_link_that_layouts_need_are_refused(tmp_path: Path) -> None:
    (tmp_path / "speeds.json").write_text(replace(MEASURED, collectives=()).dumps())
    options = ["--planner.memory_gib=1", "--job.device=cpu", f"--planner.speeds={tmp_path / 'speeds.json'}"]
    alone = load_job("llama_debug", [*JOB[:5], *options]).config
    held = [*HELD, *AXES, ("training", "local_batch_size"), ("activation_checkpoint", "mode")]
    assert search_layouts(alone, 1, held).best[0].seconds > 0
    with pytest.raises(ConfigError, match="a search needs the memory and the speed of the device"):
        search_layouts(alone, 2, HELD)


@pytest.mark.slow
@pytest.mark.parametrize(("speeds", "degrees", "least"), [("measured", (1, 2), 40), ("device", (1, 2, 4), 51)])
def test_no_step_is_faster_than_its_bound(speeds: str, degrees: tuple[int, ...], least: int, tmp_path: Path) -> None:
    """With tensor parallelism, whose collectives have a base time, and in every mode of gradient accumulation."""
    options = ["--planner.memory_gib=1", "--training.global_batch_size=16", *OF_OPERATIONS]
    if speeds == "measured":
        (tmp_path / "speeds.json").write_text(MEASURED.dumps())
        options = [*options[:2], "--job.device=cpu", f"--planner.speeds={tmp_path / 'speeds.json'}"]
    config = job(*options, "--planner.inter_node_gb_per_s=1000")
    hardware = hardware_of(config, RANKS)

    def subject_of(config: JobConfig, layout: Layout) -> ComparedJob:
        return ComparedJob.replayed(config, layout, hardware, recordings_of(config, layout, hardware.kernels))

    search = Search(config, RANKS, hardware, HELD, subject_of)
    search._count_flops()
    checked = 0
    for tensor, size in product(degrees, (1, 4)):
        values = {("parallelism", "tensor_parallel_degree"): tensor, ("training", "local_batch_size"): size}
        one = with_values(config, values)
        search._probes = {_without_pipeline(one): search._probed(one)}
        for mode in search._modes(one):
            planned = search._planned(mode)
            assert search._bound(mode, mode.activation_checkpoint) <= planned.seconds
            assert planned.row.time.least is not None and planned.row.time.least <= planned.seconds
            checked += 1
    assert checked >= least
