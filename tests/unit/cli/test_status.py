"""`launcher status` on run folders that the tests construct."""

import json
import os
import time

import pytest

from launcher.checkpoint.files import commit, scratch_folder
from launcher.cli import main, status, tables
from launcher.cli.rows import positions_of
from launcher.distributed.environment import Environment
from launcher.files import write_file
from launcher.reliability import json_files
from launcher.reliability.json_files import append_line
from launcher.reliability.lock import Ownership
from launcher.reliability.run_directory import RunFolder
from launcher.slurm.attempts import Attempts, measured_lead, submitted_jobs

SINGLE_PROCESS = Environment(
    rank=0, world_size=1, local_rank=0, local_world_size=1, torchrun=False, restart_count=0
)
NOW = 1_800_000_000.0


def metrics(run, steps, *, start):
    line = {"grad_norm": 1.0, "tokens_per_second": 5e4, "step_seconds": 2.0, "mfu": 0.4}
    for step in range(1, steps + 1):
        now = {"step": step, "loss": 3.0 - step / 100, "time": start + 2.0 * step}
        append_line(run.metrics, line | now)
        if step == steps - 1:
            append_line(run.metrics, {"step": step, "eval_loss": 2.75, "time": start})


def checkpoint(run, step):
    scratch = scratch_folder(run.path / "checkpoints", step)
    sizes = {"rank_00000.safetensors": 3 << 20, "index.json": 2, "state.json": 2}
    files = {name: write_file(scratch / name, b"x" * size) for name, size in sizes.items()}
    return commit(scratch, step=step, ranks=1, files=files)


def event(run, name, at, attempt, **more):
    line = {"event": name, "time": at, "host": "node1", "attempt": attempt, "ranks": 8}
    append_line(run.events, line | more)


@pytest.fixture
def run(tmp_path):
    """A run with three attempts.

    The first was killed after step 60, the second failed after step 80, and the third is at step
    100. The second resumed from the checkpoint of step 50 and the third from that of step 75.
    """
    run = RunFolder(tmp_path / "runs/one")
    run.create("")
    metrics(run, 100, start=NOW - 300)
    event(run, "started", NOW - 500, 1)
    event(run, "saved", NOW - 400, 1, step=50)
    event(run, "started", NOW - 350, 2, found="running", found_step=60, found_time=NOW - 360)
    event(run, "resumed", NOW - 349, 2, step=50)
    event(run, "failed", NOW - 290, 2, step=80, reason="hang")
    event(run, "started", NOW - 250, 3, found="failed", found_step=80, found_time=NOW - 290)
    event(run, "resumed", NOW - 249, 3, step=75)
    event(run, "copied", NOW - 120, 3, step=50, to="s3://bucket/runs/one")
    checkpoint(run, 50)
    checkpoint(run, 75)
    damaged = checkpoint(run, 90)
    (damaged / "commit.json").unlink()
    sizes = {"peak_memory_bytes": 70 << 30, "reserved_memory_bytes": 79 << 30}
    more = sizes | {"allocation_retries": 1234, "warning": "2 in a row: disk full"}
    run.write_status("running", step=98, steps=200, **more)
    return run


def test_time_spent_counts_repeated_steps_and_gaps(run):
    summary = status.summarize(run.path, NOW)
    summary.until = NOW
    expected = {"wall": 500, "counted": 200, "repeated_steps": 10 + 5, "repeated": 15 * 2.0}
    expected |= {"between": 10 + 40, "rest": 500 - 200 - 30 - 50}
    assert status.time_spent(summary) == pytest.approx(expected)
    assert [(a.resumed, a.reached, a.ended) for a in summary.attempts] == [
        (0, 60, "killed"),
        (50, 80, "failed (hang)"),
        (75, None, ""),
    ]


