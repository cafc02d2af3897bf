"""Is the plan's memory the measured peak? A few steps in every layout that fits the GPUs here.

    python benchmarks/plan.py --gpus 8            # on the machine with the GPUs
    python benchmarks/plan.py --device cpu --gpus 2 --only tiny    # does the script work?

For every case and number of ranks up to ``--gpus``: the trainer under torchrun, then of every rank
torch's peak allocated and reserved memory beside the plan's figures for its pipeline stage. The
vocabulary is bytes, padded to the size a case asks for, so that no tokenizer is needed. Writes the
part ``memory`` of docs/assets/plan.json after every case. ``--replan`` needs no GPU: it holds the
stored peaks against what this tree plans. A stage's peak is that of its fullest rank. Exit code 1
if one is more than 10% off or a case did not run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "layouts.yaml"
PART = "memory"
TOLERANCE = 0.10
STEPS = 3
CASE_SECONDS = 300
TP, SP = "parallel.tensor_model_parallel_size", "parallel.sequence_parallel"
PP, VP = "parallel.pipeline_model_parallel_size", "parallel.virtual_pipeline_model_parallel_size"
CP, EP = "parallel.context_parallel_size", "parallel.expert_model_parallel_size"
RECOMPUTE = "training.recompute.granularity"
MEASURED = ("allocated", "reserved", "used")


def _model(*sizes: int | None, **more: object) -> dict[str, object]:
    """layers, hidden size, heads, query groups, FFN width, sequence length, vocabulary."""
    names = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups",
             "ffn_hidden_size", "seq_length", "make_vocab_size_divisible_by")  # fmt: skip
    keys = dict(zip(names, sizes, strict=True)) | more
    return {f"model.{key}": value for key, value in keys.items()} | ONE


ONE: dict[str, object] = {"training.micro_batch_size": 1}
GPT2 = {"position_embedding": "learned_absolute", "normalization": "LayerNorm",
        "activation": "gelu", "add_bias_linear": True, "add_qkv_bias": True,
        "tie_embeddings": True}  # fmt: skip
EXPERTS = "{num_experts: 16, top_k: 2, ffn_hidden_size: 1408}"
MODELS: dict[str, dict[str, object]] = {
    "gpt2_124m": _model(12, 768, 12, None, 3072, 1024, 50304, **GPT2)
    | {"training.micro_batch_size": 16},
    "llama_1b": _model(16, 2048, 16, 8, 8192, 4096, 128256),
    "llama_8b_8_layers": _model(8, 4096, 32, 8, 14336, 8192, 128256),
    "moe": _model(8, 2048, 16, 8, 2816, 4096, 32768, moe=EXPERTS),
    "tiny": ONE,
}


@dataclass(frozen=True)
class Case:
    """A model in a layout."""

    model: str
    layout: str
    ranks: int
    keys: dict[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.model} {self.layout}"


CASES = [
    *(Case(m, "1 GPU", 1) for m in ("gpt2_124m", "llama_1b", "moe", "tiny")),
    Case("gpt2_124m", "1 GPU, fused", 1, {"training.compile_fusions": True}),
    Case("llama_1b", "1 GPU, fused", 1, {"training.compile_fusions": True}),
    Case("llama_1b", "1 GPU, full recompute", 1, {RECOMPUTE: "full"}),
    Case("llama_1b", "1 GPU, MLP recompute", 1, {RECOMPUTE: "selective"}),
    Case("llama_8b_8_layers", "1 GPU", 1),
    *(Case(m, "DP2", 2) for m in ("gpt2_124m", "llama_1b", "tiny")),
    Case("llama_1b", "TP2 SP", 2, {TP: 2, SP: True}),
    Case("llama_1b", "TP2", 2, {TP: 2}),
    Case("llama_1b", "PP2", 2, {PP: 2}),
    Case("llama_1b", "PP2 VP2", 2, {PP: 2, VP: 2}),
    Case("llama_8b_8_layers", "CP2", 2, {CP: 2}),
    Case("llama_8b_8_layers", "TP2 SP", 2, {TP: 2, SP: True}),
    Case("moe", "EP2", 2, {EP: 2}),
    Case("llama_8b_8_layers", "TP4 SP", 4, {TP: 4, SP: True}),
    Case("llama_8b_8_layers", "TP2 SP PP2", 4, {TP: 2, SP: True, PP: 2}),
    Case("llama_8b_8_layers", "TP2 SP CP2", 4, {TP: 2, SP: True, CP: 2}),
    Case("llama_8b_8_layers", "PP4", 4, {PP: 4}),
    Case("llama_1b", "DP4", 4),
    Case("moe", "EP4", 4, {EP: 4}),
    Case("llama_8b_8_layers", "TP8 SP", 8, {TP: 8, SP: True}),
    Case("llama_8b_8_layers", "TP2 SP PP2 DP2", 8, {TP: 2, SP: True, PP: 2}),
    Case("llama_8b_8_layers", "TP2 SP CP4", 8, {TP: 2, SP: True, CP: 4}),
    Case("llama_8b_8_layers", "TP2 SP PP4 VP2", 8, {TP: 2, SP: True, PP: 4, VP: 2}),
    Case("moe", "TP2 SP EP4", 8, {TP: 2, SP: True, EP: 4}),
]


def overrides(case: Case, args: argparse.Namespace, run_dir: Path) -> list[str]:
    """``--set`` values of a case."""
    keys: dict[str, object] = {
        "run_dir": run_dir,
        "training.device": args.device,
        "training.precision": "fp32" if args.device == "cpu" else "bf16",
        "attention.backend": "reference" if args.device == "cpu" else "stable_flash",
        "training.train_steps": STEPS,
        "training.eval_steps": 1,
        "logging.interval": 1,
        "logging.tensorboard": False,
        "data.blend": f"[{{path: {args.dataset}}}]",
    }
    keys |= MODELS[case.model] | case.keys
    replica = _size(case, TP) * _size(case, PP) * _size(case, CP)
    # Enough micro-batches to fill every pipeline, and to repeat its steady state.
    each = int(str(keys["training.micro_batch_size"])) * case.ranks // replica
    keys["training.global_batch_size"] = 2 * max(2, _size(case, PP)) * each
    return [f"{key}={machine.text_of(value)}" for key, value in keys.items()]


def _size(case: Case, key: str) -> int:
    return int(str(case.keys.get(key, 1)))


def planned(sets: list[str], ranks: int, gpu: str) -> tuple[Any, int]:
    """(the plan's stages, ranks of one stage) of a case on one node."""
    plan = machine.plan_of(str(CONFIG), sets, gpu=gpu, gpus=ranks)
    return plan.stages, ranks // plan.layout.pp


def worker(sets: list[str], out: Path) -> int:
    """One rank: train, then write what torch saw."""
    from megatron_patch.config import load
    from megatron_patch.runtime.lifeline import die_with_launcher
    from megatron_patch.training import saver, trainer

    # The checkpoint at a run's end takes minutes and 14 bytes a parameter of the disk, every case.
    saver.Saver.save_last = lambda *_: None  # type: ignore[method-assign]
    die_with_launcher()  # a case that takes too long is killed, and its GPUs are the next one's
    code = trainer.train(load(str(CONFIG), sets))
    import torch

    found: dict[str, int | None] = dict.fromkeys(MEASURED)
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        found = dict(zip(MEASURED, (*peaks, total - free), strict=True))
    (out / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
    return code


def measure(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Run one case and compare; an ``error`` where it did not run."""
    folder = Path(args.work) / case.name.replace(" ", "_").replace(",", "")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    sets = overrides(case, args, folder / "run")
    row: dict[str, Any] = {"model": case.model, "layout": case.layout, "ranks": case.ranks}
    try:
        stages, block = planned(sets, case.ranks, args.gpu)
    except ValueError as error:
        return row | {"error": str(error)}
    command = [__file__, "--worker", str(folder), *(x for one in sets for x in ("--set", one))]
    log = folder / "log"
    gpus = list(range(case.ranks)) if args.device == "cuda" else None
    how: dict[str, Any] = {"processes": case.ranks, "log": log, "devices": gpus, "threads": 1}
    try:
        code = machine.torchrun(command, timeout=CASE_SECONDS, **how)
    except subprocess.TimeoutExpired:
        return row | {"error": f"did not end in {CASE_SECONDS} s"}
    if code:
        return row | {"error": machine.why(log.read_text())}
    found = [json.loads((folder / f"{r}.json").read_text()) for r in range(case.ranks)]
    return row | {"by_rank": [compare(f, stages[r // block]) for r, f in enumerate(found)]}


def compare(found: dict[str, int | None], stage: Any) -> dict[str, Any]:
    """Measured and planned bytes of one rank, and their ratio (None where nothing was measured)."""
    row: dict[str, Any] = {"stage": stage.stage, "planned": stage.allocated}
    row |= {"planned_reserved": stage.reserved, "planned_total": stage.total, **found}
    peak = found["allocated"]
    row["ratio"] = None if peak is None else stage.allocated / peak
    return row


def off(rows: list[dict[str, Any]]) -> list[str]:
    """Names of the cases that failed, or whose plan is more than the tolerance off."""
    bad = []
    for row in rows:
        ranks = machine.fullest(row.get("by_rank", []))
        ratios = [r["ratio"] for r in ranks if r["ratio"] is not None]
        if "error" in row or any(abs(ratio - 1) > TOLERANCE for ratio in ratios):
            bad.append(f"{row['model']} {row['layout']}")
    return bad


def stored(args: argparse.Namespace) -> dict[str, Any]:
    """The result that --out or docs/assets has."""
    path = args.out / "plan.json"
    try:
        return json.loads(path.read_text())[PART]
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"{path}: no result of this script: {error!r}") from None


def planned_now(row: dict[str, Any], args: argparse.Namespace) -> list[Any]:
    """This tree's plan of each rank of an earlier row's case; [] where it has none to plan."""
    name = f"{row['model']} {row['layout']}"
    case = next((case for case in CASES if case.name == name), None)
    if case is None:
        return []
    try:
        stages, block = planned(overrides(case, args, Path(args.work)), case.ranks, args.gpu)
    except ValueError:
        return []
    return [stages[rank // block] for rank in range(case.ranks)]


def replan(args: argparse.Namespace) -> int:
    """Hold the peaks of the stored result against what this tree plans, and write it back."""
    result = stored(args)
    for row in (row for row in result["cases"] if "error" not in row):
        stages = planned_now(row, args)
        if not stages:
            raise SystemExit(f"--replan: {row['model']} {row['layout']} cannot be planned")
        row["by_rank"] = [
            compare({key: old[key] for key in MEASURED}, stage)
            for old, stage in zip(row["by_rank"], stages, strict=True)
        ]
    result |= {"off": off(result["cases"]), "planned_at": machine.environment.commit()}
    path = machine.write_result("plan", result, args.out, part=PART, head={})
    print(f"{path.name}: off: {', '.join(result['off']) or 'none'}")
    return 1 if result["off"] else 0


def prepare(dataset: Path) -> None:
    """Token files of bytes from the Python standard library, made once."""
    if dataset.with_name(dataset.name + ".bin").exists():
        return
    dataset.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "megatron_patch", "prepare-data"]
    command += ["--corpus", "python-stdlib", "--tokenizer", "bytes", "--out", str(dataset)]
    subprocess.run(command, check=True)


def main(arguments: list[str] | None = None) -> int:
    parser = machine.parser(__doc__)
    parser.add_argument("--gpus", type=int, default=1, help="largest number of ranks")
    parser.add_argument("--gpu", default="h200", help="kind of GPU the plan assumes")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="where to run")
    parser.add_argument("--only", nargs="+", choices=list(MODELS), help="models to run")
    parser.add_argument("--dataset", default="runs/plan/stdlib", help="dataset prefix")
    parser.add_argument("--work", default="runs/plan", help="scratch folder")
    parser.add_argument("--replan", action="store_true", help="plan the stored cases again")
    parser.add_argument("--worker", metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--set", action="append", default=[], help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.worker:
        return worker(args.set, Path(args.worker))
    if args.replan:
        return replan(args)
    prepare(Path(args.dataset))
    wanted = args.only or [name for name in MODELS if name != "tiny"]
    cases = [case for case in CASES if case.ranks <= args.gpus and case.model in wanted]

    def write(rows: list[dict[str, Any]]) -> Path:
        figures = {"cases": rows, "tolerance": TOLERANCE, "off": off(rows), "device": args.device}
        figures["missing"] = len(cases) - len(rows)
        part = PART if args.device == "cuda" else "on CPUs"
        return machine.write_result("plan", figures, args.out, part=part)

    rows: list[dict[str, Any]] = []
    for case in cases:
        rows.append(measure(case, args))
        write(rows)
        print(f"{len(rows)} of {len(cases)}: {json.dumps(rows[-1])[:400]}", flush=True)
    bad, path = off(rows), write(rows)
    if args.device == "cpu":
        print(f"{len(rows) - len(bad)} of {len(rows)} ran; no memory to compare; {path.name}")
    else:
        print(f"{len(rows) - len(bad)} of {len(rows)} within {TOLERANCE:.0%}; wrote {path.name}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
