import pytest

from titan_launch.plan.hardware import DEVICES, find_device


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
def test_reported_names_are_found(reported: str, name: str) -> None:
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
        "NVIDIA H100",  # 96 GB of another kind, seen in the wild: not in the table
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
def test_anything_else_is_unknown(reported: str) -> None:
    assert find_device(reported) is None


def test_devices_are_found_by_their_own_names() -> None:
    assert [find_device(device.name) for device in DEVICES] == list(DEVICES)


def test_links_within_a_node_are_faster_than_those_across() -> None:
    assert all(device.intra_node_gb_per_s > device.inter_node_gb_per_s for device in DEVICES)
