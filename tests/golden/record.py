"""What a checkout does, part by part, and the recorder of the stored parts.

    git worktree add ../base 40e17f9
    python tests/golden/record.py ../base              # every part
    python tests/golden/record.py . --parts training   # after a result changed on purpose

A change that alters a result on purpose is committed first, and then the parts that it alters are
recorded again from that commit. They are committed alone, with a message that says why they change.

Parts (`PARTS`), each stored in ``stored/<part>.json`` with the commit it was recorded from and the
versions and processor features that it holds for:

configs    the values of every shipped configuration, as ``config show`` prints them
training   configs/quickstart.yaml made smaller, stopped and resumed: metrics and console lines
continued  metrics of the run in store.tar.gz, which commit 40e17f9 began, continued by the checkout
ptx        hashes of the compiled kernels (see ptx.py)
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STORED = HERE / "stored"
STORE = HERE / "store.tar.gz"
STOPPED, CONTINUED = 13, 17
"""The step the store stopped after, and the one the test goes on to. Commit 40e17f9 wrote it, by
the `make_store` of its own record.py."""
PLACE = "/golden"
"""Stands for the working directory in the text files of the store."""

NUMBERS = ("step", "consumed_tokens", "loss", "grad_norm", "lr", "skipped", "nonfinite",
           "eval_loss", "moe_aux_loss", "mtp_loss", "extra")  # fmt: skip
"""Columns of metrics.csv that do not depend on time or memory. Their text holds every bit."""
QUICK = ("training.train_steps=20", "training.eval_interval=10", "training.eval_steps=1",
         "training.global_batch_size=4", "training.micro_batch_size=2", "training.device=cpu",
         "optimizer.warmup_steps=4", "checkpoint.interval=5", "logging.interval=1")  # fmt: skip
WORDS = ("the", "head", "watches", "one", "token", "and", "its", "row", "repeats")
SHOW = """
import contextlib, io, json, sys, yaml
from megatron_patch.__main__ import main
found = {}
for path in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if main(["config", "show", "--no-origins", path]):
            sys.exit(f"{path} cannot be resolved")
    found[path] = yaml.safe_load(out.getvalue())
print(json.dumps(found))
"""


# -- processes ------------------------------------------------------------------------------------


def python(tree: Path, cwd: Path, *arguments: str, interpret: bool = True) -> str:
    """Run Python on the packages of ``tree``; what it prints. AssertionError if it fails."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "MEGATRON"))}
    environment |= {
        "PYTHONPATH": f"{tree}:{tree / 'kernels'}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_CACHE_DIR": str(cwd / "triton"),
    }
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def program(tree: Path, cwd: Path, *arguments: str, settings: tuple[str, ...] = ()) -> str:
    """Run ``megatron-patch``; what it prints."""
    keys = [part for key in settings for part in ("--set", key)]
    return python(tree, cwd, "-m", "megatron_patch", *arguments, *keys)


def documents() -> list[str]:
    return [" ".join(WORDS[(5 * d + k * k) % 9] for k in range(40 + d)) for d in range(40)]


# -- parts ----------------------------------------------------------------------------------------


def configs(tree: Path, work: Path) -> dict[str, Any]:
    """Most frequent value of every key, and where a file has another one.

    configs/base resolves only through the files that name it; configs/stability is research.
    """
    folder = tree / "configs"
    files = sorted([*folder.glob("*.yaml"), *folder.glob("nodes/*.yaml")])
    shown = json.loads(python(tree, work, "-c", SHOW, *map(str, files)))
    flat = {str(Path(p).relative_to(folder)): dict(leaves(values)) for p, values in shown.items()}
    common = {}
    for key in sorted({key for values in flat.values() for key in values}):
        texts = Counter(json.dumps(v[key], sort_keys=True) for v in flat.values() if key in v)
        common[key] = json.loads(texts.most_common(1)[0][0])
    missing = "(no such key)"
    return {"common": common} | {
        name: {k: values.get(k, missing) for k in common if values.get(k, missing) != common[k]}
        for name, values in flat.items()
    }


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``section.key`` and value of everything that is not a mapping with entries."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def training(tree: Path, work: Path) -> dict[str, Any]:
    """Prepare data, train to step 10, resume to step 20."""
    (work / "text.txt").write_text("\n\n".join(documents()))
    corpus = ["text.txt", "--document-separator", "\n\n", "--quiet", "--workers", "1"]
    bpe = ["--tokenizer", "huggingface", "--train-bpe", "280"]
    files = [
        "--tokenizer-path",
        "data/quickstart/tokenizer.json",
        "--out",
        "data/quickstart/stdlib",
    ]
    program(tree, work, "prepare-data", *corpus, *bpe, *files)
    train = ("train", "--config", str(tree / "configs" / "quickstart.yaml"))
    first = program(tree, work, *train, settings=(*QUICK, "training.exit_at_step=10"))
    second = program(tree, work, *train, settings=QUICK)
    metrics = numbers(work / "runs" / "quickstart")
    return {"metrics": metrics, "first start": lines(first), "second start": lines(second)}


