"""What every benchmark shares: where a result comes from, how it is stored, how a run is started.

A result is figures with ``describe()`` beside them: machine, versions, commit, time. Benchmarks of
the kernels add digests of their sources: figures of the same sources, GPU and versions may be
joined (``same_origin``), and a page says when the tree's kernels have changed since. Arithmetic
that scripts share with their tables (speeds, equal work, the fullest rank), and how a table is
written, is here.

A file of docs/assets holds the results of one topic by name ("parts"). A script replaces its part
and leaves the others. ``python benchmarks/machine.py FILE ...`` takes the parts of files that were
measured elsewhere into docs/assets.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import hashlib
import json
import math
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # not installed? fine
from megatron_patch.runtime import environment

Row = dict[str, Any]
"""A shape of attention, and what was measured of each peer."""
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "assets"
# What runs on the device, and what chooses and launches it.
ON_THE_DEVICE = (
    "triton/", "hopper/", "int8/", "numerics.py", "philox.py", "rotary.py", "stabilizers.py",
    "configs.py", "configs.json", "dispatch.py",
)  # fmt: skip
VERSIONS = (
    "python", "torch", "triton", "megatron-core", "transformer-engine", "apex", "flash-attn-4",
    "numpy", "cuda", "cudnn", "nccl", "driver",
)  # fmt: skip


def sources_digest(root: Path = ROOT, *folders: str) -> str:
    """Digest of the Python and the tile tables of the kernels, and of other ``folders``."""
    joined = hashlib.sha256()
    for folder in ("kernels/stable_attention", *folders):
        for path in sorted(p for p in (root / folder).rglob("*") if p.suffix in (".py", ".json")):
            joined.update(path.name.encode() + path.read_bytes())
    return joined.hexdigest()[:16]


def context_digest() -> str:
    """Digest of context parallelism and of the kernels under it."""
    return sources_digest(ROOT, "megatron_patch/context_parallel")


SAME_CODE = {"e06b2a6c41f4204f": "255abd7de754fbd7"}
"""`functions_digest` of an earlier tree: of this one. What results of the earlier one launched,
nothing that projects, compiles to the same PTX, by the digests of tests/golden/ptx.py: five head
dims, four stabilizers, sm_80 and both kernel sets of sm_90. An entry goes with the next change of
the kernels."""


def functions_digest(root: Path = ROOT) -> str:
    """Digest of what is compiled for the device: jitted functions, their constants, tile tables.

    Not of the functions that launch them, which may change and leave all of them alone. Tile tables
    are configs.json and the plain constants of a ``launch.py``, ``shapes.py`` or ``wide.py``.
    """
    folder = root / "kernels" / "stable_attention"
    found = [(folder / "configs.json").read_text()]
    for path in folder.rglob("*.py"):
        if path.relative_to(folder).as_posix().startswith(ON_THE_DEVICE):
            body = ast.parse(path.read_text()).body
            found += filter(None, map(_compiled, body))
            if path.name in ("launch.py", "shapes.py", "wide.py"):
                found += (ast.unparse(x) for x in body if isinstance(x, ast.Assign))
    return hashlib.sha256("\x00".join(sorted(found)).encode()).hexdigest()[:16]


def _compiled(node: ast.stmt) -> str:
    """A jitted function without its docstring, or a constant of such functions; "" for others."""
    if isinstance(node, ast.FunctionDef):
        if not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            return ""
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return ast.unparse(node)
    if isinstance(node, ast.Assign | ast.AnnAssign):
        text = ast.unparse(node)
        return text if "constexpr" in text else ""
    return ""


def same_origin(old: dict[str, Any], new: dict[str, Any], keys: Iterable[str]) -> str:
    """Why the figures of two results do not belong into one file; "" where they do.

    Same ``keys`` (digests of sources, settings), GPU, torch and triton.
    """
    where = {"gpu": "machine", "torch": "versions", "triton": "versions"}
    for key in (*keys, *where):
        a, b = ((r[where[key]] if key in where else r).get(key) for r in (old, new))
        if a != b:
            return f"other {key}: {a}, now {b}"
    return ""


def describe_kernels() -> dict[str, Any]:
    """`describe`, with the digests of the kernel sources."""
    return describe() | {"kernels": sources_digest(), "functions": functions_digest()}


def describe() -> dict[str, Any]:
    """Machine (GPU or CPU model class, never a host name), versions, commit and UTC time."""
    found = environment.report()
    machine: dict[str, Any] = {"cpu": platform.machine(), "cores": os.cpu_count()}
    if found["gpu"]:
        machine |= {"gpu": found["gpu"], "gpus": found["gpu_count"]}
    return {
        "machine": machine,
        "versions": {name: found[name] for name in VERSIONS if found.get(name)},
        "commit": found["commit"],
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write_result(
    name: str,
    figures: dict[str, Any],
    folder: Path | None = None,
    *,
    part: str | None = None,
    head: dict[str, Any] | None = None,
) -> Path:
    """Write ``<folder or docs/assets>/<name>.json``: ``head`` or ``describe()``, and the figures.

    With ``part``, only that entry of the file is replaced. Whole or not at all: hours of a GPU may
    be in the file that it replaces.
    """
    target = (folder or RESULTS) / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    result = {**(describe() if head is None else head), **figures}
    if part is not None:
        result = (json.loads(target.read_text()) if target.exists() else {}) | {part: result}
    draft = target.with_name(f"{target.name}.tmp")
    draft.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    draft.replace(target)
    return target


def earlier(
    name: str,
    part: str,
    head: dict[str, Any],
    folders: Iterable[Path | None],
    *,
    keys: Iterable[str] = ("kernels",),
) -> dict[str, Any] | None:
    """The part of the first folder that has it, if its figures may stand beside new ones."""
    for folder in filter(None, folders):
        path = folder / f"{name}.json"
        old = json.loads(path.read_text()).get(part) if path.exists() else None
        if old is not None:
            other = same_origin(old, head, keys)
            print(f"{path}: {f'not resumed: {other}' if other else 'resumed'}", flush=True)
            return None if other else old
    return None


def parser(doc: str | None, out: Path | None = RESULTS) -> argparse.ArgumentParser:
    """With a script's docstring as its description, and ``--out``."""
    found = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--out", type=Path, default=out, help="folder of the result")
    return found


