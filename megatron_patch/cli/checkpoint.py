"""``megatron-patch checkpoint list|verify|prune|rollback|import|export``."""

from __future__ import annotations

import argparse
import calendar
import contextlib
import json
import logging
import os
import shlex
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megatron_patch.cli.common import Subparsers, as_path

if TYPE_CHECKING:
    from megatron_patch.checkpoint.inspect import Entry

DESCRIPTION = """\
Look after the checkpoints of a run. PATH is a run directory, its checkpoints/, or one checkpoint.
No GPU and no configuration is needed.

  megatron-patch checkpoint list runs/gpt2
  megatron-patch checkpoint verify runs/gpt2
  megatron-patch checkpoint prune runs/gpt2 --keep-last 3 --keep-every 10000
  megatron-patch checkpoint prune runs/gpt2 --keep-last 3 --keep-every 10000 --delete
  megatron-patch checkpoint rollback runs/gpt2 --to 5000
  megatron-patch checkpoint export runs/gpt2 --out gpt2-hf
  megatron-patch checkpoint import Qwen3-0.6B --out checkpoints/qwen3
"""
EPILOG = """\
Exit codes: 0 everything asked for is good, or was done; 1 something is damaged, and a good
checkpoint remains; 2 bad input; 4 there is no good checkpoint.
"""
PRUNE = """\
Delete old checkpoints by a rule. Without --delete it only says what would go: a checkpoint is a day
of a cluster, and a wrong number in a rule is found by reading the list.

Kept are the newest --keep-last, every step that is a multiple of --keep-every, and always: the
newest one, the one 'latest' names, those the file 'pinned' names (the early warning pins one from
before a danger), damaged ones (evidence), other stores' ones, everything in aside/. Before the
first deletion one of those that stay is hashed and must be good.
"""
ROLLBACK = """\
Go back: make the checkpoint of a step the newest, which is the one that the next start continues.
Newer ones are moved to aside/; nothing is deleted. Refused while the run trains.
"""
IMPORT = """\
Make a checkpoint of a Hugging Face model: PATH is its folder on this machine, config.json and
safetensors files of gpt2, llama, mistral, mixtral, qwen2, qwen3 or qwen3_moe. Prints the sections
of a configuration that start from it. What our model would compute otherwise is refused.
"""
EXPORT = """\
Write a checkpoint as a Hugging Face model: config.json, safetensors files of at most 5 GB, and the
tokenizer where it is a tokenizer.json. Any layout; of a run the newest good checkpoint.
"""


def add_parser(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "checkpoint",
        help="list, verify, prune, go back to, import and export checkpoints",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def action(name: str, work: Any, text: str, long: str = "") -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = actions.add_parser(
            name, help=text, description=long or text.capitalize() + ".", epilog=EPILOG
        )
        place = "run directory, checkpoints/, or one"
        place = "folder of a Hugging Face model" if name == "import" else place
        made.add_argument("path", metavar="PATH", type=as_path, help=place)
        made.add_argument("--json", action="store_true", help="one JSON document on stdout")
        made.set_defaults(run=work, only_prints=name in ("list", "verify"))
        return made

    verify = action("verify", run_verify, "hash every file of every complete checkpoint")
    listing = action("list", run_list, "step, size, age and state of everything in the store")
    text = "delete old checkpoints by a rule; says only what would go"
    prune = action("prune", run_prune, text, PRUNE)
    text = "make a checkpoint of a Hugging Face model"
    imported = action("import", run_import, text, IMPORT)
    text = "tokens of a training sequence; default: the model's positions"
    imported.add_argument("--seq-length", metavar="N", type=_count, help=text)
    exported = action("export", run_export, "write a Hugging Face model", EXPORT)
    text = "rows of the embedding to write; default: those imported, or the tokenizer's ids"
    exported.add_argument("--vocab-size", metavar="N", type=_count, help=text)
    for parser in (imported, exported):
        text = "new directory"
        parser.add_argument("--out", metavar="DIR", type=as_path, required=True, help=text)
    for parser in (verify, listing, prune, imported, exported):
        text = "sign it with this key" if parser is imported else "check signatures with this key"
        parser.add_argument("--key-file", metavar="FILE", type=as_path, help=text)
    for parser in (verify, prune):
        parser.add_argument(
            "--jobs", metavar="N", type=_count, default=min(8, os.cpu_count() or 1),
            help="files hashed at once (%(default)s)",
        )  # fmt: skip
    text = "of large files a sample of pages only"
    verify.add_argument("--sampled", action="store_true", help=text)
    prune.add_argument("--keep-last", metavar="N", type=_count, help="newest ones kept")
    text = "keep multiples of this step"
    prune.add_argument("--keep-every", metavar="STEPS", type=_count, help=text)
    prune.add_argument("--delete", action="store_true", help="do it")
    rollback = action(
        "rollback", run_rollback, "go back to a step; moves newer ones aside", ROLLBACK
    )
    text = "step of a checkpoint, or its name"
    rollback.add_argument("--to", metavar="STEP", required=True, help=text)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) < 1 << 62:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: a whole number of at least 1 is needed")
    return int(text)


