"""What several commands share: naming a configuration, telling an error."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from megatron_patch.schema import paths
from megatron_patch.schema.run import Loaded

# What argparse calls the object that add_parser() is a method of.
Subparsers = argparse._SubParsersAction

SET_HELP = (
    "override one key, typed by the same schema; repeatable, the last one wins. Lists: [1,2]; "
    "no value: null; element of a list: data.train.0.path=..."
)


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Descriptions keep their lines; options show their defaults in their own words."""


class Parser(argparse.ArgumentParser):
    """The parser of the program, and (argparse takes its class) of every command."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": Formatter, "allow_abbrev": False, **options})


def add_config(parser: argparse.ArgumentParser) -> None:
    """``--config FILE`` and ``--set a.b=c``."""
    parser.add_argument(
        "--config", metavar="FILE", type=as_path, required=True, help="YAML file of the run"
    )
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """``--set a.b=c``."""
    parser.add_argument(
        "--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[], help=SET_HELP
    )


def as_path(text: str) -> str:
    """An argument that names a place (``type=`` of argparse), expanded as a key is.

    What exists under the name as written is meant: the shell has expanded it, or found it.

    Raises argparse.ArgumentTypeError: it cannot be expanded.
    """
    if not text.startswith("~") and os.path.lexists(text):
        return text
    try:
        return paths.expand(text)
    except paths.PathError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def load(file: str, overrides: list[str], *, for_job: bool = False) -> Loaded:
    """The checked configuration; ``ConfigError`` with every problem."""
    from megatron_patch import config

    return config.load(file, overrides, for_job=for_job)


logged: list[str] = []
"""What `report_error` got, on every rank; the launcher writes the last one beside the exit code."""


def report_error(error: BaseException) -> None:
    """Print ``error`` on stderr, once a node under torchrun (every process of it has the same).

    Once a node, not once a job: a file that is missing on one node only would otherwise end the
    job without a word.
    """
    logged.append(str(error) or type(error).__name__)
    try:
        _print_error(error)
    except OSError:
        # A log on a full disk: the exit code is all that tells what it was. Python would try the
        # line once more at exit, and end with 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _print_error(error: BaseException) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"megatron-patch: {error}", file=sys.stderr, flush=True)
        return
    from megatron_patch.config import ConfigError

    if not isinstance(error, ConfigError):
        # What is found later can differ between processes: one line from each.
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        print(f"[rank {os.environ.get('RANK', '?')}] {first}", file=sys.stderr, flush=True)