def interval(
    run: Callable[[], object], *, cuda: bool = True, queue: int = 0
) -> Callable[[], float]:
    """Start one timed ``run``; the returned function gives its ms, on a GPU once it is over.

    ``queue``: cycles of idle work given to the GPU first, so that launches are queued.
    """
    if not cuda:
        began = time.perf_counter()
        run()
        elapsed = (time.perf_counter() - began) * 1e3
        return lambda: elapsed
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if queue:
        torch.cuda._sleep(queue)
    start.record()
    run()
    end.record()
    return lambda: start.elapsed_time(end)


def in_workers(
    function: Callable[[Any], str], jobs: Sequence[Any], *, workers: int, seconds: float
) -> list[str]:
    """``function`` of every job in processes: what went wrong, "" where nothing did.

    Processes that take longer than ``seconds`` are killed.
    """
    workers, context = max(1, min(workers, len(jobs))), multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=context)
    waiting = [pool.submit(function, job) for job in jobs]
    late = concurrent.futures.wait(waiting, timeout=seconds).not_done
    for process in list((pool._processes or {}).values()) if late else []:
        process.kill()
    pool.shutdown(wait=True, cancel_futures=True)
    told = f"no answer in {seconds:.0f} s"
    ended = [told if job in late else job.exception() or job.result() for job in waiting]
    return [end if isinstance(end, str) else repr(end) for end in ended]


def torchrun(
    arguments: Sequence[str],
    *,
    processes: int,
    log: Path,
    devices: Sequence[int] | None = None,
    threads: int = 2,
    timeout: float | None = None,
) -> int:
    """Exit code of ``processes`` ranks on the GPUs ``devices`` (None: all); output goes to ``log``.

    Raises:
        subprocess.TimeoutExpired: the run took longer than ``timeout`` seconds.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), *arguments]
    variables = os.environ | {"OMP_NUM_THREADS": str(threads)}
    if devices is not None:
        from megatron_patch.runtime.environment import visible_devices

        variables["CUDA_VISIBLE_DEVICES"] = visible_devices(list(devices))
    with log.open("w") as out:
        done = subprocess.run(command, stdout=out, stderr=out, env=variables, timeout=timeout)
    return done.returncode


def train_command(config: str, keys: Mapping[str, object], extra: Sequence[str] = ()) -> list[str]:
    """Arguments of a training run for `torchrun`; ``extra`` holds more KEY=VALUE."""
    sets = [f"{key}={text_of(value)}" for key, value in keys.items()]
    flags = [part for one in (*sets, *extra) for part in ("--set", one)]
    return ["-m", "megatron_patch", "train", "--config", config, *flags]


def plan_of(config: str, sets: Sequence[str], *, gpu: str, gpus: int) -> Any:
    """The planner's plan of a configuration on one node."""
    from megatron_patch.config import load
    from megatron_patch.planner.hardware import gpu_named
    from megatron_patch.planner.plan import Machine, make_plan, vocabulary_of

    run = load(config, list(sets)).config
    return make_plan(run, Machine(gpu_named(gpu), 1, gpus), vocabulary_of(run, None))


