"""What a protocol file may say, and that the shipped ones can be run."""

from pathlib import Path

import pytest
from protocol import read

from megatron_patch.schema.problem import ConfigError

PROTOCOLS = Path(__file__).resolve().parents[2] / "research" / "protocols"


@pytest.mark.parametrize("path", sorted(PROTOCOLS.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_protocol_is_valid(path):
    experiment = read(path)
    ids = [run.id for run in experiment.runs]
    assert len(set(ids)) == len(ids) >= 2
    for run in experiment.runs:
        config = experiment.load(run).config
        assert config.training.train_steps == experiment.protocol.steps
        assert config.training.seed == run.seed and config.name == run.id
        assert run.base is None or run.base in ids


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("name: tiny", "name: Tiny", "use at most 48 of a-z 0-9 _"),
        ("steps: 100", "steps: 0", "steps: 0: must be at least 1"),
        ("seeds: [1, 2]", "seeds: [1, 1]", "name at least one seed, none twice"),
        ("name: a,", "name: b,", "'b' is the name of two cells"),
        ("name: a,", "name: s1,", "no seed's name"),
        ("name: a,", "name: a, variant: nope,", "'nope': use one of plain, low_order_o"),
        ("name: a,", "name: a, variant: low_order_o,", "it changes stable_flash (run a-s1 of"),
        ("name: a,", "name: a, follow: 0,", "follow: 0: must be at least 1, or null"),
        ("name: a,", "name: a, before: 5,", "before needs it: name a cell"),
        ("name: a,", "name: a, from_cell: c,", "'c': name a cell that starts at step 0 (b)"),
        ("name: a,", "name: a, from_cell: b,", "[2]: b has no runs of these seeds"),
        ("seeds: [1]}", "from_cell: a}", "other cells start from this one's checkpoints"),
        ("lr=2e-3", "lrr=2e-3", "optimizer.lrr"),
        ("steps: 100", "steps: 100\nchecked_steps: 3", "checked_steps"),
        ("steps: 100", "steps: 100\nrivals: 3", "rivals: 3: must be at least 4 steps, or 0"),
        ("steps: 100", "steps: 100\nsingle_pass: true\ngpus_per_run: 3", "cannot be shared"),
    ],
)
def test_what_is_refused(protocol, old, new, told):
    text = protocol.read_text()
    assert old in text
    protocol.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        read(protocol)
    assert told in str(caught.value)


def test_runs_of_a_seed_come_together_and_differ_in_their_cell_only(protocol):
    runs = read(protocol, ["optimizer.eps=1e-6"]).runs
    assert [run.id for run in runs] == ["a-s1", "b-s1", "a-s2"]
    assert runs[0].overrides == ("optimizer.eps=1e-6", "training.seed=1")
    assert set(runs[1].overrides) - set(runs[0].overrides) == {"optimizer.lr=2e-3"}


def test_a_batch_is_cut_for_the_gpus_of_its_run(protocol):
    protocol.write_text(
        protocol.read_text().replace("seeds: [1, 2]", "single_pass: true\nseeds: [1, 2]")
    )
    for gpus in (1, 2, 4):
        run = read(protocol, gpus_per_run=gpus).runs[0]
        assert run.gpus == gpus
        assert run.overrides[-1] == f"training.micro_batch_size={4 // gpus}"
    kept = read(protocol, ["training.micro_batch_size=1"], 2).runs[0].overrides
    assert [key for key in kept if "micro_batch" in key] == ["training.micro_batch_size=1"]
