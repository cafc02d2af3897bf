"""Starts several gloo ranks for one test and collects what each of them reports."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forked
from torch.distributed import TCPStore

from megatron_patch.runtime.records import read_rows

WORKER = Path(__file__).parent / "training" / "worker.py"

CONFIG = """
name: tiny
model:
  num_layers: 4
  hidden_size: 32
  num_attention_heads: 4
  num_query_groups: 2
  ffn_hidden_size: 64
  seq_length: 32
training:
  device: cpu
  precision: fp32
  train_steps: 5
  global_batch_size: 4
  micro_batch_size: 1
  eval_steps: 1
optimizer: {lr: 1.0e-2, warmup_steps: 2}
data:
  blend: [{path: CORPUS}]
  split: [0.9, 0.1, 0.0]
  num_workers: 0
attention: {backend: reference}
checkpoint: {interval: null}
logging: {interval: 1, tensorboard: false}
"""

ONE_LAYER = ["training.precision=bf16", "attention.backend=stable_flash",
             "attention.stabilizer=none", "model.num_layers=1", "model.num_attention_heads=2",
             "model.num_query_groups=2", "model.hidden_size=16", "model.ffn_hidden_size=16",
             "model.seq_length=16", "training.global_batch_size=2", "training.deterministic=true",
             "optimizer.schedule=constant", "optimizer.warmup_steps=0", "stability.interval=1",
             "stability.rule.confirm_steps=0"]  # fmt: skip
"""Settings of a run of our kernels that is small enough for Triton's interpreter, all observed."""


def run_ranks(
    folder: Path,
    corpus: Path,
    ranks: int,
    runs: list[dict[str, Any]],
    *,
    config: Path | None = None,
    timeout: float = 1800,
) -> list[list[dict[str, Any]]]:
    """Run the trainings one after the other on ``ranks`` processes.

    Args:
        folder: working directory; relative run directories end up here.
        corpus: dataset prefix.
        ranks: processes.
        runs: see worker.py.
        config: configuration of the runs; default: `CONFIG`.
        timeout: seconds until all ranks are killed and the test fails.

    Returns:
        results[run][rank]
    """
    if config is None:
        config = folder / "tiny.yaml"
        config.write_text(CONFIG.replace("CORPUS", str(corpus)))
    plan = folder / f"plan_{len(list(folder.glob('plan_*.json')))}.json"
    # Served here, as torchrun serves its ranks: a port chosen now and bound by a rank later may be
    # taken in between.
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in runs]
    ports = [store.port for store in stores]
    plan.write_text(json.dumps({"config": str(config), "ports": ports, "runs": runs}))
    logs = [plan.with_suffix(f".log{rank}") for rank in range(ranks)]
    processes = start_ranks(WORKER, [str(plan)], folder, ports[0], logs)
    codes = _wait(processes, timeout)
    if any(codes):
        tail = "\n".join(f"--- rank {r}: {log.read_text()[-3000:]}" for r, log in enumerate(logs))
        raise AssertionError(f"ranks ended with {codes}\n{tail}")
    reports = [json.loads(Path(f"{plan}.rank{rank}").read_text()) for rank in range(ranks)]
    return [
        [report[i] for report in reports[: run.get("ranks", ranks)]] for i, run in enumerate(runs)
    ]


def run_script(script: Path, arguments: list[str], folder: Path, ranks: int) -> None:
    """Run ``python SCRIPT ARGUMENTS`` on ``ranks`` processes; AssertionError if one fails."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = [folder / f"{script.stem}.log{rank}" for rank in range(ranks)]
    codes = _wait(start_ranks(script, arguments, folder, store.port, logs), 600)
    assert not any(codes), (codes, *(log.read_text()[-3000:] for log in logs))


def start_ranks(
    script: Path, arguments: list[str], folder: Path, port: int, logs: list[Path]
) -> list[BaseProcess]:
    """A rank for every log, each ``python SCRIPT ARGUMENTS``; ``port`` is that of their store."""
    processes = []
    for rank, log in enumerate(logs):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(logs)),
            "LOCAL_WORLD_SIZE": str(len(logs)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            "TRITON_INTERPRET": "1",
        }
        process = forked.context().Process(
            target=_rank, args=([str(script), *arguments], folder, environment, log)
        )
        process.start()
        processes.append(process)
    return processes


def _rank(argv: list[str], folder: Path, environment: dict[str, str], log: Path) -> None:
    """Run the script in this process as a new one would."""
    os.setsid()  # a test's Ctrl-C must not reach ranks as a stop
    with log.open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    runpy.run_path(argv[0], run_name="__main__")


def _wait(processes: list[BaseProcess], timeout: float) -> list[int | None]:
    """Exit codes; when one rank fails or time is over, the others are killed."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        codes = [p.exitcode for p in processes]
        if all(code == 0 for code in codes) or any(code for code in codes):
            break
        time.sleep(0.05)
    return end_all(processes)


def end_all(processes: list[BaseProcess]) -> list[int | None]:
    """Kill what runs, with all that it started; the exit codes of before."""
    codes = [p.exitcode for p in processes]
    for p in processes:
        if p.exitcode is None:
            p.kill()
            with contextlib.suppress(ProcessLookupError):  # not a session of its own yet
                os.killpg(p.pid, signal.SIGKILL)
        p.join()
    return codes


def log_of(folder: Path, name: str) -> str:
    """What a run has logged."""
    return (folder / "runs" / name / "train.log").read_text()


def metrics(run_dir: Path) -> dict[int, dict[str, str]]:
    """Rows of a run's metrics.csv by step."""
    return {int(row["step"]): row for row in read_rows(run_dir / "metrics.csv")}


def figures(run_dir: Path) -> dict[int, tuple[str, str]]:
    """step -> (loss, gradient norm) as text with every digit."""
    return {step: (row["loss"], row["grad_norm"]) for step, row in metrics(run_dir).items()}


def distance(found: dict[int, Any], expected: dict[int, Any], steps: list[int]) -> float:
    """Largest relative difference of loss and gradient norm over the steps."""
    worst = 0.0
    for step in steps:
        for a, b in zip(found[step], expected[step], strict=True):
            worst = max(worst, abs(float(a) - float(b)) / abs(float(b)))
    return worst
