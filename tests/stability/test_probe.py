"""The probe command: captures in, the right figures for the right backend out."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from regimes import make_regime

from megatron_patch.cli import app
from megatron_patch.stability import probe as probing
from megatron_patch.stability import probe_report
from megatron_patch.stability.capture import CaptureFile, file_name
from stable_attention.probes import BackendResult

CPU = torch.device("cpu")
# Captures of failing runs as `capture_at` leaves them (research/report.md says how they were made);
# the synthetic ones below stand in for them always, and are never put there.
CAPTURED = sorted((Path(__file__).parent / "captures").glob("*.pt"))
LARGEST = 5_000_000


def capture(regime: str, *, heads: int = 2, n: int = 96, **changes: object) -> CaptureFile:
    """A regime of stable_attention as if a run had captured it, sbhd."""
    q, k, v, dout = (x[None].permute(2, 0, 1, 3) for x in make_regime(regime, heads=heads, n=n))
    facts: dict = {
        "step": 4000,
        "layer": 1,
        "layer_name": "decoder.layers.1",
        "micro_batch": 0,
        "dp_rank": 0,
        "heads": list(range(heads)),
        "kv_heads": list(range(heads)),
        "head_to_kv": list(range(heads)),
        "q": q,
        "k": k,
        "v": v,
        "out": torch.zeros_like(v),
        "dout": dout,
        "sinks": None,
        "wq_norm": torch.arange(1.0, heads + 1),
        "wk_norm": None,
        "norms_exact": True,
        "scale": 0.125,
        "causal": True,
        "window": None,
        "dropout_p": 0.0,
        "backend": "stable_flash",
        "stabilizer": "none",
        "precision": "bf16",
        "run_name": "synthetic",
        "trigger": "step",
    }
    return CaptureFile(**facts | changes)


def probe(one: CaptureFile, names: str = "all") -> dict:
    return probing.probe_capture(one, probing.choose(names, CPU), device=CPU, skip_rows=32)


def test_every_backend_has_figures_on_a_failing_regime():
    found = probe(capture("one", n=64))
    backends = found["backends"]
    assert {"stable_flash compensated", "stable_flash none", "reference", "sdpa_math"} <= set(
        backends
    )
    assert not [name for name, cell in backends.items() if "error" in cell]
    # Kernel and emulation agree, and the float64 truth separates them from one another.
    for name in ("compensated", "none", "low_order_o", "consistent_sum", "fp32 O"):
        kernel, emulation = backends[f"stable_flash {name}"], backends[f"emulated {name}"]
        assert kernel["rms"] == pytest.approx(emulation["rms"], rel=0.2, abs=1e-6), name
    assert backends["stable_flash none"]["dq_error"] > 0.5
    assert backends["reference"]["rms"] < 1e-6 and backends["reference"]["dq_error"] < 0.01
    # Unfused attention has no delta that could be wrong.
    assert set(backends["sdpa_math"]) == {"dq_error", "dk_error", "dq_bias"}
    assert found["inputs"]["kappa"] > 50 and found["inputs"]["dead_zone"] > 0.5
    assert found["capture"]["wq_norm_max"] == 2.0 and "wk_norm_max" not in found["capture"]
    json.dumps(found, allow_nan=False)


def gate(one: CaptureFile, stabilizer: str, *, kernel: bool = True) -> list[str]:
    """What numerics must hold to on tensors of a failing run; empty if they do.

    Limits are relative to plain numerics on the same tensors: real heads differ in size by far more
    than numerics do. Without ``kernel`` the emulation stands for it: a kernel on a thousand tokens
    needs a GPU.
    """
    name = f"stable_flash {stabilizer}" if kernel else f"emulated {stabilizer}"
    found = probe(one, f"{name},emulated none")["backends"]
    cell, plain = found[name], found["emulated none"]
    limits = {"rms": plain["rms"] / 4, "dq_error": plain["dq_error"] / 2}
    return [f"{n} {cell[n]:.1e} > {limit:.1e}" for n, limit in limits.items() if cell[n] > limit]


def check_evidence(one: CaptureFile, *, kernel: bool) -> None:
    """A capture of a failing run: plain numerics do harm on it, and compensated ones do not."""
    plain = probe(one, "emulated none")["backends"]["emulated none"]
    assert plain["dq_error"] > 0.05, "plain numerics do no harm here: this shows no failing run"
    assert gate(one, "none", kernel=kernel) != []
    assert gate(one, "compensated", kernel=kernel) == []


@pytest.mark.parametrize("regime", ["tie2s", "near2"])
def test_failing_tensors_pass_compensated_and_fail_none(regime):
    """The regression test of the default numerics: without them it fails."""
    check_evidence(capture(regime), kernel=True)


def check_shipped(path: Path) -> None:
    """A capture that ships: small, and of a run of the product with plain numerics."""
    from megatron_patch.stability import capture as captures

    one = captures.CaptureFile.load(path)
    assert path.stat().st_size < LARGEST
    assert one.run_name != "synthetic" and one.trigger != "step"
    assert (one.backend, one.stabilizer) == ("stable_flash", "none") or one.backend.startswith(
        "sdpa_"
    )
    check_evidence(one, kernel=torch.cuda.is_available())


@pytest.mark.parametrize("path", CAPTURED, ids=lambda p: p.name)
def test_captures_of_failing_runs(path):
    """What a run of the product left; collects nothing while there is none."""
    check_shipped(path)


def test_the_check_of_shipped_captures(tmp_path):
    """It works on a capture as large as a real one, and takes nothing that proves nothing."""
    facts = {"n": 1024, "heads": 4, "run_name": "stand-in", "trigger": "grad_norm"}
    good = tmp_path / file_name(5000, 1, 0, "grad_norm")
    capture("tie2s", **facts).save(good)
    check_shipped(good)
    for change in ({"run_name": "synthetic"}, {"trigger": "step"}, {"stabilizer": "compensated"}):
        other = tmp_path / "other.pt"
        capture("tie2s", **facts | change).save(other)
        with pytest.raises(AssertionError):
            check_shipped(other)
    harmless = tmp_path / "harmless.pt"
    capture("diffuse", **facts).save(harmless)
    with pytest.raises(AssertionError, match="no failing run"):
        check_shipped(harmless)


def test_summaries_leave_out_emulations_of_what_was_measured():
    found = {"emulated none": {}, "stable_flash none": {}, "sdpa_flash": {}, "emulated lag": {},
             "emulated paper": {}, "stable_flash paper": {"error": "no GPU"}}  # fmt: skip
    kept = [
        "stable_flash none",
        "sdpa_flash",
        "emulated lag",
        "emulated paper",
        "stable_flash paper",
    ]
    assert probe_report.shown(found) == kept


def test_grouped_heads_and_windows():
    """head_to_kv says which key head a query head reads, also when heads were picked out."""
    two = capture("gauss", heads=3)
    shared = capture(
        "gauss", heads=3, k=two.k[:, :, [2, 0]], v=two.v[:, :, [2, 0]], kv_heads=[2, 0],
        head_to_kv=[0, 0, 1], window=[20, 0],
    )  # fmt: skip
    spread = capture(
        "gauss", heads=3, k=two.k[:, :, [2, 2, 0]], v=two.v[:, :, [2, 2, 0]], window=[20, 0]
    )
    names = "reference,emulated none"
    a, b = probe(shared, names)["backends"], probe(spread, names)["backends"]
    assert a == b and a["reference"]["rms"] < 1e-5
    cell = probe(shared, "sdpa_math")["backends"]["sdpa_math"]
    assert "no sliding window" in cell["error"]


def test_the_command(tmp_path, capsys):
    run = tmp_path / "run"
    for step, regime in ((100, "diffuse"), (4000, "tie2s")):
        capture(regime, step=step).save(run / "captures" / file_name(step, 1, 0))
    command = [
        "probe",
        str(run),
        "--backends",
        "reference,emulated none",
        "--out",
        str(tmp_path / "p"),
    ]
    assert app.run([*command, "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert said.index("step 100,") < said.index("step 4,000,") and "| emulated none |" in said
    result = json.loads((tmp_path / "p" / "probe.json").read_text())
    assert [c["file"] for c in result["captures"]] == sorted(c["file"] for c in result["captures"])
    assert result["environment"]["torch"] == torch.__version__
    assert (tmp_path / "p" / "probe.png").stat().st_size > 5_000
    assert "coherence" in (tmp_path / "p" / "probe.md").read_text()


def test_a_backend_without_delta_is_judged_by_its_gradients(tmp_path, capsys):
    capture("gauss").save(tmp_path / "a.pt")
    command = ["probe", str(tmp_path / "a.pt"), "--backends", "sdpa_math", "--device", "cpu"]
    assert app.run(command) == 0
    said = capsys.readouterr()
    assert "| sdpa_math |" in said.out and "no finite figure" not in said.err


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_name_can_be_asked_for(device):
    """Commas part names, so none may have one."""
    table = probing.backends(torch.device(device))
    for name in table:
        assert name in probing.choose(name, torch.device(device))


def test_what_is_refused(tmp_path, capsys):
    (tmp_path / "code.pt").write_bytes(b"not a capture")
    cases = (
        ([str(tmp_path)], "not a capture"),
        ([str(tmp_path / "gone.pt")], "no such file"),
        ([str(tmp_path / "code.pt"), "--backends", "magic"], "cannot be probed on cpu"),
    )
    for arguments, message in cases:
        assert app.run(["probe", *arguments, "--device", "cpu"]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "code.pt").unlink()
    assert app.run(["probe", str(tmp_path)]) == 2
    assert "stability.capture_steps" in capsys.readouterr().err
    with pytest.raises(probing.ProbeError, match="attention sinks"):
        probe(capture("gauss", sinks=torch.zeros(2)), "reference")


@pytest.mark.parametrize(
    "changes", [{"q": None}, {"k": torch.zeros(96, 1, 2, 4)}, {"window": []}, {"heads": ["a", "b"]}]
)
def test_a_capture_that_contradicts_itself_is_one_line(tmp_path, capsys, changes):
    dataclasses.replace(capture("gauss"), **changes).save(tmp_path / "odd.pt")
    assert app.run(["probe", str(tmp_path / "odd.pt"), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "odd.pt" in said and next(iter(changes)) in said


def test_a_damaged_capture_leaves_the_others_their_figures(tmp_path, capsys):
    good, out = capture("gauss"), tmp_path / "out"
    folder = tmp_path / "captures"
    for name in ("a", "c", "e"):
        good.save(folder / f"{name}.pt")
    (folder / "b.pt").write_bytes((folder / "a.pt").read_bytes()[:5000])
    dataclasses.replace(good, sinks=torch.zeros(2)).save(folder / "d.pt")
    (folder / "e.pt").unlink()
    (folder / "e.pt").mkdir()  # cannot be opened, whoever asks
    command = ["probe", str(folder), "--backends", "sdpa_math", "--device", "cpu"]
    assert app.run([*command, "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert said.out.count("| sdpa_math |") == 2
    first, second, third, last = said.err.splitlines()
    assert "b.pt is not a capture: the file is damaged or cut off" in first and "e.pt" in third
    assert "d.pt: " in second and "attention sinks" in second
    assert "3 of 5 captures left out" in last
    result = json.loads((out / "probe.json").read_text())
    assert [one["file"] for one in result["captures"]] == ["a.pt", "c.pt"]
    assert [one["file"] for one in result["left_out"]] == ["b.pt", "d.pt", "e.pt"]
    assert "Left out: " in (out / "probe.md").read_text() and (out / "probe.png").is_file()
    for name in ("a.pt", "c.pt"):
        (folder / name).unlink()
    assert app.run(command) == 2
    said = capsys.readouterr()
    assert "none of the 3 captures can be probed" in said.err and "b.pt" in said.err


def test_an_out_that_cannot_be_written_is_one_line(tmp_path, capsys):
    capture("gauss").save(tmp_path / "a.pt")
    taken = tmp_path / "taken"
    taken.write_text("mine")
    (tmp_path / "busy" / "probe.json").mkdir(parents=True)
    command = ["probe", str(tmp_path / "a.pt"), "--backends", "sdpa_math", "--device", "cpu"]
    # A file, below a file, where nobody may write, and where the name of a file is taken.
    for out in (taken, taken / "below", Path("/proc/probe"), tmp_path / "busy"):
        assert app.run([*command, "--out", str(out)]) == 2, out
        said = capsys.readouterr()
        assert said.err.count("\n") == 1 and f"--out {out}: " in said.err
        assert "cannot be written" in said.err and "name a directory" in said.err
        # Nothing is computed for a folder that is known to be unfit.
        assert ("| sdpa_math |" in said.out) == (out.name == "busy")
    assert taken.read_text() == "mine"


def test_a_backend_that_raises_leaves_the_others_their_figures():
    def broken(_: probing.Tensors):
        raise RuntimeError("no kernel\nand more")

    runners = {"broken": broken} | probing.choose("reference", CPU)
    found = probing.probe_capture(capture("gauss"), runners, device=CPU, skip_rows=8)
    assert found["backends"]["broken"] == {"error": "RuntimeError: no kernel"}
    text = probe_report.markdown(found)
    assert "broken: not measured, RuntimeError: no kernel" in text and "| reference |" in text


def constants(name: str) -> float:
    raise AssertionError(f"{name} is no JSON")


def test_a_capture_that_is_not_finite_says_so(tmp_path, capsys):
    """NaN in, and no figure that looks like one out: not in the table, not in the JSON."""
    one = capture("gauss")
    one.dout[70, 0, 1, 3] = math.nan
    one.save(tmp_path / "a.pt")
    out = tmp_path / "out"
    command = ["probe", str(tmp_path / "a.pt"), "--backends", "reference,emulated none",
               "--device", "cpu", "--out", str(out)]  # fmt: skip
    assert app.run(command) == 1
    said = capsys.readouterr()
    assert "a.pt: no finite figure of any backend (reference, emulated none)" in said.err
    assert said.out.count("Values that are not finite in the capture: 1 of dout.") == 1
    (row,) = [line for line in said.out.splitlines() if line.startswith("| reference")]
    assert [c.strip() for c in row.split("|")[2:-1]] == ["not finite"] * 8
    assert "kappa not finite; repeated maximum in 0.00%" in said.out and "inf;" not in said.out
    text = (out / "probe.json").read_text()
    found = json.loads(text, parse_constant=constants)["captures"][0]
    assert found["capture"]["not_finite"] == {"dout": 1} and found["inputs"]["kappa"] is None
    cell = found["backends"]["reference"]
    assert cell["t"] is cell["coherence"] is cell["dq_error"] is None
    assert cell["lse_error"] is not None  # dO has no part in it
    assert (out / "probe.png").is_file() and "not finite" in (out / "probe.md").read_text()


def test_norms_that_are_lower_bounds_are_not_shown_as_the_norms():
    found = probe(capture("gauss"), "reference")
    assert found["capture"]["norms_exact"]
    assert "Largest spectral norm over heads: W_Q 2." in probe_report.markdown(found)
    found = probe(capture("gauss", norms_exact=False), "reference")
    assert "over heads (from below: a few power iterations): W_Q 2." in probe_report.markdown(found)


def test_the_variant_that_computed_a_capture_is_among_its_facts():
    assert "variant" not in probe(capture("gauss", n=48), "sdpa_math")["capture"]
    found = probe(capture("gauss", n=48, variant="k_centered"), "sdpa_math")
    assert found["capture"]["variant"] == "k_centered"
    assert "under stable_flash/none, variant k_centered; rows" in probe_report.markdown(found)


def test_shares_of_rows_that_are_not_finite_are_not_zero():
    one = capture("gauss")
    one.q[70, 0, 1, 3] = math.inf
    found = probe(one, "reference")
    assert found["capture"]["not_finite"] == {"q": 1}
    for name in ("kappa", "repeated_max", "two_round_to_one", "dead_zone", "top_probability"):
        assert found["inputs"][name] is None, name
    assert set(found["backends"]["reference"].values()) == {None}
    # One head has no spread: not a t of 0.
    assert not {"t", "standard_error"} & set(probe(capture("gauss", heads=1), "reference")
                                             ["backends"]["reference"])  # fmt: skip


def test_a_backend_that_overflows_is_told_from_a_capture_that_is_not_finite():
    def overflowing(x: probing.Tensors) -> BackendResult:
        return BackendResult(out=x.v * math.inf, dq=x.q)

    runners = {"broken": overflowing} | probing.choose("reference", CPU)
    found = probing.probe_capture(capture("gauss"), runners, device=CPU, skip_rows=8)
    text = probe_report.markdown(found)
    assert "Figures of broken are not finite, though the capture is" in text
    assert found["backends"]["broken"]["rms"] is None and found["backends"]["reference"]["rms"]


@pytest.mark.gpu
def test_kernels_of_every_backend_on_a_gpu():
    device = torch.device("cuda")
    runners = probing.choose("all", device)
    found = probing.probe_capture(
        capture("one", heads=4, n=512), runners, device=device, skip_rows=64
    )["backends"]
    for name in ("sdpa_flash", "sdpa_cudnn", "stable_flash none"):
        assert found[name]["dq_error"] > 0.3, name
    assert found["stable_flash compensated"]["dq_error"] < 0.1
    assert found["stable_flash compensated"]["rms"] < 1e-5
