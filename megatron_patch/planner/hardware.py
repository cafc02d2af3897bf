"""GPUs and their links: capacities from data sheets, and the share of them that is achieved.

Sources: NVIDIA's data sheets of A100 (June 2021), H100 (March 2023), H200 (November 2023), H800,
H20, B200 (March 2024), L40S. NVLink figures are per GPU and direction (half of the advertised
total); the network is what the vendor's reference node has: one adapter a GPU, 200 Gb/s (DGX A100)
or 400 Gb/s (DGX H100, H200, B200). Peak BF16 rates are those of `monitor.peaks`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_patch.monitor.peaks import peak_tflops
from megatron_patch.schema.problem import ConfigError, Problem

GB, GIB = 10**9, 2**30
GEMM_SHARE = 0.72
"""Of the BF16 peak, for large matrix products. cuBLAS reaches 0.80 in long runs of one product
(790 of 989 TFLOP/s on an H200, `megatron-patch preflight`); training has shorter ones."""
MEMORY_SHARE = 0.80
"""Of HBM bandwidth, for kernels that only move data."""
NVLINK_SHARE = 0.65
"""Of NVLink: 295 of 450 GB/s was measured for all-reduce on two H200."""
NETWORK_SHARE = 0.80
"""Of the adapters' line rate; not measured here."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU and the links of the usual node around it."""

    name: str
    device: str
    """As the driver reports it."""
    memory: float
    """GiB a process can use: what the driver reports, a little below the advertised size."""
    hbm: float
    """Memory bandwidth, GB/s."""
    nvlink: float
    """GB/s per direction inside a node (PCIe where there is no NVLink)."""
    network: float
    """GB/s per GPU between nodes."""

    @property
    def peak(self) -> float:
        """Dense BF16 FLOP/s."""
        tflops = peak_tflops(self.device)
        assert tflops is not None, self.device
        return tflops * 1e12


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40gb", "NVIDIA A100-SXM4-40GB", 39.4, 1555, 300, 25),
        Gpu("a100", "NVIDIA A100-SXM4-80GB", 79.2, 2039, 300, 25),
        Gpu("a800", "NVIDIA A800-SXM4-80GB", 79.2, 2039, 200, 25),
        Gpu("h100", "NVIDIA H100 80GB HBM3", 79.1, 3350, 450, 50),
        Gpu("h800", "NVIDIA H800", 79.1, 3350, 200, 50),
        Gpu("h20", "NVIDIA H20", 95.1, 4000, 450, 50),
        Gpu("h200", "NVIDIA H200", 139.8, 4800, 450, 50),
        Gpu("b200", "NVIDIA B200", 178.4, 8000, 900, 50),
        Gpu("l40s", "NVIDIA L40S", 44.4, 864, 32, 25),
    )
}


def gpu_named(name: str) -> Gpu:
    """The GPU called ``name``.

    Raises ConfigError: it is not in the table.
    """
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    raise ConfigError([Problem("--gpu", f"{name!r} is not one of {', '.join(GPUS)}")])
