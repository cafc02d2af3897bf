"""Captured heads for the scripts that take them apart: float64, plain causal attention."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import torch
from run_names import run_name

from megatron_patch.stability import capture

CAPTURES = Path(__file__).resolve().parent.parent / "tests" / "experiments" / "captures"
PLACE = ("run", "step", "layer", "head")
SKIPPED = 64
"""Rows left out, as `megatron-patch probe` does: they see few keys."""


@dataclass(frozen=True)
class Head:
    """One query head of one sequence: q, k [s, d]; v, dout [s, dv]; all float64."""

    place: dict[str, Any]
    """What `PLACE` names."""
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    scale: float

    def scores(self) -> torch.Tensor:
        """q k^T, not scaled, -inf where the mask is: [s, s]."""
        hidden = torch.ones(len(self.q), len(self.k), dtype=torch.bool).triu(1)
        return (self.q @ self.k.T).masked_fill(hidden, -math.inf)


def heads(parser: argparse.ArgumentParser, paths: list[Path]) -> Iterator[Head]:
    """Every head of these files, of the first sequence; those of the tests if there are none."""
    for path in paths or sorted(CAPTURES.glob("*.pt")):
        try:
            one = capture.CaptureFile.load(path)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        if not one.causal or one.window or one.sinks is not None or one.dropout_p:
            parser.error(f"{path}: only plain causal attention without dropout is simulated")
        named = _run_of(path) or one.run_name
        for h, number in enumerate(one.heads):
            kv = one.head_to_kv[h]
            yield Head(
                place={"run": named, "step": one.step, "layer": one.layer, "head": number},
                q=one.q[:, 0, h].double(),
                k=one.k[:, 0, kv].double(),
                v=one.v[:, 0, kv].double(),
                dout=one.dout[:, 0, h].double(),
                scale=one.scale,
            )


def _run_of(path: Path) -> str:
    """What results call the run whose directory the capture lies in; "" elsewhere. The capture
    itself knows the run's name only, which others have too."""
    folder = path.parent.parent
    there = path.parent.name == "captures" and (folder / "config.yaml").is_file()
    return run_name(folder) if there else ""


def write(name: str, text: str | None, examine: Callable[[Head], dict[str, Any]]) -> int:
    """The whole of a script: what ``examine`` finds in every head goes to docs/results/<name>."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("captures", nargs="*", type=Path, metavar="CAPTURE")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="an earlier result to add to")
    parser.add_argument("--out", type=Path, help="folder of the result; default docs/results")
    args = parser.parse_args()
    rows = [examine(one) for one in heads(parser, args.captures)]
    if args.keep:
        old = machine.read_result(args.keep, "--keep")
        new = {tuple(row[key] for key in PLACE) for row in rows}
        kept = [row for row in old["heads"] if tuple(row[key] for key in PLACE) not in new]
        rows = [{"commit": old["commit"]} | row for row in kept] + rows
    print(f"wrote {machine.write_result(name, {'heads': rows}, args.out)}")
    return 0
