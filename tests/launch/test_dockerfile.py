"""The Dockerfile is linted, parsed and held to the pins; `make test-image` builds and runs it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text()


def instructions() -> list[tuple[str, str]]:
    """(INSTRUCTION, arguments) with continuation lines joined and comments left out."""
    lines = "\n".join(line for line in TEXT.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", lines)
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def stages() -> list[list[tuple[str, str]]]:
    """Instructions of every stage, its FROM first."""
    found: list[list[tuple[str, str]]] = []
    for item in instructions():
        if item[0] == "FROM":
            found.append([])
        if found:
            found[-1].append(item)
    return found


def pins(path: str) -> dict[str, str]:
    """``name==version`` lines of a constraints file."""
    lines = (ROOT / path).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and line[0] != "#")


def test_hadolint_finds_nothing():
    tool = Path(sys.executable).parent / "hadolint"
    answer = subprocess.run(
        [tool, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True
    )
    assert answer.returncode == 0 and not answer.stdout, answer.stdout
    assert "hadolint ignore" not in TEXT


def test_base_is_pinned_by_tag_and_digest():
    assert all(stage[0][1].startswith("${BASE} AS ") for stage in stages())
    assert ("ARG", "BASE=nvcr.io/nvidia/pytorch:${BASE_TAG}@${BASE_DIGEST}") in instructions()
    arguments = dict(item[1].partition("=")[::2] for item in instructions() if item[0] == "ARG")
    (tag,) = re.findall(r"^ARG BASE_TAG=(\S+)$", TEXT, re.MULTILINE)
    assert re.fullmatch(r"\d\d\.\d\d-py3", tag)
    assert "BASE_DIGEST" in arguments and "latest" not in TEXT


def test_two_stages_and_nobody_is_root_at_the_end():
    build, image = stages()
    assert build[0][1].endswith("AS build") and image[0][1].endswith("AS image")
    users = [arguments for name, arguments in image if name == "USER"]
    assert users and users[-1] == "${UID}:${UID}"
    (uid,) = re.findall(r"^ARG UID=(\d+)$", TEXT, re.MULTILINE)
    assert int(uid) > 0
    # Compilers' leftovers stay in the first stage.
    assert not [a for n, a in image if n == "COPY" and "--from" in a]


def test_versions_are_those_of_the_project():
    """What the image adds has the tested versions; what the base brings is pinned nowhere."""
    from packaging.requirements import Requirement

    image, tested = pins("docker/constraints.txt"), pins("constraints.txt")
    assert image == {name: tested[name] for name in image}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {Requirement(d).name: Requirement(d).specifier for d in project["dependencies"]}
    assert all(ranges[name].contains(version) for name, version in image.items())
    assert "megatron-core" in image
    assert not {"torch", "triton", "numpy"} & set(image)


def test_only_what_is_needed_travels_to_the_builder():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    for name, arguments in instructions():
        if name == "COPY":
            for source in [a for a in arguments.split() if not a.startswith("--")][:-1]:
                assert source.split("/")[0] in allowed, source
                assert (ROOT / source).exists(), source


def ran_well(result: dict[str, str]) -> bool:
    """Whether `make test-image` came to its end: it stops at the first thing that fails."""
    good = result["doctor"] == "everything required works" and result["user"] == "trainer"
    return good and result["quickstart"].startswith("loss fell from ")


def test_this_dockerfile_has_been_built_and_run():
    """The support table says so; a changed Dockerfile has to be run again."""
    result = json.loads((ROOT / "tests" / "launch" / "image.json").read_text())
    assert ran_well(result)
    assert result["dockerfile"] == hashlib.sha256(TEXT.encode()).hexdigest(), "make test-image"


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("buildah") and shutil.which("debootstrap")),
    reason="needs root, buildah and debootstrap",
)
def test_the_image_on_a_substitute_base(tmp_path):
    result = tmp_path / "image.json"
    subprocess.run(["bash", ROOT / "scripts" / "test_image.sh", result], check=True)
    assert ran_well(json.loads(result.read_text()))
