"""Broken YAML is refused in words, never with a traceback, and what loads loads again the same.

Starts from the files of configs/ (as written, and resolved) and breaks each example in up to three
ways: bytes, syntax, keys, values, overrides. Some examples change nothing but typed values, which
reaches the checks between keys. Allowed outcomes: it loads, and what it resolves to loads again to
the same values; or ``ConfigError``, every problem of which says where it is.
"""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import get_args

from bounded import examples, fuzz, randoms

from megatron_patch import config
from megatron_patch.config import types
from megatron_patch.schema.run import RunConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SECONDS = 2.0
"""CPU time: a busy machine is not the loader's fault."""
HARD_SECONDS, HARD_BYTES = 20, 2 << 30

TRAPS = [
    "no", "yes", "on", "off", "True", "FALSE", "null", "~", "Null", "none", "010", "0x10", "0b1",
    "0o7", "1:30", "1_000", "1__0", "1e3", "1e-4", "1.", ".5", "1e400", "1e-400", ".nan", ".inf",
    "-.inf", "NaN", "inf", "1,5", "10%", "-0", "+3", "-", "---", "...", "2026-11-21", "12e",
    "0.1.2", "١٢", "!!python/object:os.system", "!!int", "!!str", "!foo", "&a", "*a", "<<", "=",
    "?", "|", ">", "[", "]", "{", "}", "@x", "`x", "%x", "#", "#x", "!!binary aGk=", "!!set {a}",
    "- - - a", "[]", "{}", "[1, 2]", "[[1]]", "{a: 1}", '""', "''", '"x', "'", '"\\x00"',
    '"\\ud800"', '"\\U00110000"', "9" * 30, "9" * 5000, "1" + "0" * 400, "x" * 3000, "a: b", "a b",
    "\t", "", "[" * 40, "{a: " * 40, "? a\n: b", "|\n  text", "\x85",
]  # fmt: skip
CHARACTERS = list(":-[]{},&*!|>'\"%@`#?~\t\n\r \x00\x07\x1b\x7f\x85\u2028\ufeff\u202eé😀\ud7ff")
BASES = ["case.yaml", "missing.yaml", ".", "/", "/dev/null", "null", "[a]", '"a\\0b"', "x" * 300]
KEYS = ["optimizer.lr", "data.blend.0.path", "data.split.1", "model.moe.num_experts", "name",
        "model", "data.blend", "a.b", "", ".", "model.window", "data.blend.9.path", "base",
        "model.num_layers.0", "parallel.cp_comm_type"]  # fmt: skip

# ------------------------------------------------------------------------------------------ broken

Mutation = Callable[[str, Random], str]


def on_a_line(edit: Callable[[str, Random], str]) -> Mutation:
    """The mutation that edits one line of a text."""

    def mutate(text: str, rng: Random) -> str:
        lines = text.splitlines(keepends=True) or [""]
        at = rng.randrange(len(lines))
        lines[at] = edit(lines[at], rng)
        return "".join(lines)

    return mutate


def value(line: str, rng: Random) -> str:
    trap = rng.choice(TRAPS)
    return re.sub(r":.*", lambda _: f": {trap}", line, count=1)


def key(line: str, rng: Random) -> str:
    match = re.search(r"[a-z_]{2,}(?=:)", line)
    if match is None:
        return line
    letters = list(match.group())
    at = rng.randrange(len(letters))
    letters[at] = rng.choice(["", letters[at] * 2, "_", "-", "X", letters[at - 1]])
    return line[: match.start()] + "".join(letters) + line[match.end() :]


def character(text: str, rng: Random) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice(CHARACTERS) + text[at:]


def deletion(text: str, rng: Random) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + text[at + rng.randrange(1, 12) :]


def anchors(text: str, rng: Random) -> str:
    text = on_a_line(lambda line, _: line.replace(": ", ": &a ", 1))(text, rng)
    return on_a_line(lambda line, _: re.sub(r": .*", ": *a", line, count=1))(text, rng)


def bomb(text: str, rng: Random) -> str:
    levels = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 9))
    return f"l0: &l0 [x, x]\n{levels}{text}"


def nest(text: str, rng: Random) -> str:
    depth = rng.choice([5, 17, 500, 20000])
    return text + "\nmodel2: " + rng.choice(["[", "{a: ", "- "]) * depth


def many_keys(text: str, rng: Random) -> str:
    return text + "".join(f"\nkey_{i}_x: {i}" for i in range(rng.choice([100, 5000])))


def long_line(text: str, rng: Random) -> str:
    return text + "\n" + rng.choice(["x", "a: ", "'", "[", "\\"]) * rng.choice([2000, 100000])


def second_document(text: str, rng: Random) -> str:
    return text + rng.choice(["\n---\n", "\n...\n", "\n--- a\n", "%YAML 1.2\n---\n"]) + text


