"""``data:`` contradictions that are found without any file."""

import pytest
from prepared import run_config

from megatron_patch.config import checks
from megatron_patch.schema.data import DataConfig, DatasetConfig, TokenizerConfig

A, B = DatasetConfig(path="a"), DatasetConfig(path="b")
NO_BLEND = {"blend": [], "split": DataConfig().split}


@pytest.mark.parametrize(
    ("changes", "path", "reason"),
    [
        ({"train": [B]}, "data.blend", "contradicts data.train"),
        ({"train": [B], "test": [B]}, "data.blend", "contradicts data.train, data.test"),
        ({**NO_BLEND}, "data.blend", "no training data"),
        ({**NO_BLEND, "valid": [B]}, "data.train", "no training data"),
        ({"blend": [A, DatasetConfig(path="x.bin")]}, "data.blend[1].path", "leave the file's"),
        ({"blend": [DatasetConfig(path="a", weight=0.0)]}, "data.blend[0].weight", "not a pos"),
        ({"blend": [DatasetConfig(path="a", weight=float("nan"))]}, "data.blend[0].weight", "nan"),
        ({"split": [0.5, 0.5]}, "data.split", "has 2 entries"),
        ({"split": [98.0, 1.0, 1.0]}, "data.split", "sums to 100; the shares must sum to 1"),
        ({"split": [1.5, -0.5, 0.0]}, "data.split", "must be a number >= 0"),
        ({"split": [0.0, 0.5, 0.5]}, "data.split", "nothing to train on"),
        ({"split": [1.0, 0.0, 0.0], "eval_interval": 5}, "data.split", "eval_interval 5"),
        ({**NO_BLEND, "train": [A], "eval_interval": 5}, "data.valid", "no validation data"),
        ({"split": [0.9, 0.1, 0.0], "eval_test": True}, "data.split", "eval_test; give test a"),
        ({**NO_BLEND, "train": [A], "eval_test": True}, "data.test", "no test data"),
        ({"num_workers": -1}, "data.num_workers", "-1 is negative"),
        ({"num_workers": 100_000}, "data.num_workers", "100000: at most 64 threads a rank"),
        ({"seed": -1}, "data.seed", "-1 is negative"),
        ({"tokenizer": TokenizerConfig(kind="tiktoken")}, "data.tokenizer.path", "needs the path"),
        ({"tokenizer": TokenizerConfig(path="x")}, "data.tokenizer.path", "reads no file"),
        ({"tokenizer": TokenizerConfig(kind="none")}, "data.tokenizer.vocab_size", "needs the"),
        (
            {"tokenizer": TokenizerConfig(vocab_size=9)},
            "data.tokenizer.vocab_size",
            "knows its own size",
        ),
        (
            {"tokenizer": TokenizerConfig(kind="none", vocab_size=9, eod_id=9)},
            "data.tokenizer.eod_id",
            "not below vocab_size 9",
        ),
        (
            {"tokenizer": TokenizerConfig(kind="none", vocab_size=9), "eod_mask_loss": True},
            "data.eod_mask_loss",
            "set data.tokenizer.eod_id",
        ),
    ],
)
def test_contradictions_are_named(changes, path, reason):
    run = run_config(A, **changes)
    problems = list(checks.problems(run, ["data"]))
    assert [p.path for p in problems] == [path]
    assert reason in problems[0].message


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"blend": [A, B], "split": [0.9, 0.1, 0.0], "eval_interval": 5},
        {**NO_BLEND, "train": [A], "valid": [B], "eval_interval": 5},
        {**NO_BLEND, "train": [A]},
        {"tokenizer": TokenizerConfig(kind="none", vocab_size=9, eod_id=8), "eod_mask_loss": True},
        {"tokenizer": TokenizerConfig(kind="huggingface", path="t.json")},
    ],
)
def test_good_sections_have_no_problems(changes):
    run = run_config(A, **changes)
    assert list(checks.problems(run, ["data"])) == []
