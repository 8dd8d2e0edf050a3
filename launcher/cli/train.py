"""`launcher train`: checks the recipe, then starts its ranks as torchrun does."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

from launcher.checkpoint.resume import finished_run
from launcher.cli.app import Overrides, option
from launcher.cli.sweep import LocalSweep, Sweep, take_sweep
from launcher.distributed.processes import next_signal, process_start
from launcher.distributed.torchrun import bind_stores
from launcher.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED,
    EXIT_USAGE,
    RecipeError,
    TrainingError,
    first_line,
)
from launcher.recipe.decode import dotted
from launcher.recipe.load import load_recipe
from launcher.recipe.yaml_text import as_override
from launcher.reliability.lock import current_owner
from launcher.reliability.run_directory import RunFolder
from launcher.reliability.signals import (
    STOP_SIGNALS,
    Repeats,
    report_kill,
    requests_to_stop,
)

MEETING_SECONDS = 600
"""For which a machine waits for machine 0. torchrun waits as long for the others."""
ALONE_SECONDS = 5
"""After a request to stop, for the first rank: machines that have just met start their ranks."""


def train(
    overrides: Overrides,
    gpus: Annotated[
        int | None, option("Processes, one per GPU. Default: the visible GPUs, or 1.", "N")
    ] = None,
    max_restarts: Annotated[
        int, option("Restarts after a failure, from the last checkpoint.", "N", min=0)
    ] = 0,
    nodes: Annotated[
        int | None, option("Machines, each of which runs this command. Default: 1.", "N", min=1)
    ] = None,
    node_rank: Annotated[
        int | None, option("Number of this machine, from 0. Needed with several.", "N", min=0)
    ] = None,
    address: Annotated[
        str | None,
        option("Machine 0 and a free port of it. Needed with several.", "HOST:PORT"),
    ] = None,
    throttle: Annotated[
        int | None,
        option("Runs of a sweep at the same time. Default: as many as have GPUs.", "N", min=1),
    ] = None,
) -> int:
    """Train: starts torchrun with a process for each GPU.

    sweep.KEY=A,B,C trains a run with each value, in a folder of its own below run.dir; several
    sweeps make all combinations. With gpus=N, runs that find N free GPUs train side by side.

    \b
    Example:
      launcher train recipe=sft model.path=Qwen/Qwen3-0.6B data.train='my/data/*.jsonl'
      launcher train recipe=quickstart run.device=cpu gpus=2
      launcher train recipe=quickstart sweep.optimizer.learning_rate=1e-4,3e-4
      launcher train recipe=fsdp nodes=2 gpus=4 node_rank=0 address=10.0.0.1:29500
    """
    nodes = _check_nodes(nodes, node_rank, address)
    overrides, sweep = take_sweep(overrides)
    if sweep:
        if nodes > 1:
            raise RecipeError("sweep: runs on one machine; `launcher submit` takes several nodes")
        return _train_sweep(overrides, sweep, gpus, max_restarts, throttle)
    if throttle is not None:
        raise RecipeError("throttle: needs a sweep (sweep.KEY=A,B), whose runs it limits")
    if finished := finished_run(overrides):
        print(finished)
        return EXIT_DONE
    loaded = load_recipe(overrides, ranks=gpus and gpus * nodes, hub=True)
    recipe, derived = loaded.recipe, loaded.origins.derived
    for path, value in derived.items():  # the ranks do not look for it again
        print(f"{dotted(path)}: {value}")
        overrides = [*overrides, as_override(dotted(path), value.value)]
    if gpus is not None:
        _check_gpus(gpus, recipe.run.device)
    run = RunFolder(Path(recipe.run.dir))
    run.note_found()
    requests = _Requests(run=run, saves=recipe.checkpoint.saves, nodes=nodes)
    if gpus is None:
        gpus = _visible_gpus(recipe.run.device)
        load_recipe(overrides, ranks=gpus * nodes)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default, without its warning
    meeting = ["--standalone"]
    if nodes > 1 and node_rank is not None and address is not None:
        meeting = _meeting(nodes, node_rank, address, Path(recipe.run.dir).name)
    options = [*meeting, f"--nproc-per-node={gpus}", f"--max-restarts={max_restarts}"]
    exit_status = _run_agent([*options, "-m", "launcher.train", *overrides], log=run.log)
    return _exit_status_of_run(exit_status, run, asked=requests.first is not None, nodes=nodes)


def _exit_status_of_run(exit_status: int, run: RunFolder, *, asked: bool, nodes: int) -> int:
    """The exit status of this command after torchrun's, which agrees with the outcome in the run
    folder: under torchrun a stopped run exits with 0, as does a process that its own code ends.
    `asked`: to stop, by a signal."""
    state = run.outcome().get("state")  # if this start has written it
    if exit_status == EXIT_USAGE:
        return EXIT_USAGE
    if state in ("finished", "stopped"):
        return EXIT_DONE if state == "finished" else EXIT_STOPPED
    if state == "failed":
        return exit_status or EXIT_FAILED
    if exit_status == EXIT_DONE and asked:
        return EXIT_STOPPED  # before a rank had taken the folder, or could write that
    if nodes > 1 or run.read_status().get("state") == "finished":  # by ranks of another machine
        return exit_status
    text = "the ranks have ended, but neither finished nor stopped the run"
    if exit_status == EXIT_DONE:
        _say(f"{text}: a process that ends itself with status 0 has not failed for torchrun")
    owner = current_owner(run.path)
    if state == "running" and (owner is None or owner[1] is False):
        with contextlib.suppress(OSError, TrainingError):
            step = run.last_step()
            run.write_status("failed", step=step, reason="rank_lost", error=text)
            run.note("failed", step=step, reason="rank_lost")
    return EXIT_FAILED if exit_status in (EXIT_DONE, EXIT_STOPPED) else exit_status


def _train_sweep(
    overrides: Sequence[str],
    sweep: Sweep,
    gpus: int | None,
    max_restarts: int,
    throttle: int | None,
) -> int:
    """Trains the runs of a sweep, prints their table, and returns the exit status."""
    options = [f"max_restarts={max_restarts}"]
    if gpus is not None:
        options.append(f"gpus={gpus}")
    local = LocalSweep(overrides, sweep, options, ranks=gpus)
    count = 0
    if local.device != "cpu":
        import torch  # takes seconds

        count = torch.cuda.device_count()
    each = gpus or max(1, count)
    throttle = throttle or max(1, count // each)
    if count and throttle * each > max(count, each):
        raise RecipeError(
            f"throttle={throttle}: {throttle} runs of {each} GPUs at the same time need "
            f"{throttle * each}; there are {count}: lower throttle, or give each fewer (gpus=N)"
        )
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    devices = [
        names[place * each : (place + 1) * each] for place in range(throttle if count else 0)
    ]
    exit_status = local.run(throttle, devices)
    local.print_table()
    return exit_status


def _check_nodes(nodes: int | None, node_rank: int | None, address: str | None) -> int:
    """The number of machines. Raises RecipeError if the options for several are not complete and
    valid. With nodes=1, a command that is also for several may give them."""
    given = {"node_rank": node_rank, "address": address}
    if nodes is None:
        if extra := [name for name, value in given.items() if value is not None]:
            raise RecipeError(f"{extra[0]} is for several machines: add nodes=N")
        return 1
    missing = [name for name, value in given.items() if value is None]
    if missing and nodes > 1:
        raise RecipeError(
            f"nodes={nodes} needs {' and '.join(missing)}: start the same command on each machine, "
            f"with node_rank=0 to {nodes - 1}, and address=HOST:PORT of machine 0"
        )
    if node_rank is not None and node_rank >= nodes:
        raise RecipeError(f"node_rank={node_rank} must be less than nodes={nodes}")
    if address is not None:
        host, port = _host_and_port(address)
        if not _is_host(host) or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise RecipeError(f"address={address} must be HOST:PORT, such as 10.0.0.1:29500")
    return nodes


def _host_and_port(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port


def _is_host(text: str) -> bool:
    """Whether it may be the name of a machine, or is an IP address: no machine waits for another
    text to get an address."""
    if ":" not in text:
        return re.fullmatch(r"[\w.-]+", text) is not None
    with contextlib.suppress(ValueError):
        return bool(ipaddress.IPv6Address(text))
    return False


def _meeting(nodes: int, node_rank: int, address: str, run: str) -> list[str]:
    """Options of torchrun, with which the machines of a run find each other. Waits until the name
    of machine 0 has an address: a cluster may start that machine later than others."""
    host, port = _host_and_port(address)
    for seconds in itertools.count():
        try:
            family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            break
        except socket.gaierror as error:
            if seconds >= MEETING_SECONDS:
                raise RecipeError(f"address: {host} has no address here: {error}") from None
        if seconds == 0:
            print(f"waiting for an address of {host}", flush=True)
        time.sleep(1)
    with socket.socket(family, kind) as link:
        link.connect(target)  # sends nothing; it selects the address of this machine
        own = link.getsockname()[0]
    # Without is_host, torchrun compares host names, which differ from those of a cluster's DNS
    settings = f"is_host={int(node_rank == 0)},read_timeout={MEETING_SECONDS}"
    return [
        f"--nnodes={nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={address}",
        f"--rdzv-id={run}",
        f"--rdzv-conf={settings}",
        f"--local-addr={own}",
    ]


class _Requests:
    """Passes requests to stop on to the ranks, and waits for them: torchrun's own handler would
    kill them after 30 seconds. A second SIGINT or SIGTERM, more than two seconds later, kills them
    at once. A machine that waits for others has no ranks: a request ends it after
    ALONE_SECONDS, because the others may come later than its platform waits, or never.

    Signals stay blocked from now on, in the ranks too: one that arrives before a rank has its
    handlers is not lost. torchrun would also end the ranks on SIGHUP under nohup.
    """

    def __init__(self, *, run: RunFolder, saves: bool = True, nodes: int = 1) -> None:
        self._run, self._saves, self._nodes = run, saves, nodes
        self.first: signal.Signals | None = None
        """The first request."""
        self._requests = requests_to_stop()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        threading.Thread(target=self._forward, name="signals", daemon=True).start()

    def _forward(self) -> None:
        repeats, signaled, since = Repeats(), set[int](), 0.0
        while True:
            number = next_signal(self._requests, 0.2)
            if number is not None:
                if repeats.insists(number):
                    self._kill(number)
                if self.first is None:
                    self.first, since = number, time.monotonic()
                    again = "; press again to stop now" if number == signal.SIGINT else ""
                    _say(f"{self._what_follows()}{again}")
            if self.first is not None:
                new = set(_ranks()) - signaled  # restarted ones too
                signaled |= new
                _send(new, self.first)
                alone = self._nodes > 1 and not signaled
                if alone and time.monotonic() - since > ALONE_SECONDS:
                    _say("no rank runs here, and the other machines are not waited for")
                    status = _exit_status_of_run(
                        EXIT_DONE, self._run, asked=True, nodes=self._nodes
                    )
                    os._exit(status)

    def _what_follows(self) -> str:
        """What the run does after a request, by what this start has written until now."""
        status = self._run.outcome()
        state = status.get("state")
        if state in ("finished", "stopped"):
            return f"the run is {state} already, and ends"
        if state != "running":
            return "stopping before the first step"
        if self._run.last_step() == status.get("steps"):
            return "all steps are trained: the run completes its end"
        return f"stopping after the next step at the latest{', saving' * self._saves}"

    def _kill(self, number: signal.Signals) -> NoReturn:
        ranks, owner = _ranks(), current_owner(self._run.path)
        owned = owner is not None and owner[1] is True and owner[0].pid in ranks
        _send(ranks, signal.SIGKILL)
        deadline = time.monotonic() + 5.0
        while any(map(process_start, ranks)) and time.monotonic() < deadline:
            time.sleep(0.02)
        os._exit(report_kill(self._run, number.name, owned=owned))


def _say(text: str) -> None:
    """Prints to standard error, whose reader may be gone or whose disk may be full: the request
    must be passed on in any case."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _ranks() -> list[int]:
    """Process ids of torchrun's ranks: the children of the main thread of this process."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        return [int(child) for child in children.split()]
    return []


def _send(ranks: Iterable[int], number: signal.Signals) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, number)


def _run_agent(arguments: list[str], *, log: Path) -> int:
    """Runs torchrun's agent in this process. Unlike torchrun it does not print that a rank failed,
    which the rank has reported; unless a signal has ended it, or LOGLEVEL is set. log: the folder of
    the ranks' logs."""
    quiet = "LOGLEVEL" not in os.environ and "TORCH_CPP_LOG_LEVEL" not in os.environ
    if quiet:  # of the C++ stack of a store whose machine has ended; torch reads it at its import
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    if quiet:  # the ranks warn
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    run: Any = torchrun  # without types
    if "LOGLEVEL" not in os.environ:
        logging.disable()
    scratch = tempfile.TemporaryDirectory(prefix="launcher-")
    refusal = Path(os.environ.setdefault("LAUNCHER_REFUSED", f"{scratch.name}/refused"))
    try:
        parsed = run.parse_args(arguments)
        bind_stores(parsed)
        run.run(parsed)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            killed = "; the kernel does that when the host runs out of memory"
            number = signal.Signals(-failure.exitcode)
            _say(f"rank {rank} was ended by {number.name}{killed * (number == signal.SIGKILL)}")
            if (file := log / f"rank_{rank}.log").exists():  # with the last words of C++
                _say(f"the log of rank {rank} is {file}")
        return failure.exitcode if failure.exitcode > 0 else EXIT_FAILED
    except SignalException as error:
        return 128 + int(error.sigval)
    except RendezvousError as error:
        # The machine of the store ended first: the ranks met, and were refused
        if refusal.exists() and refusal.stat().st_size:
            return EXIT_USAGE
        _say(f"the machines did not meet at the address: {first_line(error.__cause__ or error)}")
        return EXIT_FAILED
    finally:
        scratch.cleanup()
    return EXIT_DONE


