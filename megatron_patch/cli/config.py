"""``megatron-patch config show|check|help|docs``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_patch.cli.common import Subparsers, add_overrides, load, tell

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
        "Exit code 0: usable; 2: the problems are on stderr, with file, line and remedy.\n"
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
    docs.add_argument("--write", metavar="FILE", help="write it there instead of printing it")
    docs.set_defaults(run=run_docs)


def _part(parts: Subparsers, name: str, summary: str, more: str) -> argparse.ArgumentParser:
    return parts.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.\n{more}"
    )


def _add_file(parser: argparse.ArgumentParser, *, many: bool) -> None:
    """The configuration, as an argument or (as in ``train``) with ``--config``."""
    parser.add_argument("files", metavar="FILE", nargs="*", help="YAML file")
    parser.add_argument(
        "--config", metavar="FILE", action="append", default=[], help="the same, as train takes it"
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
    """Print the resolved tree."""
    (path,) = _files(args)
    loaded = load(path, args.overrides)
    sys.stdout.write(loaded.render(origins=not args.no_origins))
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Check every file; 2 if any cannot be used."""
    from megatron_patch.config import ConfigError

    code = 0
    for path in _files(args):
        try:
            load(path, args.overrides)
        except ConfigError as error:
            tell(error)
            code = error.exit_code
        else:
            print(f"{path}: ok")
    return code


def run_help(args: argparse.Namespace) -> int:
    """Explain a section or a key."""
    from megatron_patch.config import docs

    print(docs.help_text(args.topic))
    return 0


def run_docs(args: argparse.Namespace) -> int:
    """Print or write the reference page."""
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
