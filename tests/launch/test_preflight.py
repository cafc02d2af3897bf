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
from torch.distributed import TCPStore

sys.path.append(str(Path(__file__).resolve().parent))

from launch_cases import loaded

from megatron_patch.launcher import preflight, verdict
from megatron_patch.launcher.preflight import SharedDirectoryError
from megatron_patch.launcher.probe import ALL_PAIRS, meetings

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


def links(rates: dict[str, float], pairs: dict[tuple[str, str], float] | None = None) -> list[dict]:
    """What the probe leaves for these nodes: a pair is as slow as the slower of its two cards.

    ``pairs`` are rates of single links below that, on GPU 3 only.
    """
    names, rows = list(rates), []
    for gpu in range(8):
        common = {"what": f"GPU {gpu}"}
        rows += [{"node": n, "kind": "node", "gb_per_s": 300.0, **common} for n in names]
        for partners in meetings(len(names)):
            for node, partner in enumerate(partners):
                if partner is None:
                    continue
                one, other = names[node], names[partner]
                rate = min(rates[one], rates[other])
                if gpu == 3:
                    rate = min(rate, (pairs or {}).get(tuple(sorted((one, other))), rate))
                rows.append(
                    {"node": one, "peer": other, "kind": "network", "gb_per_s": rate, **common}
                )
    return rows


def judge(
    tmp_path, reports, *, rates=None, pairs=None, expected=(), sets=()
) -> tuple[int, str, list[str]]:
    """Exit code, table and bad nodes."""
    run = loaded(tmp_path, sets=sets).config
    out = tmp_path / "out"
    out.mkdir()
    for report in reports:
        (out / f"{report['node']}.json").write_text(json.dumps(report))
    rates = {r["node"]: 400.0 for r in reports} if rates is None else rates
    (out / "links.json").write_text(json.dumps(links(rates, pairs)))
    stream = io.StringIO()
    code = verdict.compare(run, out, list(expected), stream)
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
        ("free.run_dir", None, "run_dir: missing or not writable"),
        (
            "free.local_dir",
            None,
            "make /tmp there, writable for the job's user, or set cluster.loc",
        ),
    ],
)
def test_one_bad_node_is_named(tmp_path, path, value, message):
    nodes = [healthy(n) for n in range(4)]
    nodes[2] = change(nodes[2], path, value)
    code, table, bad = judge(tmp_path, nodes)
    assert code == 1 and bad == ["n2"] and message in table
    assert "preflight: bad node(s): n2" in table


@pytest.mark.parametrize("nodes", [3, 4, 5, 8, 9, 64])
@pytest.mark.parametrize("place", [0, 1, -1])
def test_slow_card_is_named_and_no_neighbor(tmp_path, nodes, place):
    """25 % slower: also where most of what was measured had to do with the slow node."""
    rates = {f"n{n}": 400.0 for n in range(nodes)}
    slow = list(rates)[place]
    rates[slow] = 300.0
    code, table, bad = judge(tmp_path, [healthy(n) for n in range(nodes)], rates=rates)
    assert code == 1 and bad == [slow] and "GPU 7: 300 GB/s with the best of its" in table
    assert "note" not in table


def test_slow_links_inside_a_node_name_it(tmp_path):
    (tmp_path / "out").mkdir()
    for index in range(3):
        (tmp_path / "out" / f"n{index}.json").write_text(json.dumps(healthy(index)))
    rows = links({"n0": 400.0, "n1": 400.0, "n2": 400.0})
    rows[1]["gb_per_s"] = 100.0
    (tmp_path / "out" / "links.json").write_text(json.dumps(rows))
    stream = io.StringIO()
    assert verdict.compare(loaded(tmp_path).config, tmp_path / "out", [], stream) == 1
    assert "n1               GPU 0: 100 GB/s all-reduce inside a node" in stream.getvalue()
    assert (tmp_path / "out" / "bad_nodes").read_text() == "n1\n"


def test_two_slow_cards_are_named(tmp_path):
    rates = {f"n{n}": 50.0 if n in (1, 2) else 400.0 for n in range(6)}
    assert judge(tmp_path, [healthy(n) for n in range(6)], rates=rates)[2] == ["n1", "n2"]


