"""What the rendered batch script says: golden files, and properties that hold for every layout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_cases import job, loaded

from megatron_patch.config import ConfigError
from megatron_patch.launcher import render
from megatron_patch.schema.cluster import SECRET, ClusterConfig, seconds

GOLDEN = Path(__file__).resolve().parent / "golden"
ROOT = Path(__file__).resolve().parents[2]
CASES = {
    "one_node": (1, ""),
    "two_nodes_container": (
        2,
        """\
  partition: batch,big
  account: lab-7
  container:
    image: registry.example.org#team/megatron-patch:1.0
    mounts: ["/data:/data:ro"]
  secrets_file: /home/ada/.secrets
  pass_environment: [WANDB_API_KEY]
  environment:
    - {name: NCCL_IB_HCA, value: "=mlx5_0,mlx5_1", reason: the storage card is no compute card}
    - {name: NCCL_DEBUG, value: INFO, reason: the fabric is new}
""",
    ),
    "preemptible_requeue": (
        4,
        """\
  partition: preemptible
  qos: low
  time_limit: 1-00:00:00
  stop_lead_seconds: 900
  max_crash_requeues: 5
  exclude_nodes: node[3-4],node9
  constraint: h100&ib
""",
    ),
}


def test_free_options_of_sbatch(tmp_path):
    given = "  sbatch: [--mail-type=END, --gres-flags=enforce-binding, --overcommit]\n"
    run = loaded(tmp_path, given).config
    options = list(render.options(job(run, 2)))
    assert options[-3:] == run.cluster.sbatch
    for bad, what in (
        ("--nodes=4", "launch sets it"), ("--wrap=id", "launch sets it"), ("-N4", "is not --name"),
        ("--comment=a b", "is not --name"), ("--comment=$HOME", "is not --name"),
    ):  # fmt: skip
        (problem,) = ClusterConfig(sbatch=[bad]).problems()
        assert problem.path == "cluster.sbatch.0" and what in problem.message
    (problem,) = ClusterConfig(sbatch=["--nice=1", "--nice=2"]).problems()
    assert "given twice" in problem.message


def lines_of(text: str, block: str) -> list[str]:
    """Lines of one of the two blocks."""
    return text.split(f"# >>> {block}\n")[1].split(f"# <<< {block}\n")[0].splitlines()


@pytest.mark.parametrize("name", CASES)
def test_golden(name, tmp_path):
    """The rendered script is the committed one; UPDATE_GOLDEN=1 rewrites it."""
    nodes, cluster = CASES[name]
    text = render.render(job(loaded(tmp_path, cluster).config, nodes))
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("name", CASES)
def test_body_is_the_shipped_file(name, tmp_path):
    nodes, cluster = CASES[name]
    shipped = (ROOT / "launch" / "train.sbatch").read_text()
    text = render.render(job(loaded(tmp_path, cluster).config, nodes))
    for block in (render.OPTIONS, render.SETTINGS):
        text = render._replace(text, block, "")
        shipped = render._replace(shipped, block, "")
    assert text == shipped


@pytest.mark.parametrize("name", CASES)
def test_rendered_scripts_are_clean_shell(name, tmp_path):
    path = tmp_path / "job.sbatch"
    path.write_text((GOLDEN / f"{name}.txt").read_text())
    subprocess.run(["bash", "-n", path], check=True)
    tool = Path(sys.executable).parent / "shellcheck"
    answer = subprocess.run(
        [tool, "-x", "-S", "style", path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout


def shell_settings(text: str) -> dict[str, str]:
    """What bash makes of the settings block, arrays joined by newlines."""
    names = re.findall(r"^(?:export )?([A-Z_]+)=", text, re.MULTILINE)
    show = "".join(f'printf "%s=%s\\0" {n} "$(IFS=$\'\\n\'; echo "${{{n}[*]}}")"\n' for n in names)
    block = "\n".join(lines_of(text, render.SETTINGS))
    answer = subprocess.run(
        ["bash", "-euc", block + "\n" + show], capture_output=True, text=True, check=True, env={}
    )
    return dict(item.split("=", 1) for item in answer.stdout.split("\0") if item)


SIZES = st.sampled_from([1, 2, 4])


@settings(max_examples=25)
@given(
    nodes=st.integers(1, 64), tp=SIZES, pp=SIZES, cp=SIZES, ep=SIZES, restarts=st.integers(0, 9),
    job_id=st.integers(1, 2**31 - 1),
)  # fmt: skip
def test_every_accepted_layout(nodes, tp, pp, cp, ep, restarts, job_id):
    """Tasks, world size, ports, no open variable, no secret; what does not fit is refused."""
    sets = (
        f"parallel.tensor_model_parallel_size={tp}", f"parallel.pipeline_model_parallel_size={pp}",
        f"parallel.context_parallel_size={cp}", f"cluster.max_restarts={restarts}",
    )  # fmt: skip
    if ep > 1:
        sets += (f"parallel.expert_model_parallel_size={ep}", "model.moe={num_experts: 8}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = loaded(Path(folder), sets=sets).config
        except ConfigError:
            return  # the sections refuse it on their own (their tests say why)
    item = job(run, nodes)
    world = nodes * 8
    problems = list(render.job_problems(item))
    if world % (tp * pp * cp) or 3840 % (world // (tp * pp * cp)):
        assert problems
        return
    if world % (tp * ep * pp):
        assert problems
        return
    assert not problems
    dp, edp = world // (tp * pp * cp), world // (tp * ep * pp)
    assert item.world_size == world == tp * pp * cp * dp == tp * ep * pp * edp
    text = render.render(item)
    options = [line.removeprefix("#SBATCH ") for line in lines_of(text, render.OPTIONS)]
    assert options.count("--ntasks-per-node=1") == 1
    assert f"--nodes={nodes}" in options and "--gpus-per-node=8" in options
    values = shell_settings(text)
    assert int(values["RANKS_PER_NODE"]) * nodes == world
    assert values["NCCL_NVLS_ENABLE"] == "0"
    # Everything is resolved: the blocks expand no variable and run no command.
    for line in options + lines_of(text, render.SETTINGS):
        assert "$" not in line and "`" not in line and "{{" not in line
    names = set(values) | set(values["SETTINGS_ENVIRONMENT"].split())
    assert not [n for n in names if SECRET.search(n) and n != "SECRETS_FILE"]
    port = 15000 + job_id % 1500 * 10 + restarts % 10
    assert 15000 <= port < 32768
    expert = f"; experts: ETP{tp} x EP{ep} x PP{pp} x EDP{edp}" if ep > 1 else ""
    assert render.rank_map(item).endswith(f"TP{tp} x PP{pp} x CP{cp} x DP{dp}{expert}")


def test_settings_cover_what_the_shipped_block_sets(tmp_path):
    """A setting that only the file used by hand has would be unset in a rendered script."""
    shipped = (ROOT / "launch" / "train.sbatch").read_text()
    rendered = render.render(job(loaded(tmp_path).config, 1))
    assert set(shell_settings(shipped)) <= set(shell_settings(rendered))


def test_multicast_is_off_unless_somebody_says_why(tmp_path):
    on = "  environment: [{name: NCCL_NVLS_ENABLE, value: '1', reason: measured here}]\n"
    text = render.render(job(loaded(tmp_path, on).config, 1))
    assert shell_settings(text)["NCCL_NVLS_ENABLE"] == "1"
    assert "# measured here\n" in text
    with pytest.raises(ConfigError, match="say on one line why"):
        loaded(tmp_path, on.replace("measured here", "''"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 5400), ("1:30", 90), ("04:00:00", 14400), ("2-0", 172800), ("1-2:3:4", 93784),
     ("", None), ("4h", None), ("1:2:3:4", None)],
)  # fmt: skip
def test_time_limits(text, expected):
    assert seconds(text) == expected


@pytest.mark.parametrize(("cluster", "message"), [
    ("  time_limit: '3'\n", "must be less than cluster.time_limit"),
    ("  ranks_per_node: 9\n", "every rank needs a GPU"),
    ("  max_restarts: -1\n", "at least 0"),
    ("  preflight: {min_free_gb: -0.5}\n", "0 or more"),
    ("  preflight: {tolerance: -0.5}\n", "-0.5: must be from 0.01 to 0.9"),
    ("  preflight: {tolerance: 0}\n", "0.0: must be from 0.01 to 0.9"),
    ("  preflight: {tolerance: 1}\n", "1.0: must be from 0.01 to 0.9"),
    ("  preflight: {tolerance: 5}\n", "5.0: must be from 0.01 to 0.9"),
    ("  environment: [{name: MASTER_PORT, value: '1', reason: x}]\n", "cannot be set here"),
    ("  pass_environment: [LD_PRELOAD]\n", "cannot be set here"),
])  # fmt: skip
def test_bad_sections_are_refused(cluster, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path, cluster)


@pytest.mark.parametrize(("nodes", "sets", "device", "message"), [
    (0, (), "cuda", "--nodes 0"),
    (1, ("cluster.gpus_per_node=0",), "cuda", "is required where cluster.gpus_per_node is 0"),
    (1, ("cluster.gpus_per_node=0", "cluster.ranks_per_node=2"), "cuda", "ask for GPUs"),
    (1, (), "cpu", "would stand idle"),
    (1, ("training.exit_at_step=5",), "cuda", "continuation: none"),
    (1, ("checkpoint.resume=never",), "cuda", "would refuse its own run: use auto"),
    (1, ("checkpoint.resume=never", "cluster.continuation=none"), "cuda", "max_restarts: 2"),
    (7, (), "cuda", "multiple of micro_batch_size"),
])  # fmt: skip
def test_bad_jobs_are_refused(nodes, sets, device, message, tmp_path):
    run = loaded(tmp_path, sets=sets, device=device).config
    with pytest.raises(ConfigError, match=message):
        render.check(job(run, nodes))
