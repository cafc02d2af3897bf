"""``megatron-patch checkpoint verify|list|prune``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from megatron_patch.cli.common import Formatter, Subparsers

if TYPE_CHECKING:
    from megatron_patch.checkpoint.inspect import Entry

DESCRIPTION = """\
Look after the checkpoints of a run. PATH is a run directory, its checkpoints/, or one checkpoint.
No torch, no GPU and no configuration is needed.

  megatron-patch checkpoint list runs/gpt2
  megatron-patch checkpoint verify runs/gpt2
  megatron-patch checkpoint prune runs/gpt2 --keep-last 3 --keep-every 10000
  megatron-patch checkpoint prune runs/gpt2 --keep-last 3 --keep-every 10000 --delete
"""
EPILOG = """\
Exit codes: 0 everything asked for is good, or was done; 1 something is damaged, and a good
checkpoint remains; 2 bad input; 4 there is no good checkpoint.
"""
PRUNE = """\
Delete old checkpoints by a rule. Without --delete it only says what would go: a checkpoint is a day
of a cluster, and a wrong number in a rule is found by reading the list.

Kept are the newest --keep-last, every step that is a multiple of --keep-every, and always: the
newest one, the one 'latest' names, those 'kept.json' names (one from before a danger of the early
warning), damaged ones (evidence), other stores' ones, everything in aside/. Before the first
deletion one of those that stay is hashed and must be good.
"""


def add_parser(commands: Subparsers) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "checkpoint",
        help="verify, list and prune the checkpoints of a run",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, work, text in (
        ("verify", run_verify, "hash every file of every complete checkpoint"),
        ("list", run_list, "step, size, age and state of everything in the store"),
        ("prune", run_prune, "delete old checkpoints by a rule; says only what would go"),
    ):
        action = actions.add_parser(
            name,
            help=text,
            description=PRUNE if name == "prune" else text.capitalize() + ".",
            epilog=EPILOG,
            formatter_class=Formatter,
            allow_abbrev=False,
        )
        action.add_argument("path", metavar="PATH", help="run directory, checkpoints/, or one")
        action.add_argument("--json", action="store_true", help="one JSON document on stdout")
        action.add_argument("--key-file", metavar="FILE", help="check signatures with this key")
        if name != "list":
            action.add_argument(
                "--jobs", metavar="N", type=_count, default=min(8, os.cpu_count() or 1),
                help="files hashed at once (%(default)s)",
            )  # fmt: skip
        action.set_defaults(run=work, only_prints=name == "list")
        if name == "verify":
            action.add_argument(
                "--sampled", action="store_true", help="of large files a sample of pages only"
            )
        if name == "prune":
            action.add_argument("--keep-last", metavar="N", type=_count, help="newest ones kept")
            action.add_argument(
                "--keep-every", metavar="STEPS", type=_count, help="keep multiples of this step"
            )
            action.add_argument("--delete", action="store_true", help="do it")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) < 1 << 62:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: a whole number of at least 1 is needed")
    return int(text)


def _survey(args: argparse.Namespace) -> tuple[Any, list[Entry]]:
    from megatron_patch.checkpoint import inspect
    from megatron_patch.checkpoint.manifest import read_key

    try:
        key = None if args.key_file is None else read_key(args.key_file)
    except ValueError as error:
        raise inspect.KeyFileError(f"--key-file: {error}") from None
    root, only = inspect.resolve(args.path)
    try:
        return root, inspect.survey(root, key=key, only=only)
    except OSError as error:
        raise inspect.NoCheckpointsError(f"{root} cannot be read: {error.strerror}") from None


def run_list(args: argparse.Namespace) -> int:
    """Print the table."""
    from megatron_patch.checkpoint import inspect

    root, entries = _survey(args)
    problem = inspect.kept_problem(root)
    if args.json:
        found = {"store": str(root), "entries": [e.as_dict() for e in entries]}
        print(json.dumps(found | {"kept_problem": problem}, indent=1))
    else:
        print(table(entries))
        if problem:
            print(f"warning: {problem}")
    return verdict(entries)


def run_verify(args: argparse.Namespace) -> int:
    """Hash, print one line a checkpoint."""
    from megatron_patch.checkpoint import inspect

    root, entries = _survey(args)
    entries = [e for e in entries if e.state in ("complete", "damaged", "unreadable")]
    bar = Bar()
    inspect.verify(entries, jobs=args.jobs, sampled=args.sampled, progress=bar.show)
    bar.clear()
    code = verdict(entries)
    if args.json:
        found = {"store": str(root), "sampled": args.sampled, "exit_code": code,
                 "entries": [e.as_dict() for e in entries]}  # fmt: skip
        print(json.dumps(found, indent=1))
        return code
    for e in entries:
        detail = f": {e.reason}" if e.reason else ""
        signature = ""
        if e.state == "good" and e.signed:
            signature = ", signature good" if args.key_file else ", signature not checked (no key)"
        print(f"{e.state:<10} {e.name}  {size(e.size)}{signature}{detail}")
    good = sum(e.state == "good" for e in entries)
    print(f"{good} of {len(entries)} complete checkpoints are good in {root}")
    return code


def run_prune(args: argparse.Namespace) -> int:
    """Say what would go; with ``--delete`` delete it."""
    from megatron_patch.checkpoint import inspect

    if args.keep_last is None and args.keep_every is None:
        raise inspect.NoCheckpointsError(
            "prune needs a rule: --keep-last N, --keep-every STEPS, or both"
        )
    root, only = inspect.resolve(args.path)
    if only is not None:
        raise inspect.NoCheckpointsError(
            f"{args.path} is one checkpoint; prune wants the run directory or its checkpoints/"
        )
    _, entries = _survey(args)
    found = inspect.plan(root, entries, last=args.keep_last, every=args.keep_every)
    if not args.json:
        for entry, why in found.kept:
            print(f"keep    {entry.name}  {size(entry.size)}  {why}")
        for entry in found.doomed:
            print(f"{'delete' if args.delete else 'would go'}  {entry.name}  {size(entry.size)}")
    freed = sum(e.size for e in found.doomed)
    if args.delete:
        bar = Bar()
        try:
            freed = inspect.delete(root, found, jobs=args.jobs, progress=bar.show)
        finally:
            bar.clear()
    if args.json:
        answer = {"store": str(root), "deleted": args.delete, "bytes": freed,
                  "kept": [e.as_dict() | {"why": why} for e, why in found.kept],
                  "doomed": [e.as_dict() for e in found.doomed]}  # fmt: skip
        print(json.dumps(answer, indent=1))
    elif args.delete:
        print(f"deleted {len(found.doomed)} checkpoint(s), {size(freed)}")
    else:
        print(f"{len(found.doomed)} checkpoint(s), {size(freed)}, would go; --delete does it")
    return 4 if verdict(entries) == 4 else 0  # damaged ones are kept, as it says


def verdict(entries: list[Entry]) -> int:
    """Exit code of what was found."""
    complete = [e for e in entries if e.state in ("complete", "good", "damaged", "unreadable")]
    fine = [e for e in complete if e.state in ("complete", "good")]
    if not fine:
        return 4
    return 0 if len(fine) == len(complete) else 1


def table(entries: list[Entry]) -> str:
    """Step, attempt, size, age, state, signed, name."""
    lines = [f"{'step':>10} {'size':>10} {'age':>10}  {'state':<14} {'signed':<7} name"]
    now = time.time()
    for e in entries:
        step = "" if e.step is None else f"{e.step:,}"
        state = e.state + (" *" if e.latest else "")
        signed = "yes" if e.signed else "no" if e.manifest is not None else ""
        why = [f"kept: {e.kept}"] * bool(e.kept) + [e.reason] * bool(e.reason)
        detail = f"  ({'; '.join(why)})" if why else ""
        lines.append(
            f"{step:>10} {size(e.size):>10} {age(e.created, now):>10}  {state:<14} {signed:<7} "
            f"{e.name}{detail}"
        )
    if any(e.latest for e in entries):
        lines.append("* named by latest; list compares sizes only, verify hashes")
    return "\n".join(lines)


def size(count: float) -> str:
    """``1.2 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def age(created: str, now: float) -> str:
    """``3 d 4 h`` since a time as manifests write it; empty when it is none."""
    import calendar

    try:
        then = calendar.timegm(time.strptime(created, "%Y-%m-%dT%H:%M:%SZ"))
    except ValueError:
        return ""
    minutes = max(0, int(now - then) // 60)
    days, hours = minutes // 1440, minutes // 60 % 24
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"


class Bar:
    """One line on a terminal: share done and time left."""

    def __init__(self) -> None:
        self._begin, self._shown = time.monotonic(), 0.0
        self._active = sys.stderr.isatty()

    def show(self, done: int, total: int) -> None:
        """At most five times a second."""
        now = time.monotonic()
        if not self._active or (now - self._shown < 0.2 and done < total):
            return
        self._shown = now
        left = (now - self._begin) * (total - done) / max(done, 1)
        text = f"{size(done)} of {size(total)} hashed, {left:.0f} s left"
        print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line away."""
        if self._active:
            print(f"\r{'':<60}\r", end="", file=sys.stderr, flush=True)
