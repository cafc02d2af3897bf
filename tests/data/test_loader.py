"""Batches: the order over ranks, resumption, blends, splits, masks and positions."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prepared import ENDINGS, layout, options, run_config

from megatron_patch.context_parallel.layout import unshard
from megatron_patch.data.errors import DataError
from megatron_patch.data.loader import build_loaders, needs_data
from megatron_patch.schema.data import DatasetConfig

QUICK = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def rows_of_step(loaders_of_ranks: list, step: int) -> torch.Tensor:
    """The global batch of a step, put together from all ranks in sample order."""
    micro_batches = loaders_of_ranks[0].micro_batches
    return torch.cat(
        [
            loaders.batch("train", step, micro)["tokens"]
            for micro in range(micro_batches)
            for loaders in loaders_of_ranks
        ]
    )


@QUICK
@given(
    size=st.sampled_from([1, 2, 3, 4, 6, 12]),
    micro=st.sampled_from([1, 2]),
    step=st.integers(0, 60),
    seed=st.integers(0, 3),
)
def test_the_global_batch_does_not_depend_on_the_ranks(corpora, size, micro, step, seed):
    if 12 % (size * micro):
        return
    one = build_loaders(run_config(*corpora, seed=seed), layout())
    run = run_config(*corpora, seed=seed, micro_batch_size=micro)
    many = [build_loaders(run, layout(rank, size)) for rank in range(size)]
    assert torch.equal(rows_of_step(many, step), rows_of_step([one], step))


@QUICK
@given(start=st.integers(0, 50), workers=st.sampled_from([0, 1, 3]))
def test_resuming_at_a_step_equals_skipping_to_it(corpora, start, workers):
    loaders = build_loaders(run_config(*corpora, micro_batch_size=2), layout(1, 2))
    skipped = islice(loaders.iterate("train"), start * loaders.micro_batches, None)
    run = run_config(*corpora, micro_batch_size=2, num_workers=workers)
    resumed = build_loaders(run, layout(1, 2)).iterate("train", start_step=start)
    for a, b in islice(zip(skipped, resumed, strict=False), 5):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
    resumed.close()


def test_the_order_does_not_depend_on_the_length_of_the_run(corpora):
    """Megatron-Core's index depends on the number of samples: a longer run sees other data."""
    short, long = (build_loaders(run_config(*corpora, train_steps=n), layout()) for n in (3, 3000))
    for step in (0, 2):
        assert torch.equal(rows_of_step([short], step), rows_of_step([long], step))


def test_an_epoch_is_every_token_once_and_the_next_is_shuffled_anew(corpora):
    run = run_config(corpora[0], split=[1, 0, 0], global_batch_size=1)
    loaders = build_loaders(run, layout())
    tokens = np.fromfile(f"{corpora[0]}.bin", dtype=np.uint16)
    windows = len(tokens) // 16
    epochs = [
        [tuple(loaders.batch("train", e * windows + i, 0)["tokens"][0].tolist()) for i in range(n)]
        for e, n in ((0, windows), (1, windows))
    ]
    stream = Counter(tokens.tolist())
    for epoch in epochs:
        seen = Counter(token for row in epoch for token in row)
        assert sum(seen.values()) == windows * 16
        assert sum((stream - seen).values()) == len(tokens) - windows * 16
    assert epochs[0] != epochs[1]
    # 16-token windows that continue at the end of the file go on at its start.
    ring = np.concatenate([tokens, tokens[:16]])
    places = {tuple(ring[i : i + 16].tolist()) for i in range(len(tokens))}
    assert places.issuperset(epochs[0]) and places.issuperset(epochs[1])


def test_labels_are_the_next_tokens(corpora):
    batch = next(build_loaders(run_config(*corpora), layout()).iterate("train"))
    assert {name: (t.dtype, tuple(t.shape)) for name, t in batch.items()} == {
        "tokens": (torch.int64, (1, 16)),
        "labels": (torch.int64, (1, 16)),
        "loss_mask": (torch.float32, (1, 16)),
        "position_ids": (torch.int64, (1, 16)),
    }
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert batch["tokens"].is_contiguous() and batch["labels"].is_contiguous()
    assert torch.equal(batch["position_ids"][0], torch.arange(16))
    assert batch["loss_mask"].eq(1).all()


