"""Runs launcher/train.py with recording, delays and faults, for tests that kill or slow down a run.

Environment variables:

SAMPLES=FOLDER       Each rank appends the step and a digest of its input ids to
                     FOLDER/rank_N.jsonl.
SLOW_SAVE=SECONDS    Adds a delay before and after each file of a checkpoint is written.
KILL=RANK,CALL       This forward pass of this rank kills it (SIGKILL).
SLOW_STEP=SECONDS    Adds a delay to each step.
HOLD=STEP,FILE       After this step each rank waits until FILE exists.
COPY_EACH=1          Training waits until a checkpoint is copied. Otherwise a newer one replaces it
                     where steps are faster than copies.
SLOW_FORWARD=CALL,SECONDS,FILE
                     From this forward pass on, each rank creates FILE, and each pass has a delay.
FULL_DISK=STEP,STEP  Saves of these steps fail on rank 1: the disk is full.
FILL=FOLDER:FROM,TO,FROM,...
                     The file system of FOLDER is full from before step FROM until after step TO.
REMOVE=STEP,FILE     Rank 0 removes this file after this step.
NAN=CALL             The loss of this forward pass is NaN.
SLOW_PASS=FILE:CALL  The pass of a teacher or a reference saves each part. Before this part (from 0)
                     each rank creates FILE and waits until it is ended.
END_AT=answers|teacher|loss,CALL,SIGNAL
                     Rank 0 gets this signal, and waits to be ended, before it writes this part of the
                     answers of a round (from 1, over all rounds), or of a teacher's predictions, or
                     before this forward pass of distillation. The parts before are saved.
PHASES=FILE          Writes a line for each load of a checkpoint and each forward pass, with the
                     slow phase (`Progress.slow_phase`), which suspends hang detection.
SLOW_RANK=RANK,FIRST,LAST,SECONDS
                     The times of a step are read from a clock of the test, which advances by
                     SECONDS in each forward pass: three times as much on this rank in these steps.
                     A wait for other ranks ends at the same time on all ranks.
"""

import contextlib
import errno
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def record_samples(folder):
    from launcher.run import reporting

    original = reporting.Reporter.step
    file = Path(folder) / f"rank_{os.environ.get('RANK', '0')}.jsonl"

    def step(self, done):
        digest = hashlib.sha256()
        for micro_batch in done.batch.micro_batches:
            digest.update(micro_batch.inputs["input_ids"].numpy().tobytes())
        with file.open("a") as lines:
            lines.write(json.dumps({"step": done.number, "ids": digest.hexdigest()}) + "\n")
        original(self, done)

    reporting.Reporter.step = step


def save_slowly(seconds):
    from launcher.checkpoint import writer

    original = writer.write_chunks

    def write_chunks(*args, **more):
        time.sleep(seconds)
        result = original(*args, **more)
        time.sleep(seconds)
        return result

    writer.write_chunks = write_chunks


def fail_saves(steps):
    from launcher.checkpoint import writer

    original = writer.write_chunks

    def write_chunks(path, *args, **more):
        if (
            any(f"step_{step:08}" in str(path) for step in steps)
            and os.environ.get("RANK", "0") == "1"
        ):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(path, *args, **more)

    writer.write_chunks = write_chunks


def fill_disk(folder, steps):
    from launcher.run import reporting
    from tests.full_disk import fill

    original, free = reporting.Reporter.step, []

    def step(self, done):
        original(self, done)
        if done.number == steps[0]:
            steps.pop(0)
            steps.append(0)
            if free:
                free.pop()()
            else:
                free.append(fill(folder))

    if os.environ.get("RANK", "0") == "0":
        reporting.Reporter.step = step


def remove_file(at, file):
    from launcher.run import reporting

    original = reporting.Reporter.step

    def step(self, done):
        original(self, done)
        if done.number == at:
            os.unlink(file)

    if os.environ.get("RANK", "0") == "0":
        reporting.Reporter.step = step


def slow_steps(seconds):
    from launcher.run import reporting

    original = reporting.Reporter.step

    def step(self, done):
        time.sleep(seconds)
        original(self, done)

    reporting.Reporter.step = step


def hold(at, file):
    from launcher.run import reporting

    original = reporting.Reporter.step

    def step(self, done):
        original(self, done)
        while done.number == at and not Path(file).exists():
            time.sleep(0.05)

    reporting.Reporter.step = step


def copy_each():
    from launcher.checkpoint.copier import Copier

    copy, log, copied = Copier.copy, Copier._log, set()

    def copy_and_wait(self, step, best=()):
        copy(self, step, best)
        while step not in copied and self.trouble is None:
            time.sleep(0.02)
            self.report()

    def log_and_note(self, answer):
        log(self, answer)
        copied.add(answer.get("copied"))

    Copier.copy, Copier._log = copy_and_wait, log_and_note


def inject_nan_loss(at):
    from launcher.objectives.next_token import NextToken

    calls = [0]

    def patch(dataset):
        original = dataset.loss

        def loss(self, model, micro_batch):
            calls[0] += model.training
            return original(self, model, micro_batch) * (
                float("nan") if calls[0] == at and model.training else 1.0
            )

        dataset.loss = loss

    patch(NextToken)


def kill_in_forward(rank, at):
    from launcher.objectives.next_token import NextToken

    original, calls = NextToken.loss, [0]

    def loss(self, model, micro_batch):
        calls[0] += model.training
        if calls[0] == at and os.environ["RANK"] == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, model, micro_batch)

    NextToken.loss = loss


