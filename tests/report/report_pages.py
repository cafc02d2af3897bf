"""What tests of the report share: directories of runs, and a strict reading of their page."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from megatron_patch.report import report
from megatron_patch.report.collect import collect

FLAT = [9.0 - 5 * min(1, i / 40) for i in range(120)]
NAMES = """
html head meta title style body main h1 h2 h3 section p code pre div span table caption thead tbody
tr th td details summary figure figcaption img
"""
ELEMENTS = set(NAMES.split())


class Checker(HTMLParser):
    """Parses a page strictly: known elements, closed in order, no attribute that loads or runs."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.text: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self._see(name, attrs)
        if name not in ("meta", "img"):
            self.open.append(name)

    def handle_startendtag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self._see(name, attrs)

    def _see(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        assert name in ELEMENTS, name
        self.count[name] = self.count.get(name, 0) + 1
        for key, value in attrs:
            assert not key.startswith("on"), key
            picture = name == "img" and (value or "").startswith("data:image/png;base64,")
            assert key != "src" or picture, value
            assert key not in ("href", "srcset", "style", "action", "srcdoc"), key
            self.attributes.append((name, key, value or ""))

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def checked(html: str) -> Checker:
    found = Checker()
    found.feed(html)
    found.close()
    assert found.open == []
    style = html.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style and "@import" not in style
    alternatives = [v for name, k, v in found.attributes if (name, k) == ("img", "alt")]
    assert len(alternatives) == found.count.get("img", 0) and all(alternatives)
    return found


def make_run(
    folder: Path,
    *,
    losses: list[float],
    name: str = "demo",
    log: str = "",
    hostile: str = "",
    telemetry: bool = False,
) -> Path:
    folder.mkdir(parents=True)
    head = "step,consumed_tokens,loss,grad_norm,lr,tokens_per_s,skipped,nonfinite,eval_loss,extra\n"
    lines = [
        f"{i + 1},{64 * i},{loss!r},{0.3 + (loss > 5) * 50!r},0.001,1000,0,0,,\n"
        for i, loss in enumerate(losses)
    ]
    (folder / "metrics.csv").write_text(head + "".join(lines))
    config = {"name": name, "optimizer": {"warmup_steps": "10"}, "note": hostile or "none"}
    # JSON is YAML; the loader writes plainer YAML, of the same values.
    (folder / "config.yaml").write_text(json.dumps(config))
    (folder / "origins.yaml").write_text(json.dumps({"name": hostile or "run.yaml:1"}))
    attempt = {"utc": "2026-01-01T00:00:00Z", "torch": hostile or "2.13", "gpu": "NVIDIA H200"}
    (folder / "environment.json").write_text(json.dumps({"attempts": [attempt]}))
    (folder / "train.log").write_text(log, errors="surrogatepass")
    if telemetry:
        write_telemetry(folder)
    return folder


def write_telemetry(folder: Path, *, layers: int = 3, heads: int = 4, records: int = 30) -> None:
    from megatron_patch.stability import record
    from megatron_patch.stability.names import HEAD_METRICS
    from megatron_patch.stability.warning import Rule
    from megatron_patch.stability.writer import Writer

    meta = record.make_meta(
        layers=layers, heads=heads, interval=10, rule=Rule(), attention="stable_flash/none"
    )
    rng = np.random.default_rng(0)
    writer = Writer(folder, meta, start_step=0)
    for i in range(records):
        found = {n: rng.random((layers, heads), dtype=np.float32) for n in HEAD_METRICS}
        found["kappa"][0, 0] = np.nan
        scalars = {"loss_mean": 4.0, "loss_max": 4.1, "grad_norm_mean": 0.3, "grad_norm_max": 0.4}
        layer = {"grad_norm": rng.random(layers, dtype=np.float32)}
        writer.write(10 * (i + 1), scalars=scalars, layers=layer, heads=found)
    writer.close()


def write_records(
    folder: Path,
    steps: list[int],
    change: Callable[[int, dict[str, float], dict[str, np.ndarray]], None] | None = None,
) -> None:
    """Records of a calm run, interval 50; ``change`` gets the step, scalars and heads of each."""
    from megatron_patch.stability import record
    from megatron_patch.stability.names import HEAD_METRICS
    from megatron_patch.stability.warning import Rule
    from megatron_patch.stability.writer import Writer

    meta = record.make_meta(layers=2, heads=3, interval=50, rule=Rule(), attention="a/none")
    writer = Writer(folder, meta, start_step=0)
    for step in steps:
        heads = {name: np.full((2, 3), 1e-9, np.float32) for name in HEAD_METRICS}
        scalars = {"loss_mean": 3.0, "grad_norm_mean": 0.3, "grad_norm_max": 0.3, "switched": 0.0}
        if change is not None:
            change(step, scalars, heads)
        writer.write(step, scalars=scalars, layers={}, heads=heads)
    writer.close()


def said(run: Path) -> str:
    """The page's text, its parts parted by spaces."""
    return " ".join(checked(report.render(collect(run))).text)
