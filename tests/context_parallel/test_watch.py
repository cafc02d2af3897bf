"""Signs of life: which rank is named when NCCL's watchdog would name none."""

import pytest
from ranks import Ranks

from megatron_patch.context_parallel import watch
from megatron_patch.context_parallel.watch import LEFT, Traffic, Watch


class Store(dict):
    """A store of this process."""

    def clone(self):
        return self

    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key):
        return self[key]

    def check(self, keys):
        return all(key in self for key in keys)


class Three:
    """Three ranks with a clock that is moved by hand."""

    def __init__(self, timeout=600.0):
        self.now, self.said, store = 0.0, [], Store()
        self.traffic = [Traffic() for _ in range(3)]
        self.watches = []
        for rank in range(3):
            own = Watch(
                store, rank, clock=lambda: self.now, log=lambda text, r=rank: self.hear(r, text)
            )
            own.add("cp", [0, 1, 2], self.traffic[rank], timeout)
            self.watches.append(own)

    def hear(self, rank, text):
        self.said.append((rank, text))

    def live(self, seconds, alive=(0, 1, 2), busy=()):
        for _ in range(int(seconds / watch.PULSE_SECONDS)):
            self.now += watch.PULSE_SECONDS
            for rank in busy:
                self.traffic[rank].record("keys and values of p2p step 1 of 2, forward")
            for rank in alive:
                self.watches[rank].look()


def test_nobody_is_named_while_all_live():
    three = Three()
    three.live(3000, busy=(0, 1, 2))
    three.live(3000)  # a long save: nobody moves, and nobody is behind
    assert not three.said


def test_a_rank_without_signs_is_named_once_by_each_survivor():
    three = Three()
    three.live(100, busy=(0, 1, 2))
    three.live(200, alive=(0, 1), busy=(0, 1))
    assert [rank for rank, _ in three.said] == [0, 1]
    for _, text in three.said:
        assert "lost rank 2 (context-parallel rank 2 of [0, 1, 2])" in text
        assert "no sign of life for" in text and "p2p step 1 of 2" in text and "600 s" in text


def test_a_short_timeout_shortens_the_patience():
    three = Three(timeout=20.0)
    three.live(10)
    three.live(14, alive=(0, 1))
    assert {rank for rank, _ in three.said} == {0, 1}


def test_a_pause_of_the_whole_job_names_nobody():
    three = Three()
    three.live(100)
    three.now += 5000  # suspended, and resumed
    three.live(100)
    assert not three.said


def test_the_rank_all_wait_for_is_named_before_the_timeout():
    three = Three()
    three.live(50, busy=(0, 1, 2))
    three.live(4, busy=(0, 2))  # rank 1 hangs elsewhere; its thread lives
    three.live(590)
    assert {rank for rank, _ in three.said} == {0, 2}
    assert all("lost rank 1" in text and "it stands after" in text for _, text in three.said)
    three.said.clear()
    three.live(10, busy=(0, 1, 2))
    three.live(1000)
    assert not three.said[2:]


def test_a_rank_that_left_in_order_is_named_only_if_others_wait_for_it():
    three = Three()
    three.live(50, busy=(0, 1, 2))
    three.watches[2].stop()
    three.live(1000, alive=(0, 1))
    assert not three.said
    three.live(2, alive=(0, 1), busy=(0, 1))
    three.live(1000, alive=(0, 1))
    assert {rank for rank, _ in three.said} == {0, 1}
    assert all("lost rank 2" in text and f"it {LEFT} after" in text for _, text in three.said)


@pytest.mark.multiprocess
def test_a_killed_process_is_named_over_a_real_store():
    with Ranks(3) as ranks:
        try:
            answers = ranks.play("watch", 2, 1.0, lost=2)
        finally:
            ranks.processes[2].kill()
    for rank in (0, 1):
        assert any("lost rank 2 (context-parallel rank 2" in text for text in answers[rank])
