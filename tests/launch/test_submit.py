"""``megatron-patch launch`` against shims of sbatch and squeue."""

import os

import pytest

from megatron_patch.checkpoint import last_checkpoint
from megatron_patch.cli import app
from megatron_patch.launcher.submit import LaunchError


@pytest.fixture
def launch(shims, monkeypatch):
    """Call the command in the shims' folder; returns its exit code."""
    shims.render()
    for name, value in shims.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(shims.folder)
    shims.launched = shims.run / "launch" / "submitted"
    return lambda *more: app.run(["launch", "--config", "run.yaml", "--nodes", "2", *more])


def test_test_only_comes_before_submitting(launch, shims, capsys):
    assert launch() == 0
    script = str(shims.run / "launch" / "job.sbatch")
    assert shims.calls("sbatch") == [["--test-only", script], ["--parsable", script]]
    assert "job 4711: 2 ranks = 2 node(s) x 1" in capsys.readouterr().out
    assert shims.launched.read_text().startswith("4711 ")
    for name in ("lib.sh", "requeue.sh", "node.sh", "config.yaml", "job.sbatch"):
        assert (shims.run / "launch" / name).is_file()
    # The directory of --output exists: without it the job would die without a word.
    assert (shims.run / "logs").is_dir()


def test_a_job_that_goes_on_keeps_the_defaults_that_the_run_began_with(launch, shims):
    """What the job reads has every value written out: there nobody can tell a default."""
    lines = ["training: {seed: 1234}", "data: {seed: null}"]  # of before the keys
    shims.run.mkdir(exist_ok=True)
    (shims.run / "config.yaml").write_text("\n".join(lines))
    last_checkpoint.remember(shims.run, shims.run / "x", step=3)
    assert launch() == 0
    written = (shims.run / "launch" / "config.yaml").read_text()
    assert "  split: [0.98, 0.01, 0.01]\n" in written and "  compile_fusions: false\n" in written
    assert launch("--set", "data.split=[0.99, 0.01, 0.0]") == 0
    assert "  split: [0.99, 0.01, 0.0]\n" in (shims.run / "launch" / "config.yaml").read_text()


def test_refused_shape_is_not_submitted(launch, shims, capsys):
    (shims.shim / "test_only").write_text("1")
    assert launch() == 2
    assert len(shims.calls("sbatch")) == 1 and not shims.launched.exists()
    assert "--test-only refuses" in capsys.readouterr().err


def test_bad_configuration_never_reaches_slurm(launch, shims):
    assert launch("--set", "optimizer.lr=-1") == 2
    assert shims.calls("sbatch") == []


def test_second_submission_is_refused(launch, shims, capsys):
    assert launch() == 0
    (shims.shim / "queue").write_text("RUNNING")
    assert launch() == 2
    assert "job 4711 (running) has" in capsys.readouterr().err
    (shims.shim / "queue").write_text("")
    assert launch() == 0


@pytest.mark.parametrize("name", ["job.sbatch", "submitted", "excluded_nodes"])
def test_files_of_the_last_launch_that_are_no_text_end_nothing(launch, shims, name):
    """As a torn write, or an editor, leaves them; their good lines count, nothing is lost."""
    file = shims.run / "launch" / name
    old = b"\xff\xfe\x00\n4711 2026\nn7\n"
    file.write_bytes(old)
    assert launch() == 0
    if name == "job.sbatch":
        assert old in [p.read_bytes() for p in file.parent.glob("job.*.sbatch")]
    if name == "submitted":
        (shims.shim / "queue").write_text("RUNNING")
        assert launch() == 2
    assert ("--exclude=n7\n" in file.with_name("job.sbatch").read_text()) == (name[0] == "e")


def test_dry_run_writes_and_submits_nothing(launch, shims, capsys):
    before = sorted(shims.run.rglob("*"))
    assert launch("--dry-run") == 0
    assert shims.calls("sbatch") == [] and sorted(shims.run.rglob("*")) == before
    assert capsys.readouterr().out == (shims.run / "launch" / "job.sbatch").read_text()


HUGE = (
    "training.device=cuda", "cluster.gpus_per_node=8", "cluster.ranks_per_node=8",
    "model.num_layers=80", "model.hidden_size=8192", "model.num_attention_heads=64",
    "model.seq_length=8192", "training.global_batch_size=1024",
)  # fmt: skip


@pytest.mark.parametrize("dry", [False, True])
def test_what_cannot_fit_is_refused_with_what_would(launch, shims, capsys, dry):
    """A 70B model, nothing split, on 16 GPUs of any kind."""
    words = [word for item in HUGE for word in ("--set", item)]
    assert launch(*words, *(["--dry-run"] if dry else [])) == 2
    assert shims.calls("sbatch") == []
    said = capsys.readouterr().err
    assert "does not fit" in said and "--set parallel.tensor_model_parallel_size=" in said
    assert launch(*words, "--no-plan", "--dry-run") == 0


def test_the_kind_of_gpu_decides(launch, capsys):
    """A layout for 80 GB is not for 40 GB, and names that the planner does not know are refused."""
    sets = [*HUGE[:3], "model.num_layers=32", "model.hidden_size=4096", *HUGE[5:],
            "parallel.tensor_model_parallel_size=2"]  # fmt: skip
    words = [word for item in sets for word in ("--set", item)]
    assert launch(*words, "--dry-run", "--set", "cluster.gpu=b200") == 0
    assert "on the fullest b200" in capsys.readouterr().err
    assert launch(*words, "--dry-run", "--set", "cluster.gpu=a100-40gb") == 2
    assert launch(*words, "--dry-run", "--set", "cluster.gpu=v100") == 2
    assert "'v100' is not one of a100" in capsys.readouterr().err


def test_a_run_directory_that_cannot_be_written_is_refused(launch, shims, capsys):
    (shims.folder / "file").touch()
    assert launch("--set", "run_dir=file/run") == 2
    assert "cannot be used (Not a directory: " in capsys.readouterr().err
    assert shims.calls("sbatch") == []


def test_without_slurm(launch, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    assert launch() == 2
    assert "sbatch is not on PATH" in capsys.readouterr().err


def test_launch_error_is_the_users(launch):
    assert LaunchError.exit_code == 2


def test_what_the_ranks_would_miss_is_said_before_the_queue(launch, shims, capsys):
    """A login node may not see what nodes see: said, and submitted all the same."""
    secrets = shims.folder / "secrets"
    secrets.write_text("WANDB_API_KEY=hidden\n")
    secrets.chmod(0o644)
    assert launch("--set", "cluster.secrets_file=secrets") == 0
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "corpus.manifest.json: there is no manifest" in line]
    assert [line for line in said if "must be yours and have mode 0600" in line]
    assert all(line.startswith("warning: ") for line in said) and "hidden" not in str(said)
