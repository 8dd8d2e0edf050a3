"""Requests to stop by signals."""

import signal
import threading
import types

import pytest

from launcher.distributed.environment import Environment
from launcher.reliability import signals
from launcher.reliability.run_directory import RunFolder


def test_stop_requests(monkeypatch):
    ended, clock = [], [100.0]
    monkeypatch.setattr(signals, "end_process", ended.append)
    monkeypatch.setattr(signals, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))

    def send(number):
        # To this thread: one that another test has left may take what is sent to the process
        signal.pthread_kill(threading.get_ident(), number)
        stop.look()

    before = signal.getsignal(signal.SIGTERM)
    with signals.StopRequest() as stop:
        assert not stop.requested()
        send(signal.SIGTERM)
        assert stop.signal == "SIGTERM"
        send(signal.SIGINT)
        assert not ended, "a signal within two seconds is the same request"
        clock[0] += 3
        send(signal.SIGUSR1)
        assert not ended, "the run is saving"
        send(signal.SIGINT)
        assert ended == [1], "a second SIGINT ends it at once"
        send(signal.SIGTERM)
        assert ended == [1, 1], "and so does a second SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_after_a_warning_is_not_the_second(monkeypatch):
    """Slurm sends SIGUSR1, and SIGTERM at the end of the time: the run may still be saving."""
    clock = [100.0]
    monkeypatch.setattr(signals, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    repeats = signals.Repeats()
    found = []
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        found.append(repeats.insists(number))
        clock[0] += 3
    assert found == [False, False, False, True]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_of_the_terminal_is_a_request_unless_it_is_ignored(number):
    """As SIGHUP under nohup, and SIGINT after `&` in a script. SIGTERM stops the run then."""
    before = signal.getsignal(number)
    try:
        for disposition, request in ((signal.SIG_DFL, number.name), (signal.SIG_IGN, None)):
            signal.signal(number, disposition)
            with signals.StopRequest() as stop:
                signal.pthread_kill(threading.get_ident(), number)
                assert stop.requested() == (request is not None)
                assert stop.signal == request
                signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
                assert stop.requested()
                assert stop.signal == (request or "SIGTERM")
            assert signal.getsignal(number) == disposition
    finally:
        signal.signal(number, before)


def test_a_stop_at_the_start_keeps_the_last_step(tmp_path):
    run = RunFolder(tmp_path)
    run.metrics.write_text('{"step": 10}\n')  # logging.every_steps: 10
    run.write_status("stopped", step=15)
    signals.report_stop_at_start(run, "SIGTERM")
    assert run.read_status()["step"] == 15
    run.create("", from_scratch=True)
    signals.report_stop_at_start(run, "SIGTERM")
    assert run.read_status()["step"] == 0


def test_the_end_of_a_start_is_not_replaced_by_running(tmp_path):
    """The training loop may write its status once more while the watchdog of a rank ends it."""
    run = RunFolder(tmp_path)
    for end in ("stopped", "failed"):
        run.note_start(Environment())
        run.write_status("running", step=1)
        assert run.read_status()["state"] == "running", "a start replaces the end of the last one"
        RunFolder(tmp_path).write_status(end, step=1)  # another rank
        run.write_status("running", step=2)
        assert run.read_status()["state"] == end
    run.write_status("stopped", step=3)
    assert run.read_status()["step"] == 3


@pytest.mark.parametrize(
    ("state", "owned", "status", "text"),
    [
        ("finished", True, 0, "the run is finished already"),
        ("stopped", True, 75, "the run is stopped already"),
        ("running", True, 1, "the ranks are killed; steps since the last checkpoint are lost"),
        ("running", False, 1, "the ranks are killed; steps since the last checkpoint are lost"),
        (None, True, 1, "the ranks are killed before the first step"),
    ],
)
def test_second_sigint_says_what_is_lost(state, owned, status, text, tmp_path, capsys):
    """A run that was finished already counted as killed, and one that was killed as running."""
    run = RunFolder(tmp_path)
    run.write_status("stopped", step=1)  # of an earlier start
    run.note_found()
    if state is not None:
        RunFolder(tmp_path).write_status(state, step=5)
    before = run.read_status()
    assert signals.report_kill(run, "SIGTERM", owned=owned) == status
    assert capsys.readouterr().err == f"SIGTERM again: {text}\n"
    after = run.read_status()
    if owned and state == "running":
        (tmp_path / "checkpoints" / "step_00000005").mkdir(parents=True)
        run.metrics.write_text('{"step": 5}\n')
        signals.report_kill(run, "SIGTERM", owned=False)
        wanted = "SIGTERM again: the ranks are killed; the checkpoint of step 5 is saved\n"
        assert capsys.readouterr().err == wanted
    if owned and state in ("running", None):
        assert (after["state"], after["reason"]) == ("failed", "killed")
        assert after["error"] == f"SIGTERM twice: {text}"
        assert run.read_events()[-1]["event"] == "failed"
    else:
        assert after == before