@pytest.mark.slow
def test_a_long_run_is_read_by_samples(run, tmp_path, monkeypatch):
    """201,000 lines took 8 CPU seconds and 720 MB; now 4 MiB are read, whatever the length. The
    page of a report has thousands of points, all evaluations and all skipped steps."""
    lines = []
    for step in range(1, 40_001):
        seconds = 2.0 if step <= 30_000 else 4.0
        line = {
            "step": step,
            "loss": 2.0,
            "step_seconds": seconds,
            "time": NOW,
            "padding": "x" * 400,
        }
        lines.append(json.dumps(line | ({"skipped": True} if step == 777 else {})))
        if step % 8000 == 0:
            lines.append(json.dumps({"step": step, "eval_loss": 2.0, "time": NOW}))
    run.metrics.write_text("\n".join(lines) + "\n")
    parsed, well_formed = [], json_files.well_formed
    monkeypatch.setattr(json_files, "well_formed", lambda v: parsed.append(v) or well_formed(v))
    summary = status.summarize(run.path, NOW)
    summary.attempts = summary.attempts[:1]
    assert status.time_spent(summary)["counted"] == pytest.approx(30_000 * 2 + 10_000 * 4, rel=0.01)
    assert len(parsed) < 20_000
    thinned = json_files.thinned_jsonl(run.metrics, most=1000, keep=(b'"eval_', b'"skipped": true'))
    assert 1000 <= len(thinned) < 1100
    assert sum("eval_loss" in line for line in thinned) == 5
    assert any(line["step"] == 777 for line in thinned)
    assert len(json_files.thinned_jsonl(run.metrics, most=10**6, keep=())) == len(lines)
    assert json_files.thinned_jsonl(tmp_path / "none", most=5, keep=()) == []


def test_restarts_are_told_from_resumes(tmp_path):
    """A resume follows a start that finished, or that was stopped and whose job did not go on."""
    run = RunFolder(tmp_path / "run")
    run.create("")
    job = {"job": "7", "job_restart_count": 0}
    for number, (ended, more) in enumerate(
        (
            ("finished", job),
            ("stopped", job | {"job": "8"}),
            ("stopped", job | {"job": "8", "job_restart_count": 1}),
            ("failed", job | {"job": "9"}),
            ("finished", {}),
            ("", {"run_id": "name"}),
        )
    ):
        event(run, "started", NOW - 900 + 100 * number, number + 1, **more)
        if ended:
            event(run, ended, NOW - 850 + 100 * number, number + 1, step=9)
    summary = status.summarize(run.path, NOW)
    restarts = [attempt.restart for attempt in summary.attempts]
    assert restarts == [False, False, True, False, True, False]
    rows = {name: text for name, text, _ in status.describe(summary, NOW)}
    assert (rows["restarts"], rows["resumes"]) == ("2", "3")
    summary.until = NOW
    spent = status.time_spent(summary)  # without the time before a resume
    assert [spent["wall"], spent["between"]] == pytest.approx([900 - 3 * 50, 100])


def test_status_of_one_run(run, capsys, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: NOW)
    owner, page = Ownership.take(run.path, SINGLE_PROCESS), run.path / "page.html"
    try:
        assert main.main(["status", str(run.path)]) == 0
        printed = capsys.readouterr().out
        assert main.main(["report", str(run.path), f"out={page}"]) == 0
    finally:
        owner.release()
    assert ">started</td>" in page.read_text()
    assert ">ended</td>" not in page.read_text()  # it runs
    for text in (
        *("state running", "100 of 200 (50.0%), about 3 min 20 s left"),
        *("loss 2.7500 after step 99", "2.0000, grad norm 1.000"),
        *("50,000 tokens/s, 2 s a step, MFU 40.0%", "checkpoint step 75, ", "3.0 MiB; 2 are kept"),
        "memory 70.0 GiB of tensors at the peak, 79.0 GiB reserved, 1,234 retried allocations",
        *("damaged: step_00000090: ", "warning 2 in a row: disk full"),
        "copy step 50, 2 min 00 s ago, in s3://bucket/runs/one",
        *(f"process {os.getpid()} on ", ": alive", "about 30 s in 15 steps trained again"),
        *("50 s without a running process", "restarts 2", "failed (hang)", "killed"),
    ):
        assert text in " ".join(printed.split()), printed
    assert "\x1b" not in printed
    assert all(line == line.rstrip() for line in printed.splitlines())


