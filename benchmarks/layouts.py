"""Do all parallel layouts compute the same training? One checkpoint, resharded into each of them.

    python benchmarks/layouts.py --config configs/layouts.yaml --device cuda --gpus 4 --out DIR

A single process trains a few steps and saves. Every layout that fits ``--gpus`` then loads that
checkpoint (weights and optimizer state resharded), trains on the same data, and must reproduce the
single process's loss and grad norm. A second part checks bitwise resume: with
``training.deterministic`` an interrupted run must print the very digits of the unbroken one.

Everything goes through the command line, as a user would run it. Writes a
part of docs/assets/layouts.json.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import machine

START, STEPS = 2, 6
FP32_TOLERANCE = 2e-5
BF16_TOLERANCE = 2e-2


@dataclass(frozen=True)
class Layout:
    """A number of ranks and the keys that describe how they share the work."""

    name: str
    ranks: int
    keys: dict[str, object] = field(default_factory=dict)
    moe: bool = False


TP, SP = "parallel.tensor_model_parallel_size", "parallel.sequence_parallel"
PP, VP = ("parallel.pipeline_model_parallel_size", "parallel.virtual_pipeline_model_parallel_size")
EP = "parallel.expert_model_parallel_size"
CP, KIND = "parallel.context_parallel_size", "parallel.cp_comm_type"
LEVELS = "parallel.hierarchical_context_parallel_sizes"
LAYOUTS = [
    Layout("DP2", 2),
    Layout("TP2", 2, {TP: 2}),
    Layout("TP2+SP", 2, {TP: 2, SP: True}),
    Layout("PP2", 2, {PP: 2}),
    Layout("PP2 virtual 2", 2, {PP: 2, VP: 2}),
    Layout("EP2", 2, {EP: 2}, moe=True),
    Layout("CP2 p2p", 2, {CP: 2}),
    Layout("CP2 all_gather", 2, {CP: 2, KIND: "all_gather"}),
    Layout("CP2 a2a", 2, {CP: 2, KIND: "a2a"}),
    Layout("CP2 a mode a layer", 2, {CP: 2, KIND: "[p2p, a2a, all_gather, p2p]"}),
    Layout("CP2 x EP2 on 2", 2, {CP: 2, EP: 2}, moe=True),
    Layout("DP4", 4),
    Layout("TP2+SP x PP2", 4, {TP: 2, SP: True, PP: 2}),
    Layout("TP2 x DP2", 4, {TP: 2}),
    Layout("PP4", 4, {PP: 4}),
    Layout("EP4", 4, {EP: 4}, moe=True),
    Layout("TP2+SP x EP2", 4, {TP: 2, SP: True, EP: 2}, moe=True),
    Layout("CP4 p2p", 4, {CP: 4}),
    Layout("CP4 all_gather", 4, {CP: 4, KIND: "all_gather"}),
    Layout("CP4 a2a", 4, {CP: 4, KIND: "a2a"}),
    Layout("CP4 a2a+p2p", 4, {CP: 4, KIND: "a2a+p2p", LEVELS: "[2, 2]"}),
    Layout("TP2+SP x CP2", 4, {TP: 2, SP: True, CP: 2}),
    Layout("TP2 x CP2 a2a", 4, {TP: 2, CP: 2, KIND: "a2a"}),
    Layout("CP2 x PP2", 4, {CP: 2, PP: 2}),
    Layout("CP2 x PP2 virtual 2", 4, {CP: 2, PP: 2, VP: 2}),
    Layout("CP2 x DP2", 4, {CP: 2}),
    Layout("CP2 x DP2 x EP2", 4, {CP: 2, EP: 2}, moe=True),
    Layout("DP8", 8),
    Layout("TP2+SP x PP2 x DP2", 8, {TP: 2, SP: True, PP: 2}),
    Layout("TP4+SP x DP2", 8, {TP: 4, SP: True}),
    Layout("TP2+SP x EP4", 8, {TP: 2, SP: True, EP: 4}, moe=True),
    Layout("CP8 p2p", 8, {CP: 8}),
    Layout("CP8 a2a+p2p", 8, {CP: 8, KIND: "a2a+p2p", LEVELS: "[4, 2]"}),
    Layout("TP2+SP x CP2 x PP2", 8, {TP: 2, SP: True, CP: 2, PP: 2}),
    Layout("TP2+SP x CP2 x EP4", 8, {TP: 2, SP: True, CP: 2, EP: 4}, moe=True),
]
MOE = {"model.moe": "{num_experts: 4, top_k: 2, ffn_hidden_size: 128, aux_loss_coeff: 0.0}"}


class Runner:
    """Starts training runs under one folder and reads their figures back."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.folder = Path(args.work)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        # Layouts are compared, not timed: they may share the devices.
        self.pool = ThreadPoolExecutor(args.jobs)

    def train(self, name: str, ranks: int, keys: dict[str, object]) -> dict[int, tuple[str, str]]:
        """Run to the end; step -> (loss, grad norm) as printed in metrics.csv."""
        slug = name.replace(" ", "_").replace("+", "_")
        run_dir = self.folder / slug
        common: dict[str, object] = {
            "name": slug,
            "run_dir": run_dir,
            "training.device": self.args.device,
            "training.train_steps": STEPS,
            "logging.interval": 1,
            "logging.tensorboard": False,
            "attention.backend": self.args.backend,
        }
        log = self.folder / f"{slug}.log"
        command = machine.train_command(self.args.config, common | keys)
        code = machine.torchrun(command, processes=ranks, log=log, threads=1)
        if code:
            text = machine.why(log.read_text())
            raise RuntimeError(f"{name} ended with exit code {code}:\n{text}")
        rows = machine.metrics(run_dir)
        return {step: (row["loss"], row["grad_norm"]) for step, row in rows.items()}


