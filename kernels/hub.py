"""The library as a kernel repository that Hugging Face's ``kernels`` loads.

    python kernels/hub.py FOLDER

writes FOLDER/build/torch-cuda: the package, and metadata.json. There ``kernels`` imports the
package under a name of that build, beside other versions of it, so that its imports are made
relative here and its operators take that name (`stable_attention.ops.NAMESPACE`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent / "stable_attention"
IMPORT = re.compile(r"^(\s*)from stable_attention(?:\.([\w.]+))? import ", re.MULTILINE)


def relative(text: str, depth: int) -> str:
    """A module's text with relative imports; ``depth`` folders below the package."""
    dots = "." * (depth + 1)
    return IMPORT.sub(lambda m: f"{m[1]}from {dots}{m[2] or ''} import ", text)


def sources() -> dict[str, bytes]:
    """Files of the package by path in it, with relative imports."""
    found = {}
    for path in sorted(PACKAGE.rglob("*")):
        name = path.relative_to(PACKAGE).as_posix()
        if path.suffix == ".py":
            found[name] = relative(path.read_text("utf-8"), name.count("/")).encode()
        elif path.suffix == ".json" or path.name == "py.typed":
            found[name] = path.read_bytes()
    return found


def version(files: dict[str, bytes]) -> str:
    (found,) = re.findall(rb'^__version__ = "(.+)"$', files["__init__.py"], re.MULTILINE)
    return found.decode()


def write(folder: Path) -> Path:
    """Write the repository; the folder of its only build.

    Raises:
        FileExistsError: the build is there.
    """
    files = sources()
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name} {len(content)}\n".encode() + content)
    build = folder / "build" / "torch-cuda"
    build.mkdir(parents=True)
    for name, content in files.items():
        path = build / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    metadata = {
        "name": "stable-attention",
        "id": f"_stable_attention_cuda_{digest.hexdigest()[:7]}",
        # The Hub's versions are whole numbers, raised where the interface breaks: the major one.
        "version": int(version(files).split(".")[0]),
        "license": "apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda"},
    }
    (build / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return build


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    try:
        print(write(parser.parse_args().folder))
    except OSError as error:
        parser.exit(2, f"hub.py: {error}; give a folder that can be written and has no build\n")


if __name__ == "__main__":
    main()