def _root(args: argparse.Namespace, *, whole: bool) -> tuple[Path, str | None]:
    from megatron_patch.checkpoint import inspect

    root, only = inspect.resolve(args.path)
    if whole and only is not None:
        text = f"{args.path} is one checkpoint; name the run directory or its checkpoints/"
        raise inspect.RequestError(text)
    return root, only


def _key(args: argparse.Namespace) -> bytes | None:
    from megatron_patch.checkpoint import inspect
    from megatron_patch.checkpoint.manifest import read_key

    try:
        return None if args.key_file is None else read_key(args.key_file)
    except ValueError as error:
        raise inspect.RequestError(f"--key-file: {error}") from None


def _survey(args: argparse.Namespace, *, whole: bool = False) -> tuple[Path, list[Entry]]:
    from megatron_patch.checkpoint import inspect

    key = _key(args)
    root, only = _root(args, whole=whole)
    try:
        return root, inspect.survey(root, key=key, only=only)
    except OSError as error:
        raise inspect.RequestError(f"{root} cannot be read: {error.strerror}") from None


def _bar(total: int | None = None) -> Any:
    """Bytes hashed, on a terminal only."""
    from tqdm import tqdm

    return tqdm(total=total, desc="hashed", unit="B", unit_scale=True, leave=False, disable=None)


def _print_json(**answer: Any) -> None:
    print(json.dumps(answer, indent=1, default=str))


def run_list(args: argparse.Namespace) -> int:
    from megatron_patch.checkpoint import inspect, newest, pinned
    from megatron_patch.checkpoint.directory import CheckpointDirectory
    from megatron_patch.checkpoint.errors import CheckpointError

    root, entries = _survey(args)
    directory, edited, problem = CheckpointDirectory(root), "", ""
    try:
        problem = pinned.missing_warning(root, directory.complete_names())
        newest.candidates(directory)
        edited = newest.unfinished(directory)
    except CheckpointError as error:
        edited = str(error)
    except OSError as error:  # of files beside the checkpoints, which the survey did not need
        raise inspect.RequestError(f"{error.filename} cannot be read: {error.strerror}") from None
    if args.json:
        found = [e.as_dict() for e in entries]
        _print_json(store=root, entries=found, pinned_problem=problem, latest_problem=edited)
    else:
        print(table(entries))
        for text in filter(None, (problem, edited)):
            print(f"warning: {text}")
    return verdict(entries)


def run_verify(args: argparse.Namespace) -> int:
    """Hash, print one line a checkpoint."""
    from megatron_patch.checkpoint import inspect

    root, entries = _survey(args)
    entries = [e for e in entries if e.state in ("complete", "damaged", "unreadable")]
    with _bar(sum(e.size for e in entries)) as bar:
        inspect.verify(entries, jobs=args.jobs, sampled=args.sampled, progress=bar.update)
    code = verdict(entries)
    if args.json:
        found = [e.as_dict() for e in entries]
        _print_json(store=root, sampled=args.sampled, exit_code=code, entries=found)
        return code
    for e in entries:
        detail = f": {e.reason}" if e.reason else ""
        signature = ""
        if e.state == "good" and e.signed:
            signature = ", signature good" if args.key_file else ", signature not checked (no key)"
        print(f"{e.state:<10} {e.name}  {size(e.size)}{signature}{detail}")
    good = sum(e.state == "good" for e in entries)
    count = sum(e.state != "gone" for e in entries)
    print(f"{good} of {count} complete checkpoints are good in {root}")
    return code


