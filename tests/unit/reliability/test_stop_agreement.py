"""The ranks of a process, as threads, agree on the micro-batch before which they stop."""

import random
import threading
import time

import pytest
from torch.distributed import HashStore

from launcher.reliability.stop_agreement import StopAgreement


class Rank:
    """A training loop, and a watchdog that looks at the store."""

    def __init__(self, rank, ranks, store, collective, delay):
        self.agreement = StopAgreement(rank=rank, ranks=ranks)
        self.begun, self.wanted, self._over = 0, False, False
        self._store, self._collective, self._delay = store, collective, delay
        self.threads = [threading.Thread(target=run) for run in (self._train, self._watch)]

    def _train(self):
        while not self.agreement.reached():
            self.begun += 1
            time.sleep(self._delay())
            if self._collective is not None:
                self._collective.wait(60)
        self._over = True

    def _watch(self):
        while not self._over:
            self.agreement.look(self._store, wanted=self.wanted)
            time.sleep(self._delay())


@pytest.mark.parametrize("collectives", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_all_ranks_stop_before_the_same_micro_batch(ranks, collectives):
    """With a collective in each micro-batch, a rank that begins one more would wait for ever."""
    random.seed(ranks)
    for attempt in range(20):
        store = HashStore()
        meeting = threading.Barrier(ranks) if collectives else None
        everyone = [
            Rank(rank, ranks, store, meeting, lambda: random.random() * 0.004)
            for rank in range(ranks)
        ]
        threads = [thread for rank in everyone for thread in rank.threads]
        for thread in threads:
            thread.start()
        time.sleep(random.random() * 0.02)
        asking = random.sample(everyone, 1 + attempt % ranks)
        for rank in asking:
            rank.wanted = True
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "the ranks wait for each other"
        assert len({rank.begun for rank in everyone}) == 1
        assert all(rank.agreement.stopped for rank in everyone)


def test_nothing_is_agreed_without_a_request():
    store, agreement = HashStore(), StopAgreement(rank=0, ranks=2)
    for _ in range(3):
        agreement.look(store, wanted=False)
        assert not agreement.reached()
    assert not agreement.under_way
    assert not agreement.stopped
