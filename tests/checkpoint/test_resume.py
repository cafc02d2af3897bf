"""Resuming on Megatron state: bitwise on the same layout, to rounding on another, or a refusal."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_pool import contents, convert, load, newest, save

from megatron_patch.schema.model import MoEConfig, MTPConfig

pytestmark = pytest.mark.multiprocess


def assert_same(first: Any, second: Any, where: str = "") -> None:
    """Equal in every bit, whatever is nested how."""
    assert type(first) is type(second), where
    if isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key in first:
            if key != "own_step":
                assert_same(first[key], second[key], f"{where}.{key}")
    elif isinstance(first, list):
        assert len(first) == len(second), where
        for index, pair in enumerate(zip(first, second, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    elif isinstance(first, np.ndarray):
        assert first.dtype == second.dtype and first.tobytes() == second.tobytes(), where
    else:
        assert first == second, where


BITWISE = {
    "single, in the background": ("single", 1, {"checkpoint": {"async_save": True}}),
    "single, whole optimizer": ("single", 1, {"parallel": {"use_distributed_optimizer": False}}),
    "dp, dp_reshardable": ("dp", 2, {"checkpoint": {"optimizer_sharding": "dp_reshardable"}}),
    "dp, bf16, background": (
        "dp",
        2,
        {"training": {"precision": "bf16"}, "checkpoint": {"async_save": True}},
    ),
    "dp, bf16, whole optimizer": (
        "dp",
        2,
        {
            "training": {"precision": "bf16"},
            "parallel": {"use_distributed_optimizer": False},
        },
    ),
    "tp with dropout": ("tp", 2, {"model": {"hidden_dropout": 0.1}}),
    "pp with virtual stages": (
        "pp",
        2,
        {"model": {"num_layers": 4}, "parallel": {"virtual_pipeline_model_parallel_size": 2}},
    ),
    "pp, tied embeddings and an extra depth": (
        "pp",
        2,
        {"model": {"tie_embeddings": True, "mtp": MTPConfig()}},
    ),
}  # fmt: skip


SELDOM = ("single, whole optimizer", "dp, bf16, background", "dp", "pp", "pp with one layer first")
"""Of what the other cases of their table have, too."""


def sampled(table: dict[str, Any]) -> list[Any]:
    """Names of its cases, `SELDOM` marked slow."""
    return [pytest.param(n, marks=[pytest.mark.slow] * (n in SELDOM)) for n in table]


@pytest.mark.parametrize("case", sampled(BITWISE))
def test_same_layout_resumes_bitwise(ranks, tmp_path, case):
    """Weights, moments, step counters, losses and every random stream go on as if unbroken."""
    layout, world, changes = BITWISE[case]
    changes = {"layout": layout, **changes}
    root = str(tmp_path / "checkpoints")
    unbroken = save(ranks, root, 2, stop=4, world=world, **changes)
    resumed = load(ranks, root, stop=4, world=world, **changes)
    for before, after in zip(unbroken, resumed, strict=True):
        assert after["progress"] == {
            "step": 2,
            "consumed_samples": 8,
            "consumed_tokens": 7,
            "abandoned_saves": 0,
            "switched_at": 0,
        }
        assert_same(before["at_save"], after["at_load"])
        assert_same(before["losses"][2:], after["losses"])
        for key in ("weights", "moments", "draws"):
            assert_same(before[key], after[key], key)
        steps = [m["own_step"] for m in after["at_load"]["moments"]]
        assert len(set(steps)) == len(steps), "parameters share one step counter"


@pytest.fixture(scope="module")
def single(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of one rank, saved fully reshardable at step 2, and what the file holds."""
    root = tmp_path_factory.mktemp("single")
    changes = {"model": {"num_layers": 4}}
    (result,) = save(ranks, root, 2, stop=4, **changes)
    return {"root": root, "changes": changes, "contents": contents(ranks, root), **result}


@pytest.fixture
def own_copy(single: dict[str, Any], tmp_path: Path) -> Path:
    """The checkpoints of `single`, to change."""
    root = tmp_path / "checkpoints"
    shutil.copytree(single["root"], root)
    return root


