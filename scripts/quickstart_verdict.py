"""Did the quick start do what it promises? Reads the run directory; exits 1 if not."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_patch.runtime.records import read_rows


def main() -> int:
    run = Path(sys.argv[1])
    rows = read_rows(run / "metrics.csv")
    losses = {int(row["step"]): float(row["loss"]) for row in rows if row["loss"]}
    first, last = losses[min(losses)], losses[max(losses)]
    checkpoints = sorted(p.name for p in (run / "checkpoints").glob("step_*") if p.is_dir())
    facts = {
        f"loss fell from {first:.3f} to {last:.3f} over {max(losses)} steps": last < first - 1.0,
        f"checkpoints: {', '.join(checkpoints)}": bool(checkpoints),
        "resumed in the middle and finished": (run / "FINISHED").exists(),
        f"plot: {run / 'quickstart.png'}": (run / "quickstart.png").exists(),
    }
    print()
    for text, good in facts.items():
        print(f"{'ok  ' if good else 'FAIL'}  {text}")
    return 0 if all(facts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
