"""Runs whose checkpoints are copied to an object store, and which continue from there on another
machine."""

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.distributed.launching import run, torchrun, wait_until
from tests.object_store import BUCKET, Answer
from tests.run_files import read_lines, status, write_lines

pytestmark = pytest.mark.long
TRAIN = Path(__file__).with_name("kill_train.py")
RECIPE = f"""\
run: {{name: copied, max_steps: 12, dir: run, seed: 3}}
model:
  config: {{model_type: llama, vocab_size: 260, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2,
            num_attention_heads: 2, num_key_value_heads: 2}}
  compile: false
data: {{train: rows.jsonl, validation: rows.jsonl, kind: text, tokenizer: bytes, sequence_length: 32, workers: 0}}
batch: {{global_batch_size: 4, micro_batch_size: 2}}
strategy: {{mixed_precision: null}}
schedule: {{kind: constant, warmup_steps: 0}}
evaluation: {{every_steps: 3}}
checkpoint: {{every_steps: 3, copy_to: "s3://{BUCKET}/runs/copied", keep_last: 2, export: at_end}}
"""


@pytest.fixture
def folder(tmp_path, server):
    """A folder with data and a recipe, and an empty store."""
    server.empty()
    return prepared(tmp_path)


def prepared(folder):
    write_lines(folder / "rows.jsonl", [{"text": f"row {n} of many " * 2} for n in range(40)])
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def copied(server):
    """The steps of checkpoints with a marker in the store."""
    listed = [key.split("/") for key in server.names("runs/copied/checkpoints/")]
    return sorted(int(parts[-2][5:]) for parts in listed if parts[-1] == "commit.json")


def train(folder, server, *overrides, ranks=2, restarts=0, variables=None, **options):
    command = [f"recipe={folder}/recipe.yaml", *overrides]
    return torchrun(
        *([f"--max-restarts={restarts}"] if restarts else []),
        TRAIN,
        *command,
        ranks=ranks,
        cwd=folder,
        timeout=options.pop("timeout", 200),
        **options,
        **server.variables(),
        **(variables or {}),
    )


