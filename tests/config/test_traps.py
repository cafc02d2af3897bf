"""YAML's classic traps give the right value or an error with file, line and remedy.

Each row: the key, what is written after its colon, and either the value or a piece of the error.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from every_type import Everything, Part

from megatron_patch import config

Load = Callable[..., config.ConfigError]
Write = Callable[..., Path]


RIGHT = [
    ("rate", "1e-4", 1e-4),  # a string in YAML 1.1
    ("rate", "1E+3", 1000.0),
    ("rate", "3", 3.0),
    ("rate", ".5", 0.5),
    ("rate", "-0.0", 0.0),
    ("rate", "1_000.5", 1000.5),
    ("count", "1_000", 1000),
    ("count", "-7", -7),
    ("count", "+7", 7),
    ("flag", "true", True),
    ("text", "no", "no"),  # False in YAML 1.1
    ("text", "on", "on"),
    ("text", "010", "010"),
    ("text", "1e-4", "1e-4"),
    ("text", "1:30", "1:30"),
    ("text", "2026-11-21", "2026-11-21"),
    ("text", "true", "true"),
    ("text", '"null"', "null"),
    ("text", "a#b", "a#b"),
    ("text", "x # a comment", "x"),
    ("text", "|\n  two\n  lines\n", "two\nlines\n"),
    ("text", '"\\u00e9"', "é"),
    ("maybe", "null", None),
    ("maybe", "~", None),
    ("maybe", '"~"', "~"),
    ("limit", "null", None),
    ("mode", "off", "off"),  # False in YAML 1.1
    ("mode", '"on"', "on"),
    ("mode", "none", "none"),
    ("freq", "2", 2),
    ("freq", "[1, 0]", [1, 0]),
    ("many", "[1, 2.5, 1e3]", [1.0, 2.5, 1000.0]),
    ("many", "[]", []),
    ("inner", "{}", Part()),
    ("extra", "null", None),
    ("parts", "[{depth: 2}, {}]", [Part(depth=2), Part()]),
]

WRONG = [
    ("count", "010", "leading zero, which some readers take for octal; write 10 or 8"),
    ("count", "-010", "write -10 or -8"),
    ("count", "089", "write 89"),
    ("count", "00", "write 0"),
    ("count", "0x10", "not decimal; write 16"),
    ("count", "0b11", "write 3"),
    ("count", "0o17", "write 15"),
    ("count", "1:30", "base 60"),
    ("count", "1e3", "write 1000"),
    ("count", "2.0", "write 2"),
    ("count", "1.5", "is not an integer"),
    ("count", '"3"', "remove the quotes"),
    ("count", "true", "is not an integer"),
    ("count", "null", "null is not allowed"),
    ("count", "", "nothing is written after the colon"),
    ("count", "١٢", "is not an integer"),  # Arabic-Indic digits: int() would take them
    ("count", "9" * 30, "64-bit"),
    ("count", "9" * 5000, "is not an integer"),  # int() raises above 4300 digits
    ("count", "1__0", "is not an integer"),
    ("count", "[1]", "is a list here, an integer is needed"),
    ("count", "{a: 1}", "is a section here, an integer is needed"),
    ("rate", ".nan", "not a finite number"),
    ("rate", "-.inf", "not a finite number"),
    ("rate", "nan", "not a finite number"),
    ("rate", "1e400", "too large"),
    ("rate", "1e-400", "too small"),
    ("rate", "010", "leading zero"),
    ("rate", "1:30.5", "base 60"),
    ("rate", '"1e-4"', "remove the quotes"),
    ("rate", "1,5", "write a point"),
    ("rate", "10%", "share of 1"),
    ("rate", "yes", "is not a number"),
    ("flag", "yes", "write true"),
    ("flag", "off", "write false"),
    ("flag", "True", "write true"),
    ("flag", "1", "write true"),
    ("flag", "y", "write true"),
    ("flag", '"true"', "remove the quotes"),
    ("text", "null", "quote it"),
    ("text", "~", "quote it"),
    ("text", "", "nothing is written after the colon"),
    ("text", "[a]", "is a list here, text is needed"),
    ("text", '"a\\0b"', "control character"),
    ("text", '"\\ud800"', "control character"),
    ("text", '"\\U00110000"', "not valid YAML"),
    ("maybe", "none", "write null for no value"),
    ("limit", "None", "write null for no value"),
    ("mode", "null", "is not one of"),
    ("mode", "yes", "is not one of auto, on, off, none"),
    ("mode", "of", "did you mean off?"),
    ("freq", "x", "is not an integer"),
    ("freq", '"[1, 0]"', "remove the quotes"),
    ("many", "0.5", "put it in brackets"),
    ("many", "", "write [] or remove it"),
    ("many", "[1, no]", "'no' is not a number"),
    ("many", "[1, ]x", "not valid YAML"),
    ("inner", "", "write {} or remove it"),
    ("inner", "3", "is a value, a section"),
    ("inner", "[a]", "is a list here, a section is needed"),
    ("parts", "{depth: 2}", "is a section here, a list of sections is needed"),
    ("parts", "[2]", "is a value, a section"),
    ("text", "!!str x", "tag 'tag:yaml.org,2002:str' is not supported"),
    ("text", "!!python/object/apply:os.system [x]", "tag"),
    ("text", "!x y", "tag '!x'"),
    ("text", "&a x", "anchor &a"),
    ("text", "*a", "alias *a"),
    ("text", "a: b", "not valid YAML"),
    ("text", "@x", "not valid YAML"),
]


@pytest.mark.parametrize(("key", "written", "value"), RIGHT, ids=[f"{r[0]}={r[1]}" for r in RIGHT])
def test_right_value(write, key, written, value):
    found = getattr(config.load(write(f"{key}: {written}\n"), root=Everything).config, key)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("key", "written", "reason"), WRONG, ids=[f"{r[0]}={r[1][:20]}" for r in WRONG]
)
def test_refused_with_place_and_remedy(write, refused, key, written, reason):
    error = refused(write(f"# line 1\n{key}: {written}\n"), root=Everything)
    assert reason in str(error)
    assert any(p.where and p.where.line in (0, 2, 3) for p in error.problems), str(error)
    assert "run.yaml" in str(error)


def test_the_reader_we_build_on_falls_into_the_traps():
    """Why the loader resolves values itself: PyYAML's answers to the same text."""
    text = "a: no\nb: 010\nc: 1:30\nd: 1e-4\ne: 1\ne: 2\n"
    assert yaml.safe_load(text) == {"a": False, "b": 8, "c": 90, "d": "1e-4", "e": 2}


