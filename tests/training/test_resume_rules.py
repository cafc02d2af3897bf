"""What a resumed run may change; the rest is tested where the run directory is taken."""

from __future__ import annotations

from pathlib import Path

from megatron_patch.training import resume_rules


def test_data_that_changed_is_not_a_damaged_record_of_it(tmp_path: Path) -> None:
    file, first, other = tmp_path / "data.sha256", "1" * 64, "2" * 64
    assert resume_rules.check_data(file, first, step=0) == []
    assert resume_rules.check_data(file, first, step=5) == []
    (problem,) = resume_rules.check_data(file, other, step=5)
    assert "not those the first 5 steps were trained on" in str(problem)
    for content in (b"", b"\xff\x00", first[:40].encode()):
        file.write_bytes(content)
        (problem,) = resume_rules.check_data(file, first, step=5)
        assert "it is damaged" in str(problem)
        assert file.read_bytes() == content


def test_differences_see_lists_and_missing_keys() -> None:
    found = resume_rules.differences("a: [1, 2]\nb: {}\n", "a: [1, 3, 4]\nb: {c: 1}\n")
    assert ("a.1", "2", "3") in found and ("a.2", "absent", "4") in found
    assert ("b.c", "absent", "1") in found
