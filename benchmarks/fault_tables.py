"""Tables of random kills and restarts, for ``render_tables.py``."""

from __future__ import annotations

from typing import Any

from table_text import Tables, origin, table


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
        "sigkill-soak": ("sigkill_soak", sigkill_soak, "sigkill_soak.py --state DIR"),
        "restart-2": ("restart_2gpu", restart, "restart_on_gpus.py --gpus 2"),
        "restart-4": ("restart_4gpu", restart, "restart_on_gpus.py --gpus 4"),
        "restart-8": ("restart_8gpu", restart, "restart_on_gpus.py --gpus 8"),
    }
