"""Peaks by the names drivers report."""

import pytest

from megatron_patch.monitor.peaks import peak_tflops


@pytest.mark.parametrize(("name", "peak"), [
    ("NVIDIA H200", 989.4),
    ("NVIDIA H100 80GB HBM3", 989.4),
    ("NVIDIA H100 PCIe", 756.0),
    ("NVIDIA H100 NVL", 835.5),
    ("NVIDIA GH200 480GB", 989.4),
    ("NVIDIA H20", 148.0),
    ("NVIDIA A100-SXM4-80GB", 312.0),
    ("NVIDIA B200", 2250.0),
    ("NVIDIA GB200", 2500.0),
    ("NVIDIA L4", 121.0),
    ("NVIDIA L40S", 362.05),
    ("AMD Instinct MI300X", 1307.4),
    ("Tesla V100-SXM2-16GB", None),
    ("NVIDIA GeForce GTX 1080", None),
    ("", None),
])  # fmt: skip
def test_known_names(name, peak):
    assert peak_tflops(name) == peak