def test_slow_link_between_good_cards_is_a_note(tmp_path):
    rates = {f"n{n}": 400.0 for n in range(4)}
    code, table, bad = judge(
        tmp_path, [healthy(n) for n in range(4)], rates=rates, pairs={("n1", "n2"): 40.0}
    )
    assert code == 0 and bad == [] and "FAILED" not in table
    assert "link between n1 and n2 (GPU 3: 40) GB/s slow; the median is 400" in table


def test_slow_link_of_two_nodes_blames_neither(tmp_path):
    rates = {"n0": 400.0, "n1": 400.0}
    code, table, bad = judge(
        tmp_path, [healthy(n) for n in range(2)], rates=rates, pairs={("n0", "n1"): 0.04}
    )
    assert code == 1 and bad == [] and "no node in particular" in table
    assert (
        "link between n0 and n1 (GPU 3: 0.04) GB/s slow; the median is 400; of two nodes" in table
    )


@pytest.mark.parametrize("nodes", [0, 1, 2, 3, 7, 8, 9, 10, 33, 64, 1000])
def test_meetings(nodes):
    """Partners agree, nobody waits twice in a row for want of one, and the time has a bound."""
    rounds, met = meetings(nodes), [set() for _ in range(nodes)]
    assert len(rounds) <= ALL_PAIRS - 1
    for partners in rounds:
        assert len(partners) == nodes
        for node, partner in enumerate(partners):
            if partner is not None:
                assert partners[partner] == node != partner
                met[node].add(partner)
    least = nodes - 1 if nodes <= ALL_PAIRS else 4
    assert all(len(others) >= least for others in met)


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
    run = loaded(tmp_path).config
    for index in (0, 2):
        (tmp_path / "out" / f"n{index}.json").write_text(json.dumps(healthy(index)))
    (tmp_path / "out" / "links.json").write_text(json.dumps(links({"n0": 4.0, "n1": 4, "n2": 4})))
    stream = io.StringIO()
    assert verdict.compare(run, tmp_path / "out", ["n0", "n1", "n2"], stream) == 1
    assert "report             n1               its report cannot be read" in stream.getvalue()
    assert stream.getvalue().count("FAILED") == 1
    assert (tmp_path / "out" / "bad_nodes").read_text() == "n1\n"


def test_damaged_links_name_no_node(tmp_path):
    run = loaded(tmp_path).config
    (tmp_path / "n0.json").write_text(json.dumps(healthy(0)))
    (tmp_path / "links.json").write_text('[{"node": "n0", ')
    stream = io.StringIO()
    assert verdict.compare(run, tmp_path, [], stream) == 1
    assert "links.json cannot be read" in stream.getvalue()
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


def test_collectives_that_do_not_end_name_no_node(tmp_path):
    run = loaded(tmp_path).config
    (tmp_path / "n0.json").write_text(json.dumps(healthy(0)))
    stream = io.StringIO()
    assert verdict.compare(run, tmp_path, [], stream) == 1
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


SLOW_CARD = """
import os, sys, time
import torch.distributed as dist
from megatron_patch.launcher import probe

post = dist.batch_isend_irecv

def slow(operations):
    time.sleep(0.6 if os.environ["RANK"] == "2" else 0.2)
    return post(operations)

dist.batch_isend_irecv = slow
probe.REPEATS = 1
sys.exit(probe.main(["--out", sys.argv[1], "--megabytes", "1"]))
"""


@pytest.mark.multiprocess
def test_slow_card_is_measured_as_such(tmp_path):
    """Four nodes of one rank; the card of the third needs three times as long."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    base = os.environ | {
        "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SLOW_CARD, str(tmp_path)],
            env=base | {"RANK": str(rank), "SLURMD_NODENAME": f"n{rank}"}, cwd=ROOT,
        )
        for rank in range(4)
    ]  # fmt: skip
    assert [process.wait(300) for process in processes] == [0] * 4
    for index in range(4):
        (tmp_path / f"n{index}.json").write_text(json.dumps(healthy(index)))
    # The sleep is most of every time; what this machine adds is within half of it.
    run = loaded(tmp_path, sets=("cluster.preflight.tolerance=0.4",)).config
    stream = io.StringIO()
    assert verdict.compare(run, tmp_path, [], stream) == 1
    assert (tmp_path / "bad_nodes").read_text() == "n2\n", stream.getvalue()
