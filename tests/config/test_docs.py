"""The generated page and the terminal help know every key and every docstring."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_patch.config import ConfigError, docs, types
from megatron_patch.schema.run import RunConfig

ROOT = Path(__file__).resolve().parents[2]
KEYS = [(path, item) for path, item in types.walk(RunConfig)]


def test_the_committed_page_is_current():
    """Fails when a field, default or docstring changed: run ``make docs``."""
    committed = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert committed == docs.render_reference()


def test_every_field_has_a_docstring():
    sections = {RunConfig, *(section for _, section in docs._sections(RunConfig))}
    bare = [
        f"{section.__name__}.{name}"
        for section in sections
        for name in types.fields(section)
        if not types.help_of(section, name)
    ]
    assert bare == []


def test_every_section_stands_in_the_page():
    page = docs.render_reference()
    for path, section in docs._sections(RunConfig):
        assert f" {path}\n" in page
        for name in types.fields(section):
            assert f"| `{name}` |" in page


def test_every_key_has_terminal_help():
    for path, _ in KEYS:
        text = docs.help_text(path)
        assert path.rpartition(".")[2] in text and len(text.splitlines()) >= 2, path


def test_overview_names_every_key():
    overview = docs.help_text()
    assert [path for path, item in KEYS if f"  {path}" not in overview and not _nested(item)] == []


def _nested(item: types.Field) -> bool:
    return types.section_of(item.type) is not None


def test_unknown_topics_are_refused_with_the_nearest():
    for topic, hint in [("optimiser", "optimizer"), ("lr", "optimizer.lr"), ("model.x", "")]:
        with pytest.raises(ConfigError, match=f"no section or key of this name.*{hint}"):
            docs.help_text(topic)
    with pytest.raises(ConfigError, match="no keys under it"):
        docs.help_text("optimizer.lr.x")