MUTATIONS: list[Mutation] = [
    *[on_a_line(value)] * 8, *[on_a_line(key)] * 4, *[character] * 4, *[deletion] * 3,
    on_a_line(lambda line, rng: line + line),
    on_a_line(lambda line, rng: ""),
    on_a_line(lambda line, rng: rng.choice(["  ", " ", "\t", "      "]) + line),
    on_a_line(lambda line, rng: line.lstrip()),
    lambda text, rng: text[: rng.randrange(len(text) + 1)],
    lambda text, rng: text * rng.choice([2, 3, 40]),
    lambda text, rng: f"base: {rng.choice(BASES)}\n{text}",
    anchors, bomb, nest, many_keys, long_line, second_document,
]  # fmt: skip


def spoil_bytes(data: bytes, rng: Random) -> bytes:
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


def typed_value(tp: object, rng: Random) -> str:
    """A value of the right type, sensible or not."""
    members, optional = types.alternatives(tp)
    if optional and rng.random() < 0.2:
        return "null"
    member = rng.choice(members)
    inner = types.element(member)
    if inner is not None:
        return "[" + ", ".join(typed_value(inner, rng) for _ in range(rng.randrange(4))) + "]"
    if types.is_section(member):
        items = [f for f in types.fields(member).values() if f.required or rng.random() < 0.3]
        return "{" + ", ".join(f"{f.name}: {typed_value(f.type, rng)}" for f in items) + "}"
    if member is bool:
        return rng.choice(["true", "false"])
    if member is int:
        return str(rng.choice([-1, 0, 1, 2, 3, 4, 7, 8, 16, 64, 1000, 2**31, 2**63 - 1, -(2**63)]))
    if member is float:
        numbers = ["-1", "0", "1e-300", "1e-5", "0.3", "0.9", "1", "2.5", "1e9", "1e308", "-0.0"]
        return rng.choice(numbers)
    if types.is_text(member):
        return rng.choice(["x", "data/x", "~/x", "$HOME/x", "$X", "/", "~", '""', "a b", "é",
                           "/dev/zero", "configs", "x" * 300])  # fmt: skip
    return str(rng.choice(get_args(member)))


@cache
def corpus() -> list[str]:
    """The valid files that examples start from, bases written out."""
    texts = []
    for path in sorted(CONFIGS.glob("*.yaml")):
        texts.append(config.load(path).dump_yaml())
        raw = path.read_text(encoding="utf-8")
        if not re.search(r"^base:", raw, re.M):
            texts.append(raw)
    return texts


def example(rng: Random) -> tuple[bytes, list[str]]:
    """The bytes of a file, and overrides."""
    text = rng.choice(corpus())
    if rng.random() < 0.3:
        keys = [(p.replace(".N", ".0"), f) for p, f in types.walk(RunConfig)]
        chosen = rng.sample(keys, rng.randrange(1, 7))
        return text.encode(), [f"{path}={typed_value(item.type, rng)}" for path, item in chosen]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        text = rng.choice(MUTATIONS)(text, rng)
    data = text.encode("utf-8", errors="surrogatepass")
    if rng.random() < 0.1:
        data = spoil_bytes(data, rng)
    wrong = rng.randrange(3) if rng.random() < 0.3 else 0
    return data, [f"{rng.choice(KEYS)}={rng.choice(TRAPS)}" for _ in range(wrong)]


# ------------------------------------------------------------------------------------------ judged


@contextlib.contextmanager
def bounds() -> Iterator[None]:
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


def outcome(path: Path, sets: list[str]) -> str:
    """``loaded`` or ``refused``; AssertionError for an unhelpful refusal or values that change."""
    began = time.process_time()
    try:
        loaded = config.load(path, sets)
    except config.ConfigError as error:
        text = str(error)
        assert error.problems, text
        assert all(p.where is not None or str(path) in p.message for p in error.problems), text
        assert all(char.isprintable() or char == "\n" for char in text), repr(text)
        assert len(text) <= 50_000
        return "refused"
    finally:
        assert time.process_time() - began <= SECONDS
    again = path.with_name("again.yaml")
    again.write_text(loaded.dump_yaml(), encoding="utf-8")
    assert config.load(again).config == loaded.config
    return "loaded"


@examples(80, 2000)
def test_a_broken_file_is_refused_or_loads_the_same(tmp_path, count):
    counts: Counter[str] = Counter()

    def check(rng: Random) -> None:
        data, sets = example(rng)
        path = tmp_path / "case.yaml"
        path.write_bytes(data)
        with bounds():
            counts[outcome(path, sets)] += 1

    fuzz(check, count, rng=randoms)
    assert counts["loaded"] and counts["refused"], counts


@examples(4, 200)
def test_the_command_line_ends_with_0_or_2(tmp_path, count):
    def check(rng: Random) -> None:
        data, sets = example(rng)
        path = tmp_path / "case.yaml"
        path.write_bytes(data)
        command = [sys.executable, "-m", "megatron_patch", "config", "check", str(path)]
        command += [f"--set={item}" for item in sets if "\0" not in item]
        done = subprocess.run(command, capture_output=True, check=False)
        assert done.returncode in (0, 2) and b"Traceback" not in done.stderr, done.stderr

    fuzz(check, count, rng=randoms)
