"""`launcher new`: the recipe that it writes, and what it suggests where nothing fits."""

import dataclasses
import json
import re
import shlex

import pytest

from launcher.cli import new, plan
from launcher.cli.main import main
from launcher.console import bytes_as_text
from launcher.planner import search, sizes
from launcher.planner.machine import known_machine
from launcher.planner.plan import make_plan
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import CpuOffload
from launcher.recipe.yaml_text import overrides_between
from tests.unit.planner.example_plans import example_search

CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1 << 20,
}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.fixture(autouse=True)
def _activated(monkeypatch):
    """A shell finds the launcher by its name."""
    monkeypatch.setattr("launcher.cli.new.program", lambda: "launcher")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "chat.jsonl").write_text(json.dumps(CHAT))
    monkeypatch.setattr(sizes, "rows_here", lambda recipe: "there is no tokenizer")
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (tmp_path / "two words.jsonl").write_text(json.dumps(pair))
    return tmp_path


def written(capsys, *words, status=0):
    assert main(["new", "model=model", *words]) == status
    return capsys.readouterr()


def test_the_recipe_has_the_best_configuration(here, capsys, monkeypatch):
    """The search is a list of configurations by hand."""
    result = example_search()
    monkeypatch.setattr(search, "search_configurations", lambda *_, **__: result)
    text = written(capsys, "data=chat.jsonl", "gpu=h100", "gpus=2", "method=qlora").out
    (here / "my.yaml").write_text(text)
    assert main(["show", "recipe=my.yaml", "gpus=2"]) == 0
    recipe = load_recipe(["recipe=my.yaml"], ranks=2).recipe
    best = result.best.recipe
    assert recipe.batch.micro_batch_size == best.batch.micro_batch_size == 8
    assert (recipe.strategy, recipe.activation_checkpointing) == (
        best.strategy,
        best.activation_checkpointing,
    )
    assert recipe.lora.quantize == "nf4"
    assert recipe.data.kind == "chat"
    assert f"needs {bytes_as_text(result.best.plan.needed)} of 79.1 GiB" in text
    last = result.configurations[-1]  # the others do not fit, or are as written
    words = shlex.join(overrides_between(best, last.recipe))
    shown = f"#   {bytes_as_text(last.plan.needed)}, 31,000 tokens/s: {words}"
    assert [line for line in text.splitlines() if "tokens/s: " in line] == [shown]
    monkeypatch.setattr(
        search, "search_configurations", lambda *_, **__: example_search(fits=False)
    )
    monkeypatch.setattr(search, "smallest_that_fits", lambda recipe, _: recipe.lora)
    printed = written(capsys, "data=chat.jsonl", "gpu=h100", "gpus=8", status=3)
    assert "model with method=full does not fit" in printed.err
    shown = "  launcher new model=model data=chat.jsonl method=lora gpu=h100 gpus=8"
    assert printed.err.splitlines()[1:] == ["What fits:", shown]


def test_a_file_that_exists_is_not_replaced(here, capsys, monkeypatch):
    """It may have been edited."""
    monkeypatch.setattr(search, "search_configurations", lambda *_, **__: example_search())
    (here / "my.yaml").write_text("edited")
    words = ("data=chat.jsonl", "gpu=h100", "out=my.yaml")
    assert "out=my.yaml: the file exists; give another" in written(capsys, *words, status=2).err
    assert (here / "my.yaml").read_text() == "edited"
    written(capsys, *words, "--force")
    assert load_recipe(["recipe=my.yaml"], ranks=1).recipe.data.kind == "chat"


