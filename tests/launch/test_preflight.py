"""The preflight: measured on this machine for real, compared over nodes that do not exist."""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch_cases import loaded
from torch.distributed import TCPStore

from megatron_patch.launcher import preflight, verdict
from megatron_patch.launcher.preflight import SharedDirectoryError

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


def links(names: list[str], inside: dict[tuple[str, int], float] | None = None) -> list[dict]:
    """What the probe leaves for these nodes; ``inside`` are other rates of (node, GPU)."""
    rows = [
        {"node": n, "kind": "node", "what": f"GPU {g}", "gb_per_s": (inside or {}).get((n, g), 300)}
        for n in names
        for g in range(8)
    ]
    over_all = {"kind": "network", "what": f"{len(names)} nodes", "gb_per_s": 40.0}
    return [*rows, {"node": names[0], **over_all}] if len(names) > 1 else rows


def judge(tmp_path, reports, *, inside=None, expected=(), sets=()) -> tuple[int, str, list[str]]:
    """Exit code, table and bad nodes."""
    run = loaded(tmp_path, sets=sets).config
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    for report in reports:
        (out / f"{report['node']}.json").write_text(json.dumps(report))
    names = [report["node"] for report in reports] or ["n0"]
    (out / "links.json").write_text(json.dumps(links(names, inside)))
    stream = io.StringIO()
    code = verdict.compare(run, out, list(expected), stream)
    bad = out / "bad_nodes"
    return code, stream.getvalue(), bad.read_text().split() if bad.exists() else []


def test_healthy_nodes_pass(tmp_path):
    code, table, bad = judge(tmp_path, [healthy(n) for n in range(4)])
    assert code == 0 and bad == [] and "FAILED" not in table
    assert "8 x NVIDIA H200" in table
    assert "bandwidth network  -                40 GB/s all-reduce over 4 nodes" in table


def change(report: dict, path: str, value) -> dict:
    """A copy with one fact changed."""
    report = copy.deepcopy(report)
    *way, last = path.split(".")
    inner = report
    for key in way:
        inner = inner[int(key) if key.isdigit() else key]
    inner[last] = value
    return report


@pytest.mark.parametrize(("path", "value", "message"), [
    ("gpus", healthy(2)["gpus"][:7], "7 visible"),
    ("gpus.3.uncorrected", 2, "uncorrected memory errors: GPU 3: 2"),
    ("gpus.5.free_gb", 20.0, "in use by somebody else: GPU 5"),
    ("gpus.1.tflops", 500.0, "GPU 1: 500 TFLOP/s BF16; the median is 704"),
    ("versions.driver", "2.0", "driver 2.0, others have 1.0"),
    ("versions.torch", None, "torch None, others have 1.0"),
    ("clock_skew", 60.0, "s from the median clock"),
    ("free.local_dir", 0.5, "local_dir: 0.5 GB free"),
    ("free.run_dir", None, "run_dir: missing or not writable"),
    (
        "free.local_dir",
        None,
        "make /tmp there, writable for the job's user, or set cluster.loc",
    ),
])  # fmt: skip
def test_one_bad_node_is_named(tmp_path, path, value, message):
    nodes = [healthy(n) for n in range(4)]
    nodes[2] = change(nodes[2], path, value)
    code, table, bad = judge(tmp_path, nodes)
    assert code == 1 and bad == ["n2"] and message in table
    assert "preflight: bad node(s): n2" in table


def test_slow_links_inside_nodes_name_them(tmp_path):
    inside = {("n1", 0): 100.0, ("n3", 7): 0.04}
    code, table, bad = judge(tmp_path, [healthy(n) for n in range(6)], inside=inside)
    assert code == 1 and bad == ["n1", "n3"]
    assert "n1               GPU 0: 100 GB/s all-reduce inside a node; the median is 300" in table
    assert "n3               GPU 7: 0.04 GB/s" in table


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
    assert (tmp_path / "out" / verdict.EVERY_NODE).read_text() == "n0\nn1\nn2\n"


def test_silence_of_all_nodes_may_be_retried(tmp_path):
    """No node is excluded, but nobody has measured anything that a retry would meet again."""
    code, table, bad = judge(tmp_path, [], expected=("n0", "n1"))
    assert code == 1 and bad == [] and "every node failed" in table
    assert not (tmp_path / "out" / verdict.EVERY_NODE).exists()


def test_silent_node_is_named(tmp_path):
    code, table, bad = judge(tmp_path, [healthy(0)], expected=("n0", "n1"))
    assert code == 1 and bad == ["n1"] and "wrote no report" in table


@pytest.mark.parametrize("expected", [(), ("n0", "n1")])
def test_no_report_at_all(tmp_path, expected):
    run = loaded(tmp_path, device="cpu").config
    stream = io.StringIO()
    assert verdict.compare(run, tmp_path / "out", list(expected), stream) == 1
    table = stream.getvalue()
    assert table.count("FAILED") == max(len(expected), 1) == table.count(" wrote ")
    assert "no node is excluded" in table and not (tmp_path / "out" / "bad_nodes").exists()


@pytest.mark.parametrize(
    "text", [b'{"node": "n1", "ind', b"", b"\xff\xfe\x00", b"[1]", b"7", b'{"node": "n1"}']
)
def test_damaged_report_fails_its_node(tmp_path, text):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "n1.json").write_bytes(text)
    names = ("n0", "n1", "n2")
    code, table, bad = judge(tmp_path, [healthy(0), healthy(2)], expected=names)
    assert code == 1 and bad == ["n1"] and table.count("FAILED") == 1
    assert "report             n1               its report cannot be read (n1.json, " in table
    assert text != b'{"node": "n1"}' or "n1.json, no clock_skew, free, gpus, index," in table


