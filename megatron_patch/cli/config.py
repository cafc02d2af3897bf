"""``megatron-patch config show|check|help|docs``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_patch.cli.common import Subparsers, add_overrides, as_path, load, tell
from megatron_patch.schema import paths
from megatron_patch.schema.problem import printable

if TYPE_CHECKING:
    from megatron_patch.schema.run import RunConfig

DESCRIPTION = """\
Look at a configuration without starting anything. Nothing here needs a GPU or imports torch.

  megatron-patch config check configs/*.yaml
  megatron-patch config show run.yaml --set optimizer.lr=3e-4
  megatron-patch config help optimizer.lr
"""


def add_parser(commands: Subparsers) -> None:
    """Register the command and its four parts."""
    parser = commands.add_parser(
        "config", help="check, show and explain a configuration", description=DESCRIPTION
    )
    parser.set_defaults(only_prints=True)
    parts = parser.add_subparsers(title="what to do", metavar="show|check|help|docs", required=True)

    show = _part(
        parts,
        "show",
        "print the resolved configuration, each value with its origin",
        "The output is YAML and loads to the same values; origins stand in comments.",
    )
    _add_file(show, many=False)
    show.add_argument("--no-origins", action="store_true", help="leave the comments out")
    show.set_defaults(run=run_show)

    check = _part(
        parts,
        "check",
        "check configurations and report every problem at once",
        "Exit code 0: usable, and every path it names is printed as it is meant, from the working\n"
        "directory; 2: the problems are on stderr, with file, line and remedy.\n"
        "Data files are checked when they are opened, at the start of training.",
    )
    _add_file(check, many=True)
    check.set_defaults(run=run_check)

    explain = _part(
        parts, "help", "explain the keys of a configuration", "Type, default and meaning of keys."
    )
    explain.add_argument(
        "topic",
        nargs="?",
        default="",
        metavar="SECTION[.KEY]",
        help="section or key, e.g. optimizer or optimizer.lr; none: list all",
    )
    explain.set_defaults(run=run_help)

    docs = _part(
        parts,
        "docs",
        "print the reference page of all keys (docs/configuration.md)",
        "Markdown, generated from the docstrings of the configuration's dataclasses.",
    )
    docs.add_argument(
        "--write", metavar="FILE", type=as_path, help="write it there instead of printing it"
    )
    docs.set_defaults(run=run_docs)


def _part(parts: Subparsers, name: str, summary: str, more: str) -> argparse.ArgumentParser:
    return parts.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.\n{more}"
    )


def _add_file(parser: argparse.ArgumentParser, *, many: bool) -> None:
    """The configuration, as an argument or (as in ``train``) with ``--config``."""
    parser.add_argument("files", metavar="FILE", type=as_path, nargs="*", help="YAML file")
    text = "the same, as train takes it"
    parser.add_argument(
        "--config", metavar="FILE", type=as_path, action="append", default=[], help=text
    )
    add_overrides(parser)
    parser.set_defaults(many=many, parser=parser)


def _files(args: argparse.Namespace) -> list[str]:
    files = [*args.files, *args.config]
    if not files:
        args.parser.error("name a configuration file")
    if len(files) > 1 and not args.many:
        args.parser.error(f"takes one configuration file, {len(files)} are given")
    return files


def run_show(args: argparse.Namespace) -> int:
    (file,) = _files(args)
    loaded = load(file, args.overrides)
    sys.stdout.write(loaded.render(origins=not args.no_origins))
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Check every file; 2 if any cannot be used."""
    from megatron_patch.config import ConfigError

    code = 0
    for file in _files(args):
        try:
            loaded = load(file, args.overrides)
        except ConfigError as error:
            tell(error)
            code = error.exit_code
        else:
            print(f"{file}: ok")
            for key, place in effective_paths(loaded.config):
                print(f"  {key}: {printable(place)}")
    return code


def effective_paths(run: RunConfig) -> Iterator[tuple[str, str]]:
    """(key, where it leads from here) of every path of a run, those made up by default included."""
    from megatron_patch.config import types

    yield "run_dir", os.path.abspath(run.directory)
    yield "checkpoint.directory", os.path.abspath(run.checkpoint_directory)
    for key, tp, text in types.path_keys(run):
        if key not in ("run_dir", "checkpoint.directory"):
            yield key, paths.absolute(text, or_name=tp == paths.PathOrName)


def run_help(args: argparse.Namespace) -> int:
    from megatron_patch.config import docs

    print(docs.help_text(args.topic))
    return 0


def run_docs(args: argparse.Namespace) -> int:
    from megatron_patch.config import ConfigError, docs
    from megatron_patch.runtime.files import write_named
    from megatron_patch.schema.problem import Problem

    page = docs.render_reference()
    if args.write:
        try:
            write_named(Path(args.write), page)
        except OSError as error:
            reason = error.strerror or error
            text = f"{args.write}: cannot be written ({reason}); name a file, e.g. configuration.md"
            raise ConfigError([Problem("--write", text)]) from None
    else:
        sys.stdout.write(page)
    return 0