RESHARDED: dict[str, dict[str, Any]] = {
    "dp": {},
    "tp": {},
    "pp": {},
    "pp with virtual stages": {"parallel": {"virtual_pipeline_model_parallel_size": 2}},
    "pp with one layer first": {"parallel": {"num_layers_in_first_pipeline_stage": 1}},
}


def test_experts_are_resharded(ranks, tmp_path):
    """Two optimizers (dense and expert parameters) and expert parallelism."""
    one, two = tmp_path / "one", tmp_path / "two"
    model = {"moe": MoEConfig(num_experts=4)}
    layout = {"model": model, "parallel": {"expert_model_parallel_size": 2}}
    (unbroken,) = save(ranks, one, 2, stop=4, model=model)
    (resumed,) = load(ranks, one, stop=4, model=model)
    assert_same(unbroken["losses"][2:], resumed["losses"])
    convert(ranks, one, two, world=2, **layout)
    first = contents(ranks, one)
    second = contents(ranks, two)
    assert any("experts" in name and "exp_avg" in name for name in first)
    assert_same(first, second)
    for result in load(ranks, two, stop=4, world=2, **layout):
        np.testing.assert_allclose(result["losses"], unbroken["losses"][2:], rtol=2e-6)


@pytest.mark.parametrize("case", sampled(RESHARDED))
def test_another_layout_holds_the_same_state(ranks, single, tmp_path, case):
    """Loaded on two ranks and saved there, every weight and moment is the same bit for bit.

    Training on from there agrees to rounding: sums over ranks are taken in another order.
    """
    changes = {"layout": case.split()[0], **single["changes"], **RESHARDED[case]}
    there, back = tmp_path / "there", tmp_path / "back"
    answers = convert(ranks, single["root"], there, world=2, **changes)
    assert any("layout changed" in line for line in answers[0]["lines"])
    assert_same(contents(ranks, there), single["contents"])
    for result in load(ranks, there, stop=4, world=2, **changes):
        np.testing.assert_allclose(result["losses"], single["losses"][2:], rtol=2e-6)
    convert(ranks, there, back, **single["changes"])
    assert_same(contents(ranks, back), single["contents"])


def test_dp_reshardable_loads_on_another_dp_size_only(ranks, tmp_path):
    """DP 2 -> 1 keeps every moment; a tensor-parallel layout is refused and told what to do."""
    changes = {"checkpoint": {"optimizer_sharding": "dp_reshardable"}}
    root, whole, again = tmp_path / "dp", tmp_path / "whole", tmp_path / "again"
    save(ranks, root, 2, world=2, layout="dp", **changes)
    # The same state, once resharded by loading on one rank, once saved by the two that wrote it.
    convert(ranks, root, whole)
    convert(ranks, root, again, world=2, layout="dp")
    first = contents(ranks, whole)
    second = contents(ranks, again)
    assert any(name.startswith("optimizer.state.exp_avg_sq") for name in first)
    assert_same(first, second)
    for answer in load(ranks, root, stop=3, world=2, layout="tp"):
        assert answer["error"] == "MismatchError"
        assert "dp_reshardable" in answer["text"] and "tp changed" in answer["text"]