def test_duplicate_key_names_both_places(write, refused):
    error = refused(write("count: 1\nrate: 2\ncount: 3\n"), root=Everything)
    (problem,) = error.problems
    assert problem.where is not None
    assert problem.where.line == 3
    assert "run.yaml:1" in problem.message


def test_duplicate_key_in_a_nested_flow_section(write, refused):
    assert "written twice" in str(refused(write("inner: {depth: 1, depth: 2}\n"), root=Everything))


def test_alias_bomb_is_refused_at_its_first_anchor(write, refused):
    lines = ["l0: &l0 [x, x]"]
    lines += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 9)]
    error = refused(write("\n".join(lines)), root=Everything)
    assert "anchors and aliases are not supported" in str(error)
    assert ":1:" in str(error)


@pytest.mark.parametrize(("text", "reason"), [
    ("", "is empty"),
    ("# only a comment\n", "is empty"),
    ("---\n", "is not a mapping"),
    ("- a\n- b\n", "is not a mapping"),
    ("just text\n", "is not a mapping"),
    ("count: 1\n---\ncount: 2\n", "a second document starts here"),
    ("? [a, b]\n: 1\n", "a key must be a plain name"),
    ("<<: {count: 1}\n", "merge keys are not supported"),
    ("inner: " + "{a: " * 3000, "nested deeper than 16"),
    ("many: " + "[" * 3000, "nested deeper than 16"),
    ("%TAG ! tag:x,2000:\n---\ncount: 1\n", "%TAG"),
    ("count: 1\n\tx: 2\n", "not valid YAML"),
    (b"text: \xff\n", "line 1: byte 0xff is not UTF-8"),
    ("count: 1\n".encode("utf-16"), "is not UTF-8"),
    ("count: 1\n\ntext: a\x00b\n", "cannot stand in a configuration"),
    ("text: a\u2028b\n", "cannot stand in a configuration"),
    ("text: a\x85b\n", "cannot stand in a configuration"),
    ("many: [" + "1," * 100_000 + "]", "more than 10000 keys and values"),
    ("x: " + "y" * 300_000, "a configuration has at most 262144"),
])  # fmt: skip
def test_files_that_are_no_configuration(write, refused, text, reason):
    error = refused(write(text), root=Everything)
    assert reason in str(error)
    assert "run.yaml" in str(error)


def test_byte_order_mark_is_no_part_of_the_first_key(write):
    assert config.load(write(b"\xef\xbb\xbfcount: 3\n"), root=Everything).config.count == 3


def test_explicit_end_and_start_of_the_only_document(write):
    assert config.load(write("%YAML 1.2\n---\ncount: 3\n...\n"), root=Everything).config.count == 3


@pytest.mark.parametrize("what", ["missing.yaml", ".", "/dev/null", "a\0b"])
def test_unreadable_files(refused, what):
    assert what.replace("\0", "\\x00") in str(refused(Path(what) if "\0" not in what else what))
