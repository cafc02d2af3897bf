"""Context parallelism computes the training of one process, from one checkpoint resharded on load.

One process trains two steps and saves; it and every layout continue on the same data, whose masks
leave context-parallel ranks with different numbers of tokens. Losses (validation, balancing and
multi-token prediction included) and gradient norms must agree to FP32 = 2e-6 relative (sums in
another order), or BF16 = 5e-3 (ranks round partial sums). `test_compositions` has more features
and planted faults.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from byte_corpus import byte_corpus
from training_ranks import figures, metrics, run_ranks

pytestmark = pytest.mark.multiprocess

START, MID, END = 1, 2, 3
FP32, BF16 = 2e-6, 5e-3
COMPARED = ("loss", "grad_norm", "eval_loss", "moe_aux_loss", "mtp_loss")

CP, KIND = "parallel.context_parallel_size", "parallel.cp_comm_type"
SIZES = "parallel.hierarchical_context_parallel_sizes=[2, 2]"
CP2, CP4 = f"{CP}=2", f"{CP}=4"
TP2, SP = "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"
PP2 = "parallel.pipeline_model_parallel_size=2"
VPP2 = "parallel.virtual_pipeline_model_parallel_size=2"
EP2 = "parallel.expert_model_parallel_size=2"
# Gloo cannot gather the uneven numbers of tokens that experts split over ranks receive.
ETP1 = "parallel.expert_tensor_parallel_size=1"
OVERLAP = ["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"]

TWO_LAYERS = "model.num_layers=2"
EXPERTS = [TWO_LAYERS, "model.moe.num_experts=4", "model.moe.ffn_hidden_size=32"]
MODELS: dict[str, list[str]] = {
    "fp32": [],
    "bf16": [TWO_LAYERS, "training.precision=bf16"],
    "learned": [
        TWO_LAYERS,
        "model.position_embedding=learned_absolute",
        "data.reset_position_ids=true",
    ],
    "local": [
        TWO_LAYERS,
        "model.window=[6, 0]",
        "model.window_skip_freq=2",
        "model.softmax_type=learnable",
        "parallel.use_distributed_optimizer=false",
    ],
    "latent": [
        TWO_LAYERS,
        "model.num_query_groups=null",
        "model.mla={kv_lora_rank: 16, qk_head_dim: 8, qk_pos_emb_head_dim: 4, v_head_dim: 8}",
    ],
    "moe": [*EXPERTS, "model.moe.aux_loss_coeff=0.1"],
    "packed": [TWO_LAYERS, "data.document_attention=true"],
    "mtp": [TWO_LAYERS, "model.mtp.num_layers=2", "model.mtp.loss_scaling_factor=0.5"],
}
DROPOUT = "model.attention_dropout=0.3"


def run(name: str, ranks: int, *keys: str) -> dict[str, Any]:
    """A training of a plan, on its first ``ranks`` processes."""
    common = {
        "name": name,
        "training.train_steps": END,
        "training.global_batch_size": 2,
        "data.eod_mask_loss": "true",
        "checkpoint.keep_last": END,
    }
    settings = [f"{key}={value}" for key, value in common.items()]
    return {"set": settings + list(keys), "ranks": ranks}


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-tokenized dataset of documents of 2 to 13 tokens: ends fall unevenly on ranks."""
    words = (chr(97 + (5 * k * k + k // 7) % 26) * (k * k % 12 + 1) for k in range(900))
    return byte_corpus(tmp_path_factory.mktemp("short") / "tiny", words)


Table = dict[str, tuple[str, list[str]]]
"""Layout -> (model it trains, keys)."""


class Trials:
    """Runs plans of trainings in one folder and compares their records."""

    def __init__(self, folder: Path, corpus: Path) -> None:
        self.folder, self.corpus = folder, corpus

    def execute(self, plan: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        """What every rank of every training reports, the last training of a name; one start."""
        fresh = [r for r in plan if r["set"][0] != "name=broken"]  # resumed on purpose
        directories = [self.folder / "runs" / r["set"][0].removeprefix("name=") for r in fresh]
        assert len(set(directories)) == len(fresh) and not any(d.exists() for d in directories)
        results = run_ranks(self.folder, self.corpus, max(r["ranks"] for r in plan), plan)
        assert all(rank["code"] == 0 for one in results for rank in one)
        names = [training["set"][0].removeprefix("name=") for training in plan]
        return dict(zip(names, results, strict=True))

    def distance(self, name: str, expected: str, *, first: int = START + 1) -> float:
        """Largest relative difference of any figure recorded from step ``first`` to the end."""
        a, b = (metrics(self.folder / "runs" / n) for n in (name, expected))
        worst = 0.0
        for step in range(first, END + 1):
            for column in COMPARED:
                pair = [rows[step].get(column) or "" for rows in (a, b)]
                if pair != ["", ""]:
                    found, wanted = (float(text) for text in pair)
                    worst = max(worst, abs(found - wanted) / abs(wanted))
        return worst

    def check(self, table: Table) -> None:
        """Every layout trained what the one process did."""
        found = {name: self.distance(name, model) for name, (model, _) in table.items()}
        limits = {name: BF16 if model == "bf16" else FP32 for name, (model, _) in table.items()}
        assert {n: d for n, d in found.items() if not d < limits[n]} == {}


SLOW_MODELS = ("latent", "mtp", "learned", "moe")
"""`test_compositions` has learned positions, experts and extra depths in its fast cases."""
TWO: Table = {
    "per_layer": ("fp32", [CP2, f"{KIND}=[p2p, a2a, all_gather, p2p]"]),
    "bf16_all_gather": ("bf16", [CP2, f"{KIND}=all_gather"]),
    "local_p2p": ("local", [CP2]),
    "a2a_overlap": ("fp32", [CP2, f"{KIND}=a2a", *OVERLAP]),
}
TWO_MORE: Table = {
    "learned_a2a": ("learned", [CP2, f"{KIND}=a2a", *OVERLAP]),
    "moe_ep2": ("moe", [CP2, EP2]),
    "all_gather": ("fp32", [CP2, f"{KIND}=all_gather"]),
    "bf16_p2p": ("bf16", [CP2]),
    "packed_all_gather": ("packed", [CP2, f"{KIND}=all_gather"]),
    "local_a2a": ("local", [CP2, f"{KIND}=a2a"]),
    "local_all_gather": ("local", [CP2, f"{KIND}=all_gather"]),
    "latent_a2a": ("latent", [CP2, f"{KIND}=a2a"]),
    "mtp_p2p": ("mtp", [CP2]),
}
FOUR: Table = {"tp2": ("fp32", [CP2, TP2, SP]), "packed_pp2": ("packed", [CP2, PP2])}
FOUR_MORE: Table = {
    "pp2": ("fp32", [CP2, PP2]),
    "cp4_both": ("fp32", [CP4, f"{KIND}=a2a+p2p", SIZES]),
    "pp2_virtual": ("fp32", [CP2, PP2, VPP2]),
    "dp2": ("fp32", [CP2, *OVERLAP]),
    "cp4_a2a": ("fp32", [CP4, f"{KIND}=a2a"]),
    "cp4_all_gather": ("learned", [CP4, f"{KIND}=all_gather"]),
    "cp4_local_both": ("local", [CP4, f"{KIND}=a2a+p2p", SIZES]),
    "tp2_a2a": ("fp32", [CP2, TP2, f"{KIND}=a2a"]),
    "dp2_moe_ep2": ("moe", [CP2, EP2]),
    "tp2_moe_ep2": ("moe", [CP2, TP2, SP, EP2, ETP1]),
}


def start(model: str, step: int = START) -> str:
    """The setting that continues the one process's training."""
    return f"checkpoint.load_from={model}@{step}"


def models(names: Iterable[str]) -> list[dict[str, Any]]:
    """Trainings of one process, with a checkpoint of every step."""
    return [run(name, 1, *MODELS[name], "checkpoint.interval=1") for name in names]


def layouts(table: Table, ranks: int) -> list[dict[str, Any]]:
    """A training for every layout, from the checkpoint of the one process."""
    return [
        run(name, ranks, *MODELS[model], *keys, start(model))
        for name, (model, keys) in table.items()
    ]


@pytest.fixture(scope="module")
def trials(folder: Path, short_documents: Path) -> Trials:
    return Trials(folder, short_documents)


@pytest.fixture(scope="module")
def reports(trials: Trials) -> dict[str, list[dict[str, Any]]]:
    """All trainings of the fast tests, one after the other on the same four processes."""
    stop, save = f"training.exit_at_step={MID}", "checkpoint.interval=1"
    return trials.execute([
        *models(name for name in MODELS if name not in SLOW_MODELS),
        run("dropout", 1, DROPOUT),
        *layouts(TWO, 2),
        run("dropout_p2p", 2, CP2, DROPOUT),
        run("whole", 2, CP2, start("fp32"), save),
        run("broken", 2, CP2, start("fp32"), stop),
        run("broken", 2, CP2, start("fp32")),
        *layouts(FOUR, 4),
        run("wider", 4, CP4, f"{KIND}=a2a+p2p", SIZES, start("whole", MID)),
        run("back", 1, start("whole", MID)),
    ])  # fmt: skip


@pytest.mark.usefixtures("reports")
def test_layouts(trials):
    """Every mode, every model, on two ranks and on four."""
    trials.check(TWO | FOUR | {"whole": ("fp32", [])})


@pytest.mark.usefixtures("reports")
def test_attention_dropout_does_not_depend_on_who_holds_a_token(trials):
    assert trials.distance("dropout_p2p", "dropout", first=1) < FP32


def test_a_resume_repeats_every_bit(trials, reports):
    whole, resumed = reports["whole"], reports["broken"]
    assert [rank["weights"] for rank in resumed] == [rank["weights"] for rank in whole]
    assert figures(trials.folder / "runs" / "broken") == figures(trials.folder / "runs" / "whole")


@pytest.mark.usefixtures("reports")
def test_checkpoints_load_under_other_sizes(trials):
    """Of one process under CP2 (all of the above), and of CP2 under CP4 and under one process."""
    for name in ("wider", "back"):
        assert trials.distance(name, "fp32", first=MID + 1) < FP32


@pytest.mark.slow
@pytest.mark.usefixtures("reports")
def test_more_layouts(trials):
    plan = [*models(SLOW_MODELS), *layouts(TWO_MORE, 2), *layouts(FOUR_MORE, 4)]
    trials.execute(plan)
    trials.check(TWO_MORE | FOUR_MORE)


@pytest.mark.slow
def test_the_long_context_configuration(trials, corpus):
    """The small one of that shape, on two ranks and on one."""
    config = Path(__file__).resolve().parents[2] / "configs" / "long_context_smoke.yaml"
    text = [f"data.blend=[{{path: {corpus}}}]", "data.tokenizer.kind=bytes"]
    text += ["data.tokenizer.path=null"]
    plan = [
        {"set": ["name=long", *text], "ranks": 2},
        {"set": ["name=long_one", f"{CP}=1", *text], "ranks": 1},
    ]
    results = run_ranks(trials.folder, corpus, 2, plan, config=config)
    assert [rank["code"] for one in results for rank in one] == [0, 0, 0]
    assert trials.distance("long", "long_one", first=1) < FP32
