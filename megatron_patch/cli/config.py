"""``megatron-patch config show|check|help|docs``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_patch.cli.common import Subparsers, add_overrides, as_path, load, report_error
from megatron_patch.schema import paths
from megatron_patch.schema.problem import printable
from megatron_patch.schema.run import RunConfig

DESCRIPTION = """\
Look at a configuration without starting anything. Nothing here needs a GPU or imports torch.

  megatron-patch config check configs/*.yaml
  megatron-patch config show run.yaml --set optimizer.lr=3e-4
  megatron-patch config help optimizer.lr
"""


SHOW = """\
Print the resolved configuration, each value with its origin.
The output is YAML and loads to the same values; origins stand in comments.
"""
CHECK = """\
Check configurations and report every problem at once.
Exit code 0: usable, and every path it names is printed as it is meant, from the working
directory; 2: the problems are on stderr, with file, line and remedy.
Data files are checked when they are opened, at the start of training.
"""
HELP = """\
Explain the keys of a configuration: type, default and meaning.
"""
DOCS = """\
Print the reference page of all keys (docs/configuration.md).
Markdown, generated from the docstrings of the configuration's dataclasses.
"""


def add_parser(commands: Subparsers) -> None:
    text = "check, show and explain a configuration"
    parser = commands.add_parser("config", help=text, description=DESCRIPTION)
    parser.set_defaults(only_prints=True)
    parts = parser.add_subparsers(title="what to do", metavar="show|check|help|docs", required=True)

    def part(name: str, description: str, work: Any) -> argparse.ArgumentParser:
        first = description.splitlines()[0].rstrip(".")
        text = first[0].lower() + first[1:]
        made: argparse.ArgumentParser = parts.add_parser(name, help=text, description=description)
        made.set_defaults(run=work, parser=made)
        return made

    show, check = part("show", SHOW, run_show), part("check", CHECK, run_check)
    for one in (show, check):  # the configuration, as an argument or (as in `train`) with --config
        one.add_argument("files", metavar="FILE", type=as_path, nargs="*", help="YAML file")
        options: dict[str, Any] = {"metavar": "FILE", "type": as_path, "action": "append"}
        one.add_argument("--config", default=[], help="the same, as train takes it", **options)
        add_overrides(one)
    show.add_argument("--no-origins", action="store_true", help="leave the comments out")
    text = "section or key, e.g. optimizer or optimizer.lr; none: list all"
    explain = part("help", HELP, run_help)
    explain.add_argument("topic", nargs="?", default="", metavar="SECTION[.KEY]", help=text)
    text = "write it there instead of printing it"
    docs = part("docs", DOCS, run_docs)
    docs.add_argument("--write", metavar="FILE", type=as_path, help=text)


def _files(args: argparse.Namespace) -> list[str]:
    files = [*args.files, *args.config]
    if not files:
        args.parser.error("name a configuration file")
    return files


def run_show(args: argparse.Namespace) -> int:
    files = _files(args)
    if len(files) > 1:
        args.parser.error(f"takes one configuration file, {len(files)} are given")
    loaded = load(files[0], args.overrides)
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
            report_error(error)
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
