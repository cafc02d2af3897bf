"""The bugs of sm_90 fit today's sources; what runs them on a GPU runs here in the interpreter."""

from __future__ import annotations

import planting
import pytest
import torch
from attention_cases import Case, make_inputs
from planted_bugs import BUGS as PORTABLE
from planted_bugs import FULL
from planted_bugs_sm90 import BUGS, wrong_numbers
from planting import PACKAGE, run_all

from stable_attention import dispatch
from stable_attention.describe import describe
from stable_attention.problem import Options


def test_patches_apply_and_leave_python() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 14
    for bug in BUGS:
        text = (PACKAGE / bug.file).read_text()
        changed = bug.apply(text)
        assert changed != text, bug.name
        compile(changed, bug.file, "exec")


@pytest.mark.parametrize("line", sorted({bug.caught_by for bug in BUGS}))
def test_lines_meet_both_passes_of_sm90(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.configs, "arch_of", lambda device: "sm90")
    given = make_inputs(case := Case.parse(line))
    named = given.arguments(case)
    extra = {x: named.pop(x) for x in ("sinks", "cu_seqlens_q", "cu_seqlens_k", "dropout_seed")}
    if case.layout == "thd":
        extra["max_seqlen_q"], extra["max_seqlen_k"] = (max(n) for n in case.lengths)
    options = Options.of(**named, stabilizer=case.stabilizer)
    problem, _ = describe(given.q, given.k, given.v, options, **extra)
    assert dispatch.select(problem, torch.device("cuda")).name in ("hopper", "hopper_wide")


def test_spawned_children_report_wrong_numbers() -> None:
    bugs = [bug for bug in PORTABLE if bug.name == "l not rescaled"]
    verdicts = run_all(bugs, jobs=2, controls={"control": [FULL]}, start="spawn")
    assert wrong_numbers(verdicts["l not rescaled"]), verdicts
    assert not verdicts["control"]["how"], verdicts


def test_a_child_out_of_time_has_hung_and_caught_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planting, "TIMEOUT", 0.0)
    verdict = run_all([], jobs=1, controls={"endless": [FULL]}, start="spawn")["endless"]
    assert verdict["how"].startswith("hung") and not wrong_numbers(verdict)