def relative(a: str, b: str) -> float:
    return abs(float(a) - float(b)) / max(abs(float(b)), 1e-12)


def compare(runner: Runner, precision: str, *, moe: bool, gpus: int) -> list[dict[str, object]]:
    """Rows: layout, largest relative difference of loss and grad norm to one process."""
    base = {"training.precision": precision} | (MOE if moe else {})
    tag = f"{precision}{' moe' if moe else ''}"
    first = {**base, "training.exit_at_step": START}
    runner.train(f"{tag} start", 1, first)
    saved = runner.folder / f"{tag} start".replace(" ", "_") / "checkpoints"
    source = sorted(p for p in saved.iterdir() if p.is_dir() and p.name.startswith("step_"))[-1]
    resumed = {**base, "checkpoint.load_from": source}
    expected = runner.train(f"{tag} one", 1, resumed)
    tolerance = FP32_TOLERANCE if precision == "fp32" else BF16_TOLERANCE

    def one(layout: Layout) -> dict[str, object]:
        row: dict[str, object] = {"layout": layout.name, "ranks": layout.ranks, "model": tag}
        begin = time.time()
        try:
            found = runner.train(f"{tag} {layout.name}", layout.ranks, {**resumed, **layout.keys})
            steps = sorted(set(expected) & set(found))
            row["steps"] = len(steps)
            row["loss"] = max(relative(found[s][0], expected[s][0]) for s in steps)
            row["grad_norm"] = max(relative(found[s][1], expected[s][1]) for s in steps)
            row["agrees"] = bool(
                row["loss"] <= tolerance and row["grad_norm"] <= 10 * tolerance and steps
            )
        except RuntimeError as error:
            row |= {"agrees": False, "error": str(error)[-1500:]}
        row["tolerance"] = tolerance
        row["seconds"] = round(time.time() - begin, 1)
        print(row, flush=True)
        return row

    only = runner.args.only
    fitting = [x for x in LAYOUTS if x.ranks <= gpus and x.moe == moe and only in x.name]
    return list(runner.pool.map(one, fitting))


def resume(runner: Runner, ranks: int, keys: dict[str, object]) -> dict[str, object]:
    """Break a deterministic run at half of its steps, resume, compare every printed digit."""
    base = {"training.deterministic": True, "checkpoint.interval": 1, **keys}
    name = f"resume {ranks} {'-'.join(f'{k.rsplit(".", 1)[-1]}{v}' for k, v in keys.items())}"
    whole = runner.train(f"{name} whole", ranks, base)
    runner.train(f"{name} broken", ranks, {**base, "training.exit_at_step": STEPS // 2})
    broken = runner.train(f"{name} broken", ranks, base)
    row: dict[str, object] = {
        "ranks": ranks,
        "keys": {k: str(v) for k, v in keys.items()},
        "steps": len(whole),
        "bitwise": whole == broken and len(whole) == STEPS,
    }
    print("resume", row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/layouts.yaml", help="of the runs")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="where to run")
    parser.add_argument("--backend", default="reference", help="attention backend")
    parser.add_argument("--gpus", type=int, default=2, help="largest number of ranks")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], help="fp32, bf16")
    parser.add_argument("--jobs", type=int, default=1, help="layouts run at the same time")
    parser.add_argument("--only", default="", help="layouts whose name contains this, CP say")
    parser.add_argument("--no-moe", action="store_true", help="leave the MoE layouts out")
    parser.add_argument("--no-resume", action="store_true", help="leave the resume checks out")
    parser.add_argument("--work", default="runs/layouts", help="scratch folder")
    parser.add_argument("--out", type=Path, help="folder of the result; default docs/assets")
    args = parser.parse_args()
    runner = Runner(args)
    rows: list[dict[str, object]] = []
    for precision in args.precisions:
        rows += compare(runner, precision, moe=False, gpus=args.gpus)
    if not args.no_moe:
        rows += compare(runner, "fp32", moe=True, gpus=args.gpus)
    resumes: list[dict[str, object]] = []
    if not args.no_resume:
        cases = [(1, {}), (2, {}), (2, {TP: 2, SP: True}), (2, {PP: 2}), (2, {CP: 2})]
        resumes = list(runner.pool.map(lambda case: resume(runner, *case), cases))
    figures = {"layouts": rows, "resume": resumes, "backend": args.backend, "gpus": args.gpus}
    what = "GPUs" if args.device == "cuda" else "CPU ranks"
    part = f"{args.gpus} {what}" + f", {args.only}" * bool(args.only)
    out = machine.write_result("layouts", figures, args.out, part=part)
    good = sum(bool(r["agrees"]) for r in rows) + sum(bool(r["bitwise"]) for r in resumes)
    print(f"{good} of {len(rows) + len(resumes)} agree; wrote {out.name}")
    sys.exit(good != len(rows) + len(resumes))


if __name__ == "__main__":
    main()
