"""Signals that a process waits for."""

import signal
import subprocess
import sys
import time

_WAIT = """
import signal, time
from launcher.distributed.processes import next_signal

requests = (signal.SIGTERM, signal.SIGHUP)
signal.pthread_sigmask(signal.SIG_BLOCK, requests)
print("ready", flush=True)
until = time.monotonic() + 3.0
arrived = []
while time.monotonic() < until:
    arrived.append(next_signal(requests, 0.1))
print(*(number.name for number in arrived if number))
"""


def test_a_process_that_was_stopped_gets_its_signals_and_no_other():
    """Ctrl-Z and `fg`: Python's sigtimedwait returns any number, such as that of SIGHUP, if its
    time is over when the process goes on."""
    waiting = subprocess.Popen(
        [sys.executable, "-c", _WAIT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert waiting.stdout.readline() == "ready\n"
    for stops in range(4):
        time.sleep(0.05)
        waiting.send_signal(signal.SIGSTOP)
        if stops == 2:
            waiting.send_signal(signal.SIGTERM)
        time.sleep(0.25)
        waiting.send_signal(signal.SIGCONT)
    output, errors = waiting.communicate(timeout=60)
    assert (output, errors) == ("SIGTERM\n", "")
