"""What the job's script asks at its beginning and at its end: may the run go on, and is the job requeued.

    python -m launcher.slurm.attempts begin ...   status 0: go on; prints in how many seconds to warn, where Slurm's warning is too late,
                                                  or `over` if there is nothing to resume
    python -m launcher.slurm.attempts signalled ...   after a SIGTERM: was the job cancelled, or did Slurm end it
    python -m launcher.slurm.attempts end ...     requeues the job where it should be; the exit status is the job's

RUN_DIR/slurm/attempts.json counts failures since the last new checkpoint. An attempt that was begun and never ended (its node was
lost, say) is counted by the next one. Runs on the job's first node; imports no torch.

A job that has ended by its time limit, or was killed, cannot requeue itself. Each job therefore has a successor in the queue: the
same script, which Slurm starts when the job has ended without success (--dependency=afternotok). It is removed when the run is
over, and one that is started all the same finds in attempts.json that there is nothing to do.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from launcher.checkpoint.files import list_checkpoints, step_of
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE, RecipeError
from launcher.reliability.lock import current_owner
from launcher.reliability.run_directory import RunFolder, read_lines
from launcher.slurm.submit import slurm_command

DEFAULT_LEAD = 300
"""Seconds to save in before a limit, where nothing is known of the run yet."""
SHORTEST_LEAD = 60
"""Slurm looks at limits twice a minute."""
_HOPELESS = ("recipe", "no_valid_checkpoint")
"""Reasons in status.json for which another attempt would end the same."""


@dataclass(frozen=True)
class Record:
    """attempts.json."""

    job: str
    failures: int
    """In a row, since the newest checkpoint was written."""
    checkpoint: int
    """Step of the newest one when the attempt began; 0: none."""
    found: dict[str, Any]
    """status.json when the attempt began."""
    open: bool
    """The attempt has not ended, as far as anybody knows."""
    left: bool = False
    """The job that made the attempt could not be requeued: its successor resumes the run."""
    successor: str | None = None
    """Job that Slurm starts where this one ends without success."""


@dataclass(frozen=True)
class Ended:
    """How an attempt ended."""

    state: str | None
    """As status.json says; None: this attempt has not come to write it."""
    reason: str | None
    warned: bool
    """Told by Slurm that a time limit or a preemption is near."""
    terminated: bool
    """By scancel, or `scontrol requeue`."""
    preempted: bool
    timed_out: bool
    """Ended by Slurm at the time limit."""
    refused: bool
    """The recipe, or the run's folder, is at fault."""
    bad_nodes: tuple[str, ...]
    new_checkpoint: bool
    failures: int
    """Before this attempt, in a row."""


@dataclass(frozen=True)
class Decision:
    """What follows from it."""

    action: Literal["end", "requeue"]
    status: int
    """Exit status of the job."""
    failures: int
    """In a row, with this attempt."""
    why: str


def decide(ended: Ended, *, max_failures: int) -> Decision:
    """Whether the job is requeued. Never: one that is finished, was cancelled, or whose recipe is at fault."""
    before = 0 if ended.new_checkpoint else ended.failures
    if ended.state == "finished":
        return Decision("end", EXIT_DONE, 0, "finished")
    if ended.refused or (ended.state == "failed" and ended.reason in _HOPELESS):
        return Decision("end", EXIT_USAGE, before, "refused: another attempt would be, too")
    saved = "and saved" if ended.state == "stopped" else "and could not save"
    if ended.preempted:  # whatever signal it was told by, and whoever got that
        return Decision("requeue", EXIT_DONE, before, f"preempted {saved}: goes on in another allocation")
    if ended.timed_out and ended.new_checkpoint:
        return Decision("requeue", EXIT_FAILED, before, f"ended by Slurm at the time limit {saved}: resumes from the last checkpoint")
    if ended.terminated and not ended.timed_out:
        return Decision("end", EXIT_STOPPED, before, f"terminated {saved}: not requeued")
    by_file = (ended.reason or "").startswith("the file ")  # RUN_DIR/stop was there before the warning
    if ended.state == "stopped" and (by_file or not ended.warned):
        return Decision("end", EXIT_STOPPED, before, f"stopped ({ended.reason}): not requeued")
    if ended.warned and ended.new_checkpoint:
        return Decision("requeue", EXIT_DONE, before, "warned by Slurm, and saved: goes on in another allocation")
    failures = before + 1
    if ended.bad_nodes:
        what = f"not fit to train: {', '.join(ended.bad_nodes)}"
    elif ended.timed_out:
        what = "ended by Slurm at the time limit before a checkpoint was written"
    elif ended.warned:
        what = "warned by Slurm before a checkpoint was written"
    else:
        what = f"failed ({ended.reason or 'before training began'})"
    count = f"{failures} in a row without a new checkpoint, of slurm.max_failures={max_failures}"
    if failures >= max_failures:
        return Decision("end", EXIT_FAILED, failures, f"{what}; {count}: not requeued")
    return Decision("requeue", EXIT_FAILED, failures, f"{what}; {count}: tried again")


