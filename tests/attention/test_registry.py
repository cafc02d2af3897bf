"""The capability table: complete errors, honest choices, and no torch while checking a file."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_cpu import tiny_run

from megatron_patch.attention import registry
from megatron_patch.attention.backends import BACKENDS
from megatron_patch.attention.backends.row import LayerRequirements
from megatron_patch.attention.capabilities import Machine, unsupported
from megatron_patch.attention.registry import BackendError
from megatron_patch.config.checks import attention as checks
from megatron_patch.schema.attention import BackendName
from megatron_patch.schema.model import MLAConfig, MTPConfig
from stable_attention.stabilizers import STABILIZERS

HOPPER = Machine(sm=(9, 0), missing={"transformer_engine.pytorch": "ModuleNotFoundError: none"})
CPU = Machine(missing={"transformer_engine.pytorch": "ModuleNotFoundError: none"})


PLAIN = {
    "kind": "self-attention", "dtype": "bf16", "device": "cuda", "head_dim": 64, "v_head_dim": 64,
    "heads": 8, "kv_heads": 8,
}  # fmt: skip


def facts(**changes) -> LayerRequirements:
    return LayerRequirements(**(PLAIN | changes))


def test_one_error_lists_every_unmet_requirement_and_who_could_serve():
    run = tiny_run(attention={"backend": "sdpa_cudnn"})
    wanted = facts(
        dtype="fp32", head_dim=100, window=(128, 0), sinks=True, thd=True, deterministic=True,
        max_logits=True, cp=2,
    )  # fmt: skip
    with pytest.raises(BackendError) as caught:
        registry.select(run, wanted, machine=Machine(sm=(7, 5)))
    text = str(caught.value)
    for part in (
        "'sdpa_cudnn' cannot serve self-attention", "'fp32'", "head dimension 100",
        "differs from the query/key head dimension", "sliding window [128, 0]", "sinks",
        "packed sequences", "repeatable backward", "maximum logit",
        "context parallelism (2 ranks)", "sm_75; it needs sm_80",
    ):  # fmt: skip
        assert part in text, part
    assert text.endswith("backends that can serve this layer here: reference")
    assert text.count("\n  - ") == 10


VERBS = ("Use ", "Turn ", "Set ", "Change ", "Install ", "Export ", "Remove ", "Reinstall ")


@given(
    st.builds(
        facts,
        dtype=st.sampled_from(["bf16", "fp16", "fp32"]),
        device=st.sampled_from(["cuda", "cpu"]),
        head_dim=st.sampled_from([8, 60, 64, 128, 192, 256, 512, 1001]),
        v_head_dim=st.sampled_from([7, 64, 128]),
        kv_heads=st.sampled_from([1, 8]),
        window=st.sampled_from([None, (128, 0), (-1, 0)]),
        sinks=st.booleans(),
        dropout=st.booleans(),
        thd=st.booleans(),
        deterministic=st.booleans(),
        max_logits=st.booleans(),
        cp=st.sampled_from([1, 2]),
        stabilizer=st.sampled_from(["compensated", "none"]),
    ),
    st.sampled_from([HOPPER, CPU, Machine(sm=(7, 5)), Machine(triton_interpreter=True)]),
)
@settings(max_examples=300)
def test_select_raises_exactly_where_something_is_unmet(wanted, machine):
    """Every complaint is in the error and says what to do; without a machine none is invented."""
    for name in BACKENDS:
        complaints = list(unsupported(name, wanted, machine=machine))
        assert set(unsupported(name, wanted)) <= set(complaints)
        if not complaints:
            assert registry.check(name, wanted, machine=machine).backend == name
            continue
        with pytest.raises(BackendError) as caught:
            registry.check(name, wanted, machine=machine)
        assert all(c in str(caught.value) for c in complaints)
        assert all(any(verb in c for verb in VERBS) for c in complaints), complaints


def test_stable_flash_says_what_is_missing():
    broken = Machine(sm=(9, 0), missing={"stable_attention.api": "ImportError: no kernels"})
    assert any(
        "ImportError: no kernels" in c for c in unsupported("stable_flash", facts(), machine=broken)
    )
    assert not list(unsupported("stable_flash", facts(), machine=HOPPER))
    on_cpu = " ".join(unsupported("stable_flash", facts(device="cpu"), machine=CPU))
    assert "TRITON_INTERPRET=1" in on_cpu
    interpreted = Machine(triton_interpreter=True)
    assert not list(unsupported("stable_flash", facts(device="cpu"), machine=interpreted))


def test_numerics_that_have_no_name_are_had_by_removing_the_key():
    """`sdpa_flash` with `stabilizer: none`, as who wants plain numerics writes it."""
    (complaint,) = unsupported("sdpa_flash", facts(stabilizer="none"))
    assert complaint.endswith("Remove that key, or use stable_flash or fa4")


def test_te_determinism_needs_its_variable(monkeypatch):
    monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", raising=False)
    machine = Machine(sm=(9, 0))
    assert list(unsupported("te", facts(deterministic=True), machine=machine))
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    assert not list(unsupported("te", facts(deterministic=True), machine=machine))


def test_one_kind_of_layer_a_line():
    run = tiny_run(
        {"num_layers": 6, "window": [4, 0], "window_skip_freq": 3, "mtp": MTPConfig()},
        parallel={"tensor_model_parallel_size": 2},
    )
    kinds = registry.layer_kinds(run)
    assert [k.kind for k in kinds] == [
        "self-attention, window [4, 0]",
        "self-attention",
        "multi-token prediction: self-attention, window [4, 0]",
    ]
    assert kinds[0].heads == 2
    line = registry.select(run, kinds[0], machine=CPU).line()
    assert line.startswith("attention: self-attention, window [4, 0] -> reference: ")


def test_the_startup_line_says_when_numerics_are_not_stabilized():
    said = registry.check("stable_flash", facts(), machine=HOPPER).line()
    assert said.endswith("compensated numerics at flash speed")
    for name in set(STABILIZERS) - {"compensated"}:
        line = registry.check("stable_flash", facts(stabilizer=name), machine=HOPPER).line()
        assert f"; stabilizer {name}: " in line
        assert "compensated" not in line.replace("compensated_projected", "")


def test_latent_attention_reports_its_own_head_dims():
    run = tiny_run({"mla": MLAConfig(qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128)})
    (kind,) = registry.layer_kinds(run)
    assert (kind.head_dim, kind.v_head_dim, kind.kv_heads) == (192, 128, 4)
    complaints = list(unsupported("mcore_local", kind))
    assert len(complaints) == 1 and "differs" in complaints[0]
    same = tiny_run({"mla": MLAConfig(qk_head_dim=8, qk_pos_emb_head_dim=8, v_head_dim=16)})
    assert "k_channels" in next(unsupported("mcore_local", registry.layer_kinds(same)[0]))


def test_configuration_problems_name_the_key():
    run = tiny_run(
        {"softmax_type": "learnable"},
        attention={"backend": "sdpa_flash", "stabilizer": "none", "allow_broken": True},
    )
    found = [(p.path, p.message) for p in checks.problems(run)]
    assert [path for path, _ in found] == ["attention.allow_broken"] + ["attention.backend"] * 4
    text = "\n".join(message for _, message in found)
    for part in ("training.device is 'cpu'", "training.precision is 'fp32'", "sinks", "stabilizer"):
        assert part in text


@pytest.mark.parametrize(
    ("attention", "path"),
    [
        ({"stabilizer": "paper_bf16"}, "attention.stabilizer"),
        ({"allow_broken": True}, "attention.allow_broken"),
        ({"o_lo": "int8", "stabilizer": "none"}, "attention.o_lo"),
        ({"stabilizer": "dynamic_max", "dynamic_max_beta": 1.0}, "attention.dynamic_max_beta"),
        ({"stabilizer": "dynamic_max", "dynamic_max_eps": -1.0}, "attention.dynamic_max_eps"),
    ],
)
def test_contradictions(attention, path):
    run = tiny_run(
        attention={"backend": "stable_flash", **attention},
        training={"precision": "bf16", "device": "cuda"},
    )
    assert [p.path for p in checks.problems(run)] == [path]


def test_table_has_a_row_for_every_backend_and_says_what_runs_here():
    lines = registry.table().splitlines()
    assert lines[0].split()[0] == "backend" and lines[0].rstrip().endswith("here")
    assert [line.split()[0] for line in lines[1 : 1 + len(BACKENDS)]] == list(BACKENDS)
    assert lines[1 + list(BACKENDS).index("reference")].endswith("yes")


def test_a_row_is_whole_and_every_name_of_the_schema_has_one():
    """What other rooms ask of a row: one file a backend, no list of names elsewhere."""
    assert set(get_args(BackendName)) == set(BACKENDS)
    for name, row in BACKENDS.items():
        assert row.name == name and (row.run is None) != (row.module is None)
        assert not row.chunk_primitives or (row.cp and row.run)
        assert not row.switchable or row.run  # the guard exchanges functions
    from megatron_patch.context_parallel.api import BACKENDS as PRIMITIVES

    ours = {name: row.chunk_primitives for name, row in BACKENDS.items() if row.chunk_primitives}
    assert ours == PRIMITIVES


BOTH = Machine(sm=(9, 0), missing={"transformer_engine.pytorch": "none"})
NO_FA4 = Machine(sm=(9, 0), missing={BACKENDS["fa4"].package: "it is not installed"})


def test_the_startup_line_says_whose_backward_runs_and_what_else_could_be_asked():
    def kernel(machine=NO_FA4, name="stable_flash", **changes):
        return registry.check(name, facts(**changes), machine=machine).kernel

    ours = "stable_attention (Triton)"
    own = f"{ours}, backward own (or attention.backward:"
    assert kernel() == kernel(sinks=True) == f"{own} sdpa_cudnn, sdpa_flash)"
    assert kernel(BOTH) == f"{own} sdpa_cudnn, sdpa_flash, fa4)"
    assert kernel(head_dim=256, v_head_dim=256) == f"{own} sdpa_flash)"
    assert kernel(stabilizer="projected", dropout=True) == f"{own} own_x2)"
    assert kernel(backward="own") == kernel(cp=2) == kernel(window=(4, 0)) == ours
    x2 = kernel(backward="own_x2", stabilizer="projected")
    assert x2 == f"{ours}, backward own_x2"
    assert kernel(backward="sdpa_cudnn") == f"{ours}, backward sdpa_cudnn"
    assert kernel(BOTH, "fa4") == f"FlashAttention-4, backward; forward {ours}"
    assert kernel(BOTH, "fa4", stabilizer="none") == "FlashAttention-4"


def test_a_borrowed_backward_is_refused_with_all_it_lacks():
    wanted = facts(backward="sdpa_cudnn", dropout=True, window=(4, 0), cp=2, deterministic=True)
    complaints = list(unsupported("stable_flash", wanted, machine=NO_FA4))
    assert len(complaints) == 4
    for complaint, part in zip(
        complaints, ("dropout", "window", "repeatable", "context parallelism"), strict=True
    ):
        assert complaint.startswith("attention.backward 'sdpa_cudnn': ")
        assert part in complaint
        assert complaint.endswith(". Use attention.backward: own")
    x2 = facts(backward="own_x2", dropout=True, window=(4, 0), cp=2, stabilizer="paper_bf16")
    complaints = list(unsupported("stable_flash", x2, machine=NO_FA4))
    assert [x.partition(": ")[2][:20] for x in complaints] == [
        "context parallelism ",
        "attention.stabilizer",
    ]
    # Those are the forward's, which is our own.
    mild = facts(backward="sdpa_cudnn", sinks=True, max_logits=True, stabilizer="none")
    assert not list(unsupported("stable_flash", mild, machine=NO_FA4))
    for stabilizer in ("projected", "compensated_projected", "paper_bf16"):
        (complaint,) = unsupported("stable_flash", facts(backward="fa4", stabilizer=stabilizer))
        assert f"attention.stabilizer '{stabilizer}' changes more of the backward" in complaint
    (complaint,) = unsupported("stable_flash", facts(backward="fa4"), machine=NO_FA4)
    assert "flash-attn-4==" in complaint and "it is not installed" in complaint


@pytest.mark.parametrize(("changes", "text"), [
    ({"cp": 2, "cp_comm_type": "p2p", "window": (8, 0)}, "sliding window [8, 0] under"),
    ({"cp": 2, "cp_comm_type": "all_gather", "sinks": True}, "attention sinks under"),
    ({"fp8": True}, "FP8 attention with head dimension 64"),
    ({"fp8": True, "head_dim": 128, "v_head_dim": 128, "sinks": True}, "FP8 attention with attent"),
])  # fmt: skip
def test_transformer_engines_limits_are_said_before_a_start(changes, text):
    (complaint,) = unsupported("te", facts(**changes))
    assert complaint.startswith(text) and ". Use " in complaint
    for allowed in ({"window": (8, 0)}, {"sinks": True}):
        assert not list(unsupported("te", facts(cp=2, cp_comm_type="a2a", **allowed)))
    assert not list(unsupported("te", facts(fp8=True, head_dim=128, v_head_dim=128)))
    (complaint,) = unsupported("stable_flash", facts(fp8=True))
    assert "attention.fp8" in complaint and complaint.endswith("use te")


def test_fa4_says_what_to_install_and_has_two_stabilizers():
    (complaint,) = unsupported("fa4", facts(), machine=NO_FA4)
    assert "it is not installed" in complaint and "pip install flash-attn-4==" in complaint
    (complaint,) = unsupported("fa4", facts(stabilizer="dynamic_max"), machine=BOTH)
    assert complaint.endswith("Remove that key, or use stable_flash")
    assert not list(unsupported("fa4", facts(stabilizer="none"), machine=BOTH))


def test_a_distribution_is_looked_up_by_its_version():
    pytest_version = f"pytest=={pytest.__version__}"
    assert registry._import_error(pytest_version) == ""
    assert registry._import_error("pytest==0") == f"{pytest.__version__} is installed"
    assert registry._import_error("no-such-distribution==1") == "it is not installed"


def test_a_backward_without_effect_is_refused():
    run = tiny_run(attention={"backend": "sdpa_flash", "backward": "sdpa_cudnn"})
    (problem,) = (p for p in checks.problems(run) if p.path == "attention.backward")
    assert "'sdpa_cudnn' has no effect with attention.backend 'sdpa_flash'" in str(problem)


def test_int8_attention_says_what_it_has_not():
    wanted = facts(head_dim=96, v_head_dim=96, sinks=True, dropout=True, max_logits=True, cp=2)
    text = "\n".join(unsupported("sage_int8", wanted, machine=HOPPER))
    for part in ("64..128 in multiples of 64", "sinks", "dropout", "maximum logit", "parallelism"):
        assert part in text
    assert not list(unsupported("sage_int8", facts(window=(9, 0), thd=True, deterministic=True)))


@pytest.mark.parametrize(
    ("model", "attention", "kinds"),
    [
        # As many hidden channels a head as no kernel takes: latent attention has its own.
        ({"mla": MLAConfig(qk_head_dim=8, qk_pos_emb_head_dim=8, v_head_dim=16),
          "hidden_size": 36}, {}, 1),
        ({"window": [3, 0], "window_skip_freq": 2, "softmax_type": "learnable"},
         {"o_lo": "int8"}, 2),
        ({"attention_dropout": 0.1}, {"stabilizer": "paper_bf16", "allow_broken": True}, 1),
    ],
    ids=["mla", "window", "dropout"],
)  # fmt: skip
def test_the_warm_up_of_a_node_runs_every_kind_of_layer(model, attention, kinds, capsys):
    run = tiny_run(model, attention={"backend": "stable_flash"} | attention)
    run = dataclasses.replace(run, training=dataclasses.replace(run.training, precision="bf16"))
    warm = BACKENDS["stable_flash"].warm
    assert warm is not None
    warm(run, registry.layer_kinds(run))
    assert len(capsys.readouterr().out.splitlines()) == kinds