def delay_forward(first, seconds, file):
    from launcher.objectives.next_token import NextToken

    original, calls = NextToken.loss, [0]

    def loss(self, model, micro_batch):
        calls[0] += model.training
        if calls[0] >= first:
            Path(file).touch()
            time.sleep(seconds)
        return original(self, model, micro_batch)

    NextToken.loss = loss


def wait_in_pass(file, at):
    from launcher.objectives import kept_files, reference, teacher

    original = reference.rows_in_order

    def rows_in_order(*args, **more):
        for number, rows in enumerate(original(*args, **more)):
            if number == at:
                Path(file).touch()
                time.sleep(10**6)
            yield rows

    kept_files.SAVED_SECONDS = reference.SAVED_SECONDS = -1.0
    reference.rows_in_order = teacher.rows_in_order = rows_in_order


def end_at(what, at, number):
    from launcher.objectives import distillation, kept_files

    name, owner = {
        "answers": ("_encoded", kept_files.AnswersFile),
        "teacher": ("_encoded", kept_files.TeacherFile),
        "loss": ("loss", distillation.Distillation),
    }[what]
    original, calls = getattr(owner, name), [0]

    def ends(self, *args):
        calls[0] += 1
        if calls[0] == at and os.environ.get("RANK", "0") == "0":
            os.kill(os.getpid(), number)
            time.sleep(10**6)
        return original(self, *args)

    kept_files.SAVED_SECONDS = -1.0
    setattr(owner, name, ends)


def record_phases(file):
    from launcher.objectives.next_token import NextToken
    from launcher.run import checkpoint_manager as manager
    from launcher.run import run

    restore, loss, instances = manager.CheckpointManager.restore, NextToken.loss, []

    class RecordedProgress(run.Progress):
        def __init__(self):
            super().__init__()
            instances.append(self)

    def record(event):
        with open(file, "a") as lines:
            lines.write(f"{event} {instances[0].slow_phase}\n")

    def restore_and_record(self, *args, **more):
        record("load")
        return restore(self, *args, **more)

    def loss_and_record(self, model, micro_batch):
        record("forward")
        return loss(self, model, micro_batch)

    manager.CheckpointManager.restore = restore_and_record
    NextToken.loss = loss_and_record
    run.Progress = RecordedProgress  # type: ignore[misc]


def slow_forward(rank, first, last, seconds):
    import torch
    import torch.distributed as dist

    from launcher.metrics import slow_ranks
    from launcher.objectives.next_token import NextToken
    from launcher.run import recorder

    now, calls = torch.zeros(1, dtype=torch.float64), [0]
    clock = SimpleNamespace(
        perf_counter=now.item, monotonic=now.item, process_time=time.process_time, time=time.time
    )
    recorder.time = slow_ranks.time = clock
    original, waiting = NextToken.loss, recorder.StepRecorder.waiting

    def loss(self, model, micro_batch):
        calls[0] += model.training
        slow = first <= calls[0] <= last and os.environ["RANK"] == str(rank)
        now.add_(seconds * (1 + 2 * slow))
        return original(self, model, micro_batch)

    @contextlib.contextmanager
    def waiting_together(self, *what):
        with waiting(self, *what):
            yield
            dist.all_reduce(now, op=dist.ReduceOp.MAX)

    NextToken.loss, recorder.StepRecorder.waiting = loss, waiting_together


def start():
    """Trains, and applies the requested changes as soon as torch may be imported."""
    from launcher import train

    prepare = train.prepare_cuda

    def prepare_and_patch(**options):
        prepare(**options)
        if "SAMPLES" in os.environ:
            record_samples(os.environ["SAMPLES"])
        if "SLOW_SAVE" in os.environ:
            save_slowly(float(os.environ["SLOW_SAVE"]))
        if "SLOW_STEP" in os.environ:
            slow_steps(float(os.environ["SLOW_STEP"]))
        if "HOLD" in os.environ:
            at, _, file = os.environ["HOLD"].partition(",")
            hold(int(at), file)
        if "COPY_EACH" in os.environ:
            copy_each()
        if "SLOW_FORWARD" in os.environ:
            first, seconds, file = os.environ["SLOW_FORWARD"].split(",")
            delay_forward(int(first), float(seconds), file)
        if "SLOW_PASS" in os.environ:
            file, _, at = os.environ["SLOW_PASS"].rpartition(":")
            wait_in_pass(file, int(at))
        if "END_AT" in os.environ:
            what, at, number = os.environ["END_AT"].split(",")
            end_at(what, int(at), int(number))
        if "PHASES" in os.environ:
            record_phases(os.environ["PHASES"])
        if "SLOW_RANK" in os.environ:
            rank, first, last, seconds = os.environ["SLOW_RANK"].split(",")
            slow_forward(int(rank), int(first), int(last), float(seconds))
        if "KILL" in os.environ:
            rank, _, at = os.environ["KILL"].partition(",")
            kill_in_forward(rank, int(at))
        if "NAN" in os.environ:
            inject_nan_loss(int(os.environ["NAN"]))
        if "FILL" in os.environ:
            folder, _, steps = os.environ["FILL"].rpartition(":")
            fill_disk(Path(folder), [int(step) for step in steps.split(",")])
        if "REMOVE" in os.environ:
            at, _, file = os.environ["REMOVE"].partition(",")
            remove_file(int(at), file)
        if "FULL_DISK" in os.environ:
            fail_saves([int(step) for step in os.environ["FULL_DISK"].split(",")])

    train.prepare_cuda = prepare_and_patch
    status = train.main()
    from launcher.distributed.spawn import end_process

    end_process(status)


if __name__ == "__main__":
    start()