def measured_lead(run_dir: Path) -> int | None:
    """Twice the slowest step and save of late, in seconds; None: nothing was measured yet."""
    run = RunFolder(run_dir)
    steps: list[float] = [line["step_seconds"] for line in _end_of(run.metrics) if "step_seconds" in line]
    saves: list[float] = [line["seconds"] for line in _end_of(run.events) if line.get("event") == "saved"]
    if not steps or not saves:
        return None
    return max(SHORTEST_LEAD, math.ceil(2 * (max(steps[-100:]) + max(saves[-10:]))))


def _end_of(file: Path) -> list[dict[str, Any]]:
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - (256 << 10)))
            return read_lines(stream.read().decode(errors="replace"))
    except OSError:
        return []


def newest_checkpoint(run_dir: Path) -> int:
    """Its step; 0: there is none."""
    return max(map(step_of, list_checkpoints(run_dir / "checkpoints")), default=0)


def _file(run_dir: Path) -> Path:
    return run_dir / "slurm" / "attempts.json"


def read_record(run_dir: Path, job: str) -> Record:
    """Of this job; another's failures do not count."""
    try:
        record = Record(**json.loads(_file(run_dir).read_text()))
    except (OSError, ValueError, TypeError):
        record = None
    return record if record is not None and record.job == job else Record(job, 0, newest_checkpoint(run_dir), {}, False)


def _write_record(run_dir: Path, record: Record) -> None:
    scratch = _file(run_dir).with_name(f".attempts.{os.getpid()}")
    scratch.write_text(json.dumps(asdict(record)) + "\n")
    scratch.replace(_file(run_dir))


def begin(run_dir: Path, job: str, *, lead: int, max_failures: int, end_time: float | None, now: float) -> tuple[bool, str]:
    """Notes that an attempt begins. Returns whether it may, and, where it needs longer to save than Slurm was told, in how many
    seconds to warn it and how long it has from then on (`415 700`; empty: Slurm warns it), or why not.

    end_time: of the allocation, in seconds since 1970.
    """
    before, checkpoint = read_record(run_dir, job), newest_checkpoint(run_dir)
    status = RunFolder(run_dir).read_status()
    failures = 0 if checkpoint > before.checkpoint else before.failures
    if before.open and (status == before.found or status.get("state") not in ("stopped", "finished")):
        failures += 1
    may = failures < max_failures
    _write_record(run_dir, Record(job, failures, checkpoint, status, may, successor=before.successor))
    if not may:
        why = f"failed {failures} times in a row without a new checkpoint (slurm.max_failures={max_failures}): not tried again"
        _give_up(run_dir, job, why)
        return False, why
    needed = measured_lead(run_dir)
    if needed is None or needed <= lead or end_time is None:
        return True, ""
    # Half of what is left at most: else a slow save would have each allocation stop as it begins, and nothing would be trained
    needed = min(needed, math.floor((end_time - now) / 2))
    if needed <= lead:
        return True, ""
    return True, f"{max(1, math.floor(end_time - now - needed))} {needed}"


def end(run_dir: Path, job: str, ended: Ended, *, max_failures: int) -> Decision:
    """Decides, counts, and says so in status.json where the run is given up, or its ranks were all killed."""
    decision = decide(ended, max_failures=max_failures)
    record, run = read_record(run_dir, job), RunFolder(run_dir)
    _write_record(run_dir, replace(record, failures=decision.failures, checkpoint=newest_checkpoint(run_dir), open=False))
    if decision.action == "end" and decision.status == EXIT_FAILED:
        _give_up(run_dir, job, decision.why)
    elif ended.state == "running":
        run.write_status("failed", step=run.read_status().get("step") or 0, reason="killed", error=decision.why)
    return decision


def nothing_left(run_dir: Path, job: str, before: str) -> str | None:
    """Why a successor, submitted by the job `before`, has nothing to do. None: it resumes the run."""
    record, known = read_record(run_dir, job), Job.read(before)
    if known is not None and known.state == "CANCELLED":
        return f"job {before} was cancelled"
    return None if record.open or record.left else f"job {before} has ended by itself"


