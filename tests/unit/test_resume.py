"""What may change between a run and its resumption, and what its record keeps."""

import json
from pathlib import Path

import pytest
import yaml

from launcher.environment import Environment
from launcher.errors import RecipeError
from launcher.metrics.sinks import keep_until
from launcher.recipe.load import load_recipe, to_yaml
from launcher.resume import check_changes, check_stream, starts_anew
from launcher.run_folder import RunFolder


def recipe(*overrides):
    return yaml.safe_load(to_yaml(load_recipe(["recipe=fsdp", *overrides], ranks=None).recipe))


@pytest.mark.parametrize(
    "changes",
    [
        ["run.max_steps=5000"],
        ["strategy.kind=ddp", "batch.micro_batch_size=2"],
        ["logging.tensorboard=true", "logging.every_steps=5"],
        ["optimizer.learning_rate=1e-5", "schedule.kind=linear"],
        ["data.workers=0", "data.cache=elsewhere", "model.compile=true", "data.validation=null"],
        ["activation_checkpointing={mode: selective}", "strategy.cpu_offload={pin_memory: true}"],
    ],
)
def test_what_may_change(changes):
    told = check_changes(recipe(), recipe(*changes), allow=False, checkpoint=Path("c"))
    assert told
    assert all(" -> " in line for line in told)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("run.seed=7", "run.seed: 1234 -> 7"),
        ("batch.global_batch_size=32", "batch.global_batch_size: 64 -> 32"),
        ("data.sequence_length=128", "data.sequence_length: "),
        ("data.shuffle=false", "data.shuffle: true -> false"),
        ("model.config.hidden_size=64", "model.config.hidden_size: "),
        ("lora={rank: 4}", 'lora: null -> {"rank": 4'),
    ],
)
def test_what_alters_the_training_is_refused(change, line):
    with pytest.raises(RecipeError) as refused:
        check_changes(recipe(), recipe(change, "run.max_steps=7"), allow=False, checkpoint=Path("run/checkpoints/step_00000005"))
    first, *middle, last = refused.value.problems
    assert first.startswith("run/checkpoints/step_00000005 was written by a run with another recipe")
    assert len(middle) == 1
    assert middle[0].startswith(f"  {line}"), "and not the number of steps, which may change"
    assert "checkpoint.allow_changes=true" in last
    assert any(line in told for told in check_changes(recipe(), recipe(change), allow=True, checkpoint=Path("c")))


def test_nothing_changed():
    assert check_changes(recipe(), recipe("run.dir=elsewhere", "checkpoint.resume=never"), allow=False, checkpoint=Path("c")) == []


def test_the_record_ends_with_the_checkpoint(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 3, 4)]
    lines.insert(2, json.dumps({"step": 2, "eval_loss": 1.0}))
    metrics.write_text("\n".join(lines) + '\n{"step": 2, "lo')
    assert keep_until(metrics, 2) == 3
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [1, 2, 2]
    assert keep_until(metrics, 2) == 0
    assert keep_until(tmp_path / "none.jsonl", 2) == 0
    assert keep_until(metrics, 0) == 3
    assert metrics.read_text() == ""


def environment(**more):
    standard = {"rank": 0, "world_size": 2, "local_rank": 0, "local_world_size": 2, "torchrun": True, "restart_count": 0, "parent": 77}
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
def test_a_restart_goes_on_in_its_own_folder_alone(tmp_path, first, second, same):
    """A job that was refused is restarted by torchrun as well: the folder is still another's."""
    run = RunFolder(tmp_path)
    run.note_start(environment(**first))
    assert RunFolder(tmp_path).was_begun_by(environment(**second)) is same


def test_a_restart_that_was_refused_before_is_refused_again(tmp_path):
    loaded = load_recipe(["recipe=fsdp", f"run.dir={tmp_path}"], ranks=None)
    run = RunFolder(tmp_path)
    run.note_start(environment(parent=5))
    run.create("", anew=True)
    run.metrics.write_text('{"step": 1, "loss": 2.0}\n')
    again = RunFolder(tmp_path)
    with pytest.raises(RecipeError, match=r"holds a run already"):
        starts_anew(again, loaded.recipe, to_yaml(loaded.recipe), restarted=again.was_begun_by(environment(restart_count=1)))
    assert run.metrics.read_text()
    assert starts_anew(again, loaded.recipe, to_yaml(loaded.recipe), restarted=again.was_begun_by(environment(restart_count=1, parent=5)))


def test_a_stream_does_not_go_on_in_another_order_unless_it_may():
    saved = {"version": 2, "order": "a", "samples": 8, "places": [[0, 0, 0, 0]]}
    check_stream(saved, "a", allow=False, checkpoint=Path("c"))
    check_stream(None, None, allow=False, checkpoint=Path("c"))
    with pytest.raises(RecipeError, match=r"^c cannot be resumed with data\.streaming: the files, or what decides the order"):
        check_stream(saved, "b", allow=False, checkpoint=Path("c"))
    with pytest.raises(RecipeError, match=r"written by a version of the launcher whose streaming order was another.*allow_changes=true"):
        check_stream(None, "b", allow=False, checkpoint=Path("c"))
    check_stream(None, "b", allow=True, checkpoint=Path("c"))