def test_weights_decide_the_share_of_each_dataset(corpora, tmp_path):
    """Marked datasets: every token of a sample says which dataset it is from."""
    paths = []
    for number in range(3):
        raw = tmp_path / f"raw{number}.bin"
        np.full(500, number + 1, dtype=np.uint16).tofile(raw)
        paths.append(tmp_path / f"marked{number}")
        prepare = options(
            paths[-1], raw, format="uint16", tokenizer="none", vocab_size=10, eod_id=0
        )
        from megatron_patch.data.prepare import prepare as prepare_dataset

        prepare_dataset(prepare)
    datasets = [
        DatasetConfig(path=str(path), weight=weight)
        for path, weight in zip(paths, (5, 1, 2), strict=True)
    ]
    loaders = build_loaders(run_config(*datasets, split=[1, 0, 0]), layout())
    counts: Counter[int] = Counter()
    for step in range(20):
        rows = rows_of_step([loaders], step)
        assert (rows == rows[:, :1]).all()
        counts.update(rows[:, 0].tolist())
    assert counts == {1: 150, 2: 30, 3: 60}


@QUICK
@given(a=st.integers(1, 97), b=st.integers(0, 98))
def test_splits_divide_whole_documents_and_cover_everything(corpora, a, b):
    b = min(b, 99 - a)
    split = [a / 100, b / 100, (100 - a - b) / 100]
    loaders = build_loaders(run_config(corpora[0], split=split, seq_length=4), layout())
    parts = [p for m in loaders._mixtures.values() for p in m.parts]
    tokens = np.fromfile(f"{corpora[0]}.bin", dtype=np.uint16)
    longest = int(np.diff(np.flatnonzero(tokens == 256), prepend=-1).max())
    at = 0
    for part in parts:
        assert part.source.first == at and (at == 0 or tokens[at - 1] == 256)
        at += part.ring.tokens
    if len(parts) == 3:
        assert at == len(tokens)
    assert abs(parts[0].ring.tokens - split[0] * len(tokens)) <= longest


def test_evaluation_sees_the_same_sequences_every_time_and_with_every_seed(corpora):
    passes = []
    for seed in (1, 1, 2):
        loaders = build_loaders(run_config(*corpora, seed=seed), layout())
        for _ in range(2):
            passes.append(torch.cat([b["tokens"] for b in islice(loaders.iterate("valid"), 24)]))
    assert all(torch.equal(passes[0], other) for other in passes[1:])
    train = build_loaders(run_config(*corpora, seed=2), layout())
    other = build_loaders(run_config(*corpora, seed=3), layout())
    assert not torch.equal(rows_of_step([train], 0), rows_of_step([other], 0))


def test_splits_of_their_own(corpora):
    first, second = (DatasetConfig(path=str(path)) for path in corpora)
    run = run_config(blend=[], train=[first], valid=[second])
    loaders = build_loaders(run, layout())
    assert loaders.has("train") and loaders.has("valid") and not loaders.has("test")
    with pytest.raises(DataError, match=r"there is no test data.*not configured"):
        loaders.iterate("test")
    said = loaders.describe()
    assert any(line.startswith("data test: none") for line in said)
    assert said[-1].startswith("data.split [0.8, 0.1, 0.1]: not used")


def test_what_is_held_out_is_said_to_be_read_by_nothing(corpora):
    said = build_loaders(run_config(*corpora), layout()).describe()
    assert [line for line in said if line.endswith("held out: no run reads it")] == [
        line for line in said if line.startswith("data test")
    ]
    assert any(line.startswith("data test") for line in said)


def naive(tokens: list[int], eod: int) -> tuple[list[int], list[float]]:
    """Positions and loss mask, one token at a time."""
    positions, mask, position = [], [], 0
    for token in tokens:
        positions.append(position)
        mask.append(0.0 if token == eod else 1.0)
        position = 0 if token == eod else position + 1
    return positions, mask


def test_positions_restart_and_ends_carry_no_loss(corpora):
    run = run_config(
        *corpora, eod_mask_loss=True, reset_position_ids=True, seq_length=96, micro_batch_size=4
    )
    loaders = build_loaders(run, layout())
    ends = 0
    for batch in islice(loaders.iterate("train"), 30):
        for row, tokens in enumerate(batch["tokens"].tolist()):
            positions, mask = naive(tokens, eod=256)
            assert batch["position_ids"][row].tolist() == positions
            assert batch["loss_mask"][row].tolist() == mask
            ends += mask.count(0.0)
    assert ends > 50


