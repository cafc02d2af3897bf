"""Where the GPU's time of a training step goes: a run of the trainer, some steps of it profiled.

    python benchmarks/step_profile.py --label "GPT-2 124M" --config FILE [--settle 40] [--steps 5] \
        [--set KEY=VALUE ...] [--trace FILE]

Trains in this process (`megatron-patch train`) until ``settle`` steps are over, profiles ``steps``
of them and ends. Every kernel is put down to one of `PARTS` by its name; what fits none is `other`.
Reports milliseconds of a step by part, the largest kernels with the operators that launched them,
and how long any kernel ran. The profiler slows the host, not the kernels: the time of a step
without it is the median of those before. One GPU; kernels of several streams that overlap are each
counted whole. Writes docs/assets/step_profile.json, a part a label;
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import machine

PARTS: tuple[tuple[str, str], ...] = (
    (
        "attention",
        r"^(forward|backward|dq|dkdv|query|key_gradients|preprocess|rows|sum|places)_kernel"
        r"|attention|flash|fmha|sdpa",
    ),
    ("matrix products", r"gemm|cutlass|nvjet|cublas|splitK|_mm_"),
    ("optimizer", r"adam|multi_tensor|foreach|lpnorm|l2norm"),
    ("norms, compiled", r"^triton_.*norm"),
    ("cross entropy, compiled", r"^triton_.*exp"),
    ("other compiled", r"^triton_"),
    ("activation", r"Gelu|Silu|silu"),
    ("sums of gradients", r"CUDAFunctor_add"),
    ("copies", r"copy|Memcpy|Memset|CatArray|FillFunctor"),
    ("other elementwise", r"elementwise"),
    ("reductions", r"reduce"),
)
"""Part -> pattern of kernel names, the first that fits."""
LARGEST = 40


def part_of(name: str) -> str:
    """The part a kernel's name stands for."""
    for part, pattern in PARTS:
        if re.search(pattern, name):
            return part
    return "other"


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, end)."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def read_trace(path: Path, steps: int) -> dict[str, Any]:
    """Figures of a step from a profiler's trace (Chrome format) of ``steps`` steps."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as lines:
        events = json.load(lines)["traceEvents"]
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not device:
        raise SystemExit(f"{path}: no kernels in the trace; this needs a GPU")
    launched_by = {e["args"]["External id"]: e for e in events if e.get("cat") == "cpu_op"}
    parts: dict[str, float] = defaultdict(float)
    kernels: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in device:
        operator = launched_by.get(event["args"].get("External id"), {})
        shapes = str(operator.get("args", {}).get("Input Dims", ""))
        of = f"{operator.get('name', '')} {shapes}".strip()
        parts[part_of(event["name"])] += event["dur"]
        entry = kernels[event["name"][:160], of[:160]]
        entry[0] += event["dur"]
        entry[1] += 1
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in device]
    window = max(end for _, end in spans) - min(start for start, _ in spans)
    largest = sorted(kernels.items(), key=lambda item: -item[1][0])[:LARGEST]
    return {
        "window_ms": window / 1000 / steps,
        "busy_ms": busy(spans) / 1000 / steps,
        "kernels": len(device) / steps,
        "parts_ms": {k: v / 1000 / steps for k, v in Counter(parts).most_common()},
        "largest": [
            {"kernel": name, "operator": of, "ms": us / 1000 / steps, "calls": calls / steps}
            for (name, of), (us, calls) in largest
        ],
    }


class Profiled:
    """Stands in front of the trainer's step: times steps, then profiles some of them."""

    def __init__(self, step: Any, *, settle: int, steps: int, trace: Path) -> None:
        import torch

        self._wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        self._step, self._settle, self._steps, self._trace = step, settle, steps, trace
        self._begun: list[float] = []
        self._profiler = torch.profiler.profile(record_shapes=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        done = len(self._begun)
        self._begun.append(time.perf_counter())
        if done == self._settle:
            self._wait()
            self._begun[-1] = time.perf_counter()
            self._profiler.start()
        result = self._step(*args, **kwargs)
        if done == self._settle + self._steps - 1:
            self._wait()
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._trace))
        return result

    def step_seconds(self) -> float:
        """Median of the second half of the steps before the profile."""
        begun = self._begun[self._settle // 2 : self._settle + 1]
        return statistics.median(b - a for a, b in itertools.pairwise(begun))


def profile(config: str, settings: list[str], *, settle: int, steps: int, trace: Path) -> float:
    """Train and write the trace; seconds of a step before it."""
    from megatron_patch.cli import app
    from megatron_patch.training import trainer

    profiled = Profiled(trainer.train_step, settle=settle, steps=steps, trace=trace)
    trainer.train_step = profiled  # type: ignore[assignment]
    ends = ["--set", f"training.exit_at_step={settle + steps}"]
    flags = [part for setting in settings for part in ("--set", setting)]
    code = app.run(["train", "--config", config, *flags, *ends])
    if code or not trace.exists():
        raise SystemExit(f"the run ended with {code}, trace: {trace.exists()}")
    return profiled.step_seconds()


def named(config: str) -> str:
    """The configuration as the repository names it; of another file its name alone."""
    path = Path(config).resolve()
    inside = path.is_relative_to(machine.ROOT)
    return path.relative_to(machine.ROOT).as_posix() if inside else path.name


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--label", required=True, help="name of this profile in the result")
    parser.add_argument("--config", required=True, help="configuration of the run")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE, as train's")
    parser.add_argument("--settle", type=int, default=40, help="steps before the profile")
    parser.add_argument("--steps", type=int, default=5, help="steps that are profiled")
    parser.add_argument("--trace", type=Path, help="keep the trace there (.json or .json.gz)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        trace = args.trace or Path(scratch) / "trace.json"
        seconds = profile(args.config, args.set, settle=args.settle, steps=args.steps, trace=trace)
        found = machine.describe() | read_trace(trace, args.steps)
    found |= {"config": named(args.config), "step_ms": seconds * 1000}
    found["settings"] = [key for key in args.set if not key.startswith("data.")]  # places
    for part, ms in found["parts_ms"].items():
        print(f"{part:24} {ms:8.2f} ms")
    busy, window = found["busy_ms"], found["window_ms"]
    print(f"busy {busy:.1f} of {window:.1f} ms, step {found['step_ms']:.1f} ms")
    print(machine.write_result("step_profile", found, args.out, part=args.label, head={}))


if __name__ == "__main__":
    main()
