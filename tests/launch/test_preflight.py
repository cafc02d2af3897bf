"""The preflight: measured on this machine for real, compared over nodes that do not exist."""

from __future__ import annotations

import copy
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))

from launch_cases import loaded

from megatron_patch.launcher import preflight

ROOT = Path(__file__).resolve().parents[2]


def healthy(index: int) -> dict:
    """What a node of eight good GPUs answers."""
    return {
        "node": f"n{index}", "index": index,
        "versions": dict.fromkeys(preflight.VERSIONS, "1.0"),
        "gpus": [
            {"index": g, "name": "NVIDIA H200", "total_gb": 150.0, "free_gb": 149.0,
             "uncorrected": 0, "tflops": 700.0 + g} for g in range(8)
        ],
        "free": {"local_dir": 100.0, "run_dir": 1000.0, "shm": 50.0},
        "clock_skew": 0.1 * index, "write_seconds": 0.01,
    }  # fmt: skip


def links(rates: dict[str, float]) -> list[dict]:
    """What the probe leaves for these nodes."""
    return [
        {"node": node, "kind": kind, "what": f"GPU {g}", "gb_per_s": rate}
        for node, rate in rates.items()
        for kind in ("node", "network")
        for g in range(8)
    ]


def judge(tmp_path, reports, *, rates=None, expected=(), sets=()) -> tuple[int, str, list[str]]:
    """Exit code, table and bad nodes."""
    run = loaded(tmp_path, sets=sets).config
    out = tmp_path / "out"
    out.mkdir()
    for report in reports:
        (out / f"{report['node']}.json").write_text(json.dumps(report))
    rates = {r["node"]: 400.0 for r in reports} if rates is None else rates
    (out / "links.json").write_text(json.dumps(links(rates)))
    stream = io.StringIO()
    code = preflight.compare(run, out, list(expected), stream)
    bad = out / "bad_nodes"
    return code, stream.getvalue(), bad.read_text().split() if bad.exists() else []


def test_healthy_nodes_pass(tmp_path):
    code, table, bad = judge(tmp_path, [healthy(n) for n in range(4)])
    assert code == 0 and bad == [] and "FAILED" not in table
    assert "8 x NVIDIA H200" in table and "bandwidth network" in table


def change(report: dict, path: str, value) -> dict:
    """A copy with one fact changed."""
    report = copy.deepcopy(report)
    *way, last = path.split(".")
    inner = report
    for key in way:
        inner = inner[int(key) if key.isdigit() else key]
    inner[last] = value
    return report


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("gpus", healthy(2)["gpus"][:7], "7 visible"),
        ("gpus.3.uncorrected", 2, "uncorrected memory errors: GPU 3: 2"),
        ("gpus.5.free_gb", 20.0, "in use by somebody else: GPU 5"),
        ("gpus.1.tflops", 500.0, "GPU 1: 500 TFLOP/s BF16; the median is 704"),
        ("versions.driver", "2.0", "driver 2.0, others have 1.0"),
        ("versions.torch", None, "torch None, others have 1.0"),
        ("clock_skew", 60.0, "s from the median clock"),
        ("free.local_dir", 0.5, "local_dir: 0.5 GB free"),
        ("free.run_dir", None, "run_dir: unreadable"),
    ],
)
def test_one_bad_node_is_named(tmp_path, path, value, message):
    nodes = [healthy(n) for n in range(4)]
    nodes[2] = change(nodes[2], path, value)
    code, table, bad = judge(tmp_path, nodes)
    assert code == 1 and bad == ["n2"] and message in table
    assert "preflight: bad node(s): n2" in table


def test_slow_link_is_named(tmp_path):
    code, table, bad = judge(
        tmp_path, [healthy(n) for n in range(3)], rates={"n0": 400.0, "n1": 100.0, "n2": 410.0}
    )
    assert code == 1 and bad == ["n1"] and "GPU 0: 100" in table


def test_tolerance_is_the_configured_one(tmp_path):
    nodes = [healthy(0), change(healthy(1), "gpus.0.tflops", 620.0)]
    assert judge(tmp_path, nodes)[0] == 0
    (tmp_path / "tight").mkdir()
    tight = ("cluster.preflight.tolerance=0.05",)
    assert judge(tmp_path / "tight", nodes, sets=tight)[2] == ["n1"]


def test_what_all_nodes_lack_excludes_none(tmp_path):
    """A limit that no node meets is the configuration's fault; the job would wait for ever."""
    code, table, bad = judge(
        tmp_path, [healthy(n) for n in range(3)], sets=("cluster.preflight.min_free_gb=5000",)
    )
    assert code == 1 and bad == [] and "every node failed" in table


def test_silent_node_is_named(tmp_path):
    code, table, bad = judge(tmp_path, [healthy(0)], expected=("n0", "n1"))
    assert code == 1 and bad == ["n1"] and "wrote no report" in table


def test_collectives_that_do_not_end_name_no_node(tmp_path):
    run = loaded(tmp_path).config
    (tmp_path / "n0.json").write_text(json.dumps(healthy(0)))
    stream = io.StringIO()
    assert preflight.compare(run, tmp_path, [], stream) == 1
    assert "on no node in particular" in stream.getvalue()
    assert not (tmp_path / "bad_nodes").exists()


def test_this_machine(tmp_path):
    """The CPU rows say that there is no GPU, on a machine that may have one."""
    sets = (
        "cluster.gpus_per_node=0",
        "cluster.ranks_per_node=1",
        "cluster.preflight.min_free_gb=0",
    )
    run = loaded(tmp_path, sets=sets, device="cpu").config
    out = tmp_path / "out"
    facts = preflight.measure(run, out)
    assert facts["versions"]["torch"] and abs(facts["clock_skew"]) < 5
    stream = io.StringIO()
    assert preflight.compare(run, out, [facts["node"]], stream) == 0
    assert "CPU run" in stream.getvalue() and "no GPU: not measured" in stream.getvalue()
    assert [p.name for p in out.iterdir()] == [f"{facts['node']}.json"]


def test_unwritable_shared_directory_is_an_error(tmp_path):
    run = loaded(tmp_path, device="cpu").config
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        preflight.measure(run, tmp_path / "file" / "out")


@pytest.mark.multiprocess
@pytest.mark.parametrize(("nodes", "ranks", "kind"), [(1, 2, "node"), (2, 1, "network")])
def test_probe_over_gloo(tmp_path, nodes, ranks, kind):
    """Two ranks: two GPUs of one node, and one GPU on each of two nodes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}",
               f"--nproc-per-node={ranks}", "--rdzv-backend=static", "--master-addr=127.0.0.1",
               f"--master-port={port}"]  # fmt: skip
    program = ["-m", "megatron_patch.launcher.probe", "--megabytes=1", "--out", str(tmp_path)]
    base = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    processes = [
        subprocess.Popen(
            [*command, f"--node-rank={node}", *program],
            env={**base, "SLURMD_NODENAME": f"n{node}"}, cwd=ROOT,
        )
        for node in range(nodes)
    ]  # fmt: skip
    assert [process.wait(120) for process in processes] == [0] * nodes
    rows = json.loads((tmp_path / "links.json").read_text())
    names = ["n0", "n0"] if nodes == 1 else ["n0", "n1"]
    assert [(r["node"], r["kind"]) for r in rows] == [(name, kind) for name in names]
    assert all(r["gb_per_s"] > 0 for r in rows)