@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel_ranks_hold_the_parts_of_one_batch(corpora, size):
    """Same samples in the same order; masks and positions are those of the whole sequence."""
    run = run_config(
        *corpora, eod_mask_loss=True, reset_position_ids=True, seq_length=96, micro_batch_size=2
    )
    whole = build_loaders(run, layout(1, 2))
    parts = [build_loaders(run, layout(1, 2, rank, size)) for rank in range(size)]
    assert {part.fingerprint for part in parts} == {whole.fingerprint}
    uneven = False
    for step in range(5):
        expected = whole.batch("train", step, 1)
        found = [part.batch("train", step, 1) for part in parts]
        for name, tensor in expected.items():
            assert torch.equal(unshard([batch[name] for batch in found], dim=1), tensor)
        uneven |= len({float(batch["loss_mask"].sum()) for batch in found}) > 1
    assert uneven  # what a mean per rank would get wrong


def test_a_split_shorter_than_a_sequence_is_refused_when_it_is_needed(corpora):
    with pytest.raises(DataError, match=r"its train part has [\d,]+ tokens, one sequence takes"):
        build_loaders(run_config(*corpora, seq_length=100_000), layout())
    tiny = run_config(*corpora, seq_length=2000, eval_interval=None)
    loaders = build_loaders(tiny, layout())
    assert not loaders.has("valid")
    with pytest.raises(DataError, match="its valid part has"):
        build_loaders(run_config(*corpora, seq_length=2000, eval_interval=5), layout())


def test_a_file_cut_while_it_is_used_is_an_error_with_its_name(corpora, tmp_path):
    """A memory map would end in SIGBUS here."""
    for ending in (".bin", ".idx", ".manifest.json"):
        (tmp_path / f"c{ending}").write_bytes(Path(f"{corpora[0]}{ending}").read_bytes())
    loaders = build_loaders(run_config(tmp_path / "c", num_workers=2), layout())
    batches = loaders.iterate("train")
    next(batches)
    with (tmp_path / "c.bin").open("r+b") as stream:
        stream.truncate(100)
    with pytest.raises(DataError, match=r"c\.bin: ended at byte .* while it was used"):
        for _ in range(100):
            next(batches)


def test_the_fingerprint_names_everything_the_order_depends_on(corpora):
    def fingerprint(*paths: Path, rank: int = 0, size: int = 1, **changes: object) -> str:
        return build_loaders(run_config(*paths, **changes), layout(rank, size)).fingerprint

    base = fingerprint(*corpora)
    for same in ({"train_steps": 99}, {"micro_batch_size": 2}, {"num_workers": 2}):
        assert fingerprint(*corpora, **same) == base
    assert fingerprint(*corpora, rank=1, size=2) == base
    for other in ({"seed": 9}, {"seq_length": 8}, {"global_batch_size": 24}, {"split": [1, 0, 0]}):
        assert fingerprint(*corpora, **other) != base
    assert fingerprint(*reversed(corpora)) != base
    heavy = DatasetConfig(path=str(corpora[0]), weight=2.0)
    assert fingerprint(heavy, corpora[1]) != base
    assert len(json.dumps(base)) == 66


def test_an_identity_is_that_of_the_sequences_not_of_names_and_texts(corpora, tmp_path):
    def identities(*datasets: Path | DatasetConfig, **changes: object) -> dict[str, str]:
        return build_loaders(run_config(*datasets, **changes), layout()).identities

    def blend(*weights: float) -> list[DatasetConfig]:
        pairs = zip(corpora, weights, strict=False)
        return [DatasetConfig(path=str(path), weight=weight) for path, weight in pairs]

    for ending in ENDINGS:
        shutil.copy(f"{corpora[0]}{ending}", tmp_path / f"copy{ending}")
    (tmp_path / "link").symlink_to(tmp_path)
    one = identities(corpora[0])
    assert set(one) == {"train", "valid", "test"} and len(set(one.values())) == 3
    for same in (tmp_path / "copy", tmp_path / "link" / "copy", tmp_path / "." / "link" / "copy"):
        assert identities(same) == one
    assert identities(*blend(7.0)) == one == identities(corpora[0], train_steps=99)
    two = identities(*blend(1.0, 1.0))
    for weights in ((2.0, 2.0), (0.5, 0.5), (0.1, 0.1), (1e-9, 1e-9)):
        assert identities(*blend(*weights)) == two
    assert identities(*blend(0.3, 0.7)) == identities(*blend(30.0, 70.0))
    for other in ((1.0, 2.0), (2.0, 1.0), (1.0, 1.0000001)):
        assert identities(*blend(*other))["train"] != two["train"]
    assert identities(*reversed(corpora))["train"] != two["train"]
    for key, value in {"seed": 9, "seq_length": 8, "global_batch_size": 24}.items():
        assert identities(corpora[0], **{key: value})["train"] != one["train"]
    cut = identities(corpora[0], split=[0.8, 0.2, 0.0])
    assert cut["train"] == one["train"] and cut["valid"] != one["valid"] and "test" not in cut


