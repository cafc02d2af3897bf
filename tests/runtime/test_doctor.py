"""The doctor: what is broken is said and exits 1, what is optional does not."""

from __future__ import annotations

import io
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_patch.runtime import doctor, environment
from megatron_patch.runtime.doctor import Finding, State

ROOT = Path(__file__).resolve().parents[2]


def found(name: str, findings: Iterator[Finding]) -> Finding:
    return next(finding for finding in findings if finding.name == name)


def with_versions(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    real = environment.version
    given = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(
        environment, "version", lambda name: given[name] if name in given else real(name)
    )


def test_pins_come_from_the_project():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = doctor.requirements()
    assert len(names) == len(wanted)
    assert all(any(line.startswith(name) for line in wanted) for name in names)


@pytest.mark.parametrize(("package", "version", "state", "reason"), [
    ("megatron_core", "0.16.1", State.BROKEN, "CVE-2026-65180"),
    ("megatron_core", "0.17.0", State.BROKEN, "can execute code below 0.17.1"),
    ("megatron_core", "0.18.0", State.BROKEN, "outside"),
    ("megatron_core", "0.19.2", State.OK, "0.19.2"),
    ("torch", "2.10.0", State.BROKEN, "outside"),
    ("torch", "2.16.0", State.BROKEN, "outside"),
    ("torch", "2.14.1", State.NOTE, "not tested, which 2.11 and 2.13 and 2.15 are"),
    ("torch", "2.11.0", State.OK, "2.11.0"),
    ("torch", "2.11.0a0+gitabc", State.OK, "2.11.0a0"),
    ("psutil", None, State.BROKEN, "not installed"),
])  # fmt: skip
def test_pins(monkeypatch, package, version, state, reason):
    with_versions(monkeypatch, **{package: version})
    finding = found(package.replace("_", "-"), doctor.pins())
    assert finding.state is state
    assert reason in finding.text


def test_tested_versions_are_of_the_project():
    """All lie in the ranges of pyproject.toml, and those of constraints.txt are among them."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = doctor.requirements()
    wanted["transformer-engine"] = project["optional-dependencies"]["te"][0].partition("]")[2]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    for name, tested in doctor.TESTED.items():
        assert all(SpecifierSet(wanted[name]).contains(f"{version}.9") for version in tested)
        if name in pinned:
            assert "{}.{}".format(*Version(pinned[name]).release) in tested


def test_installed_is_not_working(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    finding = found("psutil", doctor.pins())
    assert finding.state is State.BROKEN
    assert "fails to import" in finding.text


def test_a_broken_requirement_exits_1(monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", (("pins", doctor.pins),))
    out = io.StringIO()
    assert doctor.run(out) == 0
    assert "everything required works" in out.getvalue()
    with_versions(monkeypatch, torch="2.10.0", psutil=None)
    out = io.StringIO()
    assert doctor.run(out) == 1
    assert "2 required things are broken" in out.getvalue()


def test_a_check_that_fails_is_a_finding(monkeypatch):
    """A broken install raises anything anywhere; the report goes on."""

    def explode() -> Iterator[Finding]:
        yield Finding(State.OK, "before", "fine")
        raise OSError("libcudart.so.13: cannot open shared object file\nmore")

    def later() -> Iterator[Finding]:
        yield Finding(State.OK, "after", "fine")

    monkeypatch.setattr(doctor, "CHECKS", (("loader", explode), ("later", later)))
    out = io.StringIO()
    assert doctor.run(out) == 1
    assert "OSError: libcudart.so.13: cannot open shared object file\n" in out.getvalue()
    assert "before" in out.getvalue()
    assert "after" in out.getvalue()


def test_optional_packages_are_notes(monkeypatch):
    with_versions(monkeypatch, transformer_engine=None, apex=None)
    assert doctor._transformer_engine().state is State.NOTE
    assert doctor._apex().state is State.NOTE


def test_an_installed_but_failing_companion_is_broken(monkeypatch):
    """Megatron would import it and fail later, far from the cause."""
    with_versions(monkeypatch, transformer_engine="2.11")
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    finding = doctor._transformer_engine()
    assert finding.state is State.BROKEN
    assert "2.11 is installed but fails" in finding.text


def test_apex_without_cuda_extensions(monkeypatch):
    with_versions(monkeypatch, apex="0.1")
    assert "without its CUDA extensions" in doctor._apex().text


def test_another_package_of_our_name_is_noted(tmp_path, monkeypatch):
    (tmp_path / "megatron_patch").mkdir()
    (tmp_path / "megatron_patch" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert any("PYTHONPATH" in finding.text for finding in doctor.program())


def test_the_device_of_this_machine_works():
    findings = list(doctor.device())
    assert findings
    assert not [finding for finding in findings if finding.state is State.BROKEN]


@pytest.mark.parametrize(("driver", "visible", "state", "reason"), [
    (None, None, State.NOTE, "no CUDA device"),
    ("570.1", "", State.NOTE, "hidden by CUDA_VISIBLE_DEVICES"),
    ("570.1", None, State.BROKEN, "driver 570.1 is here, but torch"),
])  # fmt: skip
def test_no_gpu_is_fine_but_an_unusable_one_is_not(monkeypatch, driver, visible, state, reason):
    monkeypatch.setattr(environment, "driver", lambda: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    finding = doctor._no_gpu()
    assert finding.state is state
    assert reason in finding.text


@pytest.mark.gpu
def test_the_kernel_of_this_machine_works():
    findings = list(doctor.kernel())
    assert [finding.state for finding in findings] == [State.OK] * 4, findings