@pytest.mark.long
def test_the_recipe_is_valid_and_fits_as_its_comments_say(here, capsys):
    larger = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    (here / "model/config.json").write_text(json.dumps(CONFIG | larger))
    words = ("data=chat.jsonl", "method=lora", "gpu=h100", "gpus=4", "sequence_length=2048")
    text = written(capsys, *words).out
    (here / "my.yaml").write_text(text)
    assert main(["show", "recipe=my.yaml", "gpus=4"]) == 0
    recipe = load_recipe(["recipe=my.yaml"], ranks=4).recipe
    assert (recipe.data.kind, recipe.run.name) == ("chat", "model_lora_chat")
    assert recipe.lora is not None
    assert recipe.data.sequence_length == 2048
    assert f"# launcher new model=model {' '.join(words[:2])} gpu=h100" in text
    machine = known_machine("h100", nodes=1, gpus_per_node=4)
    compiled = recipe.model.compile == "auto"
    model = dataclasses.replace(recipe.model, compile=compiled)
    plan = make_plan(dataclasses.replace(recipe, model=model), machine)
    stated = re.search(r"A GPU needs ([\d.]+) GiB of 79.1 GiB", text)[1]
    assert float(stated) == pytest.approx(plan.needed / 2**30, abs=0.06)
    others = re.findall(r"^#   [\d.]+ GiB, [\d,]+ tokens/s: (.+)", text, re.MULTILINE)
    assert others
    for other in others:
        load_recipe(["recipe=my.yaml", *other.split()], ranks=4)


@pytest.mark.long
def test_keys_of_a_recipe_name_the_model_and_the_data(here, capsys):
    assert main(["new", "model=model", "data=chat.jsonl", "gpu=t4"]) == 0
    text = capsys.readouterr().out
    assert text == written(capsys, "data=chat.jsonl", "gpu=t4").out
    assert main(["new", "gpu=t4"]) == 2
    assert (
        capsys.readouterr().err
        == "command line: missing; give model=MODEL data=DATA, or from=FILE\n"
    )


@pytest.mark.slow
def test_pairs_need_the_method_dpo(here, capsys):
    arguments = ("data=two words.jsonl", "gpu=h100", "gpus=1", "sequence_length=256")
    refused = written(capsys, *arguments, status=2).err
    assert "method=dpo" in refused
    (here / "my.yaml").write_text(written(capsys, *arguments, "method=dpo").out)
    recipe = load_recipe(["recipe=my.yaml"], ranks=1).recipe
    assert recipe.data.kind == "preference"
    assert recipe.data.train == ("two words.jsonl",)
    refused = written(capsys, "data=chat.jsonl", "gpu=h100", "method=dpo", status=2).err
    assert "method=dpo needs chosen and rejected" in refused


@pytest.mark.long
def test_where_nothing_fits_it_says_what_does(here, capsys, monkeypatch):
    """Long sequences in little memory: shorter ones fit."""

    def small(gpu, **options):
        return known_machine(gpu, **options | {"memory": 800 * 2**20})

    monkeypatch.setattr(plan.machines, "known_machine", small)
    long = ("data=chat.jsonl", "gpu=h100", "gpus=1", "sequence_length=262144")
    printed = written(capsys, *long, status=3)
    assert printed.out == ""
    assert "model with method=full does not fit: each of 1 H100 of 800.0 MiB needs" in printed.err
    shorter = re.search(r"^  launcher (new .*sequence_length=\d+)$", printed.err, re.MULTILINE)[1]
    assert main(shorter.split()) == 0


