"""The file in which the first rank says how far the run is."""

from megatron_patch.runtime.heartbeat import VARIABLE, Heartbeat


def test_first_rank_writes_the_step(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "step"))
    heartbeat = Heartbeat(0)
    for step in (8, 9, 10, 1000):
        with heartbeat.step(step):
            pass
        assert (tmp_path / "step").read_text() == f"{step}\n"
    heartbeat.close()
    heartbeat.close()


def test_others_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "step"))
    with Heartbeat(1).step(5):
        pass
    assert not (tmp_path / "step").exists()
    monkeypatch.delenv(VARIABLE)
    with Heartbeat(0).step(5):
        pass