def text_of(value: object) -> str:
    """A value as ``--set`` takes it."""
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def metrics(run_dir: Path) -> dict[int, dict[str, str]]:
    """metrics.csv by step."""
    from megatron_patch.runtime.records import read_rows

    return {int(row["step"]): row for row in read_rows(run_dir / "metrics.csv")}


def fault(error: BaseException) -> str:
    """What was raised, in a line."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}"


def why(log: str) -> str:
    """The end of what torchrun's ranks said: its own account comes last and says nothing."""
    ranks, _, _ = log.partition("torch.distributed.elastic.multiprocessing.errors")
    return ranks.rpartition("Traceback (most recent call last)")[0][-1500:] or log[-1500:]


def speed(rows: list[Row], ours: str, peer: str, which: str) -> dict[str, float]:
    """Shape -> the peer's time over ours, where both were measured."""
    pairs = ((title(r), r["peers"].get(ours, {}), r["peers"].get(peer, {})) for r in rows)
    return {name: b[which] / a[which] for name, a, b in pairs if which in a and which in b}


def title(row: Row) -> str:
    """A shape in words."""
    mask = "causal" if row["causal"] else "full"
    return f"{row['grid']}, d {dims(row)}, {mask}, {row['s']} keys"


def dims(row: Row) -> str:
    return str(row["d"]) if row["d"] == row["dv"] else f"{row['d']}/{row['dv']}"


def context_flops(problem: dict[str, Any], tokens: int) -> float:
    """Operations of forward and backward over a whole causal sequence."""
    return 3.5 * 2.0 * problem["heads"] * tokens * tokens * problem["d"]


def same_work(tokens: int, ranks: int, block: int) -> int:
    """Length whose attention on one GPU is a rank's share of ``tokens`` over ``ranks``."""
    return max(block, round(tokens / math.sqrt(ranks) / block) * block)


def thousand(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def fullest(by_rank: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every stage the rank with the highest peak: the one that a plan must hold for.

    They differ where experts are not given the same number of tokens.
    """
    found: dict[int, dict[str, Any]] = {}
    for rank in by_rank:
        best = found.setdefault(rank["stage"], rank)
        if (rank["allocated"] or 0) > (best["allocated"] or 0):
            found[rank["stage"]] = rank
    return list(found.values())


Parts = dict[str, dict[str, Any]]
"""A file of docs/assets: results by name."""
Table = tuple[list[str], list[list[str]], list[str]]
"""Head, rows and the notes below; an empty note is left out."""


def gpu_of(result: dict[str, Any]) -> str:
    """H200 of NVIDIA H200, H100 of NVIDIA H100 80GB HBM3; CPU where there was no GPU."""
    name = result["machine"].get("gpu", "CPU").removeprefix("NVIDIA ")
    return name.removesuffix(" 80GB HBM3")


def markdown(results: Iterable[dict[str, Any]], made: Table) -> str:
    """Machine, day and commit of the results; the table, first column left-aligned; its notes."""
    head, rows, notes = made
    told = [
        f"{gpu_of(r)}, {r['utc'][:10]}, {environment.short_commit(r['commit'])}" for r in results
    ]
    lines = [f"Measured: {'; '.join(dict.fromkeys(told))}.", ""]
    lines += ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    below = [note for note in notes if note]
    return "\n".join([*lines, *(["", *below] if below else [])])


def versions(files: Iterable[Path]) -> str:
    """Versions of software that GPU results were measured with."""
    found: dict[str, set[str]] = {}
    for path in files:
        for result in json.loads(path.read_text()).values():
            for name, version in result["versions"].items() if "gpu" in result["machine"] else ():
                found.setdefault(name, set()).add(version)
    names = [x for x in ("torch", "triton", "cudnn", "nccl", "megatron-core") if x in found]
    told = ", ".join(f"{name} {' or '.join(sorted(found[name]))}" for name in names)
    return f"Software of all GPU measurements: {told}."


def cell(value: float | None, form: str) -> str:
    """A figure, or "-" where there is none."""
    return "-" if value is None else form.format(value)


def span(values: list[float], form: str) -> str:
    """A value, or the lowest and highest of several."""
    ends = dict.fromkeys(form.format(x) for x in (min(values), max(values))) if values else ["-"]
    return "–".join(ends)


def main() -> int:
    found = parser(__doc__)
    found.add_argument("files", nargs="+", type=Path, help="NAME.json of the same topic")
    args = found.parse_args()
    for path in args.files:
        for part, result in json.loads(path.read_text()).items():
            print(f"{write_result(path.stem, result, args.out, part=part, head={})}: {part}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
