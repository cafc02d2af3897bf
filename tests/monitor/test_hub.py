"""Console lines, metrics.csv over a resume, TensorBoard, the optional W&B."""

import csv
import io
import re
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from full_disk import KINDS, disk
from run_config import run_config

from megatron_patch.monitor.hub import Monitor
from megatron_patch.monitor.metrics import CSV_COLUMNS, StepMetrics, console_line, duration
from megatron_patch.monitor.sinks import CsvSink, MissingPackageError
from megatron_patch.runtime.records import read_rows


def metrics(step: int, **values: object) -> StepMetrics:
    known = {"consumed_tokens": 512 * step, "loss": 5.0 / step, "grad_norm": 1.0, "lr": 1e-3}
    return StepMetrics(step=step, **(known | values))  # type: ignore[arg-type]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as lines:
        return list(csv.DictReader(lines))


def test_console_line_has_fixed_order_and_leaves_out_what_is_absent():
    full = metrics(7, tokens_per_s=1234.5, tflops_per_device=400.0, mfu=0.4, memory_gib=12.0)
    line = console_line(full, train_steps=100, seconds_left=3725)
    assert line == (
        "step   7/100 | loss 0.7143 | grad norm 1.000 | lr 1.00e-03 | 1,234 tok/s | 400 TFLOP/s | "
        "MFU 40.0% | mem 12.0 GiB | skipped 0 | nan 0 | left 1:02:05"
    )
    assert "MFU" not in console_line(metrics(7), train_steps=100, seconds_left=None)


def test_duration():
    assert [duration(s) for s in (0, 59.6, 3600, 90061)] == [
        "0:00:00",
        "0:01:00",
        "1:00:00",
        "1 d 1:01:01",
    ]


def test_csv_keeps_every_bit(tmp_path):
    value = 5.982365131378174
    sink = CsvSink(tmp_path / "metrics.csv")
    sink.log(metrics(1, loss=value, extra={"b": 2.0, "a": 1.0}))
    sink.close()
    (row,) = rows(tmp_path / "metrics.csv")
    assert float(row["loss"]) == value and list(row) == ["step", "attempt", *CSV_COLUMNS[1:]]
    assert row["extra"] == '{"a": 1.0, "b": 2.0}' and row["eval_loss"] == ""


LOSS_RENAMED = ("loss,", "lossx,")


@pytest.mark.parametrize(("damage", "line"), [
    (lambda text: None, "metrics.csv has nothing before step 4, where the run goes on"),
    (lambda text: "", "metrics.csv has nothing before step 4, where the run goes on"),
    (lambda text: text.partition("\n3,")[0] + "\n", "metrics.csv ends at step 2"),
    (lambda text: text.replace("\n3,", "\n3\0"), "it holds zero bytes after step 2"),
    (lambda text: text.replace(*LOSS_RENAMED, 1), "gets the columns loss, empty up to step 4"),
    (lambda text: text, None),
])  # fmt: skip
def test_what_a_resume_does_not_find_is_told_in_one_line(damage, line, tmp_path):
    path, out = tmp_path / "metrics.csv", io.StringIO()
    sink = CsvSink(path)
    for step in (1, 2, 3, 4):
        sink.log(metrics(step))
    sink.close()
    text = damage(path.read_text())
    path.unlink() if text is None else path.write_text(text)
    quiet = {"interval": 1, "tensorboard": False}
    monitor = Monitor(run_config(logging=quiet), tmp_path, stream=out)
    monitor.start(4, has_saved=True)
    monitor.log(metrics(5))
    monitor.close()
    said = [x for x in out.getvalue().splitlines() if not x.startswith("step ")]
    assert len(said) == (line is not None), said
    assert line is None or (line in said[0] and said[0].startswith("warning: "))
    found = rows(path)
    assert (found[-1]["step"], found[-1]["loss"]) == ("5", "1.0")
    if line and "columns" in line:
        assert [row["lossx"] for row in found] == ["5.0", "2.5", "1.6666666666666667", "1.25", ""]


def test_a_run_that_starts_from_another_one_s_checkpoint_lacks_nothing(tmp_path):
    out = io.StringIO()
    monitor = Monitor(run_config(logging={"tensorboard": False}), tmp_path, stream=out)
    monitor.start(1000)
    monitor.close()
    assert out.getvalue() == ""