def test_unknown_models_data_and_gpus_are_refused(here, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (here / "rows.txt").write_text(json.dumps(CHAT))
    for words, problem in (
        (["model=Qwen/Qwen3-8C", "data=chat.jsonl", "gpu=h100"], "did you mean Qwen/Qwen3-8B?"),
        (["model=model", "data=none.jsonl", "gpu=h100"], "none.jsonl"),
        (["model=model", "data=rows.txt", "gpu=h100"], "rows.txt: its lines are JSON objects"),
        (["model=model", "data=chat.jsonl", "gpu=h1000"], "gpu=h1000: is not known"),
        (["model=model", "data=chat.jsonl", "gpu=h100", "method=sft"], "method"),
        (["data=chat.jsonl", "gpu=h100"], "model"),
    ):
        assert main(["new", *words]) == 2
        assert problem in capsys.readouterr().err


def test_weights_that_cannot_be_read_are_refused(here, capsys):
    """A recipe was written, which `launcher train` refused."""
    for method in ("bitsandbytes", "awq", "gptq"):
        config = CONFIG | {"quantization_config": {"quant_method": method}}
        (here / "model/config.json").write_text(json.dumps(config))
        refused = written(capsys, "data=chat.jsonl", "gpu=h100", status=2)
        assert f"model: the weights are quantized as {method}; FP8" in refused.err
        assert refused.out == ""


@pytest.mark.long
def test_a_model_that_cannot_be_packed(here, capsys):
    config = {
        "model_type": "bloom",
        "vocab_size": 300,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 4,
    }
    (here / "model/config.json").write_text(json.dumps(config))
    text = written(capsys, "data=chat.jsonl", "gpu=h100", "gpus=1", "sequence_length=256").out
    (here / "my.yaml").write_text(text)
    assert load_recipe(["recipe=my.yaml"], ranks=1).recipe.data.packing is False


@pytest.mark.parametrize(
    "config",
    [
        CONFIG | {"max_position_embeddings": 512},
        {"model_type": "qwen3_vl", "text_config": CONFIG | {"max_position_embeddings": 512}},
        {"model_type": "gpt2", "n_positions": 512},
        {"model_type": "openai-gpt"},  # whose 512 are those of its class
    ],
    ids=["llama", "qwen3_vl", "gpt2", "openai-gpt"],
)
def test_a_model_with_few_positions(here, capsys, monkeypatch, config):
    """The default length was refused: more than the positions of the model."""
    (here / "model/config.json").write_text(json.dumps(config))
    monkeypatch.setattr(search, "search_configurations", lambda *_, **__: example_search())
    text = written(capsys, "data=chat.jsonl", "gpu=h100").out
    assert "  sequence_length: 512  #" in text


def test_a_machine_without_gpus_is_offered_what_the_command_takes(here, capsys, monkeypatch):
    monkeypatch.setattr(plan, "detect_gpus", lambda: None)
    refused = written(capsys, "data=chat.jsonl", "gpus=8", status=2).err
    assert "no GPU given; give one of a100" in refused
    assert "gpu_memory" not in refused


@pytest.mark.slow
def test_a_machine_without_gpus_gets_a_recipe_for_its_cpus(here, capsys, monkeypatch):
    monkeypatch.setattr(plan, "detect_gpus", lambda: None)
    out, note = written(capsys, "data=chat.jsonl", "sequence_length=64")
    assert "This machine has no GPUs: planned for its CPUs. For GPUs give gpu=h100" in note
    (here / "my.yaml").write_text(out)
    recipe = load_recipe(["recipe=my.yaml"], ranks=1).recipe
    assert (recipe.run.device, recipe.strategy.kind, recipe.model.compile) == ("cpu", "ddp", False)


def test_what_fits_with_offload_only_names_the_host_memory_and_another_method(
    here, capsys, monkeypatch
):
    result = example_search()
    offload = dataclasses.replace(result.best.recipe.strategy, cpu_offload=CpuOffload())
    recipe = dataclasses.replace(result.best.recipe, strategy=offload)
    best = dataclasses.replace(result.best, recipe=recipe)
    offloaded = dataclasses.replace(result, best=best)
    monkeypatch.setattr(search, "search_configurations", lambda *_, **__: offloaded)
    note = written(capsys, "data=chat.jsonl", "gpu=h100", "gpus=2").err
    host = bytes_as_text(best.plan.host.total)
    assert (
        "note: model with method=full fits with CPU offload only, which is slow: by plan a " in note
    )
    assert f"node needs {host} of host memory" in note
    assert "  launcher new model=model data=chat.jsonl method=lora gpu=h100 gpus=2\n" in note


@pytest.mark.parametrize("pictures", [["a.png"], []])
def test_rows_with_a_column_of_images_get_the_section(tmp_path, pictures):
    file = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file.write_text(json.dumps({"messages": turns, "images": pictures}) + "\n")
    kind, images = new._kind(str(file), "full")
    machine = known_machine("h100", nodes=1, gpus_per_node=1)
    keys = new.Wanted("a/b", str(file), kind, "full", 64, images).keys(machine)
    assert ("images.train" in keys) is bool(pictures)
