"""Requests to stop by signals."""

import os
import signal
import types

from launcher.reliability import signals


def test_stop_requests(monkeypatch):
    ended, clock = [], [100.0]
    monkeypatch.setattr(signals, "end_process", ended.append)
    monkeypatch.setattr(signals, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))

    def send(number):
        os.kill(os.getpid(), number)
        stop.look()

    before = signal.getsignal(signal.SIGTERM)
    with signals.StopRequest() as stop:
        assert not stop.requested()
        send(signal.SIGTERM)
        assert stop.signal == "SIGTERM"
        send(signal.SIGINT)
        assert not ended, "a signal within two seconds is the same request"
        clock[0] += 3
        send(signal.SIGTERM)
        send(signal.SIGUSR1)
        assert not ended, "the run is saving"
        send(signal.SIGINT)
        assert ended == [1], "a second SIGINT ends it at once"
    assert signal.getsignal(signal.SIGTERM) is before
