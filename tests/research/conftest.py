"""A tiny corpus, a protocol over it, and a stand-in for the trainer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from byte_corpus import word_corpus

ROOT = Path(__file__).resolve().parents[2]
# The scripts of research/ import one another as plain modules.
sys.path.append(str(ROOT / "research"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a byte-tokenized dataset."""
    text = "runs of one seed see the same batches"
    return word_corpus(tmp_path_factory.mktemp("corpus"), text, step=5, documents=60)


PROTOCOL = """\
name: tiny
config: {config}
steps: 100
seeds: [1, 2]
save_seconds: 0
explosion: {{window: 10, from_step: 20, loss: 5.0, grad_norm: 1.0, stop_after: 30}}
cells:
  - {{name: a, asks: the control}}
  - {{name: b, set: [optimizer.lr=2e-3], seeds: [1]}}
"""


@pytest.fixture
def protocol(tmp_path: Path) -> Path:
    """Two cells, three runs: a-s1, b-s1, a-s2."""
    path = tmp_path / "protocol.yaml"
    base = ROOT / "research" / "protocols" / "base" / "tiny_cpu.yaml"
    path.write_text(PROTOCOL.format(config=base))
    return path


# In the place of cell.py, with its command line. What a run does is in scripts.json by its id:
# "explode" (loss and gradients from step 41 on), "event" (gradients only), "exit N", "deaf" (does
# not hear the request to stop), "slow"; default: a quick run to its end. Where it stops, and every
# tenth step of a run named base, it leaves a directory named like a checkpoint.
TRAINER = """
import json, os, pathlib, signal, sys, time
keys = dict(part.partition("=")[::2] for part in sys.argv if "=" in part)
folder = pathlib.Path(keys["run_dir"])
scripts = json.loads(pathlib.Path(__file__).with_name("scripts.json").read_text())
script = scripts.get(folder.name, "")
stop = []
signal.signal(signal.SIGUSR1, signal.SIG_IGN if script == "deaf" else lambda *_: stop.append(1))
if script.startswith("exit"):
    print("megatron-patch: what went wrong")
    sys.exit(int(script.split()[1]))
kept, table = folder / "checkpoints", folder / "metrics.csv"
kept.mkdir(parents=True, exist_ok=True)
(folder / "device").open("a").write(os.environ.get("CUDA_VISIBLE_DEVICES", "-") + "\\n")
saved = sorted(kept.glob("step_*"))
origin = pathlib.Path(keys.get("checkpoint.load_from", "step_00000000.attempt-1"))
step = int((saved[-1] if saved else origin).name[5:13])
whole = int(keys["training.train_steps"])
end = int(keys.get("training.exit_at_step", whole))
rows = table.read_text().splitlines() if saved else ["step,loss,grad_norm"]
table.write_text("\\n".join([rows[0], *(r for r in rows[1:] if int(r.split(",")[0]) <= step), ""]))
with table.open("a") as out:
    while step < end and not stop:
        step += 1
        late = step > 40
        loss = 7.0 if script == "explode" and late else 4.0
        out.write(f"{step},{loss},{90.0 if script in ('explode', 'event') and late else 0.3}\\n")
        out.flush()
        if step % 10 == 0 and folder.name.startswith("base"):
            (kept / f"step_{step:08d}.attempt-1").mkdir(exist_ok=True)
        time.sleep(0.02 if script else 0.001)
(kept / f"step_{step:08d}.attempt-1").mkdir(exist_ok=True)
if step == whole:
    (folder / "FINISHED").write_text(json.dumps({"step": step}))
"""

Go = Callable[..., int]


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Stand-ins for the trainer, looked after often; call it with what runs do, by id."""
    import run

    def write(**by_id: str) -> None:
        named = {name.replace("_s", "-s"): script for name, script in by_id.items()}
        (tmp_path / "scripts.json").write_text(json.dumps(named))

    write()
    (tmp_path / "cell.py").write_text(TRAINER)
    monkeypatch.setattr(run, "CELL", tmp_path / "cell.py")
    monkeypatch.setattr(run, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(run, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(run, "SHORTEST_SECONDS", 0.1)
    monkeypatch.setattr(run, "GRACE_SECONDS", 1.0)
    return write


@pytest.fixture
def go(protocol: Path, corpus: Path, tmp_path: Path) -> Go:
    """One invocation on the protocol, with its results in ``out``; the exit code."""
    import run

    def invoke(*more: str) -> int:
        command = [str(protocol), "--out", str(tmp_path / "out")]
        return run.main([*command, *more, "--set", f"data.blend.0.path={corpus}"])

    return invoke
