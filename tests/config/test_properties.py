"""Properties of the loader that must hold for any value and any text."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import yaml
from every_type import Everything, Part
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_patch import config
from megatron_patch.config import loader
from megatron_patch.config.types import BadValue, Scalar, read_scalar
from megatron_patch.config.yaml import FORBIDDEN
from megatron_patch.schema import render

texts = st.text(max_size=30).filter(lambda text: not FORBIDDEN.search(text))
integers = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
part = st.builds(Part, depth=integers, rate=floats, text=st.none() | texts)
everything = st.builds(
    Everything, count=integers, rate=floats, flag=st.booleans(), text=texts,
    limit=st.none() | integers, mode=st.sampled_from(["auto", "on", "off", "none"]),
    freq=integers | st.lists(integers, max_size=3), many=st.lists(floats, max_size=3),
    words=st.lists(texts, max_size=3), extra=st.none() | part, parts=st.lists(part, max_size=2),
)  # fmt: skip


def load_text(text: str, overrides: tuple[str, ...] = ()) -> config.Loaded:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(text, encoding="utf-8", newline="")
        return config.load(path, overrides, root=Everything)


@given(everything)
@settings(max_examples=200)
def test_dump_loads_to_the_same_values(value):
    text = render.dump(loader._plain(value))
    assert load_text(text).config == value
    # Any other YAML reader gets the same values, types included, from the saved file.
    other = yaml.safe_load(text)
    assert other == loader._plain(value)
    assert isinstance(other["rate"], float)


@given(texts)
@settings(max_examples=300)
@example("no")
@example("~")
@example("'")
@example("a: b")
def test_any_text_given_by_set_stays_that_text(text):
    quoted = len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] in "'\""
    if quoted or not text.strip():
        return
    assert load_text("count: 1\n", (f"text={text}",)).config.text == text


@given(st.floats(allow_nan=False, allow_infinity=False))
@settings(max_examples=300)
def test_every_double_is_read_back_exactly(value):
    for text in (repr(value), render.scalar(value), f"{value:.17e}"):
        found = read_scalar(Scalar(text, False, config.Place("x")), float)
        assert math.copysign(1, found) == math.copysign(1, value)
        assert found == value


@given(st.text(alphabet="0123456789+-_.eExXoObB:,aft~ ", max_size=12))
@settings(max_examples=500)
def test_numbers_mean_what_python_says_or_are_refused(text):
    """What is accepted as a number is that number to Python too; nothing else gets through."""
    for tp in (int, float):
        try:
            value = read_scalar(Scalar(text, False, config.Place("x")), tp)
        except BadValue:
            continue
        assert type(value) is tp
        assert value == tp(text)


@given(st.text(max_size=200))
@settings(max_examples=100)
def test_suggestions_are_known_keys(word):
    hint = loader.suggestion(word, Everything, Everything)
    assert any(name in hint for name in Everything.__slots__)
