"""A real Slurm of a few virtual nodes on this machine: munge, slurmctld, and a slurmd in namespaces of its own for each node.

Needs root, namespaces, and Debian's munge, slurmctld, slurmd and slurm-client. Everything lies in one folder, and nothing
is left when the context ends. Where the machine has a freezer cgroup, jobs are tracked by cgroups, as in production: then
only the first process of each task gets a signal.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.distributed.launching import PATIENCE

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "unshare")
FREEZER = Path("/sys/fs/cgroup/freezer")
_PATH = f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"

_NODE = """
echo "$NODE" > /proc/sys/kernel/hostname
mount --bind "$BED/hosts" /etc/hosts
mount --bind "$BED/resolv.conf" "$(realpath /etc/resolv.conf)" 2>/dev/null
if [ -n "$CGROUP" ]; then mkdir -p "$CGROUP" && mount --bind "$CGROUP" /sys/fs/cgroup/freezer || exit 1; fi
slurmd -D -N "$NODE" &
trap 'exit 0' TERM
while :; do sleep 1000 & wait $!; done
"""
"""Of a node's first process, which stays, and with which the kernel ends all others of the node. No name server is asked:
torch looks up names for as long as one may take to answer."""

_CONFIGURATION = """
ClusterName=bed
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={bed}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={bed}/state
SlurmdSpoolDir={bed}/spool/%n
SlurmctldPidFile={bed}/slurmctld.pid
SlurmdPidFile={bed}/slurmd.%n.pid
SlurmctldLogFile={bed}/slurmctld.log
SlurmdLogFile={bed}/slurmd.%n.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
PropagateResourceLimits=NONE
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
MinJobAge=3600
KillWait=25
InactiveLimit=0
UnkillableStepTimeout=30
MessageTimeout=10
SlurmctldTimeout=10
SlurmdTimeout=10
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PartitionName=normal Nodes=n[1-{nodes}] Default=YES PriorityTier=1 GraceTime=30 DefaultTime=10 MaxTime=INFINITE State=UP
PartitionName=high Nodes=n[1-{nodes}] PriorityTier=10 PreemptMode=OFF DefaultTime=10 MaxTime=INFINITE State=UP
"""


def unavailable():
    """Why there can be no cluster here; None where there can."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]
    if missing:
        return f"{', '.join(missing)} not found (Debian: apt-get install --no-install-recommends munge slurmctld slurmd slurm-client)"
    probe = subprocess.run(
        [
            "unshare",
            "--pid",
            "--mount",
            "--uts",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            "echo n > /proc/sys/kernel/hostname",
        ],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    return (
        f"namespaces cannot be made here, which takes root and CAP_SYS_ADMIN: {probe.stderr.strip()}"
        if probe.returncode
        else None
    )


class Cluster:
    def __init__(self, bed, nodes, gpus):
        self.bed, self.nodes, self._gpus = (
            Path(bed),
            [f"n{number}" for number in range(1, nodes + 1)],
            gpus,
        )
        self.environment = dict(os.environ, PATH=_PATH, SLURM_CONF=str(self.bed / "slurm.conf"))
        self.proctrack = "cgroup" if os.access(FREEZER, os.W_OK) else "linuxproc"
        self._processes = {}

    def __enter__(self):
        try:
            self._configure()
            munge = f"munged -F --key-file={self.bed}/key --socket={self.bed}/munge.socket --pid-file={self.bed}/munge.pid"
            self._start(
                "munged",
                [
                    *munge.split(),
                    f"--log-file={self.bed}/munge.log",
                    f"--seed-file={self.bed}/seed",
                ],
            )
            self.wait_for(lambda: (self.bed / "munge.socket").exists(), 10, "munged")
            self._start("slurmctld", ["slurmctld", "-D", "-c"])
            self.wait_for(
                lambda: self.run("scontrol", "ping", check=False).returncode == 0, 15, "slurmctld"
            )
            for node in self.nodes:
                self.boot(node)
            self.wait_for(lambda: self.idle() == len(self.nodes), 20, "the nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in reversed(self._processes.values()):
            process.kill()
            process.wait(timeout=20)
        left = [self._cgroup(node) for node in self.nodes if self.proctrack == "cgroup"]
        deadline = time.monotonic() + 10
        while (
            left and time.monotonic() < deadline
        ):  # a killed process is in its group until it has been reaped
            for cgroup in left:
                for folder, _, _ in os.walk(cgroup, topdown=False):
                    with contextlib.suppress(OSError):
                        os.rmdir(folder)
            left = [cgroup for cgroup in left if cgroup.exists()]
            time.sleep(0.1 if left else 0)

    def _cgroup(self, node):
        return FREEZER / f"launcher-{os.getpid()}-{node}"

    def _start(self, name, command, **variables):
        with (self.bed / f"{name}.out").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                command,
                env=self.environment | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _configure(self):
        self.bed.chmod(0o755)
        (self.bed / "state").mkdir()
        names, devices = "127.0.0.1 localhost\n", []
        port = _free_ports(len(self.nodes) + 1)
        host = socket.gethostname().split(".")[0]
        lines = _CONFIGURATION.format(
            host=host, port=port, bed=self.bed, proctrack=self.proctrack, nodes=len(self.nodes)
        )
        for number, node in enumerate(self.nodes, 1):
            (self.bed / "spool" / node).mkdir(parents=True)
            names += f"127.0.1.{number} {node}\n"
            gres = f"Gres=gpu:{self._gpus}" if self._gpus else ""
            lines += f"NodeName={node} NodeAddr=127.0.1.{number} Port={port + number} CPUs=2 RealMemory=4000 {gres} State=UNKNOWN\n"
        for number in range(self._gpus):  # Slurm takes a GPU for one only where it has a device
            os.mknod(self.bed / f"gpu{number}", 0o020666, os.makedev(1, 3))
            devices.append(str(self.bed / f"gpu{number}"))
        (self.bed / "slurm.conf").write_text(lines)
        gres = (
            f"NodeName=n[1-{len(self.nodes)}] Name=gpu File={','.join(devices)}\n"
            if devices
            else ""
        )
        (self.bed / "gres.conf").write_text("AutoDetect=off\n" + gres)
        (self.bed / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n" if self.proctrack == "cgroup" else ""
        )
        (self.bed / "hosts").write_text(names)
        (self.bed / "resolv.conf").write_text(
            "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"
        )
        key = self.bed / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(256))

    def boot(self, node):
        """Starts a node, or starts it again."""
        unshare = [
            "unshare",
            "--pid",
            "--mount",
            "--uts",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            _NODE,
        ]
        cgroup = str(self._cgroup(node)) if self.proctrack == "cgroup" else ""
        self._start(node, unshare, NODE=node, BED=str(self.bed), CGROUP=cgroup)

    def crash(self, node):
        """Ends all processes of a node at once."""
        self._processes[node].kill()
        self._processes[node].wait(timeout=20)

    def kill_daemon(self, node):
        """Ends a node's slurmd alone: Slurm gives the node up, and what runs there goes on."""
        first = (
            Path(f"/proc/{self._processes[node].pid}/task/{self._processes[node].pid}/children")
            .read_text()
            .split()[0]
        )
        space = os.readlink(f"/proc/{first}/ns/pid")
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(folder / "ns/pid") == space and (
                    folder / "comm"
                ).read_text().startswith("slurmd\n"):
                    os.kill(int(folder.name), signal.SIGKILL)

    def run(self, *command, check=True, **variables):
        """A command that knows the cluster."""
        done = subprocess.run(
            [str(word) for word in command],
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert not check or done.returncode == 0, (
            f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done

    def idle(self):
        """Number of nodes that have nothing to do."""
        return (
            self.run("sinfo", "-h", "-N", "-p", "normal", "-o", "%T", check=False)
            .stdout.split()
            .count("idle")
        )

    def job(self, job):
        """What Slurm says of a job, key by key; empty where it does not know it."""
        said = self.run("scontrol", "show", "job", "--oneliner", job, check=False).stdout
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def state(self, job):
        return self.job(job).get("JobState")

    def wait_for(self, condition, seconds, what):
        deadline = time.monotonic() + PATIENCE * seconds
        while not (result := condition()):
            assert time.monotonic() < deadline, (
                f"{what}: not within {PATIENCE * seconds} s\n{self.diagnosis()}"
            )
            time.sleep(0.2)
        return result

    def diagnosis(self):
        """For who looks into a failed test."""
        told = [
            self.run("squeue", check=False).stdout,
            self.run("sinfo", "-N", "-l", check=False).stdout,
        ]
        logs = [
            log for log in (*self.bed.glob("*.out"), self.bed / "slurmctld.log") if log.exists()
        ]
        return "\n".join(
            told
            + [
                f"{log.name}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                for log in logs
            ]
        )


def _free_ports(count):
    for first in range(26000 + os.getpid() % 100 * 20, 32000, 20):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")