def test_the_log_says_when_the_corpus_is_shorter_than_the_run(corpora):
    brief = build_loaders(run_config(corpora[0], train_steps=1), layout()).describe()
    assert not any("shorter than the run" in line for line in brief)
    long = build_loaders(run_config(corpora[0], train_steps=5000), layout()).describe()
    assert any("shorter than the run" in line and "epochs" in line for line in long)


def test_a_global_batch_that_does_not_divide_is_refused(corpora):
    with pytest.raises(DataError, match="global_batch_size 12 is not a multiple of"):
        build_loaders(run_config(*corpora), layout(0, 5))


def test_first_and_last_stage_need_data():
    assert [needs_data(stage, 4) for stage in range(4)] == [True, False, False, True]
    assert needs_data(0, 1)


def test_reading_leaves_the_global_random_streams_alone(corpora):
    """torch's DataLoader draws from the default generator when an iterator starts."""
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    batches = build_loaders(run_config(*corpora, num_workers=2), layout()).iterate("train")
    next(batches)
    batches.close()
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # type: ignore[index]


@pytest.mark.gpu
def test_batches_are_pinned_for_a_gpu(corpora):
    """From reader threads and from the training thread alike, with the same content."""
    for workers in (0, 2):
        run = run_config(*corpora, device="cuda", num_workers=workers)
        pinned = build_loaders(run, layout()).iterate("train")
        reference = build_loaders(run_config(*corpora), layout()).iterate("train")
        for batch, other in islice(zip(pinned, reference, strict=False), 6):
            assert all(tensor.is_pinned() for tensor in batch.values())
            assert all(torch.equal(batch[name], other[name]) for name in other)
            assert batch["tokens"].to("cuda", non_blocking=True).device.type == "cuda"
        pinned.close()


def test_a_growing_batch_takes_every_sample_once_on_any_number_of_ranks(corpora):
    from dataclasses import replace

    from megatron_patch.schema.training import batch_sizes

    run = run_config(*corpora[:2], seq_length=4, global_batch_size=8)
    grows = replace(
        run, training=replace(run.training, batch_size_rampup=[2, 2, 20], micro_batch_size=1)
    )
    sizes = grows.training.batch_sizes
    assert [sizes.size(n) for n in range(8)] == [2, 2, 2, 2, 4, 4, 6, 8]
    assert [sizes.first_sample(n) for n in range(8)] == [0, 2, 4, 6, 8, 12, 16, 22]

    def rows(size: int, start: int, steps: int) -> list[torch.Tensor]:
        """Of the steps, in the order of samples."""
        found = []
        ranks = [build_loaders(grows, layout(r, size)) for r in range(size)]
        readers = [iter(one.iterate("train", start_step=start)) for one in ranks]
        for step in range(start, start + steps):
            for _ in range(ranks[0].micro_batches_of(step)):
                found += [next(reader)["tokens"][0] for reader in readers]
        return found

    plain = build_loaders(run, layout())
    flat = [row for batch in islice(plain.iterate("train"), 4) for row in batch["tokens"]]
    alone = rows(1, 0, 7)
    assert all(torch.equal(a, b) for a, b in zip(alone, flat, strict=False))
    assert all(torch.equal(a, b) for a, b in zip(rows(2, 0, 7), alone, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(rows(1, 5, 2), alone[12:], strict=True))
    # What a checkpoint records of it, and what Megatron-Core's own rule says.
    loaders = build_loaders(grows, layout())
    taken = loaders.position(6)
    assert sum(part["samples"] for part in taken["reading"]) == 16
    assert taken["rampup"] == [2, 2, 20] and "rampup" not in plain.position(6)
    assert loaders.fingerprint != plain.fingerprint
    for full, (first, increment, samples) in ((64, (16, 16, 1000)), (48, (8, 4, 777))):
        count, seen = (full - first) // increment, 0
        ramp = batch_sizes(full, (first, increment, samples))
        for batch in range(60):
            steps = seen * count // samples
            size = full if seen > samples else first + steps * increment
            assert (ramp.size(batch), ramp.first_sample(batch)) == (size, seen)
            seen += size
