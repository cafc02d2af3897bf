"""What the kernels of earlier commits were, so that pages can tell kernels from their launchers.

    python benchmarks/kernel_history.py [COMMIT ...]

Results name the digest of the kernel sources they measured (`machine.device_digest`), which covers
the Python that launches them too. This reads the sources at a commit (by default every one that a
result in docs/results names beside such a digest) and keeps the digest of what is compiled alone
(`machine.functions_digest`) beside it. Writes kernel_history.json; needs git and the history.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import machine


def named() -> dict[str, str]:
    """Commit -> device digest of every result that names both."""
    found = {}
    for path in sorted(machine.RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        if isinstance(result, dict) and "kernels" in result and "device" in result:
            found[result["commit"].removesuffix("+changes")] = result["device"]
    return found


def tree_at(commit: str) -> dict[str, str]:
    """Digests of the kernel sources at a commit."""
    command = ["git", "archive", commit, "kernels/stable_attention"]
    packed = subprocess.run(command, cwd=machine.ROOT, capture_output=True)
    if packed.returncode:
        raise SystemExit(f"{commit}: {packed.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        root = Path(folder)
        device, functions = machine.device_digest(root), machine.functions_digest(root)
    return {"commit": commit, "device": device, "functions": functions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help="default: those of results")
    parser.add_argument("--out", type=Path, help="folder of the result; default docs/results")
    args = parser.parse_args()
    known = named()
    trees = [tree_at(commit) for commit in args.commits or sorted(known)]
    for tree in trees:
        said = known.get(tree["commit"], tree["device"])
        if said != tree["device"]:
            print(f"{tree['commit']}: a result says {said}, the commit has {tree['device']}")
    print(f"wrote {machine.write_result('kernel_history', {'trees': trees}, args.out)}")


if __name__ == "__main__":
    main()
