"""The manual: its links lead somewhere, and it stays short enough to be read."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from megatron_patch.cli import app

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
LIBRARY = ROOT / "kernels" / "README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS, ROOT / "research" / "report.md", LIBRARY]
GENERATED = "configuration.md"
IN_ALL, IN_README, IN_LIBRARY, IN_A_PAGE = 25_000, 700, 300, 2_000
"""Words at most, as `wc -w` counts them."""
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^megatron-patch ((?:config check|plan|launch) .*configs/.*)$", re.MULTILINE)
"""What a page says of a shipped configuration, and needs no cluster."""


@cache
def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text("utf-8"))):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_what_would_be_broken():
    assert "the-guard" in anchors(ROOT / "docs" / "stability.md")
    assert LINK.findall("[a](b.md#c) and ![d](e.png)") == ["b.md#c", "e.png"]


def words(page: Path) -> int:
    return len(page.read_text("utf-8").split())


def test_the_manual_is_short():
    """A page that grows takes the words from another one."""
    assert words(ROOT / "README.md") <= IN_README
    assert words(LIBRARY) <= IN_LIBRARY
    assert sum(map(words, DOCS)) <= IN_ALL
    long = {page.name: words(page) for page in DOCS if page.name != GENERATED}
    assert max(long.values()) <= IN_A_PAGE, long


COMMANDS = {
    line
    for page in PAGES
    for block in FENCE.findall(page.read_text("utf-8"))
    for line in COMMAND.findall(block)
}


@pytest.mark.parametrize("line", sorted(COMMANDS))
def test_commands_take_the_configuration_they_name(line, monkeypatch, capsys):
    """One of a node was launched on two, whose ranks do not divide its batch."""
    monkeypatch.chdir(ROOT)
    dry = ["--dry-run"] * (line.startswith("launch") and "--dry-run" not in line)
    assert app.run([*shlex.split(line, comments=True), *dry]) == 0, capsys.readouterr().err
