"""A run without a model, for tests that hang or kill it. Each step is one all-reduce.

    watched.py RUN_DIR HANG_TIMEOUT FAULT

Faults:

none      No fault.
evaluate  The run starts with an endless evaluation. A stop request ends the evaluation, and the run
          continues.
loop      Rank 1 hangs in step 5 of the first attempt.
prepare   No step is trained; rank 1 waits in a collective.
early     No step is trained; rank 1 kills itself immediately.
loaders   In step 5 rank 0 waits for eight processes that it has forked, which are stopped.
files     In step 5 the file system of the run's folder does not answer any more, for all ranks, and
          rank 1 opens a file of it.
raise     In step 5 that file system does not answer any more, and rank 1 raises an exception.
node      In step 5 the node without rank 0 is lost: its agent and its ranks are killed. RUN_DIR/lost has
          its name. Three seconds later rank 1 aborts, as NCCL ends it, while rank 0 waits.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from launcher.data.collation import Collated
from launcher.distributed import process_group
from launcher.distributed.child_stacks import offer_stack
from launcher.distributed.environment import read_environment
from launcher.distributed.spawn import end_process
from launcher.models.micro_batch import MicroBatch
from launcher.recipe.schema import Data
from launcher.reliability import file_calls
from launcher.reliability.failures import FailureWatch
from launcher.reliability.progress import Progress
from launcher.reliability.run_directory import RunFolder, rank_log
from launcher.reliability.signals import StopRequest
from launcher.reliability.watchdog import Watch
from launcher.strategies.one_rank import OneRank
from launcher.training.evaluation import Evaluator


def spin():
    while True:
        time.sleep(0.01)


def fork_stopped(count):
    """Forks processes that offer their stacks, as loader processes do, and stops them."""
    for _ in range(count):
        if (child := os.fork()) == 0:
            offer_stack()
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
        os.waitpid(child, os.WUNTRACED)


def never_answer(folder):
    """From now on, calls that use files below this folder never return."""
    stat = os.stat

    def wait(path):
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(str(folder)):
            threading.Event().wait()

    def waiting_stat(path, *args, **more):
        wait(path)
        return stat(path, *args, **more)

    os.stat = waiting_stat
    sys.addaudithook(lambda event, args: wait(args[0]) if args else None)


def evaluate(ranks, stop, run):
    """Writes how many micro-batches this rank had evaluated when the ranks agreed to stop."""
    seen = 0

    def batches():
        nonlocal seen
        while True:
            seen += 1
            (run.path / f"evaluating_{ranks.rank}").touch()
            time.sleep(0.01 * (1 + ranks.rank))
            yield Collated(MicroBatch({}), tokens=1, loss_tokens=1)

    evaluator = Evaluator(
        {}, data=Data(train=("x",)), micro_batch_size=1, max_batches=None, ranks=ranks
    )
    objective = SimpleNamespace(evaluate=lambda model, tensors, count: (torch.ones(()), None))
    evaluator._loaders = {"endless": (SimpleNamespace(objective=objective), batches())}
    model = torch.nn.Linear(1, 1)
    wrapped = OneRank(
        model, [], param_dtype=torch.float32, ranks=ranks, init_fn=lambda *arguments: None
    )
    assert evaluator.evaluate(wrapped, stop_requested=stop.requested) == {}
    assert model.training
    (run.path / f"evaluated_{ranks.rank}").write_text(str(seen))


def main():
    run_dir, hang_timeout, fault = sys.argv[1:]
    environment, progress = read_environment(), Progress()
    run = RunFolder(Path(run_dir))
    if environment.main:
        run.take(environment)
        run.create("")
        run.note_found()  # as `note_start`: "running" does not replace the end of this start
        run.note("started", ranks=environment.world_size)
        run.write_status("running", step=0)
    group = process_group.process_group(environment, device="cpu", init_timeout=60)
    with (
        StopRequest() as stop,
        group as (ranks, store),
        rank_log(run.log, ranks.rank) as console,
        FailureWatch(
            store,
            environment=environment,
            run=run,
            console=console,
            progress=progress,
            post_mortem=None,
        ) as failures,
        Watch(
            failures, stop=stop, hang_timeout=float(hang_timeout), timeout=600, init_timeout=600
        ) as watch,
    ):
        if fault == "early":
            if ranks.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            spin()
        if fault == "prepare" and ranks.rank == 1:
            dist.barrier()
        if fault == "prepare":
            (run.path / f"ready_{ranks.rank}").touch()
            spin()
        progress.preparing = False
        if fault == "evaluate":
            evaluate(ranks, stop, run)
            stop.signal = None
        known = run.path / f"knows_neighbours_{environment.restart_count + 1}_{ranks.rank}"
        step = 0
        asked = torch.zeros(1)
        while not asked:
            step += 1
            if step % 20 == 0 and failures.neighbours.known:
                known.touch()
            progress.heartbeat("forward")
            if fault == "loop" and environment.restart_count == 0 and ranks.rank == 1 and step == 5:
                spin()
            if step == 5 and fault == "loaders" and ranks.rank == 0:
                fork_stopped(8)
                spin()
            if step == 5 and fault == "files":
                file_calls.FILE_SECONDS = 2.0
                never_answer(run.path)
                if ranks.rank == 1:
                    (run.path / "text.jsonl").read_text()
            if step == 5 and fault == "raise":
                file_calls.FILE_SECONDS = 2.0
                never_answer(run.path)
                if ranks.rank == 1:
                    raise ValueError("a fault of this test")
            if step == 5 and fault == "first" and ranks.rank == environment.local_world_size:
                time.sleep(1)
                os.kill(os.getpid(), signal.SIGKILL)
            if step == 5 and fault == "node":
                lost = ranks.rank >= environment.local_world_size
                if lost and environment.local_rank == 0:
                    (run.path / "lost").write_text(os.environ["SLURMD_NODENAME"])
                    time.sleep(1)  # all ranks are in this step by then
                    agent = os.getppid()
                    ranks_of_node = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
                    own = str(os.getpid())
                    others = [int(pid) for pid in ranks_of_node if pid != own]
                    for pid in (*others, agent, os.getpid()):
                        os.kill(pid, signal.SIGKILL)
                if not lost and environment.local_rank == 1:
                    time.sleep(4)
                    os.abort()
                spin()
            progress.heartbeat("backward")
            asked = torch.tensor([float(stop.requested())])
            dist.all_reduce(asked)
            progress.step_done(step)
            if step % 20 == 0 and environment.main:
                run.write_status("running", step=step)
                if watch.save_requested():
                    run.note("saved", step=step)
                    watch.save_done()
            time.sleep(0.02)
        if environment.main:
            run.write_status("stopped", step=step, reason=stop.signal)
            run.release()
    return 0


if __name__ == "__main__":
    end_process(main())