def run_prune(args: argparse.Namespace) -> int:
    """Say what would go; with ``--delete`` delete it."""
    from megatron_patch.checkpoint import inspect

    args.only_prints = not args.delete
    if args.keep_last is None and args.keep_every is None:
        raise inspect.RequestError("prune needs a rule: --keep-last N, --keep-every STEPS, or both")
    root, entries = _survey(args, whole=True)
    found = inspect.plan(root, entries, last=args.keep_last, every=args.keep_every)
    if not args.json:
        for entry, why in found.kept:
            print(f"keep    {entry.name}  {size(entry.size)}  {why}")
        for entry in found.doomed:
            print(f"{'delete' if args.delete else 'would go'}  {entry.name}  {size(entry.size)}")
    freed = sum(e.size for e in found.doomed)
    if args.delete:
        with _bar() as bar:
            freed = inspect.delete(root, found, jobs=args.jobs, progress=bar.update)
    if args.json:
        kept = [e.as_dict() | {"why": why} for e, why in found.kept]
        doomed = [e.as_dict() for e in found.doomed]
        _print_json(store=root, deleted=args.delete, bytes=freed, kept=kept, doomed=doomed)
    elif args.delete:
        print(f"deleted {len(found.doomed)} checkpoint(s), {size(freed)}")
    else:
        print(f"{len(found.doomed)} checkpoint(s), {size(freed)}, would go; --delete does it")
    return 4 if verdict(entries) == 4 else 0  # damaged ones are kept, as it says


def run_rollback(args: argparse.Namespace) -> int:
    """Move newer ones aside; say what moved, and how to undo it."""
    from megatron_patch.checkpoint import inspect

    root, _ = _root(args, whole=True)
    logging.disable(logging.WARNING)  # what they say is printed below
    try:
        name, moved = inspect.roll_back(root, args.to)
    finally:
        logging.disable(logging.NOTSET)
    undo = [shlex.join(["mv", str(path), str(root / old)]) for old, path in moved.items()]
    if moved:
        newest = next(iter(moved))
        undo.append(
            shlex.join(["megatron-patch", "checkpoint", "rollback", str(root), "--to", newest])
        )
    if args.json:
        _print_json(store=root, checkpoint=name, moved=moved, undo=undo)
        return 0
    for old, path in moved.items():
        print(f"moved   {old} to {path}")
    print(f"the next start continues from {name}" + ("" if moved else "; nothing was newer"))
    if undo:
        print("to undo:")
        for line in undo:
            print(f"  {line}")
    if (root.parent / "FINISHED").exists():
        print(f"the run has finished; to train on, delete {root.parent / 'FINISHED'}")
    return 0


@contextlib.contextmanager
def _converting(args: argparse.Namespace) -> Iterator[bytes | None]:
    """The key; what Megatron-Core says about machines without a GPU is not heard."""
    key = _key(args)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield key
    finally:
        logging.disable(logging.NOTSET)


def run_import(args: argparse.Namespace) -> int:
    """Make the checkpoint; print what fits it."""
    from megatron_patch.config import checks

    with _converting(args) as key:
        from megatron_patch.checkpoint import hf

        found = hf.import_model(
            Path(args.path), Path(args.out), seq_length=args.seq_length, key=key,
            check=lambda run: checks.problems(run, ("model",)),
        )  # fmt: skip
    if args.json:
        _print_json(checkpoint=found.path, notes=found.notes, config=found.tree)
        return 0
    print(*(f"# {line}" for line in [*found.notes, f"imported as {found.path}"]), sep="\n")
    print(yaml.safe_dump(found.tree, sort_keys=False, default_flow_style=None, width=98), end="")
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Write the folder; say what it is."""
    with _converting(args) as key:
        from megatron_patch.checkpoint import hf

        lines = hf.export_model(
            Path(args.path), Path(args.out), vocab_size=args.vocab_size, key=key
        )
    if args.json:
        _print_json(folder=args.out, notes=lines)
    else:
        print(*lines, f"exported to {args.out}", sep="\n")
    return 0


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
        why = [f"pinned: {e.pinned}"] * (e.pinned is not None) + [e.reason] * bool(e.reason)
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
    try:
        then = calendar.timegm(time.strptime(created, "%Y-%m-%dT%H:%M:%SZ"))
    except ValueError:
        return ""
    minutes = max(0, int(now - then) // 60)
    days, hours = minutes // 1440, minutes // 60 % 24
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"
