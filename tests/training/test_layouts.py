"""Every parallel layout computes the same training, from one checkpoint resharded on load.

One process trains two steps and saves. It and every layout continue for three steps on the same
data; loss and gradient norm must agree to FP32 = 2e-6 relative (sums in another order; measured at
most 2e-7), or BF16 = 5e-3 (ranks round partial sums to 8 bits before adding; measured 3e-4).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training_ranks import distance, figures, metrics, run_ranks

pytestmark = pytest.mark.multiprocess

START, END = 2, 5
STEPS = list(range(START + 1, END + 1))
FP32, BF16 = 2e-6, 5e-3
TP, SP = "parallel.tensor_model_parallel_size", "parallel.sequence_parallel"
PP, VPP = "parallel.pipeline_model_parallel_size", "parallel.virtual_pipeline_model_parallel_size"
DIST_OPT, EP = "parallel.use_distributed_optimizer", "parallel.expert_model_parallel_size"
OVERLAP = ["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"]
IN_BF16 = ["training.precision=bf16"]
TIED_MTP = ["model.tie_embeddings=true", "model.mtp.num_layers=1"]
MOE = ["model.moe.num_experts=4", "model.moe.ffn_hidden_size=32", "model.moe.aux_loss_coeff=0.0"]


def run(name: str, *keys: str, **faults: Any) -> dict[str, Any]:
    return {"set": [f"name={name}", *keys], **faults}


@pytest.fixture(scope="module")
def single(folder: Path, corpus: Path) -> dict[str, dict[int, tuple[str, str]]]:
    """One process: checkpoints after START steps and the figures of the steps that follow."""
    variants = {"fp32": [], "bf16": IN_BF16, "moe": MOE, "tied_mtp": TIED_MTP}
    return trained(folder, corpus, variants)


def trained(
    folder: Path, corpus: Path, variants: dict[str, list[str]]
) -> dict[str, dict[int, tuple[str, str]]]:
    """Figures of runs of one process, each stopped after START steps and continued."""
    stop = f"training.exit_at_step={START}"
    runs = []
    for name, keys in variants.items():
        # Starting and continuing under one name is the resume on the same layout.
        runs += [run(name, stop, *keys), run(name, *keys)]
    results = run_ranks(folder, corpus, 1, runs)
    assert [r[0]["code"] for r in results] == [0] * len(runs)
    return {name: figures(folder / "runs" / name) for name in variants}


def start_of(folder: Path, name: str) -> str:
    """The checkpoint after START steps of a single-process run."""
    (found,) = (folder / "runs" / name / "checkpoints").glob(f"step_{START:08d}.*")
    return f"checkpoint.load_from={found}"


Table = dict[str, tuple[str, list[str]]]
"""Layout -> (run of one process that it continues, keys)."""
TWO: Table = {
    "dp2": ("fp32", []),
    "dp2_overlap": ("fp32", OVERLAP),
    "tp2_sp": ("fp32", [f"{TP}=2", f"{SP}=true"]),
    "tp2_bf16": ("bf16", [f"{TP}=2", f"{SP}=true", *IN_BF16]),
    "pp2_virtual": ("fp32", [f"{PP}=2", f"{VPP}=2"]),
    "pp2_virtual_tied_mtp": ("tied_mtp", [f"{PP}=2", f"{VPP}=2", *TIED_MTP]),
    "ep2": ("moe", [f"{EP}=2", *MOE]),
}
TWO_MORE: Table = {"dp2_whole": ("whole", [f"{DIST_OPT}=false"]), "dp2_bf16": ("bf16", IN_BF16)}
FOUR: Table = {"tp2_pp2": ("fp32", [f"{TP}=2", f"{SP}=true", f"{PP}=2"])}


def execute(folder: Path, corpus: Path, ranks: int, table: Table) -> None:
    """Run all layouts one after the other on the same processes."""
    runs = [run(name, start_of(folder, source), *keys) for name, (source, keys) in table.items()]
    results = run_ranks(folder, corpus, ranks, runs)
    assert all(rank["code"] == 0 and rank["step"] == END for run_ in results for rank in run_)


def judge(folder: Path, name: str, source: str) -> None:
    """Losses, gradient norms and the last validation loss are those of one process."""
    tolerance = BF16 if source == "bf16" else FP32
    found, expected = (folder / "runs" / n for n in (name, source))
    assert distance(figures(found), figures(expected), STEPS) < tolerance
    losses = [float(metrics(place)[END]["eval_loss"]) for place in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)


@pytest.fixture(scope="module")
def two(folder: Path, corpus: Path, single: Any) -> None:
    execute(folder, corpus, 2, TWO)


def test_single_process_resume_continues_the_run(single):
    assert all(sorted(found) == list(range(1, END + 1)) for found in single.values())


@pytest.mark.parametrize("name", TWO)
def test_two_ranks(folder, two, name):
    judge(folder, name, TWO[name][0])


@pytest.mark.slow
def test_more_on_two_ranks(folder, corpus, single):
    trained(folder, corpus, {"whole": [f"{DIST_OPT}=false"]})
    execute(folder, corpus, 2, TWO_MORE)
    for name, (source, _) in TWO_MORE.items():
        judge(folder, name, source)


def test_overlapped_communication_makes_the_same_sums(folder, two):
    assert figures(folder / "runs" / "dp2_overlap") == figures(folder / "runs" / "dp2")


def test_tensor_and_pipeline_parallel(folder, corpus, single):
    execute(folder, corpus, 4, FOUR)
    judge(folder, "tp2_pp2", "fp32")


def test_a_stage_without_experts_is_saved_and_resumes(folder, corpus):
    """It owns no parameters of the experts' optimizer.

    To every digit on the same layout; and from one rank, which has all experts.
    """
    model = ["model.num_layers=2", "model.moe.num_experts=2", "model.moe.layer_freq=[0,1]"]
    split = [*model, f"{PP}=2", f"{EP}=2"]
    stop, moved = f"training.exit_at_step={START}", f"checkpoint.load_from=stage_one@{START}"
    results = run_ranks(folder, corpus, 4, [
        run("stage", *split),
        run("stage_resumed", *split, stop),
        run("stage_resumed", *split),
        run("stage_one", *model, stop, ranks=1),
        run("stage_moved", *split, moved),
    ])  # fmt: skip
    assert [rank["code"] for one in results for rank in one] == [0] * 17
    whole, resumed, left = (
        figures(folder / "runs" / name) for name in ("stage", "stage_resumed", "stage_moved")
    )
    assert resumed == whole and list(left) == STEPS


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_experts_are_spread_over_other_ranks(tmp_path, corpus, optimizer):
    """Their parameters have groups, or an optimizer, of their own over several ranks only."""
    if optimizer == "muon":
        pytest.importorskip("emerging_optimizers")
    model = [*MOE, *IN_BF16, "model.num_layers=2", f"optimizer.name={optimizer}"]
    whole, spread = [*model, f"{DIST_OPT}=false"], [*model, f"{DIST_OPT}=false", f"{EP}=2"]
    stop = f"training.exit_at_step={START}"
    plan = [
        run("one", stop, *whole, ranks=1),
        run("one", *whole, ranks=1),
        run("to_ranks", *spread, f"checkpoint.load_from=one@{START}"),
        run("ranks", stop, *spread),
        run("ranks", *spread),
        run("to_one", *whole, f"checkpoint.load_from=ranks@{START}", ranks=1),
    ]
    if optimizer == "muon":  # sharded by whole matrices
        plan += [
            run("sharded", stop, *model, ranks=1),
            run("to_sharded", *model, f"{EP}=2", f"checkpoint.load_from=sharded@{START}"),
        ]
    results = run_ranks(tmp_path, corpus, 2, plan)
    assert {(rank["code"], rank.get("error")) for one in results for rank in one} == {(0, None)}
    found = {name: figures(tmp_path / "runs" / name) for name in ("one", "ranks")}
    pairs = {"to_ranks": "one", "to_one": "ranks"}
    pairs |= {"to_sharded": "one"} if optimizer == "muon" else {}
    for name, source in pairs.items():
        moved = figures(tmp_path / "runs" / name)
        assert list(moved) == STEPS and distance(moved, found[source], STEPS) < BF16


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_experts_of_several_ranks_begin_as_those_of_one(tmp_path, corpus, activation):
    """Every rank drew the same weights for its experts."""
    keys = [*MOE, "model.num_layers=2", f"model.activation={activation}", "training.train_steps=3"]
    keys += ["training.grouped_experts=false"] * (activation == "gelu")
    results = run_ranks(
        tmp_path, corpus, 2, [run("one", *keys, ranks=1), run("ranks", *keys, f"{EP}=2")]
    )
    assert [rank["code"] for one in results for rank in one] == [0] * 3
    one, ranks = (figures(tmp_path / "runs" / name) for name in ("one", "ranks"))
    assert distance(ranks, one, [1, 2, 3]) < FP32