def test_status_of_a_dead_and_a_failed_run(run, capsys, monkeypatch):
    assert main.main(["status", str(run.path)]) == 0
    assert "died: its process ended without a message" in capsys.readouterr().out
    run.write_status("failed", step=98, reason="hang", error="rank [1] of 2 is behind\nsecond line")
    monkeypatch.chdir(run.path.parent)
    run.path.rename("lr=0.1")  # the name of a run of a sweep
    assert main.main(["status", "lr=0.1"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("lr=0.1\n")
    assert "failed: hang" in printed
    assert "rank [1] of 2 is behind\nsecond line" in printed
    assert ["owner", "none"] in [line.split() for line in printed.splitlines()]


def test_status_of_a_folder_of_runs(run, capsys):
    fresh = RunFolder(run.path.parent / "two")
    owner = Ownership.take(fresh.path, SINGLE_PROCESS)
    done = RunFolder(run.path.parent / "three")
    done.create("")
    done.write_status("finished", step=7, steps=7)
    (run.path.parent / "no_run").mkdir()
    assert main.main(["status", str(run.path.parent)]) == 0
    owner.release()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines] == [
        ["run", "state"],
        ["one", "died"],
        ["three", "finished"],
        ["two", "starting"],
    ]
    assert lines[1][2:8] == ["100", "of", "200", "2.0000", "2.7500", "50,000"]
    done.path.rename(run.path.parent / "th\nree")
    assert main.main(["status", str(run.path.parent)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(lines)


@pytest.mark.parametrize("command", ["status", "report"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no such folder: nowhere (looked for in "),
        (["."], ".: neither the folder of a run nor one that holds runs"),
        ([], "missing; give RUN_DIR"),
    ],
)
def test_folder_without_runs_is_refused(command, arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main.main([command, *arguments]) == 2
    assert message in capsys.readouterr().err


ODD = ("[]", "null", "3", '"text"', "{}", '{"step": "x"', '{"event": "saved"}', '{"attempt": []}')
ODD_KEYS = {
    "state": [], "step": "x", "steps": [], "time": "now", "reason": 3, "error": {}, "loss": "low",
    "warning": 4, "event": "resumed", "attempt": None, "host": 3, "tokens_per_second": "fast",
    "step_seconds": [], "eval_loss": {}, "found_time": -1, "shares": 2, "overrides": [1],
}  # fmt: skip


@pytest.mark.parametrize("text", [*ODD, json.dumps(ODD_KEYS), "[" * 20_000, "\xff"])
def test_files_of_another_shape_give_no_traceback(run, text, tmp_path):
    """Something else has written to the files: a start, status and report use what is well formed."""
    run.write_status("stopped", step=7)
    expected = describe_all(run)
    with run.events.open("a") as events, run.metrics.open("a") as lines:
        events.write(text + "\n")
        lines.write(text + "\n")
    assert [row for row in describe_all(run) if row[0] == "step"] == [
        row for row in expected if row[0] == "step"
    ]
    (run.path / "status.json").write_text(text)
    assert main.main(["status", str(run.path)]) == 0
    assert main.main(["report", str(run.path), f"out={tmp_path}/page.html"]) == 0
    assert run.read_status().get("step") is None
    run.note_start(SINGLE_PROCESS)
    assert run.read_events()[-1]["attempt"] == 4
    assert not run.was_begun_by(SINGLE_PROCESS)
    assert measured_lead(run.path) in (None, 60)
    (run.path / "slurm").mkdir()
    for name in ("attempts.json", "submissions.jsonl"):
        (run.path / "slurm" / name).write_text(text + "\n")
    assert submitted_jobs(run.path) == []
    assert Attempts.read(run.path, "7", max_failures=3).job == "7"
    found = positions_of(run.read_events(), 3, run=run.path, global_batch_size=8)
    assert found == (range(16, 24), 0)


def test_texts_in_files_have_no_effect_on_the_terminal(run, capsys):
    """Neither as markup of rich, which may be a part of a folder's name, nor as control codes."""
    event(run, "failed", NOW, 3, step=90, reason="the file runs/[a]/[/b]\x1b[2J")
    run.write_status("failed", step=90, reason="[/red]\x1b[31m", error="one\n\x1b]0;two\x07[/x]")
    for folder in (run.path, run.path.parent):
        assert main.main(["status", str(folder)]) == 0
        printed = capsys.readouterr().out
        assert "\x1b" not in printed
        assert "[/red]\\x1b[31m" in printed
        if folder == run.path:
            assert "the file runs/[a]/[/b]" in printed
            assert "one\n\\x1b]0;two\\x07[/x]\n" in printed


def test_a_run_that_holds_runs_is_printed_with_them(run, capsys):
    """A sweep below the folder of an earlier run; only the earlier run was printed."""
    below = RunFolder(run.path / "seed=1")
    below.path.mkdir()
    below.write_status("finished", step=7, steps=7)
    assert main.main(["status", str(run.path)]) == 0
    printed = capsys.readouterr().out
    assert "attempt" in printed
    assert printed.splitlines()[-1].split()[:2] == ["seed=1", "finished"]


def test_pipes_and_huge_numbers_in_a_run_folder(run, capsys):
    for line in range(3):
        append_line(run.metrics, {"step": (1 << 50) * (line + 1), "step_seconds": 9e299})
    assert main.main(["status", str(run.path)]) == 0
    assert "an unknown time" in capsys.readouterr().out
    for file in (run.path / "status.json", run.metrics, run.events):
        file.unlink(missing_ok=True)
        os.mkfifo(file)
    assert main.main(["status", str(run.path)]) == 0, "a pipe without a writer would block"
    marker = run.path / "checkpoints/step_00000075/commit.json"
    marker.unlink()
    os.mkfifo(marker)
    assert main.main(["status", str(run.path)]) == 0
    assert "step_00000075: commit.json is not a regular file" in capsys.readouterr().out


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_not_damaged(run, monkeypatch):
    expected, listed = describe_all(run), status.list_checkpoints
    gone = run.path / "checkpoints/step_00000099"
    monkeypatch.setattr(status, "list_checkpoints", lambda folder: [*listed(folder), gone])
    assert describe_all(run) == expected


def test_a_remote_owner_is_not_judged_by_the_clock_of_this_machine(run, capsys):
    """The clock of a file server may be hours ahead: a dead owner was called alive until then."""
    taken = Ownership.take(run.path, SINGLE_PROCESS)
    record = run.path / "owner" / taken.name
    values = json.loads(record.read_text()) | {"machine": "another", "host": "node7"}
    record.write_text(json.dumps(values))
    os.utime(record, (4e9, 4e9))
    assert main.main(["status", str(run.path)]) == 0
    printed = capsys.readouterr().out
    assert "on another machine, its last heartbeat at 2096-" in printed
    assert "alive" not in printed
    taken.release()


def test_folder_that_cannot_be_listed_is_refused(run, capsys, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.iterdir", refuse)
    assert main.main(["status", str(run.path.parent)]) == 2
    assert "runs cannot be read: Permission denied" in capsys.readouterr().err


def describe_all(run):
    return list(status.describe(status.summarize(run.path, NOW), NOW))


def test_table_fits_a_narrow_terminal(monkeypatch):
    """Columns that matter less are left out, instead of shortening all; empty ones always."""
    columns = ("run", "state", ">loss", ">restarts", "reason", ">evaluation")
    rows = [("learning_rate=1e-4", "finished", "5.5", "0", "", "")]
    for width, kept in ((80, 4), (36, 3), (10, 2)):
        monkeypatch.setattr("rich.console.Console.is_terminal", True)
        monkeypatch.setenv("COLUMNS", str(width))
        table = tables.fitting_table(columns, rows, ("restarts", "loss"))
        assert [column.header for column in table.columns] == [
            name.removeprefix(">") for name in columns[:kept]
        ]