def losses(run):
    """The losses, each step once."""
    lines = [line for line in read_lines(run / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
    return {line["step"]: line["loss"] for line in lines}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, server):
    """The losses of a run that nothing interrupts."""
    folder = prepared(tmp_path_factory.mktemp("undisturbed"))
    train(folder, server, "checkpoint.copy_to=null").check()
    return losses(folder / "run")


EACH = {"COPY_EACH": "1"}
PATIENT = "run.hang_timeout=100000"


def held(folder):
    """Variables by which training waits after step 7, when checkpoints are copied, for a file."""
    return {"HOLD": f"7,{folder / 'go_on'}"}


def train_around(action, folder, server, **options):
    """Trains. When a checkpoint is copied, training waits for the end of `action()`, however long it
    takes."""

    def during(process):
        assert wait_until(lambda: copied(server), process=process)
        action()
        (folder / "go_on").touch()

    return train(folder, server, PATIENT, during=during, variables=held(folder), **options)


def test_a_killed_run_continues_on_another_machine(folder, server, undisturbed):
    """The disk is gone, and the number of ranks is another one."""

    def kill(process):
        assert wait_until(lambda: copied(server), process=process)
        process.kill()

    killed = train(folder, server, PATIENT, during=kill, variables=held(folder))
    assert killed.status != 0
    last = copied(server)[-1]
    assert last < 12
    shutil.rmtree(folder / "run")
    resumed = train(folder, server, ranks=1).check()
    assert f"of step {last} " in resumed.output
    assert "fetched" in resumed.output
    assert losses(folder / "run") == pytest.approx(undisturbed, abs=2e-6)
    assert copied(server)[-1] == 12
    assert len(copied(server)) == 2
    written = folder / "run" / "hf" / "model.safetensors"
    there = server.client.get_object(Bucket=BUCKET, Key="runs/copied/hf/model.safetensors")
    assert there["Body"].read() == written.read_bytes()
    for name in ("metrics.jsonl", "status.json"):
        there = server.client.get_object(Bucket=BUCKET, Key=f"runs/copied/{name}")["Body"].read()
        assert there == (folder / "run" / name).read_bytes(), name
    for file in folder.rglob("*"):
        if file.is_file():
            assert b"hidden-word" not in file.read_bytes(), file


def test_a_stopped_run_copies_its_last_checkpoint(folder, server, undisturbed):
    def slow(request):
        return Answer(seconds=0.4) if request.method == "PUT" else None

    server.fault = slow
    stopped = run(
        [
            sys.executable,
            "-m",
            "launcher",
            "train",
            f"recipe={folder}/recipe.yaml",
            "gpus=2",
            "run.device=cpu",
        ],
        cwd=folder,
        during=lambda process: stop_after_first_step(process, folder),
        **server.variables(),
        PYTHONPATH=str(TRAIN.parents[2]),
    )
    server.fault = None
    stopped.check(75)
    assert status(folder / "run")["state"] == "stopped"
    saved = status(folder / "run")["step"]
    assert copied(server)[-1] == saved
    shutil.rmtree(folder / "run")
    train(folder, server).check()
    assert losses(folder / "run") == undisturbed, "the same bits on as many ranks"


def stop_after_first_step(process, folder):
    assert wait_until(lambda: (folder / "run" / "checkpoints").is_dir(), process=process)
    assert wait_until(lambda: "step" in read(folder / "run" / "metrics.jsonl"), process=process)
    process.terminate()


def read(file):
    return file.read_text() if file.exists() else ""


def test_an_incomplete_copy_is_not_used(folder, server, undisturbed):
    """The run is killed while the files of its second checkpoint are on their way."""

    def fault(request):
        late = request.method == "PUT" and "step_00000006/commit" in request.path
        return Answer(seconds=30) if late else None

    def during(process):
        assert wait_until(
            lambda: any("step_00000006/rank_00001" in key for key in server.names()),
            process=process,
        )
        process.kill()

    server.fault = fault
    assert train(folder, server, during=during, variables=EACH).status != 0
    server.fault = None
    assert copied(server) == [3]
    shutil.rmtree(folder / "run")
    train(folder, server).check()
    assert losses(folder / "run") == undisturbed
    assert copied(server)[-1] == 12
    assert len(copied(server)) == 2


def test_a_damaged_checkpoint_is_fetched_from_its_copy(folder, server, undisturbed):
    train(folder, server, "run.max_steps=6", "checkpoint.export=null").check()
    newest = folder / "run" / "checkpoints" / "step_00000006"
    damaged = newest / "rank_00001.safetensors"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (newest / "rank_00000.safetensors").unlink()
    (newest / "state.json").unlink()
    resumed = train(folder, server).check()
    assert "resumed from" in resumed.output
    assert "step 6" in resumed.output
    assert losses(folder / "run") == undisturbed


def test_a_damaged_copy_is_passed_over(folder, server, undisturbed):
    """Nothing but the older of two copies is whole."""
    train(folder, server, "run.max_steps=6", "checkpoint.export=null", variables=EACH).check()
    assert copied(server) == [3, 6]
    shutil.rmtree(folder / "run")
    name = "runs/copied/checkpoints/step_00000006/rank_00001.safetensors"
    content = server.client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
    server.put(name, content[:-1] + bytes([content[-1] ^ 1]))
    resumed = train(folder, server).check()
    assert "rank_00001.safetensors is damaged" in resumed.output
    assert losses(folder / "run") == undisturbed


def test_faults_delay_copies_and_end_no_run(folder, server, undisturbed):
    """Answers that are no, late, or cut in the middle."""
    count = [0]

    def every_third(request):
        count[0] += 1
        if count[0] % 3 == 0:
            return Answer(503, "SlowDown", "wait")
        return Answer(cut=10) if count[0] % 7 == 0 else None

    server.fault = every_third
    done = train(folder, server)
    server.fault = None
    done.check()
    assert losses(folder / "run") == undisturbed
    assert copied(server)[-1] == 12
    shutil.rmtree(folder / "run")
    server.fault = every_third
    train(folder, server, "run.max_steps=13").check()


def test_a_run_whose_copies_fail_says_so_and_is_copied_by_another_start(
    folder, server, undisturbed
):
    """Credentials expire: training continues, and the run fails at its end only."""

    def expired(request):
        if copied(server) and request.method == "PUT":
            return Answer(400, "ExpiredToken", "The provided token has expired.")
        return None

    server.fault = expired
    failed = train(folder, server, variables=EACH)
    server.fault = None
    assert failed.status == 1
    assert "could not be copied" in failed.output
    assert "have expired" in failed.output
    found = status(folder / "run")
    assert (found["state"], found["reason"], found["step"]) == ("failed", "copy_failed", 12)
    assert losses(folder / "run") == undisturbed
    train(folder, server).check()
    assert copied(server)[-1] == 12
    assert losses(folder / "run") == undisturbed


def test_an_earlier_start_elsewhere_is_ended(folder, server):
    """A machine that was believed lost still trains, with a disk of its own."""

    def start_elsewhere():
        train(folder, server, "run.dir=other", ranks=1).check()

    first = train_around(start_elsewhere, folder, server)
    assert first.status != 0
    assert "another start of this run" in first.output
    assert status(folder / "run")["reason"] == "superseded"
    assert copied(server)[-1] == 12


def test_a_refused_start_elsewhere_ends_no_run(folder, server):
    def start_elsewhere():
        other = train(folder, server, "run.dir=other", "run.seed=9", ranks=1)
        assert other.status != 0
        assert "run.seed: 3 -> 9" in other.output

    train_around(start_elsewhere, folder, server).check()


def test_a_restart_takes_no_copy_from_a_newer_start(folder, server):
    """Both could be restarted three times."""

    def start_elsewhere():
        train(folder, server, "run.dir=other", ranks=1, restarts=2).check()

    first = train_around(start_elsewhere, folder, server, restarts=2)
    assert first.status != 0
    assert status(folder / "other")["state"] == "finished"


@pytest.mark.parametrize("when", ["step", "last save"])
def test_a_copying_process_that_dies_is_replaced(folder, server, undisturbed, when):
    def kill():
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = file.read_bytes()
                own = str(folder).encode() in (file.parent / "environ").read_bytes()
                if b"launcher.checkpoint.copier" in words and own:
                    os.kill(int(file.parent.name), signal.SIGKILL)
                    return
        raise AssertionError("no process copies")

    def kill_in_last_save(process):
        last = "step_00000012.writing"
        assert wait_until(lambda: saving(folder, last), process=process)
        kill()

    if when == "step":
        done = train_around(kill, folder, server).check()
    else:
        slow = {"SLOW_SAVE": "3", "OWN": str(folder)}
        done = train(folder, server, during=kill_in_last_save, variables=slow).check()
    assert "the process that copies checkpoints ended with status -9" in done.output
    assert losses(folder / "run") == undisturbed
    assert copied(server)[-1] == 12


def saving(folder, name):
    return any(name in path.name for path in (folder / "run" / "checkpoints").glob("step_*"))


def test_checkpoints_that_were_deleted_here_are_fetched(folder, server, undisturbed):
    train(folder, server, "run.max_steps=6").check()
    shutil.rmtree(folder / "run" / "checkpoints")
    (folder / "run" / "copy.json").unlink()
    train(folder, server).check()
    assert losses(folder / "run") == undisturbed


def test_slow_copies_are_signs_of_life(folder, server):
    """One block of a file takes longer than the time without a sign of life."""
    slow = ["checkpoint.copy_bandwidth=10KB", "run.init_timeout=15", "run.max_steps=3"]
    train(folder, server, *slow, "checkpoint.export=null").check()
    assert copied(server) == [3]


def test_a_return_to_an_older_checkpoint_removes_newer_copies(folder, server):
    train(folder, server, "checkpoint.keep_last=5", variables=EACH).check()
    assert copied(server) == [3, 6, 9, 12]
    back = f"checkpoint.resume={folder}/run/checkpoints/step_00000006"
    train(folder, server, back, "run.max_steps=7", "checkpoint.keep_last=5").check()
    assert copied(server) == [3, 6, 7]


def test_the_best_checkpoint_is_fetched_for_the_export(folder, server):
    """It is older than those that are kept for a resume."""
    best = ["checkpoint.keep_best=eval_loss", "checkpoint.keep_last=1", "checkpoint.export=best"]
    write_lines(folder / "other.jsonl", [{"text": "QXZJ" * 20}] * 4)
    diverging = ["data.validation=other.jsonl", "optimizer.learning_rate=0.1"]
    train(folder, server, *best, *diverging, "run.max_steps=9", variables=EACH).check()
    evaluated = read_lines(folder / "run" / "metrics.jsonl")
    values = {line["step"]: line["eval_loss"] for line in evaluated if "eval_loss" in line}
    step = min(values, key=values.get)
    assert step < 9
    assert copied(server) == [step, 9]
    shutil.rmtree(folder / "run")
    exported = train(folder, server, *best, *diverging).check()
    assert f"those of step {step}, the best" in exported.output


def test_copies_in_a_folder_of_another_file_system(folder, server, undisturbed, tmp_path):
    """The folder of a file server works like a store."""
    away = [f"checkpoint.copy_to={tmp_path}/away/${{run.name}}", "checkpoint.copy_bandwidth=50MB"]
    train(folder, server, *away, "run.max_steps=6").check()
    shutil.rmtree(folder / "run")
    train(folder, server, *away).check()
    assert losses(folder / "run") == undisturbed
    steps = sorted(path.name for path in (tmp_path / "away" / "copied" / "checkpoints").iterdir())
    assert steps[-1] == "step_00000012"
    assert len(steps) == 2
