"""Tables of faults, kills and payloads, for ``render_tables.py``."""

from __future__ import annotations

from collections import Counter
from typing import Any

from table_text import Tables, origin, table

GROUPS = {
    "killed": "Processes that die",
    "signals": "Signals that ask for a stop",
    "hangs": "Processes that stand still",
    "storage": "Disks and directories",
    "data": "Data files",
    "checkpoints": "Checkpoints",
    "setup": "Settings, software, run directory",
    "network": "Network",
    "clock": "Clock",
    "numbers": "Numbers",
    "launch script": "The whole job: sbatch script, node script, torchrun",
}


def _codes(row: dict[str, Any]) -> str:
    """Exit code of the launcher and of the ranks that left one."""
    ranks = ", ".join(map(str, row.get("rank_codes", [])))
    return f"{row.get('code', '')}" + (f" / {ranks}" if ranks else "")


def _said(line: str) -> str:
    """The line as code; gloo's advice, the same every time, is cut."""
    line = line.partition(" This is typically")[0].replace("|", "\\|").replace("`", "'")
    return f"`{line}`" if line else ""


def _then(row: dict[str, Any]) -> str:
    """What became of the run."""
    if row["status"] == "failed":
        return "**fails: " + "; ".join(row["problems"])[:160].replace("\n", " ") + "**"
    if row["status"] == "skipped":
        return "not played: " + "; ".join(row["problems"])
    if row["status"] == "unseen":
        return "**not stopped**: " + row["note"]
    done = {
        "resume": f"resumed, {row['lost'] or 0} step{'s' * (row['lost'] != 1)} again",
        "goes on": "resumed",
        "finished": "finished",
        "same job": "the job itself went on and finished",
        "undetected": "finished",
    }[row["after"]]
    if row.get("hang"):
        done = f"reported after {row['hang']['seconds']} s, {done}"
    bits = ", same bits" if row["bitwise"] else ""
    return done + bits + (f"; {row['note']}" if row["note"] else "")


def fault_table(result: dict[str, Any]) -> str:
    """One table a group: what is said, how it ends, what it costs."""
    cases = result["cases"]
    counts = Counter(row["status"] for row in cases)
    orphans = sum(row.get("orphans", 0) for row in cases)
    shm = sum(row.get("shm", 0) for row in cases)
    commits = Counter(row["commit"] for row in cases)
    made = ", ".join(f"{name} {count}" for name, count in commits.items())
    parts = [
        f"{origin(result)} Rows by commit: {made}. {len(cases)} kinds of faults in "
        f"runs of {result['steps']} steps with a "
        f"checkpoint every {result['interval']}: {counts['ok']} end as they must, "
        f"{counts['unseen']} change numbers without being stopped, {counts['failed']} fail, "
        f"{counts['skipped']} not played. Orphan processes: {orphans}; files left in /dev/shm: "
        f"{shm}; runs that went back further than their last checkpoint: "
        f"{sum('steps lost' in p for row in cases for p in row['problems'])}."
    ]
    head = ["fault", "what is said", "exit code", "seconds", "then"]
    for group, title in GROUPS.items():
        rows = [
            [
                row["name"].replace("job: ", ""),
                _said(row.get("seen", "")),
                _codes(row),
                f"{row['seconds']:.1f}" if row.get("seconds") is not None else "",
                _then(row),
            ]
            for row in cases
            if row["group"] == group
        ]
        if rows:
            parts += [f"### {title}", _left(table(head, rows))]
    return "\n\n".join(parts)


def _left(text: str) -> str:
    """The words of these tables read better from the left."""
    first, second, *rest = text.splitlines()
    return "\n".join([first, second.replace("---:", "---"), *rest])


def sigkill_soak(result: dict[str, Any]) -> str:
    """Kills survived, and whether the bits are the same."""
    lost = result["steps_lost"]
    rows = [
        ["kills", f"{result['kills']} of 500 wanted"],
        ["by commit", ", ".join(f"{k} {n}" for k, n in result["by_commit"].items())],
        ["inside a save", str(result["kills_in_save"])],
        ["victims", ", ".join(f"{k} {n}" for k, n in sorted(result["by_victim"].items()))],
        ["places", ", ".join(f"{k} {n}" for k, n in sorted(result["by_place"].items()))],
        ["runs killed until they finished", str(result["episodes"])],
        [
            "of these equal to the unbroken run in every bit",
            str(result["episodes_bitwise_equal"]),
        ],
        [
            "steps repeated after a kill",
            ", ".join(f"{steps}: {n} times" for steps, n in lost.items())
            + f" (a checkpoint every {result['interval']})",
        ],
        [
            "until all processes had ended",
            f"median {result['seconds_until_all_ended']['median']} s, at most "
            f"{result['seconds_until_all_ended']['most']} s",
        ],
        ["orphans, leaked shared memory, attempts that did not end", str(len(result["wrong"]))],
    ]
    text = f"{origin(result)} {result['ranks']} ranks, {result['steps']} steps a run."
    return f"{text}\n\n{_left(table(['', ''], rows))}"


