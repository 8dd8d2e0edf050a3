"""A real Slurm cluster of virtual nodes on this machine.

It runs munge, slurmctld, and one slurmd per node. Each slurmd has its own namespaces. The cluster
needs root, namespaces, and the Debian packages munge, slurmctld, slurmd and slurm-client. All its
files are in one folder. At exit, all processes and cgroups are removed.

If the machine has a freezer cgroup, Slurm tracks jobs by cgroups, as in production. In this case
only the first process of each task receives a signal.
"""

import contextlib
import functools
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
UNSHARE = "unshare --pid --mount --uts --fork --kill-child --mount-proc sh -c".split()  # noqa: SIM905
_PATH = f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"

_NODE = """
echo "$NODE" > /proc/sys/kernel/hostname
mount --bind "$FOLDER/hosts" /etc/hosts
mount --bind "$FOLDER/resolv.conf" "$(realpath /etc/resolv.conf)" 2>/dev/null
if [ -n "$CGROUP" ]; then mkdir -p "$CGROUP" && mount --bind "$CGROUP" /sys/fs/cgroup/freezer || exit 1; fi
slurmd -D -N "$NODE" &
trap 'exit 0' TERM
while :; do sleep 1000 & wait $!; done
"""
"""Script of the first process of a node. When it ends, the kernel ends all processes of the node.

Name servers are disabled, because torch waits for their replies.
"""

_CONFIGURATION = """
ClusterName=bed
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
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
    """Returns why no cluster can be started here, or None."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]
    if missing:
        return f"{', '.join(missing)} not found (Debian: apt-get install --no-install-recommends munge slurmctld slurmd slurm-client)"
    probe = [*UNSHARE, "echo n > /proc/sys/kernel/hostname"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=10, check=False)
    why = "cannot create namespaces, which needs root and CAP_SYS_ADMIN"
    return f"{why}: {done.stderr.strip()}" if done.returncode else None


class Cluster:
    def __init__(self, folder, nodes, gpus):
        self.folder, self._gpus = Path(folder), gpus
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.environment = dict(os.environ, PATH=_PATH, SLURM_CONF=str(self.folder / "slurm.conf"))
        self.proctrack = "cgroup" if os.access(FREEZER, os.W_OK) else "linuxproc"
        self._processes = {}

    def __enter__(self):
        try:
            self._configure()
            files = {"key-file": "key", "socket": "munge.socket", "pid-file": "munge.pid"}
            files |= {"log-file": "munge.log", "seed-file": "seed"}
            munge = [f"--{option}={self.folder / name}" for option, name in files.items()]
            self._start("munged", ["munged", "-F", *munge])
            self.wait_for((self.folder / "munge.socket").exists, 10, "munged")
            self._start("slurmctld", ["slurmctld", "-D", "-c"])
            ping = functools.partial(self.run, "scontrol", "ping", check=False)
            self.wait_for(lambda: ping().returncode == 0, 15, "slurmctld")
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
        # A killed process stays in its cgroup until it is reaped
        while left and time.monotonic() < deadline:
            for cgroup in left:
                for folder, _, _ in os.walk(cgroup, topdown=False):
                    with contextlib.suppress(OSError):
                        os.rmdir(folder)
            left = [cgroup for cgroup in left if cgroup.exists()]
            time.sleep(0.1 if left else 0)

    def _cgroup(self, node):
        return FREEZER / f"launcher-{os.getpid()}-{node}"

    def _start(self, name, command, **variables):
        with (self.folder / f"{name}.out").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                command,
                env=self.environment | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _configure(self):
        self.folder.chmod(0o755)
        (self.folder / "state").mkdir()
        count, port = len(self.nodes), _free_ports(len(self.nodes) + 1)
        settings = {
            "folder": self.folder,
            "proctrack": self.proctrack,
            "nodes": count,
            "port": port,
        }
        lines = _CONFIGURATION.format(host=socket.gethostname().split(".")[0], **settings)
        names = "127.0.0.1 localhost\n"
        for number, node in enumerate(self.nodes, 1):
            (self.folder / "spool" / node).mkdir(parents=True)
            names += f"127.0.1.{number} {node}\n"
            lines += f"NodeName={node} NodeAddr=127.0.1.{number} Port={port + number} CPUs=2 "
            lines += f"RealMemory=4000 Gres=gpu:{self._gpus} State=UNKNOWN\n"
        devices = [str(self.folder / f"gpu{number}") for number in range(self._gpus)]
        for device in devices:  # Slurm accepts a GPU only if it has a device file
            os.mknod(device, 0o020666, os.makedev(1, 3))
        cgroup = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"
        gres = f"AutoDetect=off\nNodeName=n[1-{count}] Name=gpu File={','.join(devices)}\n"
        for name, text in {
            "slurm.conf": lines,
            "gres.conf": gres,
            "cgroup.conf": cgroup if self.proctrack == "cgroup" else "",
            "hosts": names,
            "resolv.conf": "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n",
        }.items():
            (self.folder / name).write_text(text)
        (self.folder / "key").touch(mode=0o600)
        (self.folder / "key").write_bytes(os.urandom(256))

    def boot(self, node):
        """Starts or restarts a node."""
        cgroup = str(self._cgroup(node)) if self.proctrack == "cgroup" else ""
        self._start(node, [*UNSHARE, _NODE], NODE=node, FOLDER=str(self.folder), CGROUP=cgroup)

    def crash(self, node):
        """Ends all processes of a node at once."""
        self._processes[node].kill()
        self._processes[node].wait(timeout=20)

    def kill_daemon(self, node):
        """Kills only the slurmd of a node. Slurm loses the node, but its processes keep running."""
        pid = self._processes[node].pid
        first = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
        space = os.readlink(f"/proc/{first}/ns/pid")
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                same = os.readlink(folder / "ns/pid") == space
                if same and (folder / "comm").read_text().startswith("slurmd\n"):
                    os.kill(int(folder.name), signal.SIGKILL)

    def run(self, *command, check=True):
        """Runs a command in the environment of the cluster."""
        done = subprocess.run(
            [str(word) for word in command],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        output = f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        assert not check or done.returncode == 0, output
        return done

    def idle(self):
        """Returns the number of idle nodes."""
        output = self.run("sinfo", "-h", "-N", "-p", "normal", "-o", "%T", check=False).stdout
        return output.split().count("idle")

    def job(self, job):
        """Returns the fields of a job from scontrol, or an empty dict for an unknown job."""
        output = self.run("scontrol", "show", "job", "--oneliner", job, check=False).stdout
        return dict(word.split("=", 1) for word in output.split() if "=" in word)

    def state(self, job):
        return self.job(job).get("JobState")

    def wait_for(self, condition, seconds, what):
        seconds *= PATIENCE
        deadline = time.monotonic() + seconds
        while not (result := condition()):
            late = time.monotonic() > deadline
            assert not late, f"{what}: not within {seconds} s\n{self.diagnosis()}"
            time.sleep(0.2)
        return result

    def diagnosis(self):
        """Returns the queue, the nodes and the ends of the logs, for messages of failed tests."""
        queries = ["squeue"], ["sinfo", "-N", "-l"]
        parts = [self.run(*query, check=False).stdout for query in queries]
        for log in (*self.folder.glob("*.out"), *self.folder.glob("slurmctld.log")):
            lines = log.read_text(errors="replace").splitlines()
            parts.append("\n".join([f"{log.name}:", *lines[-15:]]))
        return "\n".join(parts)


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
