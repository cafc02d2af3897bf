"""Do the rows of a head share the rounding error of O? On captured heads.

    python benchmarks/shared_rounding.py [CAPTURE ...]

Where all rows of a head attend to the same few keys, O is nearly one vector in all of them. If the
error eps of its rounding to 16 bits were nearly one vector too, the errors of delta, dO eps, would
repeat wherever dO does: a bias without a bias of the rounding. Per head over its rows:

    shared_o        |mean O|^2 / mean |O|^2: 1 where O is one vector
    shared_error    |mean eps|^2 / mean |eps|^2, times the rows: 1 if they are independent, the
                    number of rows if eps is one vector
    explained       share of the variance of e = dO eps that dO (mean eps) explains
    dead            correlation of eps with O - v_j, j the key with the largest weight: -1 where O
                    is rounded back to that value ("dead zone")

Default: the heads of the captures in tests/experiments/captures. Writes
docs/results/shared_rounding.json. CPU. ``--keep`` adds to the heads of an earlier result, whose
captures may be gone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import captured
import torch


def of_rows(out: torch.Tensor, nearest: torch.Tensor, dout: torch.Tensor) -> dict[str, float]:
    """The figures of O, the values of the rows' largest weights, and dO; [rows, dv], float64."""
    eps = out.to(torch.bfloat16).double() - out
    mean, e = eps.mean(0), (dout * eps).sum(1)
    left = e - dout @ mean
    away = out - nearest
    norms = eps.norm() * away.norm()
    return {
        "shared_o": _shared(out),
        "shared_error": _shared(eps) * len(out),
        "explained": 1 - float(left.square().sum() / e.square().sum()),
        "dead": float((eps * away).sum() / norms) if norms else 0.0,
    }


def _shared(rows: torch.Tensor) -> float:
    return float(rows.mean(0).square().sum() / rows.square().sum(1).mean())


def examine(head: captured.Head) -> dict[str, Any]:
    """What is written of one head."""
    scores = head.scores() * head.scale
    weights = torch.softmax(scores, -1)
    rows = slice(captured.SKIPPED, None)
    nearest = head.v[weights.argmax(-1)]
    figures = of_rows((weights @ head.v)[rows], nearest[rows], head.dout[rows])
    rows_seen = len(head.q) - captured.SKIPPED
    return {**head.place, "rows": rows_seen, "largest_logit": float(scores.max()), **figures}


if __name__ == "__main__":
    raise SystemExit(captured.write("shared_rounding", __doc__, examine))