def fault_bounds(result: dict[str, Any]) -> str:
    """Seconds until errors that a retry would meet again have ended the run."""
    rows = [
        [
            b["what"],
            f"{b['seconds']:.1f}",
            f"{b['limit']:g}" if b["ok"] else f"**{b['limit']:g}, missed**",
            str(b["load"]),
            str(b["code"]),
            b["note"],
        ]
        for b in result["bounds"]
    ]
    head = ["error", "seconds", "bound", "load average", "exit code", ""]
    cores = result["machine"]["cores"]
    where = f"{origin(result)} {cores} cores; imports take longer on a loaded machine."
    return f"{where}\n\n{_left(table(head, rows))}"


def injections(result: dict[str, Any]) -> str:
    """Payloads by place."""
    rows = []
    for place in dict.fromkeys(row["place"] for row in result["injections"]):
        found = [row for row in result["injections"] if row["place"] == place]
        refused = sum(row["outcome"] == "refused" for row in found)
        ran = sum(row["executed"] for row in found)
        rows.append(
            [
                place,
                str(len(found)),
                str(refused),
                str(len(found) - refused),
                f"**{ran}**" if ran else "0",
            ]
        )
    total = [sum(int(r[n]) for r in rows) for n in (1, 2, 3, 4)]
    rows.append(["all", *map(str, total)])
    head = ["place", "payloads", "refused", "rendered and run, harmless", "executed"]
    return f"{origin(result)}\n\n{table(head, rows)}"


def canaries(result: dict[str, Any]) -> str:
    """Secrets by place, and where they turned up."""
    rows = [
        [row["place"], "refused" if row["refused"] else "used", ", ".join(row["hits"]) or "nowhere"]
        for row in result["canaries"]
    ]
    head = ["secret in", "", "found in"]
    return f"{origin(result)} {len(rows)} canaries.\n\n{_left(table(head, rows))}"


def restart(result: dict[str, Any]) -> str:
    """One rank killed on GPUs: what was repeated, and whether anything differs."""
    job, killed = result["after_the_kill"], result["killed"]
    rows = [
        ["killed", f"rank {killed['rank']} of {result['gpus']}, step {killed['step']}, "
                   f"{killed['place']}; a checkpoint every {result['checkpoint_interval']} steps"],
        ["said", f"`{job['told']}`" if job["told"] else "nothing that names the rank"],
        ["starts of the ranks", f"{job['starts']}, in the same job; exit code {job['code']}"],
        ["from the kill to the end of the run", f"{job['seconds_after_the_kill']:.0f} s "
         f"(the undisturbed run took {result['unbroken']['seconds']:.0f} s)"],
        ["steps with the same loss and gradient norm",
         f"{result['steps_compared'] if not result['different'] else 'not all'} of "
         f"{result['steps']}"],
        ["differences in weights, optimizer, random streams, data of "
         f"{result['ranks_compared']} ranks", ", ".join(result["different"]) or "none"],
        ["processes left behind", ", ".join(job["orphans"]) or "none"],
    ]  # fmt: skip
    return f"{origin(result)}\n\n{table(['', ''], rows)}"


def tables() -> Tables:
    """Marker -> (result file, renderer, command that measures it)."""
    return {
        "fault-table": ("fault_table", fault_table, "fault_table.py --state DIR"),
        "sigkill-soak": ("sigkill_soak", sigkill_soak, "sigkill_soak.py --state DIR"),
        "fault-bounds": ("fault_bounds", fault_bounds, "fault_bounds.py"),
        "restart-2": ("restart_2gpu", restart, "restart_on_gpus.py --gpus 2"),
        "restart-4": ("restart_4gpu", restart, "restart_on_gpus.py --gpus 4"),
        "restart-8": ("restart_8gpu", restart, "restart_on_gpus.py --gpus 8"),
        "injections": ("security_table", injections, "security_table.py"),
        "canaries": ("security_table", canaries, "security_table.py"),
    }