def submit_successor(run_dir: Path, job: str, this: str, script: str, excluded: str) -> None:
    """Queues the successor, which resumes the run if this job ends without success. Does nothing if it is queued.

    this: the job that runs. script: its own, for sbatch. excluded: nodes that it must not get.
    """
    record = read_record(run_dir, job)
    if record.successor is not None and (known := Job.read(record.successor)) is not None and known.state == "PENDING":
        return
    task = [f"--array={this.partition('_')[2]}"] if "_" in this else []
    exclude = [f"--exclude={excluded}"] if excluded else []
    words = [f"--dependency=afternotok:{this}", "--kill-on-invalid-dep=yes", *task, *exclude, script, job, this]
    try:
        successor = slurm_command("sbatch", "--parsable", *words).strip().split(";")[0]
    except RecipeError as error:
        say(f"no successor is queued, should Slurm end this job before it can requeue itself: {error}")
        return
    _write_record(run_dir, replace(record, successor=successor))
    with (run_dir / "slurm" / "submissions.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"job": successor + "_" * bool(task) + this.partition("_")[2], "after": this, "time": time.time()}) + "\n")


def remove_successor(run_dir: Path, job: str) -> None:
    """Cancels the successor: the run is finished, given up or cancelled."""
    successor = read_record(run_dir, job).successor
    if successor is not None:
        try:
            slurm_command("scancel", successor)
        except RecipeError as error:
            say(f"job {successor}, which would resume the run, could not be removed; it will find nothing to do: {error}")


def _give_up(run_dir: Path, job: str, why: str) -> None:
    run = RunFolder(run_dir)
    status = run.read_status()
    if not foreign_owner(run_dir, job):
        last = f"\nthe last: {status['error']}" if status.get("error") else ""
        run.write_status("failed", step=status.get("step") or 0, reason="max_failures", error=why + last)


def foreign_owner(run_dir: Path, job: str) -> bool:
    """Whether another job works on the run."""
    owner = current_owner(run_dir)
    return owner is not None and owner[1] is not False and owner[0].job not in (None, job, os.environ.get("SLURM_JOB_ID"))


@dataclass(frozen=True)
class Job:
    """What Slurm says of a job."""

    state: str
    restarts: int
    preempted: bool
    end_time: float | None
    excluded: str
    timed_out: bool = False

    @classmethod
    def read(cls, job: str) -> Job | None:
        """None: Slurm does not answer, or does not know it any more."""
        said = scontrol("show", "job", "--oneliner", job)
        values = dict(re.findall(r"(\w+)=(\S*)", said)) if said is not None else {}
        if "JobState" not in values:
            return None

        def seconds(key: str) -> float | None:
            try:
                return datetime.fromisoformat(values.get(key, "")).timestamp()
            except ValueError:  # None, Unknown
                return None

        preempted, started = seconds("PreemptTime"), seconds("StartTime")
        excluded = values.get("ExcNodeList", "(null)")
        return cls(
            values["JobState"],
            int(values.get("Restarts", 0)),
            preempted is not None and preempted >= (started or 0.0),  # not in an earlier start
            seconds("EndTime"),
            "" if excluded == "(null)" else excluded,
            values["JobState"] == "TIMEOUT" or values.get("Reason") == "TimeLimit",
        )


def scontrol(*words: str) -> str | None:
    """What it prints; None: it failed, and said why."""
    for wait in (1, 3, 10, None):  # a controller that is restarted is back in a moment
        try:
            done = subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=60, check=False)
            if done.returncode == 0:
                return done.stdout
            what = done.stderr.strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            what = str(error)
        say(f"scontrol {' '.join(words)}: {what}")
        if wait is None or "nvalid" in what:
            break
        time.sleep(wait)
    return None


def say(text: str) -> None:
    """To the job's log."""
    print(f"{time.strftime('%F %T')} {text}", file=sys.stderr, flush=True)


