"""What torchrun starts as a rank: ``python -m megatron_patch.launcher.rank PROGRAM [ARG...]``.

torchrun turns every failure into its own exit code 1, so the rank's own code is left in a file,
where the batch script finds it: ``$MEGATRON_PATCH_ATTEMPT_DIR/exit/00003`` holds
``CODE UNIX_TIME REASON``. A rank that was killed leaves none, and neither does one that waits for
it inside a collective until torchrun kills it, too: ``asked/00003`` says that TERM had come before.

``PROGRAM`` is a module (``megatron_patch``: the trainer) or a ``.py`` file (tests put a stand-in
there); it runs as ``__main__`` with the remaining arguments.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import signal
import stat
import sys
import threading
import time
import traceback
from pathlib import Path

from megatron_patch.runtime.files import write_whole
from megatron_patch.runtime.lifeline import (
    ATTEMPT_DIR,
    die_with_parent,
    first_line,
    leave_exit_code,
)

SECRETS_FILE = "MEGATRON_PATCH_SECRETS_FILE"
FATAL = (2, 3, 4, 5, 7, 8)
"""Exit codes that come back on every retry; as in ``launch/lib.sh``."""
_LINE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)")


class SecretsError(ValueError):
    """The secrets file cannot be used; the text never holds a value of it."""

    exit_code = 2


def main(argv: list[str] | None = None) -> int:
    """Run one rank to its end; returns the exit code, which is also left in the exit file."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or ATTEMPT_DIR not in os.environ:
        print("the launcher starts this module; see launch/node.sh", file=sys.stderr)
        return 2
    rank = int(os.environ["RANK"])
    attempt = Path(os.environ[ATTEMPT_DIR])
    die_with_parent()
    # The node script starts torchrun with TERM and USR1 ignored, and that is inherited. TERM must
    # end a rank that has not installed its own handler; USR1 stays ignored until the trainer
    # listens, and is sent again until the rank is gone.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _note_term(attempt / "asked" / f"{rank:05d}")
    _redirect(attempt / f"rank_{rank:05d}.log")
    code, reason = _ended_for_good(attempt / "exit") or _run(arguments[0], arguments[1:])
    # What asks to stop comes again until the rank is gone, and reaches nodes at different times:
    # a rank that has saved because another one was asked must not die of it on its way out. An
    # interpreter that ends gives the signals of Python handlers back to the system.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    sys.stdout.flush()
    sys.stderr.flush()
    leave_exit_code(rank, code, reason)
    return code


def _run(program: str, arguments: list[str]) -> tuple[int, str]:
    """Exit code and one-line reason of the program."""
    try:
        load_secrets(os.environ.get(SECRETS_FILE, ""))
        sys.argv = [program, *arguments]
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if error.code is None:
            return 0, "ended"
        if isinstance(error.code, int):
            return error.code, _logged_error() or "ended"
        print(error.code, file=sys.stderr)
        return 1, first_line(str(error.code))
    except SecretsError as error:
        print(f"megatron-patch: {error}", file=sys.stderr)
        return error.exit_code, first_line(str(error))
    except BaseException as error:
        traceback.print_exc()
        return 1, first_line(f"{type(error).__name__}: {error}")
    return 0, "ended"


def _logged_error() -> str:
    """What the trainer's command line said about the error it ends with."""
    common = sys.modules.get("megatron_patch.cli.common")
    if common is None or not common.logged:
        return ""
    # The first line of a list says how many there are.
    return " ".join(line.strip() for line in common.logged[-1].splitlines()[:2])


def _note_term(path: Path) -> None:
    """Let a thread leave ``path`` when TERM reaches a handler of this process. Main thread only.

    A handler itself does not run while the main thread waits for a GPU; the byte that the
    interpreter writes at once does arrive.
    """
    with contextlib.suppress(OSError):
        path.unlink()  # of a start before this one, by an agent that restarts ranks in one attempt
    come, go = os.pipe()
    os.set_blocking(go, False)
    signal.set_wakeup_fd(go, warn_on_full_buffer=False)
    # What happens to a forked reader of data is no news of this rank.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    def listen() -> None:
        while signal.SIGTERM not in os.read(come, 64):
            pass
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, f"{time.time():.3f}\n", durable=False)

    threading.Thread(target=listen, name="note-term", daemon=True).start()


def _ended_for_good(folder: Path) -> tuple[int, str] | None:
    """What ended this attempt for good, where an agent that restarts ranks starts them again.

    ft_launcher knows no exit code that means "never again".
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or not folder.is_dir():
        return None
    for file in sorted(folder.glob("[0-9]*")):
        words = file.read_text(encoding="utf-8").split(" ", 2)
        if file.suffix != ".tmp" and words[0].isdigit() and int(words[0]) in FATAL:
            print(f"not started again: rank {file.name} ended with {words[0]}", file=sys.stderr)
            return int(words[0]), words[-1].strip()
    return None


def _redirect(path: Path) -> None:
    """Everything this process and its children print goes to ``path`` (appending)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def load_secrets(name: str) -> None:
    """Put the NAME=VALUE lines of a file into this process's environment; ``""``: there is none.

    Values are not expanded, and show in no process list: they are set after the process started.

    Raises SecretsError: as `read_secrets`.
    """
    if name:
        os.environ.update(read_secrets(name))


def read_secrets(name: str) -> dict[str, str]:
    """The NAME=VALUE lines of a file that is this user's and closed to everyone else.

    Raises SecretsError: the file is missing, open to others, or has a line that is no NAME=VALUE.
    """
    path = Path(name)
    try:
        status = path.stat()
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SecretsError(f"cluster.secrets_file {path}: {type(error).__name__}") from None
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise SecretsError(
            f"cluster.secrets_file {path}: must be yours and have mode 0600 (chmod 600 {path})"
        )
    found = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise SecretsError(f"cluster.secrets_file {path}:{number}: is not NAME=VALUE")
        found[match[1]] = match[2]
    return found


if __name__ == "__main__":
    EXIT_CODE = main()
    if EXIT_CODE:
        # The interpreter's own end waits for reader threads, and takes network threads apart while
        # other ranks break their connections: it may hang, or abort with another code.
        os._exit(EXIT_CODE)
    sys.exit(EXIT_CODE)
