"""What is assumed about the machines, and where it is from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from titan_launch.config.job import JobConfig
from titan_launch.config.sections.model import ModelConfig
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig, ParallelismConfig
from titan_launch.core.errors import ConfigError
from titan_launch.plan.communication import LinkTraffic
from titan_launch.plan.hardware import DEVICES, Hardware, hardware_of, machine_memory_gib
from titan_launch.plan.layout import Layout
from titan_launch.plan.step_time import StepTime, bubble_share, estimate_step_time, flops_of_model


def hardware(device: str = "auto", tflops: float | None = None, **planner: Any) -> Hardware:
    metrics = {"peak_tflops_per_device": tflops}
    job = {"job": {"device": device}, "planner": planner, "metrics": metrics}
    return hardware_of(JobConfig.model_validate(job), 4)


def test_a_device_gives_what_no_key_does() -> None:
    known = hardware(device="auto")
    assert (known.memory_gib, known.peak_tflops, known.intra_node_gb_per_s) == (None, None, None)
    config = {"planner": {"device": "h100-80gb", "memory_gib": 70, "inter_node_gb_per_s": 25}}
    given = hardware_of(JobConfig.model_validate(config), 4)
    assert (given.memory_gib, given.memory_source, given.peak_tflops) == (70, "planner.memory_gib", 989)
    assert (given.intra_node_gb_per_s, given.inter_node_gb_per_s, given.gpus_per_node) == (450, 25, 8)
    assert (given.kernels, given.overhead_gib, given.fragmentation) == ("cuda", 2, 0.15)


def test_the_peak_of_metrics_comes_first() -> None:
    assert hardware(tflops=100, device="auto").peak_tflops == 100


def test_an_unknown_device_lists_those_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        hardware_of(JobConfig.model_validate({"planner": {"device": "h100"}}), 1)
    text = str(caught.value)
    assert all(device.name in text for device in DEVICES) and "planner.memory_gib" not in text
    assert text.endswith('did you mean "h100-80gb", "h100-pcie" or "h100-nvl"?')


def test_a_cpu_shares_the_machines_memory_and_gives_back_what_it_frees() -> None:
    cpu = hardware(device="cpu")
    assert cpu.memory_gib == pytest.approx(machine_memory_gib() / 4) and "/ 4 ranks" in cpu.memory_source
    assert (cpu.kernels, cpu.overhead_gib, cpu.fragmentation) == ("cpu", 0.5, 0)
    assert hardware(device="cpu", memory_gib=1).overhead_gib == 0
    assert hardware(device="cpu", memory_gib=1, overhead_gib=0.5).overhead_gib == 0.5


def test_a_job_for_a_cpu_can_be_planned_for_a_gpu() -> None:
    planned = hardware_of(JobConfig.model_validate({"job": {"device": "cpu"}, "planner": {"device": "l4"}}), 4)
    assert (planned.kernels, planned.memory_gib, planned.overhead_gib) == ("cuda", 21.9, 2)


def test_a_run_knows_its_device() -> None:
    found = hardware_of(JobConfig(), 1, "cuda", "NVIDIA H200", 139.8)
    assert (found.device, found.memory_gib, found.peak_tflops) == ("h200", 139.8, 989)
    unknown = hardware_of(JobConfig(), 1, "cuda", "NVIDIA H300", 200.0)
    assert (unknown.device, unknown.memory_gib, unknown.peak_tflops) == ("NVIDIA H300", 200.0, None)
    named = JobConfig.model_validate({"planner": {"device": "l4"}})
    assert hardware_of(named, 1, "cuda", "NVIDIA H200", 139.8).memory_gib == 21.9


def test_a_step_takes_between_the_longer_part_and_the_sum() -> None:
    fast = hardware_of(JobConfig.model_validate({"planner": {"device": "h100-80gb", "mfu": 0.5}}), 8)
    time = estimate_step_time(6 * 989 * 10**12, LinkTraffic(within=450e9, across=100e9), fast)
    assert time == StepTime(compute=12, communication=2)  # at half the peak; the slower link counts
    assert time.interval == (12, 14)


def test_what_is_unknown_gives_no_interval() -> None:
    nothing = hardware(device="auto")
    assert estimate_step_time(10, LinkTraffic(0, 0), nothing) == StepTime(None, 0.0)
    assert estimate_step_time(10, LinkTraffic(1, 0), nothing).communication is None
    assert StepTime(None, 1.0).interval is None


def test_a_pipeline_waits_while_it_fills_and_empties() -> None:
    def share(schedule: str) -> float:
        layout = Layout(replicate=1, shard=1, local_batch_size=1, num_microbatches=8, pipeline=4)
        keys = {"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": schedule}
        return bubble_share(ParallelismConfig.model_validate(keys), layout)

    assert [share(name) for name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")] == [3 / 8, 3 / 16, 0]
    h100 = hardware_of(JobConfig.model_validate({"planner": {"device": "h100-80gb", "mfu": 0.5}}), 8)
    time = estimate_step_time(989 * 10**12, LinkTraffic(0, 0), h100, share("1F1B"))
    assert (time.compute, time.bubble, time.interval) == (2.75, 0.75, (2.75, 2.75))


def test_steps_whose_intervals_overlap_tie() -> None:
    assert StepTime(10, 2).ties_with(StepTime(11, 0.5)) and StepTime(11, 0.5).ties_with(StepTime(10, 2))
    assert not StepTime(10, 0.5).ties_with(StepTime(11, 0.5))
    assert StepTime(None, 1).ties_with(StepTime(10, 1))


@pytest.mark.parametrize("published", [5762, 6667])
def test_published_speeds_of_llama_8b_are_met_within_15_percent(published: int) -> None:
    """TorchTitan on 8 H100: tokens per second and GPU, eager and compiled; 2 sequences of 8192, selective op."""
    blocks = tuple(f"layers.{i}" for i in range(32))
    flops = flops_of_model(ModelConfig(flavor="8B"), 8192, blocks)
    per_sample = flops.total_per_sample(ActivationCheckpointConfig(mode="selective"))
    h100 = hardware_of(JobConfig.model_validate({"planner": {"device": "h100-80gb"}}), 8)
    assert per_sample is not None
    compute = estimate_step_time(2 * per_sample, LinkTraffic(0, 0), h100).compute
    assert compute is not None and 2 * 8192 / compute == pytest.approx(published, rel=0.15)


def test_a_container_may_have_less_memory_than_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: "1073741824\n" if path.name == "memory.max" else "max\n")
    assert machine_memory_gib() == 1