def restart_count() -> int:
    """How often Slurm had requeued the job when this script began."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def carry_out(decision: Decision, this: str, bad_nodes: Sequence[str]) -> tuple[bool, int]:
    """Requeues the job that runs, where that is decided.

    Returns whether the run is left to the successor, and the exit status of the script.
    """
    mine = restart_count()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which a requeue sends
    known = Job.read(this)
    if decision.action == "end":
        return False, decision.status
    # A job that was cancelled, or whose place another start of it has taken, would rise again
    if known is None or known.state != "RUNNING" or known.restarts != mine:
        say(f"Slurm has ended this start of the job ({known.state if known else 'unknown'}): its successor resumes the run")
        return True, EXIT_FAILED
    if scontrol("requeue", this) is None:
        say("could not be requeued: the job's successor resumes the run")
        return True, EXIT_FAILED
    # Where none of several is fit the fault is hardly theirs. The job does not start before this script has ended
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES") or 0)
    if bad_nodes and (len(bad_nodes) < nodes or nodes == 1):
        excluded = ",".join(filter(None, [known.excluded, *bad_nodes]))
        scontrol("update", f"JobId={this}", f"ExcNodeList={excluded}")
    return False, EXIT_DONE


def was_cancelled(this: str) -> bool:
    """Whether it was scancel that sent this job a SIGTERM: not Slurm at the time limit, or to preempt or requeue it."""
    known = Job.read(this)
    return known is not None and known.state in ("CANCELLED", "COMPLETING") and not (known.timed_out or known.preempted)


def main(arguments: Sequence[str] | None = None) -> int:
    """`begin`, `signalled` or `end`."""
    parser = argparse.ArgumentParser(prog="python -m launcher.slurm.attempts")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("begin", "signalled", "end"):
        one = verbs.add_parser(verb)
        one.add_argument("--run-dir", type=Path, required=True)
        one.add_argument("--job", required=True, help="the first job of the chain of successors")
        one.add_argument("--this", required=True, help="the job that runs")
        if verb == "signalled":
            continue
        one.add_argument("--max-failures", type=int, required=True)
        if verb == "begin":
            one.add_argument("--lead", type=int, required=True)
            one.add_argument("--after", default="", help="the job that this one is the successor of")
            one.add_argument("--script", required=True)
        else:
            one.add_argument("--status", type=int, required=True)
            one.add_argument("--warned", type=int, required=True)
            one.add_argument("--terminated", type=int, required=True)
            one.add_argument("--refused", type=Path, required=True)
            one.add_argument("--bad-nodes", default="")
    options = parser.parse_args(arguments)
    if options.verb == "begin":
        return _begin(options)
    if options.verb == "end":
        return _end(options)
    if was_cancelled(options.this):  # at once: this script may be killed before the ranks have saved
        remove_successor(options.run_dir, options.job)
    return EXIT_DONE


def _begin(options: argparse.Namespace) -> int:
    run_dir, job = options.run_dir, options.job
    # A successor that was requeued is not asked again
    if options.after and restart_count() == 0 and (why := nothing_left(run_dir, job, options.after)) is not None:
        say(f"nothing to resume: {why}")
        print("over")
        return EXIT_DONE
    known = Job.read(options.this)
    end_time = known.end_time if known is not None else None
    may, text = begin(run_dir, job, lead=options.lead, max_failures=options.max_failures, end_time=end_time, now=time.time())
    if not may:
        say(text)
        remove_successor(run_dir, job)
        return EXIT_FAILED
    submit_successor(run_dir, job, options.this, options.script, known.excluded if known is not None else "")
    print(text)
    return EXIT_DONE


def _end(options: argparse.Namespace) -> int:
    run_dir, job, known = options.run_dir, options.job, Job.read(options.this)
    if known is not None and known.restarts != restart_count():
        say("Slurm has requeued the job itself: this start of it ends")
        return EXIT_FAILED
    record, status = read_record(run_dir, job), RunFolder(run_dir).read_status()
    fresh = status if status != record.found else {}
    ended = Ended(
        state=fresh.get("state"),
        reason=fresh.get("reason"),
        warned=bool(options.warned),
        terminated=bool(options.terminated),
        preempted=known is not None and known.preempted,
        timed_out=known is not None and known.timed_out,
        refused=options.refused.exists(),
        bad_nodes=tuple(options.bad_nodes.split()),
        new_checkpoint=newest_checkpoint(run_dir) > record.checkpoint,
        failures=record.failures,
    )
    if foreign_owner(run_dir, job):
        say("the run's folder belongs to another job now: this one ends")
        remove_successor(run_dir, job)
        return EXIT_FAILED
    decision = end(run_dir, job, ended, max_failures=options.max_failures)
    say(f"{decision.why} (srun's exit status: {options.status})")
    if ended.refused:
        print(options.refused.read_text().strip(), file=sys.stderr, flush=True)
    if decision.action == "end":
        remove_successor(run_dir, job)
    left, exit_status = carry_out(decision, options.this, ended.bad_nodes)
    if left:
        _write_record(run_dir, replace(read_record(run_dir, job), left=True))
    return exit_status


if __name__ == "__main__":
    sys.exit(main())
