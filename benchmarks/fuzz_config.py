"""Fuzz the configuration loader: broken YAML must be refused in words, never with a traceback.

    python benchmarks/fuzz_config.py --cases 2000 --seed 0

Takes the files of configs/ (as written, and resolved by ``config show``), breaks each case in up to
three seeded ways (bytes, syntax, keys, values, overrides; some cases change nothing but typed
values, which reaches the checks between keys), and loads it. Allowed outcomes: it loads, and what
it resolves to loads again to the same values; or ``ConfigError``, every problem of which says where
it is. Anything else, and any case above two CPU seconds, is a failure, printed with the case number
that reproduces it. Every tenth case also goes through the command line. Writes
docs/results/config_fuzz.json.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).parent))
import machine

from megatron_patch import config
from megatron_patch.config import fields

SECONDS = 2.0
HARD_SECONDS = 20
HARD_BYTES = 2 << 30
CONFIGS = Path(__file__).resolve().parent.parent / "configs"

TRAPS = [
    "no", "yes", "on", "off", "True", "FALSE", "null", "~", "Null", "none", "010", "0x10", "0b1",
    "0o7", "1:30", "1_000", "1__0", "1e3", "1e-4", "1.", ".5", "1e400", "1e-400", ".nan", ".inf",
    "-.inf", "NaN", "inf", "1,5", "10%", "-0", "+3", "-", "---", "...", "2026-11-21", "12e",
    "0.1.2", "١٢", "!!python/object:os.system", "!!int", "!!str", "!foo", "&a", "*a", "<<", "=",
    "?", "|", ">", "[", "]", "{", "}", "@x", "`x", "%x", "#", "#x", "!!binary aGk=", "!!set {a}",
    "- - - a",
    "[]", "{}", "[1, 2]", "[[1]]", "{a: 1}", '""', "''", '"x', "'", '"\\x00"', '"\\ud800"',
    '"\\U00110000"', "9" * 30, "9" * 5000, "1" + "0" * 400, "x" * 3000, "a: b", "a b", "\t", "",
    "[" * 40, "{a: " * 40, "? a\n: b", "|\n  text", "\x85",
]  # fmt: skip
CHARACTERS = list(":-[]{},&*!|>'\"%@`#?~\t\n\r \x00\x07\x1b\x7f\x85\u2028\ufeff\u202eé😀\ud7ff")


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True) or [""]


def _edit_line(text: str, rng: random.Random, edit: Callable[[str], str]) -> str:
    lines = _lines(text)
    index = rng.randrange(len(lines))
    lines[index] = edit(lines[index])
    return "".join(lines)


def change_value(text: str, rng: random.Random) -> str:
    trap = rng.choice(TRAPS)
    return _edit_line(text, rng, lambda line: re.sub(r":.*", lambda _: f": {trap}", line, count=1))


def change_key(text: str, rng: random.Random) -> str:
    def edit(line: str) -> str:
        match = re.search(r"[a-z_]{2,}(?=:)", line)
        if match is None:
            return line
        key = list(match.group())
        at = rng.randrange(len(key))
        key[at] = rng.choice(["", key[at] * 2, "_", "-", "X", key[at - 1]])
        return line[: match.start()] + "".join(key) + line[match.end() :]

    return _edit_line(text, rng, edit)


def insert_character(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice(CHARACTERS) + text[at:]


def delete_characters(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + text[at + rng.randrange(1, 12) :]


def duplicate_line(text: str, rng: random.Random) -> str:
    return _edit_line(text, rng, lambda line: line + line)


def delete_line(text: str, rng: random.Random) -> str:
    return _edit_line(text, rng, lambda line: "")


def indent_line(text: str, rng: random.Random) -> str:
    lead = rng.choice(["  ", " ", "\t", "      "])
    return _edit_line(text, rng, lambda line: lead + line)


def dedent_line(text: str, rng: random.Random) -> str:
    return _edit_line(text, rng, str.lstrip)


def swap_lines(text: str, rng: random.Random) -> str:
    lines = _lines(text)
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[a], lines[b] = lines[b], lines[a]
    return "".join(lines)


def truncate(text: str, rng: random.Random) -> str:
    return text[: rng.randrange(len(text) + 1)]


def anchor_and_alias(text: str, rng: random.Random) -> str:
    text = _edit_line(text, rng, lambda line: line.replace(": ", ": &a ", 1))
    return _edit_line(text, rng, lambda line: re.sub(r": .*", ": *a", line, count=1))


def bomb(text: str, rng: random.Random) -> str:
    levels = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 9))
    return f"l0: &l0 [x, x]\n{levels}{text}"


def nest(text: str, rng: random.Random) -> str:
    depth = rng.choice([5, 17, 500, 20000])
    opening = rng.choice(["[", "{a: ", "- "])
    return text + "\nmodel2: " + opening * depth


def repeat(text: str, rng: random.Random) -> str:
    return text * rng.choice([2, 3, 40])


def many_keys(text: str, rng: random.Random) -> str:
    return text + "".join(f"\nkey_{rng.random()}: {i}" for i in range(rng.choice([100, 5000])))


def long_line(text: str, rng: random.Random) -> str:
    return text + "\n" + rng.choice(["x", "a: ", "'", "[", "\\"]) * rng.choice([2000, 100000])


def second_document(text: str, rng: random.Random) -> str:
    return text + rng.choice(["\n---\n", "\n...\n", "\n--- a\n", "%YAML 1.2\n---\n"]) + text


def add_base(text: str, rng: random.Random) -> str:
    bases = [
        "case.yaml",
        "missing.yaml",
        ".",
        "/",
        "/dev/null",
        "null",
        "[a]",
        '"a\\0b"',
        "x" * 300,
    ]
    return f"base: {rng.choice(bases)}\n{text}"


MUTATIONS: list[Callable[[str, random.Random], str]] = [
    *[change_value] * 8, *[change_key] * 4, *[insert_character] * 4, *[delete_characters] * 3,
    duplicate_line, delete_line, indent_line, dedent_line, swap_lines, truncate, anchor_and_alias,
    bomb, nest, repeat, many_keys, long_line, second_document, add_base,
]  # fmt: skip


def corpus() -> list[str]:
    """The valid files that cases start from, bases written out."""
    texts = []
    for path in sorted(CONFIGS.glob("*.yaml")):
        loaded = config.load(path)
        texts.append(loaded.dump_yaml())
        raw = path.read_text(encoding="utf-8")
        if not re.search(r"^base:", raw, re.M):
            texts.append(raw)
    return texts


def spoil_bytes(data: bytes, rng: random.Random) -> bytes:
    """What only happens below the level of text."""
    choice = rng.randrange(6)
    if choice == 0:
        return data.decode("utf-8").encode(rng.choice(["utf-16", "utf-16-le", "utf-32"]))
    if choice == 1:
        return b"\xef\xbb\xbf" + data
    changed = bytearray(data or b"\x00")
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def overrides(rng: random.Random) -> list[str]:
    """Some --set arguments, most of them wrong."""
    keys = ["optimizer.lr", "data.blend.0.path", "data.split.1", "model.moe.num_experts", "name",
            "model", "data.blend", "a.b", "", ".", "model.window", "data.blend.9.path", "base",
            "model.num_layers.0", "parallel.cp_comm_type"]  # fmt: skip
    return [f"{rng.choice(keys)}={rng.choice(TRAPS)}" for _ in range(rng.randrange(0, 3))]


def typed_value(tp: object, rng: random.Random) -> str:
    """A value of the right type, sensible or not."""
    members, optional = fields.alternatives(tp)
    if optional and rng.random() < 0.2:
        return "null"
    member = rng.choice(members)
    inner = fields.element(member)
    if inner is not None:
        return "[" + ", ".join(typed_value(inner, rng) for _ in range(rng.randrange(4))) + "]"
    if fields.is_section(member):
        items = [f for f in fields.fields(member).values() if f.required or rng.random() < 0.3]
        return "{" + ", ".join(f"{f.name}: {typed_value(f.type, rng)}" for f in items) + "}"
    if member is bool:
        return rng.choice(["true", "false"])
    if member is int:
        return str(rng.choice([-1, 0, 1, 2, 3, 4, 7, 8, 16, 64, 1000, 2**31, 2**63 - 1, -(2**63)]))
    if member is float:
        numbers = ["-1", "0", "1e-300", "1e-5", "0.3", "0.9", "1", "2.5", "1e9", "1e308", "-0.0"]
        return rng.choice(numbers)
    if member is str:
        return rng.choice(["x", "data/x", "x.bin", ".", "/", "~", '""', "a b", "é", "/dev/zero",
                           "configs", "x" * 300])  # fmt: skip
    return str(rng.choice(get_args(member)))


def typed_overrides(rng: random.Random) -> list[str]:
    """Overrides of the right types: what they contradict is for the sections to find."""
    from megatron_patch.schema.run import RunConfig

    keys = [(p.replace(".N", ".0"), f) for p, f in fields.walk(RunConfig)]
    chosen = rng.sample(keys, rng.randrange(1, 7))
    return [f"{path}={typed_value(item.type, rng)}" for path, item in chosen]


def make_case(number: int, seed: int, texts: list[str]) -> tuple[bytes, list[str]]:
    """Case ``number``: the bytes of a file, and overrides."""
    rng = random.Random(f"{seed}/{number}")
    text = rng.choice(texts)
    if rng.random() < 0.3:
        return text.encode(), typed_overrides(rng)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        text = rng.choice(MUTATIONS)(text, rng)
    data = text.encode("utf-8", errors="surrogatepass")
    if rng.random() < 0.1:
        data = spoil_bytes(data, rng)
    return data, overrides(rng) if rng.random() < 0.3 else []


@dataclass
class Outcome:
    """What became of one case."""

    kind: str
    seconds: float
    """CPU time: a busy machine is not the loader's fault."""
    detail: str = ""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """End what would run or grow without end: in Python code, as an exception like any other."""

    def expire(*_: object) -> None:
        raise TimeoutError(f"still running after {HARD_SECONDS} s")

    before = signal.signal(signal.SIGALRM, expire)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + HARD_BYTES, limits[1]))
    signal.alarm(HARD_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def load_case(path: Path, sets: list[str]) -> Outcome:
    """Load one file and judge what happens."""
    with bounded():
        return _load_case(path, sets)


def _load_case(path: Path, sets: list[str]) -> Outcome:
    began = time.process_time()
    try:
        loaded = config.load(path, sets)
    except config.ConfigError as error:
        seconds = time.process_time() - began
        text = str(error)
        nowhere = [p for p in error.problems if p.where is None and str(path) not in p.message]
        unprintable = any(not (char.isprintable() or char == "\n") for char in text)
        if not error.problems or nowhere or unprintable or len(text) > 50_000:
            return Outcome("failed", seconds, f"unhelpful error: {text[:500]!r}")
        return Outcome("refused", seconds)
    except Exception:
        return Outcome("failed", time.process_time() - began, traceback.format_exc())
    seconds = time.process_time() - began
    again = path.with_name("again.yaml")
    again.write_text(loaded.dump_yaml(), encoding="utf-8")
    if config.load(again).config != loaded.config:
        return Outcome("failed", seconds, "the resolved configuration loads to other values")
    return Outcome("loaded", seconds)


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def through_cli(path: Path, sets: list[str]) -> Outcome:
    """The same through ``config check``: exit code 0 or 2 and no traceback."""
    began = _children_seconds()
    command = [sys.executable, "-m", "megatron_patch", "config", "check", str(path)]
    command += [f"--set={item}" for item in sets if "\0" not in item]
    done = subprocess.run(command, capture_output=True, check=False)
    seconds = _children_seconds() - began
    if done.returncode not in (0, 2) or b"Traceback" in done.stderr:
        return Outcome("failed", seconds, done.stderr.decode(errors="replace"))
    return Outcome("refused" if done.returncode else "loaded", seconds)


def run(cases: int, seed: int, *, cli_every: int = 10, first: int = 0) -> dict[str, object]:
    """Run cases ``first`` to ``first + cases``; the figures, failures first."""
    texts = corpus()
    counts: Counter[str] = Counter()
    slowest, slowest_cli, failures = 0.0, 0.0, []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.yaml"
        for number in range(first, first + cases):
            data, sets = make_case(number, seed, texts)
            path.write_bytes(data)
            outcomes = [("load", load_case(path, sets))]
            slowest = max(slowest, outcomes[0][1].seconds)
            if cli_every and number % cli_every == 0:
                outcomes.append(("cli", through_cli(path, sets)))
                slowest_cli = max(slowest_cli, outcomes[1][1].seconds)
            for how, outcome in outcomes:
                counts[f"{how}_{outcome.kind}"] += 1
                if outcome.kind == "failed" or outcome.seconds > SECONDS:
                    detail = outcome.detail or f"took {outcome.seconds:.2f} s"
                    failures.append({"case": number, "seed": seed, "how": how, "detail": detail})
    return {
        "failures": failures,
        "cases": cases,
        "seed": seed,
        "outcomes": dict(sorted(counts.items())),
        "slowest_load_cpu_s": round(slowest, 3),
        "slowest_cli_cpu_s": round(slowest_cli, 3),
        "limit_cpu_s": SECONDS,
        "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--no-write", action="store_true", help="print the figures only")
    args = parser.parse_args()
    figures = run(args.cases, args.seed, first=args.first)
    for failure in figures["failures"][:10]:  # type: ignore[index]
        print(failure["case"], failure["how"], failure["detail"], file=sys.stderr)
    print({key: value for key, value in figures.items() if key != "failures"})
    if not args.no_write:
        machine.write_result("config_fuzz", figures)
    return 1 if figures["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
