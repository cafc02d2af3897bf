"""Paths as a person writes them: ``~``, ``$VAR`` and ``${VAR}`` mean the same everywhere.

The loader expands every key whose type is `PathText` or `PathOrName`, the command line every
argument that names a place. Nothing else expands a path, and nothing below them meets a ``~``.
"""

from __future__ import annotations

import os
import re
from typing import Annotated

PathText = Annotated[str, "path"]
"""A file or a directory; relative paths start at the working directory."""
PathOrName = Annotated[str, "path or name"]
"""The same, or a name that something else looks up: a command, an image, an encoding."""

_DOLLAR = re.compile(r"\$(?:\$|([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})?", re.ASCII)
NODE_ONLY = re.compile(r"SLURM\w*|TMPDIR", re.ASCII)
"""Variables that have another value, or one at all, on the nodes of a job."""


class PathError(ValueError):
    """A path that cannot be expanded; the text names the value and the remedy."""


def expand(text: str, *, for_job: bool = False) -> str:
    """``text`` with its variables and then a leading ``~`` or ``~user`` replaced.

    The result never begins with ``~``, and `written` makes a text of it that expands to it again.

    Args:
        text: ``~/x``, ``~user/x``, ``$VAR/x``, ``${VAR}/x``; ``$$`` is the character ``$``, and
            ``./~x`` a name that begins with ``~``.
        for_job: the path is for a job on other machines: `NODE_ONLY` variables are refused.

    Raises PathError: empty; a variable is unknown, empty or no path; there is no such user; or
    something here has the unexpanded text as its name.
    """
    if not text.strip():
        raise PathError("is empty; name a file or directory, or leave it out for the default")
    if text != text.strip():
        raise PathError(f"{text!r} begins or ends with white space; remove it")

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return _variable(match[1] or match[2], text, for_job=for_job)

    found = _home(_DOLLAR.sub(value, text), text)
    if found != text and os.path.lexists(text):
        literal = written(f"./{text}" if text.startswith("~") else text)
        raise PathError(
            f"{text!r} now means {found}, but something here has that very name (earlier versions "
            f"did not expand it): move it there, or write {literal} for it"
        )
    return found


def _variable(name: str | None, text: str, *, for_job: bool) -> str:
    if not name:
        raise PathError(
            f"{text!r}: a $ begins $NAME or ${{NAME}} and nothing else; write $$ for the "
            "character itself"
        )
    if for_job and NODE_ONLY.fullmatch(name):
        raise PathError(
            f"{text!r}: {name} of a job is known on its nodes only, and paths are written into "
            "the batch script on this machine; name a path that every node has"
        )
    found = os.environ.get(name)
    if found is None:
        raise PathError(
            f"{text!r}: the variable {name} is not set here; set it, write the path out, or write "
            "$$ for the character $"
        )
    if not found.strip():
        raise PathError(f"{text!r}: the variable {name} is empty; set it, or write the path out")
    if found != found.strip() or not found.isprintable():
        raise PathError(
            f"{text!r}: the variable {name} holds {found[:80]!r}, with white space around it or "
            "characters that cannot be shown; set it to a plain path"
        )
    return found


def _home(path: str, text: str) -> str:
    """``path`` without its leading ``~`` or ``~user``."""
    if not path.startswith("~"):
        return path
    name, slash, rest = path.partition("/")
    home = os.path.expanduser(name)
    if name == "~" and "HOME" in os.environ:
        home = _variable("HOME", text, for_job=False)  # empty, it would be the root
    if home.startswith("~"):
        raise PathError(
            f"{text!r}: this machine has no user {name[1:]!r}; write the directory out, or "
            f"./{name} for a name that begins with ~"
        )
    if not os.path.isabs(home):
        raise PathError(f"{text!r}: HOME is {home!r}, not an absolute path; write the path out")
    return home.rstrip("/") + slash + rest or "/"


def written(path: str) -> str:
    """The text that `expand` makes ``path`` of."""
    return path.replace("$", "$$")


def absolute(path: str, *, or_name: bool = False) -> str:
    """Where ``path`` leads from the working directory.

    ``or_name``: it may be the name of something else, which stays as it is.
    """
    if or_name and path[:1] not in ("/", ".") and not os.path.lexists(path):
        return path
    return os.path.abspath(path)
