"""Keys that one value of another key makes idle: said, and no difference between two runs."""

from __future__ import annotations

import copy

import pytest
from minimal_config import MINIMAL

from megatron_patch import config
from megatron_patch.checkpoint import last_checkpoint
from megatron_patch.schema.effective import EARLIER, changes
from megatron_patch.schema.switches import SWITCHES

FULL = ["training.recompute.granularity=full"]
NONE = ["model.position_embedding=none"]
CONSTANT = ["optimizer.schedule=constant"]
MOE = ["model.moe.num_experts=4"]
WSD = ["optimizer.schedule=wsd", "optimizer.wsd_decay_steps=4"]
SAGE = ["attention.backend=sage_int8", "training.device=cuda", "model.kv_channels=64",
        "model.num_query_groups=2"]  # fmt: skip
DYNAMIC = ["attention.stabilizer=dynamic_max"]
WANDB = ["logging.wandb.enabled=true"]
REWIND = ["faults.spike.action=rewind"]
IMAGE = ["cluster.container.image=/x.sqsh"]
SEPARATE = ["data.blend=[]", "data.train=[{path: a}]", "data.valid=[{path: b}]"]
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "model.rotary_base": ("5e5", NONE, []),
    "model.rotary_percent": ("0.5", NONE, []),
    "model.moe.aux_loss_coeff": ("0.5", [*MOE, "model.moe.load_balancing=none"], MOE),
    "training.recompute.modules": (
        "[core_attn]",
        FULL,
        ["training.recompute.granularity=selective"],
    ),
    "training.recompute.method": ("block", [], FULL),
    "training.recompute.num_layers": ("2", [], FULL),
    "optimizer.min_lr": ("1e-5", CONSTANT, []),
    "optimizer.decay_steps": ("9", CONSTANT, []),
    "optimizer.wsd_decay_steps": ("3", [], WSD),
    "optimizer.wsd_decay_style": ("cosine", [], WSD),
    "optimizer.muon_momentum": ("0.9", [], ["optimizer.name=muon"]),
    "data.split": ("[0.9, 0.05, 0.05]", SEPARATE, []),
    "attention.dynamic_max_beta": ("3", [], DYNAMIC),
    "attention.dynamic_max_eps": ("0.5", [], DYNAMIC),
    "attention.int8.smooth_k": ("false", [], SAGE),
    "attention.int8.smooth_q": ("true", [], SAGE),
    "attention.int8.scales": ("tile", [], SAGE),
    "attention.int8.normalizer": ("paper", [], SAGE),
    "attention.int8.projection": ("false", [], SAGE),
    "parallel.cp_gradient_wire": ("bf16", [], ["parallel.context_parallel_size=2"]),
    "parallel.expert_tensor_parallel_size": ("2", [], MOE),
    "logging.wandb.project": ("mine", [], WANDB),
    "logging.wandb.entity": ("we", [], WANDB),
    "logging.wandb.mode": ("offline", [], WANDB),
    "stability.capture_heads": (
        "[1]",
        ["stability.capture_at=[danger]"],
        ["stability.capture_steps=[3]", "stability.capture_layers=[0]"],
    ),
    "faults.spike.rewind_margin": ("3", [], REWIND),
    "faults.spike.rewind_skip": ("3", ["faults.spike.action=skip"], REWIND),
    "faults.spike.max_rewinds": ("9", [], REWIND),
    "cluster.container.mounts": ("[/a:/b]", [], IMAGE),
    "cluster.container.python": ("/opt/python", [], IMAGE),
    "cluster.chain_length": ("3", [], ["cluster.continuation=chain"]),
    "cluster.max_requeues": ("9", ["cluster.continuation=chain"], []),
}
"""Key -> (another value, settings under which nothing reads it, settings under which it counts)."""


@pytest.fixture
def minimal(write):
    path = write(MINIMAL)
    return lambda *keys: config.load(path, list(keys))


@pytest.mark.parametrize("key", SWITCHES)
def test_what_nothing_reads_is_refused(minimal, key):
    value, unread, read = CASES[key]
    switch = SWITCHES[key]
    minimal(*read, f"{key}={value}")
    if any(text.startswith(f"{switch.key}=") for text in unread) and not switch.strict:
        minimal(*unread, f"{key}={value}")  # who wrote the switch knows
        return
    with pytest.raises(config.ConfigError) as caught:
        minimal(*unread, f"{key}={value}")
    (problem,) = caught.value.problems
    assert problem.path == key and problem.where is not None
    assert f" has no effect with {switch.key}: " in problem.message
    assert switch.key in problem.message[-99:]


def test_a_switch_that_was_turned_off_keeps_its_keys(minimal):
    keys = ["logging.wandb.project=mine"]
    with pytest.raises(config.ConfigError, match="no effect with logging"):
        minimal(*keys)
    minimal("logging.wandb.enabled=false", *keys)


def test_a_run_that_has_saved_goes_on_with_what_an_earlier_version_took(minimal, tmp_path):
    keys = [f"run_dir={tmp_path}", "training.recompute.modules=[core_attn]"]
    with pytest.raises(config.ConfigError, match="has no effect"):
        minimal(*keys)
    (tmp_path / last_checkpoint.FILE).write_text("{}")
    minimal(*keys)


@pytest.mark.parametrize("key", SWITCHES)
def test_what_nothing_reads_is_no_difference(minimal, key):
    """Runs of versions that took it go on without it, and it counts where it is read."""
    value, unread, read = CASES[key]
    before = copy.deepcopy(minimal(*unread).tree)
    set_to = section = copy.deepcopy(before)
    *above, name = key.split(".")
    counted = minimal(*read, f"{key}={value}").tree
    found = counted
    for part in above:
        section, found = section[part], found[part]
    section[name] = found[name]
    assert changes(set_to, before) == []
    assert [where for where, _, _ in changes(minimal(*read).tree, counted) if key in where]


def test_the_default_of_an_earlier_version_is_no_wish(minimal):
    split = f"data.split={EARLIER['data.split']}"
    assert minimal(*SEPARATE, split).config.data.split == EARLIER["data.split"]
