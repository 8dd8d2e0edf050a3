"""Sizes that are chosen from the rows of the data."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from launcher.errors import RecipeError
from launcher.planner.auto import needing, resolve
from launcher.planner.facts import Facts, Rows
from launcher.planner.sizes import (
    check_repeats,
    choose_rate,
    choose_sizes,
    rows_here,
    run_length,
    sizes_text,
    why_no_row_fits,
)
from launcher.recipe.derived import open_sizes, with_recorded
from launcher.recipe.load import load_recipe
from launcher.recipe.section import AutoFloat
from launcher.recipe.yaml_text import to_yaml
from launcher.run.resolve import resolve_by_rows

CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "chat.jsonl").write_text(json.dumps(CHAT))
    return tmp_path


def loaded(*overrides, ranks=None):
    words = ["recipe=sft", "model.path=model", "data.train=chat.jsonl", *overrides]
    return load_recipe(words, ranks=ranks)


def rows_of(count, mean=60, longest=None):
    """Rows of `mean` tokens on average."""
    lengths = np.random.default_rng(1).integers(mean // 2, mean + mean // 2 + 1, count)
    lengths[0] = longest or lengths.max()
    return Rows(lengths)


def chosen(rows, *overrides, ranks=1):
    recipe = loaded(*overrides, ranks=ranks)
    return resolve(recipe.recipe, Facts(ranks=ranks, rows=rows), needing("recipe", "rows"))[0]


def summary(recipe):
    run, data = recipe.run, recipe.data
    return (
        recipe.batch.global_batch_size,
        data.packing,
        data.sequence_length,
        data.validation_split,
        run.epochs,
    )


def test_sizes_of_small_and_large_data(here):
    """Sixty rows were one step that saw each row eleven times."""
    assert summary(chosen(rows_of(60))) == (4, False, 128, 0.1, 5)
    assert summary(chosen(rows_of(600))) == (4, True, 256, 0.0833, 3)
    assert summary(chosen(rows_of(6000))) == (4, True, 512, 0.02, 2)
    many = chosen(rows_of(100_000, mean=400))
    assert many.run.epochs == 1
    assert many.data.packing
    assert many.data.validation_split == 0.02
    length = run_length(many, rows_of(100_000, mean=400))
    assert 20_000 < length.tokens < 65_536 * 1.05
    assert length.steps > 1000


@pytest.mark.parametrize("ranks", [1, 6, 8, 64])
@pytest.mark.parametrize("mean", [10, 60, 900, 3000])
@pytest.mark.parametrize("count", [100, 200, 600, 6000, 60_000])
@pytest.mark.parametrize("kind", ["chat", "text", "preference"])
def test_an_epoch_has_enough_steps_and_no_step_sees_a_row_twice(here, kind, count, mean, ranks):
    """Of each size, for any number of ranks."""
    rows = rows_of(count, mean)
    overrides = [] if kind == "chat" else [f"data.kind={kind}"]
    overrides += ["preference={}"] if kind == "preference" else []
    if kind == "text" and count * mean < 64 * ranks * 256:
        return  # refused: not a sequence for each rank
    recipe = chosen(rows, *overrides, ranks=ranks)
    assert open_sizes(recipe) == ["checkpoint.every_steps"]  # the machine may shorten it
    size, length = recipe.batch.global_batch_size, run_length(recipe, rows)
    assert size % ranks == 0
    assert size <= length.samples
    steps = length.steps / recipe.run.epochs
    assert steps >= min(8, length.samples // ranks * 0.7)
    assert length.tokens <= max(65_536 * 1.3, ranks * 4096)
    assert 1 <= recipe.schedule.warmup_steps <= max(1, length.steps // 10)
    assert recipe.evaluation.every_steps <= steps + 1


def test_rows_that_fill_a_sequence_each_are_not_packed(here):
    """They were called packed, and counted as sequences."""
    recipe = chosen(Rows(np.full(60, 50)))
    assert not recipe.data.packing
    assert recipe.data.sequence_length == 64


def test_the_rows_that_are_held_out_are_counted(here):
    hashes = np.linspace(0, 2**64 - 1, 61, dtype=np.float64)[:60].astype(np.uint64)
    rows = Rows(rows_of(60).lengths, hashes)
    recipe = chosen(rows)
    held = int((hashes < np.uint64(int(0.1 * 2.0**64))).sum())
    assert run_length(recipe, rows).samples == 60 - held
    assert recipe.evaluation.every_steps == -(-(60 - held) // 4)


def test_what_the_recipe_gives_is_obeyed(here):
    recipe = chosen(
        rows_of(60),
        *("batch.global_batch_size=2", "run.epochs=7", "optimizer.learning_rate=3e-4"),
        *("data.packing=true", "data.sequence_length=512", "schedule.warmup_ratio=0.5"),
        *("evaluation.every_epochs=0.5", "data.validation=chat.jsonl"),
    )
    assert summary(recipe) == (2, True, 512, None, 7)
    assert recipe.optimizer.learning_rate == 3e-4
    assert recipe.schedule.warmup_ratio == 0.5
    assert recipe.evaluation.every_epochs == 0.5
    assert chosen(rows_of(60), "run.max_steps=9").run.epochs is None


def test_the_learning_rate_follows_from_the_width_and_the_method(here):
    def rate(width, *overrides):
        (here / "model/config.json").write_text(json.dumps(CONFIG | {"hidden_size": width}))
        return chosen(rows_of(60), *overrides).optimizer.learning_rate

    lora = "lora={rank: 8, alpha: 16}"
    assert [rate(width) for width in (64, 576, 2048, 4096, 8192)] == [
        *(1e-4, 7.1e-5, 2e-5, 1e-5, 5e-6)
    ]
    assert [rate(width, lora) for width in (576, 4096, 8192)] == [5e-4, 2e-4, 1e-4]
    pairs = ("data.kind=preference", "preference={}")
    assert rate(4096, *pairs) == 1e-6


def test_few_rows_hold_none_out_and_fewer_rows_than_ranks_are_refused(here):
    assert chosen(rows_of(19)).data.validation_split is None
    with pytest.raises(RecipeError, match=r"3 of the rows are trained, by 8 data-parallel ranks"):
        chosen(rows_of(3), ranks=8)
    with pytest.raises(
        RecipeError, match=r"all 5 rows are longer than 16 tokens, the shortest has"
    ):
        chosen(rows_of(5), "data.sequence_length=16")


def test_the_length_follows_the_rows_up_to_the_positions_of_the_model(here):
    assert chosen(rows_of(60, longest=1000)).data.sequence_length == 1024
    assert chosen(rows_of(60, longest=9000)).data.sequence_length == 128  # it is dropped
    (here / "model/config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 500}))
    assert chosen(rows_of(60, longest=490)).data.sequence_length == 500
    assert chosen("no rows").data.sequence_length == 500


def test_without_rows_the_usual_sizes_count(here):
    recipe = loaded()
    assert open_sizes(recipe.recipe)
    assert to_yaml(recipe.recipe).count(": auto\n") >= 8
    facts = Facts(ranks=6, rows="why")
    usual, choices = choose_sizes(choose_rate(recipe.recipe, facts)[0], facts)
    assert summary(usual) == (36, True, 2048, 0.02, 2)
    assert sizes_text("why", [choices]).startswith("auto: the usual sizes: why\n")
    assert "not here" in rows_here(recipe.recipe)  # there is no tokenizer


def test_large_files_are_estimated_from_their_first_rows(here, monkeypatch):
    text = json.dumps(CHAT) + "\n"
    (here / "chat.jsonl").write_text(text * 5000)
    recipe = loaded("data.kind=text", "data.tokenizer=bytes", "data.text_column=messages").recipe
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, kind="text"))
    (here / "chat.jsonl").write_text('{"text": "abcdef"}\n' * 5000)
    recipe = loaded("data.kind=text", "data.tokenizer=bytes", "data.cache=cache").recipe
    assert rows_here(recipe).count == 5000
    monkeypatch.setattr("launcher.planner.sizes.COUNTED_BYTES", 1000)
    estimated = rows_here(recipe)
    assert estimated.scale > 2
    assert estimated.count == pytest.approx(5000, rel=0.02)


def test_a_resumed_run_keeps_its_sizes(here):
    earlier = chosen(rows_of(60))
    values = {
        name: dataclasses.asdict(getattr(earlier, name))
        for name in vars(earlier)
        if getattr(earlier, name)
    }
    resumed = with_recorded(loaded().recipe, values)
    assert open_sizes(resumed) in ([], ["checkpoint.every_steps"])
    assert summary(resumed) == summary(earlier)
    assert earlier.data.packing is False
    packed = with_recorded(loaded("data.packing=true").recipe, values)
    assert packed.data.packing  # the resume then refuses it


def test_only_where_the_batch_is_open_rows_may_be_unpacked(here):
    assert "data.packing" in open_sizes(loaded().recipe)
    assert "data.packing" in open_sizes(loaded("data.packing=auto").recipe)
    assert "data.packing" in open_sizes(loaded("batch.global_batch_size=8").recipe)
    sizes = ("batch.global_batch_size=8", "data.sequence_length=64")
    for given in (sizes, ("data.packing=true",)):
        assert "data.packing" not in open_sizes(loaded(*given).recipe)
    many = chosen(rows_of(60_000))
    assert many.data.packing is True


def test_the_rate_of_adapters_is_auto_where_none_is_given(folder):
    def rate(*overrides):
        words = ["recipe=x.yaml", *overrides]
        return load_recipe(words, ranks=1, files=False).recipe.optimizer.learning_rate

    assert type(rate()) is float
    assert type(rate("lora.rank=8")) is AutoFloat
    assert rate("lora.rank=8", "optimizer.learning_rate=1e-3") == 1e-3


def test_rows_that_are_all_longer_than_a_sequence(here):
    """The plan would else count one of them."""
    rows = Rows(np.array([70, 80]))
    why = why_no_row_fits(loaded("data.sequence_length=64").recipe, rows)
    assert why is not None
    assert why.startswith(
        "data: no row fits into 64 tokens (data.sequence_length); the shortest has 70;"
    )
    assert why_no_row_fits(loaded("data.sequence_length=70").recipe, rows) is None
    cut = loaded("data.sequence_length=64", "data.overlong=cut").recipe
    assert why_no_row_fits(cut, rows) is None


def test_a_step_that_sees_a_row_twice_is_refused(here):
    recipe = loaded("batch.global_batch_size=32").recipe
    with pytest.raises(
        RecipeError, match=r"32 sequences are more than the 2 of the data, so each "
    ):
        check_repeats(recipe, 2)
    check_repeats(recipe, 32)
    check_repeats(recipe, 0)
    check_repeats(loaded("batch.global_batch_size=32", "data.repeat_in_step=true").recipe, 2)


@pytest.mark.parametrize(("flags", "lower"), [("fpu avx2", False), ("fpu avx512_bf16", True)])
def test_a_cpu_without_bfloat16_computes_in_float32(here, monkeypatch, flags, lower):
    """A step took fifteen times as long on a CPU with AVX2 alone."""
    (here / "cpuinfo").write_text(f"processor : 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr("launcher.distributed.hardware._CPU", here / "cpuinfo")
    cpu = loaded("run.device=cpu")
    assert (cpu.recipe.strategy.mixed_precision is not None) is lower
    assert (("strategy", "mixed_precision") in cpu.origins.derived) is not lower
    assert loaded().recipe.strategy.mixed_precision is not None
    given = loaded("run.device=cpu", "strategy.mixed_precision={param_dtype: bfloat16}")
    assert given.recipe.strategy.mixed_precision is not None


def test_a_rate_alone_needs_no_rows(folder, monkeypatch):
    recipe = load_recipe(["recipe=x.yaml", "lora.rank=8"], ranks=1, files=False).recipe
    monkeypatch.setattr("launcher.run.resolve.count_rows", None)
    monkeypatch.setattr("launcher.run.resolve.from_rank_0", lambda value, group: value)
    monkeypatch.setattr("launcher.run.resolve.recorded_recipe", lambda run, start: {})
    monkeypatch.setattr("launcher.run.resolve._write", lambda recipe, ranks, run: None)
    ranks = SimpleNamespace(rank=0, size=1, group=None)
    sized = resolve_by_rows(recipe, start=None, ranks=ranks, run=None, build=True)
    assert not open_sizes(sized)