MISFITS = {
    "shapes": ({"model": {"num_layers": 4, "hidden_size": 64}}, "linear_fc1.weight: the model has"),
    "fewer layers": ({}, "decoder.layers.self_attention.linear_qkv.weight: the model has"),
    "missing": (
        {"model": {"num_layers": 4, "add_bias_linear": True}},
        "linear_fc1.bias: not in the checkpoint",
    ),
    "left over": (
        {"model": {"num_layers": 4, "tie_embeddings": True}},
        "output_layer.weight: in the checkpoint, but not in the model",
    ),
    "precision": (
        {"model": {"num_layers": 4}, "training": {"precision": "bf16"}},
        "training.precision: fp32",
    ),
    "optimizer": (
        {"model": {"num_layers": 4}, "parallel": {"use_distributed_optimizer": False}},
        "use_distributed_optimizer: true",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_another_model_is_refused_by_name(ranks, single, own_copy, case):
    """A good checkpoint that does not fit: refused on every rank, named, and left where it is."""
    changes, expected = MISFITS[case]
    before = sorted(path.name for path in own_copy.iterdir())
    for answer in load(ranks, own_copy, stop=3, world=2, layout="dp", **changes):
        assert answer["error"] == "MismatchError"
        assert expected in answer["text"], answer["text"]
    assert sorted(path.name for path in own_copy.iterdir()) == before


def test_weights_only(ranks, single, tmp_path):
    """Weights come from the other run, on another layout; optimizer and progress start fresh."""
    changes = {
        **single["changes"],
        "layout": "dp",
        "training": {"precision": "bf16"},
        "checkpoint": {"load_from": str(single["root"]), "load_weights_only": True},
    }
    for answer in load(ranks, tmp_path / "new", stop=3, world=2, **changes):
        assert answer["progress"] is None
        got = answer["at_load"]["weights"]["0:module.module.embedding.word_embeddings.weight"]
        saved = single["contents"]["embedding.word_embeddings.weight"]
        np.testing.assert_allclose(got, saved, rtol=2**-8)
    assert not (tmp_path / "new").exists()


def test_the_configuration_wins_over_saved_settings(ranks, single, own_copy):
    """A changed learning rate takes effect; core alone would not find the parameter groups."""
    changes = {**single["changes"], "optimizer": {"lr": 5e-3}}
    (answer,) = load(ranks, own_copy, stop=3, **changes)
    assert answer["progress"]["step"] == 2
    assert_same(answer["at_load"]["moments"], single["at_save"]["moments"])
    moved = [
        np.abs(after["main"] - before["main"]).max()
        for after, before in zip(answer["moments"], answer["at_load"]["moments"], strict=True)
    ]
    assert 0 < max(moved) < 6e-3  # an Adam update moves a weight by about the learning rate


@pytest.mark.parametrize("sharding", ["fully_reshardable", "dp_reshardable"])
def test_core_alone_does_not_resume_torch_adamw(ranks, tmp_path, sharding):
    """Why optimizer_state.py exists; when this fails core is repaired and the room can shrink."""
    root = tmp_path / "core"
    root.mkdir()
    (answer,) = ranks.play("core_alone", root=str(root), optimizer_sharding=sharding)
    if sharding == "fully_reshardable":
        assert answer == {"error": "KeyError('step')"}
    else:
        assert answer["steps"] != [2.0] or answer["step_tensors"] == 1 < answer["parameters"]


@pytest.mark.parametrize(
    "rank, where, background",
    [
        (1, "write", False),
        (1, "write", True),
        (0, "finish", False),
        (1, "stage", False),
        (1, "model_state", False),
    ],
)
def test_one_failing_rank_abandons_the_save_on_all(ranks, tmp_path, rank, where, background):
    """No rank waits for ever, all say why, the attempt is aside, and the next save works."""
    root = tmp_path / "checkpoints"
    answers = ranks.play(
        "failing_save", world=2, root=str(root), rank=rank, where=where, background=background
    )
    for answer in answers:
        assert answer["text"].startswith(
            "SaveError: checkpoint of step 2 (attempt 1) was abandoned"
        )
        assert f"rank {rank}: OSError" in answer["text"] and "disk or quota" in answer["text"]
        assert answer["progress"]["step"] == 3 and answer["progress"]["abandoned_saves"] == 1
    assert [p.name.split(".tmp.")[0] for p in (root / "aside").iterdir()] == [
        "step_00000002.attempt-1"
    ]


READS = {"metadata.json": "metadata.json", "common state": "1", "shards": "2"}


@pytest.mark.parametrize("rank", [0, 1])
def test_an_io_error_of_one_rank_ends_the_load_on_all(ranks, tmp_path, rank):
    """At once and with the true cause: no rank is left in a collective of Megatron-Core's."""
    root = str(tmp_path / "checkpoints")
    found = ranks.play(
        "load_faults.failing_load", world=2, root=root, rank=rank, places=list(READS.values())
    )
    for place in READS.values():
        texts = [answer[place]["text"] for answer in found]
        assert texts[0] == texts[1] and "[Errno 5] Input/output error" in texts[0], texts
        assert texts[0].startswith("UnavailableError, exit code 1: "), "a restart is worth a try"
        assert all(answer[place]["seconds"] < 25 for answer in found)
    assert [answer["nowhere"]["text"] for answer in found] == ["step 1", "step 1"]


def test_a_request_whose_parts_overlap_is_refused_before_anything_is_read(ranks, tmp_path):
    """What core checks between its reads, and here is checked before them."""
    for text in ranks.play(
        "load_faults.overlapping_request", world=2, root=str(tmp_path / "checkpoints")
    ):
        assert "Invalid access pattern" in text or "Duplicate ShardedObject" in text


def test_a_run_that_saved_never_starts_at_step_0_unasked(ranks, tmp_path):
    """And what remembers its newest checkpoint refuses nothing else."""
    root = tmp_path / "run" / "checkpoints"
    first, second = ranks.play("load_faults.forgotten", world=2, root=str(root))
    assert first == second
    texts = {name: found for name, found in first.items() if isinstance(found, str)}
    assert "last_checkpoint.json says that step 2 was" in texts.pop("not mounted")
    assert "another run's: name: checkpoint-test" in texts.pop("foreign")
    assert texts == {
        "new": "step None",
        "rewound": "step 2",
        "pruned": "step 2",
        "back": "step 2",
        "without the file": "step 2",
        "never": "step None",
        "anew": "step None",
    }
    assert {found for found in first.values() if isinstance(found, int)} == {2}


def test_one_rank_that_cannot_build_its_request_ends_the_load_on_all(ranks, tmp_path):
    root = str(tmp_path / "checkpoints")
    for text in ranks.play("load_faults.failing_request", world=2, root=root, rank=1):
        assert text.startswith("CheckpointError: step_00000001.attempt-1 cannot be loaded")
        assert "ZeroDivisionError" in text


def test_a_background_save_is_committed_when_the_last_rank_is_done(ranks, tmp_path):
    """Nothing counts before; what is committed is the state at the save, not of later steps."""
    for answer in ranks.play("steps_while_saving", world=2, root=str(tmp_path / "checkpoints")):
        assert answer["early"] == [False, False, False] and not answer["visible"]
        assert_same(answer["before"], answer["loaded"])


def test_going_back_gives_a_background_save_up_and_deletes_no_checkpoint_for_it(ranks, tmp_path):
    root = tmp_path / "checkpoints"
    for answer in ranks.play("load_faults.rewound_while_saving", world=2, root=str(root)):
        assert answer["back"] == 1
        assert (answer["saved"].step, answer["saved"].abandoned_saves) == (2, 0)
    assert newest(root).name == "step_00000002.attempt-2"
    (left,) = (root / "aside").iterdir()
    assert left.name.startswith("step_00000002.attempt-1.tmp.abandoned.")
    text = (left / "reason.txt").read_text()
    assert text.startswith("the run went back to step 1 before it was complete\n")
    assert "__0_0.distcp" in text and "__1_0.distcp" in text, "every writer was waited for"


def test_a_flipped_bit_on_two_ranks(ranks, tmp_path):
    """In the second rank's shard of the newest checkpoint: both ranks take the one before."""
    root = tmp_path / "checkpoints"
    changes = {"layout": "tp"}
    for step in (1, 2):
        save(ranks, root, step, world=2, **changes)
    shard = newest(root) / "__1_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 4
    shard.write_bytes(data)
    for rank, answer in enumerate(load(ranks, root, stop=2, world=2, **changes)):
        assert answer["progress"]["step"] == 1
        if rank == 0:
            assert any("__1_0.distcp does not match its SHA-256" in li for li in answer["lines"])
    assert [p.name.split(".2")[0] for p in (root / "aside").iterdir()] == [
        "step_00000002.attempt-1.hash"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["stage", "write", "finish"])
def test_a_killed_rank_costs_only_the_save(tmp_path, phase):
    """SIGKILL of rank 0 or 1 in a save: the peer raises, a new job loads the step before."""
    from rank_pool import RankPool

    root, layout = tmp_path / "checkpoints", {"layout": "dp"}
    with RankPool(2) as doomed:
        save(doomed, root, 1, world=2, **layout)
        with pytest.raises((EOFError, AssertionError, ConnectionError)):
            doomed.play(
                "killed_while_saving",
                world=2,
                root=str(root),
                rank=0 if phase == "finish" else 1,
                phase=phase,
            )
    with RankPool(2) as fresh:
        for answer in load(fresh, root, stop=2, world=2, **layout):
            assert answer["progress"]["step"] == 1
        save(fresh, root, 2, world=2, **layout)
    assert newest(root).name == "step_00000002.attempt-2"
