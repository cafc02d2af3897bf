"""Commands as shims, for scripts that install; all else on PATH are a few harmless tools."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What the scripts use and no test has to replace.
HARMLESS = ("bash", "cat", "chmod", "dirname", "env", "grep", "ln", "mktemp", "rm", "sleep",
            "tail", "tee", "timeout", "touch")  # fmt: skip


class ScriptShims:
    """A folder of commands that is all of PATH; every shim notes its arguments, a line a call."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.notes = folder, folder / "bin", folder / "calls"
        self.bin.mkdir()
        self.notes.mkdir()
        for name in HARMLESS:
            tool = shutil.which(name)
            assert tool is not None, name
            (self.bin / name).symlink_to(tool)
        self.environment = {
            "PATH": str(self.bin), "BIN": str(self.bin), "FOLDER": str(folder),
            "HOME": str(folder), "TMPDIR": str(folder),
        }  # fmt: skip

    def add(self, name: str, body: str = "") -> None:
        """A command that runs ``body``."""
        path = self.bin / name
        path.write_text(f'#!{self.bin}/bash\necho "$*" >>{self.notes}/{name}\n{body}\n')
        path.chmod(0o755)

    def calls(self, name: str) -> list[str]:
        """Arguments of every call of a shim, joined by blanks."""
        path = self.notes / name
        return path.read_text().splitlines() if path.exists() else []

    def run(self, script: Path, **environment: str) -> tuple[int, str]:
        """Exit code, and standard output and error together."""
        answer = subprocess.run(
            [self.bin / "bash", script], env=self.environment | environment, cwd=self.folder,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=120,
        )  # fmt: skip
        return answer.returncode, answer.stdout
