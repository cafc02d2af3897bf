"""The first seconds of the program: which Python, whose package, which exit code."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

import megatron_patch
from megatron_patch import __main__ as entry

PACKAGE = Path(megatron_patch.__file__).parent
OLD = [f"python3.{minor}" for minor in range(6, 12)]


def usable(name: str) -> str | None:
    """Path of an older interpreter that really runs (a version manager's shim may not)."""
    path = shutil.which(name)
    if path is None:
        return None
    done = subprocess.run([path, "-c", ""], capture_output=True, check=False)
    return path if done.returncode == 0 else None


def test_the_first_files_parse_on_old_pythons():
    for name in ("__init__.py", "__main__.py"):
        ast.parse((PACKAGE / name).read_text(encoding="utf-8"), feature_version=(3, 7))


@pytest.mark.parametrize("version", [(2, 7), (3, 8), (3, 11)])
def test_an_old_python_gets_one_sentence(version):
    sentence = megatron_patch.python_complaint(version)
    assert sentence is not None
    assert sentence.startswith("megatron_patch needs Python 3.12 or newer")
    assert f"this is Python {version[0]}.{version[1]}" in sentence
    assert "\n" not in sentence


def test_this_python_and_later_ones_pass():
    for version in ((3, 12), (3, 13, 1), (4, 0), sys.version_info):
        assert megatron_patch.python_complaint(version) is None


def test_a_real_old_python_gets_one_sentence():
    """Runs every older interpreter of this machine; where there is none, the parse test stands."""
    for path in filter(None, map(usable, OLD)):
        done = subprocess.run(
            [path, "-m", "megatron_patch", "train"],
            cwd=PACKAGE.parent,
            capture_output=True,
            text=True,
            env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
            check=False,
        )
        assert done.returncode == 2, path
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith("megatron_patch needs Python 3.12 or newer")
        program = "try:\n import megatron_patch\nexcept ImportError as e: print(e)"
        done = subprocess.run(
            [path, "-B", "-c", program], cwd=PACKAGE.parent, capture_output=True, text=True
        )
        assert "needs Python 3.12" in done.stdout


def test_the_other_package_of_this_name_is_recognized(tmp_path):
    """Pai-Megatron-Patch on PYTHONPATH: its package is imported instead of ours."""
    other = tmp_path / "megatron_patch"
    other.mkdir()
    (other / "__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, str(PACKAGE / "__main__.py"), "train"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 2
    assert f"belongs to another package here: {other}" in done.stderr
    assert "PYTHONPATH" in done.stderr
    assert "Traceback" not in done.stderr


def test_our_own_package_is_not_complained_about():
    assert entry.shadowed() is None


def test_module_and_script_are_the_same_program():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"megatron-patch": "megatron_patch.__main__:main"}
    assert entry.main.__module__ == "megatron_patch.__main__"
    commands = [[sys.executable, "-m", "megatron_patch"]]
    # Absent where the tree is used without being installed; the entry above is the same then.
    script = Path(sys.executable).parent / "megatron-patch"
    if script.is_file():
        commands.append([str(script)])
    outputs = {
        subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
        for command in commands
    }
    assert len(outputs) == 1
    assert "usage: megatron-patch" in outputs.pop()


def test_closed_streams_are_opened():
    """What a library prints would go into the first file that is opened: a lock, a shard."""
    code = (
        "import os, sys; os.close(0); os.close(1); os.close(2); sys.stdout = sys.stderr = None\n"
        "from megatron_patch.__main__ import open_streams; open_streams()\n"
        "file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT); assert file == 3, file\n"
        "print('lost', flush=True); print('lost', file=sys.stderr, flush=True)\n"
        "assert not sys.stdout.isatty() and os.get_inheritable(1)\n"
        "os.write(file, b'kept')"
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        done = subprocess.run([sys.executable, "-c", code, str(file)], cwd=PACKAGE.parent)
        assert done.returncode == 0 and file.read_text() == "kept"


def test_an_interrupt_while_commands_are_imported_is_no_traceback(monkeypatch, capsys):
    class Interrupting:
        def find_spec(self, name, path=None, target=None):
            if name == "megatron_patch.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "megatron_patch.cli.app", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert entry.main(["--version"]) == 130
    assert capsys.readouterr().err == "megatron-patch: interrupted\n"