def _check_gpus(gpus: int, device: str) -> None:
    """Raises RecipeError if this machine has fewer GPUs than were asked for."""
    if device == "cpu":
        return
    import torch  # which torchrun's agent imports, too

    if gpus > (present := torch.cuda.device_count()):
        raise RecipeError(
            f"command line: gpus={gpus}: this machine has {present or 'no'} GPUs; "
            f"run.device=cpu trains in {gpus} processes on its CPUs"
        )


def _visible_gpus(device: str) -> int:
    """The processes to start, one for each GPU; 1 on the CPU, which a line says if nobody has asked
    for it. Raises RecipeError if the ranks would end because there is no GPU."""
    if device == "cpu":
        return 1
    import torch  # takes seconds; `--gpus` saves them

    if count := torch.cuda.device_count():
        return count
    from launcher.distributed.process_group import torch_build

    build, cpu = torch_build(), "run.device=cpu trains on the CPU, with gpus=N in N processes"
    if build is not None:
        tools = "rocm-smi, ROCR" if build.startswith("ROCm") else "nvidia-smi, CUDA"
        raise RecipeError(
            f"run.device={device}: torch {torch.__version__} is built for {build} and finds no GPU: "
            f"{cpu}. If there should be a GPU, check the driver ({tools}_VISIBLE_DEVICES) and what "
            "the job was granted"
        )
    without = f"torch {torch.__version__} is built without CUDA or ROCm"
    if device == "cuda":
        raise RecipeError(f"run.device=cuda: {without}; docs/install.md has other builds. {cpu}")
    cores = len(os.sched_getaffinity(0))
    print(f"trains on the CPU, in 1 process with {cores} cores, because {without}; {cpu}")
    return 1
