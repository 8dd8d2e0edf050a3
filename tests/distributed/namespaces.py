"""Simulates two machines with namespaces for network, processes and host name.

A virtual network cable connects them; tests can disconnect it. Requires root.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests import REPOSITORY
from tests.distributed.launching import PATIENCE

DEVICE = "eth0"
_NETWORK = "10.213.77"
_INIT_SCRIPT = "echo {name} > /proc/sys/kernel/hostname; {run}"
"""Script of a node's first process. When it ends, the kernel kills all processes of the node."""
_COMMAND, _COMMAND_AS_INIT = '"$@"; exit $?', 'exec "$@"'


def unavailable():
    """Returns why namespaces are unavailable, or None if they are available."""
    missing = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found (Debian: apt-get install iproute2 util-linux)"
    name = f"launcher-probe-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        probe = [
            "ip",
            "netns",
            "exec",
            name,
            "unshare",
            "--pid",
            "--uts",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
        ]
        subprocess.run(
            [*probe, _INIT_SCRIPT.format(name="probe", run=_COMMAND), "sh", "true"],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        _ip(
            "link", "add", f"lp{os.getpid()}", "type", "veth", "peer", "name", DEVICE, "netns", name
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"namespaces cannot be created here; this requires root and CAP_SYS_ADMIN: {getattr(error, 'stderr', None) or error}".strip()
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None


class Node:
    def __init__(self, name, address):
        self.name, self.address = name, address
        self.process = self.log = None

    def start(self, command, *, log, as_init=False, **variables):
        """Starts a command on the node and writes its output to the file `log`.

        as_init: the command is process 1, as in a container: a signal without handler is ignored.
        """
        unshare = [
            "unshare",
            "--pid",
            "--uts",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            _INIT_SCRIPT.format(name=self.name, run=_COMMAND_AS_INIT if as_init else _COMMAND),
            "sh",
        ]
        environment = {
            k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        }
        environment |= {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", **variables}
        self.log = Path(log)
        with self.log.open("w") as stream:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *unshare, *map(str, command)],
                cwd=REPOSITORY,
                env=environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def terminate(self):
        """Sends SIGTERM to process 1 of the node, which is a command that was started `as_init`."""
        process = self.process.pid  # of unshare, whose only child is process 1
        children = Path(f"/proc/{process}/task/{process}/children").read_text()
        os.kill(int(children), signal.SIGTERM)

    def disconnect(self):
        """Disconnects the node's network.

        The node's connections time out after 13 s instead of 15 minutes: torchrun's agent has no
        other time limit, and the test has to wait for the agent.
        """
        limit = ["sh", "-c", "echo 5 > /proc/sys/net/ipv4/tcp_retries2"]
        subprocess.run(
            ["ip", "netns", "exec", self.name, *limit], check=True, capture_output=True, timeout=60
        )
        _ip("-n", self.name, "link", "set", DEVICE, "down")

    def kill(self):
        """Kills all processes of the node at once, as in a machine crash."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=60)

    def wait(self, seconds):
        """Returns the exit status. Raises AssertionError with the output at the time limit."""
        try:
            return self.process.wait(timeout=PATIENCE * seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.name} did not end within {PATIENCE * seconds} s:\n{self.output()[-8000:]}"
            ) from None

    def output(self):
        return self.log.read_text() if self.log is not None else ""


@contextlib.contextmanager
def two_nodes():
    """Yields two nodes and removes them afterwards.

    The first node has the lower address; torchrun assigns rank 0 to it.
    """
    nodes = [Node(f"launcher-{os.getpid()}-{number}", f"{_NETWORK}.{number}") for number in (1, 2)]
    try:
        for node in nodes:
            _ip("netns", "add", node.name)
        _ip(
            "-n",
            nodes[0].name,
            "link",
            "add",
            DEVICE,
            "type",
            "veth",
            "peer",
            "name",
            DEVICE,
            "netns",
            nodes[1].name,
        )
        for node in nodes:
            _ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _ip("-n", node.name, "link", "set", device, "up")
        yield nodes
    finally:
        for node in nodes:
            node.kill()
            for pid in _processes(node.name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + 60
            while _processes(node.name) and time.monotonic() < deadline:
                time.sleep(0.05)
            subprocess.run(["ip", "netns", "del", node.name], capture_output=True, check=False)


def _processes(name):
    found = subprocess.run(
        ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in found.stdout.split()]


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=60)
