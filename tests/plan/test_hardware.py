"""The hardware that a plan assumes: the table of devices, keys of the job file, and the machine itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError
from titan_launch.plan.hardware import (
    DEVICES,
    Hardware,
    find_device,
    hardware_of,
    machine_memory_gib,
    process_memory_gib,
)


def hardware(device: str = "auto", tflops: float | None = None, **planner: Any) -> Hardware:
    metrics = {"peak_tflops_per_device": tflops}
    job = {"job": {"device": device}, "planner": planner, "metrics": metrics}
    return hardware_of(JobConfig.model_validate(job), 4)


def test_a_device_gives_the_values_that_no_key_sets() -> None:
    known = hardware(device="auto")
    assert (known.memory_gib, known.peak_tflops, known.intra_node_gb_per_s) == (None, None, None)
    config = {"planner": {"device": "h100-80gb", "memory_gib": 70, "inter_node_gb_per_s": 25}}
    given = hardware_of(JobConfig.model_validate(config), 4)
    assert (given.memory_gib, given.memory_source, given.peak_tflops) == (70, "planner.memory_gib", 989)
    assert (given.intra_node_gb_per_s, given.inter_node_gb_per_s, given.gpus_per_node) == (450, 25, 8)
    assert (given.kernels, given.overhead_gib, given.fragmentation) == ("cuda", 2, 0.15)


def test_the_peak_tflops_of_metrics_take_precedence() -> None:
    assert hardware(tflops=100, device="auto").peak_tflops == 100


def test_the_error_for_an_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        hardware_of(JobConfig.model_validate({"planner": {"device": "h100"}}), 1)
    text = str(caught.value)
    assert all(device.name in text for device in DEVICES) and "set planner.memory_gib" in text
    assert text.endswith('did you mean "h100-80gb", "h100-pcie" or "h100-nvl"?')


def test_ranks_on_a_cpu_share_the_machines_memory_without_fragmentation() -> None:
    cpu = hardware(device="cpu")
    assert cpu.memory_gib == pytest.approx(machine_memory_gib() / 4) and "/ 4 ranks" in cpu.memory_source
    assert (cpu.kernels, cpu.overhead_gib, cpu.fragmentation) == ("cpu", 0.5, 0)
    assert hardware(device="cpu", memory_gib=1).overhead_gib == 0
    assert hardware(device="cpu", memory_gib=1, overhead_gib=0.5).overhead_gib == 0.5


def test_a_job_for_a_cpu_can_be_planned_for_a_gpu() -> None:
    planned = hardware_of(JobConfig.model_validate({"job": {"device": "cpu"}, "planner": {"device": "l4"}}), 4)
    assert (planned.kernels, planned.memory_gib, planned.overhead_gib) == ("cuda", 21.9, 2)


def test_a_run_uses_its_detected_device_unless_the_job_names_one() -> None:
    found = hardware_of(JobConfig(), 1, "cuda", "NVIDIA H200", 139.8)
    assert (found.device, found.memory_gib, found.peak_tflops) == ("h200", 139.8, 989)
    unknown = hardware_of(JobConfig(), 1, "cuda", "NVIDIA H300", 200.0)
    assert (unknown.device, unknown.memory_gib, unknown.peak_tflops) == ("NVIDIA H300", 200.0, None)
    named = JobConfig.model_validate({"planner": {"device": "l4"}})
    assert hardware_of(named, 1, "cuda", "NVIDIA H200", 139.8).memory_gib == 21.9


def test_a_container_may_have_less_memory_than_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: "1073741824\n" if path.name == "memory.max" else "max\n")
    assert machine_memory_gib() == 1
    assert process_memory_gib() is None  # this /proc/self/status has no rows


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("AMD Instinct MI250X", "mi250x"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("AMD Instinct MI325X", "mi325x"),
    ],
)
def test_reported_device_names_are_found(reported: str, name: str) -> None:
    device = find_device(reported)
    assert device is not None
    assert device.name == name


@pytest.mark.parametrize(
    "reported",
    [
        "",
        "cpu",
        "Tesla V100-SXM2-32GB",
        "Tesla T4",
        "NVIDIA A10G",
        "NVIDIA L40",
        "NVIDIA H800",
        "NVIDIA H20",
        "NVIDIA H100",  # a variant with 96 GB that is not in the table
        "NVIDIA H200 NVL",
        "NVIDIA GB200",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "AMD Instinct MI250X / MI250",
        "AMD Instinct MI300A",
    ],
)
def test_other_reported_device_names_are_unknown(reported: str) -> None:
    assert find_device(reported) is None


def test_devices_are_found_by_their_own_names() -> None:
    assert [find_device(device.name) for device in DEVICES] == list(DEVICES)


def test_links_within_a_node_are_faster_than_those_across() -> None:
    assert all(device.intra_node_gb_per_s > device.inter_node_gb_per_s for device in DEVICES)
