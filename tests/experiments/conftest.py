"""A tiny corpus and a protocol over it; fake training processes for the runner."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_patch.experiments import origin, runner, stability
from megatron_patch.experiments.protocol import read
from megatron_patch.experiments.store import Store

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a byte-tokenized dataset."""
    from megatron_patch.data.prepare import PrepareOptions, prepare

    folder = tmp_path_factory.mktemp("corpus")
    words = ["runs", "of", "one", "seed", "see", "the", "same", "batches"]
    documents = [
        " ".join(words[(5 * d + k * k) % len(words)] for k in range(40 + d)) for d in range(60)
    ]
    (folder / "text.txt").write_text("\n\n".join(documents))
    prepare(
        PrepareOptions(
            inputs=[str(folder / "text.txt")],
            out=str(folder / "tiny"),
            document_separator="\n\n",
            workers=1,
            quiet=True,
        )
    )
    return folder / "tiny"


PROTOCOL = """\
name: tiny
config: {config}
steps: {steps}
seeds: [1, 2]
save_seconds: 0
explosion: {{window: 10, from_step: 20, loss: 5.0, stop_after: 30}}
cells:
  - {{name: a, asks: the control}}
  - {{name: b, set: [optimizer.lr=2e-3], seeds: [1]}}
"""


@pytest.fixture
def protocol(tmp_path: Path) -> Path:
    """Two cells, three runs: a-s1, b-s1, a-s2."""
    path = tmp_path / "protocol.yaml"
    config = ROOT / "configs" / "stability" / "base" / "tiny_cpu.yaml"
    path.write_text(PROTOCOL.format(config=config, steps=100))
    return path


# argv: run directory, steps, script ("explode", "event", "exit N", "full", "deaf", "deaf ranks",
# "alone", "needs FILE" or ""), seconds a step, checkpoint to start from or "". "needs" is refused
# while there is no such file; "event" has large gradients and
# keeps its loss; "deaf ranks" starts a child in a session of its own, as torchrun does; "alone"
# fails on several GPUs; "full" finds no memory the first time. Where it stops, and every tenth step
# of a run named base, it leaves a directory named like a checkpoint.
TRAINER = """
import json, os, pathlib, signal, subprocess, sys, time
folder, steps, script, pause = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
folder.mkdir(parents=True, exist_ok=True)
stop = []
action = signal.SIG_IGN if script.startswith("deaf") else lambda *_: stop.append(1)
signal.signal(signal.SIGUSR1, action)
if script == "deaf ranks":
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (folder / "child").write_text(str(child.pid))
(folder / "device").open("a").write(os.environ.get("CUDA_VISIBLE_DEVICES", "-") + "\\n")
kept = folder / "checkpoints"
saved = sorted(kept.glob("step_*"))
table = folder / "metrics.csv"
done = int(saved[-1].name[5:13]) if saved else 0
first = int(pathlib.Path(sys.argv[5]).name[5:13]) if sys.argv[5] else 0
rows = table.read_text().splitlines() if done else ["step,loss,grad_norm"]
rows = [rows[0], *(row for row in rows[1:] if int(row.split(",")[0]) <= done)]
table.write_text("\\n".join(rows) + "\\n")
done = done or first
if script == "crash" and not (folder / "crashed").exists():
    (folder / "crashed").touch()
    os.kill(os.getpid(), signal.SIGSEGV)
if script == "alone" and "," in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
    print("RuntimeError: NCCL error")
    sys.exit(1)
if script == "full" and not (folder / "full").exists():
    (folder / "full").touch()
    print("torch.OutOfMemoryError: CUDA out of memory")
    sys.exit(1)
if script.startswith("needs") and not pathlib.Path(script.split(" ", 1)[1]).exists():
    print("megatron-patch: there is no manifest")
    sys.exit(2)
if script.startswith("exit"):
    print("Error: what went wrong")
    sys.exit(int(script.split()[1]))
step, steps = done, 10_000 if script == "explode" else steps
with table.open("a") as out:
    while step < steps and not stop:
        step += 1
        loss = 7.0 if script == "explode" and step > 40 else 4.0
        large = script in ("explode", "event") and step > 40
        out.write(f"{step},{loss},{90.0 if large else 0.3}\\n")
        out.flush()
        if step % 10 == 0 and folder.name.startswith("base"):
            (kept / f"step_{step:08d}.attempt-1").mkdir(parents=True, exist_ok=True)
        time.sleep(float(pause))
(kept / f"step_{step:08d}.attempt-1").mkdir(parents=True, exist_ok=True)
if step == 100:
    (folder / "FINISHED").write_text(json.dumps({"step": step}))
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Stand-ins for the trainer by run id; looked after often."""
    scripts: dict[str, str] = {"pause": "0.001"}

    def command(store: Store, run: object, *, gpus: int, steps: int, left: float) -> list[str]:
        script = scripts.get(run.id, "")
        begins = origin.find(store, run) if run.base is not None else None
        return [sys.executable, "-c", TRAINER, str(store.run_dir(run)), str(steps), script,
                scripts["pause"], "" if begins is None else str(begins.path)]  # fmt: skip

    monkeypatch.setattr(runner, "cell_command", command)
    monkeypatch.setattr(runner, "on_cpu", lambda run, store: False)
    for module in (stability, runner):
        monkeypatch.setattr(module, "check_data", lambda experiment, runs, say: None)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(runner, "REPORT_SECONDS", 0.05)
    monkeypatch.setattr(runner, "SHORTEST_SECONDS", 0.1)
    monkeypatch.setattr(runner, "GRACE_SECONDS", 1.0)
    monkeypatch.setattr(runner, "AGAIN_SECONDS", 0.05)
    return scripts


@pytest.fixture
def go() -> Callable[..., tuple[Store, list[str]]]:
    """One invocation of the runner: its store, and what it said."""

    def invoke(protocol: Path, out: Path, **options: Any) -> tuple[Store, list[str]]:
        store = Store(out, read(protocol))
        said: list[str] = []
        named = {"devices": [0], "seconds": None, "steps": 100} | options
        try:
            runner.Runner(store, say=said.append, **named).run()
        finally:
            store.close()
        return store, said

    return invoke