@pytest.mark.parametrize(
    ("content", "reason"),
    [('[{"node": "n0", ', "links.json cannot be read"), (None, "collectives did not end")],
)
def test_an_interrupted_probe_names_no_node(tmp_path, content, reason):
    run = loaded(tmp_path).config
    (tmp_path / "n0.json").write_text(json.dumps(healthy(0)))
    if content:
        (tmp_path / "links.json").write_text(content)
    stream = io.StringIO()
    assert verdict.compare(run, tmp_path, [], stream) == 1
    assert reason in stream.getvalue() and "on no node in particular" in stream.getvalue()
    assert not (tmp_path / "bad_nodes").exists()


def test_slow_write_is_no_skew(tmp_path, monkeypatch):
    """A busy file server: the clock is exact, the write into the shared directory takes 14 s."""
    server = 1000.0
    times = iter([server, server + 14])
    monkeypatch.setattr(preflight.time, "time", lambda: next(times))
    monkeypatch.setattr(
        preflight.Path, "stat", lambda path: type("Status", (), {"st_mtime": server})
    )
    slow = preflight._clock(tmp_path)
    monkeypatch.undo()
    assert slow == {"clock_skew": 7.0, "write_seconds": 14.0}
    nodes = [healthy(n) | {"clock_skew": 0.0} for n in range(4)]
    nodes[1] |= slow
    code, table, bad = judge(tmp_path, nodes)
    assert code == 0 and bad == []
    assert "note    clock              n1               not known to 5 s" in table


def test_slow_write_moves_no_other_clock(tmp_path):
    nodes = [healthy(0), healthy(1) | {"clock_skew": 15.0, "write_seconds": 30.0}]
    assert judge(tmp_path, nodes)[0] == 0


def test_skew_beyond_a_slow_write_fails(tmp_path):
    nodes = [healthy(n) | {"clock_skew": 0.0} for n in range(4)]
    nodes[1] |= {"clock_skew": 13.0, "write_seconds": 14.0}
    assert judge(tmp_path, nodes)[2] == ["n1"]


@pytest.mark.parametrize(("key", "value"), [("commit", "unknown"), ("driver", None)])
@pytest.mark.parametrize("silent", [(1,), (0,), (0, 1, 2)])
def test_what_a_node_cannot_say_is_no_difference(tmp_path, key, value, silent):
    """Also where most nodes cannot say it."""
    nodes = [healthy(n) for n in range(4)]
    for n in silent:
        nodes[n] = change(nodes[n], f"versions.{key}", value)
    code, table, bad = judge(tmp_path, nodes)
    assert code == 0 and bad == []
    for n in silent:
        assert f"note    versions           n{n}               {key} unknown on this node" in table


def test_other_versions_differ_beside_unknown_ones(tmp_path):
    nodes = [change(healthy(n), "versions.driver", None) for n in range(4)]
    nodes[2] = change(nodes[2], "versions.nccl", None)
    _, table, bad = judge(tmp_path, nodes)
    assert bad == ["n2"] and "nccl None, others have 1.0" in table and "note" not in table


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
    assert verdict.compare(run, out, [facts["node"]], stream) == 0
    assert "CPU run" in stream.getvalue() and "no GPU: not measured" in stream.getvalue()
    assert [p.name for p in out.iterdir()] == [f"{facts['node']}.json"]


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_local_directory_that_is_none_fails_the_node(tmp_path, kind):
    """However much is free where it would be made."""
    local = tmp_path / "local"
    if kind == "file":
        local.write_text("")
    sets = (
        "cluster.gpus_per_node=0",
        "cluster.ranks_per_node=1",
        "cluster.preflight.min_free_gb=0",
        f"cluster.local_dir={local}",
    )
    run = loaded(tmp_path, sets=sets, device="cpu").config
    facts = preflight.measure(run, tmp_path / "out")
    stream = io.StringIO()
    assert verdict.compare(run, tmp_path / "out", [facts["node"]], stream) == 1
    assert "local_dir: missing or not writable" in stream.getvalue()
    assert f"make {local} there" in stream.getvalue()


def test_unwritable_shared_directory_is_an_error(tmp_path):
    run = loaded(tmp_path, device="cpu").config
    (tmp_path / "file").write_text("")
    with pytest.raises(SharedDirectoryError, match="file is in the way"):
        preflight.measure(run, tmp_path / "file" / "out")


@pytest.mark.multiprocess
@pytest.mark.parametrize(("nodes", "per_node"), [
    pytest.param(1, 2, marks=pytest.mark.slow), pytest.param(2, 1, marks=pytest.mark.slow), (2, 2)
])  # fmt: skip
def test_probe_over_gloo(tmp_path, nodes, per_node):
    """All-reduce inside nodes of several ranks, and over several nodes."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = nodes * per_node
    base = os.environ | {
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(per_node), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    command = [sys.executable, "-m", "megatron_patch.launcher.probe", "--megabytes=1"]
    processes = [
        subprocess.Popen(
            [*command, "--out", str(tmp_path)], cwd=ROOT,
            env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank % per_node),
                        "SLURMD_NODENAME": f"n{rank // per_node}"},
        )
        for rank in range(world)
    ]  # fmt: skip
    assert [process.wait(300) for process in processes] == [0] * world
    rows = json.loads((tmp_path / "links.json").read_text())
    expected = [(f"n{r // per_node}", "node", f"GPU {r % per_node}") for r in range(world)]
    expected = expected if per_node > 1 else []
    if nodes > 1:
        expected.insert(min(1, len(expected)), ("n0", "network", f"{nodes} nodes"))
    assert [(r["node"], r["kind"], r["what"]) for r in rows] == expected
    assert all(r["gb_per_s"] > 0 for r in rows)