def test_a_resume_repeats_rows_as_another_attempt(tmp_path):
    path = tmp_path / "metrics.csv"
    first = CsvSink(path)
    for step in (1, 2, 3, 4):
        first.log(metrics(step))
    first.close()
    with path.open("a") as tail:
        tail.write("5,25")  # killed while writing
    second = CsvSink(path)
    assert second.messages(2, interval=1, own=True) == [
        "metrics.csv: 2 rows beyond step 2 stay; those steps are about to be repeated, as attempt 2"
    ]
    second.log(metrics(3, loss=9.0))
    second.close()
    steps = [(row["step"], row["attempt"]) for row in rows(path)]
    assert steps == [("1", "1"), ("2", "1"), ("3", "1"), ("4", "1"), ("3", "2")]
    told = [(row["step"], row["loss"]) for row in read_rows(path)]
    assert told == [("1", "5.0"), ("2", "2.5"), ("3", "9.0")]


def test_monitor_writes_console_log_csv_and_events(tmp_path):
    out = io.StringIO()
    monitor = Monitor(run_config(), tmp_path, stream=out)
    monitor.start(0)
    monitor.say("hello")
    monitor.log(metrics(10, step_seconds=2.0, extra={"attention/max_logit": 3.0}))
    monitor.note("only in the file")
    monitor.close()
    lines = out.getvalue().splitlines()
    assert lines[0] == "hello" and lines[1].startswith("step 10/20 | loss 0.5000")
    assert lines[1].endswith("left 0:00:20") and len(lines) == 2
    log = (tmp_path / "train.log").read_text()
    assert "hello" in log and "only in the file" in log and "\r" not in log
    assert events(tmp_path / "tensorboard")["train/attention/max_logit"] == [(10, 3.0)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_costs_records_and_not_the_run(kind, tmp_path):
    """What is in the files is whole, what is missing is told once and counted."""
    with disk(tmp_path / "disk", kind) as small:
        run = small.folder / "run"
        with (small.folder / "console").open("w") as console:
            monitor = Monitor(run_config(), run, stream=console)
            monitor.relay_logs()
            monitor.start(0)
            monitor.log(metrics(1))
            with small.full():
                for step in range(2, 202):
                    monitor.log(metrics(step))
                    monitor.scalars(step, {"stability/x": 1.0})
            monitor.log(metrics(202))
            with small.full():
                monitor.log(metrics(203))  # closed before it works again
                monitor.close()
            monitor.close()
        found = rows(run / "metrics.csv")
        steps = [int(row["step"]) for row in found]
        assert steps[0] == 1 and steps[-1] in (202, 203) and steps == sorted(set(steps))
        assert all(row["mtp_loss"] is not None and None not in row for row in found)
        log = (run / "train.log").read_text()
        stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
        assert all(re.match(stamp + "(step|warning: )", line) for line in log.splitlines())
        missing = len(set(range(1, 203)) - set(steps))
        assert missing > 100
        for name, count in (
            ("metrics.csv", f"{missing:,}"),
            ("the console", ""),
            ("train.log", ""),
        ):
            assert log.count(f"warning: {name}: written again; records that are missing: {count}")
        points = events(run / "tensorboard")["train/loss"]
        assert {1, 202} <= {step for step, _ in points} and len(points) < 100


def test_going_back_on_a_full_disk(tmp_path):
    with disk(tmp_path / "disk", "limit") as small:
        monitor = Monitor(run_config(), small.folder, stream=io.StringIO())
        monitor.start(0)
        for step in (1, 2, 3):
            monitor.log(metrics(step))
        with small.full():
            monitor.restart(1)
            monitor.log(metrics(2, loss=8.0))
        monitor.log(metrics(3, loss=9.0))
        monitor.close()
    table = small.folder / "metrics.csv"
    assert [(r["step"], r["attempt"]) for r in rows(table)] == [
        ("1", "1"), ("2", "1"), ("3", "1"), ("3", "2")]  # fmt: skip
    assert [r["loss"] for r in read_rows(table)] == ["5.0", "2.5", "9.0"]
    assert [s for s, _ in events(small.folder / "tensorboard")["train/loss"]] == [1, 3]


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {
        tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]
    }


def test_progress_bar_on_request(tmp_path):
    out = io.StringIO()
    monitor = Monitor(run_config(logging={"progress": "on", "tensorboard": False}), tmp_path,
                      stream=out)  # fmt: skip
    monitor.start(5)
    for _ in range(3):
        monitor.tick()
    monitor.log(metrics(8))
    monitor.close()
    assert "/20" in out.getvalue() and "step  8/20" in out.getvalue()


