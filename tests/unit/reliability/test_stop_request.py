"""Requests to stop by signals."""

import os
import signal
import types

from launcher.reliability import signals
from launcher.reliability.run_directory import RunFolder


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


def test_a_stop_at_the_start_keeps_the_last_step(tmp_path):
    run = RunFolder(tmp_path)
    run.metrics.write_text('{"step": 10}\n')  # logging.every_steps: 10
    run.write_status("stopped", step=15)
    signals.report_stop_at_start(run, "SIGTERM")
    assert run.read_status()["step"] == 15
    run.create("", from_scratch=True)
    signals.report_stop_at_start(run, "SIGTERM")
    assert run.read_status()["step"] == 0
