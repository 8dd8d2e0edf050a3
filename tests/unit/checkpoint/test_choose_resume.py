"""Resume: allowed and refused changes, choice of the checkpoint, truncation of the metrics."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from launcher.checkpoint.files import commit, scratch_folder
from launcher.checkpoint.resume import (
    Fresh,
    From,
    Latest,
    check_content,
    choose_resume,
    data_changes,
    decide,
    earlier_strategy,
    finished_run,
    recipe_changes,
    recorded_recipe,
)
from launcher.data.run_data import open_run_data
from launcher.data.token_store import ModelTraits
from launcher.distributed.environment import Environment
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError
from launcher.files import write_file
from launcher.metrics import sinks
from launcher.metrics.sinks import JsonLines
from launcher.objectives.next_token import NextToken
from launcher.recipe import schema
from launcher.recipe.load import load_recipe, to_yaml
from launcher.reliability.run_directory import RunFolder
from launcher.run.checkpoint_manager import CheckpointManager

CHECKPOINT_PATH = Path("run/checkpoints/step_00000005")


def recipe(*overrides):
    return yaml.safe_load(to_yaml(load_recipe(["recipe=fsdp", *overrides], ranks=None).recipe))


def changes(*overrides, altering=False):
    return recipe_changes(recipe(), recipe(*overrides), altering=altering)


def test_allowed_changes_are_listed():
    overrides = [
        *("run.max_steps=5000", "strategy.kind=ddp", "batch.micro_batch_size=2"),
        *("logging.tensorboard=true", "logging.every_steps=5", "optimizer.learning_rate=1e-5"),
        *("schedule.kind=linear", "data.workers=0", "data.cache=elsewhere", "model.compile=true"),
        "model.keep_logits=true",
        "model.mlp_tile=64",
        *("data.validation=null", "activation_checkpointing={mode: selective}"),
    ]
    shown = changes(*overrides)
    assert all(" -> " in line for line in shown)
    assert changes(*overrides, altering=True) == []
    sections = {line.split(".")[0].split(":")[0] for line in shown}
    assert sections >= {"run", "strategy", "batch", "logging", "optimizer", "schedule", "data"}
    assert changes("run.dir=elsewhere", "checkpoint.resume=never") == []


@pytest.mark.parametrize(
    ("had", "has", "message"),
    [
        ("null", "0.9", "added on a resume: {} has no averages of the weights; set it to null, or"),
        ("0.9", "null", "removed on a resume: {} has averages of the weights; set it to 0.9, or "),
        ("0.9", "0.99", None),
    ],
)
@pytest.mark.parametrize("allow", ["true", "false"])
def test_averages_cannot_be_added_or_removed(tmp_path, had, has, message, allow):
    path = checkpoint(tmp_path, 5, f"optimizer.ema={had}")
    words = ["recipe=fsdp", f"run.dir={tmp_path}", "run.max_steps=7", f"optimizer.ema={has}"]
    wanted = load_recipe([*words, f"checkpoint.allow_changes={allow}"], ranks=None).recipe
    if message is None:
        assert decide(wanted, RunFolder(tmp_path)).start == Latest()
        return
    with pytest.raises(RecipeError) as raised:
        decide(wanted, RunFolder(tmp_path))
    (line,) = raised.value.problems
    assert line.startswith(f"optimizer.ema: cannot be {message.format(path)}")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("run.seed=7", "run.seed: 1234 -> 7"),
        ("batch.global_batch_size=32", "batch.global_batch_size: 64 -> 32"),
        ("data.shuffle=false", "data.shuffle: true -> false"),
        ("model.config.hidden_size=64", "model.config.hidden_size: "),
        ("lora={rank: 4}", 'lora: null -> {"rank": 4'),
    ],
)
def test_changes_that_alter_the_training_are_refused(tmp_path, change, line):
    path, run = checkpoint(tmp_path, 5), RunFolder(tmp_path)
    overrides = ["recipe=fsdp", f"run.dir={tmp_path}", "run.max_steps=7", change]
    with pytest.raises(RecipeError) as raised:
        decide(load_recipe(overrides, ranks=None).recipe, run)
    first, *middle, last = raised.value.problems
    assert first.startswith(f"{path} is of another recipe")
    assert len(middle) == 1
    assert middle[0].startswith(f"  {line}"), "the number of steps may change and is not listed"
    assert "checkpoint.allow_changes=true" in last
    allowed = load_recipe([*overrides, "checkpoint.allow_changes=true"], ranks=None).recipe
    assert decide(allowed, run).start == Latest()
    assert any(line in shown for shown in changes(change))


def test_keys_that_an_earlier_version_did_not_know_are_no_changes():
    now = recipe("lora={rank: 4, alpha: 8}")
    before = {**now, "lora": {"rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": None}}
    before["data"] = {key: value for key, value in now["data"].items() if key != "loss_on"}
    assert recipe_changes(before, now) == []
    later = recipe("lora={rank: 4, alpha: 8}", "data.kind=chat", "data.loss_on=all")
    assert 'data.loss_on: "assistant" -> "all"' in recipe_changes(before, later, altering=True)
    changed = recipe_changes(before, recipe("lora={rank: 4, alpha: 8, dora: true}"), altering=True)
    assert changed == ["lora.dora: false -> true"]
    # That version had no adapters of experts
    none = recipe("lora={rank: 4, alpha: 8, target_parameters: []}")
    assert recipe_changes(before, none) == []
    some = recipe("lora={rank: 4, alpha: 8, target_parameters: [down_proj]}")
    assert recipe_changes(before, some) == ['lora.target_parameters: null -> ["down_proj"]']
    assert recipe_changes(now, none) == ["lora.target_parameters: null -> []"]


def test_an_older_checkpoint_of_another_recipe_is_refused(tmp_path, monkeypatch):
    """`decide` compares the newest checkpoint. If that is damaged, an older one is loaded."""
    path = checkpoint(tmp_path, 5)
    manager = CheckpointManager.__new__(CheckpointManager)
    monkeypatch.setattr(manager, "_find", lambda start, at_most: path)
    recipe = load_recipe(["recipe=fsdp", "run.seed=7"], ranks=None).recipe
    manager._training = SimpleNamespace(recipe=recipe)
    manager._settings = schema.Checkpoint()
    with pytest.raises(RecipeError, match=rf"^{path} is of another .*\n  run.seed: 1234 -> 7\n"):
        manager.restore(Latest())


# Changed data


ROW = '{"text": "x"}\n'


@pytest.fixture
def fingerprint(tmp_path):
    """A function that returns the data fingerprint of two files in their current state."""
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for number, file in enumerate(files):
        file.write_text("".join(json.dumps({"text": f"{row}{number}"}) + "\n" for row in range(4)))

    def found(*, streaming=False, train=(str(tmp_path / "?.jsonl"),)):
        data = schema.Data(
            train=train,
            tokenizer="bytes",
            sequence_length=8,
            cache=str(tmp_path / "cache"),
            streaming=streaming,
        )
        recipe = schema.Recipe(
            run=schema.Run(name="resumed", max_steps=2),
            model=schema.Model(config={}),
            data=data,
            batch=schema.Batch(global_batch_size=2, micro_batch_size=1),
        )
        opened = open_run_data(
            recipe.data,
            recipe.batch,
            recipe.run,
            objective=NextToken(),
            model=ModelTraits(vocabulary=260),
            build=True,
            ranks=RankLayout(rank=0, size=1, group=None, device=torch.device("cpu")),
        )
        return json.loads(json.dumps(opened.fingerprint))

    found.a, found.b = files  # type: ignore[attr-defined]
    return found


def check(before, now, *, allow=False):
    """before: of the data. now: the fingerprint."""
    state = {"data": before, "stream": None}
    content = {"settings": schema.Data(), "data": now, "weights": {}, "stream": None}
    return check_content(CHECKPOINT_PATH, state, **content, allow=allow)


def test_positions_of_versions_that_packed_pairs_before_training_are_refused():
    def check(kind, *, packing=True, allow=False, **recorded):
        settings = schema.Data(kind=kind, packing=packing)
        content = {"settings": settings, "data": {}, "weights": {}, "stream": None}
        state = {"data": {}, "stream": None, **recorded}
        return check_content(CHECKPOINT_PATH, state, **content, allow=allow)

    assert check("chat") == check("chat", batch_unit="sequences") == []
    assert check("preference", batch_unit="pairs") == check("preference", allow=True) == []
    assert check("unpaired", batch_unit="answers") == check("unpaired", packing=False) == []
    for kind, unit in (("preference", "pairs"), ("unpaired", "answers")):
        text = f"{CHECKPOINT_PATH} is of an earlier version, whose batches counted sequences with "
        text += (
            f"several {unit}, where they now count {unit}: its position would mean other samples"
        )
        with pytest.raises(RecipeError, match=text + ".*train into another run.dir"):
            check(kind)
    with pytest.raises(RecipeError, match="sequence_length was that of both answers"):
        check("preference", packing=False)


@pytest.mark.parametrize("streaming", [False, True])
def test_appended_rows_are_detected_and_the_file_is_named(fingerprint, streaming):
    before = fingerprint(streaming=streaming)
    same = fingerprint(streaming=streaming)
    assert check(before, same) == []
    fingerprint.b.write_text(fingerprint.b.read_text() + ROW)
    now = fingerprint(streaming=streaming)
    with pytest.raises(RecipeError) as raised:
        check(before, now)
    first, *lines, last = raised.value.problems
    assert first.startswith(f"{CHECKPOINT_PATH} is of other data")
    counts = [] if streaming else ["  documents: 8 -> 9", "  tokens: 24 -> 26"]
    assert lines == [f"  {fingerprint.b}: 60 -> 74", *counts]
    assert "checkpoint.allow_changes=true" in last
    assert len(check(before, now, allow=True)) == len(lines)


def test_edited_files_of_a_stream_are_noticed(fingerprint):
    """A stream has no digest of its tokens: the beginning, middle and end of files are compared."""
    before = fingerprint(streaming=True)
    text = fingerprint.b.read_text()
    fingerprint.b.write_text(text.replace("31", "51"))
    line = f"{fingerprint.a}, {fingerprint.b}: other content in as many bytes"
    assert list(data_changes(before, fingerprint(streaming=True))) == [line]
    del before["sample"]  # by an earlier version
    assert list(data_changes(before, fingerprint(streaming=True))) == []


def test_a_stream_whose_files_have_moved_is_the_same(fingerprint, tmp_path):
    before = fingerprint(streaming=True)
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in (fingerprint.a, fingerprint.b):
        file.rename(moved / file.name)
    now = fingerprint(streaming=True, train=(str(moved / "?.jsonl"),))
    assert list(data_changes(before, now)) == []
    (moved / "a.jsonl").rename(moved / "c.jsonl")  # another order, of other samples
    now = fingerprint(streaming=True, train=(str(moved / "?.jsonl"),))
    assert len(list(data_changes(before, now))) == 4


def test_a_stream_of_another_version_is_named():
    state = {"data": {}, "stream": {"order": "0123456789"}}
    with pytest.raises(RecipeError, match="another version of the launcher wrote it"):
        check_content(
            CHECKPOINT_PATH,
            state,
            settings=schema.Data(kind="text"),
            data={},
            weights={},
            stream="7-0123",
            allow=False,
        )


def test_added_removed_and_edited_files_are_named(fingerprint):
    """Without a digest of the content, only the file sizes are compared."""
    a, b, c = fingerprint.a, fingerprint.b, fingerprint.b.with_name("c.jsonl")
    before, text = fingerprint(), b.read_text()
    b.write_text(text + "\n\n")
    now = fingerprint()
    assert list(data_changes(before, now)) == [], "the content is the same"
    assert list(data_changes(before | {"content": None}, now)) == [f"{b}: 60 -> 62"]
    b.write_text(text)
    a.write_text(a.read_text().replace("30", "31"))
    edited = list(data_changes(before, fingerprint()))
    assert edited == [f"{a}, {b}: other content in as many bytes"]
    b.rename(c)
    assert list(data_changes(before, fingerprint())) == [f"{b}: 60 -> null", f"{c}: null -> 60"]


def test_changed_frozen_weights_are_refused_like_changed_data():
    def check(before, now, *, allow, key="model.path"):
        state = {"data": {}, "stream": None}
        state["weights" if key == "model.path" else "adapter"] = before
        content = {"settings": schema.Data(), "data": {}, "weights": {key: now}, "stream": None}
        return check_content(CHECKPOINT_PATH, state, **content, allow=allow)

    assert check("a", "a", allow=False) == check(None, "b", allow=False) == []
    with pytest.raises(RecipeError, match=r"was trained from another adapter:"):
        check("a", "b", allow=False, key="lora.path")
    with pytest.raises(RecipeError) as raised:
        check("a", "b", allow=False)
    first, line, last = raised.value.problems
    assert (
        first == f"{CHECKPOINT_PATH} was trained with other frozen weights, which it does not hold:"
    )
    assert line == '  model.path, digest of the weights: "a" -> "b"'
    assert last.startswith("restore the weights; ")
    assert "checkpoint.allow_changes=true" in last
    assert check("a", "b", allow=True) == [line.strip()]


def test_mixture_sources_are_compared_separately(fingerprint):
    files = {"one": fingerprint.a, "two": fingerprint.b}
    train = {name: schema.Source(files=(str(file),)) for name, file in files.items()}
    before = fingerprint(train=train)
    fingerprint.b.write_text(fingerprint.b.read_text() + ROW)
    assert next(data_changes(before, fingerprint(train=train))) == f"{fingerprint.b}: 60 -> 74"


def test_changes_of_streamed_data_are_detected():
    before = {"files": {"a": 1}, "tokenizer": "x", "chat_template": None}
    lines = list(data_changes(before, before | {"tokenizer": "y", "chat_template": "z"}))
    assert lines == ['tokenizer: "x" -> "y"', 'chat_template: null -> "z"']
    assert list(data_changes({"samples": 1000}, {"samples": 1100})) == ["samples: 1000 -> 1100"]
    saved = {"version": 2, "order": "a", "samples": 8, "places": [[0, 0, 0, 0]]}

    def check(saved, order, *, allow=False):
        state = {"data": {}, "stream": saved}
        content = {"settings": schema.Data(), "data": {}, "weights": {}, "stream": order}
        return check_content(CHECKPOINT_PATH, state, **content, allow=allow)

    assert check(saved, "a") == check(None, None) == []
    text = rf"^{CHECKPOINT_PATH} cannot be resumed with data\.streaming: the files, or .*allow_changes=true"
    with pytest.raises(RecipeError, match=text):
        check(saved, "b")
    check(None, "b", allow=True)


def test_metrics_after_the_checkpoint_are_removed(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 3, 4)]
    lines.insert(2, json.dumps({"step": 2, "eval_loss": 1.0}))
    lines.insert(1, "\0" * 40)  # a block that a power failure lost
    metrics.write_text("\n".join(lines) + '\n{"step": 2, "lo')
    sink = JsonLines(metrics)
    assert sink.go_back(2, exact=True) == 4
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [1, 2, 2]
    assert sink.go_back(2, exact=True) == 0
    assert sink.go_back(0, exact=True) == 3
    sink.close("finished")
    assert metrics.read_text() == ""


def test_only_the_end_of_a_long_metrics_file_is_read(tmp_path, monkeypatch):
    metrics, read, loads = tmp_path / "metrics.jsonl", [], json.loads
    lines = [json.dumps({"step": step}) + "\n" for step in range(1, 2001)]
    monkeypatch.setattr(sinks.json, "loads", lambda line: read.append(line) or loads(line))
    for tail in (1, 1 << 10, 1 << 20):
        monkeypatch.setattr(sinks, "_TAIL", tail)
        metrics.write_text("".join(lines))
        assert JsonLines(metrics).go_back(1990, exact=True) == 10
        assert metrics.read_text() == "".join(lines[:1990])
        assert (len(read) < 100) is (tail < 1 << 20)
        assert JsonLines(metrics).go_back(5, exact=True) == 1985
        assert metrics.read_text() == "".join(lines[:5])
        read.clear()


def environment(**more):
    standard = {"world_size": 2, "local_world_size": 2, "torchrun": True, "parent": 77}
    return Environment(**standard | more)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ({}, {"restart_count": 1}, True),
        ({}, {}, False),
        ({}, {"restart_count": 1, "parent": 78}, False),
        ({"run_id": "a", "parent": 5}, {"run_id": "a", "restart_count": 1}, True),
        ({"run_id": "none", "parent": 5}, {"run_id": "none", "restart_count": 1}, False),
        ({"job": "9", "parent": 5}, {"job": "9", "job_restart_count": 1}, True),
        ({"job": "8", "parent": 5}, {"job": "9", "job_restart_count": 1}, False),
    ],
)
def test_restart_is_recognized_only_in_its_own_folder(tmp_path, first, second, same):
    """torchrun also restarts a job that was refused. Such a job does not own the folder."""
    run = RunFolder(tmp_path)
    run.note_start(environment(**first))
    assert RunFolder(tmp_path).was_begun_by(environment(**second)) is same


def choose(folder, resume="auto", *, restarted=False):
    words = ["recipe=fsdp", f"run.dir={folder}", f"checkpoint.resume={resume}"]
    recipe = load_recipe(words, ranks=None).recipe
    return choose_resume(recipe, RunFolder(folder), restarted=restarted)


def test_the_day_of_the_first_start_is_that_of_the_last_start_from_scratch(tmp_path):
    day = 24 * 60 * 60
    for days, from_scratch in ((1, True), (2, False), (4, True), (9, False)):
        line = {"event": "started", "time": days * day, "from_scratch": from_scratch}
        line |= {"host": "a", "attempt": days}
        with (tmp_path / "events.jsonl").open("a") as events:
            events.write(json.dumps(line) + "\n")
    assert RunFolder(tmp_path).first_day() == "1970-01-05"


def test_folder_without_checkpoint_is_refused_unless_restarted(tmp_path):
    run = RunFolder(tmp_path)
    assert choose(tmp_path) == Fresh(), "the folder is empty"
    run.metrics.write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(RecipeError, match=r"holds a run already, and there is no checkpoint"):
        choose(tmp_path)
    assert run.metrics.read_text()
    assert choose(tmp_path, restarted=True) == Fresh()


SAVED = {
    "a checkpoint": lambda run: checkpoint(run.path, 4),
    "a damaged checkpoint": lambda run: (run.path / "checkpoints/step_00000004").mkdir(
        parents=True
    ),
    "a checkpoint that was deleted": lambda run: run.note("saved", step=4),
    "a resume": lambda run: run.note("resumed", step=4),
    "an export": lambda run: run.export.mkdir(),
    "the end": lambda run: run.write_status("finished", step=9),
    "another recipe": lambda run: (run.path / "recipe.yaml").write_text(
        (run.path / "recipe.yaml").read_text().replace("seed: 1234", "seed: 7")
    ),
    "no recipe": lambda run: (run.path / "recipe.yaml").write_text("[]"),
    "no start": lambda run: run.events.unlink(),
}


@pytest.mark.parametrize("saved", [None, *SAVED])
def test_a_run_that_has_saved_nothing_starts_again(tmp_path, saved):
    """One that was killed before its first checkpoint was refused by the same command."""
    run = RunFolder(tmp_path)
    run.note_start(environment(), from_scratch=True)
    run.create(to_yaml(load_recipe(["recipe=fsdp", f"run.dir={tmp_path}"], ranks=None).recipe))
    run.metrics.write_text('{"step": 1, "loss": 2.0}\n')
    run.write_status("running", step=1)
    (tmp_path / "checkpoints/step_00000004.writing-12ab").mkdir(parents=True)
    if saved is None:
        assert choose(tmp_path) == Fresh()
        with pytest.raises(RecipeError, match="holds a run already"):
            choose(tmp_path, "never")
        return
    SAVED[saved](run)
    if saved == "a checkpoint":
        assert choose(tmp_path) == Latest()
        return
    if saved == "a damaged checkpoint":
        assert choose(tmp_path) == Latest(), "the resume reports it"
        return
    with pytest.raises(RecipeError, match="holds a run already"):
        choose(tmp_path)


@pytest.mark.parametrize("name", ["recipe.yaml", "samples.jsonl", "hf"])
def test_files_that_no_run_wrote_are_not_replaced(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(RecipeError, match=rf"holds {name}, not from a run.*; give another folder"):
        choose(tmp_path)
    RunFolder(tmp_path).note_start(environment())
    assert choose(tmp_path) == Fresh(), "a start that was killed before its first step wrote it"


def test_status_without_its_keys_gives_no_traceback(tmp_path):
    (tmp_path / "status.json").write_text('{"other": 1}')
    RunFolder(tmp_path).metrics.write_text('{"step": 1}\n')
    with pytest.raises(RecipeError, match=r"holds a run already, and there is no checkpoint"):
        choose(tmp_path)


def checkpoint(folder, step, *overrides):
    path = folder / f"checkpoints/step_{step:08}"
    path.mkdir(parents=True)
    (path / "state.json").write_text(json.dumps({"recipe": yaml.safe_dump(recipe(*overrides))}))
    return path


def test_changes_are_those_since_the_newest_checkpoint_that_can_be_read(tmp_path):
    damaged = [checkpoint(tmp_path, step) for step in (4, 8)][1]
    (damaged / "state.json").write_text("{")
    assert choose(tmp_path) == Latest()
    run, other = RunFolder(tmp_path), RunFolder(tmp_path / "other")
    assert recorded_recipe(run, Latest()) == recipe()
    # That of checkpoint.resume, not the newest of the folder
    assert recorded_recipe(other, From(tmp_path / "checkpoints/step_00000004")) == recipe()
    assert recorded_recipe(other, Latest()) == recorded_recipe(run, Fresh()) == {}
    words = ["recipe=fsdp", f"run.dir={tmp_path}", "run.seed=7"]
    with pytest.raises(RecipeError, match="step_00000004 is of another recipe"):
        choose_resume(load_recipe(words, ranks=None).recipe, RunFolder(tmp_path))


def test_strategy_of_the_checkpoint_is_known_where_a_resume_can_be_exact(tmp_path):
    run = RunFolder(tmp_path)
    keys = [f"strategy.{name}" for name in ("sync_every_micro_batch", "reshard_after_forward")]

    latest = Latest()

    def earlier(*overrides, start=latest, ranks=2):
        written = load_recipe(["recipe=fsdp", *overrides], ranks=None).recipe
        return earlier_strategy(written, run, start, ranks=ranks, except_for=keys)

    assert earlier() is None, "there is no checkpoint"
    path = checkpoint(tmp_path, 4)
    assert earlier() is None, "of a version that did not record the number of ranks"
    state = {"recipe": yaml.safe_dump(recipe(f"{keys[0]}=false")), "ranks": 2}
    (path / "state.json").write_text(json.dumps(state))
    for start in (latest, From(path)):
        found = earlier("optimizer.learning_rate=1e-5", start=start)
        assert (found["sync_every_micro_batch"], found["reshard_after_forward"]) == (False, "auto")
    assert earlier(start=Fresh()) is None
    assert earlier(ranks=4) is None
    for change in ("batch.micro_batch_size=2", "strategy.kind=ddp", "activation_checkpointing={}"):
        assert earlier(change) is None


def test_own_checkpoint_is_preferred_to_the_resume_path(tmp_path):
    source, run = checkpoint(tmp_path / "source", 8), RunFolder(tmp_path / "run")
    assert choose(run.path, source) == From(source), "the folder is empty"
    run.path.mkdir()
    run.note("resumed", step=8, origin=str(source))
    run.metrics.write_text('{"step": 9, "loss": 2.0}\n')
    assert choose(run.path, source) == From(source), "the run has no checkpoint of its own yet"
    checkpoint(run.path, 16)
    assert choose(run.path, source) == Latest()
    assert choose(run.path) == Latest()
    assert choose(run.path, source, restarted=True) == Latest()
    shutil.rmtree(source)
    assert choose(run.path, source) == Latest(), "the resume path need not exist any more"


def test_resume_path_in_an_unrelated_run_folder_is_refused(tmp_path):
    source, run = checkpoint(tmp_path / "source", 8), RunFolder(tmp_path / "run")
    own = [checkpoint(run.path, step) for step in (4, 16)]
    text = r"holds a run already, and it was not started from .*source/.*=auto continues it\); give"
    with pytest.raises(RecipeError, match=text):
        choose(run.path, source)
    with pytest.raises(RecipeError, match=r"holds a run already, and checkpoint.resume is never"):
        choose(run.path, "never")
    run.note("resumed", step=4)
    assert choose(run.path, own[0]) == From(own[0]), "an explicit rewind to an own checkpoint"
    run.note("resumed", step=4, origin=str(own[0]))
    assert choose(run.path, own[0]) == Latest(), "a restart must not repeat the rewind"


@pytest.fixture
def finished(folder):
    """`recipe=x.yaml run.max_steps=8`, finished. The file has run.max_steps: 10."""
    run = RunFolder(folder / "run")
    arguments = ["recipe=x.yaml", "run.max_steps=8", f"run.dir={run.path}"]
    scratch = scratch_folder(run.path / "checkpoints", 8)
    text = to_yaml(load_recipe(arguments, ranks=1).recipe)
    state = json.dumps({"step": 8, "recipe": text}).encode()
    parts = {"state.json": state, "index.json": b"{}", "rank_00000.safetensors": b"x"}
    files = {name: write_file(scratch / name, content) for name, content in parts.items()}
    commit(scratch, step=8, ranks=1, files=files)
    run.note_start(environment(), arguments)
    run.write_status("finished", step=8, steps=8)
    return run, arguments


def test_overrides_that_no_longer_hold(finished):
    run, arguments = finished
    assert run.dropped_overrides(arguments) == []
    changed = ["recipe=y.yaml", arguments[2], "run.max_steps=9"]
    assert run.dropped_overrides(changed) == []
    assert run.dropped_overrides(["recipe=x.yaml"]) == arguments[1:]
    run.note_start(environment(), ["recipe=x.yaml", "checkpoint.resume=a", "run.seed=3"])
    assert run.dropped_overrides(["recipe=x.yaml"]) == ["run.seed=3"]


def test_finished_run_is_continued_only_with_more_steps(finished):
    run, (recipe, steps, folder) = finished
    for same in ([steps], [], ["run.max_steps=5"], [steps, "batch.micro_batch_size=4"]):
        text = finished_run([recipe, folder, *same])
        assert f"{run.path} is finished: 8 of 8 steps. Nothing was trained" in text
        assert "run.max_steps=N" in text
    assert finished_run([recipe, folder, "run.max_steps=9"]) is None
    assert finished_run([recipe, folder, steps, "checkpoint.resume=never"]) is None
    with pytest.raises(RecipeError, match=r"run.seed: 1234 -> 7"):
        finished_run([recipe, folder, steps, "run.seed=7"])
    run.write_status("finished", step=6, steps=8, reason="early_stopping")
    assert "6 of 8 steps, by evaluation.stop_after" in finished_run([recipe, folder, steps])
    run.write_status("stopped", step=8, steps=8)
    assert finished_run([recipe, folder, steps]) is None


def test_shorter_run_than_its_checkpoint_is_refused(finished):
    run, (recipe, _, folder) = finished
    run.write_status("stopped", step=8, steps=8)
    shorter = load_recipe([recipe, folder, "run.max_steps=5"], ranks=1).recipe
    text = r"run.max_steps: the run has 5 steps, but .*step_00000008 is of step 8 already"
    with pytest.raises(RecipeError, match=text):
        choose_resume(shorter, run)


def test_checkpoints_that_cannot_be_listed_are_reported(finished):
    run, arguments = finished
    shutil.rmtree(run.path / "checkpoints")
    (run.path / "checkpoints").symlink_to("checkpoints")
    text = "checkpoints cannot be read: Too many levels of symbolic"
    for choose_or_finish in (lambda: finished_run(arguments), lambda: choose(run.path)):
        with pytest.raises(RecipeError, match=text):
            choose_or_finish()