def numbers(run_dir: Path) -> dict[str, dict[str, str]]:
    """Numbers of the training by step, the last row of a step; empty columns left out."""
    with (run_dir / "metrics.csv").open() as file:
        rows = {row["step"]: row for row in csv.DictReader(file)}
    return {
        step: {name: row[name] for name in NUMBERS if row.get(name)} for step, row in rows.items()
    }


def lines(console: str) -> list[str]:
    """Console lines but those of steps, without what does not change them: versions, times, ..."""
    console = re.sub(r"(commit|python|megatron-patch-stable) [\w.]+(\+changes)?", r"\1 *", console)
    console = re.sub(r"[\d.]+ (s|GiB)\b", r"* \1", console)
    console = re.sub(r"(?m)^optional: .*", "optional: *", console)
    return [line for line in console.splitlines() if not line.startswith("step ")]


def continued(tree: Path, work: Path) -> dict[str, Any]:
    """Unpack the store and go on with it."""
    unpack(work)
    # Thresholds have moved since; the error that meets the old keys says where to. A checkout of
    # before, commit 40e17f9 among them, has no room of schemas and takes the file as it is.
    keys, file = "confirm_steps: 0, danger_error: 1.0e-9", work / "old.yaml"
    if (tree / "megatron_patch" / "schema").is_dir():
        file.write_text(file.read_text().replace(keys, f"rule: {{{keys}}}"))
    limit = f"training.exit_at_step={CONTINUED}"
    out = program(tree, work, "train", "--config", "old.yaml", settings=(limit,))
    assert f"resuming after step {STOPPED} " in out, out
    return {"metrics": numbers(work / "runs" / "old")}


def ptx(tree: Path, work: Path) -> dict[str, Any]:
    return json.loads(python(tree, work, str(HERE / "ptx.py"), interpret=False))


PARTS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "configs": configs,
    "training": training,
    "continued": continued,
    "ptx": ptx,
}


# -- what stored bits hold for --------------------------------------------------------------------


def holds_for(part: str) -> dict[str, Any]:
    """Versions and processor features that the part's result depends on."""
    names = {"configs": (), "ptx": ("triton",)}.get(
        part, ("torch", "triton", "megatron-core", "numpy", "tokenizers")
    )
    found: dict[str, Any] = {name: importlib.metadata.version(name) for name in names}
    if part in ("training", "continued"):
        found["processor"] = processor()
    return found


def processor() -> str:
    """Maker and the instruction sets that PyTorch's kernels choose by."""
    import torch

    described = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    maker = re.search(r"vendor_id\s*: (\w+)", described)
    sets = {"fma", "avx2", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"}
    flags = set(described.split()) & (sets | {"amx_tile", "amx_bf16"})
    capability = torch.backends.cpu.get_cpu_capability()
    name = maker[1] if maker else "unknown"
    return " ".join([platform.machine(), name, capability, *sorted(flags)])


# -- the store ------------------------------------------------------------------------------------


def unpack(work: Path) -> None:
    """The data, configuration and run directory of commit 40e17f9, as if written in ``work``."""
    with tarfile.open(STORE) as archive:
        archive.extractall(work, filter="data")
    for path in (work / "runs").rglob("*"):
        if path.is_file() and PLACE.encode() in (content := path.read_bytes()):
            path.write_bytes(content.replace(PLACE.encode(), str(work).encode()))


# -- command --------------------------------------------------------------------------------------


def git(tree: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(tree), *arguments], capture_output=True, check=True)
    return done.stdout.decode().strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Record the golden set from a checkout.")
    parser.add_argument("checkout", type=Path, help="directory of a commit with nothing changed")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    tree = args.checkout.resolve()
    changed = git(tree, "status", "--porcelain", "--", "megatron_patch", "kernels", "configs")
    if changed:
        parser.error(f"{tree} differs from its commit; commit first:\n{changed}")
    commit = git(tree, "rev-parse", "HEAD")
    STORED.mkdir(exist_ok=True)
    for part in args.parts:
        with tempfile.TemporaryDirectory() as work:
            found = PARTS[part](tree, Path(work))
        kept = {"commit": commit, "holds_for": holds_for(part), "found": found}
        (STORED / f"{part}.json").write_text(json.dumps(kept, indent=1) + "\n")
        print(f"{part}: recorded")


if __name__ == "__main__":
    main()
