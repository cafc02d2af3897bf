"""What `benchmarks/step_profile.py` makes of a trace."""

from __future__ import annotations

import gzip
import json
from typing import Any

import benchmark_scripts
import pytest


@pytest.fixture
def script() -> Any:
    return benchmark_scripts.load("step_profile")


def event(name: str, begin: float, length: float, operator: int | None = None) -> dict[str, Any]:
    args = {} if operator is None else {"External id": operator}
    return {"cat": "kernel", "name": name, "ts": begin, "dur": length, "args": args}


EVENTS = [
    {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1,
     "args": {"External id": 7, "Input Dims": [[2, 3], [3, 4]]}},
    event("nvjet_sm90_tst", 100.0, 2000.0, 7),
    event("nvjet_sm90_tst", 2100.0, 2000.0, 7),
    event("forward_kernel", 4000.0, 1000.0),  # 100 us beside the product before it
    event("Memcpy HtoD", 6100.0, 1000.0) | {"cat": "gpu_memcpy"},
    {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 9000, "args": {}},
]  # fmt: skip


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_kernels_by_part_and_time_without_any(script, tmp_path, name):
    text = json.dumps({"traceEvents": EVENTS}).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    found = script.read_trace(path, 2)
    assert found["parts_ms"] == {"matrix products": 2.0, "attention": 0.5, "copies": 0.5}
    assert (found["window_ms"], found["busy_ms"], found["kernels"]) == (3.5, 2.95, 2.0)
    first = found["largest"][0]
    assert (first["ms"], first["calls"]) == (2.0, 1.0)
    assert first["operator"] == "aten::mm [[2, 3], [3, 4]]"


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("dkdv_kernel", "attention"),
        ("triton_per_fused__to_copy_native_layer_norm_0", "norms, compiled"),
        ("triton_poi_fused__to_copy_add_0", "other compiled"),
        ("void at::native::vectorized_elementwise_kernel<8, GeluCUDAKernelImpl>", "activation"),
        ("something new", "other"),
    ],
)
def test_parts(script, kernel, part):
    assert script.part_of(kernel) == part