def test_inactive_monitor_writes_nothing(tmp_path):
    monitor = Monitor(run_config(), tmp_path / "no", active=False)
    monitor.start(0)
    monitor.say("x")
    monitor.log(metrics(1))
    monitor.close()
    assert not (tmp_path / "no").exists()


def test_wandb_missing_is_a_clear_error(tmp_path, monkeypatch):
    from megatron_patch.schema.logging import WandbConfig

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monitor = Monitor(run_config(logging={"wandb": WandbConfig(enabled=True)}), tmp_path)
    with pytest.raises(MissingPackageError, match=r"wandb is not installed.*enabled: false"):
        monitor.check()
    monitor.close()


def test_logging_section_problems():
    run = run_config(logging={"interval": 0, "peak_tflops": -1.0})
    assert [p.path for p in run.logging.problems()] == ["logging.interval", "logging.peak_tflops"]


def test_a_server_of_wandb_that_is_away_stops_no_restart(tmp_path, monkeypatch):
    """Its error is none of the system's; at the first start it is most likely the user's."""
    from megatron_patch.schema.logging import WandbConfig

    class CommError(Exception):
        pass

    def init(**_: object) -> None:
        raise CommError("dial tcp: connect: connection refused")

    wandb = types.ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    monkeypatch.setattr(wandb, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (tmp_path / "wandb_id").write_text("abc")
    said = io.StringIO()
    config = run_config(logging={"wandb": WandbConfig(enabled=True)})
    with pytest.raises(CommError):
        Monitor(config, tmp_path, stream=said).start(0)
    monitor = Monitor(config, tmp_path, stream=said)
    monitor.start(500)
    monitor.close()
    assert "Weights & Biases cannot be opened (CommError: dial tcp" in said.getvalue()


@pytest.mark.parametrize("left", [None, "", "\0\0\0", "abc\n"])
def test_a_resumed_run_of_wandb_has_one_id(tmp_path, monkeypatch, left):
    """Of whatever version of wandb, and although a crash left the file without its content."""
    from megatron_patch.monitor.sinks import WandbSink
    from megatron_patch.schema.logging import WandbConfig

    ids: list[str] = []
    wandb = types.ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    monkeypatch.setattr(wandb, "init", lambda id, **_: ids.append(id), raising=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    if left is not None:
        (tmp_path / "wandb_id").write_text(left)
    for _ in range(2):
        WandbSink(WandbConfig(enabled=True), tmp_path, name="run", settings={})
    assert ids[0] == ids[1] == (tmp_path / "wandb_id").read_text().strip()
    assert ids[0] == "abc" if left == "abc\n" else ids[0].isalnum()


class CountingRun:
    """Of W&B: rows have a count, and one that comes with a lower count is dropped."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.axes: dict[str, str] = {}
        self.count = 0

    def log(self, row: dict[str, float], step: int | None = None) -> None:
        if step is not None and step < self.count:
            return
        self.count = self.count + 1 if step is None else step
        self.rows.append(row)

    def define_metric(self, name: str, *, step_metric: str | None) -> None:
        if step_metric is not None:
            self.axes[name] = step_metric

    def finish(self) -> None:
        """Nothing is left to send."""


def test_steps_that_are_repeated_reach_wandb(tmp_path, monkeypatch):
    """After a crash or a rewind, however many records came in between."""
    from megatron_patch.monitor.sinks import WandbSink
    from megatron_patch.schema.logging import WandbConfig

    run = CountingRun()
    wandb = types.ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    monkeypatch.setattr(wandb, "init", lambda **_: run, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for steps in ((1, 2, 3), (2, 3, 4)):
        sink = WandbSink(WandbConfig(enabled=True), tmp_path, name="run", settings={})
        for step in steps:
            sink.scalars(step, {"stability/kappa": 1.0})
            sink.log(StepMetrics(step=step, consumed_tokens=1, loss=2.0, extra={"router": 1.0}))
        sink.close()
    assert [row["step"] for row in run.rows if "loss" in row] == [1, 2, 3, 2, 3, 4]
    assert [r["stability/step"] for r in run.rows if "stability/kappa" in r] == [1, 2, 3, 2, 3, 4]
    assert {run.axes[name] for name in ("loss", "router")} == {"step"}
    assert run.axes["stability/kappa"] == "stability/step"
